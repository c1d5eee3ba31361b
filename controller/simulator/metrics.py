"""What became of loads beside the best that was possible, and figures over many of them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from ..repair import decibels

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ..settings import Goal
    from .loads import Outcome
    from .offline_optimum import Optimum


@dataclass(frozen=True)
class Scored:
    """One load beside its bound, see ``optimum``.

    Attributes:
        goal: Of the load.
        outcome: What came of it.
        bound: What nobody can better.
    """

    goal: Goal
    outcome: Outcome
    bound: Optimum

    @property
    def missed(self) -> bool:
        """Whether the first token came after the deadline, or never."""
        return not self.outcome.in_time

    @property
    def avoidable(self) -> bool:
        """Whether it was late although the bound is in time."""
        return self.missed and self.bound.in_time

    @property
    def late(self) -> float:
        """Time to the first token over the bound's, minus 1; infinite for a load that failed."""
        return inf if self.outcome.failed else self.outcome.ttft_s / self.bound.ttft_s - 1

    @property
    def regret(self) -> float | None:
        """What the goal's own figure lost against the bound, as a share of it; None where there is nothing to compare.

        ``earliest``: as ``late``. ``quality``: of the decibels, where both are in time. ``cheapest``: bytes over the
        bound's, minus 1, where both are in time. Misses count apart.
        """
        if self.goal.objective == "earliest":
            return None if self.outcome.failed else self.late
        if self.missed or not self.bound.in_time:
            return None
        if self.goal.objective == "cheapest":
            return self.outcome.received / self.bound.bytes - 1 if self.bound.bytes else None
        best = decibels(self.bound.error)
        return 1 - decibels(self.outcome.error) / best if best > 0 else None


@dataclass(frozen=True)
class Summary:
    """Figures over loads, None where there is no load to take them from.

    Attributes:
        loads: How many.
        failed: Loads without a first token.
        ttft_s: Quantiles 0.1, 0.5, 0.9 and 0.99 of the loads that did not fail.
        missed: Deadlines.
        avoidable: Those of them that the bound keeps.
        missed_by_bound: Deadlines that it misses itself.
        quality_db: Of the mean error, over loads in time.
        error: Mean over loads in time.
        received: Bytes over the link.
        wasted: Bytes that are not in any prompt.
        recomputed: Share of tokens.
        regret: Quantiles 0.5 and 0.9, see ``Scored.regret``.
        late: The median over loads whose deadline nobody could keep, of how much later than the bound they were.
    """

    loads: int
    failed: int
    ttft_s: tuple[float, float, float, float] | None
    missed: int
    avoidable: int
    missed_by_bound: int
    quality_db: float | None
    error: float | None
    received: int
    wasted: int
    recomputed: float
    regret: tuple[float, float] | None
    late: float | None

    @classmethod
    def of(cls, runs: Iterable[Scored]) -> Summary:
        """Count up."""
        scored = list(runs)
        if not scored:
            raise ArgumentError("figures need at least one load")
        outcomes = [run.outcome for run in scored]
        ended = [outcome.ttft_s for outcome in outcomes if not outcome.failed]
        errors = [outcome.error for outcome in outcomes if outcome.in_time]
        regrets = [run.regret for run in scored if run.regret is not None]
        late = [run.late for run in scored if not run.bound.in_time and isfinite(run.late)]
        error = float(np.mean(errors)) if errors else None
        tokens = sum(outcome.recomputed + sum(outcome.levels) for outcome in outcomes)
        low, half, high, top = _quantiles(ended, (0.1, 0.5, 0.9, 0.99))
        median, most = _quantiles(regrets, (0.5, 0.9))
        return cls(
            loads=len(scored),
            failed=sum(outcome.failed for outcome in outcomes),
            ttft_s=(low, half, high, top) if ended else None,
            missed=sum(run.missed for run in scored),
            avoidable=sum(run.avoidable for run in scored),
            missed_by_bound=sum(not run.bound.in_time for run in scored),
            quality_db=None if error is None else decibels(error),
            error=error,
            received=sum(outcome.received for outcome in outcomes),
            wasted=sum(outcome.wasted for outcome in outcomes),
            recomputed=sum(outcome.recomputed for outcome in outcomes) / max(tokens, 1),
            regret=(median, most) if regrets else None,
            late=float(np.median(late)) if late else None,
        )


def _quantiles(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(values, shares)] if values else [0.0] * len(shares)
