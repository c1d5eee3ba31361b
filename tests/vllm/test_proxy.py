"""The proxy before vLLM: placeholders, what the connector is told, streams, limits and failures, before a fake vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from contextlib import asynccontextmanager, closing
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web

from kvwire.engines.transformers.opening import open_tokenizer
from kvwire.engines.vllm.proxy import bodies
from kvwire.engines.vllm.proxy.outcome_socket import OutcomeSender
from kvwire.engines.vllm.proxy.placeholders import RequestError
from kvwire.engines.vllm.proxy.streaming import EventStream
from kvwire.errors import ArgumentError, AuthError, StorageError
from kvwire.reuse import link
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store.catalog.profiles import Profiles
from kvwire.types import Chat, Turn
from kvwire.vllm import BodyMaker, Choice, ProxySettings, VllmProxy, Wanted, chat_body, request_salt

from ..engines.test_chat import CHATML, HEADERS, TEXTS
from .conftest import chat_store
from .halves import Halves, check

ONE, TWO = TEXTS[0] * 9, TEXTS[1].strip() * 5 + "\n"
CUT = TEXTS[0] + "The keeper lit the la"
SPELT = "A turn ends with <|im_end|> in this format.\n"


@pytest.fixture(scope="module", params=[(CHATML, False), (HEADERS, True)], ids=["chatml", "headers and a BOS"])
def place(request, tmp_path_factory):
    template, bos = request.param
    with chat_store(
        tmp_path_factory.mktemp("proxy"), template, {"one": ONE, "two": TWO, "spelt": SPELT * 4, "cut": CUT}, bos=bos
    ) as made:
        yield made


@pytest.fixture(scope="module")
def pieces(place):
    return open_tokenizer(place[1])


@pytest.fixture
def maker(place, pieces):
    def make(**wanted):
        return BodyMaker(Corpus.open(place[0].corpus.catalog.store), pieces, Wanted(**({"level": 2} | wanted)))

    return make


def turns(content, *before):
    return {"messages": [*before, {"role": "user", "content": content}], "stream": True}


def asked(prepared):
    return prepared.body["kv_transfer_params"]["kvwire"]


# What becomes of bodies.


def test_a_chat_says_what_chat_body_says(place, pieces, maker):
    told, model = place
    chat = Chat("Be of help.", (Turn("user", "Hello"), Turn("assistant", "Yes?")), before="Read this:\n")
    told.corpus.put_chat_head(chat)
    before = [
        {"role": "system", "content": "Be of help."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Yes?"},
    ]
    body = turns("Read this:\n{{kvwire:one}} \n {{kvwire:two}}Why?", *before)
    made = maker().prepare(body, is_chat=True)
    own = chat_body(told.corpus, Choice(("one", "two"), level=2), chat, "Why?", tokenizer=model)
    assert (made.kind, made.documents) == ("documents", ("one", "two"))
    assert made.body["cache_salt"] == own["cache_salt"]
    assert made.body["kv_transfer_params"] == own["kv_transfer_params"]
    assert made.body["messages"][-1]["content"] == f"Read this:\n{ONE}{TWO}Why?"
    assert made.body["stream"] is True
    rendered = pieces.tokenizer.apply_chat_template(
        made.body["messages"], add_generation_prompt=True, return_dict=False
    )  # as vLLM does
    assert rendered == own["prompt"]
    with closing(Halves(told)) as halves:
        bad, blocks, said, promised = halves.load(made.body | {"prompt": rendered})
        (head,) = told.engine.prefill([rendered[: asked(made)["head"]]])
        cache = link([head, *(told.corpus.decode(name, 2, dtype=torch.float32) for name in ("one", "two"))])
        assert (bad, promised, said["level"]) == (set(), cache.tokens, 2)
        check(halves, blocks, cache, 0, cache.tokens)


def test_the_texts_that_are_remembered_are_bounded_by_their_tokens(place, maker, monkeypatch):
    told, read, text = place[0], [], Corpus.text
    monkeypatch.setattr(bodies, "_MOST_TOKENS", len(told.tokens["one"]) + len(told.tokens["two"]))
    monkeypatch.setattr(Corpus, "text", lambda corpus, entry: read.append(entry.document_id) or text(corpus, entry))
    made = maker()
    for name in ("one", "two", "one", "cut", "two"):
        made.prepare(turns(f"{{{{kvwire:{name}}}}}Why?"), is_chat=True)
    assert read == ["one", "two", "cut", "two"]


def test_a_document_that_runs_into_what_follows_is_loaded_up_to_the_seam(place, pieces, maker):
    told, _ = place
    made = maker().prepare(turns("{{kvwire:one}}{{kvwire:cut}}mp at six?"), is_chat=True)
    rendered = pieces.tokenizer.apply_chat_template(
        made.body["messages"], add_generation_prompt=True, return_dict=False
    )
    head, documents = asked(made)["head"], [*told.tokens["one"], *told.tokens["cut"]]
    told.corpus.encoder().put_exact(Document("head", tuple(rendered[:head])))
    agree = next(n for n, token in enumerate(documents) if rendered[head + n] != token)
    assert len(told.tokens["one"]) < agree < len(documents)  # " la" is no token of " lamp"
    with closing(Halves(told)) as halves:
        bad, blocks, said, promised = halves.load(made.body | {"prompt": rendered})
        rows = [told.corpus.decode(name, 2, dtype=torch.float32) for name in ("one", "cut")]
        assert (bad, promised, said["loaded_tokens"]) == (set(), head + agree, head + agree)
        assert f"from token {head + agree} on the prompt is not the text of document 'cut'" in said["trouble"]
        check(halves, blocks, link([*told.engine.prefill([rendered[:head]]), *rows]), 0, head + agree)


def test_documents_beside_the_messages_begin_the_named_one(maker):
    params = {"kv_transfer_params": {"kvwire": {"documents": ["one", "two"]}, "other": 1}}
    system = {"role": "system", "content": " Answer."}
    beside = maker().prepare(turns("Why?", system) | params, is_chat=True)
    inside = maker().prepare(turns("{{kvwire:one}}{{kvwire:two}}Why?", system), is_chat=True)
    assert beside.body["kv_transfer_params"] == inside.body["kv_transfer_params"] | {"other": 1}
    assert beside.body["messages"] == inside.body["messages"]
    params["kv_transfer_params"]["kvwire"]["place"] = 0
    first = maker().prepare(turns("Why?", system) | params, is_chat=True)
    assert first.body["messages"][0]["content"] == f"{ONE}{TWO} Answer."
    with pytest.raises(RequestError, match="place is the number"):
        maker().prepare(
            turns("Why?") | {"kv_transfer_params": {"kvwire": {"documents": ["one"], "place": 4}}}, is_chat=True
        )


def test_what_does_not_follow_the_first_documents_becomes_text(maker):
    made = maker().prepare(turns("{{kvwire:one}} and {{kvwire:two}}?"), is_chat=True)
    assert (made.documents, made.body["messages"][0]["content"]) == (("one",), f"{ONE} and {TWO}?")
    first = maker(load="first").prepare(turns("{{kvwire:one}}{{kvwire:two}}?"), is_chat=True)
    assert (first.documents, first.body["messages"][0]["content"]) == (("one",), f"{ONE}{TWO}?")
    kept = maker(load="kept").prepare(turns("{{kvwire:one}}{{kvwire:two}}?"), is_chat=True)
    assert asked(kept)["repair"] == "kept"


def test_a_prompt_gets_the_documents_own_tokens(place, pieces, maker):
    told, _ = place
    made = maker().prepare({"prompt": "Read: {{kvwire:spelt}}{{kvwire:one}}Why?"}, is_chat=False)
    head = [*pieces.opening, *pieces("Read: ", "first", "frame")]
    tail = pieces("Why?", "last", "frame")
    assert made.body["prompt"] == [*head, *told.tokens["spelt"], *told.tokens["one"], *tail]
    assert asked(made) == {"documents": ["spelt", "one"], "level": 2, "head": len(head)}
    bare = maker().prepare({"prompt": "{{kvwire:one}}Why?", "add_special_tokens": False}, is_chat=False)
    assert bare.body["prompt"] == [*told.tokens["one"], *tail]
    with pytest.raises(RequestError, match="spells control tokens"):
        maker().prepare(turns("{{kvwire:spelt}}Why?"), is_chat=True)


@pytest.mark.parametrize(
    ("body", "words", "status"),
    [
        (turns("{{kvwire:one}}{{kvwire:none}}"), "'none' is not in the catalog", 404),
        (turns("{{kvwire:one}}") | {"kv_transfer_params": {"kvwire": {"level": 77}}}, "has no level 77, but 0", 400),
        (turns("{{kvwire:one}}") | {"kv_transfer_params": {"kvwire": {"levl": 1}}}, "'levl' is none of these", 400),
        (turns("{{kvwire:one}}") | {"kv_transfer_params": {"kvwire": []}}, "is an object", 400),
        (turns("{{kvwire:one}}") | {"kv_transfer_params": {"kvwire": {"load": "all"}}}, "load is linked", 400),
        (turns("{{kvwire:one}}") | {"chat_template": "x"}, "leave chat_template out", 400),
        (turns("{{kvwire:one}}") | {"chat_template_kwargs": {"chat_template": "x"}}, "leave chat_template out", 400),
        (turns("{{kvwire:one}}") | {"chat_template_kwargs": "x"}, "chat_template_kwargs is an object", 400),
        (turns("{{kvwire:one}}") | {"kv_transfer_params": "x"}, "kv_transfer_params is an object", 400),
        (turns([{"type": "text", "text": "{{kvwire:one}}"}, {"type": "image_url"}]), "more than text", 400),
        (turns("{{kvwire:one}}", {"role": "wizard", "content": "x"}), "has no role", 400),
        ({"prompt": ["{{kvwire:one}}"]}, "is one text", 400),
        ({"prompt": [1, 2], "kv_transfer_params": {"kvwire": {"documents": ["one"]}}}, "is one text", 400),
        (turns("?") | {"kv_transfer_params": {"kvwire": {"documents": "one"}}}, "list of ids", 400),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_request_is_said(maker, body, words, status):
    with pytest.raises(RequestError, match=words) as told:
        maker().prepare(body, is_chat="messages" in body)
    assert told.value.status == status


def test_other_requests_stay_as_they_are(place, maker):
    plain, made = (
        turns("Why?"),
        {"prompt": [1], "cache_salt": "kvwire-documents-x", "kv_transfer_params": {"kvwire": {"documents": ["a"]}}},
    )
    for body in (plain, {"prompt": [1, 2]}, {"prompt": "x"}, {"messages": "nonsense"}):
        assert maker().prepare(body, is_chat="messages" in body).kind == "plain"
    ready = maker().prepare(made, is_chat=False)
    assert ready.body is made
    assert ready.kind == "documents"  # what becomes of it is told, in streams too
    prefix = maker(prefix=True, save=True).prepare(plain, is_chat=True)
    assert (prefix.kind, asked(prefix)) == ("prefix", {"prefix": True, "save": True, "level": 2})
    choice = Choice(prefix=True, level=2)
    assert prefix.body["cache_salt"] == request_salt(place[0].corpus, choice)
    assert prefix.body["messages"] == plain["messages"]
    own = maker(prefix=True, save=True).prepare(plain | {"cache_salt": "mine"}, is_chat=True)
    assert (own.kind, own.body["cache_salt"]) == ("prefix", f"{prefix.body['cache_salt']}+mine")


def test_a_clients_own_salt_stays_behind_the_documents(maker):
    for content, asks, is_chat in (("{{kvwire:one}}Why?", {}, True), ("Why?", {"prefix": True}, True)):
        body = turns(content) | {"kv_transfer_params": {"kvwire": asks}}
        salt = maker().prepare(body, is_chat=is_chat).body["cache_salt"]
        own = maker().prepare(body | {"cache_salt": "mine"}, is_chat=is_chat).body["cache_salt"]
        assert own == f"{salt}+mine"
        with pytest.raises(RequestError, match="cache_salt is a text"):
            maker().prepare(body | {"cache_salt": 3}, is_chat=is_chat)


def test_tools_and_calls_are_rendered_as_vllm_does(pieces, maker, monkeypatch):
    seen = []
    real = pieces.tokenizer.apply_chat_template
    monkeypatch.setattr(
        pieces.tokenizer,
        "apply_chat_template",
        lambda *told, **options: seen.append((told, options)) or real(*told, **options),
    )
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    before = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "{{kvwire:one}}"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    body = turns("Why?", *before) | {"tools": tools, "chat_template_kwargs": {"deep": True}, "reasoning_effort": "low"}
    made = maker().prepare(body, is_chat=True)
    (messages,), options = seen[0][0], seen[0][1]
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"x": 1}
    assert options["tools"][0]["function"] == {"name": "f", "description": None, "parameters": {"type": "object"}}
    assert (options["deep"], options["reasoning_effort"], options["enable_thinking"]) == (True, "low", True)
    assert made.body["messages"][1] == before[1]
    assert made.body["messages"][2]["content"] == ONE
    assert made.body["tools"] == tools


def test_defaults_that_no_request_can_have_are_refused():
    for wrong in ({"load": "kept"}, {"save": True}, {"level": -1}, {"objective": "soon"}):
        with pytest.raises(ArgumentError):
            Wanted(**wrong)
    for upstream in ("127.0.0.1:8000", "ftp://x"):
        with pytest.raises(ArgumentError, match="is vLLM's address"):
            ProxySettings(upstream)


# What goes through.


class Upstream:
    """A vLLM that answers as it is told, and notes what it was asked."""

    def __init__(self):
        self.seen, self.gate, self.gone = [], asyncio.Event(), asyncio.Event()
        self.pieces = [
            b'data: {"id":"c1","object":"chat.completion.chunk","created":1,"model":"m",',
            b'"choices":[{"delta":{"x":1}}]}\n\n',
            b'data: {"choices":[{"delta":{"cont',
            b'ent":"b"}}]}\n\ndata: [DONE]\n\n',
        ]
        self.cut = False
        self.told = {"loaded_tokens": 7, "lost_tokens": 0, "level": 2}

    async def answer(self, request):
        try:
            return await self.answered(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise

    async def answered(self, request):
        body = await request.read()
        self.seen.append((request.method, request.path_qs, request.headers.copy(), body))
        if request.path == "/slow":
            await self.gate.wait()
        if not request.path.startswith("/v1/") or request.path == "/v1/models":
            return web.Response(text="pong", status=202, headers={"X-Own": "1"})
        told = json.loads(body)
        if not told.get("stream"):
            answer = {"choices": [], "kv_transfer_params": {"kvwire": self.told}}
            return web.json_response(answer, headers={"X-Own": "1"})
        named = {"X-Request-Id": request.headers["X-Request-Id"]}  # as vLLM does, where it is started so
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"} | named)
        await response.prepare(request)
        for piece in self.pieces:
            await response.write(piece)
            await asyncio.sleep(0.01)
        if told.get("wait"):
            await self.gate.wait()
        if self.cut:
            request.transport.abort()
        return response

    @asynccontextmanager
    async def listen(self):
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@pytest.fixture
def proxied(maker):
    """A proxy before a fake vLLM, and a client of it."""

    @asynccontextmanager
    async def start(wanted=None, **settings):
        upstream = Upstream()
        async with upstream.listen() as address, aiohttp.ClientSession() as client:
            proxy = VllmProxy(maker(**(wanted or {})), ProxySettings(**({"upstream": address} | settings)))
            async with proxy.listen() as url:
                yield upstream, client, url

    return start


DOCUMENTS = turns("{{kvwire:one}}Why?")


def run(work):
    asyncio.run(asyncio.wait_for(work(), 60))


def test_a_stream_comes_as_it_was_with_the_truth_before_its_end(proxied):
    path = Path(tempfile.gettempdir()) / f"kvwire-{os.getpid()}.sock"  # a short path

    async def work():
        async with proxied(outcomes=path) as (upstream, client, url):
            sender = OutcomeSender(str(path))
            name = "my-request-0123456789"
            asking = asyncio.create_task(
                client.post(
                    f"{url}/v1/chat/completions?x=1", json=DOCUMENTS, headers={"X-Request-Id": name, "X-Mine": "2"}
                )
            )
            response = await asking
            _, target, headers, body = upstream.seen[0]
            sender.send(f"chatcmpl-{headers['X-Request-Id']}-1f", {"loaded_tokens": 5, "lost_tokens": 0})
            data = await response.read()
            whole = b"".join(upstream.pieces)
            events = data.split(b"\n\n")
            truth = json.loads(events.pop(-3).removeprefix(b"data: "))
            assert b"\n\n".join(events) == whole
            assert truth == {
                "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [],
                "kv_transfer_params": {"kvwire": {"loaded_tokens": 5, "lost_tokens": 0}},
            }  # fmt: skip
            assert (target, headers["X-Mine"]) == ("/v1/chat/completions?x=1", "2")
            assert headers["X-Request-Id"].startswith(f"{name}-")
            assert headers["Accept-Encoding"] == "identity"
            assert json.loads(body)["messages"][0]["content"] == f"{ONE}Why?"
            async with client.post(f"{url}/v1/chat/completions", json=turns("Why?")) as response:
                assert await response.read() == whole
            async with client.get(f"{url}/kvwire/metrics") as response:
                text = await response.text()
            for line in (
                'kvwire_proxy_requests_total{kind="documents",status="2xx"} 1.0',
                'kvwire_proxy_requests_total{kind="plain",status="2xx"} 1.0',
                'kvwire_proxy_tokens_total{outcome="loaded"} 5.0',
                'kvwire_proxy_outcomes_total{outcome="served"} 1.0',
                "kvwire_proxy_prepare_seconds_count 1.0",
            ):
                assert line in text
            sender.close()

    run(work)
    assert not path.exists()


def test_requests_of_one_id_get_each_its_own_truth(proxied):
    path = Path(tempfile.gettempdir()) / f"kvwire-{os.getpid()}.sock"

    async def work():
        async with proxied(outcomes=path) as (upstream, client, url):
            body, sent = DOCUMENTS | {"wait": True}, {"X-Request-Id": "1"}  # the stand-in ends when it is let
            asking = [client.post(f"{url}/v1/chat/completions", json=body, headers=sent) for _ in range(2)]
            responses = await asyncio.gather(*asking)
            names = [headers["X-Request-Id"] for _, _, headers, _ in upstream.seen]
            assert len(set(names)) == 2
            with closing(OutcomeSender(str(path))) as sender:
                for number, name in reversed([*enumerate(names)]):
                    sender.send(f"chatcmpl-{name}-1f", {"loaded_tokens": number, "lost_tokens": 0})
                upstream.gate.set()
                told = [await response.read() for response in responses]
            assert {response.headers["X-Request-Id"] for response in responses} == {"1"}
            assert sorted(data.count(b'"loaded_tokens": 0') for data in told) == [0, 1]
            assert sorted(data.count(b'"loaded_tokens": 1') for data in told) == [0, 1]

    run(work)


def test_an_answer_that_is_no_stream_comes_as_it_was(proxied):
    async def work():
        async with proxied() as (upstream, client, url):
            upstream.told = {"refused": "no"}
            body = DOCUMENTS | {"stream": False}
            async with client.post(f"{url}/v1/chat/completions", json=body) as response:
                assert (await response.json())["kv_transfer_params"]["kvwire"] == {"refused": "no"}
                assert response.headers["X-Own"] == "1"
            async with client.get(f"{url}/kvwire/metrics") as response:
                assert 'kvwire_proxy_outcomes_total{outcome="refused"} 1.0' in await response.text()

    run(work)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/metrics"), ("PUT", "/x")]
)
def test_everything_else_goes_through(proxied, method, path):
    async def work():
        async with proxied(upstream_token="theirs") as (upstream, client, url):  # noqa: S106
            async with client.request(method, url + path, data=b"d" if method == "PUT" else None) as response:
                assert (response.status, response.headers["X-Own"], await response.text()) == (202, "1", "pong")
            sent = upstream.seen[0]
            assert (sent[0], sent[1], sent[2]["Authorization"]) == (method, path, "Bearer theirs")
            assert sent[3] == (b"d" if method == "PUT" else b"")
            async with client.post(f"{url}/v1/chat/completions", data=b"{no json") as response:
                assert response.status == 500  # the fake's own answer to it
            assert upstream.seen[1][3] == b"{no json"

    run(work)


async def refused(client, url, **options):
    async with client.post(f"{url}/v1/chat/completions", **({"json": DOCUMENTS} | options)) as response:
        answer = await response.json()
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return response.status, answer["error"]


def test_failures_have_openais_shape(proxied):
    async def work():
        async with proxied(max_body_bytes=2000, token="a-token-of-clients") as (upstream, client, url):  # noqa: S106
            own = {"Authorization": "Bearer a-token-of-clients"}
            assert (await refused(client, url))[1]["type"] == "authentication_error"
            status, error = await refused(client, url, json=turns("{{kvwire:none}}"), headers=own)
            assert (status, error["code"], error["param"]) == (404, "document_not_found", "none")
            status, error = await refused(client, url, json=turns("x" * 3000), headers=own)
            assert (status, error["code"]) == (413, "request_too_large")
            assert not upstream.seen
        with closing(socket.create_server(("127.0.0.1", 0))) as found:
            dead = f"http://127.0.0.1:{found.getsockname()[1]}"
        async with proxied(upstream=dead) as (_, client, url):
            status, error = await refused(client, url)
            assert (status, error["code"], error["type"]) == (502, "upstream_unreachable", "server_error")
            async with client.get(f"{url}/v1/models", headers={"Host": "evil.example"}) as response:
                assert response.status == 403
        async with proxied(answer_s=0.2) as (_, client, url), client.get(f"{url}/slow") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (504, "upstream_timeout")

    run(work)


def test_a_stream_that_breaks_ends_with_an_error(proxied):
    async def work():
        async with proxied() as (upstream, client, url):
            upstream.pieces, upstream.cut = upstream.pieces[:2], True
            async with client.post(f"{url}/v1/chat/completions", json=DOCUMENTS) as response:
                events = (await response.text()).strip().split("\n\n")
            assert events[0].encode() + b"\n\n" == b"".join(upstream.pieces)
            assert json.loads(events[1].removeprefix("data: "))["error"]["code"] == "upstream_unreachable"
            assert len(events) == 2

    run(work)


def test_a_client_that_leaves_ends_the_request(proxied):
    async def work():
        async with proxied() as (upstream, client, url):
            async with client.post(f"{url}/v1/chat/completions", json=DOCUMENTS | {"wait": 1}) as response:
                await response.content.readany()
                response.close()
            await asyncio.wait_for(upstream.gone.wait(), 20)

    run(work)


def test_a_store_that_hangs_costs_the_request_alone(proxied, monkeypatch):
    stuck = threading.Event()

    def hang(*_):
        stuck.wait(30)
        raise OSError

    async def work():
        async with proxied(prepare_s=0.2) as (_, client, url):
            monkeypatch.setattr(Corpus, "find", hang)
            status, error = await refused(client, url)
            assert (status, error["code"]) == (503, "store_unavailable")
            async with client.post(f"{url}/v1/chat/completions", json=turns("Why?")) as response:
                assert response.status == 200
            stuck.set()

    run(work)


def test_a_store_that_is_away_costs_requests_their_prefixes_and_no_answers(maker, monkeypatch, caplog):
    """The proxy asks for prefixes by itself; vLLM computes the prompt, and its connector says why."""

    def fails(*_):
        raise StorageError("the connection failed")

    made, plain = maker(prefix=True, save=True), turns("Why?")
    monkeypatch.setattr(Profiles, "current", fails)
    prepared = made.prepare(plain, is_chat=True)
    assert (prepared.kind, asked(prepared)) == ("prefix", {"prefix": True, "save": True, "level": 2})
    assert "cache_salt" not in prepared.body
    assert made.prepare(plain | {"cache_salt": "mine"}, is_chat=True).body["cache_salt"] == "mine"
    assert "without its prefix: the connection failed" in caplog.text


def test_why_a_store_fails_stands_in_the_log(proxied, monkeypatch, caplog):
    def fails(*_):
        raise StorageError("no bucket of that name")

    async def work():
        async with proxied() as (_, client, url):
            monkeypatch.setattr(Corpus, "find", fails)
            status, error = await refused(client, url)
            assert (status, error["code"]) == (503, "store_unavailable")
            assert "bucket" not in error["message"]

    run(work)
    assert "the store of documents failed: try again later (no bucket of that name)" in caplog.text


def test_more_requests_than_allowed_are_told_to_come_back(proxied):
    async def work():
        async with proxied(max_requests=1) as (upstream, client, url):
            first = asyncio.create_task(client.get(f"{url}/slow"))
            while not upstream.seen:
                await asyncio.sleep(0.01)
            status, error = await refused(client, url)
            assert (status, error["code"]) == (503, "overloaded")
            upstream.gate.set()
            assert (await first).status == 202

    run(work)


def test_running_answers_end_before_the_proxy_does(maker):
    async def work():
        upstream = Upstream()
        async with upstream.listen() as address, aiohttp.ClientSession() as client:
            proxy = VllmProxy(maker(), ProxySettings(address))
            async with proxy.listen() as url:
                response = await client.post(f"{url}/v1/chat/completions", json=DOCUMENTS | {"wait": 1})
                asyncio.get_running_loop().call_later(0.3, upstream.gate.set)
            assert (await response.read()).endswith(b"[DONE]\n\n")
            with pytest.raises(aiohttp.ClientConnectionError):
                await client.get(f"{url}/kvwire/health")

    run(work)


def test_other_machines_need_a_token(maker):
    async def work():
        with pytest.raises(AuthError, match="give a token"):
            async with VllmProxy(maker(), ProxySettings("http://127.0.0.1:1")).listen("0.0.0.0"):
                pass

    run(work)


def test_streams_are_cut_anywhere():
    whole = b"".join(Upstream().pieces) + b": a comment\n\n"
    for seed in range(50):
        draw, stream, out, at = random.Random(seed), EventStream(), b"", 0
        while at < len(whole):
            size = draw.randrange(1, 40)
            before, end = stream.feed(whole[at : at + size])
            at += size
            out += before + (b"<truth>" if end else b"") + end
        assert out + stream.rest() == whole.replace(b"data: [DONE]", b"<truth>data: [DONE]")


def test_the_command_serves_until_it_is_stopped(place):
    told, model = place
    command = [
        sys.executable, "-m", "kvwire", "vllm-proxy", "--upstream", "http://127.0.0.1:9", "--model", str(model),
        "--store", f"file://{told.root}", "--level", "2", "--port", "0", "--json",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]

            async def work():
                async with aiohttp.ClientSession() as client, client.get(f"{url}/kvwire/health") as response:
                    assert (response.status, await response.text()) == (200, "ok\n")

            run(work)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
