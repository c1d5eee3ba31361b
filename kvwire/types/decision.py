"""The controller's decision for each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ChunkId:
    """A chunk of one of a prompt's documents.

    Attributes:
        document: Counted from 0 in prompt order.
        chunk: Counted from 0 in its document.
        load: Number of the load.
    """

    document: int
    chunk: int
    load: int = 0


@dataclass(frozen=True)
class Decision:
    """How one chunk gets into the prompt.

    Attributes:
        chunk: Which chunk.
        action: ``recompute`` from its text, or ``fetch`` levels 0..level.
        level: None: recomputed.
        reason: A few words for users and logs.
    """

    chunk: ChunkId
    action: Literal["recompute", "fetch"]
    level: int | None = None
    reason: str = ""
