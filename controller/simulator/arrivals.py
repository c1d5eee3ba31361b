"""Loads that come into a simulated world, and what goes wrong there."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from ..documents import DocumentPlanInput
    from ..repair import RepairOption
    from ..settings import Goal


@dataclass(frozen=True)
class LoadArrival:
    """A load that comes in.

    Attributes:
        at: Instant of the asking.
        documents: Each with its variants.
        goal: What is wanted, and by when.
        query_tokens: Length of the question.
        index_s: Until indexes are known.
        leaves_s: Seconds after which nobody waits for it any more.
        repair: What repairing its links may take and gives; None: they stay as they are.
        attention: What the question attends to, see ``Looked``; empty: nobody looks.
        links: Tokens that are computed behind each document, besides the question; empty: none.
    """

    at: float
    documents: tuple[tuple[DocumentPlanInput, ...], ...]
    goal: Goal
    query_tokens: int = 32
    index_s: float | None = None
    leaves_s: float = inf
    repair: RepairOption | None = None
    attention: tuple[tuple[float, ...], ...] = ()
    links: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trouble:
    """What goes wrong, by chance.

    Attributes:
        fail: Probability of a fetch to break off.
        stall: Probability of a fetch to stand still before its first byte.
        stall_s: Seconds of that.
        corrupt: Probability of a fetch to be undecodable.
        noise: Sigma of the logarithm of compute times.
    """

    fail: float = 0.0
    stall: float = 0.0
    stall_s: float = 0.5
    corrupt: float = 0.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Refuse chances that are none."""
        chances = all(0 <= chance <= 1 for chance in (self.fail, self.stall, self.corrupt))
        if not (chances and 0 <= self.stall_s < inf and 0 <= self.noise < inf):
            raise ArgumentError(
                f"fail, stall and corrupt are chances from 0 to 1, stall_s and noise finite and at least 0, got {self}"
            )
