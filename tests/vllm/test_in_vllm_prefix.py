"""Prefixes and saving inside vLLM: one vLLM keeps prompts in an S3 store, another loads them."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

import zmq
from msgspec import msgpack
from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from vllm.inputs import TokensPrompt

from kvwire import encode
from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.counting import COUNTED
from kvwire.engines.vllm.saving import SAVED
from kvwire.runtime.corpus import Document
from kvwire.store import S3Store
from kvwire.vllm import Choice, request_body

from ..s3_servers import ministack
from .faulty_run import apart_from, counted, drawn, processes, state_of
from .inside import CLOSE, LENGTHS, QUESTION, Place, distance, encoded, save_model, serving_llm

pytestmark = pytest.mark.filterwarnings("default")
LEVEL = 3
STEP_TOKENS, SEQUENCES = 128, 24
USED_MIB = 4
"""More than this in 800 requests is a leak, or caches that wait for Python's garbage collector; buffers are 1."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def places(model, tmp_path_factory):
    """Two vLLMs beside one bucket: the first keeps all prompts, the second has few blocks and short steps."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        server = stack.enter_context(ministack(tmp_path_factory.mktemp("s3")))
        server.set_environment(patch)
        store = stack.enter_context(closing(S3Store(server.address("vllm"))))
        engine = open_engine(model, dtype=torch.float32)
        corpus = encoded(engine, store, index=("kvwire:32",))
        url, extra = server.address("vllm"), {"index": "kvwire:32", "save": "all", "patience_s": 60}  # busy machines
        endpoint = f"ipc://{tmp_path_factory.mktemp('events')}/socket"
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)
        first = stack.enter_context(serving_llm(model, url, extra=extra, kv_events_config=events))
        short = {
            "max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": SEQUENCES, "num_gpu_blocks_override": 72,
        }  # fmt: skip
        asked = extra | {"save": "asked"}
        measured = {"disable_log_stats": False, "worker_extension_cls": "tests.vllm.used_memory.UsedMemory"}
        second = stack.enter_context(serving_llm(model, url, extra=asked, **measured, **short))
        yield [Place(llm, engine, corpus, None, 32, stack) for llm in (first, second)]


def prefix(place, prompt, level=LEVEL, **more):
    return request_body(place.corpus, Choice(level=level, prefix=True, **more), list(prompt))


def saved(place):
    """Names of prompts that were kept, with their entries."""
    documents = place.corpus.catalog.documents(place.corpus.meta.config_digest())
    return {each.document_id: each for each in documents if each.document_id.startswith(SAVED)}


def found(place, prompt, seconds=60.0):
    """What the index knows of a prompt, once it does."""
    until = time.monotonic() + seconds
    while (hit := place.corpus.index("kvwire:32").longest(prompt)) is None or hit.tokens < len(prompt):
        assert time.monotonic() < until
        time.sleep(0.1)
    return hit


def decoded(place, name, level=LEVEL, tokens=None):
    cache = place.corpus.decode(name, level, dtype=torch.float32)
    return cache if tokens is None else cache.slice(0, tokens)


def test_saved_by_one_loaded_by_another(places):
    one, other = places
    prompt = drawn(1, 500)
    ((first, *_),) = one.ask({"prompt": prompt, "kv_transfer_params": {"kvwire": {"save": True}}})
    assert distance(first, one.expected(prompt)) <= 1e-5
    hit = found(one, prompt)
    (own,) = one.engine.prefill([prompt])
    longer = [*prompt, *QUESTION]
    ((first, _, told, cached),) = other.ask(prefix(other, longer))
    assert cached == told["promised_tokens"] == 500
    cache = decoded(one, hit.document.document_id)
    assert distance(first, one.expected(longer, cache)) <= CLOSE
    exact = one.expected(longer)
    encoded_here = one.corpus.catalog.texts.get(one.corpus.meta.config_digest(), hit.document.token_digest)
    assert list(encoded_here) == prompt
    info = one.corpus.read_header(hit.document)
    raw = sum(side.numel() * 2 for side in (*own.keys, *own.values))
    assert info.levels[LEVEL].cumulative_bytes < 0.7 * raw
    for mine, theirs in zip((*cache.keys, *cache.values), (*own.keys, *own.values), strict=True):
        assert (mine - theirs).norm() < 0.1 * theirs.norm()
    ((again, _, told, _),) = other.ask(prefix(other, longer))
    # vLLM keeps whole blocks alone and computes the last 20 tokens itself, so that another token may win a near tie.
    assert distance(again, one.expected(longer, cache.slice(0, 480))) <= CLOSE
    assert "promised_tokens" not in told  # vLLM has the whole blocks itself
    for salt in (None, "another"):
        ((after, *_),) = other.ask({"prompt": longer, "cache_salt": salt})
        assert distance(after, exact) <= 1e-5


def test_what_was_kept_takes_the_bytes_of_what_is_encoded(places):
    one, _ = places
    prompt = drawn(2, 400)
    one.ask({"prompt": prompt})
    kept = found(one, prompt).document
    (cache,) = one.engine.prefill([prompt])
    expected = len(encode(cache, one.corpus.profile()))
    assert abs(kept.size - expected) <= 0.01 * expected


def test_a_prompt_gets_what_it_shares_with_a_document(places):
    _, other = places
    document = other.corpus.text(other.corpus.find("a"))
    prompt = [*document[:200], *drawn(3, 60)]
    ((first, _, told, _),) = other.ask(prefix(other, prompt, 2))
    assert told["promised_tokens"] == 200
    assert distance(first, other.expected(prompt, decoded(other, "a", 2, 200))) <= CLOSE
    ((first, _, told, _),) = other.ask(prefix(other, prompt, 2) | {"cache_salt": None})
    assert "refused" in told
    assert distance(first, other.expected(prompt)) <= 1e-5


def test_rows_that_were_loaded_are_kept_where_that_is_asked_for_alone(places):
    """Neither of linked documents, nor of a prefix, nor what vLLM kept of them under their salt."""
    one, _ = places
    before = set(saved(one))
    text = one.corpus.text(one.corpus.find("b"))
    for names, level in (("cab", 1), ("cab", 1), ("bd", 2)):
        one.ask(one.body(names, level))
    asked = prefix(one, [*text, *drawn(4, 100)], 1)
    ((_, _, told, _),) = one.ask(asked)
    assert told["promised_tokens"] == LENGTHS["b"]
    assert "were loaded" in told["not_saved"]
    ((_, _, told, _),) = one.ask(asked)
    assert "may have been loaded" in told["not_saved"]
    one.ask({"prompt": asked["prompt"], "cache_salt": asked["cache_salt"]})
    marker = drawn(55, 96)  # 5 is the documents' own
    one.ask({"prompt": marker})
    found(one, marker)
    assert len(set(saved(one)) - before) == 1


def test_a_prefix_that_was_computed_is_kept_and_then_loaded(places):
    one, other = places
    prompt = drawn(6, 300)
    ((first, _, told, _),) = other.ask(prefix(other, prompt, save=True))
    assert told["saving_tokens"] == 303  # with the answer, whose last token was not run
    assert distance(first, other.expected(prompt)) <= 1e-5
    hit = found(other, prompt)
    ((first, _, told, _),) = one.ask(prefix(one, [*prompt, *QUESTION]))
    assert told["promised_tokens"] == 300
    assert (
        distance(first, one.expected([*prompt, *QUESTION], decoded(one, hit.document.document_id, tokens=300))) <= CLOSE
    )


def test_a_conversation_grows_in_the_store_from_vllm_to_vllm(places):
    """Each turn begins with the last one's prompt and answer, which another vLLM loads; it computes the rest alone."""
    one, other = places
    whole, before, cache = drawn(60, 333), 0, None
    for turn, place in enumerate((one, other, one, other)):
        ((first, tokens, told, cached),) = place.ask(prefix(place, whole, save=True), tokens=9)
        assert cached == before  # loaded, but for what vLLM itself has of the turn before the last
        assert turn > 1 or told.get("loaded_tokens", 0) == before
        assert distance(first, place.expected(whole, cache)) <= (CLOSE if turn < 2 else 0.2)  # it has exact rows then
        assert told["saving_tokens"] == len(whole) + 8  # the last token was said and not run
        whole += tokens[:8]
        hit = found(place, [*whole, 1][: len(whole)])
        before, cache = len(whole), decoded(one, hit.document.document_id, tokens=len(whole))
        assert (hit.tokens, hit.info.context_level) == (before, LEVEL if turn else None)
        assert len(hit.document.parts or (1,)) == turn + 1
        whole += drawn(61 + turn, 20 + turn)
    ((_, _, told, _),) = one.ask(prefix(one, whole, LEVEL + 1))  # finer than what its rows were computed over
    assert "computed over a coarser level" in told["trouble"]
    # what vLLM has in its memory may have been loaded: its level is that of the salt
    ((_, _, told, _),) = one.ask(prefix(one, whole[:before], save=True), tokens=3)
    assert "saving_tokens" in told


def test_another_vllm_goes_on_with_a_conversation_in_the_same_words(places):
    """What the first one has in its memory, the other one has from the bucket."""
    one, other = places
    whole = drawn(70, 400)
    ((_, tokens, told, _),) = one.ask(prefix(one, whole, save=True), tokens=9)
    assert told["saving_tokens"] == 408
    whole += tokens[:8]
    found(one, whole)
    whole += drawn(71, 30)
    ((_, right, told, cached),) = one.ask(prefix(one, whole), tokens=12)
    assert cached == 384
    assert "loaded_tokens" not in told
    ((_, tokens, told, cached),) = other.ask(prefix(other, whole), tokens=12)
    assert (told["loaded_tokens"], told["lost_tokens"], cached) == (408, 0, 408)
    assert tokens == right


@pytest.mark.parametrize(("edited", "shared"), [((450, 500), 450), ((230, 280), 230), ((0, 50), 0)])
def test_a_prompt_that_is_nine_tenths_of_a_kept_one_gets_what_stands_before_its_edit(places, edited, shared):
    """vLLM computes from the first other token on, and says what it says where nothing is loaded."""
    one, other = places
    start, stop = edited
    prompt = drawn(1000 + start, 500)  # each its own, or the other vLLM had some of it in its memory
    one.ask({"prompt": prompt})
    hit = found(one, prompt)
    prompt = [*prompt[:start], *drawn(80, stop - start), *prompt[stop:]]
    (plain,) = other.outputs({"prompt": prompt}, tokens=12)
    (out,) = other.outputs(prefix(other, prompt), tokens=12)
    told, cache = out.kv_transfer_params["kvwire"], None
    assert told.get("loaded_tokens", 0) == shared
    assert out.num_cached_tokens == shared
    if shared:
        cache = decoded(one, hit.document.document_id, tokens=shared)
    assert apart_from(other, prompt, cache, out.outputs[0]) <= CLOSE
    assert list(out.outputs[0].token_ids) == list(plain.outputs[0].token_ids)


def test_what_is_loaded_and_kept_is_among_vllms_metrics(places):
    _, other = places
    other.ask({"prompt": drawn(8, 20)})  # a step, which brings what was counted before
    before = {name: counted(other, f"kvwire_{name}") for name in COUNTED}
    prompt = drawn(7, 200)
    other.ask(prefix(other, prompt, save=True))
    found(other, prompt)
    other.ask(other.body("da", 1))
    more = {name: counted(other, f"kvwire_{name}") - before[name] for name in COUNTED}
    assert (more["loads"], more["loaded_tokens"], more["lost_tokens"]) == (1, LENGTHS["d"] + LENGTHS["a"], 0)
    assert (more["saved_prompts"], more["saved_tokens"], more["unsaved_prompts"]) == (1, 203, 0)
    assert min(more["loaded_bytes"], more["saved_bytes"]) > 1000


@pytest.fixture
def heard(places):
    """All events of the first vLLM from now on, as its own publisher sends them."""
    place, events = places[0], []
    config = place.llm.llm_engine.vllm_config.kv_events_config
    with zmq.Context() as context, context.socket(zmq.SUB) as listener:
        listener.subscribe("")
        listener.connect(config.endpoint)
        steps = itertools.count(30_000)

        def listen(is_enough, seconds=60.0):
            until = time.monotonic() + seconds
            while not is_enough(events):
                assert time.monotonic() < until, events
                if listener.poll(200):
                    events.extend(msgpack.decode(listener.recv_multipart()[2], type=KVEventBatch).events)
                else:
                    place.ask({"prompt": drawn(next(steps), 40)}, tokens=1)  # a step: what is kept is told in one
            return events

        listen(len)  # a listener hears nothing of before it was let in
        yield listen


def test_events_tell_what_is_loaded_and_what_is_kept(places, heard):
    """Blocks in vLLM's memory under the salt that they were loaded with, a prompt in the store under vLLM's hashes."""
    one, _ = places
    body, prompt = one.body("cad", 1, drawn(20, 9)), drawn(21, 300)
    one.ask(body, {"prompt": prompt})
    found(one, prompt)

    def stored(events):
        return [each for each in events if isinstance(each, BlockStored)]

    def of(events, tokens, medium):
        begin = [each for each in stored(events) if each.token_ids[:32] == list(tokens[:32])]
        return [each for each in begin if (each.medium == "STORAGE") == medium]

    events = heard(lambda events: of(events, body["prompt"], False) and of(events, prompt, True))
    (loaded, *_) = of(events, body["prompt"], False)
    assert loaded.extra_keys[0] == (body["cache_salt"],)
    (kept,), (own, *_) = of(events, prompt, True), of(events, prompt, False)
    assert kept.token_ids == prompt[:288]
    assert kept.block_hashes[: len(own.block_hashes)] == own.block_hashes
    assert (len(kept.block_hashes), kept.parent_block_hash, kept.ownership) == (9, None, "kvwire")
    assert not [each for each in stored(events) if each.ownership and each.token_ids[:32] == list(body["prompt"][:32])]
    until = time.monotonic() + 60
    while not one.llm.reset_prefix_cache():  # pages are held until they were copied
        assert time.monotonic() < until
        time.sleep(0.1)
    heard(lambda events: any(isinstance(each, AllBlocksCleared) for each in events))


def test_requests_that_lose_their_pages_are_each_their_own(places):
    """More than the blocks hold, in steps of 128 tokens: some are preempted, loaded ones among them."""
    _, other = places
    bodies, expected = [], []
    for number in range(16):
        question = drawn(100 + number, 8)
        if number % 4 == 3:
            prompt = drawn(200 + number, 330)
            bodies.append({"prompt": prompt})
            expected.append(other.expected(prompt))
        else:
            names = ("ac", "cb", "dab")[number % 4]
            bodies.append(other.body(names, number % 3, question))
            expected.append(other.expected(bodies[-1]["prompt"], other.linked(names, number % 3)))
    before = counted(other, "num_preemptions")
    answers = other.ask(*bodies, tokens=120)
    assert counted(other, "num_preemptions") > before
    assert max(distance(first, right) for (first, *_), right in zip(answers, expected, strict=True)) <= CLOSE
    for number in (1, 2, 3):
        ((_, tokens, *_),) = other.ask(bodies[number], tokens=120)
        assert tokens == answers[number][1]


def test_requests_that_are_taken_back_leave_nothing(places):
    """While their documents are loaded, or before their pages were copied."""
    one, _ = places
    engine = one.llm.llm_engine
    for turn in range(12):
        body = one.body("dbca", turn % 3, drawn(300 + turn, 5))
        params = SamplingParams(max_tokens=50, extra_args={"kv_transfer_params": body["kv_transfer_params"]})
        prompt = TokensPrompt(prompt_token_ids=body["prompt"], cache_salt=body["cache_salt"])
        engine.add_request(f"loading-{turn}", prompt, params)
        engine.add_request(f"plain-{turn}", TokensPrompt(prompt_token_ids=drawn(400 + turn, 300)), SamplingParams())
        for _ in range(turn % 4):
            engine.step()
        engine.abort_request([f"loading-{turn}", f"plain-{turn}"])
    while engine.has_unfinished_requests():
        engine.step()
    body = one.body("bcad", 2)
    ((first, _, told, _),) = one.ask(body)
    assert told["promised_tokens"] == sum(LENGTHS.values())
    assert distance(first, one.expected(body["prompt"], one.linked("bcad", 2))) <= CLOSE


def damaged(place):
    """Documents whose blobs are gone, or have a flipped byte."""
    store, names = place.corpus.catalog.store, ("gone", "torn")
    list(place.corpus.encode([Document(name, tuple(drawn(500 + len(name) + name.count("o"), 120))) for name in names]))
    gone, torn = (place.corpus.find(name).blob_key for name in names)
    data = bytearray(store.get(torn))
    data[len(data) // 2] ^= 1
    store.delete(gone)
    store.put(torn, bytes(data))
    return names


def mixed(place, turn, broken):
    """A hundred requests: linked documents, prefixes and plain ones, a fifth of them with something wrong."""
    bodies = []
    for number in range(10):
        seed, names = turn * 1000 + number * 10, ("ad", "bd", "d", "c", "da")[number % 5]
        body = place.body(names, number % 3, drawn(seed, 5))
        late = Choice(tuple(names), deadline_s=0.004)
        text = place.corpus.text(place.corpus.find(names[0]))
        wrong = {"kvwire": {"documents": ["nobody"], "level": 1}}
        bodies += [
            body,
            place.body(names[::-1], 2, drawn(seed + 1, 5)),
            request_body(place.corpus, late, drawn(seed + 2, 5)),
            place.body((broken[number % 2], "d"), number % 3, drawn(seed + 3, 5)),
            body | {"cache_salt": None} if number % 2 else body | {"kv_transfer_params": wrong},
            prefix(place, [*text[: 60 + number], *drawn(seed + 4, 20)], number % 3),
            prefix(place, drawn(seed + 5, 90), save=number < 2),
            prefix(place, [*text[:64], *drawn(seed + 6, 4)], 1),
            {"prompt": drawn(seed + 7, 150)},
            {"prompt": drawn(seed + 8, 40), "cache_salt": f"tenant {number}"},
        ]
    return random.Random(turn).sample(bodies, len(bodies))


def every_step(place):
    """Have vLLM run steps of all sizes: on a processor it compiles, and keeps, a kernel for each number of tokens."""
    for tokens in range(1, STEP_TOKENS + 1):
        place.ask({"prompt": drawn(10_000 + tokens, tokens)}, tokens=1)
    for answers in range(1, SEQUENCES + 1):
        place.ask(*({"prompt": drawn(20_000 + 100 * answers + number, 3)} for number in range(answers)), tokens=2)


def test_a_thousand_requests_leak_nothing(places):
    """A hundred a round: memory, threads and open files stay, and all blocks come back.

    Connections are opened when requests first need them side by side, which may be late; a leak would be of hundreds.
    Resident memory has what threads gave back to the allocator, too; used memory of the worker has not.
    """
    _, other = places
    every_step(other)
    pids, broken, rounds, lost = processes(), damaged(other), [], counted(other, "kvwire_lost_tokens")
    used = []
    for turn in range(10):
        answers = other.ask(*mixed(other, turn, broken), tokens=2)
        assert len(answers) == 100
        rounds.append([state_of(pid) for pid in pids])
        used += other.llm.collective_rpc("used_mib")
    lost_tokens = counted(other, "kvwire_lost_tokens") - lost
    if path := os.environ.get("KVWIRE_LEAKS"):  # a file for the figures
        names = ("resident_mib", "threads", "open_files")
        told = [[dict(zip(names, state, strict=True)) for state in each] for each in rounds]
        figures = {"requests": 1000, "lost_tokens": lost_tokens, "rounds": told, "worker_used_mib": used}
        Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    assert lost_tokens > 1000
    assert used[-1] <= used[1] + USED_MIB
    for early, late in zip(rounds[4], rounds[-1], strict=True):
        assert late[0] <= early[0] * 1.05 + 20
        assert late[1] <= early[1] + 8  # pools start threads when they first need them
        assert late[2] <= early[2] + 16
    assert counted(other, "kv_cache_usage_perc") == 0
    prompt = drawn(99, 2040)  # takes 64 blocks of 71
    ((first, *_),) = other.ask({"prompt": prompt}, tokens=2)
    assert distance(first, other.expected(prompt)) <= 1e-5
    body = other.body("bcad", 2)
    ((first, _, told, _),) = other.ask(body)
    assert told["promised_tokens"] == sum(LENGTHS.values())
    assert distance(first, other.expected(body["prompt"], other.linked("bcad", 2))) <= CLOSE
