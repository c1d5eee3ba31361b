"""``kvwire encode --on ray --engine vllm`` with the real ``ray.data.llm`` and a vLLM of two workers on a processor."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")
pytest.importorskip("ray", reason="Ray is not installed here: make test-engines installs it")

import ray
from ray.llm._internal.batch.stages.vllm_engine_stage import vLLMEngineStageUDF

from kvwire.cli.app import main
from kvwire.engines.transformers import open_engine
from kvwire.offline import RaySettings, VllmSettings, encode_serially, find_documents, read_manifest
from kvwire.offline.on_vllm import processor_of
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore, MemoryStore

pytestmark = pytest.mark.filterwarnings("default")
MOST = 300
ARGS = {
    "block_size": 32,
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MOST,
    "num_gpu_blocks_override": 64,
}


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("on_ray") / "model"
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.15,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # on a machine of one node, vLLM wants to be told
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        yield
        ray.shutdown()


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; gives exit code and stderr."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["kvwire", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        return code, capsys.readouterr().err

    return call


def test_documents_are_those_of_transformers_and_are_encoded_once(cluster, run, model, demo_model, tmp_path):
    story = (demo_model.parent / "documents" / "09-the-toll-gate.txt").read_text()
    texts = {f"{n:02}": story[n * 250 : n * 250 + 200 + 60 * (n % 4)] for n in range(8)} | {"long": story}
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "same.txt").write_text(texts["03"])
    common = ["--model", model, "--store", f"file://{tmp_path}/store", "--manifest", tmp_path / "m.jsonl"]
    vllm = ["--on", "ray", "--engine", "vllm", "--tensor-parallel", 2, "--cpus", 0.5, "--engine-args", json.dumps(ARGS)]
    assert run("encode", folder, *common, *vllm)[0] == 3  # nobody has fitted a profile yet
    assert run("encode", folder / "00.txt", folder / "01.txt", *common)[0] == 0

    code, err = run("encode", folder, *common, *vllm, "--index", "kvwire:16")
    assert (code, err.splitlines()[-1]) == (9, "kvwire: 2 of 11 documents were left out")
    rows = {row.id: row for row in read_manifest(str(tmp_path / "m.jsonl"))}
    assert list(rows) == [*(f"{n:02}" for n in range(8)), "latin", "long", "same"]
    failed = {name: row.reason for name, row in rows.items() if row.status == "failed"}
    assert "is not UTF-8 text" in failed["latin"]
    assert "vLLM did not compute it" in failed["long"]
    assert str(MOST) in failed["long"]
    there = [name for name, row in rows.items() if row.status == "there already"]
    assert there == ["00", "01"]

    engine = open_engine(model, dtype=torch.float32)
    with closing(FolderStore(tmp_path / "store")) as store:
        corpus = Corpus.open(store)
        serial, profile = Corpus(engine, MemoryStore(), coding=Coding(neutral_prefix=0)), corpus.profile()
        serial.set_profile(profile)
        new = [ref for ref in find_documents([str(folder)]) if rows[ref.document_id].status == "encoded"]
        assert [ref.document_id for ref in new] == [*(f"{n:02}" for n in range(2, 8)), "same"]
        for ref, work in zip(new, encode_serially(serial, new, profile), strict=True):
            row, other, entry = rows[ref.document_id], work.row, corpus.find(ref.document_id)
            ids = list(corpus.text(entry))
            assert ids == engine.tokenize((folder / f"{row.id}.txt").read_text())
            assert (row.blob, row.bytes) == (entry.sha256, entry.size)
            assert (row.source, row.tokens, row.profile) == (other.source, other.tokens, other.profile)
            assert abs(row.bytes / other.bytes - 1) < 0.01  # last bits of two engines differ
            assert min(row.read_s, row.tokenize_s, row.look_up_s, row.prefill_s) > 0
            for mine, theirs in zip(row.levels, other.levels, strict=True):
                assert mine.name == theirs.name
                assert mine.error == pytest.approx(theirs.error, rel=0.05)
            loaded = corpus.decode(row.id, 2, dtype=torch.float32)
            expected = serial.decode(row.id, 2, dtype=torch.float32)
            for mine, theirs in zip([*loaded.keys, *loaded.values], [*expected.keys, *expected.values], strict=True):
                assert (mine - theirs).norm() < 0.02 * theirs.norm()
            opening = engine.opening_tokens
            hit = corpus.index("kvwire:16").longest([*opening, *ids, 5])
            assert (hit.tokens, hit.opening) == (len(opening) + row.tokens, len(opening))
        assert rows["same"].blob == rows["03"].blob
    assert run("ask", "--docs", "04", "05", "--question", "Who?", *common[:4])[0] == 0

    for name in ("latin", "long"):
        (folder / f"{name}.txt").unlink()
    assert run("encode", folder, *common, *vllm)[0] == 0
    assert {row.status for row in read_manifest(str(tmp_path / "m.jsonl"))} == {"there already"}


def test_a_model_with_windows_is_encoded_without_the_hybrid_manager(cluster, run, demo_model, tmp_path):
    """docs/how-to/encode-with-vllm.md: a window's rows are given away otherwise, before they are saved."""
    folder, texts = tmp_path / "model", demo_model.parent / "documents"
    torch.manual_seed(3)
    config = GptOssConfig(
        vocab_size=8192, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, initializer_range=0.15, sliding_window=96,
        layer_types=["sliding_attention", "full_attention"], num_local_experts=4, num_experts_per_tok=2,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    GptOssForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, folder / name)
    (tmp_path / "short.txt").write_text((texts / "09-the-toll-gate.txt").read_text()[:900])
    common = ["--model", folder, "--store", f"file://{tmp_path}/store"]
    assert run("encode", texts / "09-the-toll-gate.txt", *common)[0] == 0
    vllm = ["--on", "ray", "--engine", "vllm", "--cpus", 0.5, "--engine-args"]
    args = ARGS | {"disable_hybrid_kv_cache_manager": True}
    assert run("encode", tmp_path / "short.txt", *common, *vllm, json.dumps(args))[0] == 0
    engine = open_engine(folder, dtype=torch.float32)
    with closing(FolderStore(tmp_path / "store")) as store:
        corpus = Corpus.open(store)
        serial = Corpus(engine, MemoryStore(), coding=Coding(neutral_prefix=0))
        serial.set_profile(corpus.profile())
        list(serial.encode([Document("short", tuple(corpus.text(corpus.find("short"))))]))
        loaded, expected = (each.decode("short", 2, dtype=torch.float32) for each in (corpus, serial))
        assert loaded.tokens > 2 * config.sliding_window
        for mine, theirs in zip([*loaded.keys, *loaded.values], [*expected.keys, *expected.values], strict=True):
            assert (mine - theirs).norm() < 0.02 * theirs.norm()


def test_a_vllm_that_cannot_start_ends_the_run_and_says_where_to_look(cluster, run, model, demo_model, tmp_path):
    texts = demo_model.parent / "documents"
    common = ["--model", model, "--store", f"file://{tmp_path}/store"]
    assert run("encode", texts / "09-the-toll-gate.txt", *common)[0] == 0
    vllm = ["--on", "ray", "--engine", "vllm", "--cpus", 0.5, "--engine-args", '{"load_format": "nothing"}']
    code, err = run("encode", texts / "04-the-carriers-cart.txt", *common, *vllm)
    assert code == 1
    assert "vLLM did not run on Ray" in err.splitlines()[-1]
    assert "logs of Ray's workers say why" in err.splitlines()[-1]


def test_ray_takes_the_settings_of_eight_gpus(cluster, model):
    """What Ray would set aside, as its own stage tells: nothing is started."""
    vllm = VllmSettings(str(model), {"store": "file:///nowhere"}, tensor_parallel=8)
    stage = processor_of(vllm, RaySettings(batch=4, cpus=2), 3).get_stage_by_name("vLLMEngineStage")
    assert stage.map_batches_kwargs["num_gpus"] == 8
    assert stage.map_batches_kwargs["num_cpus"] == 16
    assert stage.map_batches_kwargs["compute"].min_size == stage.map_batches_kwargs["compute"].max_size == 3
    engine = stage.fn_constructor_kwargs["engine_kwargs"]
    assert engine["tensor_parallel_size"] == 8
    assert engine["distributed_executor_backend"] == "mp"
    assert engine["enable_prefix_caching"] is False
    assert engine["kv_transfer_config"]["kv_connector_extra_config"] == {"store": "file:///nowhere", "save": "named"}
    assert issubclass(stage.fn, vLLMEngineStageUDF)
