"""Decoded caches linked into one prompt cache."""
