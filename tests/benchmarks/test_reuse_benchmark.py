"""The arithmetic of the benchmark of repair: gaps closed, equal costs, frontiers, and one prompt measured."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def parts():
    names = ("figures", "measuring", "predicting")
    return {name: importlib.import_module(f"reuse_parts.{name}") for name in names}


def sample_of(parts, rows):
    """rows: for each prompt its divergences without repair, of the default at 5 and 15 %, of a rival at 5 %."""
    measuring = parts["measuring"]
    points = [measuring.NONE, ("attention", 0.05), ("attention", 0.15), ("first", 0.05)]
    prompts = [measuring.Figures(dict(zip(points, row, strict=True)), {}, {}) for row in rows]
    return parts["figures"].Sample(prompts, measuring.costs(6), seed=1)


def test_pooled_gaps_and_their_intervals(parts):
    sample = sample_of(parts, [(4.0, 2.0, 1.0, 3.0), (1.0, 0.0, 0.0, 1.0)])
    pooled, drawn = sample.closed(("attention", 0.05))
    assert pooled == pytest.approx(100 * 3 / 5)
    assert set(np.round(drawn, 6)) == {50.0, 60.0, 100.0}  # twice the first, both, twice the second
    assert sample.by_prompt(("attention", 0.05)).tolist() == [50.0, 100.0]
    ways = parts["figures"].summed(sample)
    assert ways["first"]["0.05"]["minus_default"]["pooled"] == pytest.approx(20 - 60)
    assert ways["first"]["0.05"]["minus_default"]["by_prompt"]["mean"] == pytest.approx((-25 - 100) / 2)
    assert ways["attention"]["0.15"]["closed"]["pooled"] == pytest.approx(80)


def test_costs_between_two_points_lie_on_the_line_between_them(parts):
    sample = sample_of(parts, [(4.0, 2.0, 1.0, 3.0)])
    low, high = (sample.costs["attention", share][1] for share in (0.05, 0.15))
    assert sample.at_cost(low) == [(1.0, ("attention", 0.05)), (0.0, ("attention", 0.15))]
    middle, _ = sample.mixed(sample.at_cost((low + high) / 2))
    assert middle == pytest.approx((50 + 75) / 2)
    half, _ = sample.mixed(sample.at_cost(low / 2))
    assert half == pytest.approx(25)
    assert sample.mixed(sample.at_cost(1e9))[0] == pytest.approx(100)
    (rival,) = parts["figures"].equal_costs(sample)
    assert rival["closed"] == pytest.approx(25)
    assert rival["default"] == pytest.approx(50 * sample.costs["first", 0.05][1] / low)


def test_choosing_counts(parts):
    costs = parts["measuring"].costs(6)
    rows = costs["attention", 0.05][0]
    assert costs["first", 0.05][1] == 6 * rows
    assert costs["attention", 0.05][1] == 6 * (rows + 16)
    assert costs["cacheblend", 0.05][1] == 2 * 768 + 4 * rows
    assert costs["all", 1.0][1] == 6 * 768


def test_a_frontier_holds_what_nothing_beats(parts):
    points = [{"ttft_s": seconds, "kl": kl} for seconds, kl in ((2, 1.0), (1, 3.0), (3, 2.0), (4, 0.5), (1, 4.0))]
    assert [(each["ttft_s"], each["kl"]) for each in parts["predicting"].frontier(points)] == [
        (1, 3.0),
        (2, 1.0),
        (4, 0.5),
    ]


def test_predictions_add_up(parts):
    closed = {"cacheblend": {"0.15": {"closed": {"pooled": 40.0}}}, "attention": {}, "first": {}}
    levels = {"coarse": {"bits": 0.5, "kl": {"0": 3.0, "0.15": 1.2}, "coding": 1.0}}
    found = parts["predicting"].predicted(closed, levels, gap=2.0)
    points = found["llama-3.1-8b"]["links"]["1"]
    kl = {(each["selector"], each["share"]): each["kl"] for each in points}
    assert kl == {("none", 0.0): 3.0, ("attention", 0.15): 1.2, ("cacheblend", 0.15): pytest.approx(1.0 + 2.0 * 0.6)}
    for each in points:
        assert each["ttft_s"] == pytest.approx(each["fetch"] + each["repair"] + each["question"])
    seconds = {each["selector"]: each["repair"] for each in points}
    assert seconds["none"] == 0 < seconds["attention"] < seconds["cacheblend"] < found["llama-3.1-8b"]["prefill_s"]
