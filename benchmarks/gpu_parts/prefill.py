"""What a decoder's prefill costs: randomly initialised transformers models, sdpa, bfloat16, no downloads.

The layers of a decoder are alike, so their cost is proportional to their number: where all of them do not fit, or would
take long, fewer are timed and multiplied. Embedding and head are timed apart; a prefill needs the last token's logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gpu_parts.timing import Effort

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from gpu_parts.shapes import Shape
    from gpu_parts.timing import Device
    from kvwire.types import KVCache

_MOST_FLOP = 8e14
"""Of a timed pass: about two seconds at a large GPU's usual rate."""
_MEMORY_SHARE = 0.6
"""Of free memory, for weights: activations need the rest."""
_MAX_POSITIONS = 1 << 17
_EFFORT = Effort(least=3, most=10, warm_up=1)


def config_of(shape: Shape, layers: int) -> PretrainedConfig:
    """A transformers configuration with that many layers."""
    from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

    common: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": _MAX_POSITIONS,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if shape.latent is None:
        common |= {"num_key_value_heads": shape.kv_heads, "head_dim": shape.key_dim}
        return LlamaConfig(**common) if shape.kind == "llama" else Qwen3Config(**common)
    return DeepseekV3Config(
        **common,
        num_key_value_heads=shape.heads,
        first_k_dense_replace=layers,  # all dense: see the shape's note
        q_lora_rank=shape.latent.query_rank,
        kv_lora_rank=shape.key_dim,
        qk_rope_head_dim=shape.value_dim,
        qk_nope_head_dim=shape.latent.key_dim,
        v_head_dim=shape.latent.value_dim,
    )


def layer_parameters(shape: Shape) -> int:
    """Weights of one layer's matrices."""
    hidden = shape.hidden
    feed_forward = 3 * hidden * shape.intermediate
    if shape.latent is None:
        return feed_forward + hidden * shape.key_dim * (2 * shape.heads + 2 * shape.kv_heads)
    latent, wide = shape.latent, shape.latent.key_dim + shape.value_dim
    queries = latent.query_rank * (hidden + shape.heads * wide)
    cached = hidden * (shape.key_dim + shape.value_dim)
    expanded = shape.key_dim * shape.heads * (latent.key_dim + latent.value_dim)
    return feed_forward + queries + cached + expanded + shape.heads * latent.value_dim * hidden


def layer_flop(shape: Shape, tokens: int) -> float:
    """Floating-point operations of one layer's causal prefill."""
    wide = 2 * shape.key_dim
    if shape.latent is not None:
        wide = shape.latent.key_dim + shape.value_dim + shape.latent.value_dim
    return 2.0 * layer_parameters(shape) * tokens + 1.0 * shape.heads * wide * tokens**2


def affordable_layers(shape: Shape, tokens: int, free_bytes: int) -> int:
    """Layers that fit and that are timed in a few seconds, at least 1."""
    head = 2 * 2 * shape.vocabulary * shape.hidden
    fit = (_MEMORY_SHARE * free_bytes - head) / (2 * layer_parameters(shape))
    return max(1, min(shape.layers, int(fit), int(_MOST_FLOP / layer_flop(shape, tokens))))


class Prefill:
    """A model of some layers of a shape, and the time its prefill takes."""

    def __init__(self, shape: Shape, tokens: int, device: Device) -> None:
        """Build it with as many layers as the least of the ``tokens`` that will be asked for affords."""
        self._shape, self._device = shape, device
        self._effort = _EFFORT if device.cuda else device.effort
        self._free = device.free_bytes()
        self._model = build(shape, affordable_layers(shape, tokens, self._free), device.device)

    def measure(self, tokens: int) -> dict[str, Any]:
        """Milliseconds of a prefill of ``tokens`` tokens with its cache, and how they were found."""
        shape, device, model = self._shape, self._device, self._model
        layers = min(affordable_layers(shape, tokens, self._free), len(model.model.layers))
        draw = torch.Generator(device.device).manual_seed(3)
        ids = torch.randint(0, shape.vocabulary, (1, tokens), generator=draw, device=device.device)
        whole = model.model.config.num_hidden_layers
        model.model.config.num_hidden_layers = layers  # its forward pass runs that many
        with torch.inference_mode():
            embedded = model.model.embed_tokens(ids)
            timed = device.timed([lambda: model.model(inputs_embeds=embedded, use_cache=True)], self._effort)
            ends = device.timed([lambda: model.lm_head(model.model.embed_tokens(ids)[:, -1:])], self._effort)
        model.model.config.num_hidden_layers = whole
        ratio = shape.layers / layers
        return {
            "ms": timed["median"] * ratio + ends["median"],
            "layers_timed": layers,
            "layers": shape.layers,
            "extrapolated": layers != shape.layers,
            "layers_ms": timed,
            "embedding_and_head_ms": ends,
            "tflop_s": layers * layer_flop(shape, tokens) / timed["median"] / 1e9,
            "note": shape.note,
        }


def build(shape: Shape, layers: int, device: torch.device) -> PreTrainedModel:
    """A model with random weights, bfloat16, on a device, for inference with sdpa."""
    from transformers import AutoModelForCausalLM

    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(shape, layers), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    model.eval().requires_grad_(False)
    return model


def cache_shapes(model: PreTrainedModel, tokens: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes ``[heads, tokens, dim]`` of each layer's keys and values as the model caches them."""
    ids = torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        cache = model.model(ids, use_cache=True).past_key_values
    return [(tuple(layer.keys.shape[1:]), tuple(layer.values.shape[1:])) for layer in cache.layers]


def expected_shapes(cache: KVCache) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The same of a cache."""
    return [(tuple(key.shape), tuple(value.shape)) for key, value in zip(cache.keys, cache.values, strict=True)]
