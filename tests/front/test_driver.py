"""One controller for all loads of a loader: what they share, and what happens when one of them goes."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch

from kvwire.codec import BlobDecoder
from kvwire.controller import Controller, Policy, PrefillCost, replay
from kvwire.controller import events as ev
from kvwire.controller.policies import Fixed
from kvwire.errors import OverloadedError, StorageError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.driver import ControllerDriver
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.runtime.threads import Threads
from kvwire.store import MemoryStore
from kvwire.transport import EmulatedLink, RateSchedule, parse_link

from .answers import troubles

if TYPE_CHECKING:
    from kvwire.controller import LogEntry
    from kvwire.controller.policies import Plan, PlanRequest

QUESTION = "It was plain to everybody that"
FLOOR = Fixed(0)
FINE = 1e-3
"""KL divergence that the finest level stays under."""


@dataclass(frozen=True)
class StepByStep:
    """Fetches the lowest level of everything, then level after level of everything until the deadline."""

    name: str = "step by step"
    window: int | None = None
    preemptible: bool = False

    def plan(self, request: PlanRequest) -> Plan:
        plan, some = FLOOR.plan(request), request.refinable
        refine = () if some is None else np.flatnonzero(some.level < some.top).tolist()
        return replace(plan, refine=refine)


@pytest.fixture(scope="module")
def question(small):
    return small.engine.tokenize(QUESTION)


@pytest.fixture(scope="module")
def references(small, question):
    return {
        order: Reference.of(small.engine, [small.tokens[name] for name in order], question, 4, neutral=0)
        for order in _orders(small)
    }


def _orders(small):
    first, second = small.tokens
    return (first,), (second,), (first, second), (second, first)


def _loader(small, corpus=None, *, link=None, log=None, **settings):
    record = None if log is None else log.append
    chosen = LoadSettings(record=record, **settings)
    return Loader(small.engine, corpus or small.corpus(neutral_prefix=0), costs=small.costs, link=link, settings=chosen)


def ours(before=frozenset()):
    """Threads of loaders, but for those of loaders that were there before."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvwire")} - before


def _given(log: list[LogEntry], kind: type) -> list[ev.Instruction]:
    return [each for entry in log for each in entry.instructions if isinstance(each, kind)]


def _levels(answer):
    return [decision.level for decision in answer.decisions]


def test_loads_of_one_loop_share_a_controller_and_all_are_right(small, question, references):
    log: list[LogEntry] = []
    loader = _loader(small, link=parse_link("20mbit,5ms"), log=log, quality_floor=4)

    async def all_at_once():
        return await asyncio.gather(*(loader.ask_async(order, question, tokens=4) for order in references))

    answers = asyncio.run(all_at_once())
    for answer, reference in zip(answers, references.values(), strict=True):
        assert reference.compare(small.engine, answer.prompt.cache)[0] < FINE
        assert not troubles(answer.misses)
    asked = [entry.event.load for entry in log if isinstance(entry.event, ev.LoadRequested)]
    assert asked == sorted(asked) == list(range(len(references)))
    assert {each.load for each in _given(log, ev.Finish)} == set(asked)
    assert _most_jobs(log) == 1


def _most_jobs(log):
    """Jobs that were open at once, over all loads."""
    begun = (ev.Decode, ev.Recompute, ev.ComputePrefix)
    ended = (ev.DecodeDone, ev.DecodeFailed, ev.RecomputeDone, ev.RecomputeFailed, ev.PrefixComputed, ev.PrefixFailed)
    most = now = 0
    for entry in log:
        now += sum(isinstance(each, begun) for each in entry.instructions) - isinstance(entry.event, ended)
        most = max(most, now)
    return most


def test_loads_of_several_threads_are_all_right(small, question, references):
    loader = _loader(small, link=parse_link("50mbit,2ms"), quality_floor=4)
    orders = [*references, *references]
    with ThreadPoolExecutor(len(orders)) as pool:
        answers = list(pool.map(lambda order: loader.ask(order, question), orders))
    for order, answer in zip(orders, answers, strict=True):
        assert references[order].compare(small.engine, answer.prompt.cache)[0] < FINE
        assert not troubles(answer.misses)
    assert loader.estimates.knows_link


def test_a_link_that_becomes_fast_gives_finer_levels_than_planned_at_first(small, question, references):
    order = tuple(small.tokens)
    log: list[LogEntry] = []
    link = EmulatedLink(RateSchedule((0.0, 0.4), (3e3, 5e6)), 0.002)
    loader = _loader(small, link=link, log=log, bandwidth_prior=3e3, policy=StepByStep(), repair="none", max_kl=None)
    answer = loader.ask(order, question, deadline_s=30.0)
    assert {fetch.level for fetch in _given(log, ev.Fetch) if not fetch.first} == {0}
    assert _levels(answer) == [4] * 5
    assert references[order].compare(small.engine, answer.prompt.cache)[0] < FINE
    assert not answer.misses


def test_the_controllers_own_policy_refines_where_the_link_turns_out_fast(small, question):
    order, log = tuple(small.tokens), []
    slow = replace(small.costs, prefill=PrefillCost(0.5, 0.01))  # recomputing is out of the question
    settings = LoadSettings(record=log.append, bandwidth_prior=5e3, repair="none")
    loader = Loader(
        small.engine, small.corpus(neutral_prefix=0), costs=slow, link=EmulatedLink(5e6, 0.002), settings=settings
    )
    answer = loader.ask(order, question, deadline_s=4.0)
    assert min(fetch.level for fetch in _given(log, ev.Fetch) if not fetch.first) < 4
    assert set(_levels(answer)) <= {4, None}
    assert 4 in _levels(answer)


def _damage_level(corpus, small, name, chunk, level):
    entry = corpus.catalog.by_document(small.engine.meta.config_digest(), name)
    blob = bytearray(corpus.catalog.store.get(entry.blob_key))
    blob[corpus.read_header(entry).segments[chunk][level].offset + 5] ^= 0x40
    corpus.catalog.store.put(entry.blob_key, bytes(blob))


def test_of_a_fetch_that_lost_a_level_the_lower_ones_are_used(small, question):
    name, corpus = next(iter(small.tokens)), small.corpus(neutral_prefix=0)
    _damage_level(corpus, small, name, 1, 3)
    answer = _loader(small, corpus, policy=Fixed(4)).ask([name], question)
    assert _levels(answer) == [4, 2]
    assert any("level 3" in miss for miss in answer.misses)


def test_of_a_fetch_that_lost_its_lowest_level_nothing_is_used(small, question, references):
    name, corpus = next(iter(small.tokens)), small.corpus(neutral_prefix=0)
    _damage_level(corpus, small, name, 1, 0)
    answer = _loader(small, corpus, policy=Fixed(4)).ask([name], question)
    assert _levels(answer) == [4, None]
    assert references[(name,)].compare(small.engine, answer.prompt.cache)[0] < FINE


def test_a_refinement_that_cannot_be_decoded_leaves_what_there_was(small, question, references, monkeypatch):
    order, decode_chunk = tuple(small.tokens), BlobDecoder.decode_chunk

    def spoils(self, chunk, segments, level=None):
        decode_chunk(self, chunk, segments, level)
        if level:
            start, stop = self.info.chunk_span(chunk)
            for tensor in (*self.cache.keys, *self.cache.values):
                tensor[:, start:stop] = float("nan")
            msg = "out of memory"
            raise RuntimeError(msg)

    monkeypatch.setattr(BlobDecoder, "decode_chunk", spoils)
    answer = _loader(small, policy=StepByStep(), max_kl=None).ask(order, question, deadline_s=20.0)
    assert _levels(answer) == [0] * 5
    assert all("out of memory" in decision.reason for decision in answer.decisions)
    assert references[order].compare(small.engine, answer.prompt.cache)[0] < 0.02


def _with_head_start(small):
    coding = Coding(prefix_layers=1)
    corpus = Corpus(small.engine, MemoryStore(), coding=coding)
    for _ in corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]):
        pass
    return corpus


def test_a_head_start_delays_no_fetch_and_decoding_waits_for_it(small, question, references, monkeypatch):
    order, log = tuple(small.tokens), []
    corpus, fetched = _with_head_start(small), threading.Event()
    prefix_layers = type(small.engine).prefix_states

    def slow(*args):
        assert fetched.wait(10)  # as long as a first layer takes: until something was fetched beside it
        return prefix_layers(*args)

    def record(entry):
        log.append(entry)
        if isinstance(entry.event, ev.ChunkArrived):
            fetched.set()

    monkeypatch.setattr(type(small.engine), "prefix_states", slow)
    loader = Loader(small.engine, corpus, costs=small.costs, settings=LoadSettings(policy=Fixed(4), record=record))
    answer = loader.ask(order, question)
    assert _levels(answer) == [4] * 5
    assert references[order].compare(small.engine, answer.prompt.cache)[0] < FINE
    done = [at for at, entry in enumerate(log) if isinstance(entry.event, ev.PrefixComputed)]
    decodes = [at for at, entry in enumerate(log) if any(isinstance(each, ev.Decode) for each in entry.instructions)]
    assert len(done) == len(order)
    assert min(decodes) >= min(done)


@pytest.mark.parametrize("at_once", [False, True])
def test_chunks_that_wait_are_decoded_together_and_bad_ones_are_named(
    small, question, references, at_once, monkeypatch
):
    """at_once: as on a GPU, which is given all chunks in one go."""

    order, log, corpus, fetched = tuple(small.tokens)[1:], [], _with_head_start(small), threading.Semaphore(0)
    prefix_layers, spoilt = type(small.engine).prefix_states, []
    decode_chunk, submit = BlobDecoder.decode_chunk, BlobDecoder.submit

    def slow(*args):
        assert all(fetched.acquire(timeout=10) for _ in range(3))
        return prefix_layers(*args)

    def spoils(self, chunk, segments, level=None):
        if chunk in spoilt:
            msg = "out of memory"
            raise RuntimeError(msg)
        decode_chunk(self, chunk, segments, level)

    def together(self, chunks):
        assert at_once or len(chunks) == 1
        if spoilt and len(chunks) > 1:
            msg = "out of memory"
            raise RuntimeError(msg)
        return submit(self, chunks)

    def record(entry):
        log.append(entry)
        if isinstance(entry.event, ev.ChunkArrived):
            fetched.release()

    monkeypatch.setattr(type(small.engine), "prefix_states", slow)
    monkeypatch.setattr(BlobDecoder, "on_gpu", property(lambda _: at_once))
    monkeypatch.setattr(BlobDecoder, "decode_chunk", spoils)
    monkeypatch.setattr(BlobDecoder, "submit", together)
    settings = LoadSettings(policy=Fixed(4), record=record, decode_batch=4, compute_workers=2)
    answers = []
    for spoilt[:] in ([], [1]):
        loader = Loader(small.engine, corpus, costs=small.costs, settings=settings)
        answers.append(loader.ask(order, question))
        assert references[order].compare(small.engine, answers[-1].prompt.cache)[0] < FINE
    assert [len(decode.chunks) for decode in _given(log, ev.Decode)] == [3, 3]
    assert [_levels(answer) for answer in answers] == [[4, 4, 4], [4, None, 4]]


def test_a_processor_decodes_several_chunks_side_by_side(small, question, references, monkeypatch):
    order, decode_chunk = tuple(small.tokens), BlobDecoder.decode_chunk
    lock, overlapped, running, most = threading.Lock(), threading.Event(), 0, 0

    def counted(self, *args):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if most == 2:
            overlapped.set()
        overlapped.wait(2)  # for another one, where several are decoded
        decode_chunk(self, *args)
        with lock:
            running -= 1

    settings = {"policy": Fixed(4), "decode_batch": 4}
    one_by_one = _loader(small, decode_threads=1, **settings).ask(order, question)
    monkeypatch.setattr(BlobDecoder, "decode_chunk", counted)
    side_by_side = _loader(small, decode_threads=2, **settings).ask(order, question)
    assert most == 2
    assert _levels(one_by_one) == _levels(side_by_side) == [4] * 5
    for ours, theirs in zip(side_by_side.prompt.cache.keys, one_by_one.prompt.cache.keys, strict=True):
        assert torch.equal(ours, theirs)
    assert references[order].compare(small.engine, side_by_side.prompt.cache)[0] < FINE


def test_a_head_start_that_fails_means_recomputing(small, question, references, monkeypatch):
    def broken(*_):
        msg = "out of memory"
        raise RuntimeError(msg)

    order, corpus = tuple(small.tokens), _with_head_start(small)
    monkeypatch.setattr(type(small.engine), "prefix_states", broken)
    answer = _loader(small, corpus, policy=Fixed(4)).ask(order, question)
    assert _levels(answer) == [None] * 5
    assert len(answer.misses) >= len(order)
    assert references[order].compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_a_pass_that_needs_too_much_memory_is_made_in_parts(small, question, references, monkeypatch):
    order, extend = tuple(small.tokens), type(small.engine).extend

    def bounded(self, prefix, ids, **options):
        if len(ids) > 256:
            msg = "out of memory"
            raise RuntimeError(msg)
        return extend(self, prefix, ids, **options)

    monkeypatch.setattr(type(small.engine), "extend", bounded)
    text = {name: tuple(ids) for name, ids in small.tokens.items()}
    corpus = small.corpus(neutral_prefix=0)
    for name in order:
        corpus.catalog.store.delete(corpus.find(name).blob_key)
    answer = _loader(small, corpus).ask(order, question, texts=text)
    assert _levels(answer) == [None] * 5
    assert references[order].compare(small.engine, answer.prompt.cache)[0] < 1e-6


def test_a_cancelled_load_leaves_nothing_behind_and_disturbs_nobody(small, question, references):
    order, log, before = tuple(small.tokens), [], ours()
    loader = _loader(small, link=EmulatedLink(60e3, 0.005), log=log, policy=Fixed(4))

    async def one_goes():
        goes = asyncio.create_task(loader.ask_async(order, question))
        stays = asyncio.create_task(loader.ask_async(order[:1], question))
        while not any(fetch.chunk.document == len(order) - 1 for fetch in _given(log, ev.Fetch)):
            await asyncio.sleep(0.001)
        driver = loader._session._driver
        (gone,) = {entry.event.load for entry in log
                   if isinstance(entry.event, ev.LoadRequested) and entry.event.documents == len(order)}  # fmt: skip
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        assert gone not in driver._controller.loads
        answer = await stays
        assert not driver._controller.loads
        assert driver._controller.held_bytes == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return answer

    answer = asyncio.run(one_goes())
    assert references[order[:1]].compare(small.engine, answer.prompt.cache)[0] < FINE
    loader.close()
    assert not ours(before)
    left = next(entry for entry in log if isinstance(entry.event, ev.LoadAbandoned))
    assert any(isinstance(each, ev.Cancel) for each in left.instructions)


def test_a_load_that_cannot_be_in_time_is_refused_and_the_next_one_is_served(small, question):
    order, log = tuple(small.tokens), []
    with _loader(small, link=EmulatedLink(60e3, 0.005), log=log, on_late="refuse") as loader:
        loader.ask(order, question)  # the link is known now
        with pytest.raises(OverloadedError, match="no room before the deadline") as refused:
            loader.ask(order, question, deadline_s=0.001)
        assert refused.value.retry_after_s > 0
        (refusal,) = _given(log, ev.Refuse)
        begun = {each.chunk for each in _given(log, ev.Fetch) if each.chunk.load == refusal.load}
        arrived = {entry.event.chunk for entry in log if isinstance(entry.event, ev.ChunkArrived)}
        cancelled = {each.chunk for each in _given(log, ev.Cancel)}
        assert begun <= cancelled | arrived  # of documents that were known before others
        assert loader._session._driver._controller.held_bytes == 0
        assert loader.ask(order, question, deadline_s=60.0).tokens


@pytest.mark.parametrize("deadline_s", [None, 2.0])
def test_the_log_of_a_real_load_replays_exactly(small, question, deadline_s):
    log: list[LogEntry] = []
    loader = _loader(small, link=EmulatedLink(RateSchedule((0.0, 0.2), (60e3, 2e6)), 0.01), log=log)
    before = loader.estimates
    answer = loader.ask(tuple(small.tokens), question, deadline_s=deadline_s)
    assert any(isinstance(entry.event, ev.TransferProgress) for entry in log)
    assert _given(log, ev.Finish)[0].decisions == answer.decisions
    replay(log, Controller(before, loader._runner.controls))


def test_the_log_of_overlapping_loads_replays_exactly_as_written(small, question):
    log: list[LogEntry] = []
    loader = _loader(small, link=EmulatedLink(150e3, 0.01), log=log, policy=Fixed(4))
    before, (first, second) = loader.estimates, small.tokens

    async def one_after_the_other():
        short = asyncio.create_task(loader.ask_async([first], question))
        while not _given(log, ev.Fetch):
            await asyncio.sleep(0.001)
        return [await short, await loader.ask_async([second], question)]

    async def both():
        await asyncio.gather(one_after_the_other(), loader.ask_async([second, first], question, deadline_s=9.0))

    asyncio.run(both())
    kinds = [type(entry.event) for entry in log]
    assert kinds.count(ev.PromptAssembled) == 3
    assert (
        ev.IndexKnown in kinds[kinds.index(ev.PromptAssembled) :]
    )  # what a load's end told was there for another's plans
    controller = Controller(before, loader._runner.controls, Fixed(4))
    replay(log, controller)
    assert controller.estimates.costs() == loader.costs
    assert before.closing.is_measured


class _Clockwork:
    """A controller that only wants a tick, 10 ms after every event."""

    loads: ClassVar[dict[int, object]] = {}

    def __init__(self):
        self.events = []
        self.wake_at = math.inf

    def handle(self, event, now):
        self.events.append(event)
        self.wake_at = now + 0.01
        return []


def test_what_came_while_the_loop_was_blocked_is_told_before_the_tick():
    arrived = ev.FirstByte(0.01)

    async def block():
        loop, controller = asyncio.get_running_loop(), _Clockwork()
        driver = ControllerDriver(controller, threading.RLock(), Threads(1))
        driver.tell(ev.FirstByte(0.0))
        time.sleep(0.05)  # noqa: ASYNC251 - as a thread does that holds the interpreter's lock
        loop.call_soon(loop.call_soon, loop.call_soon, driver.tell, arrived)  # from the socket to the fetcher
        while not isinstance(controller.events[-1], ev.Tick):
            await asyncio.sleep(0.001)
        await driver.close()
        return controller.events

    paused, *others = asyncio.run(block())[1:]
    assert isinstance(paused, ev.DriverPaused)
    assert 0.02 < paused.seconds < 10
    assert others == [arrived, ev.Tick()]


def test_that_the_loop_was_blocked_is_told_before_what_is_heard_first():
    """The socket's bytes are read before the timer goes off, and the timer is then set anew."""

    async def block():
        controller = _Clockwork()
        driver = ControllerDriver(controller, threading.RLock(), Threads(1))
        driver.tell(ev.FirstByte(0.0))
        time.sleep(0.05)  # noqa: ASYNC251 - as a collection of garbage does
        driver.tell(ev.FirstByte(0.01))
        driver.tell(ev.FirstByte(0.02))
        await driver.close()
        return controller.events

    kinds = [type(each) for each in asyncio.run(block())]
    assert kinds == [ev.FirstByte, ev.DriverPaused, ev.FirstByte, ev.FirstByte]


def _in_steps(threads, *kinds, decode_threads=1, documents=1, stops_after=99):
    """What steps and jobs of lanes did, in the order in which they began; the most steps at a time."""
    begun, running, most, lock, third = [], [0], [0], threading.Lock(), threading.Event()

    def steps():
        for number in range(6):
            with lock:
                begun.append(number)
                running[0] += 1
                most[0] = max(most[0], running[0])
            time.sleep(0.005)
            with lock:
                running[0] -= 1
            if number == 2:
                third.set()
            yield

    async def job(driver, kind):
        beside = kind == "compute" and threads == 2 and len(kinds) == 1

        def work():
            third.wait(10) if beside else time.sleep(0.05)
            begun.append(kind)

        await (driver.decode if kind == "decode" else driver.compute)(work)

    async def run():
        driver = ControllerDriver(_Clockwork(), threading.RLock(), Threads(threads, decode_threads))
        jobs = [asyncio.create_task(job(driver, kind)) for kind in kinds]
        await asyncio.sleep(0)
        preparing = [driver.in_steps(steps(), lambda: len(begun) < stops_after) for _ in range(documents)]
        await asyncio.gather(*jobs, *preparing)
        await driver.close()

    asyncio.run(run())
    return begun, most[0]


def test_steps_are_done_while_decoding_is_idle():
    assert _in_steps(1)[0] == [0, 1, 2, 3, 4, 5]
    assert _in_steps(1, "decode")[0] == ["decode", 0, 1, 2, 3, 4, 5]
    assert _in_steps(1, "compute")[0] == ["compute", 0, 1, 2, 3, 4, 5]  # it takes turns with decoding
    assert _in_steps(2, "compute", "decode")[0][0] in {"compute", "decode"}
    assert _in_steps(2, "compute")[0].index("compute") > 1  # it has a thread of its own
    assert _in_steps(1, stops_after=3)[0] == [0, 1, 2]


def test_no_more_steps_are_under_way_than_threads_decode():
    for decode_threads in (1, 2):
        begun, most = _in_steps(1, decode_threads=decode_threads, documents=4)
        assert sorted(begun) == sorted([*range(6)] * 4)
        assert most == decode_threads


class _BreaksOnce(Fixed):
    broken = False

    def plan(self, request):
        if not _BreaksOnce.broken:
            _BreaksOnce.broken = True
            msg = "nobody foresaw this"
            raise RuntimeError(msg)
        return super().plan(request)


def test_a_policy_that_breaks_ends_its_loads_and_later_ones_go_on(small, question):
    loader = _loader(small, policy=_BreaksOnce(4))
    with pytest.raises(StorageError, match="nobody foresaw this"):
        loader.ask(tuple(small.tokens), question)
    assert _levels(loader.ask(tuple(small.tokens), question)) == [4] * 5


def test_a_load_that_still_looks_documents_up_ends_with_what_broke_steering(small, question, monkeypatch):
    monkeypatch.setattr(_BreaksOnce, "broken", False)
    (first, second), corpus, gone = small.tokens, small.corpus(neutral_prefix=0), threading.Event()
    find = corpus.find

    def late(name):
        assert name == first or gone.wait(10)
        return find(name)

    corpus.find = late
    loader = _loader(small, corpus, policy=_BreaksOnce(4))

    async def both():
        slow = asyncio.create_task(loader.ask_async([second], question))
        try:
            with pytest.raises(StorageError, match="nobody foresaw this"):
                await loader.ask_async([first], question)
        finally:
            gone.set()
        with pytest.raises(StorageError, match="nobody foresaw this"):
            await asyncio.wait_for(slow, 10)
        return await loader.ask_async([second], question)

    assert set(_levels(asyncio.run(both()))) == {4}


def test_what_a_load_measured_is_remembered(small, question, tmp_path, monkeypatch):
    memory, corpus = EstimatesFile(tmp_path / "estimates.json"), small.corpus(neutral_prefix=0)
    link = parse_link("8mbit,1ms")
    monkeypatch.setattr("kvwire.runtime.runner.measure_costs", lambda *_: small.costs)
    loader = Loader(small.engine, corpus, link=link, memory=memory, settings=LoadSettings(policy=Fixed(4)))
    for _ in range(20):
        loader.ask(tuple(small.tokens), question, deadline_s=2.0)
        if loader.estimates.bandwidth.value != LoadSettings().bandwidth_prior:
            break  # on a machine so busy that the loop was late throughout, a load measures no link
    loader._runner.writing.result(10)
    loader._runner.remember()  # what came after the answer, too
    loader._runner.writing.result(10)
    monkeypatch.setattr("kvwire.runtime.runner.measure_costs", None)  # not needed any more
    again = Loader(small.engine, corpus, link=link, memory=memory)
    assert again.estimates.bandwidth.value != LoadSettings().bandwidth_prior
    assert again.costs == loader.costs


def test_costs_that_a_caller_gave_are_not_remembered_as_measured(small, question, tmp_path, monkeypatch):
    memory, corpus = EstimatesFile(tmp_path / "estimates.json"), small.corpus(neutral_prefix=0)
    link, wrong = parse_link("8mbit,1ms"), replace(small.costs, prefill=PrefillCost(9.0, 9.0))
    loader = Loader(small.engine, corpus, costs=wrong, link=link, memory=memory)
    loader.ask(tuple(small.tokens), question, deadline_s=2.0)
    loader._runner.writing.result(10)
    assert loader.estimates.knows_engine
    monkeypatch.setattr("kvwire.runtime.runner.measure_costs", lambda *_: small.costs)
    again = Loader(small.engine, corpus, link=link, memory=memory)
    assert again.costs == small.costs
    assert set(memory.recall(*loader._runner.keys).state) == {"version", "link"}


def test_prediction_and_error_are_told(small, question):
    loader = _loader(small, policy=Fixed(0))
    coarse = loader.ask(tuple(small.tokens), question)
    fine = _loader(small, policy=Fixed(4)).ask(tuple(small.tokens), question)
    assert 0 < fine.error < 1e-3 < coarse.error < 0.2
    assert 0 < coarse.predicted_s < 60


def test_the_fewest_bytes_in_time_are_fewer_than_the_best_quality_takes(small, question):
    answers = [
        _loader(small, link=EmulatedLink(2e6, 0.002)).ask(
            tuple(small.tokens), question, deadline_s=20.0, objective=objective
        )
        for objective in ("cheapest", "quality")
    ]
    assert answers[0].bytes < answers[1].bytes


def test_policies_of_tests_are_policies():
    policy: Policy = StepByStep()
    assert policy.plan
