"""Loading: from documents and a deadline to a linked prompt and the first token."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from kvwire.errors import ArgumentError
from kvwire.runtime.answer import Asked, asked_of
from kvwire.runtime.runner import LoadRunner
from kvwire.runtime.settings import LoadSettings, goal_of
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping, Sequence

    from kvwire import controller as ctl
    from kvwire.controller import Objective
    from kvwire.engines.base import Engine
    from kvwire.reuse import SchemaPrompt
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.estimates_file import EstimatesFile
    from kvwire.runtime.prompt_request import Begun, PromptRequest, ReuseMode, Reusing
    from kvwire.runtime.prompter import Prompter
    from kvwire.runtime.similar import Search
    from kvwire.transport import EmulatedLink, LinkSettings
    from kvwire.types import Chat


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
        chosen = settings or LoadSettings()
        self._engine, self._settings, self._corpus = engine, chosen, corpus
        self._runner = LoadRunner(engine, (corpus, *variants), chosen, costs, link, memory)
        self._session = self._runner.session
        self._end = weakref.finalize(self, self._runner.end)  # runs in any thread

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
        self._runner.close()
        if self._session.process.is_here:
            self._end.detach()

    @property
    def unsaved(self) -> int:
        """How many prompts made from donors could not be saved after their answers, each told in the log.

        Those that wait are not counted before ``close`` has waited for them.
        """
        return self._runner.unsaved

    @property
    def costs(self) -> ctl.CostModel:
        """Current estimates of computing costs on this engine."""
        return self.estimates.costs()

    @property
    def estimates(self) -> ctl.Estimates:
        """A copy of the current estimates of link and engine."""
        return self._runner.estimates()

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
        goal = goal_of(self._settings, deadline_s, objective)
        asked = asked_of(self._engine, self._settings, question, chat)
        return self._session.run(self._runner.ask(documents, asked, goal, tokens, texts))

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
        goal, asked = goal_of(self._settings, deadline_s, objective), Asked(plain_token_ids(question), ())
        return self._session.run(self._runner.ask(prompt.documents, asked, goal, tokens, texts, prompt))

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
                with ``auto`` and ``donors`` for similar ones. A prompt made from donors is computed whole and saved
                in the background after its answer; ``close`` waits for that.
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
        goal = goal_of(self._settings, deadline_s, objective)
        return self._session.run(self._prompted(token_ids, goal, self._reusing(reuse, donors), tokens, save=save))

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
        goal = goal_of(self._settings, deadline_s, objective)
        return await self._session.wait(
            self._prompted(token_ids, goal, self._reusing(reuse, donors), tokens, save=save)
        )

    def _prompted(
        self, token_ids: Sequence[int], goal: ctl.Goal, reusing: Reusing, tokens: int, *, save: bool
    ) -> Coroutine[None, None, Answer]:
        def begin(made: Prompter, asked: PromptRequest) -> Coroutine[None, None, Begun]:
            return made.prompt(replace(asked, reusing=reusing), token_ids, save=save)

        return self._runner.ask_begun(begin, goal, tokens)

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
        from kvwire.runtime.prompt_request import PromptRequest

        goal, reusing = goal_of(self._settings, None, None), self._reusing(reuse, donors)
        asked, costs = PromptRequest(goal, self._runner.timeouts(None), reusing), self._runner.reuse_costs()
        if link is not None:
            costs = replace(costs, bandwidth=link.bandwidth_bytes_s, ttfb_s=link.rtt_s)

        async def search() -> Search:
            return await self._runner.prompter.search(asked, token_ids, costs)

        return self._session.run(search())

    def _reusing(self, reuse: ReuseMode | None, donors: Sequence[str]) -> Reusing:
        from kvwire.runtime.prompt_request import Reusing

        if reuse not in {None, "auto", "exact", "donors", "none"}:
            raise ArgumentError(f"reuse is auto, exact, donors or none, got {reuse!r}")
        if isinstance(donors, str):
            raise ArgumentError(f"donors are a sequence of names, got one text: [{donors!r}]?")
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
        goal = goal_of(self._settings, deadline_s, objective)
        return self._session.run(self._turn(session, question, chat, goal, tokens))

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
        goal = goal_of(self._settings, deadline_s, objective)
        return await self._session.wait(self._turn(session, question, chat, goal, tokens))

    def _turn(
        self, session: str, question: Sequence[int] | str, chat: Chat | None, goal: ctl.Goal, tokens: int
    ) -> Coroutine[None, None, Answer]:
        return self._runner.ask_begun(lambda made, asked: made.turn(asked, session, question, chat), goal, tokens)

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
        goal = goal_of(self._settings, deadline_s, objective)
        asked = asked_of(self._engine, self._settings, question, chat)
        return await self._session.wait(self._runner.ask(documents, asked, goal, tokens, texts))
