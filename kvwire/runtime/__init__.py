"""Loads documents of a corpus into an engine's cache, and encodes them."""
