"""What always holds where jobs start, in random courses with several loads and faults.

That a load fails only where a chunk has no way left is checked by every course of ``courses.py``.
"""

from __future__ import annotations

from copy import deepcopy
from math import inf
from random import Random

import pytest

from kvwire.controller import Controller, Goal
from kvwire.controller import events as ev
from kvwire.controller.simulator.loads import LoadArrival, Trouble
from kvwire.types.rates import RateTrace

from .playing import COSTS, MB, RTT_S, cheapest, document, play, quality

SEEDS = range(24)


class Watched:
    """A controller that is looked at after every event."""

    def __init__(self, controller, check):
        self._controller, self._check = controller, check

    def __getattr__(self, name):
        return getattr(self._controller, name)

    def handle(self, event, now):
        out = self._controller.handle(event, now)
        self._check(self._controller, out, now)
        return out


def course(seed, check, *, trouble=True, **settings):
    """Some loads with other goals on a link that changes; ``check(controller, instructions, now)`` sees all."""
    random = Random(seed)
    rates = tuple(random.choice([0.5, 2, 10, 50]) * MB for _ in range(4))
    rate = RateTrace((0.0, 0.05, 0.15, 0.4), rates)
    arrivals = [
        LoadArrival(
            random.uniform(0, 0.2),
            tuple((document(random.randint(1, 6), text=random.random() < 0.8),) for _ in range(random.randint(1, 3))),
            random.choice([Goal(), quality(random.uniform(0.1, 0.6)), cheapest(random.uniform(0.1, 0.6))]),
        )
        for _ in range(random.choice([1, 2, 4]))
    ]
    bad = Trouble(fail=0.1, stall=0.1, corrupt=0.1) if trouble and random.random() < 0.5 else None
    more = {"workers": random.choice([1, 2]), "decode_batch": random.choice([1, 4]), **settings}
    return play(sorted(arrivals, key=lambda each: each.at), rate, trouble=bad, seed=seed,
                wrap=lambda controller: Watched(controller, check), **more)  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_open_bytes_are_what_the_link_surely_carries_in_two_round_trips_and_the_horizon(seed):
    memory = 600_000

    def check(controller, out, _):
        estimates, link = controller.estimates, controller._state.link
        asked = [each.bytes for each in out if isinstance(each, ev.Fetch)]
        bound = (2 * estimates.ttfb.value + 0.005) * estimates.bandwidth.low
        if asked and len(link.fetches) > 2:  # one that comes in and one behind it may always be open
            assert link.open_bytes - asked[-1] < bound
        assert controller.held_bytes <= memory

    course(seed, check, memory_bytes=memory)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_pass_crosses_the_handover_of_a_load_that_is_due_earlier(seed):
    def check(controller, out, now):
        state = controller._state
        for each in out:
            if not isinstance(each, ev.Recompute) or each.first.load not in controller.loads:
                continue
            load, job = controller.loads[each.first.load], controller._state.workers.running("prefill")
            for other in controller.loads.values():
                first = other is not load and other.due < inf and state.rank(other) < state.rank(load)
                if first and not state.rank(other)[0] and state.handover_at(other) > now:
                    assert now + job.expected_s <= state.handover_at(other) + 1e-9

    course(seed, check)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_valid_is_overwritten_only_if_that_ends_before_the_handover(seed):
    def check(controller, out, now):
        for each in out:
            if isinstance(each, ev.Decode) and each.chunks[0].load in controller.loads:
                load = controller.loads[each.chunks[0].load]
                valid = [load.table.valid_level[load.doc(chunk.document).start + chunk.chunk] for chunk in each.chunks]
                if load.due < inf and max(valid) >= 0:
                    ends = now + controller._state.workers.running("decode").expected_s
                    closing_s = COSTS.closing_s(load.prompt_tokens)
                    assert ends <= load.due - closing_s + 1e-9

    course(seed, check)


@pytest.mark.parametrize("at_s", [0.015, 0.03, 0.04])
def test_a_silent_link_has_rate_0_in_what_plans_rest_on(at_s):
    silent = []

    def check(controller, _, now):
        link = controller._state.link
        if link.stalled:
            assert link.bandwidth == link.bandwidth_low == link.low_over(0.5) == 0
            silent.append(now)

    rate = RateTrace((0.0, at_s, 5.0), (3 * MB, 0.0, 3 * MB))
    play([LoadArrival(0.0, ((document(text=False),),), Goal())], rate, wrap=lambda each: Watched(each, check))
    assert at_s + 0.2 < silent[0] < at_s + 0.25 + 3 * RTT_S


@pytest.mark.parametrize("goal", [Goal(), quality(1.0)])
@pytest.mark.parametrize("rate", [2 * MB, 20 * MB, 200 * MB])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_arrival_that_lets_nothing_begin_leaves_only_fetches_for_later(goal, rate, workers, monkeypatch):
    quick, quiet = Controller._may_begin, []

    def may_begin(controller, now):
        if quick(controller, now):
            return True
        twin, out = deepcopy(controller), []
        twin._act(now, out)
        assert all(isinstance(each, ev.Fetch) for each in out)
        quiet.append(now)
        return False

    monkeypatch.setattr(Controller, "_may_begin", may_begin)
    arrivals = [LoadArrival(0.0, ((document(chunks=24, tokens=64),),) * 3, goal)]
    play(arrivals, rate, workers=workers, decode_batch=8)
    assert quiet or rate < 20 * MB
