"""Plans in money."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvwire import controller as ctl
from kvwire.controller.simulator import costs, documents_for, machine_named, model_named
from kvwire.errors import ArgumentError
from kvwire.whatif.plan import plan_load
from kvwire.whatif.price import MILLION, Prices, engine_s, price_plan
from kvwire.whatif.situation import PlanScenario, known_link

SHAPE = model_named("llama-3.1-8b")
WORDS = (
    "plan",
    "--context",
    "2000",
    "--documents",
    "4",
    "--machine",
    "a100",
    "--shape",
    "llama-3.1-8b",
    "--link",
    "1gbit",
)


@pytest.fixture(scope="module")
def plan():
    estimates = known_link(costs(SHAPE, machine_named("a100")), 125e6, 0.002)
    documents = tuple((each,) for each in documents_for(SHAPE, [2000, 3000]))
    return plan_load(PlanScenario(documents, estimates, settings=ctl.ControllerSettings(workers=2)))


def timed(way, seconds):
    """A way that takes the engine so long."""
    return replace(way, prefill_s=seconds, decode_s=0.0, closing_s=0.0)


def test_the_papers_figures(plan):
    """KVLink, appendix A.7: 5,000 tokens, 8 billion parameters, an A100 at $1.79: 9 hours for $16, 246 for $440."""
    text, *others = plan.alternatives
    given = replace(plan, prediction=timed(plan.prediction, 0.0324), alternatives=(timed(text, 0.8856), *others))
    priced = price_plan(given, Prices(gpu_hour=1.79, gb_month=0.023), stored_bytes=5 * 131_000_000)
    ours, as_text = priced.ways[:2]
    assert (round(ours.gpu_hours), round(ours.total)) == (9, 16)
    assert (round(as_text.gpu_hours), round(as_text.total)) == (246, 440)
    saved = (0.8856 - 0.0324) / 3600 * 1.79
    assert ours.uses_a_month == pytest.approx(0.655 * 0.023 / saved)
    assert ours.uses_in_all == pytest.approx(0.8856 / (0.8856 - 0.0324))


def test_every_way_is_priced_by_its_parts(plan):
    prices = Prices(gpu_hour=2.0, gb_month=0.02, egress=0.09)
    priced = price_plan(plan, prices, stored_bytes=100_000_000, raw_bytes=600_000_000)
    ways = (plan.prediction, *plan.alternatives)
    assert [each.name for each in priced.ways] == [each.name for each in ways]
    assert priced.stored_month == pytest.approx(0.002)
    text = plan.alternatives[0]
    for way, told in zip(ways, priced.ways, strict=True):
        assert told.gpu == pytest.approx(MILLION * engine_s(way) / 3600 * 2.0)
        assert told.egress == pytest.approx(MILLION * way.bytes / 1e9 * 0.09)
        saved = (priced.ways[1].total - told.total) / MILLION
        if way is text or saved <= 0:
            assert told.uses_a_month is told.uses_in_all is None
        else:
            assert told.uses_in_all * saved == pytest.approx(text.prefill_s / 3600 * 2.0)
            assert told.uses_a_month * saved == pytest.approx(priced.stored_month)


def test_egress_may_cost_more_than_a_prefill(plan):
    """Then no cache pays, however often it is used."""
    dear = price_plan(plan, Prices(gpu_hour=0.01, egress=10.0), 100_000_000)
    fetched = [way for way, each in zip(dear.ways, (plan.prediction, *plan.alternatives), strict=True) if each.bytes]
    assert fetched
    assert all(way.uses_a_month is None for way in fetched)


def test_a_plan_without_alternatives_has_nothing_to_compare_with(plan):
    with pytest.raises(ArgumentError, match="leave out --no-compare"):
        price_plan(replace(plan, alternatives=()), Prices(gpu_hour=1.0), 1)


@pytest.mark.parametrize(
    "text",
    ["", "gpu_hour", "gpu_hour=", "gpu_hour=x", "gpu_hour=-1", "gpu_hour=nan", "gpu_hour=1,gpu_hour=2", "gpu=1",
     "gb_month=0.02"],
)  # fmt: skip
def test_prices_that_are_none_are_refused(text):
    with pytest.raises(ArgumentError, match="price"):
        Prices.parse(text)


def test_prices_are_read():
    assert Prices.parse("gpu_hour=1.79, gb_month=0.023,egress=0") == Prices(gpu_hour=1.79, gb_month=0.023, egress=0.0)


def test_the_command_tells_money(run):
    code, out, _ = run(*WORDS, "--price", "gpu_hour=1.79,gb_month=0.023")
    assert code == 0
    assert "a million such requests" in out
    assert "text only" in out
    code, out, _ = run(*WORDS, "--price", "gpu_hour=1.79,gb_month=0.023", "--json")
    told = json.loads(out)["price"]
    ways = {way["name"]: way for way in told["ways"]}
    assert ways["text only"]["total"] > ways["level 0 (coarse)"]["total"] > 0
    assert told["stored_bytes"] > 0
    assert run(*WORDS, "--price", "gpu_hour=free")[0] == 2
    assert run(*WORDS, "--price", "gpu_hour=1", "--no-compare")[0] == 2
