"""Costs learnt while loading: a wrong prior heals after a measurement or two, its shape as they grow diverse."""

from __future__ import annotations

from collections import defaultdict, deque
from functools import partial
from math import exp, inf, isfinite, log
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

from .costs import SHORTEST_S, DecodeCost, PrefillCost
from .estimators import RecentMedian

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Row = tuple[float, float, float]
    Sample = tuple[int, Row, float]  # number, row, seconds
    Array = NDArray[np.float64]

DEFAULT_SPREAD = 0.5
"""Relative 1-sigma error expected of a cost of which nothing is known."""
MOST_KNOWN = 8
"""Measurements that are enough to trust a fit; more of them change nothing."""
_WINDOW = 64
_HALF_LIFE = 16.0  # samples after which one weighs half
_LEAST_WEIGHT = 0.25  # of the only sample of its size, however old
_PRIOR_WEIGHT = 0.5  # of a sample, in the scale: one sample outvotes a guess, two outvote what is known
_RIDGE = 1e-3  # variance of a sample's relative error over that which a prior leaves a coefficient
_FLOOR = 0.1  # share of a sample's time that a coefficient may explain though the prior says 0
_MOST_RATIO = 64  # of one measurement to what was expected; the next may go on from there
_ROUNDS = 3
_ROUNDING = 1e-12  # keeps what is to be solved regular
_KNEE = 0.05  # relative errors up to this are no outliers
_DRIFT_SAMPLES = 3
_LEAST_DRIFT = 0.1
_UNFITTED_SHARE, _MOST_UNFITTED = 4, 12  # fits cost a part of a millisecond: one for a quarter more samples, or so many
_LEAST_MISSED = 0.005  # a prior that no measurement was further from needs no fit
_USUAL_TOKENS = 256  # of the pass by which an engine's speed is told
_SURPRISE = 2.0  # times the usual error
_SPREAD_WEIGHT = 0.15
_MOST_ERROR = 0.7  # in logarithms: an outlier does not cast doubt on all the rest
_MEAN_TO_SIGMA = 1.2533  # of a normal distribution's absolute errors
_CLOSINGS, _LEAST_CLOSINGS = 12, 3  # of which a quartile is taken
_QUARTILE_TO_TWO_SIGMA = 2.965  # of a normal distribution
_LEAST_COST = 1e-18  # seconds; below it is noise of arithmetic, and no ratio could be taken


class _Window:
    """A bounded choice of samples: the latest of each size, so that many alike do not push out the rare long one."""

    def __init__(self) -> None:
        self._strata: dict[tuple[int, ...], deque[Sample]] = defaultdict(partial(deque, maxlen=MOST_KNOWN))
        self._added = 0

    def add(self, row: Row, seconds: float) -> None:
        """Take in a sample; where there are too many, the oldest of the best known size goes."""
        stratum = tuple(int(value).bit_length() for value in row)
        self._strata[stratum].append((self._added, row, seconds))
        self._added += 1
        if sum(map(len, self._strata.values())) > _WINDOW:
            fullest = max(self._strata, key=lambda key: (len(self._strata[key]), -self._strata[key][0][0]))
            self._strata[fullest].popleft()
            if not self._strata[fullest]:
                del self._strata[fullest]

    def rescale(self, ratio: float) -> None:
        """Make all samples but the latest ``ratio`` times as long: the speed has changed to what those show."""
        before = self._added - _DRIFT_SAMPLES
        for stratum in self._strata.values():
            for index, (number, row, seconds) in enumerate(stratum):
                if number < before:
                    stratum[index] = (number, row, seconds * ratio)

    @property
    def added(self) -> int:
        """Samples taken in so far, those that are gone included."""
        return self._added

    def arrays(self) -> tuple[Array, Array, Array]:
        """Rows ``[samples, 3]``, seconds and weights ``[samples]``, oldest first."""
        samples = sorted(sample for stratum in self._strata.values() for sample in stratum)
        rows = np.array([row for _, row, _ in samples])
        age = self._added - 1 - np.array([number for number, _, _ in samples], dtype=np.float64)
        weights = np.maximum(np.exp2(-age / _HALF_LIFE), _LEAST_WEIGHT)
        return rows, np.array([seconds for _, _, seconds in samples]), weights


class _Learner:
    """Three coefficients of a cost that is linear in a row of three numbers.

    The prior's scale is set first, by the median ratio of measured to expected seconds; then a ridge fit around the
    scaled prior lets diverse samples change the shape as far as they can tell. Where the latest samples agree that the
    machine's speed has changed, the earlier ones are brought to the new speed.
    """

    def __init__(self, prior: Row, spread: float, known: int) -> None:
        if not (0 <= spread < inf and known >= 0):
            msg = f"a spread must be a finite number and known a count, both at least 0, got {spread} and {known}"
            raise ArgumentError(msg)
        self._prior = _rounded(np.array(prior))
        self._prior_known = min(known, MOST_KNOWN)
        self._window = _Window()
        self._error = spread / _MEAN_TO_SIGMA
        self._fitted = self._prior
        self._unfitted = 0  # samples that came since
        self._missed = 0.0  # by how much any prediction was off
        self._is_due = False

    def add(self, row: Row, seconds: float) -> None:
        if not (isfinite(seconds) and seconds >= 0 and isfinite(sum(row)) and min(row) >= 0):
            raise ArgumentError(f"a measurement needs finite numbers of at least 0, got {row} in {seconds} s")
        if self._is_due:
            self._refit()
        expected = float(self._fitted @ row)
        if expected > 0:
            seconds = min(max(seconds, expected / _MOST_RATIO), max(expected, SHORTEST_S) * _MOST_RATIO)
        seconds = max(seconds, SHORTEST_S)
        error = min(abs(log(seconds / expected)), _MOST_ERROR) if expected > 0 else _MOST_ERROR
        self._is_due = error > max(_LEAST_DRIFT, _SURPRISE * self._error)
        # That a mere guess was wrong says nothing about the next prediction.
        if expected > 0 and (self._window.added or self._prior_known):
            weight = max(_SPREAD_WEIGHT, 1 / (self._prior_known + self._window.added + 1))
            self._error += weight * (error - self._error)
        self._window.add(row, seconds)
        self._unfitted += 1
        self._missed = max(self._missed, error)
        waits = min(self._window.added // _UNFITTED_SHARE, _MOST_UNFITTED)
        self._is_due |= self._unfitted >= waits and self._missed > _LEAST_MISSED

    @property
    def known(self) -> int:
        return min(self._prior_known + self._window.added, MOST_KNOWN)

    @property
    def is_measured(self) -> bool:
        return self._window.added > 0

    @property
    def spread(self) -> float:
        return _MEAN_TO_SIGMA * self._error

    @property
    def coefficients(self) -> Array:
        """The fit: anew for each of the first samples and for a surprising one, later for every few, then seldom."""
        if self._is_due:
            self._refit()
        return self._fitted

    def _refit(self) -> None:
        rows, seconds, weights = self._window.arrays()
        fit = _ridge(rows, seconds, weights, self._scaled_prior(rows, seconds, weights))
        drift = _drift(np.log(seconds / np.maximum(rows @ fit, SHORTEST_S)), weights)
        if drift:
            self._window.rescale(exp(drift))
        self._fitted, self._unfitted, self._is_due = _rounded(fit * exp(drift)), 0, False

    def _scaled_prior(self, rows: Array, seconds: Array, weights: Array) -> Array:
        expected = rows @ self._prior
        if not (expected > 0).all():
            return self._prior
        ratios = np.log(seconds / expected)
        trust = _PRIOR_WEIGHT + self._prior_known / MOST_KNOWN
        return self._prior * exp(_median(np.append(ratios, 0.0), np.append(weights, trust)))


class _Estimator:
    """What is learnt of a cost."""

    def __init__(self, prior: Row, spread: float, known: int) -> None:
        self._learner = _Learner(prior, spread, known)
        self._written: Array | None = None  # the fit of which the cost was made that is told

    @property
    def spread(self) -> float:
        """Relative 1-sigma error of predictions, from what they lately were off by."""
        return self._learner.spread

    @property
    def high(self) -> float:
        """Factor that most measurements stay under: two standard deviations."""
        return 1 + 2 * self._learner.spread

    @property
    def known(self) -> int:
        """Measurements behind the fit, those of the prior included, up to ``MOST_KNOWN``."""
        return self._learner.known

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured since the prior."""
        return self._learner.is_measured


class PrefillEstimator(_Estimator):
    """Cost of forward passes, as measured."""

    def __init__(self, prior: PrefillCost, *, spread: float = DEFAULT_SPREAD, known: int = 0) -> None:
        """Start from ``prior``, with a relative 1-sigma error of ``spread``, learnt from ``known`` measurements."""
        super().__init__((prior.base_s, prior.token_s, prior.pair_s), spread, known)

    def add(self, tokens: int, context: int, seconds: float) -> None:
        """Take in one pass over ``tokens`` new tokens behind ``context`` tokens that were ready."""
        self._learner.add((1.0, float(tokens), tokens * (context + tokens / 2)), seconds)

    @property
    def cost(self) -> PrefillCost:
        """The fit so far, see ``_Learner.coefficients``."""
        fit = self._learner.coefficients
        if fit is not self._written:  # it is asked for far more often than it changes
            self._written, self._cost = fit, PrefillCost(*map(float, fit))
        return self._cost


class JoinedEstimator(PrefillEstimator):
    """Cost of passes over rows of several loads, as measured; it follows the speed that passes alone show.

    Else an engine that became quicker would never join, and so never learn what joining takes now.
    """

    def __init__(
        self, prior: PrefillCost, alone: PrefillEstimator, *, spread: float = DEFAULT_SPREAD, known: int = 0
    ) -> None:
        """Start from ``prior``, as ``PrefillEstimator`` does."""
        super().__init__(prior, spread=spread, known=known)
        self._alone, self._first_s = alone, alone.cost.seconds(_USUAL_TOKENS)
        self._speed, self._told = 1.0, prior

    def add_rows(self, passes: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take in one joined pass."""
        tokens, context = map(max, zip(*passes, strict=True))
        padded = float(len(passes) * tokens)
        self._learner.add((1.0, padded, padded * (context + tokens / 2)), seconds / self._slower())

    def _slower(self) -> float:
        """How many times as long passes alone take as they did in the beginning."""
        return self._alone.cost.seconds(_USUAL_TOKENS) / self._first_s if self._first_s > 0 else 1.0

    @property
    def cost(self) -> PrefillCost:
        """The fit so far, at the engine's present speed; the same object as long as nothing changes."""
        fit, speed = super().cost, self._slower()
        if fit is not self._fit or speed != self._speed:
            self._fit, self._speed, self._told = fit, speed, fit.scaled(speed)
        return self._told

    _fit: PrefillCost | None = None


class DecodeEstimator(_Estimator):
    """Cost of decoding, as measured."""

    def __init__(self, prior: DecodeCost, *, spread: float = DEFAULT_SPREAD, known: int = 0) -> None:
        """Start from ``prior``, with a relative 1-sigma error of ``spread``, learnt from ``known`` measurements."""
        super().__init__((prior.base_s, prior.token_s, prior.byte_s), spread, known)

    def add(self, tokens: int, size: int, seconds: float) -> None:
        """Take in ``tokens`` tokens decoded from ``size`` bytes, in a batch that pays the fixed cost once."""
        self._learner.add((1.0, float(tokens), float(size)), seconds)

    @property
    def cost(self) -> DecodeCost:
        """The fit so far, see ``_Learner.coefficients``."""
        fit = self._learner.coefficients
        if fit is not self._written:
            self._written, self._cost = fit, DecodeCost(*map(float, fit))
        return self._cost


class ClosingEstimator:
    """Seconds per prompt token of linking and handing the cache over, beyond the question's forward pass."""

    def __init__(self, prior: float) -> None:
        """Start at ``prior`` seconds per token."""
        self._recent = RecentMedian(prior)
        self._beyond: deque[float] = deque(maxlen=_CLOSINGS)

    def add(self, prompt_tokens: int, seconds: float) -> None:
        """Take in one closing, less what the question's pass should take: below 0, it cost nothing."""
        if prompt_tokens < 1 or not isfinite(seconds):
            msg = f"a closing has tokens and a finite number of seconds, got {prompt_tokens} and {seconds}"
            raise ArgumentError(msg)
        self._beyond.append(seconds - self.link_s_per_token * prompt_tokens)
        self._recent.add(max(0.0, seconds) / prompt_tokens)

    @property
    def link_s_per_token(self) -> float:
        """Expected seconds per prompt token."""
        return self._recent.value

    @property
    def unsure_s(self) -> float:
        """Seconds that most closings take at most beyond what is expected: two standard deviations, by a quartile."""
        if len(self._beyond) < _LEAST_CLOSINGS:
            return 0.0
        return _QUARTILE_TO_TWO_SIGMA * max(0.0, sorted(self._beyond)[(3 * len(self._beyond)) // 4])

    @property
    def is_measured(self) -> bool:
        """Whether any load was closed yet."""
        return self._recent.is_measured


class RepairEstimator:
    """What repairing prompts takes, over what passes of as many tokens should take."""

    def __init__(self, prior: float = 1.0) -> None:
        """Start from what is assumed."""
        self._recent = RecentMedian(prior)

    def add(self, expected_s: float, seconds: float) -> None:
        """Take in one repair."""
        if expected_s > 0 and isfinite(seconds) and seconds > 0:
            self._recent.add(min(max(seconds / expected_s, 1 / _MOST_RATIO), _MOST_RATIO))

    @property
    def scale(self) -> float:
        """Expected ratio."""
        return self._recent.value


def _rounded(coefficients: Array) -> Array:
    return np.where(coefficients < _LEAST_COST, 0.0, coefficients)


def _median(values: Array, weights: Array) -> float:
    """Weighted median; of two values the first that half of the weight does not exceed."""
    order = values.argsort()
    total = weights[order].cumsum()
    return float(values[order[total.searchsorted(total[-1] / 2)]])


def _ridge(rows: Array, seconds: Array, weights: Array, prior: Array) -> Array:
    """Non-negative least squares of relative errors, held to a prior; outliers are weighted down (Huber).

    rows: ``[samples, 3]``; seconds, weights: ``[samples]``; prior: ``[3]``, of the right scale. Returns ``[3]``.
    """
    width = _widths(rows, seconds, prior)
    unit = centre = prior / width
    expected = seconds  # no outliers to begin with; a time that is far too long weighs little all the same
    for _ in range(_ROUNDS):
        inverse = 1 / np.maximum(expected, SHORTEST_S)
        errors = np.abs(expected - seconds) * inverse
        knee = max(1.5 * _median(errors, weights), _KNEE)
        trust = weights * np.minimum(1.0, knee / np.maximum(errors, _KNEE))
        root = inverse * np.sqrt(trust)
        # In units of the prior's own uncertainty the ridge is the same for all three.
        scaled = rows * (width * root[:, None])
        ridge = _RIDGE + _ROUNDING * float((scaled**2).sum())
        unit = _non_negative(scaled.T @ scaled + ridge * np.eye(3), scaled.T @ (seconds * root) + ridge * centre)
        expected = rows @ (unit * width)
    return unit * width


def _non_negative(normal: Array, target: Array) -> Array:
    """Solve normal equations ``[3, 3]``, with what comes out negative set to 0 and the rest solved again."""
    free = np.ones(len(target), dtype=bool)
    fit = np.asarray(np.linalg.solve(normal, target), dtype=np.float64)
    while (fit < 0).any():
        free &= fit > 0
        fit = np.zeros(len(target))
        fit[free] = np.linalg.solve(normal[np.ix_(free, free)], target[free])
    return fit


def _widths(rows: Array, seconds: Array, prior: Array) -> Array:
    """How far each coefficient may be from the prior's: as far as it is large, and as far as samples suggest."""
    expected = rows @ prior
    expected = np.where(expected > 0, expected, seconds)
    most = expected[rows.argmax(axis=0)] / np.maximum(rows.max(axis=0), 1.0)
    widths: Array = np.maximum(prior, (_FLOOR if prior.any() else 1.0) * most)
    return widths


def _drift(residuals: Array, weights: Array) -> float:
    """Logarithm by which all of the latest samples, oldest first, show the machine to be slower than the fit."""
    if len(residuals) < MOST_KNOWN:
        return 0.0  # the shape may be what is wrong
    latest = sorted(map(float, residuals[-_DRIFT_SAMPLES:]))[_DRIFT_SAMPLES // 2]
    noise = 3 * _median(np.abs(residuals), weights)
    return latest if abs(latest) > max(noise, _LEAST_DRIFT) else 0.0
