"""First and second moments of calibration caches, summed cache by cache in one pass of bounded memory.

Sums count their caches, can be exported as arrays after each cache, and can resume from such arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.fitting.sinks import begins_text
from kvwire.codec.transform.analysis import gather_planes
from kvwire.errors import ArgumentError, CacheValueError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane
    from kvwire.types import KVCache

_CHUNK = 1024
"""Tokens gathered at a time."""
_MATRIX = 2
_TRIALS = 1024
"""Held-out tokens that fits are validated on."""
_HASH = 2654435761
_HASH_SHIFT = 12
"""Knuth's multiplicative hash separates neighbours in the vocabulary."""


@dataclass(eq=False)
class Moments:
    """Means and covariances, float64, of some elements x and of the features f of their tokens.

    Attributes:
        mean: ``[width]``.
        covariance: ``[width, width]``.
        cross: ``[features, width]`` = E[f x^T] about the means.
        apart: The held-out tokens' part of ``cross`` times the number of tokens.
        trials: float32 ``[n, width]``, elements of some held-out tokens.
    """

    mean: Tensor
    covariance: Tensor
    cross: Tensor
    apart: Tensor
    trials: Tensor


@dataclass(eq=False)
class FeatureMoments:
    """Means and covariances, float64, of the features alone.

    Attributes:
        tokens: Number of tokens.
        mean: ``[features]``.
        covariance: ``[features, features]``.
        apart: The held-out tokens' part of the covariance times the number of tokens.
        trials: float32 ``[n, features]``, features of some held-out tokens.
    """

    tokens: int
    mean: Tensor
    covariance: Tensor
    apart: Tensor
    trials: Tensor


class Features:
    """Features of every token of the calibration caches: its hidden state where given, else the vocabulary's features.

    ``hidden``: ``[tokens, size]`` for each cache; ``table``: the vocabulary's features.
    """

    def __init__(self, caches: Sequence[KVCache], table: Tensor | None, hidden: Sequence[Tensor] | None) -> None:
        """Check that hidden states or token ids fit the caches."""
        if hidden is not None and list(map(len, hidden)) != [cache.tokens for cache in caches]:
            raise ArgumentError("hidden states must be one [tokens, size] tensor for each calibration cache")
        if hidden is not None and any(states.ndim != _MATRIX for states in hidden):
            raise ArgumentError("hidden states must be [tokens, size] tensors, as engine.prefix_states computes them")
        if hidden is not None and not all(bool(torch.isfinite(states).all()) for states in hidden):
            raise CacheValueError("the hidden states hold NaN or infinity; compute them in float32")
        if hidden is not None or any(cache.token_ids is None for cache in caches):
            table = None
        self.table = None if table is None else table.float().cpu()
        self._hidden = hidden
        size = 1 << 32 if self.table is None else len(self.table)
        if any(cache.token_ids and max(cache.token_ids) >= size for cache in caches):
            raise ArgumentError(f"the calibration caches have token ids beyond the {size} that the statistics know")

    @property
    def of_hidden(self) -> int:
        """Number of features from hidden states."""
        return 0 if self._hidden is None else self._hidden[0].shape[1]

    def at(self, cache: KVCache, number: int, start: int, stop: int) -> Tensor:
        """Collect the features of a part of a cache."""
        if self._hidden is not None:
            return self._hidden[number][start:stop].detach().to("cpu", torch.float32)
        if self.table is not None and cache.token_ids is not None:
            return self.table[torch.tensor(cache.token_ids[start:stop])]
        return torch.empty(stop - start, 0)

    @staticmethod
    def held_out(cache: KVCache, start: int, stop: int) -> Tensor:
        """Choose the held-out tokens, bool ``[tokens]``: those of a fixed quarter of the vocabulary.

        Whole entries of the vocabulary are held out, since a fit that has seen a token knows its other occurrences.
        Without token ids, about every fourth position is.
        """
        ids = cache.token_ids
        names = torch.arange(start, stop) if ids is None else torch.tensor(ids[start:stop])
        return (names * _HASH >> _HASH_SHIFT) % 4 == 0


def spans(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield the spans of a cache's parts, which bound the memory of a step."""
    for start in range(0, tokens, _CHUNK):
        yield start, min(start + _CHUNK, tokens)


def trials_of_a_part(lengths: Sequence[int]) -> int:
    """Return the held-out tokens to take from each part of the caches."""
    return -(-_TRIALS // max(1, sum(-(-tokens // _CHUNK) for tokens in lengths)))


def tokens_of(cache: KVCache) -> int:
    """Count the tokens of which a cache holds something."""
    left = _unpruned_tokens(cache)
    return cache.tokens if left is None else int(left.sum())


def _unpruned_tokens(cache: KVCache) -> Tensor | None:
    """Return bool ``[tokens]``, the tokens of which a pruned cache holds something; None for all."""
    pairs = [each for each in zip(cache.meta.layers, cache.kept or (), strict=False) if each[0].kind != "none"]
    if not pairs or any(mask is None for _, mask in pairs):
        return None
    return torch.stack([mask.cpu().any(0) for _, mask in pairs if mask is not None]).any(0)


class MomentSums:
    """Sums of features, of every group's elements and of their products, cache by cache on the caches' device.

    Products are taken about the first part's mean, which keeps float32 accurate enough.

    Attributes:
        caches: Number of caches summed so far.
    """

    def __init__(self, groups: Sequence[Sequence[Plane]], features: Features, trials: int) -> None:
        """Start with empty sums; ``trials``: held-out tokens to take from each part."""
        self.caches = self._tokens = 0
        self._groups, self._features, self._trials = groups, features, trials
        self._sums: dict[str, Tensor] = {}

    def add(self, cache: KVCache) -> None:
        """Add the next cache; of a pruned cache only tokens of which it holds something."""
        device, left = cache.keys[0].device, _unpruned_tokens(cache)
        for start, stop in spans(cache.tokens):
            first = int(start == 0 and cache.tokens > 1 and begins_text(cache))  # a sink is unlike other tokens
            rows = slice(first, None) if left is None else left[start:stop].nonzero()[:, 0]
            chosen = self._features.held_out(cache, start, stop)[rows].to(device)
            if not len(chosen):
                continue
            known = self._about("f", self._features.at(cache, self.caches, start, stop)[rows].to(device))
            self._more("f.apart.sum", known[chosen].sum(0, dtype=torch.float64))
            self._more("f.apart.count", chosen.sum().double())
            self._products("f", known, known, chosen)
            self._try("f", known[chosen])
            for number, planes in enumerate(self._groups):
                name = f"g{number}"
                part = self._about(name, gather_planes(cache, planes, start, stop)[rows].to(device))
                self._more(f"{name}.products", (part.T @ part).double())
                self._products(f"{name}.cross", known, part, chosen)
                if known.shape[1]:
                    self._more(f"{name}.apart.sum", part[chosen].sum(0, dtype=torch.float64))
                    self._try(name, part[chosen])
            self._tokens += len(chosen)
        self.caches += 1

    def _about(self, name: str, part: Tensor) -> Tensor:
        """Return rows minus the mean of the very first part, and add them to their sum."""
        if f"{name}.shift" not in self._sums:
            self._sums[f"{name}.shift"] = part.mean(0, dtype=torch.float64).float()
        part = part - self._sums[f"{name}.shift"].to(part.device)
        self._more(f"{name}.sum", part.sum(0, dtype=torch.float64))
        return part

    def _products(self, name: str, known: Tensor, part: Tensor, chosen: Tensor) -> None:
        self._more(f"{name}.all", (known.T @ part).double())
        self._more(f"{name}.apart", (known[chosen].T @ part[chosen]).double())

    def _more(self, name: str, value: Tensor) -> None:
        self._sums[name] = self._sums[name].to(value.device) + value if name in self._sums else value

    def _try(self, name: str, rows: Tensor) -> None:
        """Take this part's share of held-out tokens, evenly from its rows."""
        some = rows[:: max(1, len(rows) // self._trials)][: self._trials].cpu()
        known = self._sums.get(f"{name}.trials", some[:0])
        self._sums[f"{name}.trials"] = torch.cat([known, some])

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """Return all sums, to resume from later."""
        counts = {"caches": np.array(self.caches), "tokens": np.array(self._tokens)}
        return {name: tensor.cpu().numpy() for name, tensor in self._sums.items()} | counts

    def resume(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Start from the sums of the first caches."""
        sums = dict(arrays)
        self.caches, self._tokens = int(sums.pop("caches")), int(sums.pop("tokens"))
        self._sums = {name: torch.from_numpy(np.array(array)) for name, array in sums.items()}

    def finish(self) -> tuple[FeatureMoments, list[Moments]]:
        """Turn sums into moments; needs at least one token."""
        return self._of_features(), [self._of_group(number) for number in range(len(self._groups))]

    def _cpu(self, name: str) -> Tensor:
        return self._sums[name].cpu()

    def _offset(self, name: str) -> Tensor:
        """Return the mean of all tokens relative to the first part's."""
        return self._cpu(f"{name}.sum") / self._tokens

    def _of_features(self) -> FeatureMoments:
        offset, lean, count = self._offset("f"), self._cpu("f.apart.sum"), self._cpu("f.apart.count")
        mean = self._cpu("f.shift").double() + offset
        covariance = self._cpu("f.all") / self._tokens - torch.outer(offset, offset)
        crossed = torch.outer(offset, lean)
        apart = self._cpu("f.apart") - crossed - crossed.T + count * torch.outer(offset, offset)
        trials = self._cpu("f.trials") - offset.float()
        return FeatureMoments(self._tokens, mean, covariance, apart, trials)

    def _of_group(self, number: int) -> Moments:
        name, planes, about = f"g{number}", self._groups[number], self._offset("f")
        offset, shift = self._offset(name), self._cpu(f"{name}.shift")
        covariance = self._cpu(f"{name}.products") / self._tokens - torch.outer(offset, offset)
        if not np.isfinite(covariance.numpy()).all():
            msg = f"{planes[0][0]}s of layer {planes[0][1]} and on are too large for float32; prefill them again"
            raise CacheValueError(msg)
        mean = shift.double() + offset
        cross = self._cpu(f"{name}.cross.all") / self._tokens - torch.outer(about, offset)
        apart, trials = self._cpu(f"{name}.cross.apart"), torch.empty(0, len(mean))
        if len(about):
            apart = apart - torch.outer(self._cpu("f.apart.sum"), offset)
            apart -= torch.outer(about, self._cpu(f"{name}.apart.sum"))
            apart += self._cpu("f.apart.count") * torch.outer(about, offset)
            trials = self._cpu(f"{name}.trials") - offset.float()
        return Moments(mean, covariance, cross, apart, trials)
