"""Bandwidths at which a plan changes, found by bisection over the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from typing import TYPE_CHECKING, Literal

from kvwire import controller as ctl
from kvwire.controller.policies import RECOMPUTE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.whatif.situation import Forecast, PlanScenario

What = Literal["fetches", "fetches all", "beats text", "in time"]

SLOWEST, FASTEST = 1e3, 1e12
"""Bounds of the search, bytes per second."""
_PRECISION = 1e-3  # relative
_FIRST_STEP = 0.01  # in logarithms, away from the present bandwidth
_GROWTH = 1.5


@dataclass(frozen=True)
class BreakEven:
    """A bandwidth from which on a statement holds, by the policy's first plan.

    Attributes:
        what: ``fetches``: more than one chunk is fetched (one may be a probe); ``fetches all``: none is recomputed;
            ``beats text``: fetching all at ``level`` is faster than recomputing all; ``in time``: the deadline is met
            with ``level`` as the floor.
        level: Level of the statement; None for the first two.
        holds: From ``bandwidth`` on, always or never.
        bandwidth: Bytes per second, None where it holds always or never between ``SLOWEST`` and ``FASTEST``.
    """

    what: What
    level: int | None
    holds: Literal["from", "always", "never"]
    bandwidth: float | None


def find_break_evens(situation: PlanScenario) -> Iterator[BreakEven]:
    """Find all break-even points of a prompt."""
    yield _break_even("fetches", None, lambda b: len(situation.forecast(bandwidth=b).plan.order) > 1)
    yield _break_even("fetches all", None, lambda b: RECOMPUTE not in situation.forecast(bandwidth=b).levels.values())
    yield from _beating_text(situation)
    goal = situation.goal
    lowest = min(goal.floor, max(situation.finest, 0))
    for level in range(lowest, situation.finest + 1) if goal.deadline_s is not None else ():
        ceiling = None if goal.ceiling is None else max(level, goal.ceiling)
        with_floor = replace(situation.without_floors(), goal=replace(goal, floor=level, ceiling=ceiling))
        yield _break_even("in time", level, partial(_is_in_time, with_floor))


def _beating_text(situation: PlanScenario) -> Iterator[BreakEven]:
    text = tuple((_as_text(variants[0]),) for variants in situation.documents)
    blobs = tuple(tuple(map(_as_blob, variants)) for variants in situation.without_floors().documents)
    text_s = replace(situation, goal=ctl.Goal(), documents=text).forecast().plan.finish_s
    for level in situation.levels:
        only = replace(situation, goal=ctl.Goal(floor=level), documents=blobs)
        yield _break_even("beats text", level, partial(_is_sooner, only, text_s))


def find_unchanged(situation: PlanScenario, forecast: Forecast) -> tuple[float | None, float | None]:
    """Find how far the bandwidth may change before the first plan does."""

    def same(bandwidth: float) -> bool:
        return situation.forecast(bandwidth=bandwidth).levels == forecast.levels

    return _edge(same, situation.bandwidth, -1), _edge(same, situation.bandwidth, 1)


def _is_in_time(situation: PlanScenario, bandwidth: float) -> bool:
    return situation.forecast(bandwidth=bandwidth).plan.in_time


def _is_sooner(situation: PlanScenario, than_s: float, bandwidth: float) -> bool:
    return situation.forecast(bandwidth=bandwidth).plan.finish_s < than_s


def _as_text(document: ctl.DocumentPlanInput) -> ctl.DocumentPlanInput:
    return replace(document, fetch_bytes=(), errors=(), prefix_share=0.0) if document.has_text else document


def _as_blob(document: ctl.DocumentPlanInput) -> ctl.DocumentPlanInput:
    whole = document.has_blob and all(document.fetch_bytes)
    return replace(document, has_text=document.has_text and not whole)


def _break_even(what: What, level: int | None, holds: Callable[[float], bool]) -> BreakEven:
    """Find the bandwidth at which a statement becomes true."""
    if holds(SLOWEST):
        return BreakEven(what, level, "always", None)
    if not holds(FASTEST):
        return BreakEven(what, level, "never", None)
    return BreakEven(what, level, "from", _bisect(holds, SLOWEST, FASTEST))


def _bisect(holds: Callable[[float], bool], without: float, with_it: float) -> float:
    """A bandwidth at which ``holds`` is true, within precision of one at which it is false."""
    while abs(log(with_it / without)) > _PRECISION:
        middle = exp((log(without) + log(with_it)) / 2)
        without, with_it = (without, middle) if holds(middle) else (middle, with_it)
    return with_it


def _edge(same: Callable[[float], bool], bandwidth: float, direction: int) -> float | None:
    """Search one side in growing steps for the first bandwidth with another plan."""
    inside, step = bandwidth, _FIRST_STEP
    while True:
        outside = inside * exp(direction * step)
        if not SLOWEST <= outside <= FASTEST:
            return None
        if not same(outside):
            return _bisect(lambda b: not same(b), inside, outside)
        inside, step = outside, step * _GROWTH
