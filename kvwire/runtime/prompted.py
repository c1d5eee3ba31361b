"""Prompts and sessions: what the store has of a prompt's beginning is loaded, the rest is computed as its question.

A prompt of which nothing is stored is a document whose text alone is known, so that there is one way for all. A session
is a document that grows by a turn at a time; its entry is written last, so that half a turn is none.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from kvwire.errors import ArgumentError, ConflictError, KvwireError, NotFoundError, StorageError
from kvwire.runtime.answer import Reuse
from kvwire.runtime.document import FoundDocument, in_words
from kvwire.runtime.find import UNREADABLE
from kvwire.runtime.prefill import opened
from kvwire.runtime.reports import edit_repair
from kvwire.runtime.search_yield import SearchYield
from kvwire.store import check_new_name
from kvwire.types import KVCache
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.controller import Goal
    from kvwire.engines.base import Engine
    from kvwire.engines.texts import Place
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.document import Timeouts
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.edited import Editing
    from kvwire.runtime.find import DocumentFinder
    from kvwire.runtime.load import Load
    from kvwire.runtime.reports import EditRepair
    from kvwire.runtime.saving import Rows, Saver
    from kvwire.runtime.session import Session
    from kvwire.runtime.settings import LoadSettings
    from kvwire.runtime.similar import EditPlan, ReuseCosts, Search, SimilarPrompts
    from kvwire.store import CatalogEntry, DonorIndex, PrefixHit
    from kvwire.types import Chat

SESSIONS = "sessions/"
"""What names of sessions begin with in the store."""
_LEAST_HEAD = 64
"""Tokens of a system text that is kept by itself, for other sessions to share: the index finds none that is shorter."""
_PROMPT = "prompt"
LAST_TOKENS = 32
"""Of a prompt that is made of similar ones, computed in any case: they see it whole, and choose what is repaired."""
ReuseMode = Literal["auto", "exact", "donors", "none"]


class Keep(NamedTuple):
    """How a prompt is kept: under which name, in place of which version, and how long its head is, BOS included."""

    name: str = ""
    etag: str | None = None
    head: int = 0


class Reusing(NamedTuple):
    """What of the store a prompt may be made of.

    Attributes:
        mode: As ``Loader.ask_prompt`` takes it; empty: as it does where nothing is said.
        donors: Names of the donors; empty: they are searched.
        last: How many of the prompt's last tokens are computed in any case.
    """

    mode: ReuseMode | Literal[""] = ""
    donors: tuple[str, ...] = ()
    last: int = LAST_TOKENS


class Prompter:
    """Answers prompts and turns of sessions for one loader; used on the session's loop.

    Attributes:
        engine: Runs the model.
    """

    def __init__(
        self, engine: Engine, corpus: Corpus, session: Session, finder: DocumentFinder, settings: LoadSettings,
        costs: Callable[[], ReuseCosts],
    ) -> None:  # fmt: skip
        """Read nothing yet. costs: what link and engine take by now."""
        self.engine, self._corpus, self._session, self._finder = engine, corpus, session, finder
        self._settings, self._costs = settings, costs
        self._view = corpus.over(session.view(corpus.catalog.store))
        self._index = self._view.index()
        self._similar: SimilarPrompts | None = None
        self._yield = SearchYield()
        self._repair: EditRepair | None = None
        self._saver: Saver | None = None

    async def prompt(
        self, token_ids: Sequence[int], timeouts: Timeouts, goal: Goal, reusing: Reusing, *, save: bool
    ) -> Begun:
        """Find what the store has of a prompt; without it, the prompt is its own text."""
        started, misses, whole = time.monotonic(), list[str](), self._checked(token_ids)
        begin = partial(self._begun, whole, misses, timeouts, started, Keep() if save else None)
        if reusing.mode == "none":
            return await begin(None)
        may_edit = await self._may_edit(reusing, goal, timeouts, misses)
        hit, search = await self._longest(whole, timeouts, misses), None
        used = hit
        from kvwire.runtime.similar import LEAST_REUSED, beginning_pays

        total, is_asked = len(whole) - len(self.engine.opening_tokens), reusing.mode == "donors" or reusing.donors
        is_long = len(whole) - (hit.tokens if hit else 0) > reusing.last + LEAST_REUSED
        if may_edit and is_long and (is_asked or await self._is_worth_a_search(total, reusing, timeouts, misses)):
            began = time.monotonic()
            search = await self._search(whole, hit, timeouts, goal, reusing, misses)
            if not is_asked:
                self._yield.note(time.monotonic() - began, search)
        if hit is not None and not save and self.engine.can_recompute:  # what is kept shares what it begins with
            used = hit if beginning_pays(self._costs(), hit, total, goal, self._max_kl) else None
        name = hit.document.document_id if hit else ""
        return replace(await begin(used), search=search, keeps_donors=save and may_edit, document=name)

    async def search(
        self, token_ids: Sequence[int], timeouts: Timeouts, goal: Goal, reusing: Reusing, costs: ReuseCosts
    ) -> Search:
        """Find what of a prompt is stored, exactly or nearly, and what a load of it would do."""
        whole, misses = self._checked(token_ids), list[str]()
        hit = await self._longest(whole, timeouts, misses)
        found = await self._search(whole, hit, timeouts, goal, reusing, misses, costs)
        if found is None:
            raise StorageError(misses[-1])
        return found

    async def _is_worth_a_search(self, total: int, reusing: Reusing, timeouts: Timeouts, misses: list[str]) -> bool:
        """Whether donors of a prompt may pay, by plan and by what searches have brought."""
        from kvwire.runtime.similar import search_can_pay

        share, known = (await self._edit_repair(timeouts, misses)).share, self._yield
        return search_can_pay(self._costs(), total, reusing.last, share, known.token_bytes) and known.is_due()

    @property
    def _max_kl(self) -> float | None:
        """Of fetched levels; None where a floor was given instead."""
        return self._settings.max_kl if self._settings.quality_floor is None else None

    async def _may_edit(self, reusing: Reusing, goal: Goal, timeouts: Timeouts, misses: list[str]) -> bool:
        """Whether donors are looked for; where nothing was said, only of models that edits were found safe for."""
        if reusing.mode == "exact":
            return False
        why = ""
        if self._settings.exact:
            why = "exact caches were asked for"
        elif not self.engine.can_repair:
            why = "this engine computes no rows inside a prompt"
        elif goal.on_late == "refuse" and goal.deadline_s is not None:
            why = "a load that may be refused is planned as a whole"
        if why and reusing.mode:
            misses.append(f"no similar prompt was looked for: {why}")
        return not why and (bool(reusing.mode) or (await self._edit_repair(timeouts, misses)).is_safe)

    async def _edit_repair(self, timeouts: Timeouts, misses: list[str]) -> EditRepair:
        """What is done about rows behind edits; what was measured of the model is read once."""
        if self._repair is None:
            asked, layers = (self._settings.repair, self._settings.selector), len(self.engine.meta.layers)
            try:
                report = await self._session.look_up(self._view.edit_report, timeouts.soon)
            except UNREADABLE as error:  # the next prompt tries again
                misses.append(f"the report on edits was not read, so this load goes without it: {error}")
                return edit_repair(None, *asked, layers)
            self._repair = edit_repair(report, *asked, layers)
        return self._repair

    async def _search(
        self, whole: tuple[int, ...], hit: PrefixHit | None, timeouts: Timeouts, goal: Goal, reusing: Reusing,
        misses: list[str], costs: ReuseCosts | None = None,
    ) -> Search | None:  # fmt: skip
        """Donors, and whether they pay; a store that fails or is late has none, which is told."""
        from kvwire.runtime.similar import EditTerms, SimilarPrompts

        chosen, before = self._settings, len(self.engine.opening_tokens)
        if self._similar is None:
            self._similar = SimilarPrompts(self._view, self.engine, chosen.writer, self._max_kl)
        last = min(reusing.last, len(whole) - before - 1)
        terms = EditTerms(costs or self._costs(), await self._edit_repair(timeouts, misses), goal, last)
        look = partial(
            self._similar.search, whole[before:], hit, terms, misses, named=reusing.donors,
            is_forced=reusing.mode == "donors", tells_all=costs is not None,
        )  # fmt: skip
        try:
            return await self._session.look_up(look, timeouts.patience if reusing.donors else timeouts.soon)
        except UNREADABLE as error:
            if reusing.donors and isinstance(error, NotFoundError):
                raise
            misses.append(f"no similar prompt was used: {error}")
            return None

    async def editing(
        self, begun: Begun, plan: EditPlan, goal: Goal, room: int, timeouts: Timeouts
    ) -> tuple[Editing, list[FoundDocument]]:
        """What makes a prompt of its donors, and these."""
        from kvwire.runtime.edited import Editing

        text, rest = begun.whole[: plan.script.tokens], begun.whole[plan.script.tokens :]
        editing = Editing(self.engine, plan, text, rest, room, goal.floor)
        finding = [self._finder.of_entry(donor.document, donor.token_ids, timeouts) for donor in plan.donors]
        return editing, editing.found([await each for each in finding])

    async def _begun(
        self, whole: tuple[int, ...], misses: list[str], timeouts: Timeouts, started: float, keep: Keep | None,
        hit: PrefixHit | None, chat: Chat | None = None, stop: frozenset[int] = frozenset(),
    ) -> Begun:  # fmt: skip
        before = len(self.engine.opening_tokens)
        if hit is None:
            wanted = len(whole) - 1 - before
            found = FoundDocument(self._corpus, _PROMPT, None, None, whole[before:-1])
        else:
            wanted = min(hit.tokens, len(whole) - 1) - before
            found = await self._finder.of_entry(hit.document, hit.token_ids[before:], timeouts)
        name = found.entry.document_id if found.entry else ""
        return Begun(self, found, started, wanted, whole[before + wanted :], misses, keep, chat, stop, document=name)

    async def turn(self, name: str, question: Sequence[int] | str, chat: Chat | None, timeouts: Timeouts) -> Begun:
        """Find what a session has said so far, and what the next turn adds to it."""
        if not name:
            raise ArgumentError("a session needs a name: all that have none would be one")
        started, session = time.monotonic(), SESSIONS + check_new_name(name, "session")
        looking = partial(self._view.catalog.grown.version, self._view.config, session)
        entry, etag = await self._session.look_up(looking, timeouts.patience)
        if entry is not None and entry.is_text:
            raise ArgumentError(f"{session!r} is a document that is kept as text: give the session another name")
        head, ids, stop = self._said(question, chat, is_first=entry is None)
        if entry is None:
            whole, misses = self._checked((*head, *ids)), list[str]()
            hit = await self._longest(whole, timeouts, misses)
            return await self._begun(
                whole, misses, timeouts, started, Keep(session, etag, len(head)), hit, chat, stop
            )  # fmt: skip
        _check_tokens(self.engine, ids)
        total, window = len(self.engine.opening_tokens) + entry.tokens + len(ids), self.engine.window
        if total > window:
            msg = f"the session would have {total} tokens, the model's window is {window}: begin another session"
            raise ArgumentError(msg)
        found = await self._finder.of_entry(entry, None, timeouts)
        keep = Keep(session, etag)
        return Begun(self, found, started, entry.tokens, ids, [], keep, chat, stop, head, document=session)

    def _said(
        self, question: Sequence[int] | str, chat: Chat | None, *, is_first: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...], frozenset[int]]:
        """A session's head, what a turn adds to what was said, and what ends the answer."""
        engine = self.engine
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
        ids, window = plain_token_ids(token_ids), self.engine.window
        _check_tokens(self.engine, ids)
        whole = opened(self.engine, ids)
        if len(whole) - len(self.engine.opening_tokens) < 2:  # noqa: PLR2004 - what is loaded, and what is asked
            raise ArgumentError("a prompt needs two tokens at least, besides the BOS")
        if len(whole) > window:
            raise ArgumentError(f"the prompt has {len(whole)} tokens, the model's window is {window}; shorten it")
        return whole

    async def _longest(self, whole: tuple[int, ...], timeouts: Timeouts, misses: list[str]) -> PrefixHit | None:
        """The stored document that agrees longest; a store that fails is a miss, which is told."""
        opening = len(self.engine.opening_tokens)
        try:
            hit = await self._session.look_up(partial(self._index.longest, whole, misses.append), timeouts.soon)
        except UNREADABLE as error:
            misses.append(f"stored prompts were not looked up, so all of it is computed: {error}")
            return None
        if hit is not None and hit.opening != opening:
            misses.append(f"{hit.document.document_id!r} was encoded without the BOS that prompts begin with")
            return None
        return hit if hit is not None and min(hit.tokens, len(whole) - 1) > opening else None

    async def saver(self, driver: ControllerDriver) -> Saver:
        """What keeps prompts, with the opening tokens in the store."""
        if self._saver is None:
            from kvwire.runtime.saving import Saver  # few prompts are kept

            made = await asyncio.to_thread(Saver, self._corpus)
            if await asyncio.to_thread(lambda: made.lacks_opening):
                await driver.compute(made.put_opening)
            self._saver = made
        return self._saver

    @property
    def donors(self) -> DonorIndex:
        """Where prompts are kept for others like them."""
        return self._corpus.donors(self._settings.writer)


@dataclass(frozen=True, eq=False)
class Begun:
    """A prompt whose beginning was found: what is loaded, what is asked, and what is done with the answer.

    Attributes:
        prompter: Whose prompt it is.
        found: The document that it begins with.
        started: When it was asked for.
        wanted: How many of the document's first tokens it has.
        rest: Token ids behind these.
        misses: What went wrong while it was looked for.
        keep: How it is kept; None: it is not.
        chat: Of a session that is one.
        stop: Token ids that end an answer, and are no part of what is kept.
        head: What the session should have begun with; empty: anything.
        search: What was found that is like it; None: nothing was looked for.
        keeps_donors: What is kept of it may serve prompts like it.
        document: Name of the stored document that it begins with, whether that is loaded or computed.
    """

    prompter: Prompter
    found: FoundDocument
    started: float
    wanted: int
    rest: tuple[int, ...]
    misses: list[str]
    keep: Keep | None
    chat: Chat | None = None
    stop: frozenset[int] = frozenset()
    head: tuple[int, ...] = ()
    search: Search | None = None
    keeps_donors: bool = False
    document: str = ""

    @property
    def whole(self) -> tuple[int, ...]:
        """The prompt's token ids behind its opening, where the found document's are known."""
        return (*(self.found.text or ())[: self.wanted], *self.rest)

    def told(self, made: Editing) -> list[str]:
        """What is to be told with a prompt that was made of donors."""
        lost = made.plan.script.reused - made.script.reused
        told = [*self.misses, f"{lost} tokens of donors did not come, and were computed"] if lost else [*self.misses]
        if self.keep is not None:
            told.append("prompt and answer were not kept: rows of other prompts are in it; ask with reuse exact")
        return told

    @property
    def is_whole(self) -> bool:
        """Whether the prompt has all of the document."""
        return self.wanted >= self.found.tokens

    async def then(self, answer: Answer, driver: ControllerDriver, load: Load, past: Any) -> Answer:  # noqa: ANN401
        """Say where tokens came from, and keep prompt and answer; whatever fails there costs no answer."""
        opening, (document,) = len(load.work.prompt.opening), load.documents
        loaded = 0
        for decision in answer.decisions:
            start, stop = document.span(decision.chunk.chunk)
            loaded += max(0, min(stop, self.wanted) - start) if decision.level is not None else 0
        total = opening + self.wanted + len(self.rest)
        reuse = Reuse(self.document, loaded, total - loaded)
        misses = [*answer.misses, *self.misses]
        whole = (*load.work.prompt.opening, *(document.token_ids or ()))
        if document.token_ids is not None and self.head and whole[: len(self.head)] != self.head:
            misses.append("the session began with another system text than this one, which has no effect")
        if self.keep is not None:
            try:
                reuse = replace(reuse, saved=await self._keep(self.keep, answer, driver, load, past))
            except ConflictError as error:
                misses.append(f"this turn was not saved, another one was meanwhile: {error}")
            except Exception as error:  # noqa: BLE001 - whatever it is, the answer is there
                misses.append(f"prompt and answer were not saved: {in_words(error)}")
        if self.chat is not None:
            misses.append(
                await asyncio.to_thread(self._apart, self.chat, (*whole[: opening + self.wanted], *self.rest))
            )
        return replace(answer, reused=reuse, misses=tuple(filter(None, misses)))

    async def _keep(
        self, keep: Keep, answer: Answer, driver: ControllerDriver, load: Load, past: Any  # noqa: ANN401
    ) -> str:  # fmt: skip
        """Keep prompt and answer; returns under which name."""
        engine, (document,), prompt = self.prompter.engine, load.documents, load.work.prompt
        info = document.info
        if prompt.cache.kept is not None or document.token_ids is None:
            raise ArgumentError("the stored document that it begins with is pruned, or its text is not known")
        if info is not None and (info.neutral_prefix != prompt.opening or info.soft_tokens):
            msg = f"{document.document_id!r} was not computed as a prompt's beginning: encode it with --index kvwire"
            raise ArgumentError(msg)
        ends = self.stop | engine.end_tokens
        said = answer.tokens[:-1] if answer.tokens[-1] in ends else answer.tokens
        behind = (*self.rest, *said)
        ids = (*document.token_ids[: self.wanted], *behind)
        cache = await driver.compute(partial(self._rows, prompt.cache, past, prompt.opening, ids, behind, answer))
        levels = [each.level for each in answer.decisions if each.level is not None]
        lossy = list[int]()
        if info is not None and levels:
            lossy = [level for level in levels if not info.levels[level].lossless]
            lossy += [] if info.context_level is None else [info.context_level]
        base, shared = self.found.entry, self.wanted if self.found.entry else 0
        found = shared and shared + len(prompt.opening)
        from kvwire.runtime.saving import Rows

        rows = Rows(ids, cache, prompt.opening, min(lossy, default=None), base, shared, found)
        saver = await self.prompter.saver(driver)
        write = partial(self._write, saver, rows, keep)
        runs_layers = await asyncio.to_thread(lambda: saver.runs_layers)
        entry = await (driver.compute(write) if runs_layers else asyncio.to_thread(write))
        if self.keeps_donors and rows.level is None:
            await asyncio.to_thread(self.prompter.donors.write, entry, ids)
        return entry.document_id

    @staticmethod
    def _write(saver: Saver, rows: Rows, keep: Keep) -> CatalogEntry:
        """Keep a session's head by itself first, where it is not yet: other sessions share it."""
        head = keep.head - len(rows.opening)
        if head >= _LEAST_HEAD and rows.shared < head:
            first = replace(rows, token_ids=rows.token_ids[:head], cache=rows.cache.slice(0, head))
            rows = replace(rows, base=saver.save(first), shared=head)
        return saver.save(rows, keep.name, keep.etag)

    def _rows(
        self, loaded: KVCache, past: Any, opening: tuple[int, ...], ids: tuple[int, ...],  # noqa: ANN401
        behind: tuple[int, ...], answer: Answer,
    ) -> KVCache:  # fmt: skip
        """Rows of the whole document, in the engine's thread; the last word of an answer that was cut was not run."""
        engine, start = self.prompter.engine, len(opening)
        ran = len(self.rest) + len(answer.tokens) - 1
        if len(behind) > ran:
            engine.forward(past, behind[ran:], start + self.wanted + ran, logits=1)
        rows = engine.rows_of(past, ids, start)
        if rows is not None:
            return rows
        more = engine.extend(loaded, behind)
        first = loaded.slice(start, loaded.tokens)
        keys, values = (
            [torch.cat(pair, 1) if pair[0].numel() else pair[0] for pair in zip(*sides, strict=True)]
            for sides in ((first.keys, more.keys), (first.values, more.values))
        )
        return KVCache.from_tensors(keys, values, replace(first.meta, token_digest=""), ids)

    def _apart(self, chat: Chat, token_ids: tuple[int, ...]) -> str:
        """Where a session's tokens are not its template's; empty where they are."""
        try:
            return self.prompter.engine.check_turns(chat, token_ids)
        except KvwireError as error:
            return f"the session's tokens were not compared with the template's: {error}"


def _check_tokens(engine: Engine, token_ids: Sequence[int]) -> None:
    """Refuse what are no tokens of the vocabulary."""
    if not token_ids:
        raise ArgumentError("the prompt is empty; give it some text")
    if min(token_ids) < 0 or max(token_ids) >= engine.vocabulary_size:
        msg = f"token ids lie in 0 to {engine.vocabulary_size - 1}; were these made by the model's tokenizer?"
        raise ArgumentError(msg)
