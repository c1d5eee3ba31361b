"""Several loads on one link and one engine."""

from __future__ import annotations

import pytest

from kvwire.controller import Goal
from kvwire.controller import events as ev
from kvwire.controller.simulator.loads import LoadArrival

from .playing import MB, document, play


def quality(deadline_s):
    return Goal(objective="quality", deadline_s=deadline_s)


def alone(arrival, rate, **options):
    """Seconds to the first token of a load that has everything for itself."""
    return play([LoadArrival(0.0, arrival.documents, arrival.goal)], rate, **options).outcomes[0].ttft_s


def stretches(arrivals, rate, **options):
    """How many times longer each load takes than alone."""
    outcomes = play(arrivals, rate, **options).outcomes
    return [
        outcome.ttft_s / alone(arrival, rate, **options) for outcome, arrival in zip(outcomes, arrivals, strict=True)
    ]


def jain(values):
    """Jain's index of fairness: 1 where all values are equal, 1 / n where one has all."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def fetched(text=False, chunks=8):
    return ((document(chunks, text=text),),)


@pytest.mark.parametrize("workers", [1, 2])
def test_who_is_due_first_is_served_first(workers):
    arrivals = [LoadArrival(0.0, fetched(), quality(due)) for due in (0.4, 0.2)]
    played = play(arrivals, 4 * MB, workers=workers)
    first, second = played.outcomes
    assert first.in_time
    assert second.in_time
    assert second.ttft_s < first.ttft_s


def test_two_equal_loads_take_no_longer_than_one_after_the_other():
    one = alone(LoadArrival(0.0, fetched(), Goal()), 2 * MB)
    outcomes = play([LoadArrival(0.0, fetched(), Goal())] * 2, 2 * MB).outcomes
    assert max(outcome.ttft_s for outcome in outcomes) <= 1.1 * 2 * one


def test_two_equal_loads_that_recompute_take_no_longer_than_one_after_the_other():
    one = alone(LoadArrival(0.0, fetched(text=True), Goal()), 0.001 * MB)
    outcomes = play([LoadArrival(0.0, fetched(text=True), Goal())] * 2, 0.001 * MB).outcomes
    assert max(outcome.ttft_s for outcome in outcomes) <= 1.1 * 2 * one


def test_no_more_bytes_come_than_the_link_carries():
    arrivals = [LoadArrival(0.0, fetched(), Goal())] * 5
    outcomes = play(arrivals, 2 * MB).outcomes
    assert sum(outcome.received for outcome in outcomes) <= 2 * MB * max(outcome.ttft_s for outcome in outcomes)


@pytest.mark.parametrize("workers", [1, 2])
def test_ten_equal_loads_share_without_loss(workers):
    arrivals = [LoadArrival(0.0, fetched(text=True), Goal())] * 10
    factors = stretches(arrivals, 2 * MB, workers=workers)
    assert max(factors) <= 1.1 * 10
    assert jain(factors) > 0.6


def test_ten_staggered_deadlines_are_all_kept():
    arrivals = [LoadArrival(0.0, fetched(), quality(0.1 * (at + 2))) for at in range(10)]
    outcomes = play(arrivals, 3 * MB).outcomes
    assert all(outcome.in_time for outcome in outcomes)


def test_a_load_without_a_deadline_is_not_starved_by_those_in_a_hurry():
    patient = LoadArrival(0.0, fetched(), Goal())
    hurried = [LoadArrival(0.02 * at, fetched(chunks=4), quality(0.15)) for at in range(50)]
    played = play([patient, *hurried], 2.5 * MB)
    assert played.outcomes[0].ttft_s < 8 * alone(patient, 2.5 * MB)


def test_a_hopeless_load_does_not_ruin_the_others():
    hopeless = LoadArrival(0.0, fetched(chunks=64), quality(0.01))
    # A turn in four goes to whoever waits longest: what is left is enough for them.
    goal = Goal(objective="quality", deadline_s=0.3, ceiling=2)
    others = [LoadArrival(0.01 * at, fetched(chunks=2), goal) for at in range(5)]
    outcomes = play([hopeless, *others], 2 * MB).outcomes
    assert not outcomes[0].in_time
    assert all(outcome.in_time for outcome in outcomes[1:])
    assert not outcomes[0].failed
    assert outcomes[0].ttft_s < 2 * alone(hopeless, 2 * MB)


def test_a_load_that_leaves_frees_its_share():
    class Leaving:
        """A controller whose first load is left when 30 ms have gone by."""

        def __init__(self, controller):
            self._controller, self._left = controller, False

        def __getattr__(self, name):
            return getattr(self._controller, name)

        def handle(self, event, now):
            out = self._controller.handle(event, now)
            if now > 0.03 and not self._left:
                self._left = True
                out += [*self._controller.handle(ev.LoadAbandoned(0), now), ev.Fail(0, "left")]
            return out

    arrivals = [LoadArrival(0.0, fetched(chunks=64), Goal()), LoadArrival(0.02, fetched(), Goal())]
    both = play(arrivals, 2 * MB).outcomes
    left = play(arrivals, 2 * MB, wrap=Leaving).outcomes
    assert left[0].failed
    assert left[1].ttft_s <= both[1].ttft_s
    assert left[1].ttft_s < 1.5 * alone(arrivals[1], 2 * MB) + 0.03


@pytest.mark.parametrize("workers", [1, 2])
def test_a_late_load_gets_its_turns_beside_a_stream_of_loads_that_can_be_in_time(workers):
    late = LoadArrival(0.0, fetched(chunks=4), quality(0.001))
    stream = [LoadArrival(0.02 * number, fetched(chunks=4), quality(0.3)) for number in range(100)]
    played = play([late, *stream], 4 * MB, workers=workers)
    # The stream alone keeps the link busy to its end, and the late load would come last.
    assert max(outcome.asked_at + outcome.ready_s for outcome in played.outcomes[1:]) > 1.9
    assert played.outcomes[0].ready_s < 1.0
