"""Constants that were chosen: what each is for fails where it doubles or halves."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from kvwire.controller import (
    BandwidthEstimator,
    PrefillCost,
    PrefillEstimator,
    TtfbEstimator,
    estimators,
    horizons,
    learning,
    workers,
)
from kvwire.controller.horizons import HorizonErrors
from kvwire.controller.workers import Job, Workers

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


def steadiness():
    """Share that is relied on of a link that does not vary."""
    estimator = fed()
    return estimator.low / estimator.value


def trip_after(jumps):
    """Time to first byte, once five times as long, after so many measurements of that."""
    estimator = TtfbEstimator(0.01)
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


def spread_after_calm(samples):
    """Relative error that is expected a few exact passes after noisy ones."""
    estimator = learnt(0.2, 0)
    for _ in range(samples):
        estimator.add(256, 0, estimator.cost.seconds(256))
    return estimator.spread


def overdue():
    """Times its expected seconds after which a pass is slow."""
    job = Job("recompute", 0, 0, (), 0.0, 1.0)
    return next(at / 100 for at in range(1000) if job.slowness(at / 100) > 1)


def slow_for():
    """Seconds for which an engine counts as slow after a pass that was stopped."""
    both = Workers(2)
    both.start("prefill", Job("recompute", 0, 0, (), 0.0, 0.1))
    both.interrupt()
    both.end("prefill", "recompute", (), 0, 0, 1.0)
    return next(at / 100 for at in range(5000) if not both.was_interrupted(1.0 + at / 100))


TABLE = [
    # module, constant, what it decides, bounds of that
    (estimators, "_ERROR_KEPT", low_after_a_dip, (0.85, 0.99)),
    (estimators, "_JUMP", lambda: value_after(5 * MB, 8), (0.55, 0.7)),
    (estimators, "_LEAST_ERROR", steadiness, (0.975, 0.985)),
    (estimators, "_WINDOW", lambda: trip_after(4) + trip_after(5), (0.055, 0.065)),
    (horizons, "_TRUSTED", checks_without_a_word, (0.7, 0.8)),
    (learning, "_SURPRISE", lambda: off(learnt(0.03, 2, 3.0), TRUE.scaled(3.0)), (0.0, 0.05)),
    (learning, "_DRIFT", creeping, (0.0, 0.16)),
    (learning, "_UNSEEN", lambda: without_pairs(3), (0.0, 0.07)),
    (learning, "_SPREAD_WEIGHT", lambda: spread_after_calm(8), (0.02, 0.06)),
    (estimators, "_FALL_SAMPLES", lambda: value_after(3 * MB, 5), (0.0, 0.87)),
    (estimators, "_RISE_SAMPLES", lambda: value_after(30 * MB, 6), (1.5, 2.0)),
    (workers, "OVERDUE", overdue, (1.2, 2.0)),
    (workers, "_SLOW_S", slow_for, (2.0, 4.0)),
]


@pytest.mark.parametrize(("module", "name", "figure", "bounds"), TABLE, ids=[each[1] for each in TABLE])
def test_a_constant_is_what_it_is_for_a_reason(module, name, figure, bounds, monkeypatch):
    low, high = bounds
    assert low <= figure() <= high
    value, found = getattr(module, name), []
    for factor in (0.5, 2.0):
        monkeypatch.setattr(module, name, type(value)(value * factor))
        found.append(low <= figure() <= high)
    assert not all(found)
