"""Tiny models of many families, randomly initialised, for the tests of engines and of linking."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, PreTrainedConfig

from kvwire.engines.transformers import TransformersEngine

if TYPE_CHECKING:
    from kvwire.types import KVCache

VOCABULARY = 96
WINDOW = 160
SLIDING = 9
"""Shorter than every document of the tests."""
LONGROPE = 64
"""Where the long frequencies begin; every prompt of the tests is shorter."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attention_dropout": 0.0,
}
_MIXED = ["sliding_attention", "sliding_attention", "full_attention"]


def _rope(kind: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def _config(name: str, **options: object) -> PreTrainedConfig:
    if not hasattr(transformers, name) and Version(transformers.__version__) < Version("5.23"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    return getattr(transformers, name)(**{**_COMMON, **options})


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_LONG = _rope("longrope", long_factor=[2.0] * 4, short_factor=[1.0] * 4, original_max_position_embeddings=LONGROPE)
_LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT_YARN = _rope("yarn", factor=4.0, original_max_position_embeddings=40, mscale=1.0, mscale_all_dim=0.5)


def _longcat() -> PreTrainedConfig:
    """Two attentions to a layer; the configuration counts both."""
    options = {"ffn_hidden_size": 64, "moe_topk": 2, "n_routed_experts": 4, "zero_expert_num": 2, "head_dim": 8}
    common = {name: value for name, value in _COMMON.items() if name != "num_hidden_layers"}
    return transformers.LongcatFlashConfig(**common | _LATENT | options, num_layers=2, expert_ffn_hidden_size=32)


_MAKERS = {
    "llama": lambda: _config("LlamaConfig"),
    "llama-llama3": lambda: _config("LlamaConfig", **_rope("llama3", **_LLAMA3)),
    "llama-linear": lambda: _config("LlamaConfig", **_rope("linear", factor=4.0)),
    "llama-yarn": lambda: _config("LlamaConfig", **_rope("yarn", factor=4.0, original_max_position_embeddings=40)),
    "llama-dynamic": lambda: _config("LlamaConfig", **_rope("dynamic", factor=2.0)),
    "mistral": lambda: _config("MistralConfig", head_dim=8, sliding_window=SLIDING),
    "qwen3": lambda: _config("Qwen3Config", head_dim=16),
    "nanochat": lambda: _config("NanoChatConfig"),  # turns the other way
    "gpt-neox": lambda: _config("GPTNeoXConfig", rotary_pct=0.25, hidden_size=96, attention_bias=True),
    "phi": lambda: _config("PhiConfig", hidden_size=96, **_rope("default", partial_rotary_factor=0.5)),
    "gemma3": lambda: _config(
        "Gemma3TextConfig", head_dim=16, query_pre_attn_scalar=16, sliding_window=SLIDING, layer_types=_MIXED
    ),
    "cohere": lambda: _config("CohereConfig", use_qk_norm=False),
    "glm": lambda: _config("GlmConfig", head_dim=16, **_rope("default", partial_rotary_factor=0.5)),
    "smollm3": lambda: _config("SmolLM3Config", num_hidden_layers=4, no_rope_layer_interval=4),
    "phi3-longrope": lambda: _config("Phi3Config", original_max_position_embeddings=LONGROPE, **_LONG),
    "gemma2": lambda: _config(
        "Gemma2Config", head_dim=16, query_pre_attn_scalar=16, sliding_window=SLIDING, layer_types=_MIXED
    ),
    "gpt-oss": lambda: _config(
        "GptOssConfig",
        head_dim=16,
        hidden_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING,
        layer_types=_MIXED,
    ),
    "gemma4": lambda: _config(
        "Gemma4TextConfig",
        head_dim=16,
        global_head_dim=16,
        sliding_window=SLIDING,
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
    "deepseek-v3": lambda: _config("DeepseekV3Config", **_LATENT, **_EXPERTS),
    "deepseek-v3-yarn": lambda: _config("DeepseekV3Config", **_LATENT, **_EXPERTS, **_LATENT_YARN),
    "deepseek-v2": lambda: _config("DeepseekV2Config", **_LATENT, **_EXPERTS),
    "minicpm3": lambda: _config("MiniCPM3Config", **_LATENT),
    "glm4-moe-lite": lambda: _config(
        "Glm4MoeLiteConfig", **_LATENT, **_EXPERTS, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "youtu": lambda: _config("YoutuConfig", **_LATENT),
    "axk1": lambda: _config("AXK1Config", **_LATENT, **_EXPERTS),
    "longcat": _longcat,
}
FAMILIES = tuple(_MAKERS)
INTERLEAVED = ("cohere", "glm", "deepseek-v2")
LATENT = ("deepseek-v3", "deepseek-v3-yarn", "deepseek-v2", "minicpm3", "glm4-moe-lite", "youtu", "axk1", "longcat")
"""Multi-head latent attention: the latent is cached as keys, the rotated part as values."""
LATENTS_ARE_CACHED = Version(transformers.__version__) >= Version("5.15")
SLIDES = ("mistral", "gemma3", "gemma2", "gpt-oss", "gemma4")
EAGER = ("gemma2", "gpt-oss")
"""Families without an sdpa path in transformers."""
LENGTHS = (15, 11, 13)
QUERY = 6


def make_model(config: PreTrainedConfig, seed: int = 0) -> torch.nn.Module:
    """A float32 model with weights large enough that attention is far from uniform."""
    config.initializer_range = 0.2
    torch.manual_seed(seed)
    attention = "eager" if config.model_type in ("gemma2", "gpt_oss") else "sdpa"
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32).eval()


def without_attention(model: torch.nn.Module, layers: tuple[int, ...]) -> torch.nn.Module:
    """The model, some of its layers skipping attention, as architectures found by search do."""
    for layer in layers:
        model.model.layers[layer].self_attn.forward = lambda hidden_states, **_options: (0 * hidden_states, None)
    return model


def make_config(name: str, **options: object) -> PreTrainedConfig:
    """A tiny configuration of a class that is not among the families."""
    return _config(name, **options)


def config_of(family: str) -> PreTrainedConfig:
    """A fresh configuration; skips the test where the installed transformers does not have the family."""
    config = _MAKERS[family]()
    if family in LATENT and not LATENTS_ARE_CACHED:
        pytest.skip(f"transformers {transformers.__version__} caches expanded keys, not latents; 5.15 does")
    return config


@functools.cache
def engine_of(family: str) -> TransformersEngine:
    """One engine for each family, shared by all tests, which only read from it."""
    return TransformersEngine(make_model(config_of(family)), model_id=family, revision=family)


def tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids, special ones left out."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCABULARY, (count,), generator=generator).tolist()


def documents() -> list[list[int]]:
    """Three documents of unequal lengths."""
    return [tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def query() -> list[int]:
    """A question."""
    return tokens(QUERY, 99)


def error_between(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max() / theirs.abs().max())


def cache_error(ours: KVCache, theirs: KVCache) -> float:
    """Largest relative difference over all layers."""
    pairs = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
    return max(error_between(a, b) for a, b in pairs if b.numel())


def typical_error(ours: KVCache, theirs: KVCache) -> float:
    """Relative difference of the middling token, over all layers: routers send a few to other experts."""
    pairs = zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True)
    errors = (((a - b).float().pow(2).sum((0, 2)) / b.float().pow(2).sum((0, 2))).sqrt().median() for a, b in pairs)
    return float(max(errors))
