"""First and second moments of calibration caches, gathered in one pass of bounded memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.transform.analysis import gather_planes
from kvwire.errors import ArgumentError, CacheValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.fitting.statistics import Vocabulary
    from kvwire.codec.planes import Plane
    from kvwire.types import KVCache

_CHUNK = 1024
"""Tokens gathered at a time."""
_MATRIX = 2
_TRIALS = 1024
"""Tokens that fits are tried on."""
_HASH = 2654435761
_HASH_SHIFT = 12
"""Knuth's multiplicative hash: neighbours in the vocabulary fall apart."""


@dataclass(eq=False)
class Moments:
    """Means and covariances, float64, of some elements x and of the features f of their tokens.

    Attributes:
        mean: ``[width]``.
        covariance: ``[width, width]``.
        cross: ``[features, width]`` = E[f x^T] about the means.
        apart: What tokens set apart add to ``cross`` times the number of tokens.
        examples: The same of the vocabulary's examples, summed about the same means.
        trials: float32 ``[n, width]``, elements of some tokens set apart.
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    apart: Tensor
    examples: Tensor
    trials: Tensor


@dataclass(eq=False)
class FeatureMoments:
    """Means and covariances, float64, of the features alone.

    Attributes:
        tokens: How many they are over.
        mean: ``[features]``.
        covariance: ``[features, features]``.
        apart: What tokens set apart add to the covariance times the number of tokens.
        example_tokens: Number of the vocabulary's examples.
        examples: What they add, about the same mean.
        trials: float32 ``[n, features]`` of some tokens set apart.
    """

    tokens: int
    mean: Tensor
    covariance: Tensor
    apart: Tensor
    example_tokens: int
    examples: Tensor
    trials: Tensor


class Features:
    """Features of every token of the calibration caches: the token's own, or those of its hidden states.

    hidden: for each cache ``[tokens, size]``; without it, the vocabulary's features serve, where there are any.
    """

    def __init__(
        self, caches: Sequence[KVCache], vocabulary: Vocabulary | None, hidden: Sequence[Tensor] | None
    ) -> None:
        """Check that every cache has what is asked of it.

        Args:
            caches: The calibration caches.
            vocabulary: What is known of tokens; None for no prediction from them.
            hidden: Hidden states ``[tokens, size]`` for each cache; None for no prediction from them.

        Raises:
            ArgumentError: A cache lacks token ids or hidden states.
        """
        if hidden is not None and [len(h) for h in hidden] != [cache.tokens for cache in caches]:
            msg = "hidden states must be one [tokens, size] tensor for each calibration cache"
            raise ArgumentError(msg)
        if hidden is not None and any(states.ndim != _MATRIX for states in hidden):
            msg = "hidden states must be [tokens, size] tensors, as engine.prefix_states computes them"
            raise ArgumentError(msg)
        if hidden is not None and not all(bool(torch.isfinite(states).all()) for states in hidden):
            msg = "the hidden states hold NaN or infinity; compute them in float32"
            raise CacheValueError(msg)
        if hidden is not None or any(cache.token_ids is None for cache in caches):
            vocabulary = None
        self.table = None if vocabulary is None else vocabulary.features.float().cpu()
        self.examples = None if vocabulary is None else vocabulary.examples
        self._hidden = hidden
        size = 1 << 32 if self.table is None else len(self.table)
        named = caches if self.examples is None else [*caches, self.examples]
        if any(cache.token_ids and max(cache.token_ids) >= size for cache in named):
            msg = f"the calibration caches have token ids beyond the {size} that the statistics know"
            raise ArgumentError(msg)

    @property
    def of_tokens(self) -> int:
        """How many features come from the token."""
        return 0 if self.table is None else self.table.shape[1]

    @property
    def of_hidden(self) -> int:
        """How many come from hidden states."""
        return 0 if self._hidden is None else self._hidden[0].shape[1]

    def at(self, cache: KVCache, number: int, start: int, stop: int) -> Tensor:
        """Collect the features of a part of a cache.

        Args:
            cache: One of the calibration caches.
            number: Its place among them.
            start: First token.
            stop: The first token after the part.

        Returns:
            float32 ``[tokens, features]``.
        """
        if self._hidden is not None:
            return self._hidden[number][start:stop].detach().to("cpu", torch.float32)
        if self.table is not None and cache.token_ids is not None:
            return self.table[torch.tensor(cache.token_ids[start:stop])]
        return torch.empty(stop - start, 0)

    def set_apart(self, caches: Sequence[KVCache], number: int, start: int, stop: int) -> Tensor:
        """Choose the tokens on which a fit to the others is tried: those of a fixed quarter of the vocabulary.

        Whole entries of the vocabulary, since a token that occurs twice would be known already. Without token ids it is
        every fourth token.

        Args:
            caches: The calibration caches.
            number: Which of them.
            start: First token.
            stop: The first token after the part.

        Returns:
            Bool ``[tokens]``.
        """
        ids = caches[number].token_ids
        names = torch.arange(start, stop) if ids is None else torch.tensor(ids[start:stop])
        return (names * _HASH >> _HASH_SHIFT) % 4 == 0


def spans(caches: Sequence[KVCache]) -> list[tuple[int, int, int]]:
    """Cut caches into parts that fit in memory.

    Args:
        caches: The calibration caches.

    Returns:
        Number of the cache, first token, first token after the part.
    """
    return [
        (number, start, min(start + _CHUNK, cache.tokens))
        for number, cache in enumerate(caches)
        for start in range(0, cache.tokens, _CHUNK)
    ]


def feature_moments(caches: Sequence[KVCache], features: Features) -> FeatureMoments:
    """Compute the moments of the features alone; they serve every group.

    Args:
        caches: The calibration caches.
        features: Of their tokens.

    Returns:
        The moments.
    """
    count = features.of_tokens + features.of_hidden
    mean, covariance = torch.zeros(count, dtype=torch.float64), torch.zeros(count, count, dtype=torch.float64)
    apart, tokens, trials = torch.zeros_like(covariance), 0, [torch.empty(0, count)]
    for number, start, stop in spans(caches):
        mean += features.at(caches[number], number, start, stop).sum(0, dtype=torch.float64)
        tokens += stop - start
    mean /= tokens
    for number, start, stop in spans(caches) if count else []:
        part = features.at(caches[number], number, start, stop) - mean.float()
        chosen = part[features.set_apart(caches, number, start, stop)]
        covariance += (part.T @ part).double()
        apart += (chosen.T @ chosen).double()
        trials.append(_spread(chosen, caches))
    examples = torch.zeros_like(covariance)
    known = features.examples
    if known is not None:
        for _, start, stop in spans([known]):
            part = features.at(known, 0, start, stop) - mean.float()
            examples += (part.T @ part).double()
    example_tokens = 0 if known is None else known.tokens
    return FeatureMoments(tokens, mean, covariance / tokens, apart, example_tokens, examples, torch.cat(trials))


def _spread(rows: Tensor, caches: Sequence[KVCache]) -> Tensor:
    """This part's share of the trials, evenly from its rows."""
    share = -(-_TRIALS // len(spans(caches)))
    return rows[:: max(1, len(rows) // share)][:share].clone()


def group_moments(
    caches: Sequence[KVCache], planes: Sequence[Plane], features: Features, seen: FeatureMoments
) -> Moments:
    """Compute the moments of a group's elements.

    Products are taken about the first part's mean, which keeps float32 exact enough.

    Args:
        caches: The calibration caches.
        planes: Of the group.
        features: Of the caches' tokens.
        seen: The features' own moments.

    Returns:
        The moments.

    Raises:
        CacheValueError: Elements are too large for float32.
    """
    shift = gather_planes(caches[0], planes, 0, min(_CHUNK, caches[0].tokens)).mean(0, dtype=torch.float64).float()
    count, width = len(seen.mean), len(shift)
    total, lean = torch.zeros(width, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    covariance = torch.zeros(width, width, dtype=torch.float64)
    cross, apart = torch.zeros(2, count, width, dtype=torch.float64)
    trials = [torch.empty(0, width)]
    about = seen.mean.float()
    for number, start, stop in spans(caches):
        part = gather_planes(caches[number], planes, start, stop)
        part -= shift
        total += part.sum(0, dtype=torch.float64)
        covariance += (part.T @ part).double()
        if len(about):
            known = features.at(caches[number], number, start, stop) - about
            chosen = features.set_apart(caches, number, start, stop)
            cross += (known.T @ part).double()
            apart += (known[chosen].T @ part[chosen]).double()
            lean += known[chosen].sum(0, dtype=torch.float64)
            trials.append(_spread(part[chosen], caches))
    offset = total / seen.tokens
    covariance = covariance / seen.tokens - torch.outer(offset, offset)
    if not np.isfinite(covariance.numpy()).all():
        msg = f"{planes[0][0]}s of layer {planes[0][1]} and on are too large for float32; prefill them again"
        raise CacheValueError(msg)
    mean = shift.double() + offset
    tried = torch.cat(trials) - offset.float()
    examples = torch.zeros_like(cross)
    if features.examples is not None:
        for _, start, stop in spans([features.examples]):
            part = gather_planes(features.examples, planes, start, stop) - mean.float()
            examples += ((features.at(features.examples, 0, start, stop) - about).T @ part).double()
    return Moments(mean, covariance, cross / seen.tokens, apart - torch.outer(lean, offset), examples, tried)
