"""What a model stores is learnt by running it, and models whose caches cannot be moved are refused."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from kvwire.codec import positions_off
from kvwire.engines.transformers import TransformersEngine
from kvwire.engines.transformers.registration import _explain
from kvwire.errors import CacheValueError, MismatchError, RopeRegimeError
from kvwire.reuse import moved

from .families import (
    FAMILIES,
    INTERLEAVED,
    LATENT,
    LONGROPE,
    SLIDES,
    SLIDING,
    VOCABULARY,
    WINDOW,
    cache_error,
    config_of,
    documents,
    engine_of,
    error_between,
    make_config,
    make_model,
    query,
    tokens,
    without_attention,
)

# family: kind of rope, layers' rope, rotary dimensions, windows
LAYOUTS = {
    "llama": ("default", (0, 0, 0), 8, (None, None, None)),
    "llama-llama3": ("llama3", (0, 0, 0), 8, (None, None, None)),
    "llama-linear": ("linear", (0, 0, 0), 8, (None, None, None)),
    "llama-yarn": ("yarn", (0, 0, 0), 8, (None, None, None)),
    "llama-dynamic": ("dynamic", (0, 0, 0), 8, (None, None, None)),
    "mistral": ("default", (0, 0, 0), 8, (SLIDING, SLIDING, SLIDING)),
    "qwen3": ("default", (0, 0, 0), 16, (None, None, None)),
    "nanochat": ("default", (0, 0, 0), 8, (None, None, None)),
    "gpt-neox": ("default", (0, 0, 0), 4, (None, None, None)),
    "phi": ("default", (0, 0, 0), 8, (None, None, None)),
    "gemma3": ("default", (0, 0, 1), 16, (SLIDING, SLIDING, None)),
    "cohere": ("default", (0, 0, 0), 8, (None, None, None)),
    "glm": ("default", (0, 0, 0), 8, (None, None, None)),
    "smollm3": ("default", (0, 0, 0, None), 8, (None, None, None, None)),
    "phi3-longrope": ("longrope", (0, 0, 0), 8, (None, None, None)),
    "gemma2": ("default", (0, 0, 0), 16, (SLIDING, SLIDING, None)),
    "gpt-oss": ("yarn", (0, 0, 0), 16, (SLIDING, SLIDING, None)),
    "gemma4": ("default", (0, 1), 16, (SLIDING, None)),  # two more layers borrow these caches
    **dict.fromkeys(LATENT, ("default", (0, 0, 0), 8, (None, None, None))),
    "deepseek-v3-yarn": ("yarn", (0, 0, 0), 8, (None, None, None)),
    "longcat": ("default", (0, 0, 0, 0), 8, (None, None, None, None)),  # two layers of two attentions
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_is_learnt(family):
    meta = engine_of(family).meta
    kind, ropes, rotary_dim, windows = LAYOUTS[family]
    assert meta.ropes[0].kind == kind
    none = (None,) * len(ropes)
    found = tuple(spec.rope for spec in meta.layers), tuple(spec.value_rope for spec in meta.layers)
    assert found == ((none, ropes) if family in LATENT else (ropes, none))
    assert {spec.key_rope_start for spec in meta.layers} == {0}
    assert {rope.rotary_dim for rope in meta.ropes} == {rotary_dim}
    assert {rope.interleaved for rope in meta.ropes} == {family in INTERLEAVED}
    assert {rope.inv_freq[0] < 0 for rope in meta.ropes} == {family == "nanochat"}
    assert tuple(spec.window for spec in meta.layers) == windows
    assert [spec.kind for spec in meta.layers] == ["sliding" if window else "full" for window in windows]
    assert (family in SLIDES) == any(windows)


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_are_those_of_the_configuration(family):
    config, meta = config_of(family), engine_of(family).meta
    heads = config.num_attention_heads if family == "gpt-neox" else config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    wanted = (1, config.kv_lora_rank, config.qk_rope_head_dim) if family in LATENT else (heads, dim, dim)
    assert {(spec.kv_heads, spec.key_dim, spec.value_dim) for spec in meta.layers} == {wanted}
    assert meta.dtype == "float32"


def test_scaling_and_limits_are_noted():
    assert engine_of("llama-yarn").meta.ropes[0].attention_scaling > 1
    assert engine_of("llama-dynamic").meta.ropes[0].max_positions == WINDOW
    assert engine_of("phi3-longrope").meta.ropes[0].max_positions == LONGROPE
    assert engine_of("phi3-longrope").window == LONGROPE
    assert engine_of("llama").meta.ropes[0].max_positions is None
    assert engine_of("llama").window == WINDOW


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layout_is_the_same_in_bfloat16(family):
    meta = TransformersEngine(make_model(config_of(family)).to(torch.bfloat16)).meta
    wanted = engine_of(family).meta
    assert meta.layers == wanted.layers
    assert meta.dtype == "bfloat16"
    assert [rope.interleaved for rope in meta.ropes] == [rope.interleaved for rope in wanted.ropes]


def test_a_short_window_is_enough_to_learn_from():
    meta = TransformersEngine(make_model(make_config("LlamaConfig", max_position_embeddings=16))).meta
    assert [spec.rope for spec in meta.layers] == [0, 0, 0]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("GPT2Config", {"n_layer": 2, "n_head": 6, "n_embd": 48, "n_positions": 160}),
        ("OPTConfig", {"ffn_dim": 64, "word_embed_proj_dim": 48}),
        ("FalconConfig", {"alibi": True}),
        ("BartConfig", {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 64}),
    ],
    ids=["learned", "learned-opt", "alibi", "positions-from-the-cache"],
)
def test_positions_that_are_not_rotary_are_refused(name, options):
    with pytest.raises(RopeRegimeError, match="rotary"):
        TransformersEngine(make_model(make_config(name, **options)))


_SPARSE = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_key_value_heads": 6, "kv_lora_rank": 16}
_CHUNKED = {"head_dim": 16, "attention_chunk_size": 16, "num_local_experts": 2, "intermediate_size_mlp": 64}
_STATE = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "num_experts": 2,
    "use_mamba_kernels": False,
}


_LINEAR = {
    "num_hidden_layers": 4,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA = {"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_OTHER_STATE = "{} of this model's {} layers, the first of them layer {}, hold state other than keys and values"


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("DeepseekV32Config", _SPARSE, "hold state other than|plain key-value cache"),
        ("Llama4TextConfig", _CHUNKED, "chunked"),
        ("JambaConfig", _STATE, _OTHER_STATE.format(2, 4, 0)),
        ("MambaConfig", {"state_size": 8}, _OTHER_STATE.format(3, 3, 0)),
        (
            "Mamba2Config",
            {"num_heads": 12, "head_dim": 8, "n_groups": 1, "state_size": 8},
            _OTHER_STATE.format(3, 3, 0),
        ),
        ("Qwen3NextConfig", _LINEAR, _OTHER_STATE.format(3, 4, 0)),
        ("Qwen3_5TextConfig", _LINEAR, _OTHER_STATE.format(3, 4, 0)),
        ("FalconH1Config", _MAMBA | {"mamba_d_ssm": 96}, _OTHER_STATE.format(3, 3, 0)),
        ("BambaConfig", _MAMBA | {"attn_layer_indices": [0, 1]}, _OTHER_STATE.format(1, 3, 2)),
        ("Lfm2Config", {"layer_types": ["full_attention", "conv", "full_attention"]}, _OTHER_STATE.format(1, 3, 1)),
        ("RecurrentGemmaConfig", {"lru_width": 48, "head_dim": 8}, _OTHER_STATE.format(2, 3, 0)),
        ("MiniMaxConfig", {"num_local_experts": 2, "head_dim": 8}, _OTHER_STATE.format(1, 3, 1)),
        ("RwkvConfig", {"attention_hidden_size": 48}, "fills no key-value cache"),
        ("OpenAIGPTConfig", {"n_layer": 2, "n_head": 6, "n_embd": 48, "n_positions": 160}, "fills no key-value cache"),
    ],
    ids=lambda given: given if isinstance(given, str) and given.endswith("Config") else "",
)
def test_caches_of_another_kind_are_refused(name, options, reason):
    model = AutoModelForCausalLM.from_config(make_config(name, **options), dtype=torch.float32)
    with pytest.raises(MismatchError, match=reason):
        TransformersEngine(model)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("T5", {"d_model": 48, "num_layers": 2, "num_heads": 6, "d_kv": 8, "d_ff": 64}, "an encoder with a decoder"),
        ("ViT", {}, "names no vocabulary"),
        (
            "Wav2Vec2",
            {"num_hidden_layers": 1},
            "does not run on token ids, their positions and a plain key-value cache",
        ),
        ("ModernBert", {"num_hidden_layers": 2}, "fills no key-value cache"),
    ],
)
def test_what_is_no_decoder_is_refused_in_words(name, options, reason):
    config = make_config(f"{name}Config", **options)
    if name == "ViT":
        del config.vocab_size
    model = AutoModel.from_config(config)
    with pytest.raises((MismatchError, RopeRegimeError), match=reason):
        TransformersEngine(model)


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (AssertionError("a"), MismatchError),
        (IndexError("list index out of range"), MismatchError),
        (KeyError("a"), MismatchError),
        (RuntimeError("of other shapes\nModule("), MismatchError),
        (RuntimeError("CUDA error: unspecified launch failure"), RuntimeError),  # which says nothing of the model
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), RuntimeError),
    ],
)
def test_a_model_that_raises_is_refused_in_one_line(failure, error):
    model = make_model(config_of("llama"))

    def forward(*_args, **_options):
        raise failure

    model.model.layers[1].forward = forward
    with pytest.raises(error, match=str(failure)[:8] if error is RuntimeError else type(failure).__name__) as caught:
        TransformersEngine(model)
    assert "\n" not in str(caught.value)


def ahead(hidden):
    return hidden.mean(1, keepdim=True)


def state(hidden):
    """Causal, but it forgets what came before this call."""
    return hidden.cumsum(1) / torch.arange(1, hidden.shape[1] + 1)[:, None]


@pytest.mark.parametrize(("more", "words"), [(ahead, None), (state, "keeps state beside")])
def test_a_model_that_looks_ahead_or_keeps_state_beside_its_cache_is_refused(more, words):
    model = make_model(config_of("llama"))
    layer = model.model.layers[0]
    inner = layer.forward
    layer.forward = lambda hidden, **kwargs: inner(hidden + more(hidden), **kwargs)
    with pytest.raises((MismatchError, RopeRegimeError), match=words):
        TransformersEngine(model)


def test_a_model_that_computes_nan_is_refused():
    model = make_model(config_of("llama"))
    model.model.layers[1].self_attn.v_proj.weight.data[0, 0] = float("nan")
    with pytest.raises(CacheValueError, match="NaN"):
        TransformersEngine(model)


@pytest.mark.parametrize("skipped", [(1,), (2,), (1, 2)], ids=str)
def test_layers_that_skip_attention_are_listed_without_a_cache(skipped):
    engine = TransformersEngine(without_attention(make_model(config_of("llama")), skipped))
    listed = range(3) if 2 not in skipped else range(min(skipped))
    wanted = ["none" if layer in skipped else "full" for layer in listed]
    assert [spec.kind for spec in engine.meta.layers] == wanted
    ids, question = documents()[0], query()
    (cache,) = engine.prefill([ids])
    with torch.no_grad():
        whole = engine.model(input_ids=torch.tensor([ids + question])).logits[0, -len(question) :]
    for past in (engine.past_key_values(cache), engine.past_key_values(positions_off(cache))):
        assert error_between(engine.forward(past, question, len(ids)), whole) < 1e-5
    assert cache_error(moved(cache, 9), engine.extend(None, ids, offset=9)) < 1e-5
    tail = engine.extend(cache.slice(0, 7), ids[7:])
    assert cache_error(tail, cache.slice(7, len(ids))) < 1e-5
    assert len(engine.statistics([ids]).token_features) == VOCABULARY


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotary_part_that_comes_last_is_found(interleaved):
    """Some engines cache a latent and its rotated part as one key: here a model's cache is made to look like that."""
    engine = engine_of("deepseek-v2" if interleaved else "deepseek-v3")
    count, distance = 12, 37
    ids = tokens(count)
    near, far = (engine.extend(None, ids, offset=offset) for offset in (0, distance))
    joined = [torch.cat([cache.keys[1], cache.values[1]], 2) for cache in (near, far)]
    regime = engine.meta.ropes[0]
    both = [replace(regime, interleaved=not interleaved), regime]
    assert _explain("keys", *joined, both, distance, 1e-3) == (regime, near.keys[1].shape[2])


def test_learning_leaves_no_trace_in_the_model():
    model = make_model(config_of("llama-dynamic"))
    engine = TransformersEngine(model)
    again = TransformersEngine(model)
    assert engine.meta == again.meta
    ids = documents()[0]
    assert torch.equal(engine.prefill([ids])[0].keys[0], again.prefill([ids])[0].keys[0])


@pytest.mark.parametrize("window", [1, (1 << 20) + 1])
def test_windows_of_one_token_and_of_all(window):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config("MistralConfig", sliding_window=window)).eval()
    engine = TransformersEngine(model, model_id="windows")
    assert {spec.window for spec in engine.meta.layers} == ({1} if window == 1 else {None})
    (whole,) = engine.prefill([tokens(20, 1)])
    extended = engine.extend(whole.slice(0, 15), tokens(20, 1)[15:])
    assert cache_error(extended, whole.slice(15, 20)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["LlamaConfig", "MoshiConfig", "Olmo2Config"])  # Olmo2: a norm behind attention
def test_a_window_that_the_model_ignores_is_refused(name, dtype):
    model = make_model(make_config(name, sliding_window=SLIDING, num_key_value_heads=6)).to(dtype)
    with pytest.raises(MismatchError, match="they see older ones"):
        TransformersEngine(model)
    model.config.sliding_window = WINDOW  # as the error says
    TransformersEngine(model)


def test_a_model_without_a_head_is_learnt_with_its_windows():
    model = make_model(config_of("mistral"))
    assert TransformersEngine(model.model).meta.layers == engine_of("mistral").meta.layers
