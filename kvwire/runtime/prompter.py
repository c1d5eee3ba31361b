"""Prompts and sessions: what the store has of a prompt's beginning is loaded, the rest is computed as its question.

A prompt of which nothing is stored is a document whose text alone is known, so that there is one way for all. A session
is a document that grows by a turn at a time; its entry is written last, so that half a turn is none.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError, ConflictError, KvwireError, StorageError
from kvwire.runtime.answer import Reuse
from kvwire.runtime.document import FoundDocument, in_words
from kvwire.runtime.donor_search import DonorSearch
from kvwire.runtime.edited import Editing
from kvwire.runtime.find import UNREADABLE
from kvwire.runtime.prefill import opened
from kvwire.runtime.prompt_request import SESSIONS, Begun, Keep
from kvwire.runtime.saving import AnswerSaver
from kvwire.store import check_new_name
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.engines.base import Engine
    from kvwire.engines.texts import Place
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.find import DocumentFinder
    from kvwire.runtime.load import Load
    from kvwire.runtime.prompt_request import PromptRequest
    from kvwire.runtime.session import Session
    from kvwire.runtime.settings import LoadSettings
    from kvwire.runtime.similar import EditPlan, ReuseCosts, Search
    from kvwire.store import PrefixHit
    from kvwire.types import Chat

_PROMPT = "prompt"


class Prompter:
    """Finds what the store has of prompts and sessions, and keeps their answers; used on the session's loop."""

    def __init__(
        self, engine: Engine, corpus: Corpus, session: Session, finder: DocumentFinder, settings: LoadSettings,
        costs: Callable[[], ReuseCosts],
    ) -> None:  # fmt: skip
        """Read nothing yet. costs: what link and engine take by now."""
        self._engine, self._corpus, self._session, self._finder = engine, corpus, session, finder
        self._view = corpus.over(session.view(corpus.catalog.store))
        self._index = self._view.index()
        self._donors = DonorSearch(engine, self._view, session, settings, costs)
        self._saver = AnswerSaver(engine, corpus, settings.writer)

    async def prompt(self, request: PromptRequest, token_ids: Sequence[int], *, save: bool) -> Begun:
        """Find what the store has of a prompt; without it, the prompt is its own text."""
        request, keep = replace(request, whole=self._checked(token_ids)), Keep() if save else None
        if request.reusing.mode == "none":
            return await self._begun(request, None, keep)
        may_edit = await self._donors.is_allowed(request)
        used = hit = await self._longest(request)
        search = await self._donors.search_if_due(request, hit) if may_edit else None
        if hit is not None and not save and self._engine.can_recompute:  # what is kept shares what it begins with
            used = hit if self._donors.beginning_pays(request, hit) else None
        begun = await self._begun(request, used, keep)
        name = hit.document.document_id if hit else ""
        return replace(begun, search=search, keeps_donors=save and may_edit, document=name)

    async def search(self, request: PromptRequest, token_ids: Sequence[int], costs: ReuseCosts) -> Search:
        """Find what of a prompt is stored, exactly or nearly, and what a load of it would do."""
        request = replace(request, whole=self._checked(token_ids))
        found = await self._donors.search(request, await self._longest(request), costs)
        if found is None:
            raise StorageError(request.misses[-1])
        return found

    async def turn(self, request: PromptRequest, name: str, question: Sequence[int] | str, chat: Chat | None) -> Begun:
        """Find what a session has said so far, and what the next turn adds to it."""
        if not name:
            raise ArgumentError("a session needs a name: all that have none would be one")
        session = SESSIONS + check_new_name(name, "session")
        looking = partial(self._view.catalog.grown.version, self._view.config, session)
        entry, etag = await self._session.look_up(looking, request.timeouts.patience)
        if entry is not None and entry.is_text:
            raise ArgumentError(f"{session!r} is a document that is kept as text: give the session another name")
        head, ids, stop = self._said(question, chat, is_first=entry is None)
        if entry is None:
            request = replace(request, whole=self._checked((*head, *ids)))
            begun = await self._begun(request, await self._longest(request), Keep(session, etag, len(head)))
            return replace(begun, chat=chat, stop=stop)
        self._check_tokens(ids)
        total, window = len(self._engine.opening_tokens) + entry.tokens + len(ids), self._engine.window
        if total > window:
            msg = f"the session would have {total} tokens, the model's window is {window}: begin another session"
            raise ArgumentError(msg)
        found = await self._finder.of_entry(entry, None, request.timeouts)
        return Begun(request, found, entry.tokens, ids, Keep(session, etag), chat, stop, head, document=session)

    async def _begun(self, request: PromptRequest, hit: PrefixHit | None, keep: Keep | None) -> Begun:
        whole, before = request.whole, len(self._engine.opening_tokens)
        if hit is None:
            wanted = len(whole) - 1 - before
            found = FoundDocument(self._corpus, _PROMPT, None, None, whole[before:-1])
        else:
            wanted = min(hit.tokens, len(whole) - 1) - before
            found = await self._finder.of_entry(hit.document, hit.token_ids[before:], request.timeouts)
        name = found.entry.document_id if found.entry else ""
        return Begun(request, found, wanted, whole[before + wanted :], keep, document=name)

    def _said(
        self, question: Sequence[int] | str, chat: Chat | None, *, is_first: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
        """A session's head, what a turn adds to what was said, and what ends the answer."""
        engine = self._engine
        if chat is None:
            place: Place = "first" if is_first else "last"
            if isinstance(question, str):
                question = engine.tokenize(question, place=place, trust="frame")
            return (), plain_token_ids(question), frozenset()
        if not isinstance(question, str):
            raise ArgumentError("in a chat the question is a text: the template is read together with it")
        first = engine.render_chat(chat, question) if is_first or chat.system is not None else None
        rendered = first if is_first and first else engine.render_turn(chat, question)
        return first.head if first else (), rendered.tail, rendered.stop

    def _checked(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """A whole prompt behind the opening tokens."""
        ids, window = plain_token_ids(token_ids), self._engine.window
        self._check_tokens(ids)
        whole = opened(self._engine, ids)
        if len(whole) - len(self._engine.opening_tokens) < 2:  # noqa: PLR2004 - what is loaded, and what is asked
            raise ArgumentError("a prompt needs two tokens at least, besides the BOS")
        if len(whole) > window:
            raise ArgumentError(f"the prompt has {len(whole)} tokens, the model's window is {window}; shorten it")
        return whole

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        """Refuse what are no tokens of the vocabulary."""
        size = self._engine.vocabulary_size
        if not token_ids:
            raise ArgumentError("the prompt is empty; give it some text")
        if min(token_ids) < 0 or max(token_ids) >= size:
            raise ArgumentError(f"token ids lie in 0 to {size - 1}; were these made by the model's tokenizer?")

    async def _longest(self, request: PromptRequest) -> PrefixHit | None:
        """The stored document that agrees longest; a store that fails is a miss, which is told."""
        opening, whole, misses = len(self._engine.opening_tokens), request.whole, request.misses
        try:
            looking = partial(self._index.longest, whole, misses.append)
            hit = await self._session.look_up(looking, request.timeouts.soon)
        except UNREADABLE as error:
            misses.append(f"stored prompts were not looked up, so all of it is computed: {error}")
            return None
        if hit is not None and hit.opening != opening:
            misses.append(f"{hit.document.document_id!r} was encoded without the BOS that prompts begin with")
            return None
        return hit if hit is not None and min(hit.tokens, len(whole) - 1) > opening else None

    async def editing(self, begun: Begun, plan: EditPlan, room: int) -> tuple[Editing, list[FoundDocument]]:
        """What makes a prompt of its donors, and these. room: tokens of an answer that there is to be memory for."""
        editing = Editing(self._engine, begun, plan, room)
        of_entry, timeouts = self._finder.of_entry, begun.request.timeouts
        return editing, editing.found(
            [await of_entry(donor.document, donor.token_ids, timeouts) for donor in plan.donors]
        )

    def finish_edited(self, begun: Begun, answer: Answer, load: Load) -> Answer:
        """The answer to an edited prompt, which is kept in the background if that was asked for."""
        if begun.keep is None or answer.reused is None:
            return answer
        saved = self._saver.save_edited(begun, begun.keep, answer, load.driver)
        misses = answer.misses if saved else (*answer.misses, "prompt and answer were not saved: too many others wait")
        return replace(answer, reused=replace(answer.reused, saved=saved), misses=misses)

    @property
    def unsaved(self) -> int:
        """How many prompts could not be kept in the background."""
        return self._saver.unsaved

    def wait(self) -> None:
        """Wait for what is kept in the background."""
        self._saver.wait()

    async def finish(self, begun: Begun, answer: Answer, load: Load, past: Any) -> Answer:  # noqa: ANN401
        """Say where tokens came from, and keep prompt and answer; whatever fails there costs no answer."""
        opening, (document,) = load.work.prompt.opening, load.documents
        loaded = 0
        for decision in answer.decisions:
            start, stop = document.span(decision.chunk.chunk)
            loaded += max(0, min(stop, begun.wanted) - start) if decision.level is not None else 0
        total = len(opening) + begun.wanted + len(begun.rest)
        reuse = Reuse(begun.document, loaded, total - loaded)
        misses = [*answer.misses, *begun.request.misses]
        whole = (*opening, *(document.token_ids or ()))
        if document.token_ids is not None and begun.head and whole[: len(begun.head)] != begun.head:
            misses.append("the session began with another system text than this one, which has no effect")
        if begun.keep is not None:
            try:
                reuse = replace(reuse, saved=await self._saver.save(begun, begun.keep, answer, load, past))
            except ConflictError as error:
                misses.append(f"this turn was not saved: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer is there
                misses.append(f"prompt and answer were not saved: {in_words(error)}")
        if begun.chat is not None:
            said = (*whole[: len(opening) + begun.wanted], *begun.rest)
            misses.append(await asyncio.to_thread(self._apart, begun.chat, said))
        return replace(answer, reused=reuse, misses=tuple(filter(None, misses)))

    def _apart(self, chat: Chat, token_ids: tuple[int, ...]) -> str:
        """Where a session's tokens are not its template's; empty where they are."""
        try:
            return self._engine.check_turns(chat, token_ids)
        except KvwireError as error:
            return f"the session's tokens were not compared with the template's: {error}"
