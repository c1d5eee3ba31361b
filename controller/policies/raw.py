"""Uncompressed caches: every chunk's tensors as they are, whose decode is a copy."""

from __future__ import annotations

from dataclasses import dataclass

from .fixed import Fixed


@dataclass(frozen=True)
class Raw(Fixed):
    """Fetches level 0 of documents whose only level is the cache itself, see ``simulator.sizes.raw_documents_for``.

    Attributes:
        level: The only one.
    """

    level: int = 0

    @property
    def name(self) -> str:
        """For tables."""
        return "raw"
