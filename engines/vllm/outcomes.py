"""What became of a request's loads, on its way from the workers to the scheduler, which tells the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoadOutcome:
    """One load of a request."""

    number: int  # of the load, among the request's; a preempted request has several
    loaded: int  # tokens whose rows are in the pages
    lost: int  # tokens that were promised and are computed
    level: int = -1  # the lowest level of any chunk that was loaded; -1: none, or the rows were in memory
    bytes: int = 0  # received
    trouble: str = ""  # what went wrong, in words

    def joined(self, other: LoadOutcome) -> LoadOutcome:
        """The same load, as another worker saw it: its heads are lost where any worker lost them."""
        return LoadOutcome(
            self.number, min(self.loaded, other.loaded), max(self.lost, other.lost), min(self.level, other.level),
            self.bytes + other.bytes, self.trouble or other.trouble,
        )  # fmt: skip


class RequestOutcome:
    """All loads of a request."""

    def __init__(self) -> None:
        """None yet."""
        self._loads: dict[int, LoadOutcome] = {}

    def add(self, outcome: LoadOutcome) -> None:
        """Take in what a worker tells."""
        known = self._loads.get(outcome.number)
        self._loads[outcome.number] = outcome if known is None else known.joined(outcome)

    def report(self) -> dict[str, Any]:
        """What the client is told."""
        loads = list(self._loads.values())
        if not loads:
            return {}
        levels = [load.level for load in loads if load.level >= 0]
        told: dict[str, Any] = {
            "loaded_tokens": sum(load.loaded for load in loads),
            "lost_tokens": sum(load.lost for load in loads),
            "bytes": sum(load.bytes for load in loads),
        }
        if levels:
            told["level"] = min(levels)
        if trouble := next((load.trouble for load in loads if load.trouble), ""):
            told["trouble"] = trouble
        return told
