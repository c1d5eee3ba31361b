"""Loading: documents and a deadline to a linked prompt and the first token."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import torch

from kvwire import controller as ctl
from kvwire._version import __version__
from kvwire.codec import Profile, uses_triton
from kvwire.codec.prediction.text import expect_all
from kvwire.controller import events as ev
from kvwire.engines.base import Engine
from kvwire.errors import ArgumentError, KvwireError
from kvwire.runtime.answer import Answer, Timing
from kvwire.runtime.costs import measure_costs, warm_up
from kvwire.runtime.documents import LengthChangedError, Timeouts
from kvwire.runtime.estimates_file import EstimatesFile, engine_key, link_key, processor
from kvwire.runtime.executor import Executor, ExecutorSettings
from kvwire.runtime.finder import UNREADABLE, DocumentFinder
from kvwire.runtime.links import LinkPlan, Repairer, Told, plan_links
from kvwire.runtime.session import Session
from kvwire.runtime.settings import LoadSettings, controls_of
from kvwire.runtime.threads import Threads
from kvwire.runtime.warming import Warming
from kvwire.transport import EmulatedLink, LinkSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from kvwire.codec import AnyProfile, Backend
    from kvwire.controller import Objective
    from kvwire.reuse import Repaired, SchemaPrompt
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.kept import Found, RepairKeeper
    from kvwire.runtime.links import LinkReport
    from kvwire.types import Decision

T = TypeVar("T")
E = TypeVar("E", bound=Executor)
_OPEN_SHARE = 0.25
"""Share of a deadline that a header may take where the document's text is known: recomputing needs the rest."""
_OPEN_LEAST_S = 0.1
_WRITING_S = 6.0  # estimates wait for a lock for five seconds
_KEEPING_S = 60.0
_KEPT_SHARE = 0.25
"""Share of what is left of a deadline that rows of an earlier repair may still take to come."""


class Loader:
    """Answers questions over documents of a corpus; a context manager.

    It owns one event loop in a thread, one HTTP session whose connections are kept, one controller and one emulated
    link, whichever threads and event loops call it, and however many loads there are at a time. All load over the same
    link and take turns on the engine. ``close``, or the end of the ``with`` block, ends all of it; a loader that nobody
    holds any more is closed, too.
    """

    def __init__(
        self,
        engine: Engine,
        corpus: Corpus,
        *,
        variants: Sequence[Corpus] = (),
        costs: ctl.CostModel | None = None,
        link: LinkSettings | EmulatedLink | None = None,
        settings: LoadSettings | None = None,
        memory: EstimatesFile | None = None,
    ) -> None:
        """Measure costs where none are given, or warm up where they are remembered; writes nothing.

        Args:
            engine: Runs the model.
            corpus: The documents.
            variants: Further corpora, reached over the same link, that hold the same documents with other prefix
                layers; of each document the blob that suits the link and the engine is used. What they lack or bring
                late is done without.
            costs: Measured on this engine when left out, which takes a second or two, unless they are remembered; such
                that are given here, and what is learnt on top of them, are not written down.
            link: An emulated link in front of the stores: look-ups in catalogs, headers, chunks and new connections
                take its time.
            settings: How prompts are loaded.
            memory: Where estimates of links and engines live between processes; by default what ``KVWIRE_ESTIMATES``
                says, and nowhere where ``link`` is a link itself rather than its settings.
        """
        self._engine = engine
        self._corpora = (corpus, *variants)
        self._settings = chosen = settings or LoadSettings()
        on_gpu = uses_triton(chosen.backend, engine.device) and engine.device.type != "cpu"
        self._controls = controls_of(chosen, on_gpu=on_gpu)
        self._lock = threading.RLock()  # a record may ask for the estimates
        lasting = not isinstance(link, EmulatedLink)
        self._memory = memory or (EstimatesFile.of_environment() if lasting else EstimatesFile(None))
        self._keys = _keys(engine, corpus, str(link) if link and lasting else "", chosen.backend)
        self._writing: Future[None] | None = None
        self._has_measured_costs = costs is None  # by now, or by who wrote them down
        emulated = EmulatedLink.of(link) if isinstance(link, LinkSettings) else link
        threads = Threads(self._controls.workers, self._controls.decode_threads)
        self._session = Session(self._lock, threads, emulated, chosen.fetch)
        self._finder = DocumentFinder(self._session, self._corpora, chosen.entries_s)
        self._repairer = Repairer(engine)
        self._keeper = self._new_keeper(corpus) if chosen.keep_repairs else None
        self._keeping: Future[int] | None = None
        self._links: LinkPlan | None = None
        self._engine_looks = type(engine).attention_received is not Engine.attention_received
        self._warming = Warming()
        self._end = weakref.finalize(self, _end, self._session, self._warming)  # from whichever thread collects it
        _ = ctl.Controller  # imports it now, and not in the first load
        self._estimates = self._first_estimates(costs)

    def __enter__(self) -> Self:
        """Begin; nothing is started before the first load."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """End loads that are under way, and all connections and threads. What was learnt is written down first."""
        for writing, most_s in ((self._writing, _WRITING_S), (self._keeping, _KEEPING_S)):
            if writing is not None:
                with suppress(TimeoutError, CancelledError):
                    writing.result(most_s)
        self._warming.close()
        self._session.close()
        self._end.detach()

    def _first_estimates(self, costs: ctl.CostModel | None) -> ctl.Estimates:
        """What is remembered of the link, and of the engine unless its costs are given."""
        known, chosen = self._memory.recall(*self._keys), self._settings
        state = {part: value for part, value in known.state.items() if part != "engine" or costs is None}
        if costs is None:
            views = [each.over(self._session.view(each.catalog.store, over_link=False)) for each in self._corpora]
            profile = _profile_in_use(views[0])
            for variant in views[1:]:
                with suppress(KvwireError):
                    variant.profile()  # the first load will not wait for it
            if known.has_engine:
                warm_up(self._engine, profile, chosen.backend)
            else:
                costs = measure_costs(self._engine, profile, chosen.backend)
            if isinstance(profile, Profile):
                self._warming.begin(expect_all(profile))
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
        """Link the documents' caches, run the question, and return the answer. Any number of threads may call this.

        Args:
            documents: Ids in the order of the prompt.
            question: Token ids.
            deadline_s: Seconds until the first token, from now.
            objective: See ``Goal``; None: the best quality within the deadline, or, without one, the soonest first
                token.
            tokens: Length of the answer at most.
            texts: Token ids of documents, for those whose blob is lost; blobs that can be read carry their own.

        Returns:
            The first token, the answer, the linked prompt, and how it came about.

        Raises:
            NotFoundError: A document is neither in the store nor in ``texts``.
            ArgumentError: The prompt does not fit the model's window, or the loader is closed.
            OverloadedError: The first token would be late, and the settings say to refuse then.
        """
        goal = self._goal(deadline_s, objective)
        return self._session.run(self._ask(documents, question, goal, tokens, texts))

    def ask_schema(
        self,
        prompt: SchemaPrompt,
        question: Sequence[int],
        *,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """``ask`` over modules of a schema: each where the schema has it, and arguments computed in their slots.

        Nothing is repaired: modules see themselves alone, as the schema's author laid them out.

        Args:
            prompt: From ``Schema.prompt``.
            question: Token ids; they stand behind the last module.
            deadline_s: As for ``ask``.
            objective: As for ``ask``.
            tokens: Length of the answer at most.
            texts: Token ids of documents, as for ``ask``.

        Returns:
            As ``ask`` does.

        Raises:
            NotFoundError: A document is neither in the store nor in ``texts``.
            ArgumentError: A document does not fit its module, the prompt does not fit the model's window, or the
                settings ask for a repair.
            MismatchError: The model takes no gaps, or no rows inside a prompt.
        """
        from kvwire.runtime.schemas import SchemaExecutor

        goal, make = self._goal(deadline_s, objective), partial(SchemaExecutor, prompt)
        return self._session.run(self._ask(prompt.documents, question, goal, tokens, texts, make))

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
        """``ask`` for callers with an event loop of their own; one that is cancelled leaves the load."""
        goal = self._goal(deadline_s, objective)
        return await self._session.wait(self._ask(documents, question, goal, tokens, texts))

    async def _ask(
        self, documents: Sequence[str], question: Sequence[int], goal: ctl.Goal, tokens: int,
        texts: Mapping[str, Sequence[int]] | None, make: Callable[..., Executor] = Executor,
    ) -> Answer:  # fmt: skip
        """On the session's loop."""
        with self._warming.paused():
            return await self._load(documents, question, goal, tokens, texts, make)

    async def _load(
        self, documents: Sequence[str], question: Sequence[int], goal: ctl.Goal, tokens: int,
        texts: Mapping[str, Sequence[int]] | None, make: Callable[..., Executor],
    ) -> Answer:  # fmt: skip
        if not documents or not question:
            msg = "a prompt needs at least one document and a question of at least one token"
            raise ArgumentError(msg)
        looking = question if self._settings.look and self._engine_looks else ()
        async with self._filled(make, documents, len(question), goal, texts, looking) as filled:
            return await self._answer(filled, goal, list(question), tokens)

    @asynccontextmanager
    async def _filled(
        self, make: Callable[..., E], documents: Sequence[str], query_tokens: int, goal: ctl.Goal,
        texts: Mapping[str, Sequence[int]] | None, looking: Sequence[int] = (),
    ) -> AsyncIterator[Filled[E]]:  # fmt: skip
        """Find documents and run a load of them to its end. looking: see ``ExecutorSettings.question``."""
        started, deadline_s = time.monotonic(), goal.deadline_s
        driver, chosen = self._session.driver(self._new_controller), self._settings
        soon = chosen.open_s
        if deadline_s is not None:
            soon = min(soon, max(_OPEN_SHARE * deadline_s, _OPEN_LEAST_S))
        with self._lock:
            timeouts = Timeouts(soon, chosen.patience_s, self._estimates.ttfb.value)
        planning = asyncio.create_task(self._link_plan(driver, soon))
        anew = False
        while True:
            finding = [self._finder.find(driver, name, texts, timeouts, anew=anew) for name in documents]
            try:
                found = await _all_of(finding)
            except BaseException:
                planning.cancel()
                raise
            links = await planning
            settings = ExecutorSettings(
                fetch=chosen.fetch, backend=chosen.backend, timeouts=timeouts, links=links, question=looking,
                keeper=self._keeper,
            )  # fmt: skip
            async with make(self._engine, found, self._session, driver, self._finder, settings) as executor:
                asked = driver.clock() - started
                left = None if deadline_s is None else deadline_s - asked
                try:
                    finish = await executor.run(query_tokens, replace(goal, deadline_s=left))
                except LengthChangedError:
                    anew = True  # what was read in this load is not out of date, so that this happens but once
                    continue
                yield Filled(driver, executor, finish, started, asked)
                return

    def _new_controller(self) -> ctl.Controller:
        chosen = self._settings
        return ctl.Controller(self._estimates, self._controls, chosen.policy, record=chosen.record)

    async def _link_plan(self, driver: ControllerDriver, limit_s: float) -> LinkPlan:
        """What a load does about links; what was measured of the model is read once, beside the catalog."""
        if self._links is None:
            try:
                self._links = await driver.look_up(self._read_link_plan, limit_s)
            except KvwireError as error:  # the next load tries again
                return replace(self._plan_links(None, None), trouble=f"the report on links was not read: {error}")
        if self._repairer.trouble and self._links.option and not self._links.is_wanted:
            return replace(self._links, trouble=self._repairer.trouble, is_able=False)
        return self._links

    def _read_link_plan(self) -> LinkPlan:
        corpus, profile = self._corpora[0], None
        view = corpus.over(self._session.view(corpus.catalog.store, over_link=False))
        report = view.link_report()
        with suppress(KvwireError):
            profile = view.profile()
        return self._plan_links(report, profile)

    def _plan_links(self, report: LinkReport | None, profile: AnyProfile | None) -> LinkPlan:
        chosen, layers = self._settings, len(self._engine.meta.layers)
        return plan_links(chosen.repair, chosen.repair_floor, chosen.selector, report, profile, layers)

    def _goal(self, deadline_s: float | None, objective: Objective | None) -> ctl.Goal:
        chosen = self._settings
        return ctl.Goal(
            objective=objective or ("earliest" if deadline_s is None else "quality"),
            deadline_s=deadline_s,
            floor=chosen.quality_floor,
            ceiling=chosen.quality_ceiling,
            on_late=chosen.on_late,
        )

    async def _answer(self, filled: Filled[Executor], goal: ctl.Goal, question: list[int], tokens: int) -> Answer:
        driver, executor, finish, started, asked_s = filled
        due = None if goal.deadline_s is None else started + goal.deadline_s
        found = await self._kept_rows(executor, finish, due)
        close = partial(self._close, executor, question, finish, due, found)
        closing = await driver.compute(close)
        is_short = closing.repaired and (closing.repaired.is_cut or closing.repaired.kept)
        repair_s = 0.0 if is_short else closing.repair_s  # nothing is learnt of it
        driver.tell(ev.PromptAssembled(executor.number, executor.prompt.cache.tokens, closing.beyond_s, repair_s))
        if closing.trouble:
            executor.misses.append(closing.trouble)
        timing = Timing(
            ttft_s=closing.done - started,
            fetch_s=max(0.0, executor.fetched_at - started),
            decode_s=executor.decode_s,
            recompute_s=executor.recompute_s,
            link_s=closing.link_s,
            query_s=closing.query_s,
            repair_s=closing.repair_s,
            look_s=executor.look_s,
        )
        first = int(closing.logits.argmax())
        start = executor.prompt.cache.tokens + len(question)
        out = await self._generate(driver, closing.past, first, start, tokens)
        text = await driver.compute(partial(self._engine.detokenize, out)) if self._engine.has_tokenizer else ""
        self._remember()
        self._engine_looks &= executor.can_look
        self._keep(executor, closing.repaired, found, finish)
        predicted_s = None if executor.predicted_s is None else asked_s + executor.predicted_s
        return Answer(
            first, closing.logits.cpu(), tuple(out), text, executor.prompt, finish.decisions,
            goal.verdict(timing.ttft_s), timing, executor.bytes, tuple(executor.misses), predicted_s,
            _error(executor, finish.decisions), closing.repaired,
            executor.link_warning(_share(closing.repaired, finish, start - len(question))), finish.front,
        )  # fmt: skip

    def _new_keeper(self, corpus: Corpus) -> RepairKeeper:
        from kvwire.runtime.kept import RepairKeeper

        return RepairKeeper(corpus, self._session.view(corpus.catalog.store), self._settings.kept_bytes)

    async def _kept_rows(self, executor: Executor, finish: ev.Finish, due: float | None) -> Found | None:
        """What earlier repairs left of this prompt, where rows are to be computed and it may be used."""
        if not finish.repair or executor.prompt.cache.kept is not None:
            return None
        limit_s = self._settings.open_s if due is None else _KEPT_SHARE * (due - time.monotonic())
        found = await executor.kept_rows(limit_s)
        if found is None or found.kept is None:
            executor.misses += [found.trouble] if found else []
            return found
        return found if found.kept.suits(executor.documents, finish.decisions) else None

    def _keep(self, executor: Executor, repaired: Repaired | None, found: Found | None, finish: ev.Finish) -> None:
        """Keep a prompt's repaired rows in a thread; while that runs, those of later loads are not."""
        if self._keeper is None or repaired is None or not (self._keeping is None or self._keeping.done()):
            return
        from kvwire.runtime.kept import gathered

        made = gathered(executor.prompt, executor.documents, repaired, found, finish)
        if made is not None:
            self._keeping = self._session.threads.store.submit(self._keeper.keep, made)

    def _close(
        self, executor: Executor, question: list[int], finish: ev.Finish, due: float | None, found: Found | None
    ) -> _Closing:
        """Repair the prompt, hand it over to the engine and run the question, in the compute thread."""
        executor.complete()
        began, prompt, share = time.monotonic(), executor.prompt, finish.repair
        needed = share > 0 and "deviation" in executor.links.selector.needs
        told = Told(executor.texts, executor.deviations if needed else None, executor.attention)
        with self._lock:
            expected_s = self._estimates.prefill.cost.seconds(len(question), prompt.cache.tokens)
        stop = None if due is None else lambda: time.monotonic() + expected_s > due
        restore = partial(found.kept.write, prompt, finish.front) if found and found.kept else None
        repaired, trouble = self._repairer.run(
            executor.links, prompt, told, question, share, finish.front, stop, restore
        )
        linking = time.monotonic()
        tokens = prompt.cache.tokens
        past = self._engine.own_past(prompt.cache)
        querying = time.monotonic()
        logits = self._engine.forward(past, question, tokens, logits=1)[-1].float().cpu()
        done = time.monotonic()
        return _Closing(
            past, logits, querying - linking, done - querying, done, done - linking - expected_s,
            linking - began if repaired else 0.0, repaired, trouble,
        )  # fmt: skip

    async def _generate(self, driver: ControllerDriver, past: Any, first: int, start: int, tokens: int) -> list[int]:  # noqa: ANN401
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
            self._writing = self._session.threads.store.submit(self._memory.remember, link, known, self.estimates)


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


class Filled(NamedTuple, Generic[E]):
    """A load that ended: by whom, when it was begun, and how long finding its documents took."""

    driver: ControllerDriver
    executor: E
    finish: ev.Finish
    started: float
    asked_s: float


@dataclass(frozen=True, eq=False)
class _Closing:
    """What follows the last chunk. done: instant of the first token.

    beyond_s: all that it took less the repair and the expected pass. trouble: why nothing was repaired.
    """

    past: Any
    logits: Tensor
    link_s: float
    query_s: float
    done: float
    beyond_s: float
    repair_s: float
    repaired: Repaired | None
    trouble: str


def _share(repaired: Repaired | None, finish: ev.Finish, tokens: int) -> float:
    """Share of the prompt's rows that was computed anew, 1 where all of it was computed behind each other."""
    if finish.front >= tokens:
        return 1.0
    if repaired is None or not repaired.is_cut:
        return finish.repair if repaired else 0.0
    return 0.0  # what was measured of a share is not measured of its beginning


def _error(executor: Executor, decisions: Sequence[Decision]) -> float:
    """Mean over tokens of the errors that chunks ended with."""
    total, tokens = 0.0, 0
    for decision in decisions:
        given, chunk = executor.inputs[decision.chunk.document], decision.chunk.chunk
        total += given.tokens[chunk] * given.error(chunk, decision.level)
        tokens += given.tokens[chunk]
    return total / max(tokens, 1)


def _keys(engine: Engine, corpus: Corpus, emulated: str, backend: Backend) -> tuple[str, str]:
    """Names of the link and the engine in the file of estimates."""
    device = engine.device_name or f"{processor()} {os.cpu_count()}"
    meta, dtype = engine.meta, str(engine.dtype).removeprefix("torch.")
    kernels = "" if backend == "auto" else backend
    versions = f"torch {torch.__version__} kvwire {__version__}"
    named = engine_key(meta.model_id, meta.model_revision, device, dtype, torch.get_num_threads(), kernels, versions)
    return link_key(corpus.catalog.store.url, emulated), named


def _end(session: Session, warming: Warming) -> None:
    warming.close()
    session.close(wait=False)


def _profile_in_use(corpus: Corpus) -> AnyProfile | None:
    """The corpus's profile, or None where it cannot be read: loads then go without it, and say so."""
    try:
        return corpus.profile()
    except UNREADABLE:
        return None
