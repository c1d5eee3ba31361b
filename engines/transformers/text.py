"""A model's features of a text without its cache: of single tokens, and from its first layers.

Both feed the codec's prediction. A token's features are its atlas entry: the keys and values that the model computes
for it, in all layers, after a short ordinary text. They show what the layers make of a token, which no linear map of
the embedding does; entries of tokens that were not run are regressed from their embeddings.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

from kvwire.codec import rotate, rotation
from kvwire.engines.transformers.devices import Devices, input_device
from kvwire.engines.transformers.plain import filled, tensors_of
from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.types import CacheMeta, KVCache, Side

ATLAS_CONTEXT = 24
"""Length of the context before each token: enough not to look like a text's beginning."""
ATLAS_TOKENS, SMALL_VOCABULARY = 1 << 12, 1 << 13
"""Entries of a larger vocabulary that are run, first ids first; the others are regressed from their embeddings."""
_EMBEDDING_AXES = 1024
"""Wider embeddings are projected to as many principal axes."""
ATLAS_FEATURES = 384
"""Principal components of the atlas: the first hundred hold most of it."""
_BASIS_TOKENS = 1024
"""Entries used to find the components."""
_BATCH_BYTES = 128 << 20
_RIDGE = 1e-4
_STATES_RANK = 3  # [batch, tokens, size]


class _ReachedError(Exception):
    """The last needed layer is done: ends the pass."""


@torch.no_grad()
def prefix_states(model: PreTrainedModel, token_ids: Sequence[int], layers: int) -> Tensor:
    """Hidden states of a text before the first layer and after each of the first ones, side by side.

    Each is scaled to unit root mean square, as the next layer normalises it. Only these layers run; other threads may
    run the model meanwhile.
    """
    stack = layers_of(model)
    if not 1 <= layers <= len(stack):
        raise ArgumentError(f"prefix_layers must be 1 to {len(stack)} layers of this model, got {layers}")
    ids = torch.tensor([list(token_ids)], device=input_device(model))
    listener = _Listener(ids.shape, layers)
    hooks = [stack[0].register_forward_pre_hook(listener.before, with_kwargs=True)]
    hooks += [layer.register_forward_hook(listener.after) for layer in stack[:layers]]
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    except _ReachedError:
        return torch.cat(listener.states, 1)
    finally:
        for hook in hooks:
            hook.remove()
    raise MismatchError(f"layer {layers} of this model was never run; encode with prefix_layers=0")


class _Listener:
    """Hooks that record hidden states in passes of the thread that created them, and end the pass."""

    def __init__(self, shape: torch.Size, layers: int) -> None:
        self.states: list[Tensor] = []
        self._shape, self._layers = shape, layers
        self._thread = threading.get_ident()

    def before(self, _module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        self._note(inputs[0] if inputs else named.get("hidden_states"))

    def after(self, _module: torch.nn.Module, _inputs: object, output: object) -> None:
        self._note(output[0] if isinstance(output, tuple) else output)

    def _note(self, states: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if not isinstance(states, torch.Tensor) or states.ndim != _STATES_RANK or states.shape[:2] != self._shape:
            msg = "this model's layers return something other than hidden states; encode with prefix_layers=0"
            raise MismatchError(msg)
        self.states.append(_normalised(states[0].float().cpu()))
        if len(self.states) > self._layers:
            raise _ReachedError


def _normalised(states: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-12)


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """The decoder's layers: its longest list of modules."""
    lists = [module for module in _decoder_of(model).children() if isinstance(module, torch.nn.ModuleList)]
    if not lists:
        msg = "this model's layers were not found; use no prefix layers, and no selector that looks at layers"
        raise MismatchError(msg)
    return max(lists, key=len)


def _decoder_of(model: PreTrainedModel) -> torch.nn.Module:
    """The model without its head, to compute no logits over the vocabulary for each of its entries."""
    decoder: torch.nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    # some call their head the decoder
    return model.base_model if isinstance(decoder, torch.nn.Linear) else decoder


@torch.no_grad()
def look_up(
    model: PreTrainedModel, meta: CacheMeta, context: KVCache, seen: Sequence[int], soft: Tensor | None = None
) -> Tensor:
    """Compute features of every token in the vocabulary."""
    weight = torch.as_tensor(model.get_input_embeddings().weight)
    if weight.is_meta:
        msg = "the model's embeddings are offloaded and cannot be looked up; encode with a model that fits in memory"
        raise MismatchError(msg)
    devices = Devices.of(model)
    rows = weight.detach().float().cpu()
    embedding = _narrowed(_normalised(rows if soft is None else torch.cat([rows, soft.float().cpu()])))
    chosen = _chosen(len(embedding), seen)
    entries = torch.cat([_entries(model, devices, meta, context, part) for part in _batches(chosen, context)])
    scale = _plane_scale(entries, meta)
    entries -= entries.mean(0)
    entries /= scale
    some = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(0))[:_BASIS_TOKENS]
    axes = _principal(entries[some])
    atlas = torch.empty(len(embedding), axes.shape[1])
    atlas[chosen] = entries @ axes
    if len(chosen) < len(embedding):
        others = torch.ones(len(embedding), dtype=torch.bool)
        others[chosen] = False
        atlas[others] = _guessed(embedding[chosen], atlas[chosen], embedding[others])
    return atlas / atlas.std().clamp(min=1e-12)


def _narrowed(embedding: Tensor) -> Tensor:
    """Reduce wide embeddings to their principal axes, found from some thousands of rows."""
    if embedding.shape[1] <= _EMBEDDING_AXES:
        return embedding
    chosen = torch.randperm(len(embedding), generator=torch.Generator().manual_seed(0))[: 8 * _BASIS_TOKENS]
    some = embedding[chosen] - embedding[chosen].mean(0)
    return embedding @ _eigh(some.T @ some)[1].flip(1)[:, :_EMBEDDING_AXES]


def _chosen(vocabulary: int, seen: Sequence[int]) -> Tensor:
    """Tokens to run: all, or the seen ones and then the first, which tokenizers give the most frequent."""
    order = torch.tensor([*dict.fromkeys(seen)], dtype=torch.long)
    rest = torch.ones(vocabulary, dtype=torch.bool)
    rest[order] = False
    most = vocabulary if vocabulary <= SMALL_VOCABULARY else ATLAS_TOKENS
    return torch.cat([order, rest.nonzero()[:, 0]])[:most].sort().values


def _batches(token_ids: Tensor, context: KVCache) -> Sequence[Tensor]:
    """Batches of tokens for which copies of the context fit in memory."""
    size = max(1, min(1024, _BATCH_BYTES // max(1, context.nbytes)))
    return torch.split(token_ids, size) if len(token_ids) else ()


def _entries(model: PreTrainedModel, devices: Devices, meta: CacheMeta, context: KVCache, token_ids: Tensor) -> Tensor:
    """Keys (positions off) and values of each token after the context, float32 ``[tokens, elements]``."""
    count, before = len(token_ids), context.tokens
    pairs = [
        (key[None].expand(count, -1, -1, -1).to(devices.layer(layer), model.dtype),
         value[None].expand(count, -1, -1, -1).to(devices.layer(layer), model.dtype))
        for layer, (key, value) in enumerate(zip(context.keys, context.values, strict=True))
    ]  # fmt: skip
    past = filled(pairs)
    positions = torch.full((count, 1), before, device=devices.inputs)
    _decoder_of(model)(
        input_ids=token_ids[:, None].to(devices.inputs), position_ids=positions, past_key_values=past, use_cache=True
    )
    stored = tensors_of(past)
    keys = [_without_position(pair[0], meta, layer, "key", before) for layer, pair in enumerate(stored)]
    values = [_without_position(pair[1], meta, layer, "value", before) for layer, pair in enumerate(stored)]
    return torch.cat(keys + values, 1)


def _without_position(tensor: Tensor, meta: CacheMeta, layer: int, side: Side, position: int) -> Tensor:
    """The last token of ``[batch, kv_heads, tokens, dim]``, rotation removed, ``[batch, elements]``."""
    last, rotary = tensor[:, :, -1:].float().cpu(), meta.layers[layer].rotary(side)
    if rotary is not None:
        cos, sin = rotation(meta.ropes[rotary[0]], position, 1)
        last = rotate(last, meta.ropes[rotary[0]], cos, -sin, rotary[1])
    return last.reshape(len(tensor), tensor.shape[1] * tensor.shape[3])


def _plane_scale(entries: Tensor, meta: CacheMeta) -> Tensor:
    """Standard deviation of each layer's keys or values, repeated for their elements."""
    widths = [spec.key_width for spec in meta.layers] + [spec.value_width for spec in meta.layers]
    parts = torch.split(entries, [width for width in widths if width], dim=1)
    stds = [part.std().clamp(min=1e-6).repeat(part.shape[1]) for part in parts]
    return torch.cat(stds)


def _principal(entries: Tensor) -> Tensor:
    """Principal axes of centred rows, ``[elements, components]``, from the smaller of the two Gram matrices."""
    kept = min(ATLAS_FEATURES, *entries.shape)
    if len(entries) >= entries.shape[1]:
        axes: Tensor = _eigh(entries.T @ entries)[1]
    else:
        energies, rows = _eigh(entries @ entries.T)
        axes = entries.T @ (rows / energies.clamp(min=1e-9 * float(energies[-1])).sqrt())
    return axes.flip(1)[:, :kept]


def _eigh(gram: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a float32 Gram matrix.

    torch 2.6 reserves too little memory in float32 from some 2,900 rows on, and LAPACK refuses: then float64.
    """
    try:
        energies, axes = torch.linalg.eigh(gram)
    except RuntimeError:
        energies, axes = (part.float() for part in torch.linalg.eigh(gram.double()))
    return energies, axes


def _guessed(features: Tensor, known: Tensor, others: Tensor) -> Tensor:
    """Ridge regression from the embeddings of tokens that were run to the atlas of the others."""
    gram = (features.T @ features).double()
    gram.diagonal().add_(_RIDGE * float(gram.diagonal().mean()))
    weights: Tensor = torch.linalg.solve(gram, (features.T @ known).double()).float()
    return others @ weights
