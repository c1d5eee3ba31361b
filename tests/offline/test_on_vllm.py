"""What surrounds vLLM on Ray, without either: arguments, room, reading, and what is told of each document."""

from __future__ import annotations

import asyncio
import json
import time
from array import array
from dataclasses import replace
from functools import partial

import pytest

from kvwire.engines.transformers.opening import open_tokenizer
from kvwire.errors import ArgumentError, KvwireError, MismatchError, NotFoundError, StorageError
from kvwire.offline import DocumentRef, RaySettings, Row, RunOptions, VllmSettings, encode_on_vllm, encode_serially
from kvwire.offline.on_vllm import (
    OutcomeReader,
    Reader,
    _check_room,
    _ids,
    _most_engines,
    _profile,
    _request,
    error_of,
    reading_engine,
)
from kvwire.offline.vllm_stage import OUTCOME, Outcomes, with_outcomes
from kvwire.runtime.coding import Coding, Document
from kvwire.runtime.corpus import Corpus, find_model
from kvwire.store import FolderStore

from .test_pipeline import untimed

VLLM = VllmSettings("model", {"store": "file:///kv"}, tensor_parallel=4)


# Arguments.


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--engine", "vllm"], 2, "add --on ray"),
        (["--tensor-parallel", "2"], 2, "add --engine vllm"),
        (["--engine-args", "{}"], 2, "add --engine vllm"),
        (["--engine", "vllm", "--on", "ray", "--lossless"], 2, "--lossless is not for --engine vllm"),
        (["--engine", "vllm", "--on", "ray", "--refit"], 2, "--refit is not"),
        (["--engine", "vllm", "--on", "ray", "--neutral-prefix", "2"], 2, "--neutral-prefix is not"),
        (["--engine", "vllm", "--on", "ray", "--gpus", "3"], 2, "leave --gpus out"),
        (["--engine", "vllm", "--on", "ray", "--engine-args", "{"], 2, "--engine-args is no JSON"),
        (["--engine", "vllm", "--on", "ray", "--engine-args", "[]"], 2, "a JSON object"),
        (["--engine", "vllm", "--on", "ray", "--engine-args", '{"quantization": "fp8"}'], 2, "'quantization' is set"),
    ],
)
def test_what_vllm_does_not_serve_is_refused(run, folder, model, tmp_path, words, code, said):
    found, _, err = run("encode", folder, "--model", model, "--store", f"file://{tmp_path}/store", *words)
    assert (found, said in err.splitlines()[-1]) == (code, True), err


@pytest.mark.parametrize("options", [RunOptions(force=True), RunOptions(refit=True)])
def test_nothing_is_forced(options, refs):
    with pytest.raises(ArgumentError, match="supports neither"):
        next(encode_on_vllm(lambda: None, refs, VLLM, options))


def test_prompts_share_nothing_and_are_saved_under_their_names():
    told = VllmSettings("m", {"store": "s"}, engine_args={"dtype": "half", "max_model_len": 9}).engine_kwargs()
    assert (told["dtype"], told["max_model_len"], told["enable_prefix_caching"]) == ("half", 9, False)
    assert "distributed_executor_backend" not in told
    assert told["kv_transfer_config"]["kv_connector_extra_config"] == {"store": "s", "save": "named"}
    assert VLLM.engine_kwargs()["distributed_executor_backend"] == "mp"
    with pytest.raises(ArgumentError, match="at least one worker"):
        VllmSettings("m", {}, tensor_parallel=0)


def test_secrets_are_not_printed():
    assert "hunter2" not in repr(VllmSettings("m", {"store": "s", "token": "hunter2"}))


def node(alive=True, **resources):
    return {"Alive": alive, "Resources": resources}


@pytest.mark.parametrize(
    ("nodes", "cpus", "engines"),
    [
        ([node(CPU=64, GPU=8)], 1.0, 2),
        ([node(CPU=64, GPU=8), node(CPU=64, GPU=4), node(CPU=64, GPU=3)], 1.0, 3),
        ([node(CPU=64, GPU=8), node(alive=False, CPU=64, GPU=8)], 1.0, 2),
        ([node(CPU=8, GPU=8)], 1.0, 1),  # with both, nothing is left to hand documents on
        ([node(CPU=8, GPU=8)], 0.0, 2),
    ],
)
def test_each_vllm_is_on_one_machine(nodes, cpus, engines):
    assert _most_engines(nodes, VLLM, cpus) == engines
    _check_room(nodes, VLLM, cpus)


def test_a_cluster_that_is_too_small_is_told_instead_of_waited_for():
    small = [node(CPU=64, GPU=2), node(CPU=64, GPU=2)]
    with pytest.raises(ArgumentError, match=r"needs one machine with 4 CPUs and 4 GPUs.*has 64 CPUs, 2 GPUs; 64"):
        _check_room(small, VLLM, 1.0)
    spread = VllmSettings("m", {}, 4, engine_args={"distributed_executor_backend": "ray"})
    _check_room(small, spread, 1.0)
    with pytest.raises(ArgumentError, match=r"less than 1 --cpus"):
        _check_room([node(CPU=2)], VllmSettings("m", {}, 2, gpus=0), 1.0)


# What reads before vLLM, and tells behind it.


def open_reading(model, store):
    opened = FolderStore(store)
    corpus = Corpus.open(opened)
    record, pieces = find_model(corpus.catalog), open_tokenizer(model)
    return Corpus(reading_engine(record, pieces, pieces.opening, len(pieces.tokenizer)), opened)


@pytest.fixture
def computed(engine, profile, tmp_path):
    """The corpus that vLLM's workers would write, with a profile."""
    made = Corpus(engine, FolderStore(tmp_path / "store"))
    made.set_profile(profile)
    made.encoder().prepare(list)
    return made


@pytest.fixture
def opened(model, computed, tmp_path):
    return partial(open_reading, model, tmp_path / "store")


def read_by(opened, refs, digest):
    return Reader(opened, digest, RunOptions())({"ref": [ref.to_json() for ref in refs]})


def said(message="", error="", seconds=0.5):
    return json.dumps({"prefill_s": 2.0, "encode_s": seconds, "error": error, "message": message})


def test_rows_are_those_of_a_serial_run(opened, computed, refs, folder, profile, engine):
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    broken = DocumentRef("latin", "latin.txt", "text", str(folder / "latin.txt"))
    (first,) = encode_serially(computed, refs[:1], profile)
    batch = read_by(opened, [*refs, broken], profile.digest)
    assert batch["is_due"] == [False] + [True] * 8 + [False]
    assert Row.from_dict(json.loads(batch["row"][0])).status == "there already"
    due = [n for n, is_due in enumerate(batch["is_due"]) if is_due]
    for n in due:  # as a worker does it
        request = _request({name: batch[name][n] for name in ("row", "head", "ids")})
        ids = engine.tokenize((folder / f"{refs[n].document_id}.txt").read_text())
        assert request["tokenized_prompt"] == [*engine.opening_tokens, *ids]
        assert request["sampling_params"]["extra_args"]["kv_transfer_params"]["kvwire"]["save"] == refs[n].document_id
    rows = untimed(encode_serially(computed, refs, profile))
    given = {name: [batch[name][n] for n in due] for name in ("row", "ids")} | {OUTCOME: [said()] * len(due)}
    told = [Row.from_dict(json.loads(row)) for row in OutcomeReader(opened, profile.digest, RunOptions())(given)["row"]]
    assert {(row.prefill_s, row.encode_s) for row in told} == {(2.0, 0.5)}
    times = {name: 0.0 for name in vars(told[0]) if name.endswith("_s")}
    assert [replace(row, **times) for row in told] == rows[1:]
    assert first.row.blob == rows[0].blob


def test_what_went_wrong_is_in_the_row(opened, computed, refs, profile):
    batch = read_by(opened, refs[:4], profile.digest)
    outcomes = [
        said("the disk is full; make room", "StorageError"),
        said("out of memory; sorry", "OutOfMemoryError"),
        said("vLLM did not compute it: too long", "vLLM"),
        said(),
    ]
    given = {name: batch[name] for name in ("row", "ids")} | {OUTCOME: outcomes}
    rows = [Row.from_dict(json.loads(row)) for row in OutcomeReader(opened, profile.digest, RunOptions())(given)["row"]]
    assert [row.status for row in rows] == ["failed"] * 4
    assert (rows[0].reason, rows[0].advice) == ("the disk is full", "make room")
    assert rows[1].reason == "out of memory, sorry"
    assert rows[2].reason == "vLLM did not compute it: too long"
    assert "the store does not have it" in rows[3].reason
    assert all("log of vLLM's workers" in row.advice for row in rows[1:])


def test_where_the_store_cannot_be_opened_each_document_says_so(refs):
    def broken():
        msg = "the disk is gone"
        raise StorageError(msg)

    batch = read_by(broken, refs[:2], "")
    assert batch["is_due"] == [False, False]
    assert {Row.from_dict(json.loads(row)).reason for row in batch["row"]} == {"the disk is gone"}


def test_a_store_without_a_profile_says_how_to_get_one(model, engine, tmp_path):
    made = Corpus(engine, FolderStore(tmp_path / "store"))
    made.encoder().prepare(list)
    with pytest.raises(NotFoundError, match="encode a few documents into it without --engine vllm first"):
        _profile(open_reading(model, tmp_path / "store"))


def test_a_profile_of_few_tokens_serves(model, engine, story, tmp_path):
    made = Corpus(engine, FolderStore(tmp_path / "store"))
    list(made.encode([Document("story", tuple(engine.tokenize(story)[:80]))]))
    assert _profile(open_reading(model, tmp_path / "store")) == made.profile().digest


def test_a_profile_of_prefix_layers_is_refused(model, engine, story, tmp_path):
    made = Corpus(engine, FolderStore(tmp_path / "store"), coding=Coding(prefix_layers=1))
    list(made.encode([Document("story", tuple(engine.tokenize(story)[:500]))]))
    with pytest.raises(MismatchError, match="prefix layers"):
        _profile(open_reading(model, tmp_path / "store"))


def test_what_reads_computes_nothing(opened):
    engine = opened().encoder().engine
    for call in (lambda: engine.prefill([[1]]), lambda: engine.extend(None, [1])):
        with pytest.raises(MismatchError, match="only in vLLM"):
            call()


@pytest.mark.parametrize("kind", ["StorageError", "RuntimeError", "KvwireError", "Any", ""])
def test_errors_of_workers_are_errors_of_kvwire(kind):
    found = error_of(kind, "words")
    assert isinstance(found, KvwireError)
    assert str(found).startswith("words")
    assert type(found).__name__ == (kind if kind.endswith("eError") and kind != "RuntimeError" else "KvwireError")


def test_token_ids_travel_as_bytes():
    assert _ids(array("q", [0, 5, 1 << 40]).tobytes()) == [0, 5, 1 << 40]
    assert RaySettings().batch == 32


# Ray's stage.


class Workers:
    """Two workers, of which the first tells of a document some looks later."""

    def __init__(self, *lists):
        self.lists, self.asked = list(lists), 0

    async def ask(self, name):
        assert name == "kvwire_outcomes"
        self.asked += 1
        under_way, done = self.lists.pop(0) if self.lists else (0, [])
        told = [{"document": each, "encode_s": 1.0, "error": "", "message": ""} for each in done]
        return [{"under_way": under_way, "done": told}, {"under_way": 0, "done": []}]


def test_each_waits_for_its_own_document():
    async def both():
        workers = Workers((2, []), (1, ["b"]), (1, []), (0, ["a"]))
        outcomes = Outcomes(workers.ask)
        found = await asyncio.gather(outcomes.of("a"), outcomes.of("b"))
        assert workers.asked == 4
        assert not outcomes._done
        return found

    assert [each["document"] for each in asyncio.run(both())] == ["a", "b"]


def test_a_document_of_which_nothing_is_told_is_given_up():
    async def lost():
        return await Outcomes(Workers((1, []), (0, ["other"])).ask, lost_s=0.2).of("a")

    began = time.monotonic()
    found = asyncio.run(lost())
    assert found["error"] == "StorageError"
    assert "did not say that they saved it" in found["message"]
    assert time.monotonic() - began >= 0.2


def test_the_stage_tells_of_each_row_what_became_of_it():
    class Engine:
        collective_rpc = staticmethod(Workers((0, ["x"])).ask)

    class Stage:
        IDX_IN_BATCH_COLUMN = "at"

        def __init__(self):
            self.llm = type("Wrapper", (), {"engine": Engine})

        async def udf(self, batch):
            times = {"scheduled_ts": 5.0, "first_token_ts": 7.5}
            yield {"at": 1, "__inference_error__": "ValueError: too long", "metrics": None, "time_taken_llm": -1}
            yield {"at": 0, "__inference_error__": "", "metrics": times, "prompt": "", "more": [len(batch)]}

    async def through():
        batch = [{"at": n, "row": json.dumps({"id": name})} for n, name in enumerate("xy")]
        return [answer async for answer in with_outcomes(Stage)().udf(batch)]

    wrong, right = asyncio.run(through())
    assert set(right) == {"at", OUTCOME, "__inference_error__"}
    assert json.loads(right[OUTCOME]) == {"prefill_s": 2.5, "encode_s": 1.0, "error": "", "message": ""}
    assert json.loads(wrong[OUTCOME])["message"] == "vLLM did not compute it: ValueError: too long"
    assert (wrong["at"], wrong["__inference_error__"]) == (1, "")
