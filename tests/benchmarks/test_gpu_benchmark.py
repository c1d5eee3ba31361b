"""The parts of the GPU benchmark that run without a GPU: inputs, rivals, counts, picture, and what it refuses."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.version import Version

import kvwire
from kvwire.errors import CorruptError

_ROOT = Path(__file__).resolve().parents[2]
_FOLDER = str(_ROOT / "benchmarks")
sys.path.insert(0, _FOLDER)
import cachegen_fast  # noqa: E402
import gpu  # noqa: E402
from gpu_parts import (  # noqa: E402
    baselines,
    cachegen_triton,
    checks,
    measuring,
    ours,
    picture,
    prefill,
    roofline,
    shapes,
    synthetic,
    timing,
)

sys.path.remove(_FOLDER)

_CPU = torch.device("cpu")
_ONCE = timing.Effort(1, 1, 0.0, 0)
_NAMES = [shape.name for shape in shapes.SHAPES]


def _tiny(name="llama-3.1-8b", tokens=64):
    shape = shapes.tiny(shapes.named(name))
    profile = synthetic.make_profile(shape, _CPU, synthetic.TINY)
    return shape, profile, synthetic.make_cache(shape, profile, tokens, _CPU)


def test_shapes_are_those_of_the_models():
    bytes_per_token = {shape.name: shape.cache_bytes(1) for shape in shapes.SHAPES}
    assert bytes_per_token == {
        "llama-3.1-8b": 131072,
        "llama-3.1-70b-tp8": 40960,
        "qwen3-32b": 262144,
        "deepseek-v3": 70272,
    }
    parameters = {shape.name: shape.layers * prefill.layer_parameters(shape) / 1e9 for shape in shapes.SHAPES}
    assert parameters["llama-3.1-8b"] == pytest.approx(8.03 - 2 * 0.525, abs=0.02)
    assert 8 * parameters["llama-3.1-70b-tp8"] == pytest.approx(70.6 - 2 * 1.05, abs=0.1)
    assert parameters["qwen3-32b"] == pytest.approx(32.8 - 2 * 0.78, abs=0.1)
    assert parameters["deepseek-v3"] == pytest.approx(37 - 2 * 0.93, abs=1)


def test_an_unknown_shape_is_refused():
    with pytest.raises(SystemExit, match="no shape"):
        shapes.named("gpt-2")


@pytest.mark.parametrize("name", _NAMES)
def test_the_prefill_caches_what_the_shape_says(name):
    shape = shapes.tiny(shapes.named(name))
    model = prefill.build(shape, 2, _CPU)
    if name.startswith("deepseek") and Version(transformers.__version__) < Version("5.15"):
        pytest.skip("earlier versions of transformers cache expanded keys, not latents")
    expected = [((s.kv_heads, 5, s.key_dim), (s.kv_heads, 5, s.value_dim)) for s in shape.specs]
    assert prefill.cache_shapes(model, 5) == expected
    weights = [p for p in model.model.layers[0].parameters() if p.ndim == 2]
    assert sum(p.numel() for p in weights) == prefill.layer_parameters(shape)
    assert all(p.dtype == torch.bfloat16 for p in weights)


def test_prefill_of_few_layers_says_so(monkeypatch):
    shape = shapes.tiny(shapes.named("llama-3.1-8b"), layers=4)
    monkeypatch.setattr(prefill, "_MOST_FLOP", 2.5 * prefill.layer_flop(shape, 8))
    found = prefill.Prefill(shape, 8, timing.Device(_CPU, _ONCE)).measure(8)
    assert (found["layers_timed"], found["layers"], found["extrapolated"]) == (2, 4, True)
    ends = found["embedding_and_head_ms"]["median"]
    assert found["ms"] == pytest.approx(2 * found["layers_ms"]["median"] + ends)


def test_layers_that_do_not_fit_are_left_out():
    shape = shapes.named("qwen3-32b")
    assert prefill.affordable_layers(shape, 1024, 200 << 30) == 64
    assert 1 < prefill.affordable_layers(shape, 1024, 40 << 30) < 32
    assert prefill.affordable_layers(shape, 1024, 0) == 1


@pytest.mark.parametrize("name", _NAMES)
def test_a_synthetic_profile_reads_back_and_codes(name):
    shape, profile, cache = _tiny(name)
    assert kvwire.Profile.from_bytes(profile.data).digest == profile.digest
    blob = kvwire.encode(cache, profile)
    exact = checks.flat(cache)
    errors = [
        float((checks.flat(kvwire.decode(blob, level, profile)) - exact).norm() / exact.norm()) for level in range(5)
    ]
    assert all(fine < coarse / 1.8 for coarse, fine in pairwise(errors)), errors
    assert cache.meta.layers == shape.specs


def test_levels_code_about_the_share_that_was_aimed_at():
    shape = shapes.Shape("wide", "wide", "llama", 2, 4, 64, 64, 64, 4, 64, 64, 1e4)
    profile = synthetic.make_profile(shape, _CPU, synthetic.Sizes(64, 8, 1024))
    blob = kvwire.encode(synthetic.make_cache(shape, profile, 256, _CPU), profile)
    info = kvwire.inspect(blob)
    for level, aim in enumerate(synthetic.CODED):
        share = roofline.work_of(info, level, profile).coded / (256 * shape.width)
        assert share == pytest.approx(aim, abs=0.03)


def test_work_is_counted_from_the_index():
    shape, profile, cache = _tiny(tokens=40)
    info = kvwire.inspect(kvwire.encode(cache, profile, chunk_tokens=16))
    work = roofline.work_of(info, 1, profile)
    rows = info.segments
    assert work.symbols == sum(row[0].raw + row[1].raw for row in rows)
    assert work.coded == sum(row[1].raw for row in rows)
    assert work.flop == pytest.approx(2 * work.coded * 32 + 2 * 40 * 8 * shape.width)
    assert work.entropy_bytes == sum(row[0].stored + row[1].stored for row in rows) + 2 * work.coded
    limits = {"copy": {"gb_s": 1.0}, "matmul": {"tflop_s": 1e6}}
    floor = work.place_bytes / 1e6
    assert roofline.judged(work, 1.0, 2.0, limits)["bound_by"] == "memory"
    assert roofline.judged(work, 1.0, 2 * floor, limits)["place_share_of_floor"] == pytest.approx(0.5)
    limits["matmul"]["tflop_s"] = 1e-9
    assert roofline.judged(work, 1.0, 2.0, limits)["bound_by"] == "matrix products"
    assert roofline.judged(work, 3.0, 2.0, limits)["bound_by"] == "entropy"


@settings(max_examples=4)
@given(
    heads=st.integers(1, 2),
    dim=st.sampled_from([1, 5, 64, 70]),
    tokens=st.integers(1, 12),
    seed=st.integers(0, 99),
    skew=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_cachegen_decodes_as_on_the_processor(heads, dim, tokens, seed, skew):
    draw = torch.Generator().manual_seed(seed)
    tensors = [(torch.randn(heads, tokens, dim, generator=draw) ** 3 * skew).bfloat16() for _ in range(2)]
    tensors[0][:, 0] = 0
    cache = kvwire.KVCache.from_tensors(tensors[:1], tensors[1:])
    (streams,) = cachegen_triton.encode(cache)
    keys, values = cachegen_fast.decode(cachegen_fast.encode(cache))
    found = cachegen_triton.decode(streams, streams.output())
    assert torch.equal(found[0], keys[0])
    assert torch.equal(found[1], values[0])


def test_cachegen_decodes_the_last_part_of_a_long_document():
    streams = cachegen_triton._encode([(torch.randn(1, 258, 3).bfloat16(), 32)])
    assert streams.lengths.shape == (1, 2, 1, 3)
    found = cachegen_triton.decode(streams, streams.output())
    assert torch.equal(found, checks.cachegen_on_host(streams))


def test_cachegens_bytes_are_counted_without_its_header():
    _, _, cache = _tiny(tokens=20)
    (streams,) = cachegen_triton.encode(cache)
    assert len(cachegen_fast.encode(cache)) - streams.nbytes == 32


def test_cachegen_compiles_for_gpus_without_spills():
    types = {
        "words": "*i16", "last": "i32", "starts": "*i64", "stored": "*i16", "factors": "*fp32", "most": "*fp32",
        "out": "*i16", "parts": "i32", "heads": "i32", "tokens": "i32", "dim": "i32",
    }  # fmt: skip
    constants = {"STREAM": 256, "ENTRIES": 33, "BLOCK": cachegen_triton.BLOCK}
    jobs = [
        {
            "module": "gpu_parts.cachegen_triton",
            "name": "decode_streams",
            "signature": {key: kind for key, kind in types.items() if key not in fixed},
            "constexprs": constants | fixed,
            "arch": arch,
            "options": {"num_warps": cachegen_triton.WARPS},
        }
        for arch, fixed in ((80, {}), (90, {"heads": 1, "parts": 1}))  # ones become constants
    ]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    answers = subprocess.run(
        [sys.executable, str(_ROOT / "tests" / "codec" / "compiling.py")],
        env=environment | {"PYTHONPATH": _FOLDER},
        input="".join(json.dumps(job) + "\n" for job in jobs),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert [json.loads(answer).get("spilled") for answer in answers] == [0, 0], answers


def test_int8_loses_half_a_step_at_most():
    case = checks.Case(*_tiny(), b"", _CPU, 16)
    assert checks.int8(case)
    tensor = case.cache.keys[0]
    quantised = baselines.quantise_int8(tensor)
    assert baselines.int8_bytes([quantised]) == tensor.numel() + 2 * tensor.numel() // tensor.shape[2]


def test_damage_is_damage():
    _, profile, cache = _tiny(tokens=20)
    blob = kvwire.encode(cache, profile)
    at = kvwire.inspect(blob).segments[0][1].end - 1
    with pytest.raises(CorruptError, match="checksum"):
        kvwire.decode(checks.flipped(blob, at, mended=False), 1, profile)
    with pytest.raises(CorruptError, match="lane"):
        kvwire.decode(checks.flipped(blob, at, mended=True), 1, profile)


def test_a_difference_is_seen():
    wanted = torch.randn(1000)
    checks.compare(wanted.bfloat16().float(), wanted, "rounding")
    with pytest.raises(AssertionError, match="relative error"):
        checks.compare(1.02 * wanted, wanted, "scaled")
    wrong = wanted.clone()
    wrong[3] += 0.05 * wanted.abs().max()
    with pytest.raises(AssertionError, match=r"error|difference"):
        checks.compare(wrong, wanted, "one number")


def test_symbols_and_guards_hold_in_the_interpreter():
    shape, profile, cache = _tiny("deepseek-v3", tokens=6)
    blob = kvwire.encode(cache, profile, chunk_tokens=4)
    case = checks.Case(shape, profile, cache, blob, _CPU, 4)
    assert "equal" in checks.symbols(case)
    assert "nothing else" in checks.guards(case)


@pytest.fixture(scope="module")
def dry():
    """Every call that would be timed, once, on one tiny shape; its figures mean nothing."""
    tiny = (shapes.tiny(shapes.named("llama-3.1-70b-tp8"), layers=1),)
    plan = measuring.Plan(tiny, (2,), (0,), synthetic.TINY, loads=1)
    return measuring.run(plan, timing.Device(_CPU, _ONCE), lambda _: None)


def test_every_timed_call_runs(dry):
    (shape,) = dry["shapes"].values()
    found = shape["documents"]["2"]
    assert set(found["rivals"]) == {"CacheGen", "int8", "raw bfloat16"}
    assert found["prefill"]["layers_timed"] == 1
    assert {"entropy_ms", "place_ms", "ready_ms", "call_ms", "roofline"} <= set(found["levels"]["coarse"])
    json.dumps(dry)


def test_table_and_picture_show_every_row(dry, tmp_path, capsys):
    gpu.print_results(dry)
    shown = capsys.readouterr().out
    assert all(row in shown for row in ("kvwire coarse", "CacheGen", "int8", "raw bfloat16", "1 loads"))
    picture.draw(tmp_path / "gpu.png", dry)
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")


def test_what_does_not_fit_is_left_out_and_said(monkeypatch):
    device = timing.Device(_CPU, _ONCE)
    monkeypatch.setattr(timing.Device, "free_bytes", lambda _: 0)
    tiny = shapes.tiny(shapes.named("llama-3.1-8b"))
    skipped = []
    plan = measuring.Plan((tiny,), (2,), (0,), synthetic.TINY)
    found = measuring._shape(tiny, plan, device, {}, skipped, lambda _: None)
    assert found["documents"] == {}
    assert "2 tokens" in skipped[0]


def test_a_prefill_that_runs_out_of_memory_leaves_the_rest(dry, monkeypatch, capsys, tmp_path):
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(prefill.Prefill, "measure", fail)
    found, skipped = copy.deepcopy(dry), []
    (shape,) = found["shapes"].values()
    shape["documents"]["2"]["prefill"] = {}
    tiny = shapes.tiny(shapes.named("llama-3.1-8b"))
    measuring._add_prefill(tiny, shape["documents"], timing.Device(_CPU, _ONCE), skipped)
    assert "ran out" in skipped[0]
    gpu.print_results(found)
    assert "prefill not measured" in capsys.readouterr().out
    picture.draw(tmp_path / "gpu.png", found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_so_and_exits_with_2(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(_ROOT / "benchmarks" / "gpu.py"), "--out", str(tmp_path / "gpu.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == gpu.NO_GPU == 2, done.stderr
    assert "no GPU" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("option", ["--quick", "--check"])
def test_without_a_gpu_no_option_measures_or_writes(option, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu.main([option, "--out", str(tmp_path / "gpu.json")]) == gpu.NO_GPU
    assert "no GPU" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_interpreter_checks_and_does_not_measure(capsys):
    assert gpu.device_for(gpu.options(["--check"])) == _CPU
    assert gpu.device_for(gpu.options([])) is None
    assert "nothing is written" in capsys.readouterr().out


def test_quick_is_short():
    args = gpu.options(["--quick"])
    plan = gpu.plan_of(args)
    assert [shape.name for shape in plan.shapes] == ["llama-3.1-8b"]
    assert plan.tokens == (1024, 8192)
    assert plan.levels == (0, 2, 4)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_is_timed_from_pinned_memory_decodes_and_checks(damaged):
    _, profile, cache = _tiny("llama-3.1-70b-tp8", tokens=5)
    blob = kvwire.encode(cache, profile)
    at = kvwire.inspect(blob).segments[0][0].end - 1
    out = measuring._like(cache)
    load = ours.Load(ours.decoder_of(blob, profile, out), ours.pieces_of(blob, 0))
    if damaged:
        load = ours.Load(load.decoder, ours.pieces_of(checks.flipped(blob, at, mended=True), 0))
        with pytest.raises(CorruptError, match=r"chunk 0|lane"):
            load.ready()
        return
    load.ready()
    wanted = kvwire.decode(blob, 0, profile, dtype=torch.float32, backend="numba")
    checks.compare(checks.flat(out), checks.flat(wanted), "level 0")


def test_device_decodes_what_the_processor_decodes():
    _, profile, cache = _tiny("llama-3.1-70b-tp8", tokens=5)
    blob = kvwire.encode(cache, profile)
    found = ours.decode(blob, 1, profile, _CPU, torch.bfloat16)
    wanted = kvwire.decode(blob, 1, profile, dtype=torch.float32, backend="numba")
    checks.compare(checks.flat(found), checks.flat(wanted), "level 1")
