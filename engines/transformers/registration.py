"""Learns a model's cache layout by running it: what each layer stores, and how its keys carry positions.

There is no list of model families. Some tokens are run at position 0 and further on; the rotation between their keys is
the layer's regime, and likewise for values, where multi-head latent attention has a rotated part. This finds partial
rotary, interleaving, scaling, layers without positions and frequencies that differ by layer type. Then the moved cache
is continued and compared with a single pass, which proves storing, moving and reading for this model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvwire.codec import rotate, rotation
from kvwire.engines.transformers.plain import empty_layer, filled
from kvwire.errors import CacheValueError, MismatchError, RopeRegimeError
from kvwire.types import LayerSpec, RopeRegime

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.engines.transformers.devices import Devices
    from kvwire.types.cache import LayerKind

ENCODER = "this model is an encoder with a decoder, whose layers also hold the encoder's states; use a decoder alone"
_TOKENS = 12
_ENDLESS = 1 << 20
"""A longer sliding window hides no token of any prompt: the layer sees all."""
_DISTANCE = 37
"""Far enough for every fast pair to turn several times, near enough for any window."""
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
"""Relative; deep layers of half-precision models differ by nearly a per cent between two offsets."""
_FAILURES = (AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
"""Errors of models that do not accept a cache or arguments."""
_OF_DEVICES = ("memory", "CUDA", "HIP")
"""Words in RuntimeErrors about the machine, not the model."""
_FREQUENCIES = "inv_freq"
_MOST_WORDS = 200
_PLAIN = (DynamicLayer, DynamicSlidingWindowLayer)
_RANK = 4  # [batch, heads, tokens, dim]
_LOUDNESS = 8.0
"""Times the values of all rows together that one row has, so that results show whether it is seen."""

Layers = list[tuple["Tensor", "Tensor"]]
Turn = tuple[RopeRegime, int] | None
"""Position of a layer's keys or values: regime and first rotated dimension; None without."""


def learn_layout(model: PreTrainedModel, devices: Devices) -> tuple[tuple[LayerSpec, ...], tuple[RopeRegime, ...]]:
    """Learn the specs of all layers that store keys and values.

    Layers that skip attention have the kind ``none``; last layers that borrow earlier layers' caches are not listed.
    """
    _check_kind(model)
    windows = _windows(model)
    count = max(1, min(_TOKENS, window_of(model) // 3))
    distance = max(1, min(_DISTANCE, window_of(model) - 2 * count))
    ids = _token_ids(model, 2 * count)
    whole = run(model, devices, ids, 0)
    part = run(model, devices, ids[:count], distance)
    tolerance = _TOLERANCE[torch.bfloat16]  # quantised models, too: some round their inputs
    if getattr(model.config, "quantization_config", None) is None:
        tolerance = _TOLERANCE.get(model.dtype, tolerance)
    candidates = list(dict.fromkeys(_candidates(model)))
    turns: list[tuple[Turn, Turn]] = []
    for layer, ((keys, values), far) in enumerate(zip(whole, part, strict=True)):
        near = (keys[:, :count], values[:, :count])
        _check_finite(layer, (*near, *far))
        key_turn, value_turn = (
            _explain(f"layer {layer}'s {name}", *pair, candidates, distance, tolerance)
            for name, pair in zip(("keys", "values"), zip(near, far, strict=True), strict=True)
        )
        turns.append((key_turn, value_turn))
    used = tuple(dict.fromkeys(turn[0] for pair in turns for turn in pair if turn is not None))
    if not used:
        raise RopeRegimeError(
            "no layer of this model puts positions into its keys by rotation (learned, ALiBi or none), "
            "so its caches cannot be moved; use a model with rotary positions"
        )
    _check_continues(model, devices, ids, whole, part, turns, distance, tolerance)
    if len(windows) < len(whole):
        msg = f"this model stores {len(whole)} layers, its configuration lays out {len(windows)}; use another model"
        raise MismatchError(msg)
    _check_windows(model, devices, ids[0], windows, tolerance)
    specs = (_spec(*pair, *turn, window, used) for pair, turn, window in zip(whole, turns, windows, strict=False))
    return tuple(specs), used


def _check_kind(model: PreTrainedModel) -> None:
    """Refuse models that are not decoders of token ids."""
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise MismatchError(ENCODER)
    if not hasattr(config.get_text_config(decoder=True), "vocab_size"):
        msg = "this model's configuration names no vocabulary, so it reads no token ids; use a causal language model"
        raise MismatchError(msg)


def _spec(
    keys: Tensor, values: Tensor, key_turn: Turn, value_turn: Turn, window: int | None, used: tuple[RopeRegime, ...]
) -> LayerSpec:
    if not keys.numel():
        return LayerSpec(0, 0, 0, "none")
    rope, start = (None, 0) if key_turn is None else (used.index(key_turn[0]), key_turn[1])
    value_rope = None if value_turn is None else used.index(value_turn[0])
    if value_turn is not None and value_turn[1]:
        msg = "this model rotates only the last part of its values, which kvwire does not support; use another model"
        raise MismatchError(msg)
    kind: LayerKind = "sliding" if window else "full"
    return LayerSpec(keys.shape[0], keys.shape[2], values.shape[2], kind, rope, window, value_rope, start)


def window_of(model: PreTrainedModel) -> int:
    """Longest input in the configuration."""
    return int(getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30)


def _token_ids(model: PreTrainedModel, count: int) -> list[int]:
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    return [int(token) for token in torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(0))]


@torch.no_grad()
def run(model: PreTrainedModel, devices: Devices, ids: list[int], start: int, past: Layers | None = None) -> Layers:
    """Run tokens at ``start``, ``start + 1``, ... on top of ``past``."""
    places = [devices.layer(layer) for layer in range(len(past or ()))]
    data = [(key[None].to(at), value[None].to(at)) for (key, value), at in zip(past or (), places, strict=True)]
    cache = filled(data)
    _pass(model, devices, ids, start, cache)
    before = max((key.shape[1] for key, _ in past or ()), default=0)
    return [(key[:, before:].cpu(), value[:, before:].cpu()) for key, value in stored(cache, before + len(ids))]


def _pass(model: PreTrainedModel, devices: Devices, ids: list[int], start: int, cache: DynamicCache) -> Tensor:
    """Run tokens on top of a cache; returns the last one's logits, of a model without a head all hidden states."""
    positions = torch.arange(start, start + len(ids), device=devices.inputs)[None]
    tokens = torch.tensor([ids], device=devices.inputs)
    try:
        out = model(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, logits_to_keep=1)
    except _FAILURES as error:
        if any(word in str(error) for word in _OF_DEVICES):
            raise
        raise MismatchError(
            f"this model does not run on token ids, their positions and a plain key-value cache ({_words(error)}); "
            "use a decoder that does, such as a causal language model with rotary positions"
        ) from error
    return out[0]  # type: ignore[no-any-return]


def stored(cache: DynamicCache, tokens: int) -> Layers:
    """A cache of batch size 1 as keys and values of each layer."""
    out = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if type(layer) is DynamicLayer and keys is None and values is None:
            out.append(empty_layer(tokens))
            continue
        if keys is None or values is None or keys.ndim != _RANK or keys.shape[2] != tokens or values.shape[2] != tokens:
            msg = "a layer of this model stores something other than keys and values of every token; use another model"
            raise MismatchError(msg)
        out.append((keys[0], values[0]))
    if not any(keys.numel() for keys, _ in out):
        raise MismatchError("this model fills no key-value cache; use a decoder that caches its keys and values")
    return out


def _candidates(model: PreTrainedModel) -> Iterator[RopeRegime]:
    """All rotary frequencies in the model, each paired in halves and interleaved, and turning either way."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if not name.endswith(_FREQUENCIES) or "original" in name:
                continue
            prefix = name[: -len(_FREQUENCIES)]
            kind = getattr(module, prefix + "rope_type", None) or getattr(module, "rope_type", "default")
            kind = kind.get(prefix.rstrip("_"), "default") if isinstance(kind, dict) else str(kind)
            scaling = float(getattr(module, prefix + "attention_scaling", 1.0))
            limit = _limit(model, kind, prefix.rstrip("_"))
            frequencies = tuple(float(value) for value in buffer.float().cpu())
            for interleaved in (False, True):
                yield RopeRegime(frequencies, interleaved, scaling, limit, kind)
                yield RopeRegime(tuple(-each for each in frequencies), interleaved, scaling, limit, kind)  # NanoChat


def _limit(model: PreTrainedModel, kind: str, layer_type: str) -> int | None:
    """First position with other frequencies; None if they never change."""
    if "dynamic" in kind:
        return window_of(model)  # the length from which transformers rescales, whatever else the configuration says
    if kind != "longrope":
        return None
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    parameters = parameters.get(layer_type) or parameters
    original = parameters.get("original_max_position_embeddings")
    return int(original or getattr(config, "original_max_position_embeddings", None) or window_of(model))


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Each layer's sliding window, as transformers derives it from the configuration."""
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None)
    chunked = "chunked_attention" in types if types else getattr(config, "attention_chunk_size", None)
    if chunked:
        raise MismatchError(
            "this model attends within fixed blocks of positions (chunked attention), which linked documents do not "
            "keep; use a model with full or sliding attention"
        )
    try:
        layers = DynamicCache(config=model.config).layers
    except _FAILURES as error:
        msg = f"transformers cannot lay out a cache for this model ({_words(error)}); use a decoder with attention"
        raise MismatchError(msg) from error
    _check_layers(layers)
    windows = [getattr(layer, "sliding_window", None) for layer in layers]
    return [None if window is None or window > _ENDLESS else window for window in windows]


def _check_layers(layers: list[Any]) -> None:
    """Refuse layers that store anything but keys and values; empty ones are fine."""
    others = {number: type(layer).__name__ for number, layer in enumerate(layers) if type(layer) not in _PLAIN}
    others = {number: name for number, name in others.items() if name != "DummyLayer"}
    if others:
        kinds = ", ".join(sorted(set(others.values())))
        raise MismatchError(
            f"{len(others)} of this model's {len(layers)} layers, the first of them layer {min(others)}, hold state "
            "other than keys and values of every token, such as recurrent states, convolutions, compressed blocks or "
            f"an index ({kinds} in transformers), which kvwire cannot cut and move; use a model whose layers hold only "
            "keys and values"
        )


def _words(error: Exception) -> str:
    """Type and first line of an error: a missing key alone says too little, a module's print too much."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:_MOST_WORDS]}"


def _distance_between(first: Tensor, second: Tensor) -> float:
    """Relative error of the median token: one token that went to another expert does not count for all.

    first, second: ``[heads, tokens, dim]``.
    """
    if not second.numel():
        return 0.0
    scale = second.float().pow(2).sum((0, 2)).sqrt().clamp(min=1e-20)
    return float(((first.float() - second.float()).pow(2).sum((0, 2)).sqrt() / scale).median())


def _check_finite(layer: int, tensors: tuple[Tensor, ...]) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in tensors):
        msg = f"layer {layer}: the model computes NaN or infinity; open it in float32, or check its weights"
        raise CacheValueError(msg)


def _explain(
    what: str,
    near: Tensor,
    far: Tensor,
    candidates: list[RopeRegime],
    distance: int,
    tolerance: float,
) -> Turn:
    """Find the rotation from ``near`` to ``far``, of the first or last dimensions; None if they are equal."""
    best: Turn = None
    error = _distance_between(near, far)  # 0 for a layer without a cache
    for regime in candidates:
        if regime.rotary_dim > near.shape[-1] or (regime.max_positions or distance + 1) <= distance:
            continue
        cos, sin = rotation(regime, distance, 1)
        for start in sorted({0, near.shape[-1] - regime.rotary_dim}):
            left = _distance_between(rotate(near, regime, cos, sin, start), far)
            if left < error:
                best, error = (regime, start), left
    if error > tolerance:
        raise RopeRegimeError(
            f"{what} cannot be moved, the best rotation leaves {error:.2g} of them unexplained; this model's positions "
            "are not rotary (learned, additive or ALiBi) or rotate in a way that kvwire does not know, its tokens see "
            "those after them, or it keeps other state, so its caches cannot be linked; use another model"
        )
    return best


def _turned_back(tensor: Tensor, turn: Turn, distance: int) -> Tensor:
    if turn is None:
        return tensor
    cos, sin = rotation(turn[0], -distance, 1)
    return rotate(tensor, turn[0], cos, sin, turn[1]).to(tensor.dtype)


def _check_continues(
    model: PreTrainedModel,
    devices: Devices,
    ids: list[int],
    whole: Layers,
    part: Layers,
    turns: list[tuple[Turn, Turn]],
    distance: int,
    tolerance: float,
) -> None:
    """Check that the first tokens' cache, moved back to position 0 and continued, equals one pass."""
    placed = [
        (_turned_back(key, key_turn, distance), _turned_back(value, value_turn, distance))
        for (key, value), (key_turn, value_turn) in zip(part, turns, strict=True)
    ]
    count = max(key.shape[1] for key, _ in part)
    rest = run(model, devices, ids[count:], count, placed)
    for layer, (cached, single) in enumerate(zip(rest, whole, strict=True)):
        error = max(_distance_between(a, b[:, count:]) for a, b in zip(cached, single, strict=True))
        if error > tolerance:
            raise MismatchError(
                f"layer {layer}: continuing from a cache differs by {error:.2g} from running the whole text; "
                "this model keeps state beside its keys and values, so its caches cannot be linked"
            )


class _AlikeLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Pretends that some tokens like the new one came before; the oldest one can be loud."""

    def __init__(self, tokens: int, *, is_loud: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self._is_loud = tokens, is_loud
        self.new: Tensor | None = None

    def get_seq_length(self) -> int:
        """Tell the pretended tokens."""
        return self._tokens

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Repeat the new token's keys and values."""
        self.new = torch.cat([key_states.flatten(), value_states.flatten()]).cpu()
        keys, values = (part.repeat(1, 1, self._tokens + 1, 1) for part in (key_states, value_states))
        if self._is_loud:
            most = torch.finfo(values.dtype).max / (2 * float(values.abs().max()) + 1)  # infinite ones would give NaN
            other = values[:, :, 0].roll(1, -1)  # of another direction: norms behind attention take lengths away
            values[:, :, 0] = other * min(_LOUDNESS * self._tokens, most)
        return keys, values


@torch.no_grad()
def _check_windows(
    model: PreTrainedModel, devices: Devices, token: int, windows: list[int | None], tolerance: float
) -> None:
    """Check that layers do not see the token just outside their window: some models ignore a configured window."""
    for window in {window for window in windows if window is not None and window < window_of(model)}:
        passes = []
        for is_loud in (False, True):
            cache = DynamicCache()
            cache.layers = [_AlikeLayer(window, is_loud=is_loud and own == window) for own in windows]
            out = _pass(model, devices, [token], window, cache)
            states = (layer.new for layer in cache.layers if isinstance(layer, _AlikeLayer))
            passes.append([*(state for state in states if state is not None), out.flatten().cpu()])
        pairs = [(quiet.float(), loud.float()) for quiet, loud in zip(*passes, strict=True)]
        if any(float((loud - quiet).norm()) > tolerance * float(quiet.norm()) for quiet, loud in pairs):
            raise MismatchError(
                f"this model's configuration gives layers a sliding window of {window} tokens, but they see older "
                "ones, so its caches would lack tokens that it attends to; set sliding_window in its configuration "
                "to null or to max_position_embeddings, or use another model"
            )
