"""The controller's instructions, each as a job: what a load fetches, decodes, computes and repairs.

It decides nothing. Fetching runs on the event loop, the engine in one thread and decoding in the same or in another
(see ``driver``), so that the link and the processor are busy at once.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from kvwire.codec import Profile
from kvwire.codec.prediction.text import expect
from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, OverloadedError, StorageError
from kvwire.runtime.document import in_words
from kvwire.runtime.joined_passes import recompute_together

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from kvwire.codec import BlobDecoder, Pending
    from kvwire.controller import DocumentPlanInput
    from kvwire.engines.base import Engine
    from kvwire.runtime.document import OpenDocument
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.passes import PromptWorker
    from kvwire.types import ChunkId

    Piece = tuple[int, list[bytes], int]
    """A chunk's number, the segments of its level, and the level."""

_log = logging.getLogger("kvwire.runtime")


class Executor:
    """Executes the instructions for one load, until the controller ends it.

    Attributes:
        work: The load's prompt.
        variants: For each document the open ones to choose from, with their inputs for planning.
        done: The controller's last word; None if the load cannot go on with the documents that were found.
        fetched_at: When the last used bytes arrived, on the driver's clock.
        repair: Repairs rows for ``Repair`` in the compute thread; returns how many, how many are left, and seconds.
    """

    def __init__(
        self, engine: Engine, driver: ControllerDriver, work: PromptWorker,
        repair: Callable[[ev.Repair], tuple[int, int, float]],
    ) -> None:  # fmt: skip
        """Start nothing yet; on the session's loop."""
        self._engine, self._driver, self.work, self.repair = engine, driver, work, repair
        self.done: asyncio.Future[ev.Finish | None] = asyncio.get_running_loop().create_future()
        self.variants: dict[int, list[tuple[OpenDocument, DocumentPlanInput]]] = {}
        self.fetched_at = 0.0
        self._parts: dict[ChunkId, dict[int, bytes]] = {}  # fetched segments that are still needed, by level
        self._fetches: dict[ChunkId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expected: set[int] = set()

    async def close(self) -> None:
        """Stop the jobs, except one running in a thread."""
        self.done.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._parts.clear()

    def fail(self, error: BaseException) -> None:
        """End the load with an error."""
        if not self.done.done():
            self.done.set_exception(error)

    def give_up(self) -> None:
        """End the load: its documents are not those that were found."""
        self._finish(None)

    def _finish(self, last: ev.Finish | None) -> None:
        if not self.done.done():
            self.done.set_result(last)

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run a job of the load, whose error ends the load."""
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

    def execute(self, instruction: ev.Instruction) -> None:
        """Start an instruction."""
        match instruction:
            case ev.Fetch(chunk=chunk):
                self._choose(chunk.document, instruction.variant)
                self._expect(chunk.document, instruction.level)
                self._fetches[chunk] = self.spawn(self._fetch(instruction))
            case ev.Decode(chunks, levels):
                self._driver.run(self._decode(chunks, levels))
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
                self._parts.pop(chunk, None)
            case ev.Finish() | ev.Fail() | ev.Refuse():
                self._end(instruction)

    def _end(self, instruction: ev.Finish | ev.Fail | ev.Refuse) -> None:
        match instruction:
            case ev.Finish():
                self._finish(instruction)
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
            case ev.RecomputeTogether(passes):
                numbers = {each.first.load for each in passes}
                loads = [each.work for number, each in self._driver.loads.items() if number in numbers]
                await recompute_together(self._engine, self._driver, instruction, loads)
            case ev.Look():
                await self.work.look()
            case ev.Repair():
                await self._repair(instruction)

    async def _repair(self, asked: ev.Repair) -> None:
        """Repair rows of documents in their final state."""
        rows, left, trouble, began = 0, 0, "", self._driver.clock()
        try:
            rows, left, seconds = await self._driver.compute(partial(self.repair, asked))
        except Exception as error:  # noqa: BLE001 - rows can be computed at the end, where what is wrong is told
            trouble, seconds = in_words(error), max(0.0, self._driver.clock() - began)
        self._driver.tell(ev.RepairDone(self.work.number, asked.documents, rows, left, seconds, trouble))

    def _choose(self, index: int, variant: int) -> None:
        """Switch to a document's variant; the controller chooses one before any other instruction about it."""
        document, made = self.variants[index][variant]
        if document.found is not self.work.documents[index].found:
            self.work.documents[index], self.work.inputs[index] = document, made

    # The link.

    def _expect(self, index: int, level: int) -> None:
        """Compute predictions from a document's text while its first chunks are fetched."""
        document = self.work.documents[index]
        info, decoder, profile, ids = document.info, document.decoder, document.found.profile, document.token_ids
        if index in self._expected or info is None or info.levels[level].lossless:
            return
        self._expected.add(index)
        if isinstance(profile, Profile) and ids is not None and decoder is not None and not decoder.on_gpu:
            self.spawn(self._prepare(expect(profile, ids[: document.wanted_tokens])))

    async def _prepare(self, steps: Iterator[None]) -> None:
        """Prepare decoding in steps, until the load is over."""
        try:
            await self._driver.in_steps(steps, lambda: not self.done.done())
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
        self._parts.setdefault(chunk, {}).update((each.level, parts[each.level]) for each in reads[:sound])
        self._driver.tell(ev.ChunkArrived(chunk, reads[sound - 1].level, trouble))

    def _cancel(self, chunk: ChunkId, reason: str) -> None:
        task = self._fetches.pop(chunk, None)
        if task:
            task.cancel()
        if chunk not in self._parts:
            fault = self.work.documents[chunk.document].fault(chunk.chunk)
            self.work.lose(chunk, f"given up: {reason}{fault and f'; its last attempt: {fault}'}")

    # Decoding.

    async def _decode(self, chunks: tuple[ChunkId, ...], levels: tuple[int, ...]) -> None:
        """Decode chunks whose segments are fetched."""
        bad: dict[ChunkId, Exception] = {}
        work, began, seconds = self.work, 0.0, 0.0
        try:
            began, seconds = await self._driver.decode(
                partial(work.timed, partial(self._decode_here, chunks, levels, bad))
            )
        except Exception as error:  # noqa: BLE001 - out of memory, for one: chunks can be recomputed
            bad = dict.fromkeys(chunks, error)
        work.decode_s += seconds
        if not bad:
            # The lane was taken from the thread's start until here: a busy loop costs as much as computing. Earlier
            # work of the thread, such as a closing pass, is not this job's.
            self._driver.tell(ev.DecodeDone(chunks, self._driver.clock() - began))
            return
        for chunk, trouble in bad.items():
            work.lose(chunk, in_words(trouble))
        lost = tuple(chunk for chunk in chunks if chunk in bad)
        self._driver.tell(ev.DecodeFailed(chunks, lost, in_words(bad[lost[0]])))

    def _decode_here(self, chunks: tuple[ChunkId, ...], levels: tuple[int, ...], bad: dict[ChunkId, Exception]) -> None:
        """Decode chunks in the decode thread; failures go into ``bad``."""
        self.work.check_here()
        pieces: dict[int, dict[ChunkId, Piece]] = {}
        for chunk, level in zip(chunks, levels, strict=True):
            document = self.work.documents[chunk.document]
            segments = [self._parts[chunk][each.level] for each in document.reads(chunk.chunk, level)]
            piece = (document.numbers[chunk.chunk], segments, level)
            pieces.setdefault(chunk.document, {})[chunk] = piece
        left = self._left_by_gpu(pieces)
        troubles = self._driver.side_by_side(self._decode_one, left.items())
        bad.update((chunk, trouble) for chunk, trouble in zip(left, troubles, strict=True) if trouble)

    def _decode_one(self, what: tuple[ChunkId, Piece]) -> Exception | None:
        """Decode one chunk, on the processor or alone on a GPU; returns the error, if any."""
        chunk, piece = what
        try:
            with self.work.writing():
                self._decoder_of(chunk.document).decode_chunk(*piece)
                self.work.levels[chunk] = piece[2]
        except Exception as error:  # noqa: BLE001 - the others are not concerned
            return error
        return None

    def _left_by_gpu(self, pieces: dict[int, dict[ChunkId, Piece]]) -> dict[ChunkId, Piece]:
        """Decode documents' pieces on a GPU in one batch; returns those that it cannot take, or that failed.

        They are then decoded one by one, which finds the bad piece and needs less memory.
        """
        given: list[tuple[Pending, dict[ChunkId, Piece]]] = []
        left: dict[ChunkId, Piece] = {}
        for document, mine in pieces.items():
            decoder = self._decoder_of(document)
            if not decoder.on_gpu:
                left.update(mine)
                continue
            try:
                given.append((decoder.submit(list(mine.values())), mine))
            except Exception:  # noqa: BLE001 - see above
                left.update(mine)
        for pending, mine in given:
            try:
                pending.wait()
                self.work.levels.update((chunk, level) for chunk, (_, _, level) in mine.items())
            except Exception:  # noqa: BLE001 - see above
                left.update(mine)
        return left

    def _decoder_of(self, document: int) -> BlobDecoder:
        decoder = self.work.documents[document].decoder
        if decoder is None:
            raise ArgumentError(f"document {document} has no decoder yet: its prefix layers come first")
        return decoder
