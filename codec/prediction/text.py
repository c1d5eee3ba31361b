"""Predict a document's cache from its text.

The profile's table holds a few numbers for each token of the vocabulary; a group's predictor turns them into expected
keys and values of every layer. A profile with prefix layers adds the hidden states after the model's first layers,
which the engine recomputes. The encoder subtracts the prediction and the decoder adds it back; only the difference is
coded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.profile.group import ROWS_BYTES
from kvwire.errors import ArgumentError, CacheValueError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.profile.profile import Profile

_SLOT_BYTES, _NUMBER_BYTES = 4, 2
"""Bytes that ``Expectations`` take for a token, and for each of its expected elements."""
_TOKENS = 32
"""Tokens whose rows are computed in one step: some milliseconds."""


class TextPredictor:
    """A document's inputs to the prediction, checked against the profile.

    Attributes:
        profile: The profile that predicts.
        token_ids: int64 ``[tokens]``; None where the profile needs none.
        hidden: float32 ``[tokens, hidden_size]`` after the prefix layers; None where the profile has none.
        sinks: Token indices of attention sinks, which encoders leave out of the segments.
    """

    sinks: tuple[int, ...] = ()

    def __init__(
        self, profile: Profile, tokens: int, token_ids: tuple[int, ...] | None, hidden: Tensor | None = None
    ) -> None:
        """Check the inputs that the profile needs."""
        self.profile = profile
        self.token_ids = None if profile.table is None else _known_ids(profile.table, tokens, token_ids)
        self.hidden = _known_hidden(profile, tokens, hidden)

    def expected(self, group: int, start: int, stop: int) -> tuple[Tensor, NDArray[np.uint32]]:
        """Predict a group's elements: rows ``[n, width]`` and each token's row index.

        Rows are rounded to bfloat16, so that encoder and decoder agree even if they sum products in another order.
        """
        tokens = stop - start
        chosen = self.profile.groups[group]
        if chosen.predictor is None:
            return torch.from_numpy(chosen.mean)[None], np.zeros(tokens, np.uint32)
        if self.token_ids is None:
            rows, index = torch.from_numpy(chosen.mean)[None], np.zeros(tokens, np.uint32)
        else:
            rows, index = self._of_tokens(group, self.token_ids[start:stop])
        if self.hidden is None:
            return rows, index
        addition = self.hidden[start:stop] @ chosen.predictor[self.profile.token_features :].float()
        return rows[torch.from_numpy(index.astype(np.int64))].float() + addition, np.arange(tokens, dtype=np.uint32)

    def _of_tokens(self, group: int, token_ids: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.uint32]]:
        """Return the cached rows without a copy, or copies where the cache has no room for all of them."""
        expectations = self.profile.expectations[group]
        cached = expectations.cached(token_ids)
        if cached is not None:
            return cached
        unique, inverse = np.unique(token_ids, return_inverse=True)
        return expectations.rows(unique), inverse.astype(np.uint32)


def expect_all(profile: Profile) -> Iterator[None]:
    """Compute the expected rows of the whole vocabulary in steps, so that no document waits for them.

    If they do not all fit the cache, nothing is computed: only documents show which tokens are frequent.
    """
    if profile.table is None:
        return
    vocabulary, width = len(profile.table), sum(group.width for group in profile.groups)
    if vocabulary * (_SLOT_BYTES * len(profile.groups) + _NUMBER_BYTES * width) <= ROWS_BYTES:
        yield from expect(profile, np.arange(vocabulary))


def expect(profile: Profile, token_ids: Sequence[int] | NDArray[np.int64]) -> Iterator[None]:
    """Compute the expected rows of a text's tokens in steps while the cache has room, ahead of decoding."""
    if profile.table is None:
        return
    ids, first_at = np.unique(np.asarray(token_ids, np.int64), return_index=True)
    ids = ids[np.argsort(first_at)]  # first tokens are decoded first
    ids = ids[(ids >= 0) & (ids < len(profile.table))]
    for first in range(0, len(ids), _TOKENS):
        for expectations in profile.expectations:
            missing = expectations.missing(ids[first : first + _TOKENS])
            if len(missing):
                expectations.rows(missing)
                yield


def _known_ids(table: NDArray[np.int8], tokens: int, token_ids: tuple[int, ...] | None) -> NDArray[np.int64]:
    if token_ids is None or len(token_ids) != tokens:
        msg = "the profile predicts caches from their text: pass a cache with token_ids, or fit a profile without them"
        raise ArgumentError(msg)
    ids = np.asarray(token_ids, np.int64)
    if ids.min() < 0 or ids.max() >= len(table):
        wrong = int(ids.min() if ids.min() < 0 else ids.max())
        raise MismatchError(
            f"token id {wrong} is not in the profile's vocabulary of {len(table)}; fit a profile on this model"
        )
    return ids


def _known_hidden(profile: Profile, tokens: int, hidden: Tensor | None) -> Tensor | None:
    if not profile.hidden_size:
        return None
    wanted = (tokens, profile.hidden_size)
    if hidden is None or tuple(hidden.shape) != wanted:
        have = "none were given" if hidden is None else f"{tuple(hidden.shape)} were given"
        raise ArgumentError(
            f"the profile predicts from hidden states {wanted} of {profile.prefix_layers} layers, {have}; "
            "pass hidden=engine.prefix_states(token_ids, layers)"
        )
    out = hidden.detach().to("cpu", torch.float32)
    if not np.isfinite(out.numpy()).all():
        raise CacheValueError("the hidden states hold NaN or infinity; compute them in float32")
    return out
