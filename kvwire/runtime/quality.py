"""How much an answer differs from that of exact caches."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvwire.codec import ERROR_NOTE, decode, encode, inspect
from kvwire.runtime.prefill import compute_documents, link_opened, opening_of, prefill_documents, states_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import CacheGenProfile, Ladder, Profile
    from kvwire.codec.kinds.requests import Calibrated
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache


_WINDOWS = 4
"""Documents to calibrate the error on."""
_LEAST_TOKENS = 64
_CONTEXT, _REST = 512, 128
"""Most tokens of a document that are cached, and then read on."""
_READ = slice(None, None, 2)
"""Levels whose KL divergence is measured; the curve interpolates the others."""
_QUANTILE = 0.6
"""Quantile of the points for the curve: above the middle, since other text suffers more than the calibration's."""
_OTHER_TEXT = 1.4
"""Factor on the interval's upper end: text of another kind may have twice the divergence and more
(benchmarks/real_model.py)."""
_WITHIN = (0.1, 0.9)
"""Quantiles of the points for the interval."""
_SLOPES = (0.5, 2.0)
"""Plausible exponents of the error: 0.8 to 1.3 were measured, small errors have 1."""
_TINY = 1e-30
_LEAST_SPREAD = 0.5
"""Least standard deviation of the errors' logarithms to fit an exponent; a single level has less."""


def mean_kl(exact: Tensor, other: Tensor) -> float:
    """Mean KL divergence of next-token distributions."""
    p, q = exact.float().log_softmax(-1), other.float().log_softmax(-1)
    return float(torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(-1).mean())


def greedy_agreement(exact: Tensor, other: Tensor) -> float:
    """Share of positions with the same most likely token."""
    return float((exact.argmax(-1) == other.argmax(-1)).float().mean())


def calibrate_error(
    engine: Engine, profile: Calibrated, documents: Sequence[Sequence[int]], ladder: Ladder | None = None,
    compute: Callable[[Sequence[int]], KVCache] | None = None,
) -> Calibrated:  # fmt: skip
    """Fit the KL divergence that a blob's measured error causes, from text after cached contexts.

    Each document is encoded and decoded at each level except for its last quarter, which is read on top. Text of
    another kind may lie higher, at the finest levels at three times the curve, so give documents of all kinds to be
    encoded. The profile's notes tell how single levels of single documents scatter: ``kl_low`` and ``kl_high`` are
    factors on the prediction that enclose four out of five of these documents, the upper one raised for text of another
    kind; ``kl_exponent_error`` is the exponent's standard error, as if they were independent. ``error_`` with a level's
    name is the geometric mean of blobs' errors there.

    Args:
        engine: The profile's model.
        profile: The profile to complete, of kvwire's own method or CacheGen's.
        documents: Token ids of calibration texts; the longest are used.
        ladder: The quality levels to measure, None: the default or the profile's own.
        compute: Computes a document's cache, of any length and at positions from 0; None: the engine's ``prefill``.

    Returns:
        The profile with ``error_to_kl``; unchanged if the documents are too short.
    """
    from tqdm import tqdm

    windows = _windows(documents)
    points = [
        point
        for ids in tqdm(windows, unit="text", disable=None, desc="measuring errors", file=sys.stderr, delay=1.0)
        for point in _points(engine, profile, ids[: min(_CONTEXT + _REST, engine.window)], ladder, compute)
    ]
    if not points:
        return profile
    errors, kls = np.log(np.array([(point.errors[point.level], point.kl) for point in points])).T
    deviations, spread = errors - errors.mean(), float(errors.std())
    slope = float(np.clip(np.polyfit(errors, kls, 1)[0], *_SLOPES)) if spread > _LEAST_SPREAD else 1.0
    apart = kls - slope * errors
    level, low, high = (float(np.quantile(apart, share)) for share in (_QUANTILE, *_WITHIN))
    high += math.log(_OTHER_TEXT)
    uncertain = float(apart.std() / np.sqrt((deviations**2).sum())) if spread > _LEAST_SPREAD else 0.0
    interval: dict[str, str | int | float] = {
        "kl_low": math.exp(low - level),
        "kl_high": math.exp(high - level),
        "kl_exponent_error": uncertain,
    }
    middle = np.exp(np.log(np.maximum([point.errors for point in points], _TINY)).mean(0))
    interval |= {ERROR_NOTE + name: error for name, error in zip(points[0].names, middle.tolist(), strict=True)}
    return replace(profile, error_to_kl=(math.exp(level), slope), notes=profile.notes | interval)


def _windows(documents: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    """Texts to measure on: an even sample of those long enough, else the longest."""
    long = [ids for ids in documents if len(ids) >= _CONTEXT + _REST]
    if len(long) >= _WINDOWS:
        return [long[number * len(long) // _WINDOWS] for number in range(_WINDOWS)]
    return [ids for ids in sorted(documents, key=len, reverse=True)[:_WINDOWS] if len(ids) >= _LEAST_TOKENS]


class _Point(NamedTuple):
    """Errors of all levels of one document, and the KL divergence at one of them."""

    names: tuple[str, ...]
    errors: tuple[float, ...]
    level: int
    kl: float


def _points(
    engine: Engine, profile: Profile | CacheGenProfile, ids: Sequence[int], ladder: Ladder | None,
    compute: Callable[[Sequence[int]], KVCache] | None,
) -> Iterator[_Point]:  # fmt: skip
    """Points of one document, at every other level."""
    context, rest = ids[: len(ids) * 3 // 4], ids[len(ids) * 3 // 4 :]
    if compute:
        cache, front = compute(context), None
    else:
        (cache,), front = prefill_documents(engine, [context]), opening_of(engine, context)
    start = cache.tokens + len(front or ())
    rest = rest[: engine.window - start]
    if not rest:
        return
    hidden = states_of(engine, context, profile.prefix_layers) if profile.prefix_layers else None

    def past_of(document: KVCache) -> object:
        if front is None:
            return engine.own_past(document)
        return engine.past_key_values(link_opened(engine, [document]) if front else document)

    exact = engine.forward(past_of(cache), rest, start)
    blob = encode(cache, profile, ladder, hidden=hidden)
    levels = inspect(blob).levels
    names = tuple(level.name for level in levels)
    for index in range(len(levels))[_READ]:
        level = levels[index]
        decoded = decode(blob, index, profile, engine.device, engine.dtype, hidden=hidden)
        kl = mean_kl(exact, engine.forward(past_of(decoded), rest, start))
        if 0 < kl < math.inf and level.measured_error > 0:
            yield _Point(names, tuple(each.measured_error for each in levels), index, kl)


@dataclass(frozen=True, eq=False)
class Reference:
    """Logits of linked exact caches for a question and their own answer.

    Attributes:
        start: Position of the question's first token.
        tokens: The question and the exact caches' greedy answer, fed to all compared caches.
        logits: ``[tokens, vocabulary]``.
        full: The same from one full prefill of the prompt, BOS included, in which documents see each other.
        linking_kl: Mean KL divergence in nats of linked exact caches from a full prefill, without the codec.
    """

    start: int
    tokens: tuple[int, ...]
    logits: Tensor
    full: Tensor
    linking_kl: float

    @classmethod
    def of(
        cls,
        engine: Engine,
        documents: Sequence[Sequence[int]],
        question: Sequence[int],
        answer_tokens: int,
        *,
        neutral: int = 0,
        head: Sequence[int] = (),
    ) -> Reference:
        """Compute the documents separately, link them, and let the model answer."""
        caches = compute_documents(engine, documents, neutral)
        linked = link_opened(engine, caches, head)
        start = linked.tokens
        past = engine.past_key_values(linked)
        first = int(engine.forward(past, question, start, logits=1)[-1].argmax())
        room = min(answer_tokens, engine.window - start - len(question))
        answer = engine.generate(past, first, start + len(question), room)
        tokens = (*question, *answer[:-1])
        logits = engine.forward(engine.past_key_values(linked), tokens, start)
        whole = [token for document in documents for token in document]
        full = engine.forward(None, [*(head or engine.opening_tokens), *whole, *tokens], 0, logits=len(tokens))
        return cls(start, tokens, logits, full, mean_kl(full, logits))

    def from_full(self, engine: Engine, cache: KVCache) -> float:
        """Compare another cache of the same prompt with a full prefill."""
        return mean_kl(self.full, engine.forward(engine.past_key_values(cache), self.tokens, self.start))

    def compare(self, engine: Engine, cache: KVCache) -> tuple[float, float]:
        """Compare another cache of the same prompt."""
        logits = engine.forward(engine.past_key_values(cache), self.tokens, self.start)
        return mean_kl(self.logits, logits), greedy_agreement(self.logits, logits)
