"""Constants that were chosen: what each is for fails where it doubles or halves."""

from __future__ import annotations

import ast
import importlib
import inspect
from math import inf, log
from pkgutil import iter_modules

import numpy as np
import pytest

from kvwire import controller as package
from kvwire.controller import (
    BandwidthEstimator,
    Controller,
    ControllerSettings,
    DocumentPlanInput,
    Estimates,
    Goal,
    PrefillCost,
    PrefillEstimator,
    RecentMedian,
    core,
    documents,
    estimates,
    estimators,
    forecast,
    horizons,
    learning,
    limits,
    link,
    load,
    planner,
    repair,
    starting,
    state,
    workers,
)
from kvwire.controller import events as ev
from kvwire.controller.chunk_table import ChunkTable
from kvwire.controller.horizons import EDGES, HORIZONS_S, HorizonErrors
from kvwire.controller.policies import adaptive
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.controller.snapshot import PlanRequest
from kvwire.controller.workers import Job
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .playing import COSTS, RTT_S, ByHand, document, one, play, quality
from .test_interrupts import begun, told_until

MB = 1_000_000
TRUE = PrefillCost(0.01, 5e-5, 2e-9)


def fed():
    """An estimator after a fifth of a second at 10 MB/s."""
    estimator = BandwidthEstimator(10 * MB)
    for number in range(40):
        estimator.add(50_000, 0.005 * number, 0.005 * (number + 1))
    return estimator


def low_after_a_dip():
    """Share of the estimate that is relied on, ten samples after one of a third."""
    estimator = fed()
    for number, size in enumerate((17_000, *[50_000] * 10)):
        estimator.add(size, 1 + 0.005 * number, 1.005 + 0.005 * number)
    return estimator.low / estimator.value


def value_after(rate, samples):
    """Share of 10 MB/s that is expected after a few samples of another rate."""
    estimator = fed()
    for number in range(samples):
        estimator.add(int(0.005 * rate), 1 + 0.005 * number, 1.005 + 0.005 * number)
    return estimator.value / (10 * MB)


def trip_after(jumps):
    """Time to first byte, once five times as long, after so many measurements of that."""
    estimator = RecentMedian(0.01)
    for seconds in [0.01] * 9 + [0.05] * jumps:
        estimator.add(seconds)
    return estimator.value


def checks_without_a_word():
    """Share relied on after few checks that all came true, where half was assumed."""
    errors = HorizonErrors()
    for _ in range(6):
        errors.add(100_000, 0.05, 2 * MB)
    return errors.low(0.05, 0.25, 0.5)


def learnt(noise, samples, speed=1.0):
    """An estimator after 30 passes of many sizes, and so many more that take ``speed`` times as long."""
    rng, estimator = np.random.default_rng(1), PrefillEstimator(TRUE)
    for number in range(samples + 30):
        tokens, context = int(rng.choice([64, 256, 1024])), int(rng.integers(0, 16384))
        slower = speed if number >= 30 else 1.0
        estimator.add(tokens, context, TRUE.seconds(tokens, context) * slower * rng.lognormal(0, noise))
    return estimator


def off(estimator, true=TRUE):
    """Mean error of predictions."""
    grid = [(tokens, context) for tokens in (64, 256, 1024) for context in (0, 4096, 16384)]
    return float(np.mean([abs(log(estimator.cost.seconds(*at) / true.seconds(*at))) for at in grid]))


def creeping():
    """Error of predictions of an engine that becomes half a per cent slower with each pass."""
    estimator, speed = PrefillEstimator(TRUE), 1.0
    for number in range(120):
        speed *= 1.005
        tokens, context = ((64, 256, 1024)[number % 3], (0, 4096, 16384, 1000)[number % 4])
        estimator.add(tokens, context, TRUE.seconds(tokens, context) * speed)
    return off(estimator, TRUE.scaled(speed))


def without_pairs(samples):
    """Error of predictions where nothing was known of what attention takes."""
    rng, estimator = np.random.default_rng(2), PrefillEstimator(PrefillCost(0.01, 5e-5))
    for _ in range(samples):
        tokens, context = int(rng.choice([64, 256, 1024])), int(rng.integers(0, 16384))
        estimator.add(tokens, context, TRUE.seconds(tokens, context))
    return off(estimator)


def overdue():
    """Times its expected seconds after which a pass is slow."""
    job = Job("recompute", 0, 0, (), 0.0, 1.0)
    return next(at / 100 for at in range(1000) if job.slowness(at / 100) > 1)


# Links.


def low_of_silence():
    """How many times less than it was before is expected of a link that fell silent, at least."""
    estimator = fed()
    estimator.add(0, 1.0, 1.05)
    return estimator.value / estimator.low


def share_relied_on():
    """Share relied on where any share up to all came as often as any other."""
    estimator = fed()
    estimator.horizons = HorizonErrors(tuple(tuple(3.0 for _ in EDGES) for _ in HORIZONS_S))
    return estimator.low_over(0.1) / estimator.value


def most_counted():
    """Checks that count at most."""
    errors = HorizonErrors()
    for _ in range(2000):
        errors.add(100_000, 0.05, 2 * MB)
    return sum(errors.counts[0])


def remembered(age_s):
    """Expected error of a bandwidth that was known well, so many seconds later."""
    before = Estimates(COSTS, MB, RTT_S)
    before.bandwidth = fed()
    return Estimates.of_state(before.to_state(), None, MB, RTT_S, age_s=age_s).bandwidth.error


def asked(goal=None, *, chunks=8, rate=5 * MB, text=True, **settings):
    """A load whose document is known, on a link that was measured, and what was asked for at once."""
    known = Estimates(COSTS, rate, RTT_S)
    known.bandwidth.add(20_000, -20_000 / rate, 0.0)
    for _ in range(8):
        known.prefill.add(256, 0, COSTS.prefill.seconds(256))
    controller = Controller(known, ControllerSettings(**settings))
    controller.handle(ev.LoadRequested(0, 1, 0, goal or Goal()), 0.0)
    return controller, controller.handle(ev.IndexKnown(0, 0, (document(chunks, text=text),)), 0.001)


def fetches(out):
    return [each for each in out if isinstance(each, ev.Fetch)]


def passes(out):
    return [each.last.chunk - each.first.chunk + 1 for each in out if isinstance(each, ev.Recompute)]


def quiet_after():
    """Seconds after a byte from which on the link is silent."""
    controller, _ = asked()
    controller.handle(ev.TransferProgress(20_000, 0.02, 0.03), 0.03)
    return controller._state.link.quiet_from - 0.03


def arrivals_until_more():
    """Fetches of many that end before others are opened, without a deadline."""
    controller, out = asked(chunks=400, rate=1e10, workers=2)
    for number, each in enumerate(fetches(out), 1):
        if fetches(controller.handle(ev.ChunkArrived(each.chunk, each.level), 0.002)):
            return number
    return inf


def dead_for():
    """Seconds to the first token where the link dies, and compute takes over fetch by fetch."""
    outcome, _ = one(Goal(), RateTrace((0.0, 0.02, 5.0), (3 * MB, 0.0, 3 * MB)), workers=2)
    return outcome.ttft_s


def margin():
    """Share of the shortest deadline that is admitted which is left, as forecast once fetches have begun."""
    for deadline_s in np.arange(0.02, 0.5, 0.0005):
        estimated = Estimates(COSTS, 5 * MB, RTT_S)
        estimated.bandwidth = fed()
        controller = Controller(estimated, ControllerSettings(workers=2))
        goal = quality(float(deadline_s), on_late="refuse")
        controller.handle(ev.LoadRequested(0, 1, 0, goal), 2.0)
        out = controller.handle(ev.IndexKnown(0, 0, (document(),)), 2.0)
        if not any(isinstance(each, ev.Refuse) for each in out):
            return 1 - min(controller.loads[0].first_s, controller._state.floors_s(controller.loads[0])) / deadline_s
    return inf


def short_pass():
    """Times its fixed cost that a pass may take right before the hand-over."""
    controller, _ = asked(quality(0.1), chunks=60)
    known = controller.loads[0]
    known.hurries = False
    return limits.pass_limit_s(controller._state, known, controller._state.costs_of(known)) / COSTS.prefill.base_s


def kept_for_closings():
    """Times what a closing should take that is kept for it after a pass had to be stopped."""
    controller, _ = asked(quality(0.7), chunks=60)
    known, now = controller.loads[0], controller._state
    now.workers._slow_until = inf
    return now.closing_s(known) / now.costs_of(known).closing_s(known.prompt_tokens)


def slowest_text():
    """Times what it should take that is kept for text on an engine of which nothing is known."""
    steps = ByHand(quality(5.0), document(20), workers=2)
    steps.begin()
    known, now = steps.controller.loads[0], steps.controller._state
    now.workers._jobs.clear()
    (documents_, tokens, pairs), cost = known.table.unbegun(), now.costs_of(known).prefill
    seconds = cost.base_s * documents_ + cost.token_s * tokens + cost.pair_s * pairs
    return (now.handover_at(known) - now.latest_text_start(known)) / seconds


def stopped_at():
    """When a pass that became slow is stopped before a deadline of 0.7 s."""
    steps, _ = begun()
    return told_until(steps, ev.Interrupt, 0.7)[1]


def turns():
    """Things begun from one turn of a late load to its next."""
    controller, _ = asked(quality(0.01), chunks=200)
    controller.handle(ev.LoadRequested(1, 1, 0, quality(9.0)), 0.5)
    controller.handle(ev.IndexKnown(1, 0, (document(),)), 0.5)
    now = controller._state
    found = []
    for now.turns in range(40):
        now.changed()
        if now.order()[0].number == 0:
            found.append(now.turns)
    return found[1] - found[0]


def reserve_of_what_is_open():
    """Reserve of chunks that are not begun, over that of others."""
    controller, _ = asked()
    return controller._state.unstarted_reserve_s / controller._state.steady_reserve_s


def arrivals_of_a_rush():
    """Loads a second, a tenth of a second after ten came at once."""
    controller, _ = asked()
    rate = state.ArrivalRate()
    for _ in range(10):
        rate.add(controller.loads[0], 0.0)
    return rate.others(controller.loads[0], 0.1)[0]


def error_of_a_short_rush():
    """Mean error of eight loads at once that have ample time."""
    rush = [LoadArrival(number * 0.005, ((document(),),), quality(2.0)) for number in range(8)]
    outcomes = play(rush, 2 * MB, workers=2, max_in_flight=16, decode_batch=16).outcomes
    return sum(outcome.error for outcome in outcomes) / len(outcomes)


def unlooked():
    """What a chunk counts that the question does not look at."""
    hand = ByHand(quality(1.0), document(4))
    hand.begin()
    known = hand.controller.loads[0]
    before = known.table.errors[0][0]
    known.looked(((0.0, 1.0, 1.0, 1.0),))
    return known.table.errors[0][0] / before


def insured_from(rate, deadline_s, asked_for):
    """Least share of times at which the link falls at which coarse levels go first."""
    for falls in np.linspace(0, 24, 97).tolist():
        row = [{0.125: falls, 1.0: 48 - falls}.get(edge, 0.0) for edge in EDGES]
        estimated = Estimates(COSTS, rate, RTT_S)
        estimated.bandwidth.horizons = HorizonErrors((tuple(row),) * len(HORIZONS_S))
        controller = Controller(estimated, ControllerSettings(workers=2))
        controller.handle(ev.LoadRequested(0, 1, 0, quality(deadline_s)), 0.0)
        out = controller.handle(ev.IndexKnown(0, 0, (asked_for,)), 0.001)
        if {each.level for each in fetches(out)} == {0}:
            return falls / 48
    return inf


def looks():
    """Whether a question looks where a third of the finest levels can be fetched."""
    estimated = Estimates(COSTS, MB, RTT_S)
    estimated.bandwidth = fed()
    controller = Controller(estimated, ControllerSettings(workers=2))
    controller.handle(ev.LoadRequested(0, 1, 0, quality(1.0), looks=True), 2.0)
    controller.handle(ev.IndexKnown(0, 0, (document(100, text=False, scale=3),)), 2.0)
    return controller.loads[0].plan.looks


def looked_by():
    """Share of the time by which the question must have looked."""
    columns, _ = ChunkTable().open({})
    request = PlanRequest(columns, COSTS, quality(1.0), MB, MB, 1000, left_s=1.0, look_s=1e-6)
    return max(each / 100 for each in range(100) if adaptive._may_look(request, each / 100))


def joined_outlier():
    """Relative error that is expected after one pass that took ten times as long."""
    estimator = learnt(0.01, 0)
    estimator.add(256, 0, 10 * estimator.cost.seconds(256))
    return estimator.spread


def known():
    """Measurements after which a cost is trusted."""
    return learnt(0.01, 0).known


# Arithmetic.


def shortest():
    """Seconds that a pass counts which a clock measured as none."""
    estimator = PrefillEstimator(TRUE)
    estimator.add(256, 0, 0.0)
    return estimator.cost.seconds(256)


def largest():
    """Bytes that a chunk has at most."""
    for size in (10**13, 10**13 + 1):
        try:
            DocumentPlanInput((1,), ((size,),))
        except ArgumentError:
            return size - 1
    return inf


def checks_of_short_predictions():
    """Checks of the shortest horizon in 0.12 busy seconds, of samples of 0.03."""
    errors = HorizonErrors()
    for _ in range(4):
        errors.add(60_000, 0.03, 2 * MB)
    return sum(errors.counts[0])


def relied_on_of_bad_predictions():
    """Share relied on where always 0.55 of what was predicted came."""
    errors = HorizonErrors()
    for _ in range(100):
        errors.add(55_000, 0.05, 2 * MB)
    return errors.low(0.05, 0.25, 0.525)


def chunks_of_a_probe():
    """Chunks from which on one is fetched, though text alone would be there sooner, to see how fast the link is."""
    return next(count for count in range(2, 40) if fetches(asked(chunks=count, rate=1000.0, workers=2)[1]))


class Counted(adaptive.Adaptive):
    """Counts plans."""

    def plan(self, request):
        plans.append(request)
        return super().plan(request)


plans = []


def plans_of_an_event():
    """Plans that are made for one event of many loads, all of which want one."""
    settings = ControllerSettings(max_in_flight=1, workers=2)  # the first load keeps link and engine busy
    controller = Controller(Estimates(COSTS, MB, RTT_S), settings, Counted())
    for number in range(12):
        controller.handle(ev.LoadRequested(number, 1, 0, quality(9.0)), 0.0)
        controller.handle(ev.IndexKnown(number, 0, (document(),)), 0.0)
    for known in controller.loads.values():
        known.is_stale = True
    plans.clear()
    controller.handle(ev.Tick(), 1.0)
    return len(plans)


TABLE = [
    # module, constant, what it decides, bounds of that
    (estimators, "_MOST_ERROR", low_of_silence, (5, 6)),
    (estimators, "_ERROR_KEPT", low_after_a_dip, (0.85, 0.99)),
    (estimators, "NOTICED", lambda: value_after(5 * MB, 8), (0.55, 0.7)),
    (estimators, "MOST_KNOWN", lambda: trip_after(4) + trip_after(5), (0.055, 0.065)),
    (horizons, "_TRUSTED", checks_without_a_word, (0.7, 0.8)),
    (learning, "_SURPRISE", lambda: off(learnt(0.03, 2, 3.0), TRUE.scaled(3.0)), (0.0, 0.03)),
    (learning, "_DRIFT", creeping, (0.0, 0.16)),
    (learning, "_UNSEEN", lambda: without_pairs(3), (0.0, 0.07)),
    (workers, "NOTICED", overdue, (1.2, 2.0)),
    (estimators, "_SHARE", share_relied_on, (0.3, 0.5)),
    (horizons, "HORIZONS_S", checks_of_short_predictions, (1.9, 2.1)),
    (horizons, "EDGES", relied_on_of_bad_predictions, (0.515, 0.535)),
    (horizons, "_USUAL_RISK", lambda: HorizonErrors().risk(0.5), (0.04, 0.06)),
    (horizons, "MOST_COUNTED", most_counted, (40, 48)),
    (estimates, "_AGE_HALF_LIFE_S", lambda: remembered(600.0), (0.45, 0.55)),
    (learning, "UNKNOWN", joined_outlier, (0.05, 0.15)),
    (learning, "MOST_KNOWN", known, (8, 8)),
    (learning, "_NOISE", lambda: off(learnt(0.2, 60)), (0.0, 0.025)),
    (core, "_TICK_S", dead_for, (0.0, 0.52)),
    (core, "_PLANS", plans_of_an_event, (4, 5)),
    (link, "_GAP_S", quiet_after, (0.015, 0.025)),
    (link, "_FEWEST_OPEN", lambda: len(fetches(asked(rate=1000.0, text=False)[1])), (2, 2)),
    (starting, "SPARE", arrivals_until_more, (7, 10)),
    (planner, "_MARGIN", margin, (-0.015, 0.02)),
    (limits, "_SHORT_PASS", short_pass, (5, 7)),
    (state, "SLOWEST_PASS", kept_for_closings, (4, 6)),
    (state, "DOUBT", slowest_text, (1.5, 1.7)),
    (limits, "_STOPS_S", stopped_at, (0.5, 0.55)),
    (state, "_TURNS", turns, (4, 4)),
    (state, "_UNSURE", reserve_of_what_is_open, (1.9, 2.1)),
    (state, "_AMPLE", error_of_a_short_rush, (0.0, 0.006)),
    (state, "_HALF_LIVES_S", arrivals_of_a_rush, (15, 30)),
    (load, "_UNSEEN", unlooked, (0.09, 0.11)),
    (adaptive, "_MISS", lambda: insured_from(1000 * MB, 0.35, document(200, text=False)), (0.2, 0.35)),
    (adaptive, "_EFFORT", lambda: insured_from(30 * MB, 0.4, document(32, text=False, scale=4)), (0.0, 0.0)),
    (adaptive, "_LONG", chunks_of_a_probe, (7, 9)),
    (adaptive, "LOOK_SHARE", looked_by, (0.4, 0.6)),
    (adaptive, "_LOOKED", looks, (True, True)),
    (documents, "UNMEASURED", lambda: DocumentPlanInput((256,), ((10, 20),)).error(0, 1), (0.009, 0.011)),
    (repair, "LEAST_ERROR", lambda: repair.decibels(0.0), (119, 121)),
    (forecast, "SLOWEST", lambda: float(forecast.wire_s(np.array([100.0]), 0.0)[0]), (90, 110)),
    (learning, "SHORTEST_S", shortest, (0.9e-9, 1.1e-9)),
    (documents, "LARGEST", largest, (10**13, 10**13)),
]
NAMES = {"EXACT", "RECOMPUTE", "STATE_VERSION"}
"""Numbers that stand for something, not for so much of it."""
SETTINGS = {"MAX_KL", "MOST"}
"""Defaults of what the documentation lets users choose."""


def numbers(module):
    """Names of a module's own constants that are numbers."""
    for statement in ast.parse(inspect.getsource(module)).body:
        for target in statement.targets if isinstance(statement, ast.Assign) else ():
            for each in ast.walk(target):
                value = getattr(module, each.id) if isinstance(each, ast.Name) else None
                parts = value if isinstance(value, tuple) else (value,)
                if all(type(part) in {int, float} for part in parts):
                    yield each.id


def test_every_constant_has_a_test():
    tested = {name for _, name, _, _ in TABLE}
    modules = [importlib.import_module(f"kvwire.controller.{each.name}") for each in iter_modules(package.__path__)]
    modules.append(adaptive)
    found = {name for module in modules for name in numbers(module)} - NAMES - SETTINGS
    assert found <= tested
    assert len(found) <= 40


@pytest.mark.parametrize(("module", "name", "figure", "bounds"), TABLE, ids=[each[1] for each in TABLE])
def test_a_constant_is_what_it_is_for_a_reason(module, name, figure, bounds, monkeypatch):
    low, high = bounds
    assert low <= figure() <= high
    value, found = getattr(module, name), []
    for factor in (0.5, 2.0):
        scaled = tuple(each * factor for each in value) if isinstance(value, tuple) else type(value)(value * factor)
        monkeypatch.setattr(module, name, scaled)
        found.append(low <= figure() <= high)
    assert not all(found)
