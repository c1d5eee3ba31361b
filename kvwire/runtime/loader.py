"""Loading: documents and a deadline to a linked prompt and the first token."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from kvwire import controller as ctl
from kvwire._version import __version__
from kvwire.codec import uses_triton
from kvwire.codec.workers import cores
from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, CorruptError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.costs import measure_costs, warm_up
from kvwire.runtime.documents import Timeouts, find_document
from kvwire.runtime.driver import ControllerDriver, Threads
from kvwire.runtime.estimates_file import EstimatesFile, engine_key, link_key, processor
from kvwire.runtime.executor import Executor, ExecutorSettings
from kvwire.transport import EmulatedLink, FetchSettings, LinkSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor
    from transformers import DynamicCache

    from kvwire.codec import AnyProfile, Backend
    from kvwire.controller import LogEntry, Objective, Policy
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkedPrompt
    from kvwire.runtime.corpus import Corpus
    from kvwire.types import Decision


T = TypeVar("T")
_OPEN_SHARE = 0.25
"""Share of a deadline that a head may take where the document's text is known: recomputing needs the rest."""
_OPEN_LEAST_S = 0.1
_GPU_BATCH, _MOST_THREADS, _HORIZON_S = 32, 8, 0.01
_ROUNDS = 2  # of chunks that a CPU decodes in one go: telling of each that it is done costs time, too


@dataclass(frozen=True)
class LoadSettings:
    """How prompts are loaded.

    quality_floor: the lowest level that may be used where there is a choice. quality_ceiling: the finest level that is
    worth waiting for, None for any. bandwidth_prior: bytes per second assumed before anything was measured.
    ttfb_prior_s: likewise for the time to first byte. max_in_flight: chunks fetched at once. memory_bytes: of blobs,
    fetched or kept for refinement, over all loads of an event loop. open_s: longest wait for a blob's head where the
    document's text is known or stored; patience_s: for any other, and for anything else that nothing stands in for.
    fetch: the fetcher's settings. backend: which kernels decode. compute_workers: 2 to decode beside forward passes, 1
    to take turns; None: 2 where a GPU does both, since decoding has queues of its own there. decode_batch: chunks
    that are decoded in one go, decode_threads: how many of them a CPU decodes side by side; None: as suits the machine.
    policy: decides instead of the controller's own, for comparisons. record: called with every event and what it led
    to; ``controller.replay`` takes these.
    """

    quality_floor: int = 0
    quality_ceiling: int | None = None
    bandwidth_prior: float = 12.5e6
    ttfb_prior_s: float = 0.02
    max_in_flight: int = 16
    memory_bytes: int = 1 << 32
    open_s: float = 5.0
    patience_s: float = 30.0
    fetch: FetchSettings = field(default_factory=lambda: FetchSettings(concurrency=8, retries=2))
    backend: Backend = "auto"
    compute_workers: Literal[1, 2] | None = None
    decode_batch: int | None = None
    decode_threads: int | None = None
    policy: Policy | None = None
    record: Callable[[LogEntry], object] | None = None


def controls_of(settings: LoadSettings, *, on_gpu: bool) -> ctl.ControllerSettings:
    """How the controller of a loader with these settings steers; on_gpu: whether a GPU decodes and computes."""
    threads = 1 if on_gpu else settings.decode_threads or min(cores(), _MOST_THREADS)
    return ctl.ControllerSettings(
        max_in_flight=settings.max_in_flight,
        horizon_s=_HORIZON_S,
        memory_bytes=settings.memory_bytes,
        patience_s=settings.patience_s,
        workers=settings.compute_workers or (2 if on_gpu else 1),
        decode_batch=settings.decode_batch or (_GPU_BATCH if on_gpu else _ROUNDS * threads),
        decode_threads=threads,
    )


@dataclass(frozen=True)
class Timing:
    """Where the time to the first token went, in seconds.

    ttft_s: from the call to the first token, catalog lookups included. fetch_s: until the last byte that was used
    arrived. decode_s, recompute_s: compute spent on chunks, in part while fetching. link_s: making the engine's cache.
    query_s: the question's forward pass. The parts overlap, so they add up to more than ttft_s.
    """

    ttft_s: float
    fetch_s: float
    decode_s: float
    recompute_s: float
    link_s: float
    query_s: float


@dataclass(frozen=True, eq=False)
class Answer:
    """The first token and how it came about.

    logits: of the question's last token, float32 ``[vocabulary]``. prompt: the linked cache of all documents.
    misses: what went wrong on the way and was healed by recomputing, or with a lower level, in words. bytes: fetched,
    heads included. predicted_s: the time to first token that the first complete plan expected, counted from the asking;
    None where there was none. error: mean over the
    documents' tokens of the measured errors of the levels in use; a recomputed chunk counts with its blob's finest.
    """

    first_token: int
    logits: Tensor
    tokens: tuple[int, ...]
    text: str
    prompt: LinkedPrompt
    decisions: tuple[Decision, ...]
    reason: str
    timing: Timing
    bytes: int
    misses: tuple[str, ...]
    predicted_s: float | None = None
    error: float = 0.0


class Loader:
    """Answers questions over documents of a corpus.

    variants: further corpora, reached over the same link, that hold the same documents with other head starts; of each
    document the blob that suits the link and the engine is used. What they lack or bring late is done without.
    costs: measured on this engine when left out, which takes a second or two, unless they are remembered; such that
    are given here, and what is learnt on top of them, are not written down. link: an
    emulated link in front of the store. memory: where estimates of links and engines live between processes, by default
    what ``KVWIRE_ESTIMATES`` says, and nowhere where ``link`` is a link itself rather than its settings. Estimates live
    on from load to load. Calls may overlap, on one event loop or on several: those on one loop are steered by one
    controller, and all share a thread for each lane of compute, and
    the threads in which a CPU decodes chunks side by side.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        corpus: Corpus,
        *,
        variants: Sequence[Corpus] = (),
        costs: ctl.CostModel | None = None,
        link: LinkSettings | EmulatedLink | None = None,
        settings: LoadSettings | None = None,
        memory: EstimatesFile | None = None,
    ) -> None:
        """Measure costs where none are given, or warm up where they are remembered; writes nothing."""
        self._engine = engine
        self._corpora = (corpus, *variants)
        self._settings = chosen = settings or LoadSettings()
        self._link = link
        on_gpu = uses_triton(chosen.backend, engine.device) and engine.device.type != "cpu"
        self._controls = controls_of(chosen, on_gpu=on_gpu)
        self._threads = Threads(self._controls.workers, self._controls.decode_threads)
        self._lock = threading.RLock()  # a record may ask for the estimates
        self._drivers: dict[asyncio.AbstractEventLoop, ControllerDriver] = {}
        lasting = not isinstance(link, EmulatedLink)
        self._memory = memory or (EstimatesFile.of_environment() if lasting else EstimatesFile(None))
        self._keys = _keys(engine, corpus, str(link) if link and lasting else "", chosen.backend)
        self._writing: Future[None] | None = None
        self._has_measured_costs = costs is None  # by now, or by who wrote them down
        self._estimates = self._first_estimates(costs)

    def _first_estimates(self, costs: ctl.CostModel | None) -> ctl.Estimates:
        """What is remembered of the link, and of the engine unless its costs are given."""
        known, chosen = self._memory.recall(*self._keys), self._settings
        state = {part: value for part, value in known.state.items() if part != "engine" or costs is None}
        if costs is None:
            profile = _profile_in_use(self._corpora[0])
            for variant in self._corpora[1:]:
                with suppress(KvwireError):
                    variant.profile()  # the first load will not wait for it
            if known.has_engine:
                warm_up(self._engine, profile, chosen.backend)
            else:
                costs = measure_costs(self._engine, profile, chosen.backend)
        priors = (chosen.bandwidth_prior, chosen.ttfb_prior_s)
        return ctl.Estimates.of_state(state, costs, *priors, age_s=known.age_s)

    @property
    def costs(self) -> ctl.CostModel:
        """What computing costs on this engine, by what is known now."""
        return self.estimates.costs()

    @property
    def estimates(self) -> ctl.Estimates:
        """A copy of what is known of the link and the engine now."""
        with self._lock:
            return self._estimates.copy()

    def ask(
        self,
        documents: Sequence[str],
        question: Sequence[int],
        *,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """Link the documents' caches, run the question, and return the answer.

        documents: ids in the order of the prompt. question: token ids. deadline_s: until the first token, from now.
        objective: see ``Goal``; None: the best quality within the deadline, or, without one, the soonest first token.
        tokens: length of the answer at most. texts: token ids of documents, for those whose blob is lost; blobs that
        can be read carry their own.
        Raises NotFoundError for a document that is neither in the store nor in ``texts``, ArgumentError where the
        prompt does not fit the model's window.
        """
        return asyncio.run(
            self.ask_async(documents, question, deadline_s=deadline_s, objective=objective, tokens=tokens, texts=texts)
        )

    async def ask_async(
        self,
        documents: Sequence[str],
        question: Sequence[int],
        *,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """``ask`` for callers with an event loop of their own; the loop must be the same until this returns."""
        if not documents or not question:
            msg = "a prompt needs at least one document and a question of at least one token"
            raise ArgumentError(msg)
        started = time.monotonic()
        goal = self._goal(deadline_s, objective)
        chosen = self._settings
        soon = chosen.open_s
        if deadline_s is not None:
            soon = min(soon, max(_OPEN_SHARE * deadline_s, _OPEN_LEAST_S))
        with self._lock:
            limits = Timeouts(soon, chosen.patience_s, self._estimates.ttfb.value)
        settings = ExecutorSettings(fetch=chosen.fetch, backend=chosen.backend, limits=limits)
        async with self._driven() as driver:
            found = [find_document(self._corpora, driver, name, texts, limits) for name in documents]
            sources = await _all_of(found)
            async with Executor(self._engine, sources, driver, settings) as executor:
                left = None if deadline_s is None else deadline_s - (driver.clock() - started)
                asked = driver.clock() - started
                finish = await executor.run(len(question), replace(goal, deadline_s=left))
                return await self._answer(driver, executor, finish, list(question), started, asked, tokens)

    def _goal(self, deadline_s: float | None, objective: Objective | None) -> ctl.Goal:
        chosen = self._settings
        return ctl.Goal(
            objective=objective or ("earliest" if deadline_s is None else "quality"),
            deadline_s=deadline_s,
            floor=chosen.quality_floor,
            ceiling=chosen.quality_ceiling,
        )

    @asynccontextmanager
    async def _driven(self) -> AsyncIterator[ControllerDriver]:
        """What steers the loads of this event loop; it ends with the last of them."""
        loop = asyncio.get_running_loop()
        driver = self._drivers.get(loop)
        if driver is None or driver.broken:
            chosen = self._settings
            controller = ctl.Controller(self._estimates, self._controls, chosen.policy, record=chosen.record)
            link = EmulatedLink.of(self._link) if isinstance(self._link, LinkSettings) else self._link
            driver = self._drivers[loop] = ControllerDriver(controller, self._lock, self._threads, link)
        driver.users += 1
        try:
            yield driver
        finally:
            driver.users -= 1
            if not driver.users:
                if self._drivers.get(loop) is driver:
                    del self._drivers[loop]
                await driver.close()

    async def _answer(
        self, driver: ControllerDriver, executor: Executor, finish: ev.Finish, question: list[int],
        started: float, asked_s: float, tokens: int,
    ) -> Answer:  # fmt: skip
        closing = await driver.compute(partial(self._close, executor.prompt, question))
        driver.tell(ev.PromptAssembled(executor.number, executor.prompt.cache.tokens, closing.beyond_s))
        timing = Timing(
            ttft_s=closing.done - started,
            fetch_s=max(0.0, executor.fetched_at - started),
            decode_s=executor.decode_s,
            recompute_s=executor.recompute_s,
            link_s=closing.link_s,
            query_s=closing.query_s,
        )
        first = int(closing.logits.argmax())
        start = executor.prompt.cache.tokens + len(question)
        out = await self._generate(driver, closing.past, first, start, tokens)
        text = self._engine.detokenize(out) if self._engine.has_tokenizer else ""
        self._remember()
        predicted_s = None if executor.predicted_s is None else asked_s + executor.predicted_s
        return Answer(
            first, closing.logits.cpu(), tuple(out), text, executor.prompt, finish.decisions, finish.reason, timing,
            executor.bytes, tuple(executor.misses), predicted_s, _error(executor, finish.decisions),
        )  # fmt: skip

    def _close(self, prompt: LinkedPrompt, question: list[int]) -> _Closing:
        """Hand the prompt over to the engine and run the question, in the compute thread."""
        linking = time.monotonic()
        tokens = prompt.cache.tokens
        past = self._engine.past_key_values(prompt.cache)
        querying = time.monotonic()
        logits = self._engine.forward(past, question, tokens, logits=1)[-1].float().cpu()
        done = time.monotonic()
        with self._lock:
            expected_s = self._estimates.prefill.cost.seconds(len(question), tokens)
        return _Closing(past, logits, querying - linking, done - querying, done, done - linking - expected_s)

    async def _generate(
        self, driver: ControllerDriver, past: DynamicCache, first: int, start: int, tokens: int
    ) -> list[int]:
        """Greedy continuation, token by token, so that other loads get their turns in between."""
        out = [first]
        while len(out) < tokens:
            step = partial(self._engine.generate, past, out[-1], start + len(out) - 1, 2)
            more = (await driver.compute(step))[1:]
            if not more:
                break
            out += more
        return out

    def _remember(self) -> None:
        """Write estimates down in a thread; while that runs, later loads leave it to those after them."""
        if self._writing is None or self._writing.done():
            link, engine = self._keys
            known = engine if self._has_measured_costs else None
            self._writing = self._threads.store.submit(self._memory.remember, link, known, self.estimates)


async def _all_of(works: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """What comes of works side by side; with the first error, which is raised as it is, the others are stopped."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:
        first = errors.exceptions[0]
    else:
        return [task.result() for task in tasks]
    raise first


@dataclass(frozen=True, eq=False)
class _Closing:
    """The question's pass. done: instant of the first token. beyond_s: all that it took less the expected pass."""

    past: DynamicCache
    logits: Tensor
    link_s: float
    query_s: float
    done: float
    beyond_s: float


def _error(executor: Executor, decisions: Sequence[Decision]) -> float:
    """Mean over tokens of the errors that chunks ended with."""
    total, tokens = 0.0, 0
    for decision in decisions:
        given, chunk = executor.inputs[decision.chunk.document], decision.chunk.chunk
        total += given.tokens[chunk] * given.error(chunk, decision.level)
        tokens += given.tokens[chunk]
    return total / max(tokens, 1)


def _keys(engine: TransformersEngine, corpus: Corpus, emulated: str, backend: Backend) -> tuple[str, str]:
    """Names of the link and the engine in the file of estimates."""
    on_gpu = engine.device.type == "cuda"
    device = torch.cuda.get_device_name(engine.device) if on_gpu else f"{processor()} {os.cpu_count()}"
    meta, dtype = engine.meta, str(engine.model.dtype).removeprefix("torch.")
    kernels = "" if backend == "auto" else backend
    versions = f"torch {torch.__version__} kvwire {__version__}"
    named = engine_key(meta.model_id, meta.model_revision, device, dtype, torch.get_num_threads(), kernels, versions)
    return link_key(corpus.catalog.store.url, emulated), named


def _profile_in_use(corpus: Corpus) -> AnyProfile | None:
    """The corpus's profile, or None where it cannot be read: loads then go without it, and say so."""
    try:
        return corpus.profile()
    except (NotFoundError, CorruptError, StorageError):
        return None
