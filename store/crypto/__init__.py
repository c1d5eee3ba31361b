"""Encryption at rest: sealed blobs and the keys of tenants."""
