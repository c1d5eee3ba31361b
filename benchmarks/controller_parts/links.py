"""Links that the controller is measured on: recorded ones, brought to data centres' rates, and made ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.simulator import (
    RateTrace,
    ar1,
    parse_log_json,
    parse_mbit_lines,
    steps,
    token_bucket,
    with_outages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Maker = Callable[[float, np.random.Generator], RateTrace]

GBIT = 1e9 / 8
"""Bytes per second."""
LEAST_GBIT, MOST_GBIT = 0.1, 40.0
SCALES = {"tenth": 0.1, "native": 1.0}
"""Factors of time. Recorded traces have a sample a second or so: a tenth lets the link change within a load."""


@dataclass(frozen=True)
class DrawnLink:
    """A link of some kind, at a rate and a scale of time.

    Attributes:
        name: Collection and name, or ``made/`` and the kind.
        scale: Of time, one of ``SCALES``.
        gbit_s: Mean rate.
        rate: The trace.
    """

    name: str
    scale: str
    gbit_s: float
    rate: RateTrace

    @property
    def kind(self) -> str:
        """The collection, or the whole name of a made link."""
        folder = self.name.split("/", maxsplit=1)[0]
        return self.name if folder == "made" else folder


def recorded(folder: Path) -> dict[str, RateTrace]:
    """Every trace of a folder of collections, by collection and name."""
    found = {}
    for path in sorted(folder.glob("*/*")):
        read = {".json": parse_log_json, ".txt": parse_mbit_lines}.get(path.suffix)
        if read:
            found[f"{path.parent.name}/{path.stem}"] = read(path.read_text(encoding="utf-8"))
    if not found:
        message = f"no traces in {folder}; name a folder of collections with --traces"
        raise SystemExit(message)
    return found


def made() -> dict[str, Maker]:
    """Links that are made, for any mean rate."""
    return {
        "made/steady": lambda mean, rng: ar1(rng, mean, sigma=0.2, correlation=0.95),
        "made/wild": lambda mean, rng: ar1(rng, mean, sigma=0.9, correlation=0.8),
        "made/fall": lambda mean, _: steps([(0.0, 2 * mean), (0.4, 0.2 * mean), (1.0, 0.8 * mean)], 1.5),
        "made/rise": lambda mean, _: steps([(0.0, 0.25 * mean), (0.3, 2 * mean)], 0.7).scaled(mean),
        "made/bucket": lambda mean, _: replace(token_bucket(4 * mean, mean, mean), period_s=1.0).scaled(mean),
        "made/outages": lambda mean, _: with_outages(steps([(0.0, mean)], 2.0), [(0.2, 0.3)]).scaled(mean),
    }


def links(folder: Path, seed: tuple[int, ...], scales: Sequence[str] = tuple(SCALES)) -> list[DrawnLink]:
    """All links at all scales of time, each at a rate that is drawn log-uniformly."""
    rng, traces = np.random.default_rng(seed), recorded(folder)
    out = []
    for scale, stretch in SCALES.items():
        drawn = []
        for name, trace in traces.items():
            gbit = drawn_gbit(rng)
            drawn.append(DrawnLink(name, scale, gbit, trace.scaled(gbit * GBIT).stretched(stretch)))
        for name, make in made().items():
            gbit = drawn_gbit(rng)
            drawn.append(DrawnLink(name, scale, gbit, make(gbit * GBIT, rng).stretched(stretch)))
        out += drawn if scale in scales else []
    return out


def drawn_gbit(rng: np.random.Generator) -> float:
    """A rate between the slowest and the fastest, log-uniformly."""
    return float(np.exp(rng.uniform(np.log(LEAST_GBIT), np.log(MOST_GBIT))))
