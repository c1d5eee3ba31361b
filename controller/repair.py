"""The third thing that can be done for a prompt: computing some rows anew, so that documents see each other.

Errors of coding and of linking add up, as KL divergences do, so that finer bytes and repaired rows are weighed on one
scale: both take time before the first token, bytes that of the link, rows that of the engine.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil, exp, isfinite, log, log10
from typing import TYPE_CHECKING, Literal

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Begins = Literal["closing", "looked", "documents"]
LEAST_ERROR = 1e-12
"""120 dB: errors below count as this."""


def decibels(error: float) -> float:
    """An error as quality; at most 120 dB."""
    return -10 * log10(max(error, LEAST_ERROR))


@dataclass(frozen=True, kw_only=True)
class RepairOption:
    """What repairing a prompt may take, and what it gives.

    Attributes:
        least: Share of the prompt's rows that is computed anew in any case, 0 to 1.
        most: Share beyond which nobody wants to go, ``least`` to 1.
        looks: Rows are chosen by a pass of the question over the prompt.
        scan: Share of a prefill that choosing rows takes besides, where all of them run through the first layers.
        error: Of documents that do not see each other, on the scale of ``DocumentPlanInput.errors``.
        shares: Shares that were measured, growing, from 0 on.
        left: Of ``error``, what is left at each of them, 1 to 0, never growing.
        begins: When rows may be computed document by document, while later ones are fetched: ``documents``, as soon as
            documents are as they stay, since the rows are known beforehand; ``looked``, likewise once the question has
            looked at all of them; ``closing``, never.
        whole: The first document's rows count, too: something stands before it. They are computed at the end.
        weighs_text: What is fetched counts with the error of links where it is weighed against text, which sees the
            documents before it. It costs the engine a prefill's time, and so takes somebody's word for the error.
    """

    least: float = 0.0
    most: float = 0.0
    looks: bool = True
    scan: float = 0.0
    error: float = 0.0
    shares: tuple[float, ...] = (0.0, 1.0)
    left: tuple[float, ...] = (1.0, 0.0)
    begins: Begins = "closing"
    whole: bool = False
    weighs_text: bool = False

    def __post_init__(self) -> None:
        """Refuse shares and errors that cannot be."""
        if not (0 <= self.least <= self.most <= 1 and 0 <= self.scan <= 1):
            msg = f"the shares of rows to repair lie between 0 and 1, got {self.least} to {self.most}, {self.scan}"
            raise ArgumentError(msg)
        if not (isfinite(self.error) and self.error >= 0):
            raise ArgumentError(f"the error of links must be finite and at least 0, got {self.error}")
        grows = len(self.shares) == len(self.left) >= 1 and all(a < b for a, b in pairwise(self.shares))
        falls = all(0 <= b <= a <= 1 for a, b in pairwise((1.0, *self.left)))
        if not (grows and falls and self.shares[0] == 0 and self.shares[-1] <= 1):
            msg = f"what repair leaves is given at growing shares from 0 on, got {self.left} at {self.shares}"
            raise ArgumentError(msg)

    def error_left(self, share: float) -> float:
        """The error of links once a share of rows was repaired."""
        at = bisect_right(self.shares, share)
        if at == len(self.shares):
            return self.error * self.left[-1]
        low, high = self.shares[at - 1], self.shares[at]
        part = (share - low) / (high - low)
        return self.error * (self.left[at - 1] + part * (self.left[at] - self.left[at - 1]))

    def work(self, share: float, tokens: int, first: int, front: int = 0) -> int:
        """Rows that a repair takes as much as, choosing them included."""
        if not share:
            return 0
        rows = rows_of(share, tokens, first, front)
        return rows + ceil(self.scan * (tokens - rows))

    def candidates(self) -> list[float]:
        """Shares to weigh against each other, growing: those that were measured, and the bounds."""
        return sorted({self.least, self.most, *(share for share in self.shares if self.least < share < self.most)})

    def best(self, left_s: float, closing_s: Callable[[float], float], coding: Sequence[tuple[float, float]]) -> float:
        """Choose the share with the least error in time; of those that are as good, the smallest."""
        errors: dict[float, float] = {}
        for share in self.candidates():
            spare_s = left_s - closing_s(share)
            if spare_s < coding[0][0]:
                break
            errors[share] = _error_after(spare_s, coding) + self.error_left(share)
        return min(errors, key=lambda share: errors[share], default=self.least)

    def most_within(self, left_s: float, closing_s: Callable[[float], float], most: float) -> float:
        """Choose the greatest share that is in time."""
        able = (share for share in self.candidates() if share <= most and closing_s(share) <= left_s)
        return max(able, default=self.least)


MOST = 0.3
"""Share of rows beyond which ``auto`` does not go: little is gained there (benchmarks/reuse.py)."""
UNMEASURED = RepairOption(
    most=MOST, error=0.1, shares=(0.0, 0.05, 0.15, 0.3, 1.0), left=(1.0, 0.25, 0.15, 0.1, 0.0), begins="looked"
)
"""Where nobody measured: links count like a coarse level, and repair gives what it gave on the models of
benchmarks/reuse.py, rounded down."""


def unmeasured(repair: Literal["none", "auto", "all"] | float) -> RepairOption | None:
    """What repairing links takes and gives where nobody measured the model, and attention chooses the rows."""
    if repair == "none":
        return None
    if repair == "auto":
        return UNMEASURED
    share = 1.0 if repair == "all" else float(repair)
    begins: Begins = "documents" if repair == "all" else "looked"
    return replace(UNMEASURED, least=share, most=share, looks=repair != "all", weighs_text=share > 0, begins=begins)


def rows_of(share: float, tokens: int, first: int, front: int = 0) -> int:
    """Rows that a share of a prompt is."""
    left = tokens - max(0, front - first)
    return tokens if share == 1 else min(ceil(share * left), max(0, left - first))


def _error_after(seconds: float, coding: Sequence[tuple[float, float]]) -> float:
    """Error of coding after some time: its logarithm is taken to fall evenly from level to level."""
    before = coding[0]
    for at in coding[1:]:
        if seconds < at[0]:
            part = (seconds - before[0]) / max(at[0] - before[0], 1e-12)
            low, high = log(max(at[1], LEAST_ERROR)), log(max(before[1], LEAST_ERROR))
            return exp(high + part * (low - high))
        before = at
    return before[1]


class RepairProgress:
    """How far the rows of a load are.

    Attributes:
        share: Of the rows, those that are computed in all; None before the first job begins, fixed from then on.
        front: What the load's front was when the first job of a share began, fixed from then on; None before.
        refused: Documents that would have been next when there was no time for it beside the link.
    """

    def __init__(self, option: RepairOption | None, links: Sequence[int] = ()) -> None:
        """Begin nothing."""
        self._begins: Begins = option.begins if option else "closing"
        self._links = links
        self.share: float | None = None
        self.front: int | None = None
        self.documents = self.refused = 0  # how many documents from the prompt's beginning on have theirs
        self.left: int | None = None  # rows of the share that no job has computed; None before the first one has ended
        self.is_running = False  # A job is under way

    def may_begin(self, share: float, *, has_looked: bool) -> bool:
        """Whether documents may be repaired before the last chunk is here."""
        begins = self._begins == "documents" or (self._begins == "looked" and has_looked)
        return bool(self._links) or (share > 0 and begins)

    @property
    def wants_order(self) -> bool:
        """Whether documents are wanted in the prompt's order, since their rows are known before any is here."""
        return bool(self._links) or self._begins == "documents"

    def stop(self) -> None:
        """Begin no more jobs: one failed."""
        self._begins, self._links = "closing", ()

    def rows_left(self, rows: int, share: float) -> int:
        """Rows of a share that are to be computed after the last chunk."""
        if self.left is None or not self.share:
            return rows
        return min(rows, ceil(self.left * min(1.0, share / self.share)))


def expected_rows(
    share: float, tokens: Sequence[int], front: int, first: int, last: int, links: Sequence[int] = ()
) -> int:
    """Rows that some documents have of a share, were they spread evenly, or of link tokens where there are some."""
    if links:
        return sum(links[first:last])
    ends = [0, *accumulate(tokens)]
    seen = 0 if share == 1 else max(front, tokens[0])
    open_ = ends[-1] - seen
    mine = max(0, ends[last] - max(ends[first], seen))
    return ceil(rows_of(share, ends[-1], tokens[0], front) * mine / open_) if open_ else 0


def beside_link(
    arrived_s: Sequence[float], decode_s: Sequence[float], job_s: Callable[[int, int], float], workers: int
) -> int:
    """How many documents of a prompt would be repaired while the rest of it is on its way."""
    done, lane_s, free_s = 0, 0.0, 0.0
    for number, (here_s, work_s) in enumerate(zip(arrived_s[:-1], decode_s, strict=False)):
        valid_s = lane_s = max(lane_s if workers > 1 else free_s, here_s) + work_s
        begins_s = free_s = max(free_s, valid_s)
        seconds = job_s(done, number + 1)
        rest_s = sum(decode_s[number + 1 :]) if workers == 1 else 0.0
        if 0 < seconds <= arrived_s[-1] - begins_s - rest_s:
            done, free_s = number + 1, begins_s + seconds
    return done
