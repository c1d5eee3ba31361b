"""The mean shift: a learnt correction of linked caches.

A document computed alone has other keys and values than one that saw the documents before it. The mean of that
difference, by layer, KV head and channel, depends on a token's place in its document: the first tokens differ most. It
is learnt over prompts and added to linked documents, at the cost of one addition and no forward pass. Keys are compared
and shifted without rotation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire.codec import positions_off, rows_on
from kvwire.codec.format.arrays import pack_arrays, unpack_arrays
from kvwire.errors import ArgumentError, CorruptError, MismatchError
from kvwire.types import SHIFT_MAGIC, KVCache

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from kvwire.types import CacheMeta

MAX_BYTES = 256 << 20
"""Longest file that is read: 126 layers of 8 heads of 128 numbers take some 30 MB."""
_WHAT = "link shift"
_DIGEST_DIGITS = 64
_MOST_TOKENS = 1 << 24
_RANK = 3


def stretch_bounds(tokens: int) -> tuple[int, ...]:
    """Bounds of stretches of a document's tokens, coarser further in: 0, 1, 2, 3, 4 to 5, 6 to 7, 8 to 11, ..."""
    if not 1 <= tokens <= _MOST_TOKENS:
        raise ArgumentError(f"a document has 1 to {_MOST_TOKENS} tokens, got {tokens}")
    bounds, width = [0, 1, 2, 3, 4], 2
    while bounds[-1] < tokens:
        bounds += [bounds[-1] + width, bounds[-1] + 2 * width]
        width *= 2
    return (*(bound for bound in bounds if bound < tokens), tokens)


@dataclass(frozen=True, eq=False)
class LinkShift:
    """Correction added to documents that were computed alone and follow others.

    Attributes:
        config: ``CacheMeta.config_digest()`` of the model's caches.
        model_id: The model's name, for messages.
        prompts: Number of prompts it was learnt from.
        bounds: First token of each stretch, ascending from 0, then the first token that is not shifted.
        keys: Of each layer, float32 ``[stretches, kv_heads, key_dim]``, without rotation.
        values: Of each layer, float32 ``[stretches, kv_heads, value_dim]``.
    """

    config: str
    model_id: str
    prompts: int
    bounds: tuple[int, ...]
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        """Check shapes and numbers."""
        grows = all(0 <= low < high for low, high in pairwise(self.bounds))
        if len(self.bounds) < 2 or self.bounds[0] or not grows or self.bounds[-1] > _MOST_TOKENS:  # noqa: PLR2004
            raise ArgumentError("stretches of a document ascend from token 0")
        if len(self.keys) != len(self.values) or not self.keys or self.prompts < 1:
            raise ArgumentError("a link shift has keys and values of each layer, learnt from at least one prompt")
        for key, value in zip(self.keys, self.values, strict=True):
            if key.ndim != _RANK or value.ndim != _RANK or not self.stretches == len(key) == len(value):
                raise ArgumentError(f"keys and values of a link shift are [{self.stretches} stretches, kv_heads, dim]")
            if key.shape[1] != value.shape[1] or not bool(key.isfinite().all() and value.isfinite().all()):
                raise ArgumentError("a link shift holds finite numbers, for as many heads of keys as of values")

    @property
    def stretches(self) -> int:
        """Number of stretches."""
        return len(self.bounds) - 1

    @property
    def tokens(self) -> int:
        """Number of a document's first tokens that are shifted."""
        return self.bounds[-1]

    @cached_property
    def data(self) -> bytes:
        """The file's content; ``of_bytes`` reads it. The same shift gives the same bytes."""
        head = {
            "bounds": list(self.bounds), "config": self.config, "layers": len(self.keys), "model_id": self.model_id,
            "prompts": self.prompts,
        }  # fmt: skip
        arrays: dict[str, Any] = {}
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            arrays[_name("key", layer)], arrays[_name("value", layer)] = key.cpu().numpy(), value.cpu().numpy()
        return pack_arrays(SHIFT_MAGIC, head, arrays)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``data``, hexadecimal."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def of_bytes(cls, data: bytes) -> LinkShift:
        """Read a file's content.

        Args:
            data: As ``data`` gives it.

        Returns:
            The shift, on the processor.

        Raises:
            CorruptError: It is another kind of file, or damaged.
            FormatVersionError: A later version wrote it.
        """
        if len(data) > MAX_BYTES:
            msg = f"a {_WHAT} has at most {MAX_BYTES} bytes, this has {len(data)}; run kvwire check-model again"
            raise CorruptError(msg)
        head, arrays = unpack_arrays(SHIFT_MAGIC, data, _WHAT)
        try:
            shift = cls._of_parts(head, arrays)
        except (ArgumentError, KeyError, TypeError, ValueError) as error:
            raise CorruptError(f"the {_WHAT} is damaged ({error}); run kvwire check-model again") from error
        shift.__dict__["data"] = bytes(data)  # cached property: the digest covers the bytes read
        return shift

    @classmethod
    def _of_parts(cls, head: dict[str, Any], arrays: dict[str, Any]) -> LinkShift:
        config, model_id, layers, bounds = head["config"], head["model_id"], head["layers"], head["bounds"]
        numbers = [layers, head["prompts"], *bounds]
        if not (isinstance(config, str) and isinstance(model_id, str) and len(config) == _DIGEST_DIGITS):
            raise ValueError("it names no model")
        if not all(type(number) is int for number in numbers) or len(arrays) != 2 * layers:
            raise ValueError(f"it has {len(arrays)} arrays for {layers} layers")
        if any(array.dtype != np.dtype("<f4") for array in arrays.values()):
            raise ValueError("an array is not float32")
        keys, values = (
            tuple(torch.from_numpy(arrays[_name(side, layer)].astype(np.float32)) for layer in range(layers))
            for side in ("key", "value")
        )
        return cls(config, model_id, head["prompts"], tuple(bounds), keys, values)

    def check_fits(self, meta: CacheMeta) -> None:
        """Refuse caches of another model.

        Args:
            meta: Of the caches.

        Raises:
            MismatchError: It was learnt on another model, or this model has latent attention.
        """
        check_shiftable(meta)
        shapes = [(spec.kv_heads, spec.key_dim, spec.value_dim) for spec in meta.layers]
        own_shapes = [
            (key.shape[1], key.shape[2], value.shape[2]) for key, value in zip(self.keys, self.values, strict=True)
        ]
        if self.config != meta.config_digest() or shapes != own_shapes:
            msg = f"the {_WHAT} was learnt on model {self.model_id!r}, not on this one; run kvwire check-model again"
            raise MismatchError(msg)

    def on(self, device: torch.device | str) -> LinkShift:
        """A copy on a device.

        Args:
            device: The prompts' device.

        Returns:
            A shift with tensors on it.
        """
        keys, values = (tuple(tensor.to(device) for tensor in side) for side in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def apply(self, cache: KVCache, lengths: Sequence[int], stays: Iterable[tuple[int, int]] = ()) -> int:
        """Add the shift to every document of a prompt but the first, in place.

        Args:
            cache: A complete prompt's, positions on and from 0, documents one after the other.
            lengths: Tokens of each document, in prompt order.
            stays: Spans (first position, one after the last) to leave alone: rows that attended to earlier documents,
                or were computed otherwise than in training.

        Returns:
            How many tokens were shifted.

        Raises:
            ArgumentError: The cache is pruned, of another length, or does not begin at 0.
            RopeRegimeError: A position is out of reach.
        """
        rows, stretches = self._rows(cache, lengths, stays)
        if not len(rows):
            return 0
        keys, values = (
            [
                shift.to(like.device)[stretches.to(like.device)].transpose(0, 1) if like.numel() else like
                for shift, like in zip(shifts, tensors, strict=True)
            ]
            for shifts, tensors in ((self.keys, cache.keys), (self.values, cache.values))
        )
        added = rows_on(KVCache(keys, values, cache.meta), rows)
        for target, addend in zip((*cache.keys, *cache.values), (*added.keys, *added.values), strict=True):
            if target.numel():
                place = rows.to(target.device)
                wide = target.index_select(1, place).to(torch.promote_types(target.dtype, torch.float32))
                target.index_copy_(1, place, (wide + addend).to(target.dtype))
        return len(rows)

    def _rows(self, cache: KVCache, lengths: Sequence[int], stays: Iterable[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """Positions of shifted tokens, ascending, and the stretch of each in its document."""
        self._check_prompt(cache, lengths)
        within = torch.cat([torch.arange(count) for count in lengths])
        moves = within < self.tokens
        moves[: lengths[0]] = False
        for first, stop in stays:
            moves[first:stop] = False
        rows = moves.nonzero()[:, 0]
        return rows, torch.bucketize(within[rows], torch.tensor(self.bounds[1:]), right=True)

    @staticmethod
    def _check_prompt(cache: KVCache, lengths: Sequence[int]) -> None:
        is_whole = cache.kept is None and cache.meta.positions == "on" and not cache.meta.offset
        if cache.tokens != sum(lengths) or not is_whole:
            raise ArgumentError(
                f"the {_WHAT} is added to whole prompts at position 0 that are not pruned: got {cache.tokens} tokens "
                f"for documents of {sum(lengths)}"
            )


def check_shiftable(meta: CacheMeta) -> None:
    """Refuse models without a mean shift."""
    if any(spec.value_rope is not None for spec in meta.layers):
        raise MismatchError(f"no {_WHAT} is learnt for models of latent attention: use none")


class ShiftLearner:
    """Learns a shift prompt by prompt, in sums of fixed size."""

    def __init__(self, meta: CacheMeta) -> None:
        """Start without samples.

        Args:
            meta: Of the model's caches.

        Raises:
            MismatchError: The model has latent attention.
        """
        check_shiftable(meta)
        self._meta = meta
        self._longest = self.prompts = 0
        self._sums: list[Tensor] = []
        self._counts = torch.zeros(0, dtype=torch.float64)

    def add(self, alone: Sequence[KVCache], prompt: KVCache) -> None:
        """Learn from a prompt.

        Args:
            alone: The documents' caches, each computed alone, in prompt order.
            prompt: Cache of one pass over all of them, positions on from 0.

        Raises:
            ArgumentError: The prompt's tokens are not the documents', or there are fewer than two.
            MismatchError: A cache is of another model.
        """
        if len(alone) < 2 or prompt.tokens != sum(cache.tokens for cache in alone):  # noqa: PLR2004
            raise ArgumentError("a link shift is learnt from prompts of at least two documents and their prefill")
        if not all(cache.meta.shares_config(self._meta) for cache in (*alone, prompt)):
            raise MismatchError("a cache is of another model than the link shift that is learnt")
        start = alone[0].tokens
        for cache in alone[1:]:
            self._add(cache, prompt.slice(start, start + cache.tokens))
            start += cache.tokens
        self.prompts += 1

    def _add(self, alone: KVCache, seeing: KVCache) -> None:
        """Add one document, computed alone and behind others."""
        self._longest = max(self._longest, alone.tokens)
        bounds = stretch_bounds(_MOST_TOKENS)
        stretch = torch.bucketize(torch.arange(alone.tokens), torch.tensor(bounds[1:]), right=True)
        count = int(stretch[-1]) + 1
        self._counts = _widened(self._counts, count)
        self._counts.index_add_(0, stretch, torch.ones(alone.tokens, dtype=torch.float64))
        linked, separate = positions_off(seeing), positions_off(alone)
        for index, (new, old) in enumerate(
            zip((*linked.keys, *linked.values), (*separate.keys, *separate.values), strict=True)
        ):
            if len(self._sums) == index:
                shape = (0, new.shape[0], new.shape[2]) if new.ndim == _RANK else (0, 0, 0)
                self._sums.append(torch.zeros(shape, dtype=torch.float64))
            self._sums[index] = _widened(self._sums[index], count)
            if new.numel():
                difference = new.detach().cpu().double() - old.detach().cpu().double()
                self._sums[index].index_add_(0, stretch, difference.transpose(0, 1))

    def finish(self) -> LinkShift:
        """Compute the means.

        Returns:
            The shift, up to the longest document's last token.

        Raises:
            ArgumentError: No prompt was added, or caches hold numbers that are not finite.
        """
        if not self.prompts:
            raise ArgumentError("a link shift is learnt from at least one prompt")
        means = [(total / self._counts[:, None, None]).float() for total in self._sums]
        layers = len(means) // 2
        bounds = stretch_bounds(self._longest)
        name, config = self._meta.model_id, self._meta.config_digest()
        return LinkShift(config, name, self.prompts, bounds, tuple(means[:layers]), tuple(means[layers:]))


def _widened(tensor: Tensor, count: int) -> Tensor:
    """A tensor with ``count`` stretches, padded with zeros."""
    more = count - len(tensor)
    return tensor if more <= 0 else torch.cat([tensor, tensor.new_zeros(more, *tensor.shape[1:])])


def _name(side: str, layer: int) -> str:
    return f"{side} {layer:04d}"
