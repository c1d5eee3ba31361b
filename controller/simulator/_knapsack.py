"""Lower bounds of two knapsack problems: by linear relaxation, and where there is one budget by dynamic programming."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_CUTS = 100  # of the space of prices, for each pair of resources
_CLOSE = 1e-5  # of the bound, by which it may be lower than the highest
_SLACK = 1e-9  # relative; for rounding
_CELLS = 8192  # of a budget: rounding costs down loses at most one for each item
_LARGEST = 1e4  # of prices worth trying, in objective per budget


class Savings:
    """The most that can be saved, for every budget: each item may be bought once and saves of several kinds.

    Kinds are bounded independently of each other, by dynamic programming and by buying items in part.
    """

    def __init__(self, cost: Floats, saved: Floats, most: float) -> None:
        """Prepare budgets from 0 to ``most``; cost ``[items]``, saved ``[items, kinds]``."""
        self._cell = max(most, 1e-12) / _CELLS
        # Costs are rounded down: every true choice stays possible, at no less than it saves.
        steps = np.minimum(np.floor(cost / self._cell * (1 - 1e-12)), _CELLS + 1).astype(np.int64)
        self._best = np.zeros((saved.shape[1], _CELLS + 1))
        for item, step in enumerate(steps.tolist()):
            if step <= _CELLS:
                with_it = self._best[:, : _CELLS + 1 - step] + saved[item][:, None]
                np.maximum(self._best[:, step:], with_it, out=self._best[:, step:])
        orders = (np.argsort(-gains / cost, kind="stable") for gains in saved.T)
        self._hulls = [
            (np.append(0.0, cost[order].cumsum()), np.append(0.0, gains[order].cumsum()))
            for order, gains in zip(orders, saved.T, strict=True)
        ]

    def most(self, budget: float) -> Floats:
        """The most that can be saved of each kind, ``[kinds]``."""
        at = int(min(max(budget, 0.0) / self._cell * (1 + 1e-12), _CELLS))
        linear = np.array([np.interp(budget, costs, gains) for costs, gains in self._hulls])
        return np.asarray(np.minimum(self._best[:, at], linear), dtype=np.float64)


def fits(value: Floats, uses: Floats, budgets: Floats) -> bool:
    """Whether each item's least use leaves every resource within its budget."""
    least = np.where(np.isfinite(value), uses, inf).min(axis=2).sum(axis=1)
    return bool((least <= budgets * (1 + _SLACK)).all())


def least_value(value: Floats, uses: Floats, budgets: Floats) -> float:
    """Bound the least sum of values of one option for each item, each resource within its budget.

    value: ``[items, options]``, infinite where an option is not there; uses: ``[resources, items, options]``; budgets:
    ``[resources]``.
    """
    there = np.isfinite(value)
    least = np.where(there, uses, inf).min(axis=2).sum(axis=1)
    budgets = np.maximum(budgets, least) * (1 + _SLACK)
    tight = np.where(there, uses, 0.0).max(axis=2).sum(axis=1) > budgets
    if not tight.any():
        return float(value.min(axis=1).sum())
    parts = np.where(there, uses[tight], 0.0) / np.maximum(budgets[tight], 1e-300)[:, None, None]
    return _prices(value, parts)[1]


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
