"""What computing costs: seconds of prefill, decode and linking, and fits of them to samples."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite
from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

SHORTEST_S = 1e-9
"""What counts as this long at least, so that relative errors and ratios stay finite."""


@dataclass(frozen=True)
class PrefillCost:
    """Seconds of one forward pass: ``base_s + token_s * tokens + pair_s * tokens * (context + tokens / 2)``.

    Cut anywhere, the parts of a pass cost together what the pass costs, but for ``base_s``.

    Attributes:
        base_s: Fixed part.
        token_s: Part for each token.
        pair_s: Seconds for each pair of a new token and a token that it attends to.
    """

    base_s: float
    token_s: float
    pair_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative or infinite coefficients."""
        _check_coefficients(self.base_s, self.token_s, self.pair_s)

    def seconds(self, tokens: int, context: int = 0) -> float:
        """Work out what a pass costs."""
        return self.base_s + self.marginal(tokens, context)

    def marginal(self, tokens: int, context: int) -> float:
        """Work out what more tokens add to a pass that runs anyway."""
        return self.token_s * tokens + self.pair_s * tokens * (context + tokens / 2)

    def scaled(self, ratio: float) -> PrefillCost:
        """The same shape of cost, ``ratio`` times as slow."""
        return PrefillCost(self.base_s * ratio, self.token_s * ratio, self.pair_s * ratio)


@dataclass(frozen=True)
class DecodeCost:
    """Seconds to decode a batch: ``base_s + token_s * tokens + byte_s * bytes``.

    tokens, bytes: of all its chunks, or, where several threads decode chunks side by side, of the busiest one's.

    Attributes:
        base_s: Fixed part.
        token_s: Part for each token.
        byte_s: Part for each byte.
    """

    base_s: float
    token_s: float
    byte_s: float = 0.0

    def __post_init__(self) -> None:
        """Refuse negative or infinite coefficients."""
        _check_coefficients(self.base_s, self.token_s, self.byte_s)

    def seconds(self, tokens: int, size: int) -> float:
        """Work out what one batch costs."""
        return self.base_s + self.token_s * tokens + self.byte_s * size

    def apart(self, count: int, tokens: float, size: float) -> float:
        """Work out what chunks cost that are decoded one by one."""
        return self.base_s * count + self.token_s * tokens + self.byte_s * size

    def scaled(self, ratio: float) -> DecodeCost:
        """The same shape of cost, ``ratio`` times as slow."""
        return DecodeCost(self.base_s * ratio, self.token_s * ratio, self.byte_s * ratio)

    def shared(self, batch: int, threads: int) -> DecodeCost:
        """What a chunk of many costs: a batch pays the fixed part once, its threads share the rest."""
        share = -(-batch // threads) / batch
        return DecodeCost(self.base_s / batch, self.token_s * share, self.byte_s * share)

    def beyond(self, other: DecodeCost) -> DecodeCost:
        """What this costs more than a cost that is nowhere larger."""
        return DecodeCost(self.base_s - other.base_s, self.token_s - other.token_s, self.byte_s - other.byte_s)


@dataclass(frozen=True)
class CostModel:
    """Every computing cost between the request and the first token.

    Attributes:
        prefill: Of a forward pass.
        decode: Of a batch.
        link_s_per_token: Seconds per prompt token to link the chunks into one cache at the end.
        query_tokens: Tokens of the question, computed last, with the whole prompt as context.
        repair_rows: Rows of the prompt that are computed anew before that, each against the whole prompt.
        repair_looks: The question runs once more, to choose them.
        repair_scale: What that took in earlier loads, over what passes of as many tokens should take.
        joined: Of a pass that computes for several loads at once, in all its rows, padding included; None: there are
            no such passes. See ``joined_s``.
    """

    prefill: PrefillCost
    decode: DecodeCost
    link_s_per_token: float = 0.0
    query_tokens: int = 0
    repair_rows: int = 0
    repair_looks: bool = False
    repair_scale: float = 1.0
    joined: PrefillCost | None = None

    def __post_init__(self) -> None:
        """Refuse costs below 0."""
        _check_coefficients(self.link_s_per_token, self.query_tokens, self.repair_rows, self.repair_scale)

    def closing_s(self, prompt_tokens: int) -> float:
        """Work out what is left to do when the last chunk is ready: linking, repair and the question's prefill."""
        query = self.prefill.seconds(self.query_tokens, prompt_tokens) if self.query_tokens else 0.0
        return self.link_s_per_token * prompt_tokens + query + self.repair_s(prompt_tokens)

    def repair_s(self, prompt_tokens: int) -> float:
        """Work out what choosing rows and computing them anew takes."""
        rows = self.repair_rows
        if not rows:
            return 0.0
        seconds = self.prefill.base_s + self.prefill.token_s * rows + self.prefill.pair_s * rows * prompt_tokens
        return seconds * self.repair_scale + (self.look_s(prompt_tokens) if self.repair_looks else 0.0)

    def joined_s(self, passes: Sequence[tuple[int, int]]) -> float:
        """Work out what one pass over the rows of several takes, each padded to the longest."""
        if self.joined is None:
            return inf
        return self.joined.base_s + len(passes) * self.joined.marginal(*map(max, zip(*passes, strict=True)))

    def look_s(self, prompt_tokens: int) -> float:
        """Work out what running the question on the prompt takes, to see where it looks."""
        return self.prefill.seconds(self.query_tokens, prompt_tokens)


def busiest(chunks: Sequence[tuple[int, int]], threads: int) -> tuple[int, int]:
    """What the busiest of some threads has to do, each chunk going to whoever has least; all tokens and bytes."""
    if threads == 1:
        return sum(tokens for tokens, _ in chunks), sum(size for _, size in chunks)
    given = [(0, 0)] * threads
    for tokens, size in chunks:
        least = given.index(min(given))
        given[least] = (given[least][0] + tokens, given[least][1] + size)
    return max(given)


def fit_prefill(samples: Iterable[tuple[int, int, float]]) -> PrefillCost:
    """Fit a prefill cost to ``(tokens, context, seconds)`` samples; robust to a few outliers.

    Args:
        samples: Tokens, context and seconds of each pass.

    Returns:
        The cost that fits best.

    Raises:
        ArgumentError: There is no sample, or one is negative or not finite.
    """
    rows = _checked(samples)
    tokens, context = rows[:, 0], rows[:, 1]
    columns = np.stack([np.ones_like(tokens), tokens, tokens * (context + tokens / 2)], axis=1)
    return PrefillCost(*_robust_fit(columns, rows[:, 2]))


def fit_joined(samples: Iterable[tuple[int, int, int, float]]) -> PrefillCost:
    """Fit the cost of joined passes, see ``CostModel.joined``; robust to a few outliers.

    Args:
        samples: Rows, tokens of each, context of each, and seconds of each pass.

    Returns:
        The cost that fits best.

    Raises:
        ArgumentError: There is no sample, or one is negative or not finite.
    """
    rows = _checked([(count * tokens, context + tokens / 2, seconds) for count, tokens, context, seconds in samples])
    columns = np.stack([np.ones(len(rows)), rows[:, 0], rows[:, 0] * rows[:, 1]], axis=1)
    return PrefillCost(*_robust_fit(columns, rows[:, 2]))


def fit_decode(samples: Iterable[tuple[int, int, float]]) -> DecodeCost:
    """Fit a decode cost to ``(tokens, bytes, seconds)`` samples; robust to a few outliers.

    Args:
        samples: Tokens, bytes and seconds of each batch.

    Returns:
        The cost that fits best.

    Raises:
        ArgumentError: There is no sample, or one is negative or not finite.
    """
    rows = _checked(samples)
    columns = np.stack([np.ones(len(rows)), rows[:, 0], rows[:, 1]], axis=1)
    return DecodeCost(*_robust_fit(columns, rows[:, 2]))


def _check_coefficients(*values: float) -> None:
    if any(not (isfinite(value) and value >= 0) for value in values):
        raise ArgumentError(f"cost coefficients must be finite and at least 0, got {values}")


def _checked(samples: Iterable[tuple[float, float, float]]) -> NDArray[np.float64]:
    rows = np.array([tuple(sample) for sample in samples], dtype=np.float64).reshape(-1, 3)
    if not len(rows) or not np.isfinite(rows).all() or (rows < 0).any():
        raise ArgumentError("a fit needs at least one sample, and numbers that are finite and not negative")
    return rows


def _robust_fit(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> list[float]:
    """Non-negative least squares of the relative error, repeated with outliers weighted down (Huber).

    columns: ``[samples, 3]``; seconds: ``[samples]``. Returns the three coefficients.
    """
    # Relative errors: a short pass matters as much as a long one, and noise grows with the time itself.
    scale = 1 / np.maximum(seconds, SHORTEST_S)
    fit = _non_negative(columns * scale[:, None], seconds * scale)
    for _ in range(3):  # it settles in two: a third one moves it by less than 0.001
        # Relative to the fit, not to the sample: a time that is far too short must not gain weight by it.
        inverse = 1 / np.maximum(columns @ fit, SHORTEST_S)
        errors = np.abs(columns @ fit - seconds) * inverse
        knee = max(1.5 * float(np.median(errors)), 1e-6)
        scale = inverse * np.sqrt(np.minimum(1.0, knee / np.maximum(errors, 1e-12)))
        fit = _non_negative(columns * scale[:, None], seconds * scale)
    return [float(value) for value in fit]


def _non_negative(columns: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Exact non-negative least squares for a few columns: the best among the fits on every subset of them."""
    best, best_error = np.zeros(columns.shape[1]), float(target @ target)
    for subset in _subsets(columns.shape[1]):
        part = columns[:, subset]
        norms = np.maximum(np.linalg.norm(part, axis=0), 1e-300)
        fit = np.linalg.lstsq(part / norms, target, rcond=None)[0] / norms
        error = float(np.sum((part @ fit - target) ** 2))
        # Smaller subsets come first: more columns must explain more, or samples of one size would invent a slope.
        if (fit >= 0).all() and error < best_error * (1 - 1e-9) - 1e-18:
            best, best_error = np.zeros(columns.shape[1]), error
            best[list(subset)] = fit
    return best


def _subsets(count: int) -> Sequence[tuple[int, ...]]:
    return [subset for size in range(1, count + 1) for subset in combinations(range(count), size)]
