"""A link that falls while all is on its way: what idle compute beats is given up before the next chunk is here."""

from __future__ import annotations

import numpy as np
import pytest

from kvwire.controller import Goal
from kvwire.controller import events as ev
from kvwire.controller.policies import TextOnly
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.types.rates import RateTrace

from .playing import MB, ByHand, document, play, quality

SIX = LoadArrival(0.0, ((document(),),) * 6, Goal(), index_s=0.0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("after", [1e-1, 1e-2, 1e-3])
@pytest.mark.parametrize(("before", "at"), [(20, 0.03), (16, 0.03), (4, 0.1), (1, 0.3)])
def test_a_load_whose_link_falls_takes_little_longer_than_from_text(before, at, after, workers):
    rate = RateTrace((0.0, at), (before * MB, after * MB), 1e3)
    (text,) = play([SIX], rate, policy=TextOnly(), workers=workers).outcomes
    (load,) = play([SIX], rate, workers=workers).outcomes
    assert load.recomputed
    assert load.ttft_s < at + text.ttft_s + 0.1


@pytest.mark.parametrize("silent_s", [0.01, 0.1, 0.2])
def test_what_is_planned_rests_on_less_the_longer_nothing_comes(silent_s):
    steps = ByHand(quality(2.0), document(32), workers=2, prior=4 * MB)
    steps.begin()
    for number in range(10):
        steps.tell(ev.TransferProgress(20_000, 0.01 + 0.005 * number, 0.015 + 0.005 * number), 0.015 + 0.005 * number)
    link = steps.controller._state.link
    before = np.array([link.bandwidth, link.bandwidth_low, link.low_over(0.4)])
    steps.tell(ev.Tick(), 0.06 + silent_s)
    left = np.array([link.bandwidth, link.bandwidth_low, link.low_over(0.4)]) / before
    assert max(left) == pytest.approx(min(left))
    assert max(left) == 1 if silent_s < 0.02 else 0 < max(left) < 1 - 2 * silent_s
    steps.tell(ev.TransferProgress(20_000, 0.06, 0.061 + silent_s), 0.061 + silent_s)
    assert link.bandwidth == steps.controller.estimates.bandwidth.value
