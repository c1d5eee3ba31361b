"""Everything from text, as without caches; what has no text is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..snapshot import RECOMPUTE
from .sequential import sequential_plan

if TYPE_CHECKING:
    from ..snapshot import Plan, PlanRequest


@dataclass(frozen=True)
class TextOnly:
    """Recomputes each document in one pass.

    Attributes:
        name: For tables and logs.
        preemptible: See ``Policy.preemptible``.
    """

    name: str = "text"
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Recompute whatever can be."""
        levels = np.where(request.chunks.can_text, RECOMPUTE, request.chunks.top)
        return sequential_plan(request, levels, np.flatnonzero(levels >= 0).tolist(), "always text")
