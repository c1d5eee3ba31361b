"""First and second moments of calibration caches, summed cache by cache in one pass of bounded memory.

Sums know how many caches they are of, can be taken out as arrays after any of them, and go on from such arrays.
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
        trials: float32 ``[n, width]``, elements of some tokens set apart.
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
        tokens: How many they are over.
        mean: ``[features]``.
        covariance: ``[features, features]``.
        apart: What tokens set apart add to the covariance times the number of tokens.
        trials: float32 ``[n, features]`` of some tokens set apart.
    """

    tokens: int
    mean: Tensor
    covariance: Tensor
    apart: Tensor
    trials: Tensor


class Features:
    """Features of every token of the calibration caches: the token's own, or those of its hidden states.

    hidden: for each cache ``[tokens, size]``; without it, the vocabulary's features serve, where there are any.
    """

    def __init__(self, caches: Sequence[KVCache], table: Tensor | None, hidden: Sequence[Tensor] | None) -> None:
        """Check that every cache has what is asked of it."""
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
        """How many come from hidden states."""
        return 0 if self._hidden is None else self._hidden[0].shape[1]

    def at(self, cache: KVCache, number: int, start: int, stop: int) -> Tensor:
        """Collect the features of a part of a cache."""
        if self._hidden is not None:
            return self._hidden[number][start:stop].detach().to("cpu", torch.float32)
        if self.table is not None and cache.token_ids is not None:
            return self.table[torch.tensor(cache.token_ids[start:stop])]
        return torch.empty(stop - start, 0)

    @staticmethod
    def set_apart(cache: KVCache, start: int, stop: int) -> Tensor:
        """Choose the tokens on which a fit to the others is tried: those of a fixed quarter of the vocabulary.

        Whole entries of the vocabulary, since a token that occurs twice would be known already. Without token ids it is
        every fourth token.
        """
        ids = cache.token_ids
        names = torch.arange(start, stop) if ids is None else torch.tensor(ids[start:stop])
        return (names * _HASH >> _HASH_SHIFT) % 4 == 0


def spans(tokens: int) -> Iterator[tuple[int, int]]:
    """Cut a cache into parts that fit in memory."""
    for start in range(0, tokens, _CHUNK):
        yield start, min(start + _CHUNK, tokens)


def trials_of_a_part(lengths: Sequence[int]) -> int:
    """Share the trials among the parts of all caches."""
    return -(-_TRIALS // max(1, sum(-(-tokens // _CHUNK) for tokens in lengths)))


def tokens_of(cache: KVCache) -> int:
    """Count what a cache can teach."""
    left = _left(cache)
    return cache.tokens if left is None else int(left.sum())


def _left(cache: KVCache) -> Tensor | None:
    """Tokens of which a pruned cache holds something, bool ``[tokens]``; None where nothing was pruned."""
    pairs = [each for each in zip(cache.meta.layers, cache.kept or (), strict=False) if each[0].kind != "none"]
    if not pairs or any(mask is None for _, mask in pairs):
        return None
    return torch.stack([mask.cpu().any(0) for _, mask in pairs if mask is not None]).any(0)


class MomentSums:
    """Sums of features and of every group's elements, and of their products, cache by cache.

    Products are taken about the first part's mean, which keeps float32 exact enough. On a GPU where the caches lie
    there.

    Attributes:
        caches: How many it is of, the first ones.
    """

    def __init__(self, groups: Sequence[Sequence[Plane]], features: Features, trials: int) -> None:
        """Begin with nothing."""
        self.caches = self._tokens = 0
        self._groups, self._features, self._trials = groups, features, trials
        self._sums: dict[str, Tensor] = {}

    def add(self, cache: KVCache) -> None:
        """Add the next cache; of a pruned one, tokens of which something is left."""
        device, left = cache.keys[0].device, _left(cache)
        for start, stop in spans(cache.tokens):
            first = int(start == 0 and cache.tokens > 1 and begins_text(cache))  # a sink tells nothing of the others
            rows = slice(first, None) if left is None else left[start:stop].nonzero()[:, 0]
            chosen = self._features.set_apart(cache, start, stop)[rows].to(device)
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
        """Rows less the mean of the first part ever; their sum is kept."""
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
        """Keep this part's share of the trials, evenly from its rows."""
        some = rows[:: max(1, len(rows) // self._trials)][: self._trials].cpu()
        known = self._sums.get(f"{name}.trials", some[:0])
        self._sums[f"{name}.trials"] = torch.cat([known, some])

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """All sums, to go on from later."""
        counts = {"caches": np.array(self.caches), "tokens": np.array(self._tokens)}
        return {name: tensor.cpu().numpy() for name, tensor in self._sums.items()} | counts

    def go_on(self, arrays: Mapping[str, NDArray[np.generic]]) -> None:
        """Take over the sums of the first caches."""
        sums = dict(arrays)
        self.caches, self._tokens = int(sums.pop("caches")), int(sums.pop("tokens"))
        self._sums = {name: torch.from_numpy(np.array(array)) for name, array in sums.items()}

    def finish(self) -> tuple[FeatureMoments, list[Moments]]:
        """Turn sums into moments; at least one token was added."""
        return self._of_features(), [self._of_group(number) for number in range(len(self._groups))]

    def _cpu(self, name: str) -> Tensor:
        return self._sums[name].cpu()

    def _offset(self, name: str) -> Tensor:
        """Mean of all tokens about the first part's."""
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
