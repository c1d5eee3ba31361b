"""Loading: from documents and a deadline to a linked prompt and the first token."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import weakref
from concurrent.futures import CancelledError, wait
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from kvwire import controller as ctl
from kvwire.codec import Profile, uses_triton
from kvwire.codec.prediction.text import expect_all
from kvwire.errors import ArgumentError, AuthError, KvwireError, StorageError
from kvwire.runtime.answer import Asked, ChatAsked, check_length
from kvwire.runtime.closing import AnswerStage, CompletedLoad
from kvwire.runtime.costs import joins, measure_costs, warm_up
from kvwire.runtime.document import LEAST_PATIENCE_S, FoundDocument, Timeouts
from kvwire.runtime.estimates_file import EstimatesFile, keys_of
from kvwire.runtime.find import DocumentFinder, all_of, profile_in_use
from kvwire.runtime.links import UNREPAIRED
from kvwire.runtime.load import Load
from kvwire.runtime.prompt import LinksLayout, PlainLayout, SchemaLayout
from kvwire.runtime.request import LoadRequest
from kvwire.runtime.session import Session
from kvwire.runtime.settings import LoadSettings, controls_of, planned, read_plan
from kvwire.runtime.threads import Threads, Warming
from kvwire.store import CatalogEntry, LastUses
from kvwire.transport import EmulatedLink, LinkSettings
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from concurrent.futures import Future

    from kvwire.codec import AnyProfile
    from kvwire.controller import Objective
    from kvwire.engines.base import Engine
    from kvwire.reuse import SchemaPrompt
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.prompt import Layout
    from kvwire.runtime.prompted import Begun, Prompter, ReuseMode, Reusing
    from kvwire.runtime.similar import EditPlan, ReuseCosts, Search
    from kvwire.types import Chat

T = TypeVar("T")
_ANSWER_TOKENS = 64  # memory reserved for an answer; the cache moves once if it gets longer
_LEAST_WORTH_S = 0.25  # least time for donors, however little they should save
_WRITING_S = 6.0  # longer than the wait for the estimates' lock, 5 s
_PROFILE_WAITS = 4.0
"""Longest wait for a profile when a loader opens, in multiples of ``LoadSettings.open_s``, which is for a header."""
_log = logging.getLogger("kvwire.runtime")


class Loader:
    """Answers questions over documents of a corpus; a context manager.

    It owns one event loop in a thread, one HTTP session with its connections, one controller and at most one emulated
    link, for all calling threads and event loops. Its loads share the link and take turns on the engine. ``close``, or
    the end of the ``with`` block, ends all of it; so does garbage collection. A forked process needs its own loader.
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
        """Measure costs if none are given or remembered, else warm up; writes nothing.

        Args:
            engine: Runs the model.
            corpus: The documents.
            variants: Further corpora over the same link with the same documents and other prefix layers; for each
                document, the blob that suits link and engine is used. Missing and late variants are ignored.
            costs: None: remembered, or measured on this engine in about a second. Given costs, and what is learnt on
                top of them, are not remembered.
            link: An emulated link in front of the stores, for look-ups in catalogs, headers, chunks and new
                connections.
            settings: Settings of all loads.
            memory: File of estimates of links and engines; None: from ``KVWIRE_ESTIMATES``, or no file if ``link`` is a
                link itself, not settings.
        """
        self._engine = engine
        self._corpora = (corpus, *variants)
        self._settings = chosen = settings or LoadSettings()
        on_gpu = uses_triton(chosen.backend, engine.device) and engine.device.type != "cpu"
        self._controls = controls_of(chosen, on_gpu=on_gpu, interrupts=engine.can_stop)
        ceiling = chosen.quality_ceiling  # profiles are read up to it; a decoder on a GPU takes all rows
        self._read_level = None if ceiling is None or on_gpu else max(ceiling, chosen.quality_floor or 0)
        self._lock = threading.RLock()  # reentrant: a record may read the estimates
        lasting = not isinstance(link, EmulatedLink)
        self._memory = memory or (EstimatesFile.of_environment() if lasting else EstimatesFile(None))
        self._beside = min(self._controls.decode_threads, self._controls.decode_batch)
        emulated_name = str(link) if link and lasting else ""
        self._keys = keys_of(engine, corpus, emulated_name, chosen.backend, self._beside)
        self._writing: Future[None] | None = None
        self._uses, self._used = LastUses(corpus.catalog, corpus.config), list[CatalogEntry]()  # to be marked
        self._has_measured_costs = costs is None  # measured now or earlier, not given
        emulated = EmulatedLink.of(link) if isinstance(link, LinkSettings) else link
        threads = Threads(self._controls.workers, self._controls.decode_threads)
        self._session = Session(self._lock, threads, emulated, chosen.fetch)
        self._finder = DocumentFinder(self._session, self._corpora, chosen.entries_s, self._read_level)
        self._links: LinkPlan | None = None
        self._engine_looks = engine.can_look
        self._warming = Warming()
        self._end = weakref.finalize(self, _end, self._session, self._warming)  # runs in any thread
        _ = ctl.Controller  # imports it now, not in the first load
        self._estimates = self._first_estimates(costs)
        self._closer = AnswerStage(engine, corpus, self._session, chosen, self._estimates)
        self._prompter: Prompter | None = None

    def __enter__(self) -> Self:
        """Enter the context; nothing starts before the first load."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __reduce__(self) -> str:
        """Refuse pickling: threads and connections stay in their process."""
        raise ArgumentError("a loader cannot be sent to another process: open the engine, the store and a loader there")

    def close(self) -> None:
        """End running loads, connections and threads, after writing estimates.

        Does nothing in a process forked from the loader's.
        """
        if not self._session.process.is_here:
            return
        for _ in range(2):  # the last write, and then what was gathered while it ran
            if self._writing is not None:
                with suppress(TimeoutError, CancelledError):
                    self._writing.result(_WRITING_S)
            if self._used:
                self._remember()
        self._closer.close()
        self._warming.close()
        self._session.close()
        self._end.detach()

    def _first_estimates(self, costs: ctl.CostModel | None) -> ctl.Estimates:
        """Remembered estimates of the link, and of the engine unless its costs are given."""
        known, chosen = self._memory.recall(*self._keys), self._settings
        state = {part: value for part, value in known.state.items() if part != "engine" or costs is None}
        if costs is None:
            profile = self._profile_in_use()
            if known.has_engine:
                warm_up(self._engine, profile, chosen.backend)
            else:
                costs = measure_costs(self._engine, profile, chosen.backend, self._beside)
        priors = (chosen.bandwidth_prior, chosen.ttfb_prior_s)
        estimates = ctl.Estimates.of_state(state, costs, *priors, age_s=known.age_s)
        # Remembered costs were measured on such an engine: a process that asks once need not check again.
        if estimates.joined and not (self._engine.can_join and (costs is None or joins(self._engine))):
            estimates.use_joined(None)
        return estimates

    def _profile_in_use(self) -> AnyProfile | None:
        """The profile, and those of variants, so that the first load does not wait for them; None if it is late.

        A read that is late goes on, and the loads that need it share it.
        """
        chosen, warming = self._settings, self._warming
        view = partial(self._session.view, over_link=False, silence_s=chosen.open_s)  # loads can do without
        views = [each.over(view(each.catalog.store)) for each in self._corpora]
        submit = self._session.threads.blocking.submit
        reads = [submit(profile_in_use, each, self._read_level) for each in views]

        def prepare(read: Future[AnyProfile | None]) -> None:
            if not read.cancelled() and not read.exception() and isinstance(profile := read.result(), Profile):
                warming.begin(expect_all(profile))

        limit_s = _PROFILE_WAITS * chosen.open_s
        wait(reads, limit_s)
        if reads[0].done():
            profile = reads[0].result()
        else:
            _log.warning("the profile was not read within %.3g s: costs are measured without it", limit_s)
            profile = None
        reads[0].add_done_callback(prepare)
        return profile

    @property
    def costs(self) -> ctl.CostModel:
        """Current estimates of computing costs on this engine."""
        return self.estimates.costs()

    @property
    def estimates(self) -> ctl.Estimates:
        """A copy of the current estimates of link and engine."""
        self._session.process.check()
        with self._lock:
            return self._estimates.copy()

    def ask(
        self,
        documents: Sequence[str],
        question: Sequence[int] | str,
        *,
        chat: Chat | None = None,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """Link the documents' caches, run the question, and return the answer. Thread-safe.

        Args:
            documents: Ids in the order of the prompt.
            question: Token ids or a text after the documents. In a chat a text: the user's.
            chat: Turns for the model's chat template; the documents are part of the user's turn, each as encoded. The
                answer ends with the assistant's turn. None: no template.
            deadline_s: Seconds until the first token, from now.
            objective: See ``Goal``; None: the best quality within the deadline or, without one, the earliest first
                token.
            tokens: Longest answer.
            texts: Token ids of documents whose blob is lost; other blobs carry their own.

        Returns:
            The first token, the answer, the linked prompt, and how it came about.

        Raises:
            NotFoundError: A document is neither in the store nor in ``texts``, or the model has no chat template.
            ArgumentError: The prompt does not fit the model's window, or the loader is closed, or of another process;
                or the template refuses the chat.
            OverloadedError: The first token would be late, and the settings say to refuse then.
            LinkBoundError: Links lose more than the settings allow, or their loss was not measured.
        """
        goal, asked = self._goal(deadline_s, objective), self._asked(question, chat)
        return self._session.run(self._ask(documents, asked, goal, tokens, texts))

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
        """``ask`` over modules of a schema, at their positions, with arguments computed in their slots.

        Nothing is repaired: modules see only themselves, as their schema lays them out.

        Args:
            prompt: From ``Schema.prompt``.
            question: Token ids after the last module.
            deadline_s: As for ``ask``.
            objective: As for ``ask``.
            tokens: Longest answer.
            texts: Token ids of documents, as for ``ask``.

        Returns:
            As ``ask`` does.

        Raises:
            NotFoundError: A document is neither in the store nor in ``texts``.
            ArgumentError: A document does not fit its module, the prompt does not fit the model's window, or the
                settings ask for a repair.
            MismatchError: The model supports no gaps, or no rows inside a prompt.
        """
        goal, asked = self._goal(deadline_s, objective), Asked(plain_token_ids(question), ())
        return self._session.run(self._ask(prompt.documents, asked, goal, tokens, texts, prompt))

    def ask_prompt(
        self,
        token_ids: Sequence[int],
        *,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        save: bool = False,
        reuse: ReuseMode | None = None,
        donors: Sequence[str] = (),
    ) -> Answer:
        """Answer a prompt: load its stored part, and compute the rest.

        The stored part is the prompt's longest stored beginning, found by the index ``kvwire`` (``encode --index
        kvwire``), or runs of tokens from *donors*, documents similar to the prompt, found by the index ``donors``. Rows
        of donors were computed in another context, so the answer may differ a little.

        Args:
            token_ids: The whole prompt, with or without BOS.
            deadline_s: As for ``ask``.
            objective: As for ``ask``.
            tokens: Longest answer.
            save: Store prompt and answer as a document, named by its content, for prompts that begin with them, and
                with ``auto`` and ``donors`` for similar ones. Prompts made from donors are not saved.
            reuse: ``exact``: only a stored beginning; ``auto``: also donors, if they save a quarter of the time;
                ``donors``: donors in any case; ``none``: compute all. None: ``auto`` for models that ``kvwire
                check-model --edits`` found safe, else ``exact``.
            donors: Names of the donors; empty: search for them.

        Returns:
            As ``ask`` does; ``Answer.reused`` tells where the tokens came from, and what was saved.

        Raises:
            ArgumentError: The prompt is empty, too long, or has tokens outside the vocabulary; or the settings have a
                system text or layout.
            OverloadedError: As for ``ask``.
        """
        goal, reusing = self._goal(deadline_s, objective), self._reusing(reuse, donors)
        return self._session.run(self._ask_prompt(token_ids, goal, reusing, tokens, save=save))

    async def ask_prompt_async(
        self,
        token_ids: Sequence[int],
        *,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        save: bool = False,
        reuse: ReuseMode | None = None,
        donors: Sequence[str] = (),
    ) -> Answer:
        """``ask_prompt`` for callers with an event loop of their own; cancelling it abandons the load."""
        goal, reusing = self._goal(deadline_s, objective), self._reusing(reuse, donors)
        return await self._session.wait(self._ask_prompt(token_ids, goal, reusing, tokens, save=save))

    async def _ask_prompt(
        self, token_ids: Sequence[int], goal: ctl.Goal, reusing: Reusing, tokens: int, *, save: bool
    ) -> Answer:
        return await self._ask_begun(
            lambda made, times: made.prompt(token_ids, times, goal, reusing, save=save), goal, tokens
        )

    def plan_prompt(
        self, token_ids: Sequence[int], *, reuse: ReuseMode | None = None, donors: Sequence[str] = (),
        link: LinkSettings | None = None,
    ) -> Search:  # fmt: skip
        """Plan how ``ask_prompt`` would answer, and at which cost; reads only texts and headers.

        Args:
            token_ids: The whole prompt, with or without BOS.
            reuse: As for ``ask_prompt``.
            donors: As for ``ask_prompt``.
            link: Plan for this link; None: the measured one.

        Returns:
            The plan, and the donors considered.

        Raises:
            ArgumentError: As for ``ask_prompt``.
            StorageError: The store fails.
        """
        goal, reusing = self._goal(None, None), self._reusing(reuse, donors)
        times, costs = self._timeouts(None), self._reuse_costs()
        if link is not None:
            costs = replace(costs, bandwidth=link.bandwidth_bytes_s, ttfb_s=link.rtt_s)

        async def search() -> Search:
            return await self._prompts().search(token_ids, times, goal, reusing, costs)

        return self._session.run(search())

    def _reusing(self, reuse: ReuseMode | None, donors: Sequence[str]) -> Reusing:
        from kvwire.runtime.prompted import Reusing

        if reuse not in {None, "auto", "exact", "donors", "none"}:
            raise ArgumentError(f"reuse is auto, exact, donors or none, got {reuse!r}")
        if donors and reuse in {"exact", "none"}:
            raise ArgumentError(f"donors are named and not to be used: leave out reuse={reuse!r}")
        return Reusing(reuse or ("donors" if donors else ""), tuple(donors))

    def converse(
        self,
        session: str,
        question: Sequence[int] | str,
        *,
        chat: Chat | None = None,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 64,
    ) -> Answer:
        """Answer the next turn of a session, and save it; only new tokens are computed.

        Args:
            session: Its name; an unknown one begins a session.
            question: The user's new text.
            chat: Settings of the chat template; the system text is the first turn's.
            deadline_s: As for ``ask``.
            objective: As for ``ask``.
            tokens: Longest answer.

        Returns:
            As ``ask_prompt`` does. If a turn could not be saved, ``Answer.misses`` says so, and it is not part of the
            session.

        Raises:
            ArgumentError: There is no question, the session is too long for the model, or its name is invalid; or as
                for ``ask_prompt``.
            NotFoundError: The model has no chat template.
            CorruptError: The session's entry in the store is damaged.
            OverloadedError: As for ``ask``.
        """
        goal = self._goal(deadline_s, objective)
        return self._session.run(self._converse(session, question, chat, goal, tokens))

    async def converse_async(
        self,
        session: str,
        question: Sequence[int] | str,
        *,
        chat: Chat | None = None,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 64,
    ) -> Answer:
        """``converse`` for callers with an event loop of their own; cancelling abandons a turn not yet being saved."""
        goal = self._goal(deadline_s, objective)
        return await self._session.wait(self._converse(session, question, chat, goal, tokens))

    async def _converse(
        self, session: str, question: Sequence[int] | str, chat: Chat | None, goal: ctl.Goal, tokens: int
    ) -> Answer:
        return await self._ask_begun(lambda made, times: made.turn(session, question, chat, times), goal, tokens)

    async def _ask_begun(
        self, begin: Callable[[Prompter, Timeouts], Awaitable[Begun]], goal: ctl.Goal, tokens: int
    ) -> Answer:
        if self._settings.system or self._settings.layout or self._settings.first_tokens:
            msg = "ask_prompt and converse take no system text, layout or first_tokens: leave these settings out"
            raise ArgumentError(msg)
        check_length(tokens)
        timeouts = self._timeouts(goal.deadline_s)
        begun = await begin(self._prompts(), timeouts)
        if begun.search is not None and begun.search.plan is not None:
            try:
                return await self._ask_edited(begun, begun.search.plan, goal, timeouts, tokens)
            except AuthError:
                raise
            except KvwireError as error:
                begun.misses.append(f"donors were of no use, so the prompt was computed: {error}")
        return await self._ask([begun.found], Asked(begun.rest, (), begun.stop), goal, tokens, None, begun=begun)

    def _prompts(self) -> Prompter:
        if self._prompter is None:
            from kvwire.runtime.prompted import Prompter  # most loads name their documents

            parts = self._engine, self._corpora[0], self._session, self._finder
            self._prompter = Prompter(*parts, self._settings, self._reuse_costs)
        return self._prompter

    def _reuse_costs(self) -> ReuseCosts:
        from kvwire.runtime.similar import ReuseCosts

        with self._lock:
            known, controls = self._estimates, self._controls
            costs = known.costs()
            decode = costs.decode.shared(controls.decode_batch, controls.decode_threads)
            return ReuseCosts(replace(costs, decode=decode), known.bandwidth.value, known.ttfb.value)

    async def _ask_edited(
        self, begun: Begun, plan: EditPlan, goal: ctl.Goal, timeouts: Timeouts, tokens: int
    ) -> Answer:  # fmt: skip
        """Build a prompt from its donors, then run its last tokens."""
        from kvwire.runtime.edited import EditLayout

        with self._warming.paused():
            made, found = await begun.prompter.editing(begun, plan, goal, min(tokens, _ANSWER_TOKENS), timeouts)
            chosen, worth_s = self._settings, max(plan.rival_s, _LEAST_WORTH_S)
            request = LoadRequest(
                layout=EditLayout(self._engine), fetch=chosen.fetch, backend=chosen.backend, goal=goal,
                timeouts=timeouts, query_tokens=made.computed, is_partial=True, worth_s=worth_s,
            )  # fmt: skip
            async with self._filled(found, None, request, begun.started) as filled:
                filled.load.links = UNREPAIRED
                answer = await self._closer.answer(filled, goal, list(made.rest), tokens, begun.stop, edit=made.close)
                self._remember(filled.load)
                return made.told(answer, begun.told(made))

    async def ask_async(
        self,
        documents: Sequence[str],
        question: Sequence[int] | str,
        *,
        chat: Chat | None = None,
        deadline_s: float | None = None,
        objective: Objective | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """``ask`` for callers with an event loop of their own; cancelling it abandons the load."""
        goal, asked = self._goal(deadline_s, objective), self._asked(question, chat)
        return await self._session.wait(self._ask(documents, asked, goal, tokens, texts))

    def _asked(self, question: Sequence[int] | str, chat: Chat | None) -> Asked:
        """Tokens around the documents."""
        chosen = self._settings
        if isinstance(question, str):
            if chat is None:
                return Asked(self._engine.tokenize(question, place="last", trust="frame"), chosen.system)
        elif chat is not None:
            raise ArgumentError("in a chat the question is a text: the template is read together with it")
        else:
            return Asked(plain_token_ids(question), chosen.system)
        if chosen.system or chosen.layout:
            raise ArgumentError("a chat's system text is Chat(system=...): leave out the settings' system and layout")
        rendered = self._engine.render_chat(chat, question)
        return Asked(rendered.tail, rendered.head, rendered.stop, ChatAsked(chat, question, rendered))

    async def _ask(
        self, documents: Sequence[str | FoundDocument], asked: Asked, goal: ctl.Goal, tokens: int,
        texts: Mapping[str, Sequence[int]] | None, schema: SchemaPrompt | None = None, begun: Begun | None = None,
    ) -> Answer:  # fmt: skip
        """Load documents, run the question and generate; on the session's loop."""
        check_length(tokens)
        if isinstance(documents, str):
            raise ArgumentError(f"documents are a sequence of names, got one text: [{documents!r}]?")
        if wrong := [each for each in documents if not isinstance(each, (str, FoundDocument))]:
            raise ArgumentError(f"documents are given by their names, which are texts, got {wrong[0]!r}")
        with self._warming.paused():
            layout, question, texts = self._laid_out(asked, texts, schema)
            if not documents or not question:
                raise ArgumentError("a prompt needs at least one document and a question of at least one token")
            looks = self._settings.look and self._engine_looks and (begun is None or begun.is_whole)
            request = LoadRequest(
                layout=layout, fetch=self._settings.fetch, backend=self._settings.backend, goal=goal,
                timeouts=self._timeouts(goal.deadline_s), query_tokens=len(question),
                question=question if looks else (),
                keeper=self._closer.keeper, room_tokens=len(question) + min(tokens, _ANSWER_TOKENS),
                wanted=begun.wanted if begun else self._settings.first_tokens,
                cuts=begun is None and self._settings.first_tokens is not None,
            )  # fmt: skip
            started, then = (begun.started, begun.then) if begun else (time.monotonic(), None)
            async with self._filled(documents, texts, request, started) as filled:
                filled.load.cut(begun.wanted) if begun else None
                answer = await self._closer.answer(filled, goal, list(question), tokens, asked.stop, then)
                self._engine_looks &= filled.load.work.can_look
                self._remember(filled.load)
                if asked.chat is None:
                    return answer
                apart = await asyncio.to_thread(asked.chat.apart, self._engine, filled.load.texts)
                return replace(answer, misses=(*answer.misses, apart)) if apart else answer

    def _laid_out(
        self, asked: Asked, texts: Mapping[str, Sequence[int]] | None, schema: SchemaPrompt | None
    ) -> tuple[Layout, Sequence[int], Mapping[str, Sequence[int]] | None]:
        """The prompt's layout, with the question and the texts in its tokens."""
        engine, layout = self._engine, self._settings.layout
        if schema is None and layout is None:
            return PlainLayout(engine, asked.system), asked.question, texts
        from kvwire.reuse import PLAIN, stored_tokens  # few loads need these

        if schema is not None and self._settings.first_tokens:
            raise ArgumentError("modules of a schema are loaded whole: leave first_tokens out")
        if schema is not None:
            return SchemaLayout(engine, schema), asked.question, texts
        if layout is None or layout == PLAIN:
            return PlainLayout(engine, asked.system), asked.question, texts
        known = {name: stored_tokens(layout, ids, engine.vocabulary_size) for name, ids in (texts or {}).items()}
        question = [*asked.question, *layout.ending] if asked.question else asked.question
        return LinksLayout(engine, layout, self._settings), question, known

    @asynccontextmanager
    async def _filled(
        self, documents: Sequence[str | FoundDocument], texts: Mapping[str, Sequence[int]] | None,
        request: LoadRequest, started: float,
    ) -> AsyncIterator[CompletedLoad]:  # fmt: skip
        """Find, open and load documents; closes them after the context."""
        deadline_s = request.goal.deadline_s
        driver, chosen, timeouts = self._session.driver(self._new_controller), self._settings, request.timeouts
        planning = asyncio.create_task(self._link_plan(timeouts.soon))
        for anew in (False, True):
            names = [each for each in documents if isinstance(each, str)]
            finding = [self._finder.find(name, texts, timeouts, anew=anew) for name in names]
            try:
                looked_up = iter(await all_of(finding))
                found = [next(looked_up) if isinstance(each, str) else each for each in documents]
            except BaseException:
                planning.cancel()
                raise
            links = await planning
            self._closer.begin(links, len(found))
            asked_s = time.monotonic() - started
            if deadline_s is not None:
                timeouts = replace(timeouts, patience=max(timeouts.patience - asked_s, LEAST_PATIENCE_S / 2))
            left_s = None if deadline_s is None else deadline_s - asked_s
            request = replace(
                request, timeouts=timeouts, links=links, goal=replace(request.goal, deadline_s=left_s),
                exact=chosen.exact, max_kl=None if chosen.exact else chosen.max_kl,
                has_floor=chosen.quality_floor is not None,
            )  # fmt: skip
            async with Load(self._engine, found, self._session, driver, self._finder, request) as load:
                finish = await load.run()
                if finish is None:  # a cached entry was out of date; the next round reads it
                    continue
                yield CompletedLoad(driver, load, finish, started, asked_s)
                return
        raise StorageError("a document changed again and again while it was looked up; ask again")

    def _timeouts(self, deadline_s: float | None) -> Timeouts:
        """Longest waits of a load, counted from its beginning."""
        with self._lock:
            extra = self._estimates.ttfb.value
        return Timeouts.of(self._settings.open_s, self._settings.patience_s, deadline_s, extra)

    def _new_controller(self) -> ctl.Controller:
        chosen = self._settings
        return ctl.Controller(self._estimates, self._controls, chosen.policy, record=chosen.record)

    async def _link_plan(self, limit_s: float) -> LinkPlan:
        """Plan for links; the model's report is read once, while the catalog is asked."""
        if self._links is None:
            try:
                self._links = await self._session.look_up(self._read_link_plan, limit_s)
            except KvwireError as error:  # the next load tries again
                trouble = f"the report on links was not read, so this load goes without it: {error}"
                return replace(planned(self._settings, None, None, 0), trouble=trouble)
        if self._closer.trouble and self._links.option and not self._links.is_wanted:
            return replace(self._links, trouble=self._closer.trouble, is_able=False)
        return self._links

    def _read_link_plan(self) -> LinkPlan:
        corpus, layers = self._corpora[0], len(self._engine.meta.layers)
        view = corpus.over(self._session.view(corpus.catalog.store, over_link=False))
        return read_plan(view, self._settings, layers, self._read_level)

    def _goal(self, deadline_s: float | None, objective: Objective | None) -> ctl.Goal:
        chosen = self._settings
        return ctl.Goal(
            objective=objective or ("earliest" if deadline_s is None else "quality"),
            deadline_s=deadline_s,
            floor=ctl.EXACT if chosen.exact else chosen.quality_floor or 0,
            ceiling=chosen.quality_ceiling,
            on_late=chosen.on_late,
        )

    def _remember(self, load: Load | None = None) -> None:
        """Write estimates and last uses down in a thread; while that runs, later loads leave it to those after them."""
        documents = load.work.documents.values() if load else ()
        self._used += self._uses.wanted(each.found.entry for each in documents if each.found.entry)
        if self._writing is None or self._writing.done():
            due, self._used = self._used, []
            self._writing = self._session.threads.blocking.submit(self._write_down, self.estimates, due)

    def _write_down(self, estimates: ctl.Estimates, used: Sequence[CatalogEntry]) -> None:
        link, engine = self._keys
        self._memory.remember(link, engine if self._has_measured_costs else None, estimates)
        self._uses.mark(used)


def _end(session: Session, warming: Warming) -> None:
    if not session.process.is_here:
        return
    warming.close()
    session.close(wait=False)
