"""Short cuts change no decision: what was recorded with them happens again without any of them, to the last digit."""

from __future__ import annotations

from random import Random

import pytest

from kvwire.controller import Controller, ControllerSettings, Estimates, Goal
from kvwire.controller import events as ev
from kvwire.controller.dispatch import Dispatcher
from kvwire.controller.planning import Planner
from kvwire.controller.repair import unmeasured
from kvwire.controller.simulator.arrivals import LoadArrival, Trouble
from kvwire.controller.simulator.world import World
from kvwire.errors import ArgumentError
from kvwire.types.rates import RateTrace

from .courses import Course
from .plain_ways import PLAIN, may_begin
from .playing import COSTS, MB, RTT_S, cheapest, document, quality


class Watched(Controller):
    """Notes after each event what it led to and when the next tick is wanted."""

    def handle(self, event, now):
        samples, dispatch = self.estimates.bandwidth.samples, self._dispatch
        out = super().handle(event, now)
        self.said.append((now, event, tuple(out), self.wake_at))
        sooner = dispatch.wake_at(now)
        if self.wake_at > max(now, sooner):  # between two measurements, that more may be asked for
            assert self.estimates.bandwidth.samples == samples
            assert sooner == max(dispatch.window.opens_at(now), now + 0.001)
        return out


def watched(settings, prior):
    controller = Watched(Estimates(COSTS, prior, RTT_S), settings)
    controller.said = []
    return controller


def goals(random, objective):
    return {
        "earliest": Goal(),
        "quality": quality(random.choice([0.3, 0.6, 1.5]), floor=random.choice([0, 1])),
        "cheapest": cheapest(random.choice([0.3, 0.8])),
        "mixed": random.choice([Goal(), quality(0.5), quality(1.0, on_late="refuse"), cheapest(0.5)]),
    }[objective]


def played(seed, objective, repair, loads):
    """What a controller said to loads on a link that varies, how it was set, and what it believed at first."""
    random = Random(seed)
    plan_s, replan_s = random.choice([(1e-3, 5e-3), (5e-5, 1e-3), (1e-5, 1e-4)])
    settings = ControllerSettings(
        plan_s=plan_s, replan_s=replan_s,
        workers=random.choice([1, 2]), decode_threads=random.choice([1, 2]), decode_batch=random.choice([1, 4, 16]),
        max_in_flight=random.choice([4, 32, 128]), memory_bytes=random.choice([4_000_000, 1 << 32]),
        interrupts=random.choice([False, True]),
    )  # fmt: skip
    rate = RateTrace((0.0, 0.1, 0.3), tuple(random.choice([1, 5, 30, 200]) * MB for _ in range(3)), 0.5)
    prior = random.choice([0.3, 1.0, 3.0]) * rate.mean_bytes_s
    trouble = random.choice([Trouble(), Trouble(fail=0.05, stall=0.05, corrupt=0.05, noise=0.2)])
    arrivals = []
    for number in range(loads):
        shapes = [
            (random.choice([1, 1, 1, 12]), random.choice([0.0, 0.0, 0.2])) for _ in range(random.choice([1, 3, 24]))
        ]
        documents = tuple((document(chunks, head=head, layered=random.random() < 0.9),) for chunks, head in shapes)
        arrivals.append(LoadArrival(0.02 * number, documents, goals(random, objective), 16, repair=repair))
    controller = watched(settings, prior)
    World(
        controller, rate, COSTS, rtt_s=RTT_S, trouble=trouble, seed=seed,
        workers=settings.workers, decode_threads=settings.decode_threads,
    ).run(arrivals)  # fmt: skip
    return controller.said, settings, prior


CASES = [
    (seed, objective, repair, loads)
    for objective in ("earliest", "quality", "cheapest", "mixed")
    for repair in ("none", "auto")
    for loads in (1, 4)
    for seed in range(3)
]


def without_short_cuts(monkeypatch):
    for kind, name, plain in PLAIN:
        assert hasattr(kind, name)
        monkeypatch.setattr(kind, name, plain)


def check_alike(said, settings, prior):
    """A new controller says the same to the same events."""
    controller = watched(settings, prior)
    for number, (now, event, out, wake_at) in enumerate(said):
        controller.handle(event, now)
        assert controller.said[-1] == (now, event, out, wake_at), f"event {number}"


@pytest.mark.parametrize(("seed", "objective", "repair", "loads"), CASES)
def test_every_command_is_the_same_without_short_cuts(seed, objective, repair, loads, monkeypatch):
    said, settings, prior = played(seed, objective, unmeasured(repair), loads)
    assert sum(isinstance(each, (ev.Fetch, ev.Recompute)) for _, _, out, _ in said for each in out) >= loads
    without_short_cuts(monkeypatch)
    check_alike(said, settings, prior)


def test_so_it_is_where_much_goes_wrong(monkeypatch):
    courses = [Course(seed) for seed in range(80)]
    for course in courses:
        course.play()
    without_short_cuts(monkeypatch)
    for course in courses:
        again = Course(course.seed)
        again.play()
        assert again.log == course.log
    assert sum(len(course.log) for course in courses) > 15 * len(courses)


def test_what_may_begin_when_a_chunk_arrives_is_found_either_way(monkeypatch):
    quick, found = Dispatcher.may_begin, []

    def both(dispatch, now):
        found.append(quick(dispatch, now))
        assert found[-1] == may_begin(dispatch, now)
        return found[-1]

    monkeypatch.setattr(Dispatcher, "may_begin", both)
    for seed in range(12):
        played(seed, "earliest" if seed % 3 else "mixed", None, 1 + seed % 2 * 3)
    assert found.count(False) > 100
    assert found.count(True) > 100


def test_another_decision_is_noticed(monkeypatch):
    said, settings, prior = played(0, "quality", unmeasured("none"), 1)
    monkeypatch.setattr(Planner, "is_due", lambda *_: True)
    with pytest.raises((AssertionError, ArgumentError)):  # another command, or an outcome of one that was never given
        check_alike(said, settings, prior)
