"""The proxy before a real vLLM: OpenAI's requests with placeholders, streams that tell the truth, conversations."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

import aiohttp

from kvwire.engines.transformers import open_engine
from kvwire.engines.transformers.opening import open_tokenizer
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.store import FolderStore
from kvwire.vllm import BodyMaker, ProxySettings, VllmProxy, Wanted

from ..engines.test_chat import CHATML, TEXTS, tokenizer_of
from .inside import api_server, save_model

pytestmark = pytest.mark.filterwarnings("default")
ONE, TWO = TEXTS[0] * 9, TEXTS[1].strip() * 5 + "\n"
SYSTEM = {"role": "system", "content": "Answer shortly, and only from what you were given to read."}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("proxied")
    save_model(root / "model")
    tokenizer_of(CHATML, bos=False).save_pretrained(root / "model")
    engine = open_engine(root / "model", dtype=torch.float32)
    outcomes = Path(tempfile.gettempdir()) / f"kvwire-in-vllm-{os.getpid()}.sock"
    with closing(FolderStore(root / "store")) as store:
        corpus = Corpus(engine, store, coding=Coding(chunk_tokens=32, neutral_prefix=0))
        list(corpus.encode([Document(n, tuple(engine.tokenize(t))) for n, t in {"one": ONE, "two": TWO}.items()]))
        extra = {"store": f"file://{root}/store", "save": "asked", "index": "kvwire:32", "outcomes": str(outcomes)}
        with api_server(root / "model", **extra) as upstream:
            yield corpus, root / "model", upstream.url, outcomes


def asking(place, work, **wanted):
    """Run a coroutine with a client of a proxy before vLLM."""
    corpus, model, upstream, outcomes = place

    async def run():
        maker = BodyMaker(Corpus.open(corpus.catalog.store), open_tokenizer(model), Wanted(**({"level": 2} | wanted)))
        settings = ProxySettings(upstream, outcomes=outcomes, told_s=10.0)
        async with VllmProxy(maker, settings).listen() as url, aiohttp.ClientSession(url) as client:
            return await work(client)

    return asyncio.run(asyncio.wait_for(run(), 300))


def chat(*turns, **more):
    return {"model": "tiny", "messages": list(turns), "max_tokens": 6, "temperature": 0, "ignore_eos": True} | more


def user(text):
    return {"role": "user", "content": text}


async def told(client, body, path="/v1/chat/completions"):
    """Text and truth of an answer that is no stream."""
    async with client.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        choice = answer["choices"][0]
        return (choice["message"]["content"] if "message" in choice else choice["text"]), (
            answer.get("kv_transfer_params") or {}
        ).get("kvwire", {})


async def streamed(client, body):
    """The same of a stream, put together as OpenAI's client does it."""
    async with client.post("/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status == 200
        events = (await response.text()).strip().split("\n\n")
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    truth = [c["kv_transfer_params"]["kvwire"] for c in chunks if c.get("kv_transfer_params")]
    return text, truth[0] if truth else None


def test_documents_in_a_chat_are_loaded_and_what_stands_before_them_after_its_first_use(place):
    corpus = place[0]
    both = sum(len(corpus.text(corpus.find(name))) for name in ("one", "two"))
    body = chat(SYSTEM, user("{{kvwire:one}}{{kvwire:two}}When?"))

    async def work(client):
        first = await told(client, body)
        assert "lacks the rows of" in first[1]["trouble"]
        head = first[1]["saving_tokens"]
        until = time.monotonic() + 60
        while (answer := await told(client, body))[1].get("loaded_tokens", 0) < both:
            assert time.monotonic() < until
            await asyncio.sleep(0.5)
        assert (answer[1]["loaded_tokens"], answer[1]["lost_tokens"], answer[1]["level"]) == (head + both, 0, 2)
        other = chat(SYSTEM, user("{{kvwire:two}}{{kvwire:one}}When?"))
        text, truth = await streamed(client, other)
        assert (truth["loaded_tokens"], truth["level"]) == (head + both, 2)
        assert (await told(client, other))[0] == text
        plain = chat(SYSTEM, user(f"{ONE}{TWO}When?"))
        assert (await streamed(client, plain))[1] is None
        async with client.get("/v1/models") as response:
            assert (await response.json())["data"][0]["id"] == "tiny"
        async with client.get("/metrics") as response:
            assert "vllm:kvwire_loaded_tokens" in await response.text()
        async with client.get("/kvwire/metrics") as response:
            assert 'kvwire_proxy_outcomes_total{outcome="served"}' in await response.text()

    asking(place, work)


def test_a_prompt_and_a_mistake(place):
    corpus = place[0]

    async def work(client):
        body = {"model": "tiny", "prompt": "{{kvwire:two}}When?", "max_tokens": 4, "temperature": 0}
        _, truth = await told(client, body, "/v1/completions")
        assert truth["loaded_tokens"] == len(corpus.text(corpus.find("two")))
        async with client.post("/v1/completions", json=body | {"prompt": "{{kvwire:three}}"}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (404, "three")

    asking(place, work)


def test_a_conversation_loads_what_it_said(place):
    """Each turn is found in the store, once it is there: what is loaded covers the turns before."""

    async def work(client):
        turns, loaded = [SYSTEM, user("The keeper lit the lamp at six. " * 6)], []
        for number in range(3):
            text, truth = await streamed(client, chat(*turns))
            assert truth["saving_tokens"] > 0
            loaded.append(truth.get("loaded_tokens", 0))
            turns += [{"role": "assistant", "content": text}, user(f"And at {number}? It rained all day. " * 3)]
            await asyncio.sleep(3)
        return loaded

    before = asking(place, work, prefix=True, save=True)
    assert before[0] == 0
