"""One load: opens its documents and executes the controller's instructions until the prompt is complete.

It decides nothing. Fetching runs on the event loop, the engine in one thread and decoding in the same or in another
(see ``driver``), so that the link and the processor are busy at once.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from kvwire.codec import Profile
from kvwire.codec.prediction.text import expect
from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, KvwireError, MismatchError, OverloadedError, StorageError
from kvwire.reuse import LinkedPrompt
from kvwire.runtime.document import in_words, opening_troubles
from kvwire.runtime.execute import LOAD_CANCELLED, PromptWorker
from kvwire.runtime.find import DocumentOpener
from kvwire.runtime.links import RepairContext, Repairer, by_token

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence

    from torch import Tensor

    from kvwire.controller import Goal, RepairOption
    from kvwire.engines.base import Engine
    from kvwire.runtime.document import FoundDocument, OpenDocument
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.find import DocumentFinder
    from kvwire.runtime.kept import KeptLookup, RepairKeeper
    from kvwire.runtime.links import RepairInOrder
    from kvwire.runtime.request import LoadRequest
    from kvwire.runtime.session import Session
    from kvwire.types import ChunkId, KVCache

_log = logging.getLogger("kvwire.runtime")
_GRACE_STEP_S = 0.05
"""Interval at which a late load checks whether waiting still costs less than recomputing."""


class Load:
    """One load, from ``run`` to ``Finish``; a context manager that stops its running jobs.

    Attributes:
        work: Its computing jobs and its prompt, which exists from ``run`` on.
        fetched_at: When the last used bytes arrived, on the driver's clock.
        predicted_s: See ``ControllerDriver.predicted_s``.
        links: Its settings for links.
        room: The prompt's cache with free memory for question and answer.
        in_order: Rows repaired during fetches; None without any.
        front_s: Compute time of tokens around documents, in seconds.
        is_finished: Whether the controller has ended the load with all that can be loaded.
    """

    def __init__(
        self, engine: Engine, found: Sequence[FoundDocument], session: Session, driver: ControllerDriver,
        finder: DocumentFinder, request: LoadRequest,
    ) -> None:  # fmt: skip
        """Take the parts; enter the context to begin."""
        self._engine, self._found, self._session, self._driver = engine, found, session, driver
        self._request, self.layout = request, request.layout
        self.work = PromptWorker(
            engine, [each.document_id for each in found], driver, request.backend, request.question,
            sees_documents=self.layout.sees_documents, sees_head=bool(self.layout.head),
        )  # fmt: skip
        self.links = request.links
        most = request.wanted if request.cuts and request.wanted else None
        self._tokens = [min(each.tokens, most or each.tokens) for each in found]
        self.place = self.layout.place(self._tokens)
        self.room: KVCache
        self._opener = DocumentOpener(session, driver, finder, request.fetch, request.timeouts)
        self._finding_kept: asyncio.Task[KeptLookup | None] | None = None
        self._variants: dict[int, list[OpenDocument]] = {}
        self._fetches: dict[ChunkId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected: set[int] = set()
        self._linked = 0  # position up to which tokens between documents are computed
        self.fetched_at = self.front_s = 0.0
        self.predicted_s: float | None = None
        self.in_order: RepairInOrder | None = None
        self.is_finished = False

    async def __aenter__(self) -> Self:
        """Begin."""
        self._done: asyncio.Future[ev.Finish | None] = asyncio.get_running_loop().create_future()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the load and stop its jobs, except one running in a thread."""
        self.work.is_gone = True
        self._driver.leave(self.work.number)
        self._done.cancel()
        if self._finding_kept:
            self._finding_kept.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:  # a second cancellation must not leave blobs open
            await self._opener.close()
            self.work.parts.clear()

    async def run(self) -> ev.Finish | None:
        """Lay out the prompt and fill it; None if a document's length is not the expected one."""
        if not self._request.is_partial:
            return await self._run()
        deadline_s, began = self._request.goal.deadline_s, self._driver.clock()
        limit_s = min(self._request.limit_s if deadline_s is None else max(0.0, deadline_s), self._request.worth_s)
        running = asyncio.ensure_future(self._run())
        try:
            await asyncio.wait({running}, timeout=limit_s)
            while not running.done() and self._driver.clock() - began < limit_s + self._request.grace_s(self.work):
                await asyncio.wait({running}, timeout=_GRACE_STEP_S)
            if running.done():
                return running.result()
            reason = f"ended after {self._driver.clock() - began:.3g} s"
        except KvwireError as error:
            reason = in_words(error)
        finally:
            running.cancel()
        self.work.misses.append(reason)
        return ev.Finish(self.work.number, (), reason)

    async def _run(self) -> ev.Finish | None:
        request, layout, place, count = self._request, self.layout, self.place, len(self._found)
        self.links = layout.plan_links(self.links, place, self.work.misses)
        self._check_fits()
        repair = self._repair_option()
        looks, computed = bool(request.question), request.query_tokens + place.front_tokens + len(layout.head)
        self.work.number = self._driver.begin(
            self,
            lambda number: ev.LoadRequested(number, count, computed, request.goal, repair, looks, place.link_tokens),
        )
        laid_out = self._spawn(self._lay_out())
        opening = [self._spawn(self._open(index, laid_out)) for index in range(count)]
        if repair is not None and request.keeper is not None and layout.keeps_repairs:
            self._finding_kept = asyncio.create_task(self._find_kept(request.keeper, opening))
        finish = await self._done
        self.is_finished = finish is not None
        return finish

    def _check_fits(self) -> None:
        """Refuse a prompt longer than the model's window."""
        wanted, length = self._request.wanted, self.place.length
        used = length if wanted is None or self._request.cuts else min(length, len(self.layout.opening) + wanted)
        total = used + self._request.query_tokens
        if total > self._engine.window:
            is_more = self.place.front_tokens or self.layout.head
            around = "documents, what is put around them" if is_more else "documents"
            raise ArgumentError(
                f"{around} and question are {total} tokens, the model's window is {self._engine.window}; name fewer "
                "documents"
            )

    def _repair_option(self) -> RepairOption | None:
        """How the controller may repair the prompt; if it may not, the reason is reported or raised."""
        links = self.links
        if len(self._found) == 1 and not (links.option and links.option.whole):
            if not (links.option and links.option.least == 1):
                return None
            links = replace(links, option=replace(links.option, whole=True))  # all rows: those of a prefill
        repair = links.option if links.is_able else None
        spared = links.option is not None and not links.option.least and self._request.goal.objective != "quality"
        if links.trouble and (links.is_able or not spared):
            self.work.misses.append(links.trouble)
        if repair is None or links.report is None:
            links.check(self.link_warning(0.0))
        return repair

    async def _lay_out(self) -> None:
        """Allocate memory, and compute the prompt's head."""
        total, opening = self.place.length, self.layout.opening
        whole = min(total + self._request.room_tokens, self._engine.window)
        self.room = await self._driver.compute(partial(self._engine.allocate, whole))
        self.work.prompt = LinkedPrompt(
            self._tokens, self._engine.meta, cache=self.room.slice(0, total), starts=self.place.starts, opening=opening
        )
        if self._request.cuts:  # the row behind the prompt is the question's, which comes after all decoding
            self.work.room = self.room.slice(0, total + 1)
        if opening:
            await self._driver.compute(self._compute_head)

    def _compute_head(self) -> None:
        """Compute the prompt's opening tokens and its system text, in the compute thread."""
        began = self._driver.clock()
        (front,) = self._engine.prefill([self.layout.opening])
        self.work.prompt.write_opening(front)
        if self.layout.head:
            self._engine.synchronize()
            self.front_s += self._driver.clock() - began

    # Documents: open them, and tell the controller.

    async def _open(self, index: int, laid_out: asyncio.Task[None]) -> None:
        opened = await self._opener.open_all(self._found[index])
        if not opened:
            if not self._done.done():
                self._done.set_result(None)
            return
        document, *others = opened
        soft, request = self._engine.soft_tokens, self._request
        document = document.with_soft_tokens(soft.name(self._engine.vocabulary_size) if soft else None)
        others = [self._cut(each) for each in others]
        document = self._cut(document)
        await laid_out
        document = self.layout.check(self._decodable(index, document))
        if document.info:
            self.fetched_at = self._driver.clock()
        begins = self.layout.opening if index == 0 else ()
        self.work.misses += opening_troubles(self._engine, document, begins)
        if document.trouble:
            self.work.misses.append(f"{document.document_id}: {document.trouble}")
        is_pruned = document.decoder is not None and document.decoder.kept is not None
        if is_pruned and document.is_cut:
            msg = f"{document.document_id!r} is pruned, and so loaded whole or not at all: leave first_tokens out"
            raise MismatchError(msg)
        usable = [] if is_pruned else [each for other in others if (each := self._usable(index, other))]
        asked = [
            replace(each, exact=request.exact or _is_lossless(each, request.goal), wanted_tokens=request.wanted)
            for each in (document, *usable)
        ]
        self._variants[index] = asked
        self.work.use(index, asked[0])
        layers = len(self._engine.meta.layers)
        inputs = tuple(request.plan_input(each, layers) for each in asked)
        self.work.inputs[index] = inputs[0]
        if trouble := request.quality_trouble(document, inputs):
            self.work.misses.append(f"{document.document_id}: {trouble}")
        self._driver.tell(ev.IndexKnown(self.work.number, index, inputs))
        if self.predicted_s is None:
            self.predicted_s = self._driver.predicted_s(self.work.number)

    def _cut(self, document: OpenDocument) -> OpenDocument:
        """A document of which the prompt has only the first tokens, if it has more than these."""
        wanted = self._request.wanted
        is_cut = self._request.cuts and wanted is not None and wanted < document.tokens
        return replace(document, wanted_tokens=wanted, is_cut=True) if is_cut else document

    def _decodable(self, index: int, document: OpenDocument) -> OpenDocument:
        """A document with its decoder; with its text if its blob cannot be decoded, or not finely enough."""
        if self._request.exact or self._request.has_floor:
            document = document.as_fine_as(self._request.goal.floor)
        if not document.info or document.prefix_layers or document.fetcher is None:
            return document
        try:
            return self.work.decoding(index, document)
        except KvwireError as error:
            if document.token_ids is None:
                raise
            return document.without_blob(str(error))

    def _usable(self, index: int, variant: OpenDocument) -> OpenDocument | None:
        """A decodable variant; a pruned one is another cache. Its faults are ignored."""
        try:
            variant.plan_input(1)
            if not variant.prefix_layers:
                variant = self.work.decoding(index, variant)
        except Exception:  # noqa: BLE001 - whatever it is, there are others
            return None
        return variant if variant.decoder is None or variant.decoder.kept is None else None

    # Facts about the prompt.

    @property
    def bytes(self) -> int:
        """Bytes received over the link, headers included."""
        return self._opener.wire_bytes

    @property
    def documents(self) -> list[OpenDocument]:
        """The documents, once all are open."""
        return [self.work.documents[index] for index in range(len(self._found))]

    @property
    def texts(self) -> list[tuple[int, ...] | None]:
        """Token ids of the documents' tokens in the prompt, as far as known."""
        ids = [document.token_ids for document in self.documents]
        return [each and each[:tokens] for each, tokens in zip(ids, self._tokens, strict=True)]

    def cut(self, tokens: int) -> None:
        """Shorten the load to the first tokens of a single document."""
        prompt, opening = self.work.prompt, self.work.prompt.opening
        if tokens < prompt.tokens[0]:
            room = self.room.slice(0, len(opening) + tokens)
            if prompt.cache.kept is not None:
                room = replace(room, kept=prompt.cache.slice(0, room.tokens).kept)
            self.work.prompt = LinkedPrompt([tokens], self._engine.meta, cache=room, opening=opening)

    @property
    def takes_shift(self) -> bool:
        """Whether the prompt is like those of the mean shift: whole documents, each computed alone."""
        infos = [document.info for document in self.documents]
        opening = self._engine.opening_tokens
        plain = not self._request.cuts and all(
            info is None or (info.neutral_prefix == opening and not info.soft_tokens) for info in infos
        )
        whole = not self._request.cuts and self.place.starts is None and self.work.prompt.cache.kept is None
        return plain and whole and len(infos) > 1

    def link_warning(self, share: float, *, shifted: bool = True) -> str:
        """Why linked documents make an answer doubtful; a single one is not linked."""
        return self.links.warning(share, shifted=shifted) if len(self._found) > 1 else ""

    @property
    def repair_context(self) -> RepairContext:
        """Facts about the prompt for its repair."""
        moved = self.deviations if "deviation" in self.links.selector.needs else None
        names = (document.document_id for document in self.documents if document.layout)
        trouble = next((f"anchors of {name!r} stand for tokens that are not there any more" for name in names), "")
        head = len(self.layout.opening) if self.layout.head else 0
        return RepairContext(self.texts, moved, self.work.seen, trouble, self.place.laid_out, head)

    @property
    def deviations(self) -> Tensor | None:
        """How much the prompt's tokens change behind other documents; None if a blob lacks it."""
        infos = [document.info for document in self.documents]
        lengths = zip(infos, self._tokens, strict=True)
        return by_token([(tokens, info.deviation) if info else (0, None) for info, tokens in lengths])

    def front_of(self, finish: ev.Finish) -> int:
        """Number of the prompt's first tokens, head included, that see all before them."""
        head = len(self.layout.opening)
        if not self.layout.head:
            return finish.front + head if finish.front else 0
        computed = 0
        levels = {each.chunk.chunk: each.level for each in finish.decisions if each.chunk.document == 0}
        for chunk, tokens in enumerate(self.work.inputs[0].tokens):  # a fetched one has not seen the system text
            if levels.get(chunk, 0) is not None:
                return head + computed
            computed += tokens
        return head + max(computed, finish.front)

    # Repair.

    async def _find_kept(self, keeper: RepairKeeper, opening: Sequence[asyncio.Task[None]]) -> KeptLookup | None:
        """Read rows of earlier repairs of these documents, while their chunks are fetched."""
        await asyncio.wait(opening)
        if len(self.work.documents) < len(self._found):
            return None  # the load failed, or has ended
        try:
            find = partial(keeper.find, self.documents, self.layout.opening)
            return await self._session.look_up(find, self._request.timeouts.patience)
        except KvwireError as error:
            return keeper.unread(error)

    async def kept_rows(self, limit_s: float) -> KeptLookup | None:
        """Wait for rows of earlier repairs of these documents."""
        if self._finding_kept is None:
            return None
        await asyncio.wait({self._finding_kept}, timeout=max(0.0, limit_s))
        return self._finding_kept.result() if self._finding_kept.done() else None

    async def _repair(self, asked: ev.Repair) -> None:
        """Repair rows of documents in their final state."""
        rows, left, trouble, began = 0, 0, "", self._driver.clock()
        try:
            rows, left, seconds = await self._driver.compute(partial(self._repair_here, asked))
        except Exception as error:  # noqa: BLE001 - rows can be computed at the end, where what is wrong is told
            trouble, seconds = in_words(error), max(0.0, self._driver.clock() - began)
        self._driver.tell(ev.RepairDone(self.work.number, asked.documents, rows, left, seconds, trouble))

    def _repair_here(self, asked: ev.Repair) -> tuple[int, int, float]:
        """Repair rows in the compute thread; returns how many were computed, how many are left, and the seconds."""
        began, prompt, starts = self._driver.clock(), self.work.prompt, self.place.starts
        if self.work.is_gone:
            raise StorageError(LOAD_CANCELLED)
        if self.place.link_tokens and starts:
            rows, seconds = self._compute_between(starts[asked.documents])
            return rows, sum(self.place.link_tokens[asked.documents :]), seconds
        if self.in_order is None:
            repairer, front = Repairer(self._engine), asked.front and asked.front + len(prompt.opening)
            question = self._request.question
            self.in_order = repairer.begin(self.links, prompt, self.repair_context, question, asked.share, front)
        stop_at = sum(prompt.lengths[: asked.documents])
        rows = self.in_order.run(stop_at, lambda: self.work.is_gone)
        self._engine.synchronize()
        return rows, self.in_order.left, self._driver.clock() - began

    def complete(self) -> None:
        """Compute what the prompt still lacks before its repair, in the compute thread."""
        if self.place.starts is not None:
            self._compute_between(None)

    def _compute_between(self, stop: int | None) -> tuple[int, float]:
        """Compute tokens between documents, up to a position; returns their number, and the seconds."""
        began = self._driver.clock()
        rows = self.layout.compute(self.work.prompt, self.place, self._linked, stop)
        self._engine.synchronize()
        self._linked, seconds = self.place.length if stop is None else stop, self._driver.clock() - began
        if self.place.laid_out is None:
            self.work.recompute_s += seconds
        else:
            self.front_s += seconds
        return rows, seconds

    # The controller's instructions.

    def fail(self, error: BaseException) -> None:
        """End the load with an error."""
        if not self._done.done():
            self._done.set_exception(error)

    def execute(self, instruction: ev.Instruction) -> None:
        """Start an instruction."""
        match instruction:
            case ev.Fetch(chunk=chunk):
                self._choose(chunk.document, instruction.variant)
                self._expect(chunk.document, instruction.level)
                self._fetches[chunk] = self._spawn(self._fetch(instruction))
            case ev.Decode(chunks, levels):
                self._driver.run(self.work.decode(chunks, levels))
            case ev.Recompute() | ev.RecomputeTogether() | ev.Look() | ev.Repair():
                self.work.begin_pass()
                self._driver.run(self._pass(instruction))
            case ev.Interrupt():
                self.work.stop_pass()
            case ev.ComputePrefix(document=document):
                self._choose(document, instruction.variant)
                self._driver.run(self.work.start_head(document))
            case ev.Cancel(chunk, reason):
                self._cancel(chunk, reason)
            case ev.Release(chunk):
                self.work.parts.pop(chunk, None)
            case ev.Finish() | ev.Fail() | ev.Refuse():
                self._end(instruction)

    def _end(self, instruction: ev.Finish | ev.Fail | ev.Refuse) -> None:
        match instruction:
            case ev.Finish() if not self._done.done():
                self._done.set_result(instruction)
            case ev.Fail(reason=reason):
                advice = (document.advice for document in self.work.documents.values() if document.advice)
                self.fail(StorageError("; ".join([reason, *advice][:2])))
            case ev.Refuse(late_s=late_s):
                msg = f"there is no room before the deadline; ask again in {late_s:.3f} s, or with a longer deadline"
                self.fail(OverloadedError(msg, late_s))

    async def _pass(self, instruction: ev.Recompute | ev.RecomputeTogether | ev.Look | ev.Repair) -> None:
        """Run an instruction for the engine."""
        match instruction:
            case ev.Recompute():
                self._driver.tell(await self.work.recompute(instruction))
            case ev.RecomputeTogether():
                from kvwire.runtime.together import recompute_together  # few loads need it

                handlers = (self._driver.handler(each.first.load) for each in instruction.passes)
                loads = [each.work for each in handlers if isinstance(each, Load)]
                await recompute_together(self._engine, self._driver, instruction, loads)
            case ev.Look():
                await self.work.look()
            case ev.Repair():
                await self._repair(instruction)

    def _choose(self, index: int, variant: int) -> None:
        """Switch to a document's variant; the controller chooses one before any other instruction about it."""
        document = self._variants[index][variant]
        if document.found is not self.work.documents[index].found:
            self.work.documents[index] = document
            self.work.inputs[index] = self._request.plan_input(document, len(self._engine.meta.layers))

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Fail with the error of a broken task: it will report nothing."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self.fail(error)

    # The link.

    def _expect(self, index: int, level: int) -> None:
        """Compute predictions from a document's text while its first chunks are fetched."""
        document = self.work.documents[index]
        info, decoder, profile, ids = document.info, document.decoder, document.found.profile, document.token_ids
        if index in self._expected or info is None or info.levels[level].lossless:
            return
        self._expected.add(index)
        if isinstance(profile, Profile) and ids is not None and decoder is not None and not decoder.on_gpu:
            self._spawn(self._prepare(expect(profile, ids[: document.wanted_tokens])))

    async def _prepare(self, steps: Iterator[None]) -> None:
        """Prepare decoding in steps, until the load is over."""
        try:
            await self._driver.in_steps(steps, lambda: not self._done.done())
        except Exception:  # noqa: BLE001 - whatever it is, no load needs it
            _log.warning("what decoding will need could not be prepared; decoding prepares it itself", exc_info=True)

    async def _fetch(self, asked: ev.Fetch) -> None:
        chunk, document = asked.chunk, self.work.documents[asked.chunk.document]
        reads = [each for each in document.reads(chunk.chunk, asked.level) if each.level >= asked.first]
        parts: dict[int, bytes] = {}
        trouble = await document.fetch(reads, asked.until, parts)
        sound = next((at for at, each in enumerate(reads) if each.level not in parts), len(reads))
        if trouble and not asked.first:
            self.work.lose(chunk, trouble)
        if not sound:
            self._driver.tell(ev.ChunkFailed(chunk, trouble))
            return
        self.fetched_at = self._driver.clock()
        self.work.parts.setdefault(chunk, {}).update((each.level, parts[each.level]) for each in reads[:sound])
        self._driver.tell(ev.ChunkArrived(chunk, reads[sound - 1].level, trouble))

    def _cancel(self, chunk: ChunkId, reason: str) -> None:
        task = self._fetches.pop(chunk, None)
        if task:
            task.cancel()
        if chunk not in self.work.parts:
            self.work.lose(chunk, f"given up: {reason}")


def _is_lossless(document: OpenDocument, goal: Goal) -> bool:
    """Whether only the document's lossless level is requested, which plans have only by itself."""
    level, levels = goal.floor, document.info.levels if document.info else ()
    return level == goal.ceiling and level < len(levels) and levels[level].lossless
