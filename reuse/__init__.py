"""Decoded caches to one linked prompt cache."""

from kvwire.reuse.link import LinkedPrompt, block_mask, link, moved

__all__ = ["LinkedPrompt", "block_mask", "link", "moved"]
