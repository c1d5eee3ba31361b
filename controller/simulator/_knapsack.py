"""Lower bounds of two knapsack problems, each by dynamic programming and by linear relaxation, whichever is higher."""

from __future__ import annotations

from functools import cached_property
from math import inf
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_CUTS = 100  # of the space of prices, for each pair of resources
_CLOSE = 1e-5  # of the bound, by which it may be lower than the highest
_ROUNDS = 3  # of leaving options out, each of which may show that others cannot be either
_FEW = 8  # items
_SLACK = 1e-9  # relative; for rounding
_LARGEST = 1e4  # of prices worth trying, in objective per budget


def _cells(items: int) -> int:
    """Cells of a budget: rounding down loses at most one for each item."""
    return min(max(32 * items, 2048), 16384)


class Savings:
    """The most that can be saved, for every budget: each item may be bought once and saves of several kinds.

    Kinds are bounded independently of each other.
    """

    def __init__(self, cost: Floats, saved: Floats, most: float) -> None:
        """Prepare budgets from 0 to ``most``."""
        self._cells = _cells(len(cost))
        self._cell = max(most, 1e-12) / self._cells
        # Costs are rounded down: every true choice stays possible, at no less than it saves.
        steps = np.minimum(np.floor(cost / self._cell * (1 - 1e-12)), self._cells + 1).astype(np.int64)
        self._steps = steps
        self._best = np.zeros((saved.shape[1], self._cells + 1))
        self._bought = np.zeros((len(cost), self._cells + 1), dtype=np.bool_)
        for item, step in enumerate(steps.tolist()):
            if step <= self._cells:
                with_it = self._best[:, : self._cells + 1 - step] + saved[item][:, None]
                self._bought[item, step:] = with_it[0] > self._best[0, step:]
                np.maximum(self._best[:, step:], with_it, out=self._best[:, step:])
        self._hulls = [_hull(cost, saved[:, kind]) for kind in range(saved.shape[1])]

    def most(self, budget: float) -> Floats:
        """The most that can be saved of each kind, ``[kinds]``."""
        linear = np.array([np.interp(budget, costs, gains) for costs, gains in self._hulls])
        return np.asarray(np.minimum(self._best[:, self._index(budget)], linear), dtype=np.float64)

    def choice(self, budget: float) -> NDArray[np.bool_]:
        """Items that save the most of the first kind, ``[items]``, by dynamic programming."""
        at = self._index(budget)
        chosen = np.zeros(len(self._steps), dtype=np.bool_)
        for item in range(len(self._steps) - 1, -1, -1):
            if self._bought[item, at]:
                chosen[item] = True
                at -= int(self._steps[item])
        return chosen

    def _index(self, budget: float) -> int:
        return int(min(max(budget, 0.0) / self._cell * (1 + 1e-12), self._cells))


def _hull(cost: Floats, saved: Floats) -> tuple[Floats, Floats]:
    order = np.argsort(-saved / cost, kind="stable")
    zero = np.zeros(1)
    return np.concatenate([zero, np.cumsum(cost[order])]), np.concatenate([zero, np.cumsum(saved[order])])


class Choices:
    """Choices of one option for each item, each resource within its budget, and the least sum of values among them.

    Prices of the resources that make the Lagrangian bound highest mix the resources into one; dynamic programming
    over that one gives a bound that is at least as high, but for its rounding.
    """

    def __init__(self, value: Floats, uses: Floats, budgets: Floats) -> None:
        """Leave out what cannot be chosen."""
        least = np.where(np.isfinite(value), uses, inf).min(axis=2).sum(axis=1)
        self.fits = bool((least <= budgets * (1 + _SLACK)).all())
        budgets = np.maximum(budgets, least) * (1 + _SLACK)
        self._value = value = _possible(value, uses, budgets)
        there = np.isfinite(value)
        tight = np.where(there, uses, 0.0).max(axis=2).sum(axis=1) > budgets
        self._parts = np.where(there, uses[tight], 0.0) / np.maximum(budgets[tight], 1e-300)[:, None, None]

    @cached_property
    def _priced(self) -> tuple[Floats, float]:
        return _prices(self._value, self._parts)

    @property
    def bound(self) -> float:
        """The least sum of values by the linear relaxation alone, which takes a fraction of the time."""
        return self._priced[1] if len(self._parts) else float(self._value.min(axis=1).sum())

    def least(self) -> tuple[float, NDArray[np.int64]]:
        """Bound the least sum of values."""
        if not len(self._parts):
            return self.bound, self._value.argmin(axis=1)
        # Counted above each item's least use: only the rest of a budget is there to choose about.
        prices, bound = self._priced
        found = [_mixed(self._value, self._parts, mix) for mix in _mixes(prices, len(self._value))]
        most, choice = max(found, key=lambda each: each[0])
        return max(most, bound), choice


def least_value(ways: Iterable[Choices]) -> tuple[float, NDArray[np.int64]]:
    """Bound the least sum of values over all choices of several kinds."""
    first, *others = sorted(ways, key=attrgetter("bound"))
    best = first.least()
    for each in others:
        if each.bound >= best[0]:
            break
        best = min(best, each.least(), key=itemgetter(0))
    return best


def _possible(value: Floats, uses: Floats, budgets: Floats) -> Floats:
    """Values without the options that leave too little for the other items' least uses."""
    for _ in range(_ROUNDS):
        least = np.where(np.isfinite(value), uses, inf).min(axis=2)
        room = budgets[:, None] - least.sum(axis=1)[:, None] + least
        fits = (uses <= room[:, :, None]).all(axis=0) & np.isfinite(value)
        # Where nothing fits, rounding or a budget that its own least uses exceed is at work: such items stay.
        fits |= ~fits.any(axis=1)[:, None]
        value = np.where(fits, value, inf)
    return value


def _mixes(prices: Floats, items: int) -> list[Floats]:
    """The prices' own mix; for few items, where others may bound higher, also each resource alone and half-way."""
    own = prices / prices.sum()
    if len(prices) == 1 or items > _FEW:
        return [own]
    alone = np.eye(len(prices))
    return [own, *alone, *((own + alone) / 2)]


def _prices(value: Floats, parts: Floats) -> tuple[Floats, float]:
    """Prices of the resources, budgets counting 1, at which the Lagrangian bound is highest, and that bound.

    The bound is concave in the prices, with kinks: the ellipsoid method with deep cuts (Bland, Goldfarb and Todd 1981,
    Operations Research 29(6)) closes in on its top from any start, at any ratio of prices.
    """
    unit = float(np.where(np.isfinite(value), value, 0.0).max(axis=1).sum()) or 1.0
    kinds, rows = len(parts), np.arange(len(value))
    centre = np.full(kinds, _LARGEST * unit / 2)
    axes = np.eye(kinds) * np.sqrt(kinds) * centre[0]  # a ball around all prices worth trying
    best, best_prices = -inf, centre
    for _ in range(_CUTS * kinds**2):
        if (centre < 0).any():
            uphill, lacks = -np.minimum(np.sign(centre), 0), -float(centre.min())
            uphill = np.where(centre == centre.min(), uphill, 0.0)
        else:
            priced = np.tensordot(centre, parts, axes=1) + value
            chosen = priced.argmin(axis=1)
            bound = float(priced[rows, chosen].sum() - centre.sum())
            if bound > best:
                best, best_prices = bound, centre
            uphill, lacks = parts[:, rows, chosen].sum(axis=1) - 1, best - bound
        along = uphill @ axes
        reach = float(np.linalg.norm(along))
        if reach - lacks <= _CLOSE * abs(best):
            break
        centre, axes = _cut(centre, axes, along / reach, lacks / reach)
    return best_prices, best


def _cut(centre: Floats, axes: Floats, along: Floats, depth: float) -> tuple[Floats, Floats]:
    """The smallest ellipsoid around what a plane leaves of one: all that lies ``depth`` or more of a step further.

    An ellipsoid is the image of the unit ball under ``axes``, which no rounding makes anything else; ``along`` is the
    step's direction in that ball.
    """
    kinds, step = len(centre), axes @ along
    depth = min(depth, 1.0)
    moved = centre + (1 + kinds * depth) / (1 + kinds) * step
    if kinds == 1:
        return moved, axes * (1 - depth) / 2
    flatter = 2 * (1 + kinds * depth) / ((1 + kinds) * (1 + depth))
    rounder = kinds**2 * (1 - depth**2) / (kinds**2 - 1)
    return moved, np.sqrt(rounder) * (axes - (1 - np.sqrt(max(0.0, 1 - flatter))) * np.outer(step, along))


def _mixed(value: Floats, parts: Floats, mix: Floats) -> tuple[float, NDArray[np.int64]]:
    """Dynamic programming with one budget of 1 for the weighted sum of the resources; ``mix`` sums to 1."""
    use = np.where(np.isfinite(value), np.tensordot(mix, parts, axes=1), inf)
    # Counted above each item's least use, which is no choice: only what is left of the budget is cut into cells.
    least = use.min(axis=1)
    cells = _cells(len(value))
    cell = max(1.0 - float(least.sum()), 1e-12) / cells
    steps = np.minimum(np.floor((use - least[:, None]) / cell * (1 - 1e-9)), cells + 1).astype(np.int64)
    best = np.zeros(cells + 1)
    chosen = np.zeros((len(value), cells + 1), dtype=np.int8)
    for item in range(len(value)):
        following = np.full(cells + 1, inf)
        for option in np.flatnonzero(steps[item] <= cells).tolist():
            step = int(steps[item, option])
            candidate = best[: cells + 1 - step] + value[item, option]
            better = candidate < following[step:]
            np.copyto(following[step:], candidate, where=better)
            chosen[item, step:][better] = option
        best = following
    at, choice = cells, np.zeros(len(value), dtype=np.int64)
    for item in range(len(value) - 1, -1, -1):
        choice[item] = chosen[item, at]
        at -= int(steps[item, choice[item]])
    return float(best[cells]), choice
