"""What prompts say together: gaps closed, pooled and by prompt, and differences between ways on the same prompts."""

from __future__ import annotations

import statistics
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from reuse_parts.measuring import ALL, DEFAULT, NONE, ON_LEVEL_0, RIVALS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from reuse_parts.measuring import Figures

DRAWS = 4000
"""Of the bootstrap over prompts."""
Point = tuple[str, float]


class Sample:
    """Prompts' divergences by way and share, and what drawing them again makes of that, in percent of the gap."""

    def __init__(self, prompts: Sequence[Figures], costs: dict[Point, tuple[int, float, float]], seed: int) -> None:
        """Keep them; the seed decides what is drawn."""
        self.prompts, self.costs, self._seed = prompts, costs, seed
        self.points = [point for point in costs if any(point in each.kl for each in prompts)]

    def closed(self, point: Point, *, on: Point | None = None) -> tuple[float, NDArray[np.float64]]:
        """Pooled share of the gap that is closed, and that of each draw; on the prompts where ``on`` is known too."""
        return self.mixed([(1.0, point)], on=on)

    def mixed(self, parts: Sequence[tuple[float, Point]], on: Point | None = None) -> tuple[float, NDArray[np.float64]]:
        """The same of a weighted sum of points; ``NONE`` closes nothing, ``ALL`` everything."""
        names = [name for _, name in parts] + ([on] if on else [])
        rest = [name for name in names if name != ALL]
        known = [{ALL: 0.0} | each.kl for each in self.prompts if all(name in each.kl for name in rest)]
        gap = np.array([kl[NONE] for kl in known])
        won = sum((weight * (gap - np.array([kl[name] for kl in known])) for weight, name in parts), np.zeros(len(gap)))
        drawn = np.random.default_rng(self._seed).integers(0, len(gap), (DRAWS, len(gap)))
        return float(100 * won.sum() / gap.sum()), 100 * won[drawn].sum(1) / gap[drawn].sum(1)

    def by_prompt(self, point: Point) -> NDArray[np.float64]:
        """Percent closed of every prompt."""
        known = [each.kl for each in self.prompts if point in each.kl]
        return np.array([100 * (1 - kl[point] / kl[NONE]) for kl in known])

    def at_cost(self, token_layers: float) -> list[tuple[float, Point]]:
        """The default's curve at a cost, between the points around it; looking at the cache alone wins nothing."""
        ours = [point for point in self.points if point[0] == DEFAULT]
        known = sorted([(self.costs[point][1], point) for point in (*ours, ALL)] + [(0.0, NONE)])
        for (below, left), (above, right) in pairwise(known):
            if below <= token_layers < above:
                if left == NONE:
                    return [((token_layers / above), right)]
                weight = (token_layers - below) / (above - below)
                return [(1 - weight, left), (weight, right)]
        return [(1.0, known[-1][1])]


def summed(sample: Sample) -> dict[str, Any]:
    """For each way and share what it costs, closes and takes."""
    out: dict[str, Any] = {}
    for name, share in sample.points:
        point, default = (name, share), (DEFAULT, share)
        pooled, drawn = sample.closed(point)
        each = sample.by_prompt(point)
        rows, token_layers, pairs = sample.costs[point]
        figures = {
            "prompts": len(each), "rows": rows, "token_layers": token_layers, "pairs": pairs,
            "kl": statistics.fmean(f.kl[point] for f in sample.prompts if point in f.kl),
            "closed": {"pooled": pooled, "interval": _interval(drawn)},
            "by_prompt": {
                "mean": float(each.mean()), "interval": _interval_of_mean(each), "median": float(np.median(each)),
                "sd": float(each.std(ddof=1)) if len(each) > 1 else 0.0,
            },
            "seconds": _seconds(sample, point),
        }  # fmt: skip
        if default in sample.points and name != DEFAULT:
            figures["minus_default"] = _difference(sample, point, default)
        out.setdefault(name, {})[f"{share:g}"] = figures
    return out


def _difference(sample: Sample, one: Point, other: Point) -> dict[str, Any]:
    pooled, drawn = sample.mixed([(1.0, one), (-1.0, other)])
    both = [f for f in sample.prompts if one in f.kl and other in f.kl]
    each = np.array([100 * (f.kl[other] - f.kl[one]) / f.kl[NONE] for f in both])
    mean = {"mean": float(each.mean()), "interval": _interval_of_mean(each)}
    return {"pooled": pooled, "interval": _interval(drawn), "by_prompt": mean}


def _seconds(sample: Sample, point: Point) -> dict[str, float]:
    found = [f.seconds[point] for f in sample.prompts if point in f.seconds]
    if not found or not any(sum(each) for each in found):
        return {}
    select, repair = zip(*found, strict=True)
    return {"select": statistics.median(select), "repair": statistics.median(repair)}


def _interval(drawn: NDArray[np.float64]) -> list[float]:
    return [float(bound) for bound in np.quantile(drawn, (0.025, 0.975))]


def _interval_of_mean(each: NDArray[np.float64]) -> list[float]:
    half = 1.96 * each.std(ddof=1) / len(each) ** 0.5 if len(each) > 1 else 0.0
    return [float(each.mean() - half), float(each.mean() + half)]


def equal_costs(sample: Sample) -> list[dict[str, Any]]:
    """Every rival's point beside the default's curve at as many token-layers."""
    out = []
    for point in sample.points:
        if point[0] not in RIVALS:
            continue
        theirs, _ = sample.closed(point)
        parts = sample.at_cost(sample.costs[point][1])
        ours, _ = sample.mixed(parts, on=point)
        ahead, drawn = sample.mixed([*parts, (-1.0, point)])
        out.append({
            "rival": point[0], "share": point[1], "token_layers": sample.costs[point][1], "closed": theirs,
            "default": ours, "ahead": ahead, "interval": _interval(drawn),
        })  # fmt: skip
    return out


def acceptance(sample: Sample, levels: str = ON_LEVEL_0) -> dict[str, Any]:
    """What was promised, and whether it is so."""
    at_5, at_15 = (float(sample.closed((DEFAULT, share))[0]) for share in (0.05, 0.15))
    lost = max(-float(sample.mixed([(1.0, (levels, r)), (-1.0, (DEFAULT, r))])[0]) for r in (0.05, 0.15))
    behind = [each for each in equal_costs(sample) if each["ahead"] <= 0]
    return {
        "closes 75 % at 5 %": {"closed": at_5, "met": at_5 >= 75},
        "closes 85 % at 15 %": {"closed": at_15, "met": at_15 >= 85},
        "above every rival at equal token-layers": {"behind": behind, "met": not behind},
        "chosen on level 0 loses 2 points at most": {"lost": lost, "met": lost <= 2},
    }  # fmt: skip


def on_levels(prompts: Sequence[Figures]) -> dict[str, Any]:
    """Mean divergence on top of each level, and what adding those of coding and of linking would say."""
    thorough = [each for each in prompts if each.coded]
    if not thorough:
        return {}
    out: dict[str, Any] = {}
    for level, share in thorough[0].coded:
        kl = statistics.fmean(each.coded[level, share] for each in thorough)
        entry = out.setdefault(level, {"bits": statistics.fmean(each.bits[level] for each in thorough), "kl": {}})
        entry["kl"][f"{share:g}"] = kl
    for entry in out.values():
        exact = statistics.fmean(each.kl[NONE] for each in thorough)
        entry["coding"] = max(0.0, entry["kl"]["0"] - exact)
    return {"prompts": len(thorough), "levels": out}
