"""The plain cache of transformers: filled from tensors, filled by prefill, and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

    from kvwire.types import KVCache

_LEAST_ROOM, _ROOM_SHARE = 64, 8  # when a layer moves to larger memory: spare tokens, and share of all tokens


def filled(pairs: Iterable[tuple[Tensor, Tensor]], config: PreTrainedConfig | None = None) -> DynamicCache:
    """Make a cache from keys and values."""
    cache = DynamicCache(config=config)
    for layer, (keys, values) in enumerate(pairs):
        fill(cache, layer, keys, values)
    return cache


def runs_as_it_is(cache: KVCache, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a model can use a cache's tensors without conversion."""
    tensors = [tensor for tensor in (*cache.keys, *cache.values) if tensor.numel()]
    at_home = all(tensor.device == device and tensor.dtype == dtype for tensor in tensors)
    return at_home and cache.meta.positions == "on" and cache.kept is None


def referring(cache: KVCache, model: PreTrainedModel, room: KVCache | None = None) -> DynamicCache | None:
    """Make a past whose layers share a cache's tensors."""
    past = DynamicCache(config=model.config)
    plain = [layer for layer in past.layers if isinstance(layer, DynamicLayer) and not layer.is_sliding]
    if len(past.layers) != len(cache.keys) or len(plain) != len(cache.keys):
        return None
    whole = cache if room is None else room
    for index, (keys, values) in enumerate(zip(cache.keys, cache.values, strict=True)):
        layer = plain[index]
        if type(layer) is DynamicLayer:  # subclasses may store more
            layer = past.layers[index] = GrowingLayer(whole.keys[index], whole.values[index], cache.tokens)
        layer.lazy_initialization(keys[None], values[None])
        layer.keys, layer.values = keys[None], values[None]
    return past


def _is_beginning(part: Tensor, whole: Tensor) -> bool:
    """Whether a tensor is the first rows of another one."""
    same = part.data_ptr() == whole.data_ptr() and part.shape[:2] == whole.shape[:2]
    return same and part.stride() == whole.stride()


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """A layer that appends new rows in place; a ``DynamicLayer`` copies all rows in every pass.

    When its memory is full, it moves to larger memory, so that an answer is not copied for every token. It supports no
    branches: rows after an earlier state of it are overwritten. Compiled code and passes with gradients get a
    ``DynamicLayer``'s copies.
    """

    def __init__(self, keys: Tensor, values: Tensor, taken: int) -> None:
        """Take over memory whose first rows the layer will be given."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._room, self._taken = (keys[None], values[None]), taken

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append rows."""
        if not self.is_initialized or torch.compiler.is_compiling() or key_states.requires_grad:
            return super().update(key_states, value_states)
        held = self.get_seq_length()
        total = held + key_states.shape[2]
        if not self._taken <= held <= total <= self._room[0].shape[2] or not self._is_in_room:
            self._move(total + max(_LEAST_ROOM, total // _ROOM_SHARE))
        for whole, new in zip(self._room, (key_states, value_states), strict=True):
            whole[:, :, held:total] = new
        keys, values = (whole[:, :, :total] for whole in self._room)
        self.keys, self.values = keys, values
        return keys, values

    def reset(self) -> None:
        """Forget all rows; memory of others is unchanged."""
        self.keys = self.values = None
        self.is_initialized = False

    @property
    def _held(self) -> tuple[Tensor, Tensor]:
        """Keys and values given so far."""
        return cast("Tensor", self.keys), cast("Tensor", self.values)

    @property
    def _is_in_room(self) -> bool:
        """Whether the layer's tensors are the beginning of its memory: other code may replace them."""
        return all(_is_beginning(*pair) for pair in zip(self._held, self._room, strict=True))

    def _move(self, tokens: int) -> None:
        """Copy the rows to memory for so many tokens."""
        keys, values = (part.new_empty(*part.shape[:2], tokens, part.shape[3]) for part in self._held)
        self._room, self._taken = (keys, values), 0
        for whole, part in zip(self._room, self._held, strict=True):
            whole[:, :, : part.shape[2]] = part


def fill(cache: Cache, layer: int, keys: Tensor, values: Tensor) -> None:
    """Copy keys and values into a layer of a cache."""
    if keys.numel():
        cache.update(keys, values, layer)


def with_gaps(cache: DynamicCache, held: Tensor) -> DynamicCache:
    """Record which positions of a cache hold a token; the others stay in it, masked."""
    cache.held_positions = held  # type: ignore[attr-defined]
    return cache


def past_mask(cache: DynamicCache | None, tokens: int) -> Tensor | None:
    """Mask of a cache with gaps and the tokens on top of it, for ``attention_mask``; None without gaps."""
    held = getattr(cache, "held_positions", None)
    if held is None:
        return None
    mask = torch.ones(1, tokens, dtype=torch.int64, device=held.device)
    mask[0, : len(held)] = held
    return mask


def tensors_of(cache: DynamicCache) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of each layer; their existence was checked when the layout was learnt."""
    first = next(keys for keys, *_ in cache if keys is not None)
    batch, _, tokens, _ = first.shape
    none = first.new_zeros(batch, 0, tokens, 0)
    return [(none, none) if keys is None else (keys, values) for keys, values, *_ in cache]


def empty_layer(tokens: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer without a cache."""
    return torch.zeros(0, tokens, 0), torch.zeros(0, tokens, 0)


def is_plain(weight: Tensor) -> bool:
    """Whether a weight is stored as its numbers: neither quantised nor offloaded."""
    is_number = weight.is_floating_point() and weight.element_size() > 1 and not weight.is_meta
    return is_number and type(weight) in {torch.Tensor, torch.nn.Parameter}


def batches_of(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Batch documents of similar lengths."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def prefill_batch(
    model: PreTrainedModel, device: torch.device, documents: Sequence[Sequence[int]]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Run documents in one batch, padded on the right, where causal attention never looks."""
    ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document)
    past = DynamicCache()  # without the configuration, so that sliding layers keep every token
    model(input_ids=ids.to(device), past_key_values=past, use_cache=True, logits_to_keep=1)
    found = tensors_of(past)
    out = []
    for row, document in enumerate(documents):
        pairs = [(keys[row, :, : len(document)], values[row, :, : len(document)]) for keys, values in found]
        if len(documents) > 1:  # a view would keep the whole batch alive
            pairs = [(keys.clone(), values.clone()) for keys, values in pairs]
        out.append(pairs)
    return out
