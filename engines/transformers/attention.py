"""Attention of tokens to the prompt before them, and the influence of each of its tokens."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvwire.engines.transformers.attending import is_plain_attention, scale_of
from kvwire.engines.transformers.capture import recording
from kvwire.engines.transformers.devices import input_device
from kvwire.errors import MismatchError
from kvwire.reuse import AttentionSummary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.types import CacheMeta


_SCORES = 1 << 26
"""Attention probabilities in memory at a time."""


def look(
    model: PreTrainedModel,
    meta: CacheMeta,
    tensors: tuple[list[tuple[Tensor, Tensor]], Tensor | None],
    start: int,
    token_ids: Sequence[int],
    layers: Sequence[int],
    holes: Sequence[Tensor | None] = (),
) -> AttentionSummary:
    """Run tokens after a prompt, up to the last needed layer's attention, and sum it by token of the prompt.

    holes: what each layer's heads store of the prompt, if that differs.
    """
    pairs, kept = tensors
    past = Cache(layers=_layers(pairs, len(token_ids)))
    device = input_device(model)
    positions = torch.arange(start, device=device) if kept is None else kept.to(device)
    ids = torch.tensor([list(token_ids)], device=device)
    at = torch.arange(start, start + len(token_ids), device=device)
    recorder = _Recorder(model, meta, torch.cat((positions, at)), layers, holes)
    with recording(recorder, model), suppress(_SeenEnoughError):
        model(input_ids=ids, position_ids=at[None], past_key_values=past, use_cache=True, logits_to_keep=1)
    if not recorder.layers_seen:
        raise MismatchError("this model does not show its attention; choose a selector that needs none, such as first")
    sums = (recorder.attention / recorder.layers_seen, recorder.influence / max(1, recorder.layers_moved))
    found = torch.zeros(2, start)
    found[:, positions.cpu()] = torch.stack(sums)[:, : len(positions)].cpu()
    return AttentionSummary(found[0], found[1])


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a prompt's cache, read once, concatenated in memory that the next layer reuses.

    Every layer stores every token, so that columns match in all layers.
    """

    def __init__(self, keys: Tensor, values: Tensor, together: tuple[Tensor, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lazy_initialization(keys, values)
        self.keys, self.values = keys, values
        self._before, self._together = (keys, values), together

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        keys, values = self._together
        torch.cat((self._before[0], key_states), 2, out=keys)
        torch.cat((self._before[1], value_states), 2, out=values)
        return keys, values


def _layers(pairs: Sequence[tuple[Tensor, Tensor]], more: int) -> list[Any]:
    """Layers with a prompt's keys and values, and memory for some more tokens; unused ones are empty.

    Empty layers may read what others have concatenated, so these then share no memory.
    """
    is_shared = any(not keys.numel() for keys, _ in pairs)
    room: dict[tuple[object, ...], tuple[Tensor, Tensor]] = {}
    layers: list[Any] = []
    for index, pair in enumerate(pairs):
        shape = (*(each for side in pair for each in (side.shape, side.dtype, side.device)), is_shared and index)
        if pair[0].numel() and shape not in room:
            keys, values = (side.new_empty(*side.shape[:2], side.shape[2] + more, side.shape[3]) for side in pair)
            room[shape] = keys, values
        layers.append(_Layer(*pair, room[shape]) if pair[0].numel() else DynamicLayer())  # type: ignore[no-untyped-call]
    return layers


class _SeenEnoughError(Exception):
    """All needed layers have run: ends the pass."""


class _Recorder:
    """Sums attention probabilities by layer, in passes of the thread that created it.

    positions: int64 ``[columns]``; the attending tokens come last.
    """

    def __init__(
        self, model: torch.nn.Module, meta: CacheMeta, positions: Tensor, layers: Sequence[int],
        holes: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        self.attention = torch.zeros(len(positions), device=positions.device)
        self.influence = torch.zeros_like(self.attention)
        self.layers_seen = self.layers_moved = 0
        self._meta, self._positions, self._layers, self._holes = meta, positions, frozenset(layers), holes
        self._last = max(layers, default=len(meta.layers) - 1)
        self._modules = {id(module) for module in model.modules()}
        self._thread = threading.get_ident()

    def record(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **options: object
    ) -> Tensor | None:
        """Compute and add a layer's attention; the output is a by-product of its probabilities."""
        layer = getattr(module, "layer_idx", None)
        if threading.get_ident() != self._thread or id(module) not in self._modules or not isinstance(layer, int):
            return None
        if layer >= len(self._meta.layers) or (self._layers and layer not in self._layers):
            return None
        kv_heads, heads, rows = key.shape[1], query.shape[1], query.shape[2]
        groups, columns = heads // kv_heads, key.shape[2]
        grouped = (query[0].float() * scale_of(query, options)).reshape(kv_heads, groups, rows, -1)
        keys, values, masked = key[0].float().mT, value[0].float(), ~self._visible(rows, layer)
        step = max(1, _SCORES // (heads * columns))
        total = torch.zeros(kv_heads, groups, columns, device=key.device)
        output = query.new_empty(heads, rows, value.shape[-1])
        for start in range(0, rows, step):
            part = grouped[:, :, start : start + step]
            # Heads that share keys are stacked as rows, which avoids copies.
            scores = (part.reshape(kv_heads, -1, part.shape[-1]) @ keys).view(kv_heads, groups, -1, columns)
            scores = scores.masked_fill_(masked[:, None, start : start + step], -torch.inf).softmax(-1)
            total += scores.sum(2)
            out = scores.view(kv_heads, -1, columns) @ values
            output[:, start : start + step] = out.view(heads, -1, values.shape[-1])
        self._add(layer, total / rows, values)
        if layer == self._last:
            raise _SeenEnoughError
        return output.transpose(0, 1)[None] if is_plain_attention(options) else None

    def _add(self, layer: int, paid: Tensor, values: Tensor) -> None:
        """Add a layer's attention ``[kv_heads, groups, columns]`` over values ``[kv_heads, columns, dim]``."""
        self.layers_seen += 1
        self.attention += paid.mean((0, 1))
        if not layer:
            return  # the first layer's values depend on the document alone: no repair changes them
        self.layers_moved += 1
        sizes = values.square().sum(-1).sqrt()
        self.influence += (paid * (sizes / sizes.mean().clamp_min(1e-30))[:, None]).amax((0, 1))

    def _visible(self, rows: int, layer: int) -> Tensor:
        """Mask of the last tokens in a layer, bool ``[kv_heads or 1, rows, columns]``: windows count positions."""
        positions = self._positions
        visible = positions <= positions[-rows:, None]
        window = self._meta.layers[layer].window
        visible = visible if window is None else visible & (positions[-rows:, None] - positions < window)
        stored = self._holes[layer] if self._holes else None
        if stored is None:
            return visible[None]
        own = stored.new_ones(len(stored), rows)
        return visible & torch.cat((stored, own), 1).to(visible.device)[:, None]
