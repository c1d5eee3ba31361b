"""How much an answer differs from the one that exact caches give."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec import decode, encode, inspect
from kvwire.reuse import link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import Ladder, Profile
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache


_WINDOWS = 6
"""Documents that the error is calibrated on."""
_LEAST_TOKENS = 64
_CONTEXT, _REST = 1024, 256
"""Tokens of a document that are cached and read on, at most."""
_QUANTILE = 0.8
"""Of the points, on the curve: above the middle, as other text suffers more than that of the calibration."""
_OTHER_TEXT = 1.4
"""What the curve is raised by: text of another kind than the calibration's had 1 to 5 times the divergence, about 2 in
the middle (benchmarks/predicted_kl.py). Half way there, neither kind is far off."""
_WITHIN = (0.1, 0.9)
"""Quantiles of the points that the interval tells."""
_SLOPES = (0.5, 2.0)
"""Exponents of the error that are believed: 0.8 to 1.3 were measured, 1 is what small errors have."""
_LEAST_SPREAD = 0.5
"""Standard deviation of the errors' logarithms from which on an exponent can be fitted; one level alone has less."""


def mean_kl(exact: Tensor, other: Tensor) -> float:
    """Mean KL divergence of next-token distributions.

    Args:
        exact: Logits of the reference, ``[tokens, vocabulary]``.
        other: Logits to compare with it, of the same shape.

    Returns:
        The mean over all tokens, in nats.
    """
    p, q = exact.float().log_softmax(-1), other.float().log_softmax(-1)
    return float(torch.where(p > -math.inf, p.exp() * (p - q), 0.0).sum(-1).mean())


def greedy_agreement(exact: Tensor, other: Tensor) -> float:
    """Share of positions at which both would choose the same token.

    Args:
        exact: Logits of the reference, ``[tokens, vocabulary]``.
        other: Logits to compare with it, of the same shape.

    Returns:
        The share, from 0 to 1.
    """
    return float((exact.argmax(-1) == other.argmax(-1)).float().mean())


def calibrate_error(
    engine: Engine, profile: Profile, documents: Sequence[Sequence[int]], ladder: Ladder | None = None,
    compute: Callable[[Sequence[int]], KVCache] | None = None,
) -> Profile:  # fmt: skip
    """Learn which KL divergence a blob's measured error stands for, from the text that follows cached contexts.

    Of some documents, all but the last quarter is encoded and decoded at each level, and the rest is read on top of it.
    Text of another kind lies higher (benchmarks/predicted_kl.py measures that), so the curve is drawn half way there;
    at the finest levels it may lie at three times the curve. Give documents of all the kinds that are to be encoded:
    from those of one kind nobody can tell what the others need.
    The notes of the profile tell how far single levels of single documents lie from it: ``kl_low`` and ``kl_high`` are
    factors on the prediction between which four out of five of these documents lie, the upper one raised to what text
    of another kind has; ``kl_exponent_error`` is the exponent's standard error, as if they were independent.

    Args:
        engine: The model that the profile was fitted for.
        profile: The profile to complete.
        documents: Token ids of calibration texts; the longest are used.
        ladder: The quality levels to measure, None for the default.
        compute: Computes a document's cache, of any length and at positions from 0; None: the engine's ``prefill``.

    Returns:
        The profile with ``error_to_kl``, unchanged where the documents are too short to tell.
    """
    points = [
        point
        for ids in sorted(documents, key=len, reverse=True)[:_WINDOWS]
        if len(ids) >= _LEAST_TOKENS
        for point in _points(engine, profile, ids[: min(_CONTEXT + _REST, engine.window)], ladder, compute)
    ]
    if not points:
        return profile
    errors, kls = np.log(np.array(points)).T
    deviations, spread = errors - errors.mean(), float(errors.std())
    slope = float(np.clip(np.polyfit(errors, kls, 1)[0], *_SLOPES)) if spread > _LEAST_SPREAD else 1.0
    apart = kls - slope * errors
    level, low, high = (float(np.quantile(apart, share)) for share in (_QUANTILE, *_WITHIN))
    level, high = level + math.log(_OTHER_TEXT), high + 2 * math.log(_OTHER_TEXT)
    uncertain = float(apart.std() / np.sqrt((deviations**2).sum())) if spread > _LEAST_SPREAD else 0.0
    interval: dict[str, str | int | float] = {
        "kl_low": math.exp(low - level),
        "kl_high": math.exp(high - level),
        "kl_exponent_error": uncertain,
    }
    return replace(profile, error_to_kl=(math.exp(level), slope), notes=profile.notes | interval)


def _points(
    engine: Engine, profile: Profile, ids: Sequence[int], ladder: Ladder | None,
    compute: Callable[[Sequence[int]], KVCache] | None,
) -> Iterator[tuple[float, float]]:  # fmt: skip
    """Measured error and KL divergence of one document at each level."""
    context, rest = ids[: len(ids) * 3 // 4], ids[len(ids) * 3 // 4 :]
    cache = compute(context) if compute else engine.prefill([context])[0]
    rest = rest[: engine.window - cache.tokens]
    if not rest:
        return
    hidden = engine.prefix_states(context, profile.prefix_layers) if profile.prefix_layers else None
    past_of = engine.own_past if compute else engine.past_key_values
    exact = engine.forward(past_of(cache), rest, cache.tokens)
    blob = encode(cache, profile, ladder, hidden=hidden)
    for index, level in enumerate(inspect(blob).levels):
        decoded = decode(blob, index, profile, engine.device, engine.dtype, hidden=hidden)
        kl = mean_kl(exact, engine.forward(past_of(decoded), rest, cache.tokens))
        if 0 < kl < math.inf and level.measured_error > 0:
            yield level.measured_error, kl


@dataclass(frozen=True, eq=False)
class Reference:
    """What exact caches, linked in the same way, make of a question and of the answer that they give.

    Attributes:
        start: Position of the question's first token.
        tokens: The question and the exact caches' greedy answer, fed to both sides.
        logits: Of all of them, ``[tokens, vocabulary]``.
        full: The same from one full prefill of the prompt, in which documents see each other.
        linking_kl: Mean KL divergence in nats of linked exact caches against one full prefill of the prompt; not the
            codec's doing.
    """

    start: int
    tokens: tuple[int, ...]
    logits: Tensor
    full: Tensor
    linking_kl: float

    @classmethod
    def of(
        cls, engine: Engine, documents: Sequence[Sequence[int]], question: Sequence[int], answer_tokens: int
    ) -> Reference:
        """Prefill the documents one by one, link them, and let the model answer.

        Args:
            engine: The model.
            documents: Token ids of each document, in prompt order.
            question: Token ids of the question.
            answer_tokens: Longest answer, in tokens; the model's window may shorten it.

        Returns:
            The reference to compare other caches of the same prompt with.
        """
        linked = link([engine.prefill([document])[0] for document in documents])
        start = linked.tokens
        past = engine.past_key_values(linked)
        first = int(engine.forward(past, question, start, logits=1)[-1].argmax())
        room = min(answer_tokens, engine.window - start - len(question))
        answer = engine.generate(past, first, start + len(question), room)
        tokens = (*question, *answer[:-1])
        logits = engine.forward(engine.past_key_values(linked), tokens, start)
        whole = [token for document in documents for token in document]
        full = engine.forward(None, [*whole, *tokens], 0, logits=len(tokens))
        return cls(start, tokens, logits, full, mean_kl(full, logits))

    def from_full(self, engine: Engine, cache: KVCache) -> float:
        """Compare another cache of the same prompt with a full prefill.

        Args:
            engine: The model that made the reference.
            cache: All documents of the prompt, linked.

        Returns:
            Mean KL divergence in nats.
        """
        return mean_kl(self.full, engine.forward(engine.past_key_values(cache), self.tokens, self.start))

    def compare(self, engine: Engine, cache: KVCache) -> tuple[float, float]:
        """Compare another cache of the same prompt.

        Args:
            engine: The model that made the reference.
            cache: All documents of the prompt, linked.

        Returns:
            Mean KL divergence in nats, and greedy agreement from 0 to 1.
        """
        logits = engine.forward(engine.past_key_values(cache), self.tokens, self.start)
        return mean_kl(self.logits, logits), greedy_agreement(self.logits, logits)
