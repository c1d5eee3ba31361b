"""Decoded caches to one linked prompt cache."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.reuse.assemble import LinkedPrompt, block_mask, link, moved

__all__ = [
    "LinkedPrompt",
    "block_mask",
    "link",
    "moved",
]

__getattr__ = lazy(
    __name__,
    {
        "kvwire.reuse.assemble": ("LinkedPrompt", "block_mask", "link", "moved"),
    },
)
