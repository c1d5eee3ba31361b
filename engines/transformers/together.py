"""Extends several caches in one forward pass: rows of a padded batch, each with its own prefix."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap
from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers.fitting import check_fits, tensors_for
from kvwire.engines.transformers.masks import attention_mask
from kvwire.engines.transformers.model import DescribedModel
from kvwire.engines.transformers.plain import filled, tensors_of
from kvwire.errors import ArgumentError, MismatchError
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers.cache_utils import DynamicCache

_EXACT = 1e-5
"""Allowed change of float32 numbers by joining, relative to a layer's largest."""
_ROUNDINGS = 8  # for shorter types: sums are in another order
_PROBE = ((5, 3), (0, 6), (2, 4))
"""Tokens before and new tokens of each probing row, by which a model shows that padding has no effect."""


class ExtendsTogether(DescribedModel):
    """A model that extends several caches in one pass, if padding does not change its results."""

    _together: MismatchError | bool | None = None  # result of the probe

    def check_together(self) -> None:
        """Refuse if one pass over several caches would not equal separate passes; probed once."""
        if self._together is None:
            try:
                self._probe()
            except MismatchError as error:
                self._together = error
            else:
                self._together = True
        if isinstance(self._together, MismatchError):
            raise self._together

    @torch.no_grad()
    def extend_together(
        self,
        prefixes: Sequence[KVCache | None],
        token_ids: Sequence[Sequence[int]],
        *,
        offsets: Sequence[int],
    ) -> list[KVCache]:
        """``extend`` for several caches in one pass; see ``Engine.extend_together``.

        Prefixes are padded on the left and new tokens on the right, which preserves distances between tokens in a row,
        windows included.
        """
        if not len(prefixes) == len(token_ids) == len(offsets) > 0:
            raise ArgumentError(
                f"rows need a prefix, tokens and an offset each, got {len(prefixes)}, {len(token_ids)}, {len(offsets)}"
            )
        starts = [
            offset if prefix is None else prefix.meta.offset + prefix.tokens
            for prefix, offset in zip(prefixes, offsets, strict=True)
        ]
        for ids, start in zip(token_ids, starts, strict=True):
            self.check_ids(ids, start)
        if self.devices.layers:
            raise MismatchError("a model that is spread over devices extends caches one by one; open it on one device")
        past, before = self._stacked(prefixes)
        new, held = max(map(len, token_ids)), max(before)
        padded = torch.zeros(len(token_ids), new, dtype=torch.long)
        for row, ids in enumerate(token_ids):
            padded[row, : len(ids)] = torch.tensor(list(ids))
        # Padding has positions inside the prompt, so that models that depend on the largest position are unaffected.
        positions = torch.tensor(starts)[:, None] + torch.arange(new)
        positions = torch.minimum(positions, torch.tensor(list(map(_last, starts, token_ids)))[:, None])
        at = torch.arange(held, held + new, device=self.device)
        columns = torch.arange(held + new, device=self.device)
        first = held - torch.tensor(before, device=self.device)
        visible = (columns <= at[:, None])[None] & (columns[None, None] >= first[:, None, None])
        self.model(
            input_ids=padded.to(self.device),
            position_ids=positions.to(self.device),
            attention_mask=attention_mask(self.model, self.meta, visible[:, None], at),
            past_key_values=past,
            use_cache=True,
            logits_to_keep=1,
        )
        pairs = tensors_of(past)
        return [
            self._cache(
                [(_row(keys, row, held, ids), _row(values, row, held, ids)) for keys, values in pairs], ids, start
            )
            for row, (ids, start) in enumerate(zip(token_ids, starts, strict=True))
        ]

    def _stacked(self, prefixes: Sequence[KVCache | None]) -> tuple[DynamicCache, list[int]]:
        """Prefixes as one past, padded on the left with masked zeros, and the length of each."""
        before = [0 if prefix is None else prefix.tokens for prefix in prefixes]
        held = max(before)
        rows: list[list[tuple[Tensor, Tensor]] | None] = []
        for prefix in prefixes:
            if prefix is not None:
                check_fits(prefix.meta, self.meta)
                if prefix.kept is not None:
                    raise MismatchError("a pruned cache is extended alone, not together with others")
            rows.append(None if prefix is None else tensors_for(prefix, self.model.dtype, self.devices)[0])
        some = next((row for row in rows if row is not None), None)
        if some is None:
            return filled(()), before
        layers = [(_padded(rows, layer, 0, held), _padded(rows, layer, 1, held)) for layer in range(len(some))]
        return filled(layers), before

    def _cache(self, pairs: list[tuple[Tensor, Tensor]], token_ids: Sequence[int], offset: int) -> KVCache:
        meta = replace(self.meta, offset=offset)
        keys, values = ([tensor.to(self.device) for tensor in side] for side in zip(*pairs, strict=True))
        if self.soft_tokens:
            from kvwire.reuse import as_stored

            token_ids = as_stored(token_ids, self.vocabulary_size)
        return KVCache.from_tensors(keys, values, meta, token_ids)

    def _probe(self) -> None:
        """Compare rows of unequal lengths with the same ones run separately."""
        most = max(before + new for before, new in _PROBE)
        if most > self.window:
            raise MismatchError(f"a window of {self.window} tokens is too short to extend several caches together")
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.vocabulary_size, (len(_PROBE), most), generator=generator).tolist()
        prefixes = [
            self.extend(None, row[:before]) if before else None for row, (before, _) in zip(ids, _PROBE, strict=True)
        ]
        news = [row[before : before + new] for row, (before, new) in zip(ids, _PROBE, strict=True)]
        try:
            together = self.extend_together(prefixes, news, offsets=[0] * len(news))
        except (MismatchError, RuntimeError, ValueError, TypeError, IndexError) as error:
            raise MismatchError(f"this model does not run several caches in one pass: {error}") from error
        limit = max(_EXACT, 0.0 if self.dtype == torch.float32 else _ROUNDINGS * torch.finfo(self.dtype).eps)
        changed = max(starmap(_error, zip(together, map(self.extend, prefixes, news), strict=True)))
        if not changed <= limit:
            raise MismatchError(f"padding changes what this model computes, by {changed:.1e} of its largest numbers")


def _last(start: int, token_ids: Sequence[int]) -> int:
    return start + len(token_ids) - 1


def _row(tensor: Tensor, row: int, held: int, token_ids: Sequence[int]) -> Tensor:
    """A row's result in its own memory: a view would keep the whole batch alive."""
    return tensor[row, :, held : held + len(token_ids)].clone()


def _padded(rows: list[list[tuple[Tensor, Tensor]] | None], layer: int, side: int, held: int) -> Tensor:
    """A layer's keys or values ``[1, kv_heads, tokens, dim]`` padded on the left: ``[rows, kv_heads, held, dim]``."""
    tensors = [None if row is None else row[layer][side] for row in rows]
    some = next(each for each in tensors if each is not None)
    if not some.numel():
        return some
    out = some.new_zeros(len(tensors), some.shape[1], held, some.shape[3])
    for number, each in enumerate(tensors):
        if each is not None:
            out[number, :, held - each.shape[2] :] = each[0]
    return out


def _error(together: KVCache, alone: KVCache) -> float:
    """Largest difference between two caches, relative to their layer's largest number."""
    pairs = zip((*together.keys, *together.values), (*alone.keys, *alone.values), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-30)) for a, b in pairs if b.numel())
