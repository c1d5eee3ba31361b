"""What loads that came in lately leave of the time, against sums over all of them."""

from __future__ import annotations

from math import inf, log
from random import Random

import pytest

from kvwire.controller.deadlines import ArrivalRate

HALF_LIVES = (0.2, 1.0)


def naive(others, now, *, least_s, left_s):
    """Loads a second and their share of the time are sums that fade; the larger of two memories counts."""
    rates, shares = [], []
    for half in HALF_LIVES:
        weights = [0.5 ** ((now - at) / half) * log(2) / half for at, _ in others]
        rates.append(sum(weights))
        shares.append(sum(weight * floor for weight, (_, floor) in zip(weights, others, strict=True)))
    if max(rates) <= 1e-3:
        return inf
    spare = max(0.0, 1 - max(shares))
    return max(least_s, min(least_s + spare / max(rates), spare * left_s))


@pytest.mark.parametrize("seed", range(40))
def test_sums_that_fade_equal_sums_over_all(seed):
    random, demand, came, now = Random(seed), ArrivalRate(), [], 0.0
    for _ in range(random.randint(1, 30)):
        now += random.choice([0.0, random.expovariate(20), random.expovariate(1)])
        came.append((now, random.uniform(0.001, 0.2)))
        demand.add(came[-1][1], now)
    now += random.uniform(0, 1)
    own = random.randrange(len(came))
    least_s, left_s = random.uniform(0, 0.5), random.uniform(0, 2)
    got = demand.limit_s(came[own][1], came[own][0], now, least_s=least_s, left_s=left_s)
    others = [each for at, each in enumerate(came) if at != own]
    assert got == pytest.approx(naive(others, now, least_s=least_s, left_s=left_s), rel=1e-6, abs=1e-6)
