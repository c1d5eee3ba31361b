"""The connector inside vLLM where pages are bfloat16, and where two workers share the heads."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.connector import KvwireConnector
from kvwire.engines.vllm.requests import PARAMS, Choice
from kvwire.engines.vllm.save_scheduling import SaveScheduler
from kvwire.store import FolderStore

from ..small_disk import on_small_disk
from .inside import CLOSE, Place, distance, encoded, save_model, serving_llm

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def served(model, tmp_path):
    """A vLLM with other settings beside a folder."""
    with ExitStack() as stack:

        def serve(extra=None, **options):
            store = stack.enter_context(closing(FolderStore(tmp_path / "store")))
            engine = open_engine(model, dtype=torch.float32)
            corpus = encoded(engine, store, index=("kvwire:32",))
            url, extra = f"file://{tmp_path / 'store'}", {"index": "kvwire:32"} | (extra or {})
            llm = stack.enter_context(serving_llm(model, url, extra=extra, **options))
            return Place(llm, engine, corpus, tmp_path, 32, stack)

        yield serve


def test_bfloat16_is_within_its_own_noise(served):
    """Linked documents differ from float32 as much as plain prompts do, and not as linked ones do from plain ones."""
    place = served(dtype="bfloat16")
    noise, linked, apart = [], [], []
    for number, names in enumerate(("abc", "cb", "da", "bd")):
        body = place.body(names, 2, random.Random(number).choices(range(20, 500), k=6))
        exact = place.expected(body["prompt"])
        right = place.expected(body["prompt"], place.linked(names, 2))
        ((plain, *_),) = place.ask({"prompt": body["prompt"]})
        ((first, _, told, _),) = place.ask(body)
        assert "promised_tokens" in told
        noise.append(distance(plain, exact))
        linked.append(distance(first, right))
        apart.append(distance(first, exact))
    assert max(linked) <= 2 * max(noise)
    assert sum(apart) > 2 * sum(linked)


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two workers take a processor each")
def test_two_workers_load_and_save_their_own_heads(served, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # on a machine of one node, vLLM wants to be told
    extension = "kvwire.vllm.SavingWorker"
    place = served({"save": "named"}, tensor_parallel_size=2, worker_extension_cls=extension)
    for names, level in (("abc", 2), ("cb", 0)):
        body = place.body(names, level)
        ((first, _, told, _),) = place.ask(body)
        assert told["promised_tokens"] == sum(len(place.corpus.text(place.corpus.find(name))) for name in names)
        assert distance(first, place.expected(body["prompt"], place.linked(names, level))) <= CLOSE
        ((first, *_),) = place.ask({"prompt": body["prompt"]})
        assert distance(first, place.expected(body["prompt"])) <= 1e-5
    texts = {f"new/{n}": random.Random(n).choices(range(20, 500), k=180 + 40 * n) for n in range(3)}
    place.ask(*({"prompt": ids, "kv_transfer_params": {PARAMS: {"save": name}}} for name, ids in texts.items()))
    until, done = time.monotonic() + 300, {}
    while set(done) != set(texts):
        assert time.monotonic() < until
        time.sleep(0.05)
        for told in place.llm.collective_rpc("kvwire_outcomes"):
            done |= {each["document"]: each["message"] for each in told["done"]}
    assert set(done.values()) == {""}
    for name, ids in texts.items():
        assert list(place.corpus.text(place.corpus.find(name))) == ids
        saved = place.corpus.decode(name, 3, dtype=torch.float32)
        (exact,) = place.engine.prefill([ids])
        for mine, theirs in zip([*saved.keys, *saved.values], [*exact.keys, *exact.values], strict=True):
            assert (mine - theirs).norm() < 0.2 * theirs.norm()


def test_a_request_with_an_adapter_gets_no_documents():
    """Its rows are not those of the model that the store names."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

    from kvwire.engines.vllm.connector import _why_not_plain

    plain, adapted = (
        Request("a", [1, 2], SamplingParams(), None, lora_request=adapter)
        for adapter in (None, LoRARequest("l", 1, "/l"))
    )
    assert _why_not_plain(plain) == ""
    assert "adapter" in _why_not_plain(adapted)


def test_strict_requests_without_their_documents_end_with_an_error(served):
    place = served(policy="fail")
    body = place.body("ab", 1)
    ((first, _, told, _),) = place.ask(body)
    assert told["loaded_tokens"] == told["promised_tokens"]
    assert distance(first, place.expected(body["prompt"], place.linked("ab", 1))) <= CLOSE
    (out,) = place.outputs(body | {"cache_salt": "mine"})
    assert out.outputs[0].finish_reason == "error"
    ((first, *_),) = place.ask({"prompt": body["prompt"]})
    assert distance(first, place.expected(body["prompt"])) <= 1e-5


def test_a_full_disk_costs_the_cache_alone(model, tmp_path):
    """What is loaded, saved and answered stays right; the log says once what is wrong."""
    with closing(FolderStore(tmp_path / "store")) as store:
        encoded(open_engine(model, dtype=torch.float32), store)
    (tmp_path / "cache").mkdir()
    told = on_small_disk(
        """
import json, random, time
from contextlib import ExitStack, closing
from pathlib import Path
import torch
from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.requests import PARAMS
from kvwire.engines.vllm.saving import SAVED
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore
from kvwire.types import digest_tokens
from tests.vllm.inside import CLOSE, Place, distance, serving_llm

model, root = sys.argv[2:]
ids = random.Random(1).choices(range(20, 500), k=200)
extra = {"cache": disk, "cache_size": "40MB", "save": "asked"}
more = {"extra": extra, "disable_log_stats": False}
with closing(FolderStore(root)) as store, serving_llm(Path(model), f"file://{root}", **more) as llm:
    engine = open_engine(model, dtype=torch.float32)
    place = Place(llm, engine, Corpus.open(store), root, 32, ExitStack())
    fill()
    for names in ("abc", "db"):
        body = place.body(names, 2)
        ((first, _, told, _),) = place.ask(body)
        assert told["lost_tokens"] == 0, told
        assert distance(first, place.expected(body["prompt"], place.linked(names, 2))) <= CLOSE
    ((first, _, told, _),) = place.ask({"prompt": ids, "kv_transfer_params": {PARAMS: {"save": True}}})
    assert told == {"saving_tokens": 200}
    assert distance(first, place.expected(ids)) <= 1e-5
    until, name = time.monotonic() + 60, f"{SAVED}{digest_tokens(ids)[:32]}"
    while name not in {each.document_id for each in place.corpus.catalog.documents(place.corpus.meta.config_digest())}:
        assert time.monotonic() < until
        time.sleep(0.1)
    place.ask(body)
    (failed,) = [each.value for each in llm.get_metrics() if each.name == "vllm:kvwire_cache_write_errors"]
    assert failed > 0
    assert free() == 0
""",
        tmp_path / "cache",
        model,
        tmp_path / "store",
    )
    assert told.count("the disk tier takes nothing in") == 1, told


@pytest.mark.parametrize(("computed", "outputs", "is_saved"), [(20, 0, False), (18, 3, False), (22, 3, True)])
def test_a_request_that_ends_after_it_was_preempted_is_not_saved(computed, outputs, is_saved):
    """Its blocks are taken again and not all of its rows are there, though it has answered already."""
    connector = object.__new__(KvwireConnector)
    connector._save_scheduler, connector._publishes_events, connector._outcome_sender = (
        SaveScheduler("asked", 1),
        False,
        None,
    )
    connector._scheduler = SimpleNamespace(
        missing_head=lambda _: 0, built_on=lambda _, had: 1 if had else None, end=lambda _: {PARAMS: {}}
    )
    connector._save_scheduler.begin("r", None, Choice(prefix=True, save=True, level=1))
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=[*range(20)], all_token_ids=[*range(20 + outputs)],
        num_computed_tokens=computed, num_tokens=20 + outputs, num_output_tokens=outputs,
    )  # fmt: skip
    holds, told = connector.request_finished_all_groups(request, ([4, 5],))
    assert holds == is_saved == bool(connector._save_scheduler.take())
    assert told == {
        PARAMS: {"saving_tokens": 22} if is_saved else {"not_saved": "it ended before its prompt was computed"}
    }


@pytest.mark.parametrize(
    ("wrong", "say"),
    [
        ("no record", "NotFoundError: .* has no record"),
        ("another model", "NotFoundError: .* has no record"),
        ("nobody listens", "StorageError"),
        ("no answer", "StorageError"),
        ("a setting", "ArgumentError: kv_connector_extra_config has no 'stor'"),
    ],
)
def test_start_up_errors_end_the_server(model, tmp_path, wrong, say):
    """vLLM's API server waits for its engine, which must end, too."""
    store, extra = tmp_path / "empty", {}
    store.mkdir()
    address = f"file://{store}"
    if wrong == "another model":
        save_model(tmp_path / "other", seed=4)
        with closing(FolderStore(store)) as other:
            encoded(open_engine(tmp_path / "other", dtype=torch.float32), other)
    elif wrong == "a setting":
        extra = {"stor": address}
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1] if wrong == "no answer" else 9
        if wrong in ("no answer", "nobody listens"):
            address = f"http://127.0.0.1:{port}"
        transfer = {
            "kv_connector": "KvwireConnector", "kv_connector_module_path": "kvwire.vllm", "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"store": address} | extra,
        }  # fmt: skip
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32",
            "--enforce-eager", "--block-size", "32", "--skip-tokenizer-init", "--kv-transfer-config",
            json.dumps(transfer),
        ]  # fmt: skip
        seen, began = {}, time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
            try:
                for line in server.stdout:
                    for name, words in {"asked": "Creating v1 connector", "told": say}.items():
                        if name not in seen and re.search(words, line):
                            seen[name] = time.monotonic() - began
                assert server.wait(60) != 0
            finally:
                server.kill()
        seen["ended"] = time.monotonic() - began
    if path := os.environ.get("KVWIRE_STARTS"):  # a file for the figures
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"wrong": wrong} | seen) + "\n")
    pace = max(1.0, seen["asked"] / 60)  # vLLM's own start takes less than a minute, but where others compute, too
    assert seen["told"] - seen["asked"] < 20 * pace
    assert seen["ended"] - seen["told"] < 30 * pace
