"""Ranges of a blob, fetched in parallel, retried and hedged."""
