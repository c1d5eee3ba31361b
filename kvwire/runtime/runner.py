"""What the loads of one loader share, from its opening to its end."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

from kvwire import controller as ctl
from kvwire.codec import Profile, uses_triton
from kvwire.codec.prediction.text import expect_all
from kvwire.errors import ArgumentError, AuthError, KvwireError
from kvwire.runtime.answer import Asked, check_length
from kvwire.runtime.closing import AnswerStage
from kvwire.runtime.costs import joins, measure_costs, warm_up
from kvwire.runtime.document import FoundDocument, Timeouts
from kvwire.runtime.estimates_file import EstimatesFile, keys_of
from kvwire.runtime.find import DocumentFinder, profile_in_use
from kvwire.runtime.layouts import PlainLayout, laid_out
from kvwire.runtime.links import LinkPlanner
from kvwire.runtime.load import loading
from kvwire.runtime.request import LoadRequest, PartialLoad
from kvwire.runtime.session import Session
from kvwire.runtime.settings import LoadSettings, controls_of
from kvwire.runtime.threads import Threads, Warming
from kvwire.store import CatalogEntry, LastUses
from kvwire.transport import EmulatedLink, LinkSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future
    from contextlib import AbstractAsyncContextManager

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.reuse import SchemaPrompt
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.load import Load
    from kvwire.runtime.prompt_request import Begun, PromptRequest
    from kvwire.runtime.prompter import Prompter
    from kvwire.runtime.similar import EditPlan, ReuseCosts

_ANSWER_TOKENS = 64  # memory reserved for an answer; the cache moves once if it gets longer
_LEAST_WORTH_S = 0.25  # least time for donors, however little they should save
_WRITING_S = 6.0  # longer than the wait for the estimates' lock, 5 s
_PROFILE_WAITS = 4.0
"""Longest wait for a profile when a loader opens, in multiples of ``LoadSettings.open_s``, which is for a header."""
_log = logging.getLogger("kvwire.runtime")


class LoadRunner:
    """Runs loads over one session, with one controller and one set of estimates.

    Attributes:
        engine: Runs the model.
        corpora: The documents, and their variants.
        settings: Of all loads.
        controls: The controller's settings.
        read_level: Finest level of profiles to read at first; None: all.
        session: Event loop, connections and threads.
        finder: Finds documents.
        warming: Prepares for later loads while none is running.
        closer: Answers on filled prompts.
        keys: Names of link and engine in the file of estimates.
    """

    def __init__(
        self, engine: Engine, corpora: Sequence[Corpus], settings: LoadSettings, costs: ctl.CostModel | None,
        link: LinkSettings | EmulatedLink | None, memory: EstimatesFile | None,
    ) -> None:  # fmt: skip
        """Measure costs if none are given or remembered, else warm up."""
        self.engine, self.corpora, self.settings = engine, corpora, settings
        on_gpu = uses_triton(settings.backend, engine.device) and engine.device.type != "cpu"
        self.controls = controls_of(settings, on_gpu=on_gpu, interrupts=engine.can_stop)
        ceiling = settings.quality_ceiling  # profiles are read up to it; a decoder on a GPU takes all rows
        self.read_level = None if ceiling is None or on_gpu else max(ceiling, settings.quality_floor or 0)
        self._lock = threading.RLock()  # reentrant: a record may read the estimates
        corpus, lasting = corpora[0], not isinstance(link, EmulatedLink)
        self._memory = memory or (EstimatesFile.of_environment() if lasting else EstimatesFile(None))
        self._beside = min(self.controls.decode_threads, self.controls.decode_batch)
        emulated_name = str(link) if link and lasting else ""
        self.keys = keys_of(engine, corpus, emulated_name, settings.backend, self._beside)
        self.writing: Future[None] | None = None
        self._uses, self._used = LastUses(corpus.catalog, corpus.config), list[CatalogEntry]()  # to be marked
        self._has_measured_costs = costs is None  # measured now or earlier, not given
        emulated = EmulatedLink.of(link) if isinstance(link, LinkSettings) else link
        threads = Threads(self.controls.workers, self.controls.decode_threads)
        self.session = Session(self._lock, threads, emulated, settings.fetch)
        self.finder = DocumentFinder(self.session, corpora, settings.entries_s, self.read_level)
        self.warming = Warming()
        self._looks = engine.can_look
        _ = ctl.Controller  # imports it now, not in the first load
        try:
            self._estimates = self._first_estimates(costs)
        except BaseException:  # reads may have started threads
            self.end()
            raise
        self._planner = LinkPlanner(engine, corpus, self.session, settings, self.read_level)
        self.closer = AnswerStage(engine, corpus, self.session, settings, self._estimates, self._planner)

    def end(self) -> None:
        """End all without waiting, in whatever thread garbage collection runs."""
        if self.session.process.is_here:
            self.warming.close()
            self.session.close(wait=False)

    def close(self) -> None:
        """End running loads, connections and threads, after writing estimates."""
        if not self.session.process.is_here:
            return
        for _ in range(2):  # the last write, and then what was gathered while it ran
            if self.writing is not None:
                try:
                    self.writing.result(_WRITING_S)
                except TimeoutError:  # the store hangs: what was gathered is not written, either
                    break
                except CancelledError:
                    pass
            if self._used:
                self.remember()
        self.closer.wait()
        if "prompter" in vars(self):
            self.prompter.wait()
        self.warming.close()
        self.session.close()
        self._used.clear()  # the threads that would write it have ended

    def _first_estimates(self, costs: ctl.CostModel | None) -> ctl.Estimates:
        """Remembered estimates of the link, and of the engine unless its costs are given."""
        known, chosen = self._memory.recall(*self.keys), self.settings
        state = {part: value for part, value in known.state.items() if part != "engine" or costs is None}
        if costs is None:
            with self.warming.paused():  # its steps would slow what is measured
                profile, is_known = self._profile_in_use()
                if known.has_engine:
                    warm_up(self.engine, profile, chosen.backend)
                else:
                    costs = measure_costs(self.engine, profile, chosen.backend, self._beside)
                    self._has_measured_costs = is_known  # others are this loader's alone
        priors = (chosen.bandwidth_prior, chosen.ttfb_prior_s)
        estimates = ctl.Estimates.of_state(state, costs, *priors, age_s=known.age_s)
        # Remembered costs were measured on such an engine: a process that asks once need not check again.
        if estimates.joined and not (self.engine.can_join and (costs is None or joins(self.engine))):
            estimates.use_joined(None)
        return estimates

    def _profile_in_use(self) -> tuple[AnyProfile | None, bool]:
        """The profile, and whether it was read in time; variants' are read, too, so that the first load waits for none.

        A read that is late goes on, and the loads that need it share it.
        """
        chosen, warming = self.settings, self.warming
        view = partial(self.session.view, over_link=False, silence_s=chosen.open_s)  # loads can do without
        views = [each.over(view(each.catalog.store)) for each in self.corpora]
        submit = self.session.threads.blocking.submit
        reads = [submit(profile_in_use, each, self.read_level) for each in views]

        def prepare(read: Future[tuple[AnyProfile | None, bool]]) -> None:
            if not read.cancelled() and not read.exception() and isinstance(profile := read.result()[0], Profile):
                warming.begin(expect_all(profile))

        limit_s = _PROFILE_WAITS * chosen.open_s
        wait(reads, limit_s)
        reads[0].add_done_callback(prepare)
        if reads[0].done():
            return reads[0].result()
        _log.warning("the profile was not read within %.3g s: the loader opens without it", limit_s)
        return None, False

    def estimates(self) -> ctl.Estimates:
        """A copy of the current estimates of link and engine."""
        self.session.process.check()
        with self._lock:
            return self._estimates.copy()

    def timeouts(self, deadline_s: float | None) -> Timeouts:
        """Longest waits of a load, counted from its beginning."""
        with self._lock:
            extra = self._estimates.ttfb.value
        return Timeouts.of(self.settings.open_s, self.settings.patience_s, deadline_s, extra)

    def new_controller(self) -> ctl.Controller:
        """A controller for all loads of the session."""
        return ctl.Controller(self._estimates, self.controls, self.settings.policy, record=self.settings.record)

    def reuse_costs(self) -> ReuseCosts:
        """What reading and computing take, by the present estimates."""
        from kvwire.runtime.similar import ReuseCosts

        known, controls = self.estimates(), self.controls
        costs = known.costs()
        decode = costs.decode.shared(controls.decode_batch, controls.decode_threads)
        return ReuseCosts(replace(costs, decode=decode), known.bandwidth.value, known.ttfb.value)

    def load(self, request: LoadRequest) -> AbstractAsyncContextManager[Load]:
        """One load, with its prompt filled; on the session's loop."""
        driver = self.session.driver(self.new_controller)
        return loading(self.engine, self.session, driver, self.finder, self._planner, request)

    def remember(self, load: Load | None = None) -> None:
        """Write estimates and last uses down in a thread; while that runs, later loads leave it to those after them."""
        documents = load.work.documents.values() if load else ()
        self._used += self._uses.wanted(each.found.entry for each in documents if each.found.entry)
        if self.writing is None or self.writing.done():
            due, self._used = self._used, []
            self.writing = self.session.threads.blocking.submit(self._write_down, self.estimates(), due)

    def _write_down(self, estimates: ctl.Estimates, used: Sequence[CatalogEntry]) -> None:
        link, engine = self.keys
        self._memory.remember(link, engine if self._has_measured_costs else None, estimates)
        self._uses.mark(used)

    # Ways to ask.

    async def ask(
        self, documents: Sequence[str | FoundDocument], asked: Asked, goal: ctl.Goal, tokens: int,
        texts: Mapping[str, Sequence[int]] | None, schema: SchemaPrompt | None = None, begun: Begun | None = None,
    ) -> Answer:  # fmt: skip
        """Load documents, run the question and generate; on the session's loop."""
        check_length(tokens)
        if isinstance(documents, str):
            raise ArgumentError(f"documents are a sequence of names, got one text: [{documents!r}]?")
        documents = tuple(documents)  # an iterator would be empty the second time
        if wrong := [each for each in documents if not isinstance(each, (str, FoundDocument))]:
            raise ArgumentError(f"documents are given by their names, which are texts, got {wrong[0]!r}")
        with self.warming.paused():
            layout, question, texts = laid_out(self.engine, self.settings, asked, texts, schema)
            if not documents or not question:
                raise ArgumentError("a prompt needs at least one document and a question of at least one token")
            request = LoadRequest(
                documents=documents, layout=layout, settings=self.settings, goal=goal, texts=texts,
                timeouts=self.timeouts(goal.deadline_s), started=begun.request.started if begun else time.monotonic(),
                question=question, query_tokens=len(question), keeper=self.closer.keeper,
                looks=self.settings.look and self._looks and (begun is None or begun.is_whole),
                room_tokens=len(question) + min(tokens, _ANSWER_TOKENS),
                wanted=begun.wanted if begun else self.settings.first_tokens,
                cuts=begun is None and self.settings.first_tokens is not None,
            )  # fmt: skip
            async with self.load(request) as load:
                if begun:
                    load.cut(begun.wanted)
                closing = await self.closer.close(load)
                answer = await self.closer.answer(load, closing, tokens, asked.stop, is_prompt=begun is not None)
                if begun:
                    answer = await self.prompter.finish(begun, answer, load, closing.past)
                self._looks &= load.work.can_look
                self.remember(load)
                if asked.chat is None:
                    return answer
                apart = await asyncio.to_thread(asked.chat.apart, self.engine, load.texts)
                return replace(answer, misses=(*answer.misses, apart)) if apart else answer

    async def ask_begun(
        self, begin: Callable[[Prompter, PromptRequest], Awaitable[Begun]], goal: ctl.Goal, tokens: int
    ) -> Answer:
        """Answer a prompt whose beginning the store may have; on the session's loop."""
        if self.settings.system or self.settings.layout or self.settings.first_tokens:
            msg = "ask_prompt and converse take no system text, layout or first_tokens: leave these settings out"
            raise ArgumentError(msg)
        check_length(tokens)
        from kvwire.runtime.prompt_request import PromptRequest  # most loads name their documents

        begun = await begin(self.prompter, PromptRequest(goal, self.timeouts(goal.deadline_s)))
        if begun.search is not None and begun.search.plan is not None:
            try:
                return await self._ask_edited(begun, begun.search.plan, tokens)
            except AuthError:
                raise
            except KvwireError as error:
                begun.request.misses.append(f"donors were of no use, so the prompt was computed: {error}")
        return await self.ask([begun.found], Asked(begun.rest, (), begun.stop), goal, tokens, None, begun=begun)

    async def _ask_edited(self, begun: Begun, plan: EditPlan, tokens: int) -> Answer:
        """Build a prompt from its donors, then run its last tokens."""
        asked = begun.request
        with self.warming.paused():
            made, found = await self.prompter.editing(begun, plan, min(tokens, _ANSWER_TOKENS))
            request = LoadRequest(
                documents=found, layout=PlainLayout(self.engine, linked=False), settings=self.settings,
                goal=asked.goal, timeouts=asked.timeouts, started=asked.started, question=made.rest,
                query_tokens=made.computed, partial=PartialLoad(worth_s=max(plan.rival_s, _LEAST_WORTH_S)),
            )  # fmt: skip
            async with self.load(request) as load:
                closing = await load.driver.compute(partial(made.close, load, self._estimates))
                answer = await self.closer.answer(load, closing, tokens, begun.stop, is_prompt=True)
                self.remember(load)
                return self.prompter.finish_edited(begun, made.told(answer), load)

    @property
    def unsaved(self) -> int:
        """How many prompts could not be kept in the background."""
        return self.prompter.unsaved if "prompter" in vars(self) else 0

    @cached_property
    def prompter(self) -> Prompter:
        """Finds what the store has of prompts."""
        from kvwire.runtime.prompter import Prompter

        parts = self.engine, self.corpora[0], self.session, self.finder
        return Prompter(*parts, self.settings, self.reuse_costs)
