"""One vLLM through everything that fails: each request is answered as its own reference is, and nothing leaks."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.requests import PARAMS
from kvwire.errors import NotFoundError
from kvwire.store import FolderStore, verify_store
from kvwire.transport.testing import serving
from kvwire.vllm import Choice, request_body

from ..engines.test_chat import CHATML, tokenizer_of
from ..fault_proxy import FaultKind, FaultProxy, ProxyFault
from ..small_disk import on_small_disk
from .faulty_run import ROUNDS, SETTLED, processes
from .inside import LENGTHS, QUESTION, api_server, encoded, save_model

pytestmark = pytest.mark.filterwarnings("default")


def test_a_thousand_requests_are_each_their_own_through_every_fault_and_leak_nothing(tmp_path):
    """The store flickers, dies and freezes, blobs are damaged or gone, the cache's disk is full until the last round.

    Threads and connections are begun when requests first need them side by side, which may be late; a leak would be of
    hundreds.
    """
    model, disk = save_model(tmp_path / "model"), tmp_path / "cache"
    disk.mkdir()
    program = "from tests.vllm.faulty_run import run\nif __name__ == '__main__':\n    run(disk, fill, *sys.argv[2:])\n"
    file = Path(os.environ.get("KVWIRE_FAULTS") or tmp_path / "figures.json")
    told = on_small_disk(program, disk, model, tmp_path / "store", file)
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert sum(each["requests"] for each in figures["rounds"]) == 1000
    loaded = {plan: [each["loaded_tokens"] for each in figures["rounds"] if each["link"] == plan] for plan in ROUNDS}
    assert max(loaded["dead"]) < 1000 < min(loaded["sound"])
    assert max(loaded["flaky"]) > 1000
    assert figures["kvwire_lost_tokens"] > 1000
    assert figures["kvwire_cache_write_errors"] > 0
    assert "the disk tier takes nothing in" in told
    assert len(figures["states"][-1]) >= 2  # a scheduler and a worker
    for early, late in zip(figures["states"][SETTLED], figures["states"][-1], strict=True):
        assert late[0] <= early[0] * 1.05 + 20
        assert late[1] <= early[1] + 16
        assert late[2] <= early[2] + 16
    assert figures["blocks_held"] == 0


def asked(server, body):
    """Tokens of an answer and what is told of documents; raises where the server gives none."""
    told = {"model": "tiny", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body | told).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        found = json.load(answer)
    return found["choices"][0]["token_ids"], (found.get("kv_transfer_params") or {}).get(PARAMS, {})


def ended(pid):
    """Whether a process is gone, or is a body that its parent has not looked at."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(
    ("killed", "options"),
    [("EngineCore", ()), ("Worker", ("--tensor-parallel-size", "2"))],
    ids=["the engine's core", "one of two workers"],
)
def test_a_process_that_is_killed_while_it_loads_ends_the_server_and_leaves_the_store_sound(
    killed, options, tmp_path, monkeypatch
):
    """Its clients get an error and do not wait; a server that is started again says what the first one did."""
    if options:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # on a machine of one node, vLLM wants to be told
    model = save_model(tmp_path / "model")
    tokenizer_of(CHATML, bos=False).save_pretrained(model)
    with ExitStack() as stack:
        store = stack.enter_context(closing(FolderStore(tmp_path / "store")))
        corpus = encoded(open_engine(model, dtype=torch.float32), store)
        link = stack.enter_context(FaultProxy(stack.enter_context(serving(store))))
        bodies = [request_body(corpus, Choice(names, level=2), QUESTION) for names in (("a", "b"), ("c", "a"))]
        said = []
        for turn in ("killed", "started again"):
            with api_server(model, *options, store=link.url, save="asked") as server:
                answers = [asked(server, body) for body in bodies]
                said.append([(tokens, told["loaded_tokens"]) for tokens, told in answers])
                if turn == "started again":
                    break
                before, pids = sorted(store.keys("")), processes()
                link.plan = lambda sent: ProxyFault(FaultKind.SILENT) if sent.start else None  # a load's, no header's
                other = request_body(corpus, Choice(("d", "c"), level=2), QUESTION)
                with ThreadPoolExecutor(1) as pool:
                    waiting = pool.submit(asked, server, other)
                    until = time.monotonic() + 60
                    while not link.faults:
                        assert time.monotonic() < until
                        time.sleep(0.05)
                    (pid, *_) = [pid for pid in pids if killed.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
                    os.kill(pid, signal.SIGKILL)
                    began = time.monotonic()
                    with pytest.raises(OSError):  # noqa: PT011 - an answer of 500, or a connection that ends
                        waiting.result()
                    server.process.wait(60)
                    assert "EngineDeadError" in server.words()  # the exit status is vLLM's own, which is 0
                while not all(map(ended, pids)):
                    assert time.monotonic() < began + 120
                    time.sleep(0.2)
                link.plan = None
                assert sorted(store.keys("")) == before
                assert not verify_store(store, [corpus.catalog]).damaged
        assert said[1] == said[0]
        assert [count for _, count in said[0]] == [sum(LENGTHS[n] for n in each) for each in ("ab", "ca")]


def test_a_server_that_is_killed_while_it_saves_leaves_no_document_that_is_not_whole(tmp_path):
    """Blob and text are written and the entry, which comes last, is not; a later server saves the same again."""
    model = save_model(tmp_path / "model")
    tokenizer_of(CHATML, bos=False).save_pretrained(model)
    ids = random.Random(7).choices(range(20, 500), k=200)
    body = {"prompt": ids, "kv_transfer_params": {PARAMS: {"save": "new"}}}
    with ExitStack() as stack:
        store = stack.enter_context(closing(FolderStore(tmp_path / "store")))
        corpus = encoded(open_engine(model, dtype=torch.float32), store)
        link = stack.enter_context(FaultProxy(stack.enter_context(serving(store))))

        def holds_the_entry(sent):
            is_entry = sent.method == "PUT" and "/catalog/" in sent.path
            return ProxyFault(FaultKind.SILENT) if is_entry else None

        link.plan, before = holds_the_entry, set(store.keys(""))
        with api_server(model, store=link.url, save="named") as server:
            expected, _ = asked(server, body)
            until = time.monotonic() + 60
            while not link.faults:
                assert time.monotonic() < until
                time.sleep(0.05)
            pids = processes()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            server.process.wait(60)
        assert set(store.keys("")) > before
        with pytest.raises(NotFoundError):
            corpus.find("new")
        assert not verify_store(store, [corpus.catalog]).damaged
        link.plan = None
        with api_server(model, store=link.url, save="named") as server:
            assert asked(server, body)[0] == expected
            until = time.monotonic() + 60
            while not corpus.catalog.by_document(corpus.meta.config_digest(), "new"):
                assert time.monotonic() < until
                time.sleep(0.1)
        assert list(corpus.text(corpus.find("new"))) == ids
        assert not verify_store(store, [corpus.catalog]).damaged
