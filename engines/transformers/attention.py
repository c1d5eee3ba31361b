"""How much attention tokens pay to what stands before them."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers.capture import recording
from kvwire.engines.transformers.devices import input_device
from kvwire.engines.transformers.plain import filled
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.types import CacheMeta


_SCORES = 1 << 26
"""Attention probabilities that are held at a time."""


def attention_received(
    model: PreTrainedModel,
    meta: CacheMeta,
    tensors: tuple[list[tuple[Tensor, Tensor]], Tensor | None],
    start: int,
    token_ids: Sequence[int],
    layers: Sequence[int],
) -> Tensor:
    """Run tokens behind a prompt and sum what their attention gives to each of its tokens.

    Args:
        model: The model.
        meta: Of its caches.
        tensors: The prompt's, positions on and from 0; see ``TransformersEngine.tensors_for``.
        start: Length of the prompt.
        token_ids: What follows it.
        layers: Numbers of the layers to look at; empty for all.

    Returns:
        Float32 ``[tokens]`` on the processor: the mean over layers, heads and ``token_ids`` of the attention
        probability; tokens that were pruned get none.

    Raises:
        MismatchError: The cache is of another model, or attention never showed itself.
    """
    pairs, kept = tensors
    past = filled(pairs)  # every layer keeps every token, so that columns are alike in all
    device = input_device(model)
    positions = torch.arange(start, device=device) if kept is None else kept.to(device)
    ids = torch.tensor([list(token_ids)], device=device)
    at = torch.arange(start, start + len(token_ids), device=device)
    recorder = _Recorder(model, meta, torch.cat((positions, at)), layers)
    with recording(recorder, model), suppress(_SeenEnoughError):
        model(input_ids=ids, position_ids=at[None], past_key_values=past, use_cache=True, logits_to_keep=1)
    if not recorder.layers_seen:
        msg = "this model's attention is not to be seen; choose a selector that needs none, such as first"
        raise MismatchError(msg)
    received = torch.zeros(start)
    received[positions.cpu()] = (recorder.total / recorder.layers_seen).cpu()[: len(positions)]
    return received


class _SeenEnoughError(Exception):
    """All layers that matter have run: the pass ends here."""


class _Recorder:
    """Sums attention probabilities of one model's layers, as the thread that made it runs the model.

    positions: int64 ``[columns]``; tokens that attend stand last.
    """

    def __init__(self, model: torch.nn.Module, meta: CacheMeta, positions: Tensor, layers: Sequence[int]) -> None:
        self.total = torch.zeros(len(positions), device=positions.device)
        self.layers_seen = 0
        self._meta, self._positions, self._layers = meta, positions, frozenset(layers)
        self._modules = {id(module) for module in model.modules()}
        self._thread = threading.get_ident()

    def record(self, module: torch.nn.Module, query: Tensor, key: Tensor, *_: object, **options: object) -> None:
        """Add a layer.

        Args:
            module: The layer's attention.
            query: ``[1, heads, tokens, dim]``.
            key: ``[1, kv_heads, columns, dim]``.
            options: Of the attention function; ``scaling`` is used.
        """
        layer = getattr(module, "layer_idx", None)
        if threading.get_ident() != self._thread or id(module) not in self._modules or not isinstance(layer, int):
            return
        if layer >= len(self._meta.layers) or (self._layers and layer not in self._layers):
            return
        scaling = options.get("scaling")
        scale = float(scaling) if isinstance(scaling, (int, float)) else query.shape[-1] ** -0.5
        kv_heads, heads, rows = key.shape[1], query.shape[1], query.shape[2]
        groups, columns = heads // kv_heads, key.shape[2]
        grouped = (query[0].float() * scale).reshape(kv_heads, groups, rows, -1)
        keys, hidden = key[0].float().mT, ~self._visible(rows, layer)
        step = max(1, _SCORES // (heads * columns))
        for start in range(0, rows, step):
            part = grouped[:, :, start : start + step]
            # Heads that share keys stand one below the other, so that nothing is copied for each of them.
            scores = (part.reshape(kv_heads, -1, part.shape[-1]) @ keys).view(kv_heads, groups, -1, columns)
            scores.masked_fill_(hidden[start : start + step], -torch.inf)
            self.total += scores.softmax(-1).sum((0, 1, 2)) / (heads * rows)
        self.layers_seen += 1
        if self._layers and layer == max(self._layers):
            raise _SeenEnoughError

    def _visible(self, rows: int, layer: int) -> Tensor:
        """What the last tokens see in a layer, bool ``[rows, columns]``: windows count in positions."""
        at = self._positions
        seen = at <= at[-rows:, None]
        window = self._meta.layers[layer].window
        return seen if window is None else seen & (at[-rows:, None] - at < window)
