"""What loads that came in lately leave of the time, against sums over all of them."""

from __future__ import annotations

from math import log
from random import Random
from types import SimpleNamespace

import pytest

from kvwire.controller.state import ArrivalRate

HALF_LIVES = (0.2, 1.0)


def naive(others, now):
    """Loads a second and their share of the time are sums that fade; the larger of two memories counts."""
    rates, shares = [], []
    for half in HALF_LIVES:
        weights = [0.5 ** ((now - at) / half) * log(2) / half for at, _ in others]
        rates.append(sum(weights))
        shares.append(sum(weight * floor for weight, (_, floor) in zip(weights, others, strict=True)))
    return max(rates), max(shares)


@pytest.mark.parametrize("seed", range(40))
def test_sums_that_fade_equal_sums_over_all(seed):
    random, arrivals, loads, now = Random(seed), ArrivalRate(), [], 0.0
    for _ in range(random.randint(1, 30)):
        now += random.choice([0.0, random.expovariate(20), random.expovariate(1)])
        loads.append(SimpleNamespace(floor_s=random.uniform(0.001, 0.2)))
        arrivals.add(loads[-1], now)
    now += random.uniform(0, 1)
    own = random.choice(loads)
    others = [each.came for each in loads if each is not own]
    assert arrivals.others(own, now) == pytest.approx(naive(others, now), rel=1e-6, abs=1e-6)
