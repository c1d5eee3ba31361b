"""Recomputes rows of a prompt inside the prompt's cache.

The model runs on these rows alone. Its cache is the prompt's: every layer first writes the rows' new keys and values in
place, then attends to the whole prompt under a mask by positions.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

from kvwire.engines.transformers.attending import attend, is_plain_attention, scale_of
from kvwire.engines.transformers.capture import SHOWN, attention_of, recording
from kvwire.engines.transformers.devices import input_device
from kvwire.engines.transformers.holes import by_query_head, layer_number
from kvwire.engines.transformers.masks import attention_mask, in_format, within
from kvwire.engines.transformers.text import layers_of
from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.engines.transformers.devices import Devices
    from kvwire.reuse import Narrowing
    from kvwire.types import KVCache

_BLOCK = 1024
"""Rows per pass, since the mask has so many times the prompt's length. Passes in prompt order equal one pass."""
_STATES_RANK = 3


def update_rows(
    model: PreTrainedModel, cache: KVCache, token_ids: Tensor, rows: Tensor, narrow: Narrowing | None
) -> Tensor:
    """Recompute rows of a prompt in place; see ``RowsEngine.update_rows``."""
    done, device = [], input_device(model)
    step = len(rows) if narrow else _BLOCK
    for start in range(0, len(rows), max(1, step)):
        part = slice(start, start + step)
        done.append(_Pass(model, cache, rows[part].to(device), narrow).run(token_ids[part].to(device)))
    return torch.cat(done) if done else rows


def check_own(cache: KVCache, devices: Devices, dtype: torch.dtype) -> None:
    """Refuse caches that cannot be written in place."""
    devices.check_single()
    tensors = [tensor for tensor in (*cache.keys, *cache.values) if tensor.numel()]
    at_home = all(tensor.device == devices.inputs and tensor.dtype == dtype for tensor in tensors)
    if not at_home or cache.meta.positions == "off" or cache.meta.offset:
        raise ArgumentError(
            "rows are computed only in a prompt's cache at positions from 0, of the engine's dtype and on its "
            "device, such as LinkedPrompt makes in Engine.allocate"
        )


class _Layer(DynamicLayer):  # type: ignore[no-untyped-call]
    """One layer of a prompt's cache: new keys and values replace those of the running rows."""

    def __init__(self, keys: Tensor, values: Tensor, work: _Pass, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype, self.device = keys.dtype, keys.device
        self._whole = keys[None], values[None]
        self.keys, self.values = self._whole
        self.is_initialized = True
        self._work, self._index = work, index

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self._work.write(self._index, self._whole[0][0], self._whole[1][0], key_states[0], value_states[0])
        return self._whole


class _WrittenError(Exception):
    """The last layer's keys and values are written: ends the pass."""


class _Pass:
    """One forward pass over rows, some of which may be dropped between layers."""

    def __init__(self, model: PreTrainedModel, cache: KVCache, rows: Tensor, narrow: Narrowing | None) -> None:
        self._model, self._cache, self._rows, self._narrow = model, cache, rows, narrow
        self._kept_rows: Tensor | None = None  # indices into the running layer's rows; None: all
        self._dropped = False
        self._thread = threading.get_ident()
        self._begun = len(rows)
        self._modules = {id(module) for module in model.modules()}
        self._last = -1
        self._places = torch.arange(len(rows), device=rows.device)  # indices into the first layer's rows
        self._narrowed: dict[int, tuple[Tensor, Tensor]] = {}
        columns = torch.arange(cache.tokens, device=rows.device)
        self._visible = columns <= rows[:, None]
        everywhere = _kept_everywhere(cache)
        if everywhere is not None:
            self._visible &= everywhere.to(rows.device) | (columns == rows[:, None])
        self._holes = everywhere is None and cache.kept is not None and any(mask is not None for mask in cache.kept)
        self._own = columns == rows[:, None] if self._holes else self._visible[:, :0]

    def run(self, token_ids: Tensor) -> Tensor:
        self._last = max(index for index, keys in enumerate(self._cache.keys) if keys.numel())
        layers: list[Any] = [
            _Layer(keys, values, self, index)
            for index, (keys, values) in enumerate(zip(self._cache.keys, self._cache.values, strict=True))
        ]
        past = Cache(layers=layers)
        with ExitStack() as stack:
            if self._narrow or self._holes:
                self._watch(stack)
            if self._rows.device.type == "cpu" and attention_of(self._model) in SHOWN:
                stack.enter_context(recording(self, self._model))
            stack.enter_context(suppress(_WrittenError))
            self._model(
                input_ids=token_ids[None],
                position_ids=self._rows[None],
                attention_mask=attention_mask(self._model, self._cache.meta, self._visible, self._rows),
                past_key_values=past,
                use_cache=True,
                logits_to_keep=1,
            )
        return self._rows.cpu() if self._kept_rows is None else self._rows[self._kept_rows].cpu()

    def record(
        self, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object = None, *_: object,
        **options: Any,  # noqa: ANN401 - whatever an attention function takes
    ) -> Tensor | None:  # fmt: skip
        """Compute a layer's attention; None if the model should."""
        is_own = threading.get_ident() == self._thread and id(module) in self._modules
        if not is_own or not isinstance(mask, torch.Tensor):
            return None
        if len(self._rows) != query.shape[2] or not is_plain_attention(options):
            return None
        ends = [row + 1 for row in self._rows.tolist()]
        return attend(query, key, value, mask, ends, scale_of(query, options))

    def write(self, layer: int, keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
        """Write a layer's new keys and values ``[kv_heads, rows, dim]``."""
        written: slice | Tensor = slice(None)
        if self._narrow is not None:
            stale = (keys[:, self._rows], values[:, self._rows])
            chosen = self._narrow.choose(layer, self._rows.cpu(), stale, (new_keys, new_values))
            if chosen is not None:
                self._kept_rows = chosen = chosen.to(self._rows.device)
                written = written if self._narrow.writes_all else chosen
        keys.index_copy_(1, self._rows[written], new_keys[:, written].to(keys.dtype))
        values.index_copy_(1, self._rows[written], new_values[:, written].to(values.dtype))
        if layer == self._last:
            raise _WrittenError

    def _watch(self, stack: ExitStack) -> None:
        """Register hooks that give each layer its own mask, and fewer rows."""
        for layer in layers_of(self._model):
            hooks = (
                layer.register_forward_pre_hook(self._before, with_kwargs=True),
                layer.register_forward_hook(self._after),
            )
            for hook in hooks:
                stack.callback(hook.remove)

    def _before(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> Any:  # noqa: ANN401
        if threading.get_ident() != self._thread:
            return None
        if self._holes:
            named = {**named, "attention_mask": self._mask_of(layer_number(module))}
        if self._dropped:
            named = {name: self._fewer(name, value) for name, value in named.items()}
            inputs = (*inputs[:1], *(self._fewer("", value) for value in inputs[1:]))
        return inputs, named

    def _after(self, _module: torch.nn.Module, _inputs: object, output: Any) -> Any:  # noqa: ANN401
        if threading.get_ident() != self._thread or self._kept_rows is None:
            return None
        states = output[0] if isinstance(output, tuple) else output
        if not isinstance(states, torch.Tensor) or states.ndim != _STATES_RANK or states.shape[1] != len(self._rows):
            msg = "this model's layers return something other than hidden states; choose a selector without layers"
            raise MismatchError(msg)
        remaining, self._kept_rows = self._kept_rows, None
        self._rows, self._places, self._dropped = self._rows[remaining], self._places[remaining], True
        self._visible, self._own = self._visible[remaining], self._own[remaining]
        self._narrowed.clear()
        fewer = states[:, remaining]
        return (fewer, *output[1:]) if isinstance(output, tuple) else fewer

    def _mask_of(self, layer: int) -> Tensor:
        """Mask of the rows in a layer of a pruned cache: stored tokens, and each row itself."""
        spec, kept = self._cache.meta.layers[layer], self._cache.kept
        mask = kept[layer] if kept is not None else None
        visible = self._visible
        if mask is not None:
            mask = mask.to(visible.device)
            mask = by_query_head(self._model, self._cache.meta, layer, mask)
            visible = (visible & mask[:, None]) | self._own
        return in_format(self._model, within(visible, spec.window, self._rows))

    def _fewer(self, name: str, value: Any) -> Any:  # noqa: ANN401 - whatever a layer takes
        """A layer's further inputs, reduced to the remaining rows."""
        if name == "position_ids" and isinstance(value, torch.Tensor):
            return self._rows[None]
        if name == "attention_mask" and not self._holes and isinstance(value, torch.Tensor):
            return self._cut(value, -2)
        if name == "position_embeddings" and isinstance(value, tuple):
            return tuple(self._cut(turn, -2) for turn in value)
        if isinstance(value, torch.Tensor) and value.ndim == _STATES_RANK:
            return self._cut(value, 1)  # inputs by layer
        return value

    def _cut(self, value: Tensor, dim: int) -> Tensor:
        """Reduce a tensor of all rows to the remaining ones; cached."""
        if value.shape[dim] != self._begun:
            return value
        cached = self._narrowed.get(id(value))
        if cached is None:
            cached = (value, value.index_select(dim, self._places))
            self._narrowed[id(value)] = cached
        return cached[1]


def _kept_everywhere(cache: KVCache) -> Tensor | None:
    """Tokens stored by all layers and heads, bool ``[tokens]``; None if they differ, or nothing was pruned."""
    masks = [mask for mask, spec in zip(cache.kept or (), cache.meta.layers, strict=False) if spec.kind != "none"]
    first = masks[0] if masks else None
    if first is None or any(mask is None or bool((mask != first[:1]).any()) for mask in masks):
        return None
    return first[0]
