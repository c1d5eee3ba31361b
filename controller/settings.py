"""Settings of a load session."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """How a load is steered.

    quality_floor: the lowest level that may be fetched where there is a choice.
    max_in_flight: fetches open at once; few, so that later decisions can still change.
    compute_workers: 1: decoding and recomputing take turns; 2: one decode may run beside one recomputation.
    merge_chunks: chunks of one forward pass at most; few, so that the meeting point can still move.
    stall_s: seconds without a byte after which the link counts as dead until one comes.
    replan_s: seconds for which a plan is used again, so that planning a long prompt does not crowd out the loading.
    reserve_s: seconds of the deadline that plans leave unused, for what no model foresees.
    cancel_margin: a fetch is given up for recomputation where it would take that many times as long.
    """

    quality_floor: int
    max_in_flight: int = 4
    compute_workers: int = 1
    merge_chunks: int = 4
    stall_s: float = 0.25
    replan_s: float = 0.02
    reserve_s: float = 0.02
    cancel_margin: float = 1.5

    def __post_init__(self) -> None:
        """Refuse settings under which no load would end."""
        if self.quality_floor < 0 or self.max_in_flight < 1 or self.merge_chunks < 1:
            msg = "quality_floor must be at least 0, max_in_flight and merge_chunks at least 1"
            raise ArgumentError(msg)
        if self.compute_workers not in (1, 2):
            msg = f"compute_workers must be 1 or 2, got {self.compute_workers}"
            raise ArgumentError(msg)
        if not (self.stall_s > 0 and self.cancel_margin >= 1 and min(self.reserve_s, self.replan_s) >= 0):
            msg = "stall_s must be above 0, cancel_margin at least 1, reserve_s and replan_s at least 0"
            raise ArgumentError(msg)
