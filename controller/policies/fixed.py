"""Every chunk at one level, in prompt order; what cannot be had so is recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from .sequential import sequential_plan

if TYPE_CHECKING:
    from ..snapshot import Plan, PlanRequest


@dataclass(frozen=True)
class Fixed:
    """Fetches ``level`` of everything, or the finest that a document has where it has fewer.

    Attributes:
        level: That is fetched.
        preemptible: See ``Policy.preemptible``.
    """

    level: int
    preemptible: bool = False

    def __post_init__(self) -> None:
        """Refuse a level that cannot be."""
        if self.level < 0:
            msg = f"a level is 0 or more, got {self.level}"
            raise ArgumentError(msg)

    @property
    def name(self) -> str:
        """For tables."""
        return f"level-{self.level}"

    def plan(self, request: PlanRequest) -> Plan:
        """Fetch whatever can be."""
        levels = request.chunks.level_for(self.level)
        return sequential_plan(request, levels, np.flatnonzero(levels >= 0).tolist(), f"always level {self.level}")
