"""The connector inside vLLM with models whose pages are of other kinds than full attention's in plain numbers."""

from __future__ import annotations

import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

import transformers
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.layout import _cpu_kernel, check_groups, register_pages
from kvwire.engines.vllm.pages import PackedPages, PageFormat, probe, slots_of
from kvwire.engines.vllm.requests import PARAMS
from kvwire.engines.vllm.saving import SAVED
from kvwire.engines.vllm.working import check_layers
from kvwire.errors import ArgumentError, MismatchError
from kvwire.store import FolderStore
from kvwire.types import CacheMeta, LayerSpec, RopeRegime, digest_tokens

from .faulty_run import apart_from
from .inside import CLOSE, LENGTHS, QUESTION, Place, distance, encoded, serving_llm

pytestmark = pytest.mark.filterwarnings("default")
_COMMON = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "initializer_range": 0.15,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"sliding_window": 96}
_MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2} | _WINDOW
# Without experts, whose names differ in vLLM. On a processor vLLM has latents of these sizes alone, and rotates rightly
# only with yarn, as DeepSeek's models have it: its kernel for the plain frequencies mistakes the tensors' third axis.
_LATENT = {
    "num_hidden_layers": 2, "num_key_value_heads": 4, "head_dim": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "q_lora_rank": 48, "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512, "rope_theta": 10000.0,
    },
}  # fmt: skip
_MODELS = {
    "gemma3": (
        "Gemma3TextConfig",
        _WINDOW | {"layer_types": [*["sliding_attention"] * 3, "full_attention"], "query_pre_attn_scalar": 32},
    ),
    "gpt-oss": ("GptOssConfig", _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma4": (
        "Gemma4TextConfig",
        _MIXED | {
            "global_head_dim": 64, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
        },
    ),
    "mistral": ("MistralConfig", _WINDOW),
    "llama": ("LlamaConfig", {}),
    "deepseek_v3": ("DeepseekV3Config", _LATENT),
    "deepseek_v2": ("DeepseekV2Config", _LATENT),
}  # fmt: skip


@contextmanager
def served(root, family, **options):
    """A vLLM of a tiny random model beside its documents."""
    name, more = _MODELS[family]
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**_COMMON | more), dtype=torch.float32, attn_implementation="eager"
    )
    model.save_pretrained(root / "model")
    with ExitStack() as stack:
        store = stack.enter_context(closing(FolderStore(root / "store")))
        engine = open_engine(root / "model", dtype=torch.float32)
        corpus = encoded(engine, store, lossless=True)
        given = {"max_model_len": 1024} | options
        llm = stack.enter_context(serving_llm(root / "model", f"file://{root / 'store'}", **given))
        yield Place(llm, engine, corpus, root / "store", given.get("block_size", 32), stack)


def lossless(place):
    return len(place.corpus.read_header(place.corpus.find("a")).levels) - 1


def kept(place, ids):
    """What vLLM keeps of a prompt, once it is there."""
    name, until = f"{SAVED}{digest_tokens(ids)[:32]}", time.monotonic() + 60
    while name not in {each.document_id for each in place.corpus.catalog.documents(place.corpus.meta.config_digest())}:
        assert time.monotonic() < until
        time.sleep(0.1)
    return place.corpus.decode(name, dtype=torch.float32)


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "gemma4", "mistral"])
def test_layers_with_windows_are_those_of_transformers(family, tmp_path):
    with served(tmp_path, family) as place:
        exact = lossless(place)
        one = place.body("a", exact)
        ((plain, tokens, *_),) = place.ask({"prompt": one["prompt"]}, tokens=40)
        ((first, same, told, cached),) = place.ask(one, tokens=40)
        assert (told["loaded_tokens"], told["lost_tokens"], cached) == (301, 0, 301)
        assert distance(first, place.expected(one["prompt"])) <= CLOSE
        assert max(abs(first[token] - value) for token, value in plain.items() if token in first) <= CLOSE
        assert same == tokens
        whole = place.body("b", exact)
        whole["prompt"] = whole["prompt"][:255]  # no question, and the last token's window begins at a block's last row
        ((first, *_),) = place.ask(whole)
        assert distance(first, place.expected(whole["prompt"])) <= CLOSE
        for names, level in (("abc", exact), ("cab", 2)):
            body = place.body(names, level)
            plain = place.expected(body["prompt"])
            right = place.expected(body["prompt"], place.linked(names, level))
            ((first, *_),) = place.ask({"prompt": body["prompt"]})
            assert distance(first, plain) <= CLOSE
            for _ in range(2):
                ((first, _, told, _),) = place.ask(body)
                assert distance(first, right) <= CLOSE
                assert distance(first, plain) > 20 * CLOSE
                assert told["lost_tokens"] == 0
        ((first, *_),) = place.ask({"prompt": body["prompt"], "cache_salt": "another"})
        assert distance(first, plain) <= CLOSE
        lost = place.body("dcb", 2)
        place.corpus.catalog.store.delete(place.corpus.find("b").blob_key)
        ((first, _, told, _),) = place.ask(lost)  # rows before a window are not there to go on from
        assert distance(first, place.expected(lost["prompt"])) <= CLOSE
        assert (told["loaded_tokens"], told["lost_tokens"]) == (0, 511)


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_latents_are_those_of_transformers(family, tmp_path):
    with served(tmp_path, family, extra={"save": "asked"}, block_size=16) as place:
        exact, ids = lossless(place), list(range(20, 220))
        ((_, _, told, _),) = place.ask({"prompt": ids, "kv_transfer_params": {PARAMS: {"save": True}}})
        assert told == {"saving_tokens": len(ids)}
        (own,), saved = place.engine.prefill([ids]), kept(place, ids)
        for mine, theirs in zip([*saved.keys, *saved.values], [*own.keys, *own.values], strict=True):
            assert (mine - theirs).norm() < 0.2 * theirs.norm()
        for names, level in (("a", exact), ("abc", exact), ("cab", 2)):
            body = place.body(names, level)
            plain, linked = place.expected(body["prompt"]), place.linked(names, level)
            (out,) = place.outputs({"prompt": body["prompt"]}, tokens=12)
            assert apart_from(place, body["prompt"], None, out.outputs[0]) <= CLOSE
            (out,) = place.outputs(body, tokens=12)
            told = out.kv_transfer_params[PARAMS]
            assert (told["loaded_tokens"], told["lost_tokens"]) == (linked.tokens, 0)
            assert apart_from(place, body["prompt"], linked, out.outputs[0]) <= CLOSE
            first = {token: each.logprob for token, each in out.outputs[0].logprobs[0].items()}
            assert (distance(first, plain) > 20 * CLOSE) == (names != "a")
        place.corpus.catalog.store.delete(place.corpus.find("b").blob_key)
        lost = place.body("dbc", exact)
        (out,) = place.outputs(lost)  # what is there is kept, and the rest computed behind it
        assert out.kv_transfer_params[PARAMS]["loaded_tokens"] == LENGTHS["d"]
        assert apart_from(place, lost["prompt"], place.linked("d", exact), out.outputs[0]) <= CLOSE


def test_without_the_hybrid_manager_parts_are_loaded_and_prompts_saved(tmp_path):
    with served(tmp_path, "gpt-oss", extra={"save": "asked"}, disable_hybrid_kv_cache_manager=True) as place:
        lost, ids = place.body("dcb", 2), list(range(20, 220))
        place.corpus.catalog.store.delete(place.corpus.find("b").blob_key)
        ((first, _, told, _),) = place.ask(lost)
        assert distance(first, place.expected(lost["prompt"], place.linked("dc", 2).slice(0, 224))) <= CLOSE
        assert told["loaded_tokens"] == LENGTHS["d"] + LENGTHS["c"]
        ((_, _, told, _),) = place.ask({"prompt": ids, "kv_transfer_params": {PARAMS: {"save": True}}})
        assert told == {"saving_tokens": len(ids)}
        (exact,), saved = place.engine.prefill([ids]), kept(place, ids)
        for mine, theirs in zip([*saved.keys, *saved.values], [*exact.keys, *exact.values], strict=True):
            assert (mine - theirs).norm() < 0.2 * theirs.norm()


def truncated(numbers, dtype):
    """Rounded towards zero, as vLLM does on a processor; on a GPU it rounds to the nearest."""
    nearest = numbers.to(dtype)
    return (nearest.view(torch.uint8) - (nearest.float().abs() > numbers.abs()).byte()).view(dtype).float()


def test_fp8_pages_hold_rows_rounded_as_vllm_does(tmp_path):
    """The question's rows are rounded, too: a single token of it leaves little of that."""
    with served(tmp_path, "llama", kv_cache_dtype="fp8") as place:
        exact, found = lossless(place), []
        for names in ("abc", "db", "ca"):
            body = place.body(names, exact, QUESTION[:1])
            linked = place.linked(names, exact)
            sides = [[truncated(side, torch.float8_e4m3fn) for side in both] for both in (linked.keys, linked.values)]
            rounded = type(linked)(*sides, linked.meta)
            ((first, _, told, _),) = place.ask(body)
            assert told["lost_tokens"] == 0
            found.append([distance(first, place.expected(body["prompt"], cache)) for cache in (rounded, linked)])
        assert all(3 * near < far for near, far in found), found
        ((_, _, told, _),) = place.ask({"prompt": list(range(90)), "kv_transfer_params": {PARAMS: {"save": True}}})
        assert "this vLLM keeps nothing" in told["not_saved"]


@pytest.mark.parametrize("kind", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_fp8_is_written_as_its_own_writer_does(kind, given):
    """vLLM's kernel on a processor against the formula, number by number."""
    dtype = torch.float8_e5m2 if kind == "fp8_e5m2" else torch.float8_e4m3fn
    form = PageFormat(dtype, given, 0.37, 2.6)
    pages = PackedPages([torch.zeros(4, 2, 32, 64, dtype=torch.uint8)], [32], _cpu_kernel, [form])
    probe(pages)
    slots, sides = slots_of([3, 1], 32, 5, 60), [torch.randn(2, 55, 32) for _ in range(2)]
    pages.write(0, slots, *sides)
    for side, back, scale in zip(sides, pages.read(0, slots), (0.37, 2.6), strict=True):
        right = truncated(side.to(given).float() / scale, dtype) * scale
        assert (back != right).float().mean() < 0.01  # where the quotient is a number of fp8 but for its last bit


def groups(*specs):
    return SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layers.{n}"]) for n, spec in enumerate(specs)
        ]
    )


_SIZES = {"block_size": 32, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL, SLIDING = FullAttentionSpec(**_SIZES), SlidingWindowSpec(**_SIZES, sliding_window=96)
LATENT = MLAAttentionSpec(**_SIZES | {"num_kv_heads": 1})


@pytest.mark.parametrize(
    ("specs", "save", "say"),
    [
        ([FULL, MambaSpec(block_size=32, shapes=((4,),), dtypes=(torch.float32,))], "off", "layers.1 .* Mamba"),
        ([replace(FULL, kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)], "off", "--kv-cache-dtype auto or fp8"),
        ([FULL, SLIDING], "asked", "--disable-hybrid-kv-cache-manager, or leave save out"),
        ([SLIDING], "all", "can be saved: leave save out"),
        ([replace(LATENT, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)], "off", "--kv-cache-dtype auto$"),
        ([SlidingWindowMLASpec(**_SIZES | {"num_kv_heads": 1}, sliding_window=96)], "off", "kind SlidingWindowMLA"),
    ],
)  # fmt: skip
def test_pages_that_nothing_is_loaded_into_are_told_at_the_start(specs, save, say):
    check_groups(groups(FULL, SLIDING))
    check_groups(groups(replace(FULL, kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)), "all")
    check_groups(groups(LATENT), "all")
    with pytest.raises(ArgumentError, match=say):
        check_groups(groups(*specs), save)


@pytest.mark.parametrize(
    ("specs", "scales", "say"),
    [
        ([LayerSpec(2, 32, 32, rope=0), LayerSpec(0, 0, 0, "none")], [], "pages of 2 layers, the documents are of 1"),
        ([LayerSpec(2, 32, 32, rope=0)] * 3, [], "pages of 2 layers, the documents are of 3"),
        ([LayerSpec(2, 32, 32, rope=0)] * 2, [2], "a scale of fp8 for each head"),
    ],
)
def test_pages_that_would_not_hold_what_vllm_reads_are_refused(specs, scales, say):
    """A layer that shares rows in the documents and not in vLLM, and one whose heads have scales of their own."""
    names = [f"model.layers.{n}.self_attn.attn" for n in range(2)]
    module = SimpleNamespace(
        kv_cache_dtype="fp8", _k_scale=torch.ones(scales), _v_scale=torch.ones(scales), _k_scale_float=1.0,
        _v_scale_float=1.0, kv_sharing_target_layer_name=None,
    )  # fmt: skip
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, module)),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    caches = {name: torch.zeros(4, 2, 32, 64, dtype=torch.uint8) for name in names}
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=FULL, layer_names=names)])
    with pytest.raises(MismatchError, match=say):
        register_pages(caches, groups, config, CacheMeta(layers=tuple(specs)))


@pytest.mark.parametrize(
    ("model_type", "is_halved", "say"),
    [
        ("deepseek_v3", True, ""), ("deepseek_v2", False, ""),
        ("glm4_moe_lite", True, "latents of a glm4_moe_lite, only of deepseek_v2 and deepseek_v3"),
    ],
)  # fmt: skip
def test_latents_are_loaded_where_their_order_is_known(model_type, is_halved, say):
    """Pages of three axes, as some backends have them."""
    name = "model.layers.0.self_attn.attn"
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}),
        model_config=SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace(model_type=model_type)),
    )
    meta = CacheMeta(layers=(LayerSpec(1, 24, 8, value_rope=0),), ropes=(RopeRegime((1.0,) * 4, not is_halved),))
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=LATENT, layer_names=[name])])
    view = torch.zeros(4, 32, 32)
    if say:
        with pytest.raises(MismatchError, match=say):
            register_pages({name: view}, groups, config, meta)
        return
    pages, _ = register_pages({name: view}, groups, config, meta)
    check_layers(pages, meta)
    pages.write(0, slots_of([2], 32, 5, 6), torch.arange(24.0)[None, None], torch.arange(8.0)[None, None])
    assert view[2, 5].tolist() == [*range(24), *([0, 4, 1, 5, 2, 6, 3, 7] if is_halved else range(8))]
