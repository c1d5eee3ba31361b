"""When plans are made, and what is left for later, against doing all of it at every event."""

from __future__ import annotations

from copy import deepcopy

import pytest

from kvwire.controller import Goal
from kvwire.controller import events as ev
from kvwire.controller.simulator.arrivals import LoadArrival

from .playing import MB, document, play

GOALS = {"earliest": Goal(), "quality": Goal(objective="quality", deadline_s=1.0)}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("rate", [2 * MB, 20 * MB, 200 * MB])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_arrival_that_lets_nothing_begin_leaves_only_fetches_for_later(goal, rate, workers):
    quiet = []

    def watched(controller):
        dispatch, search = controller._dispatch, controller._dispatch.may_begin

        def may_begin(now):
            if search(now):
                return True
            twin, out = deepcopy(controller), []
            twin._dispatch.act(now, out)
            assert all(isinstance(each, ev.Fetch) for each in out)
            quiet.append(now)
            return False

        dispatch.may_begin = may_begin
        return controller

    arrivals = [LoadArrival(0.0, ((document(chunks=24, tokens=64),),) * 3, GOALS[goal])]
    play(arrivals, rate, wrap=watched, workers=workers, decode_batch=8)
    assert quiet or rate < 20 * MB
