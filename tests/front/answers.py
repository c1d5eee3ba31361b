"""What tests read out of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def troubles(misses: Sequence[str]) -> list[str]:
    """Misses, without what was given up because the machine was too busy to be quick."""
    return [miss for miss in misses if "given up: " not in miss or "its last attempt: " in miss]
