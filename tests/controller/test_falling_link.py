"""A link that falls while all is on its way: what idle compute beats is given up before the next chunk is here."""

from __future__ import annotations

import pytest

from kvwire.controller import Goal
from kvwire.controller.policies import TextOnly
from kvwire.controller.simulator.arrivals import LoadArrival
from kvwire.types.rates import RateTrace

from .playing import MB, document, play

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
