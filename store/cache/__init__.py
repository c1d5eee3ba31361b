"""Tiers before a store: memory, local disk, remote."""
