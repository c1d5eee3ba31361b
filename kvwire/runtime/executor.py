"""The thin executor of one load: it carries out the controller's instructions and reports what happened.

It decides nothing. Fetching runs on the event loop, the engine in one thread and decoding in the same or in another
(see ``driver``), so that the link and the processor are busy at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from kvwire.codec import Profile
from kvwire.codec.prediction.text import expect
from kvwire.controller import Goal, kl_floor
from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, KvwireError, OverloadedError, StorageError
from kvwire.reuse import LinkedPrompt
from kvwire.runtime.documents import in_words
from kvwire.runtime.expected_kl import floor_trouble
from kvwire.runtime.headers import HeaderReader
from kvwire.runtime.links import UNREPAIRED, RepairContext, Repairer, by_token
from kvwire.runtime.opening import TWICE, WITHOUT, begins_with, lacks_opening, opened
from kvwire.runtime.prompt_jobs import LOAD_CANCELLED, PromptWorker

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import Backend
    from kvwire.controller import DocumentPlanInput
    from kvwire.engines.base import Engine
    from kvwire.reuse import PromptLayout
    from kvwire.runtime.documents import DocumentHandle, Timeouts
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.finder import DocumentFinder
    from kvwire.runtime.kept import KeptLookup, RepairKeeper
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.repair_in_order import RepairInOrder
    from kvwire.runtime.session import Session
    from kvwire.transport import FetchSettings
    from kvwire.types import ChunkId, KVCache


_log = logging.getLogger("kvwire.runtime")


@dataclass(frozen=True, kw_only=True)
class ExecutorSettings:
    """How a load is carried out, as in ``LoadSettings``.

    Attributes:
        fetch: How blobs are fetched.
        backend: Which kernels decode.
        timeouts: Longest waits.
        links: What is done so that documents see each other.
        question: Token ids that the prompt may be looked at with while it is fetched; empty: it is not looked at.
        keeper: Finds what earlier repairs computed; None: nobody does.
        room_tokens: To set memory aside for behind the prompt, as far as the model's window goes.
        exact: Lossless levels alone are of use.
        max_kl: The greatest KL divergence to expect of levels that are fetched; None: any.
        has_floor: The goal's floor was asked for, and holds in place of ``max_kl``.
        system: Token ids of what stands before the documents, and is computed; empty: nothing does.
    """

    fetch: FetchSettings
    backend: Backend
    timeouts: Timeouts
    links: LinkPlan = UNREPAIRED
    question: Sequence[int] = ()
    keeper: RepairKeeper | None = None
    room_tokens: int = 0
    exact: bool = False
    max_kl: float | None = None
    has_floor: bool = False
    system: tuple[int, ...] = ()


class Executor(PromptWorker):
    """One load, from ``run`` to ``Finish``; ``prompt`` is there from ``run`` on, and complete then.

    Attributes:
        fetched_at: When the last bytes that were used arrived, on steering's clock.
        predicted_s: See ``ControllerDriver.predicted_s``.
        links: What is done so that documents see each other.
        starts: Position of each document; None: one after the other.
        room: The prompt's cache, and the memory behind it: for the question and its answer.
        in_order: Rows that were computed beside the link; None: none were.
        front_tokens: How many tokens are computed before the question, beside documents.
        front_s: Compute spent on that, in seconds.
        opening: Tokens at the prompt's head, before all else: BOS, or the system text that begins with it.
    """

    starts: tuple[int, ...] | None = None
    front_tokens: int = 0
    front_s: float = 0.0

    def __init__(
        self, engine: Engine, documents: Sequence[DocumentHandle], session: Session, driver: ControllerDriver,
        finder: DocumentFinder, settings: ExecutorSettings,
    ) -> None:  # fmt: skip
        """Take the parts; enter the context to begin."""
        super().__init__(engine, documents, driver, settings.backend, settings.question)
        self.links = settings.links
        self._keeper, self._timeouts, self._room_tokens = settings.keeper, settings.timeouts, settings.room_tokens
        self._head, self.opening = settings.system, engine.opening_tokens
        if settings.system:
            self.opening = opened(engine, settings.system)
        self._exact, self._max_kl, self._has_floor = settings.exact, settings.max_kl, settings.has_floor
        self._goal = Goal()
        self._headers = HeaderReader(session, driver, finder, settings.fetch, settings.timeouts)
        self._finding_kept: asyncio.Task[KeptLookup | None] | None = None
        self._variants: dict[int, list[DocumentHandle]] = {}
        self._fetches: dict[ChunkId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected: set[int] = set()
        self.fetched_at = 0.0
        self.predicted_s: float | None = None
        self.in_order: RepairInOrder | None = None

    async def __aenter__(self) -> Self:
        """Begin."""
        self._done: asyncio.Future[ev.Finish] = asyncio.get_running_loop().create_future()
        await self._headers.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the load and stop everything of it that is under way, but for a job that a thread is at."""
        self._is_gone = True
        self._driver.leave(self.number)
        self._done.cancel()
        if self._finding_kept:
            self._finding_kept.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # whoever is cancelled once more leaves no blob open
            await self._headers.__aexit__()
            self._parts.clear()

    @property
    def bytes(self) -> int:
        """Received over the link, headers included."""
        return self._headers.wire_bytes

    async def run(self, query_tokens: int, goal: Goal) -> ev.Finish:
        """Lay out the prompt and fill it."""
        self._goal = goal
        tokens = [document.tokens for document in self._found]
        total = self._length(tokens) + query_tokens
        if total > self._engine.window:
            around = "documents, what is put around them" if self.front_tokens or self._head else "documents"
            msg = (
                f"{around} and question are {total} tokens, "
                f"the model's window is {self._engine.window}; "
                "name fewer documents"
            )
            raise ArgumentError(msg)
        count = len(tokens)
        if self._head and self.links.option:  # which the first document has not seen, either
            self.links = replace(self.links, option=replace(self.links.option, whole=True, begins="closing"))
        links, repair = self.links, None
        if count > 1 or (links.option and links.option.whole):
            repair = links.option if links.is_able else None
            spared = links.option is not None and not links.option.least and goal.objective != "quality"
            if links.trouble and (links.is_able or not spared):
                self.misses.append(links.trouble)
            if repair is None or links.report is None:
                links.check(self.link_warning(0.0))
        looks, computed = bool(self._question), query_tokens + self.front_tokens + len(self._head)
        self.number = self._driver.begin(
            self, lambda number: ev.LoadRequested(number, count, computed, goal, repair, looks, self.link_tokens)
        )
        laid_out = self._spawn(self._lay_out(tokens))
        opening = [self._spawn(self._open(index, laid_out)) for index in range(count)]
        if repair is not None and self._keeper is not None:
            self._finding_kept = asyncio.create_task(self._find_kept(self._keeper, opening))
        return await self._done

    @property
    def documents(self) -> list[DocumentHandle]:
        """The documents, once their headers were read."""
        return [self._documents[index] for index in range(len(self._found))]

    async def _find_kept(self, keeper: RepairKeeper, opening: Sequence[asyncio.Task[None]]) -> KeptLookup | None:
        """What earlier repairs computed of these documents, read beside their chunks."""
        await asyncio.wait(opening)
        if len(self._documents) < len(self._found):
            return None  # the load fails, or has ended
        try:
            return await self._driver.look_up(
                partial(keeper.find, self.documents, self.opening), self._timeouts.patience
            )
        except KvwireError as error:
            return keeper.unread(error)

    async def kept_rows(self, limit_s: float) -> KeptLookup | None:
        """What earlier repairs computed of these documents."""
        if self._finding_kept is None:
            return None
        await asyncio.wait({self._finding_kept}, timeout=max(0.0, limit_s))
        return self._finding_kept.result() if self._finding_kept.done() else None

    @property
    def takes_shift(self) -> bool:
        """Whether the mean shift of links was learnt on prompts like this: whole documents, each computed alone."""
        infos = [document.info for document in self.documents]
        opening = self._engine.opening_tokens
        plain = all(info is None or (info.neutral_prefix == opening and not info.soft_tokens) for info in infos)
        return plain and len(infos) > 1 and self.starts is None and self.prompt.cache.kept is None

    def link_warning(self, share: float, *, shifted: bool = True) -> str:
        """Why linked documents make an answer doubtful; a single one is not linked."""
        return self.links.warning(share, shifted=shifted) if len(self._found) > 1 else ""

    @property
    def link_tokens(self) -> tuple[int, ...]:
        """How many tokens are computed behind each document; none where only documents stand in the prompt."""
        return ()

    @property
    def laid_out(self) -> PromptLayout | None:
        """Where everything stands, where more than documents does."""
        return None

    @property
    def unrepairable(self) -> str:
        """Why no row of the prompt may be computed anew by itself; empty where each may."""
        names = (document.document_id for document in self.documents if document.layout)
        return next((f"anchors of {name!r} stand for tokens that are not there any more" for name in names), "")

    @property
    def texts(self) -> list[tuple[int, ...] | None]:
        """Token ids of the documents, as far as they are known by now."""
        return [document.token_ids for document in self.documents]

    @property
    def deviations(self) -> Tensor | None:
        """How far the prompt's tokens move behind other documents; None where a blob does not say so."""
        infos = [document.info for document in self.documents]
        return by_token([(info.tokens, info.deviation) if info else (0, None) for info in infos])

    @property
    def told(self) -> RepairContext:
        """What is known of the prompt for choosing rows."""
        needed = "deviation" in self.links.selector.needs
        moved = self.deviations if needed else None
        head = len(self.opening) if self._head else 0
        return RepairContext(self.texts, moved, self.seen, self.unrepairable, self.laid_out, head)

    def front_of(self, finish: ev.Finish) -> int:
        """Tokens from the prompt's beginning on that see all that stands before them, those of its head included."""
        head = len(self.opening)
        if not self._head:
            return finish.front + head if finish.front else 0
        computed = 0
        sizes = self.inputs[0].tokens
        levels = {each.chunk.chunk: each.level for each in finish.decisions if each.chunk.document == 0}
        for chunk, tokens in enumerate(sizes):  # a fetched one has not seen the system text
            if levels.get(chunk, 0) is not None:
                return head + computed
            computed += tokens
        return head + max(computed, finish.front)

    def row(self, first: ChunkId, last: ChunkId, *, behind: bool) -> tuple[KVCache | None, Sequence[int], int]:
        """As for prompts without a system text, which the first document sees where it is computed."""
        return super().row(first, last, behind=behind or (first.document == 0 and bool(self._head)))

    async def _repair(self, asked: ev.Repair) -> None:
        """Compute rows of documents that stay as they are."""
        rows, left, trouble, began = 0, 0, "", self._driver.clock()
        try:
            rows, left, seconds = await self._driver.compute(partial(self._repair_here, asked))
        except Exception as error:  # noqa: BLE001 - rows can be computed at the end, where what is wrong is told
            trouble, seconds = in_words(error), max(0.0, self._driver.clock() - began)
        self._driver.tell(ev.RepairDone(self.number, asked.documents, rows, left, seconds, trouble))

    def _repair_here(self, asked: ev.Repair) -> tuple[int, int, float]:
        """How many rows were computed, how many are left, and the seconds; in the compute thread."""
        began = self._driver.clock()
        if self._is_gone:
            raise StorageError(LOAD_CANCELLED)
        if self.in_order is None:
            repairer, front = Repairer(self._engine), asked.front and asked.front + len(self.prompt.opening)
            self.in_order = repairer.begin(self.links, self.prompt, self.told, self._question, asked.share, front)
        stop_at = sum(self.prompt.lengths[: asked.documents])
        rows = self.in_order.run(stop_at, lambda: self._is_gone)
        self._engine.synchronize()
        return rows, self.in_order.left, self._driver.clock() - began

    def complete(self) -> None:
        """Whatever is left to compute in the prompt before it is repaired, in the compute thread: nothing here."""

    def _length(self, tokens: Sequence[int]) -> int:
        """Positions that documents of these lengths take."""
        return len(self.opening) + sum(tokens)

    async def _lay_out(self, tokens: Sequence[int]) -> None:
        total = self._length(tokens)
        whole = min(total + self._room_tokens, self._engine.window)
        self.room = await self._driver.compute(partial(self._engine.allocate, whole))
        cache = self.room.slice(0, total)
        self.prompt = LinkedPrompt(tokens, self._engine.meta, cache=cache, starts=self.starts, opening=self.opening)
        if self.opening:
            await self._driver.compute(self._open_prompt)

    @property
    def system_tokens(self) -> int:
        """Tokens of the system text, which stand at the prompt's head."""
        return len(self._head)

    def _open_prompt(self) -> None:
        """Compute what stands at the prompt's head, in the compute thread."""
        began = self._driver.clock()
        (front,) = self._engine.prefill([self.opening])
        self.prompt.write_opening(front)
        if self._head:
            self._engine.synchronize()
            self.front_s += self._driver.clock() - began

    def _tell_opening(self, index: int, document: DocumentHandle) -> None:
        """Tell of a document that stands less exactly behind the prompt's BOS than it could."""
        info, ids = document.info, document.token_ids
        if info and document.layout is None and lacks_opening(self._engine, info, ids):
            self.misses.append(f"{document.document_id!r} was {WITHOUT}")
        if index == 0 and ids and self.opening and begins_with(ids, self._engine.opening_tokens):
            self.misses.append(f"{document.document_id!r} {TWICE}")

    def fail(self, error: BaseException) -> None:
        """End the load with an error."""
        if not self._done.done():
            self._done.set_exception(error)

    def execute(self, instruction: ev.Instruction) -> None:
        """Begin what the controller asks for."""
        match instruction:
            case ev.Fetch(chunk=chunk):
                self._choose(chunk.document, instruction.variant)
                self._expect(chunk.document, instruction.level)
                self._fetches[chunk] = self._spawn(self._fetch(instruction))
            case ev.Decode(chunks, levels):
                self._driver.run(self._decode(chunks, levels))
            case ev.Recompute() | ev.RecomputeTogether() | ev.Look() | ev.Repair():
                self.begin_pass()
                self._driver.run(self._pass(instruction))
            case ev.Interrupt():
                self.stop_pass()
            case ev.ComputePrefix(document=document):
                self._choose(document, instruction.variant)
                self._driver.run(self._start_head(document))
            case ev.Cancel(chunk, reason):
                self._cancel(chunk, reason)
            case ev.Release(chunk):
                self._parts.pop(chunk, None)
            case ev.Finish() | ev.Fail() | ev.Refuse():
                self._end(instruction)

    def _pass(
        self, instruction: ev.Recompute | ev.RecomputeTogether | ev.Look | ev.Repair
    ) -> Coroutine[None, None, None]:
        """What the engine is asked to run."""
        match instruction:
            case ev.Recompute():
                return self._recompute(instruction)
            case ev.RecomputeTogether():
                from kvwire.runtime.together import recompute_together  # few loads need it

                carriers = (self._driver.carrier(each.first.load) for each in instruction.passes)
                loads = [each for each in carriers if isinstance(each, Executor)]
                return recompute_together(self._engine, self._driver, instruction, loads)
            case ev.Look():
                return self._look()
            case ev.Repair():
                return self._repair(instruction)

    def _end(self, instruction: ev.Finish | ev.Fail | ev.Refuse) -> None:
        match instruction:
            case ev.Finish() if not self._done.done():
                self._done.set_result(instruction)
            case ev.Fail(reason=reason):
                advice = (document.advice for document in self._documents.values() if document.advice)
                self.fail(StorageError("; ".join([reason, *advice][:2])))
            case ev.Refuse(late_s=late_s):
                msg = f"there is no room before the deadline; ask again in {late_s:.3f} s, or with a longer deadline"
                self.fail(OverloadedError(msg, late_s))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail with the error of a task that broke: it reports nothing any more, and would be waited for."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    # Headers.

    async def _open(self, index: int, laid_out: asyncio.Task[None]) -> None:
        document, *others = await self._headers.open_all(self._found[index])
        soft = self._engine.soft_tokens
        document.check_soft_tokens(soft.name(self._engine.vocabulary_size) if soft else None)
        await laid_out
        if document.info and not document.prefix_layers:
            try:
                self._make_decoder(index, document, None)
            except KvwireError as error:
                if document.token_ids is None:
                    raise
                document.fall_back(str(error))
        self._settle_holes(document)
        if document.info:
            self.fetched_at = self._driver.clock()
        self._tell_opening(index, document)
        if document.trouble:
            self.misses.append(f"{document.document_id}: {document.trouble}")
        is_pruned = document.decoder is not None and document.decoder.kept is not None
        usable = (each for each in others if not is_pruned and self._can_decode(index, each))
        self._documents[index], self._variants[index] = document, [document, *usable]
        for each in self._variants[index]:
            each.exact = self._exact
        inputs = tuple(self._plan_input(each) for each in self._variants[index])
        self.inputs[index] = inputs[0]
        if trouble := self._quality_trouble(document, inputs):
            self.misses.append(f"{document.document_id}: {trouble}")
        self._driver.tell(ev.IndexKnown(self.number, index, inputs))
        if self.predicted_s is None:
            self.predicted_s = self._driver.predicted_s(self.number)

    def _quality_trouble(self, document: DocumentHandle, inputs: Sequence[DocumentPlanInput]) -> str:
        """Why no level of a document, or not any that may be fetched, is as good as is wanted; empty where one is."""
        if document.info is None:
            return ""
        if self._exact:
            has_any = any(each.has_blob for each in inputs)
            return "" if has_any else "it has no lossless level; encode it with --lossless"
        if not document.has_blob or self._max_kl is None:
            return ""
        floor = self._goal.floor if self._has_floor or self._goal.floor else None
        return floor_trouble(document.info, self._max_kl, floor, self._goal.ceiling)

    def _plan_input(self, document: DocumentHandle) -> DocumentPlanInput:
        """What planning is told of a document; a floor or a ceiling that was asked for goes before one by KL."""
        made = document.plan_input(len(self._engine.meta.layers))
        if self._max_kl is None or self._has_floor or self._goal.floor or not (document.info and made.has_blob):
            return made
        floor, ceiling = kl_floor(document.info, self._max_kl), self._goal.ceiling
        return replace(made, floor=floor if ceiling is None else min(floor, ceiling))

    def _settle_holes(self, document: DocumentHandle) -> None:
        """Know how to compute a document whose cache lacks entries; or that nobody does."""
        if document.decoder is None or document.decoder.kept is not None:
            from kvwire.runtime.anchored import resolve_pruned_layout  # few loads need it

            resolve_pruned_layout(document, self._engine, None)

    def _can_decode(self, index: int, variant: DocumentHandle) -> bool:
        """Whether a variant is of use; a pruned one is another cache. What is wrong with it does not matter."""
        try:
            variant.plan_input(1)
            if not variant.prefix_layers:
                variant.decode_into(self.prompt.document(index), self.prompt.offset(index), None, self._backend)
        except Exception:  # noqa: BLE001 - whatever it is, there are others
            return False
        return variant.decoder is None or variant.decoder.kept is None

    def _choose(self, index: int, variant: int) -> None:
        """Go by a document's variant from now on; the controller settles on one before it asks for anything of it."""
        document = self._variants[index][variant]
        if document is not self._documents[index]:
            self._documents[index] = document
            self.inputs[index] = self._plan_input(document)

    # The link.

    def _expect(self, index: int, level: int) -> None:
        """Compute what a document's text lets expect while its first chunks are on their way, rather than after."""
        document = self._documents[index]
        info, decoder, profile, ids = document.info, document.decoder, document.profile, document.token_ids
        if index in self._expected or info is None or info.levels[level].lossless:
            return
        self._expected.add(index)
        if isinstance(profile, Profile) and ids is not None and decoder is not None and not decoder.on_gpu:
            self._spawn(self._prepare(expect(profile, ids[: document.wanted_tokens])))

    async def _prepare(self, steps: Iterator[None]) -> None:
        """Do what decoding would do itself, until the load is over."""
        try:
            await self._driver.in_steps(steps, lambda: not self._done.done())
        except Exception:  # noqa: BLE001 - whatever it is, no load needs it
            _log.warning("what decoding will need could not be prepared; decoding prepares it itself", exc_info=True)

    async def _fetch(self, asked: ev.Fetch) -> None:
        chunk, document = asked.chunk, self._documents[asked.chunk.document]
        info = document.info
        reads = [each for each in info.reads(chunk.chunk, asked.level) if each.level >= asked.first] if info else []
        parts: dict[int, bytes] = {}
        trouble = await document.fetch(reads, asked.until, parts)
        sound = next((at for at, each in enumerate(reads) if each.level not in parts), len(reads))
        if trouble and not asked.first:
            self._lost(chunk, trouble)
        if not sound:
            self._driver.tell(ev.ChunkFailed(chunk, trouble))
            return
        self.fetched_at = self._driver.clock()
        self._parts.setdefault(chunk, {}).update((each.level, parts[each.level]) for each in reads[:sound])
        self._driver.tell(ev.ChunkArrived(chunk, reads[sound - 1].level, trouble))

    def _cancel(self, chunk: ChunkId, reason: str) -> None:
        task = self._fetches.pop(chunk, None)
        if task:
            task.cancel()
        if chunk not in self._parts:
            self._lost(chunk, f"given up: {reason}")
