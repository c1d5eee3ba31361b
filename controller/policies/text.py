"""Everything from text, as without caches; what has no text is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.policies.base import RECOMPUTE
from kvwire.controller.policies.sequential import written

if TYPE_CHECKING:
    from kvwire.controller.policies.base import Plan, PlanRequest


@dataclass(frozen=True)
class Text:
    """Recomputes each document in one pass."""

    name: str = "text"
    gives_up: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        """Recompute whatever can be."""
        levels = np.where(request.chunks.can_text, RECOMPUTE, request.chunks.top)
        return written(request, levels, np.flatnonzero(levels >= 0).tolist(), "always text")
