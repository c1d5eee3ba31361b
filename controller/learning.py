"""Costs learnt while loading: a wrong prior heals after a measurement or two, its shape as they grow diverse."""

from __future__ import annotations

from dataclasses import astuple
from math import inf, isfinite, log, pi, sqrt
from statistics import median
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from kvwire.errors import ArgumentError

from .costs import SHORTEST_S, DecodeCost, PrefillCost
from .estimators import MOST_KNOWN, UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Row = tuple[float, float, float]
    Array = NDArray[np.float64]

_UNSEEN = 0.1  # share of a measured time that a coefficient may explain though the prior says 0
_DRIFT = 0.003  # sigma by which a coefficient drifts from one measurement to the next, relative
_SURPRISE = 3.0  # sigma: what is further off counts as that far; twice in a row, the machine's speed has changed
_NOISE = 0.05  # sigma of a measurement, relative


Cost = TypeVar("Cost", PrefillCost, DecodeCost)


class _Estimator(Generic[Cost]):
    """Three coefficients of a cost that is linear in a row of three numbers, by a Kalman filter of relative errors.

    The first measurements bring the prior to their scale, which an odd one among them does not move, and are then taken
    in one by one. An outlier counts little; another one to the same side shows that the machine's speed has changed.
    """

    def __init__(self, prior: Cost, *, spread: float = UNKNOWN, known: int = 0) -> None:
        """Start from ``prior``, with a relative 1-sigma error of ``spread``, learnt from ``known`` measurements."""
        if not (0 <= spread < inf and known >= 0):
            msg = f"a spread must be a finite number and known a count, both at least 0, got {spread} and {known}"
            raise ArgumentError(msg)
        self._cost: Cost = prior
        self._coefficients = self._prior = np.array(astuple(prior), np.float64)
        self._trust = 2 if known else 0  # measurements that a prior of which anything is known outweighs
        self.known = min(known, MOST_KNOWN)  # measurements behind the fit, those of the prior included
        self._error = spread / sqrt(pi / 2)  # mean of the latest, absolute; sigma, were they normally distributed
        self._first: list[tuple[Array, float]] = []
        self._surprise = 0.0  # share by which the latest measurement was off, where that was a surprise

    @property
    def cost(self) -> Cost:
        """The fit so far; the same object as long as nothing changes."""
        return self._cost

    @property
    def spread(self) -> float:
        """Relative 1-sigma error of predictions, from what they lately were off by."""
        return sqrt(pi / 2) * self._error

    @property
    def high(self) -> float:
        """Factor that most measurements stay under: two standard deviations."""
        return 1 + 2 * self.spread

    @property
    def is_measured(self) -> bool:
        """Whether anything was measured since the prior."""
        return bool(self._first)

    def _learn(self, row: Row, seconds: float) -> None:
        if not (isfinite(seconds) and seconds >= 0 and isfinite(sum(row)) and min(row) >= 0):
            raise ArgumentError(f"a measurement needs finite numbers of at least 0, got {row} in {seconds} s")
        measured = np.array(row)
        expected = float(self._coefficients @ measured)
        seconds = max(seconds, SHORTEST_S)
        if expected > 0 and (self.known or self._first):  # that a mere guess was wrong says nothing of the next one
            error = min(abs(log(seconds / expected)), UNKNOWN)  # an outlier does not cast doubt on all the rest
            self._error += (error - self._error) / (self.known + 1)
        self.known = min(self.known + 1, MOST_KNOWN)
        if len(self._first) < MOST_KNOWN:
            self._first.append((measured, seconds))
            self._restart()
        else:
            self._correct(measured, seconds)
        self._cost = type(self._cost)(*map(float, self._coefficients))

    def _restart(self) -> None:
        """Begin with the prior at the scale of the first measurements, the middle one of them and it."""
        expected = [float(self._prior @ row) for row, _ in self._first]
        if min(expected) >= SHORTEST_S:
            ratios = [seconds / each for each, (_, seconds) in zip(expected, self._first, strict=True)]
            ratios += [1.0] * max(self._trust - len(ratios) + 1, 1 - len(ratios) % 2)
            self._coefficients = self._prior * median(ratios)
        # A coefficient may be off by what it is, or by a share of what the measurements leave room for.
        room = np.min([seconds / np.maximum(row, 1.0) for row, seconds in self._first], axis=0)
        self._unit = np.maximum(self._coefficients, room * (_UNSEEN if self._prior.any() else 1.0))
        self._covariance, self._surprise = np.eye(3), 0.0
        for row, seconds in self._first:
            self._correct(row, seconds)

    def _correct(self, row: Array, seconds: float) -> None:
        """Take in a measurement, in shares of what was expected."""
        expected = float(self._coefficients @ row)
        whole = expected if expected >= SHORTEST_S else seconds
        seen, off = row * self._unit / whole, (seconds - expected) / whole
        self._covariance += np.diag((_DRIFT * self._coefficients / self._unit) ** 2)
        joint = self._covariance @ seen
        variance = float(seen @ joint) + _NOISE**2
        most = _SURPRISE * max(sqrt(variance), self._error)
        if abs(off) <= most:
            self._surprise = 0.0
        elif self._surprise * off > 0:
            self._coefficients = self._coefficients * (1 + min(self._surprise, off, key=abs))
            at = self._error * self._coefficients / self._unit
            self._covariance += np.outer(at, at)  # two measurements tell no more of the scale
            self._surprise = 0.0
            return
        else:
            self._surprise, off = off, most if off > 0 else -most
        gain = joint / variance
        left = np.eye(3) - np.outer(gain, seen)  # Joseph's form: rounding leaves no negative variance
        self._covariance = left @ self._covariance @ left.T + _NOISE**2 * np.outer(gain, gain)
        self._coefficients = np.maximum(self._coefficients + self._unit * gain * off, 0.0)


class PrefillEstimator(_Estimator[PrefillCost]):
    """Cost of forward passes, as measured."""

    def add(self, tokens: int, context: int, seconds: float) -> None:
        """Take in one pass over ``tokens`` new tokens behind ``context`` tokens that were ready."""
        self._learn((1.0, float(tokens), tokens * (context + tokens / 2)), seconds)


class JoinedEstimator(PrefillEstimator):
    """Cost of passes over rows of several loads, as measured; it follows the speed that passes alone show.

    Else an engine that became quicker would never join, and so never learn what joining takes now.
    """

    def __init__(self, prior: PrefillCost, alone: PrefillEstimator, *, spread: float = UNKNOWN, known: int = 0) -> None:
        """Start from ``prior``, as ``PrefillEstimator`` does."""
        super().__init__(prior, spread=spread, known=known)
        self._alone, self._first_s = alone, self._chunk_s(alone)
        self._scaled, self._told = (prior, 1.0), prior

    def add_rows(self, passes: Sequence[tuple[int, int]], seconds: float) -> None:
        """Take in one joined pass."""
        tokens, context = map(max, zip(*passes, strict=True))
        padded = float(len(passes) * tokens)
        self._learn((1.0, padded, padded * (context + tokens / 2)), seconds / self._slower())

    def _slower(self) -> float:
        """How many times as long passes alone take as they did in the beginning."""
        return self._chunk_s(self._alone) / self._first_s if self._first_s > 0 else 1.0

    @staticmethod
    def _chunk_s(alone: PrefillEstimator) -> float:
        """A chunk's pass, by which an engine's speed is told."""
        return alone.cost.seconds(256)

    @property
    def cost(self) -> PrefillCost:
        """The fit so far, at the engine's present speed; the same object as long as nothing changes."""
        fit, speed = super().cost, self._slower()
        if (fit, speed) != self._scaled:
            self._scaled, self._told = (fit, speed), fit.scaled(speed)
        return self._told


class DecodeEstimator(_Estimator[DecodeCost]):
    """Cost of decoding, as measured."""

    def add(self, tokens: int, size: int, seconds: float) -> None:
        """Take in ``tokens`` tokens decoded from ``size`` bytes, in a batch that pays the fixed cost once."""
        self._learn((1.0, float(tokens), float(size)), seconds)
