"""The thin executor of one load: it carries out the controller's instructions and reports what happened.

It decides nothing. Fetching runs on the event loop, the engine in one thread and decoding in the same or in another
(see ``driver``), so that the link and the processor are busy at once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Self

from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, KvwireError, MismatchError, OverloadedError, StorageError
from kvwire.reuse import LinkedPrompt
from kvwire.runtime.documents import in_words
from kvwire.runtime.headers import HeaderReader
from kvwire.runtime.links import UNREPAIRED, by_token

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from torch import Tensor

    from kvwire.codec import Backend, BlobDecoder, Pending
    from kvwire.controller import DocumentPlanInput, Goal
    from kvwire.engines.base import Engine
    from kvwire.runtime.documents import DocumentHandle, Timeouts
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.finder import DocumentFinder
    from kvwire.runtime.kept import Found, RepairKeeper
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.session import Session
    from kvwire.transport import FetchSettings
    from kvwire.types import ChunkId

Piece = tuple[int, list[bytes], int]
"""A chunk's number, the segments that its level needs, and the level."""
_GONE = "nobody waits for it any more"


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
    """

    fetch: FetchSettings
    backend: Backend
    timeouts: Timeouts
    links: LinkPlan = UNREPAIRED
    question: Sequence[int] = ()
    keeper: RepairKeeper | None = None


class Executor:
    """One load, from ``run`` to ``Finish``; ``prompt`` is then complete.

    Attributes:
        prompt: The linked cache of all documents; there from ``run`` on.
        number: The load's, for the controller; -1 before ``run``.
        inputs: What planning was told, by document.
        misses: What went wrong and was healed by recomputing, in words.
        decode_s: Compute spent on decoding, in seconds.
        recompute_s: Compute spent on recomputing, in seconds.
        fetched_at: When the last bytes that were used arrived, on steering's clock.
        predicted_s: See ``ControllerDriver.predicted_s``.
        links: What is done so that documents see each other.
        attention: What the question attended to when the prompt was looked at, float32 ``[tokens]``; None before, and
            where it was not.
        look_s: Compute spent on that, in seconds.
        can_look: The engine has not said that its attention is not to be seen.
        starts: Position of each document; None: one after the other.
    """

    starts: tuple[int, ...] | None = None

    def __init__(
        self, engine: Engine, documents: Sequence[DocumentHandle], session: Session, driver: ControllerDriver,
        finder: DocumentFinder, settings: ExecutorSettings,
    ) -> None:  # fmt: skip
        """Take the parts; enter the context to begin.

        Args:
            engine: The model that recomputes.
            documents: The prompt's, in order.
            session: What loads share.
            driver: The controller's, which this load joins.
            finder: What finds documents in the catalog.
            settings: How the load is carried out.
        """
        self._engine, self._found, self._driver = engine, documents, driver
        self._backend, self.links, self._question = settings.backend, settings.links, settings.question
        self.attention: Tensor | None = None
        self.can_look = True
        self._keeper, self._timeouts = settings.keeper, settings.timeouts
        self._headers = HeaderReader(session, driver, finder, settings.fetch, settings.timeouts)
        self._finding_kept: asyncio.Task[Found | None] | None = None
        self.number = -1
        self._documents: dict[int, DocumentHandle] = {}
        self._variants: dict[int, list[DocumentHandle]] = {}
        self._parts: dict[ChunkId, dict[int, bytes]] = {}
        self._fetches: dict[ChunkId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_gone = False
        self.inputs: dict[int, DocumentPlanInput] = {}
        self.misses: list[str] = []
        self.decode_s = self.recompute_s = self.look_s = self.fetched_at = 0.0
        self.predicted_s: float | None = None

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
        """Lay out the prompt and fill it.

        Args:
            query_tokens: Length of the question, in tokens.
            goal: What the load is to reach.

        Returns:
            The controller's last instruction.

        Raises:
            ArgumentError: The prompt does not fit the model's window.
            StorageError: A chunk can be neither fetched nor recomputed.
            KvwireError: What reading a header raised, where the document's text is not known either.
        """
        tokens = [document.tokens for document in self._found]
        total = self._length(tokens) + query_tokens
        if total > self._engine.window:
            msg = (
                f"documents and question are {total} tokens, the model's window is {self._engine.window}; "
                "name fewer documents"
            )
            raise ArgumentError(msg)
        count = len(tokens)
        links, repair = self.links, None
        if count > 1:
            repair = links.option if links.is_able else None
            spared = links.option is not None and not links.option.least and goal.objective != "quality"
            if links.trouble and (links.is_able or not spared):
                self.misses.append(links.trouble)
        looks = bool(self._question)
        self.number = self._driver.begin(
            self, lambda number: ev.LoadRequested(number, count, query_tokens, goal, repair, looks)
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

    async def _find_kept(self, keeper: RepairKeeper, opening: Sequence[asyncio.Task[None]]) -> Found | None:
        """What earlier repairs computed of these documents, read beside their chunks."""
        await asyncio.wait(opening)
        if len(self._documents) < len(self._found):
            return None  # the load fails, or has ended
        try:
            return await self._driver.look_up(partial(keeper.find, self.documents), self._timeouts.patience)
        except KvwireError as error:
            return keeper.unread(error)

    async def kept_rows(self, limit_s: float) -> Found | None:
        """What earlier repairs computed of these documents.

        Args:
            limit_s: Longest wait for what is still being read.

        Returns:
            What was found; None where nobody looked, or where it is late.
        """
        if self._finding_kept is None:
            return None
        await asyncio.wait({self._finding_kept}, timeout=max(0.0, limit_s))
        return self._finding_kept.result() if self._finding_kept.done() else None

    def link_warning(self, share: float) -> str:
        """Why linked documents make an answer doubtful; a single one is not linked.

        Args:
            share: Of the rows that were computed anew.

        Returns:
            The words; empty where nothing says so.
        """
        return self.links.warning(share) if len(self._found) > 1 else ""

    @property
    def texts(self) -> list[tuple[int, ...] | None]:
        """Token ids of the documents, as far as they are known by now."""
        return [document.token_ids for document in self.documents]

    @property
    def deviations(self) -> Tensor | None:
        """How far the prompt's tokens move behind other documents; None where a blob does not say so."""
        infos = [document.info for document in self.documents]
        return by_token([(info.tokens, info.deviation) if info else (0, None) for info in infos])

    def complete(self) -> None:
        """Whatever is left to compute in the prompt before it is repaired, in the compute thread: nothing here."""

    def _length(self, tokens: Sequence[int]) -> int:
        """Positions that documents of these lengths take."""
        return sum(tokens)

    async def _lay_out(self, tokens: Sequence[int]) -> None:
        cache = await self._driver.compute(partial(self._engine.allocate, self._length(tokens)))
        self.prompt = LinkedPrompt(tokens, self._engine.meta, cache=cache, starts=self.starts)

    def fail(self, error: BaseException) -> None:
        """End the load with an error.

        Args:
            error: What ``run`` raises; the first one counts.
        """
        if not self._done.done():
            self._done.set_exception(error)

    def carry_out(self, instruction: ev.Instruction) -> None:
        """Begin what the controller asks for.

        Args:
            instruction: One for this load.
        """
        match instruction:
            case ev.Fetch(chunk=chunk):
                self._choose(chunk.document, instruction.variant)
                self._fetches[chunk] = self._spawn(self._fetch(instruction))
            case ev.Decode(chunks, levels):
                self._driver.run(self._decode(chunks, levels))
            case ev.Recompute():
                self._driver.run(self._recompute(instruction))
            case ev.ComputePrefix(document=document):
                self._choose(document, instruction.variant)
                self._driver.run(self._start_head(document))
            case ev.Look():
                self._driver.run(self._look())
            case ev.Cancel(chunk, reason):
                self._cancel(chunk, reason)
            case ev.Release(chunk):
                self._parts.pop(chunk, None)
            case ev.Finish() | ev.Fail() | ev.Refuse():
                self._end(instruction)

    def _end(self, instruction: ev.Finish | ev.Fail | ev.Refuse) -> None:
        match instruction:
            case ev.Finish() if not self._done.done():
                self._done.set_result(instruction)
            case ev.Fail(reason=reason):
                self.fail(StorageError(reason))
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

    def _lost(self, chunk: ChunkId, words: str) -> None:
        self.misses.append(f"{self._found[chunk.document].document_id} chunk {chunk.chunk}: {words}")

    # Headers.

    async def _open(self, index: int, laid_out: asyncio.Task[None]) -> None:
        document, *others = await self._headers.open_all(self._found[index])
        await laid_out
        if document.info and not document.prefix_layers:
            try:
                self._make_decoder(index, document, None)
            except KvwireError as error:
                if document.token_ids is None:
                    raise
                document.fall_back(str(error))
        if document.info:
            self.fetched_at = self._driver.clock()
        if document.trouble:
            self.misses.append(f"{document.document_id}: {document.trouble}")
        is_pruned = document.decoder is not None and document.decoder.kept is not None
        usable = (each for each in others if not is_pruned and self._can_decode(index, each))
        self._documents[index], self._variants[index] = document, [document, *usable]
        inputs = tuple(each.plan_input(len(self._engine.meta.layers)) for each in self._variants[index])
        self.inputs[index] = inputs[0]
        self._driver.tell(ev.IndexKnown(self.number, index, inputs))
        if self.predicted_s is None:
            self.predicted_s = self._driver.predicted_s(self.number)

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
            self.inputs[index] = document.plan_input(len(self._engine.meta.layers))

    def _make_decoder(self, index: int, document: DocumentHandle, hidden: Tensor | None) -> None:
        """Have a document decoded into its place in the prompt."""
        part, offset = self.prompt.document(index), self.prompt.offset(index)
        decoder = document.decode_into(part, offset, hidden, self._backend)
        if decoder.kept is not None:
            self.prompt.keep(index, decoder.kept)

    # The link.

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

    # The lanes.

    async def _decode(self, chunks: tuple[ChunkId, ...], levels: tuple[int, ...]) -> None:
        bad: dict[ChunkId, Exception] = {}
        began = seconds = 0.0
        try:
            began, seconds = await self._driver.decode(
                partial(self._timed, partial(self._decode_here, chunks, levels, bad))
            )
        except Exception as error:  # noqa: BLE001 - out of memory, for one: chunks can be recomputed
            bad = dict.fromkeys(chunks, error)
        self.decode_s += seconds
        if not bad:
            # From the thread's beginning until here the lane was taken: a busy loop costs as much as computing. What
            # the thread did before is not this job's: a closing pass, for one.
            self._driver.tell(ev.DecodeDone(chunks, self._driver.clock() - began))
            return
        for chunk, trouble in bad.items():
            self._lost(chunk, in_words(trouble))
        lost = tuple(chunk for chunk in chunks if chunk in bad)
        self._driver.tell(ev.DecodeFailed(chunks, lost, in_words(bad[lost[0]])))

    def _decode_here(self, chunks: tuple[ChunkId, ...], levels: tuple[int, ...], bad: dict[ChunkId, Exception]) -> None:
        """Decode chunks, from the decode thread; those that cannot be are put into ``bad``."""
        if self._is_gone:
            raise StorageError(_GONE)
        pieces: dict[int, dict[ChunkId, Piece]] = {}
        for chunk, level in zip(chunks, levels, strict=True):
            info = self._documents[chunk.document].info
            reads = info.reads(chunk.chunk, level) if info else ()
            piece = (chunk.chunk, [self._parts[chunk][each.level] for each in reads], level)
            pieces.setdefault(chunk.document, {})[chunk] = piece
        left = self._left_by_gpu(pieces)
        troubles = self._driver.side_by_side(self._decode_one, left.items())
        bad.update((chunk, trouble) for chunk, trouble in zip(left, troubles, strict=True) if trouble)

    def _decode_one(self, what: tuple[ChunkId, Piece]) -> Exception | None:
        """Decode a chunk on the processor, or as the only one on a GPU; returns why that cannot be."""
        chunk, piece = what
        try:
            self._decoder_of(chunk.document).decode_chunk(*piece)
        except Exception as error:  # noqa: BLE001 - the others are not concerned
            return error
        return None

    def _left_by_gpu(self, pieces: dict[int, dict[ChunkId, Piece]]) -> dict[ChunkId, Piece]:
        """Have a GPU decode documents' pieces all at once; returns those that are no work for it, or that failed.

        One by one then shows which of them it is, and needs less memory.
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
            except Exception:  # noqa: BLE001 - see above
                left.update(mine)
        return left

    def _decoder_of(self, document: int) -> BlobDecoder:
        decoder = self._documents[document].decoder
        if decoder is None:
            msg = f"document {document} has no decoder yet: its head start comes first"
            raise ArgumentError(msg)
        return decoder

    async def _recompute(self, asked: ev.Recompute) -> None:
        first = asked.first
        chunks = tuple(replace(first, chunk=index) for index in range(first.chunk, asked.last.chunk + 1))
        failed, blind = [first], False
        try:
            try:
                seconds = await self._extend_timed(chunks, failed, behind=asked.behind)
            except Exception as error:
                if not asked.behind or self._is_gone:
                    raise
                blind = True
                self._lost(failed[0], f"computed without the documents before it: {in_words(error)}")
                seconds = await self._extend_timed(chunks, failed, behind=False)
        except Exception as error:  # noqa: BLE001 - the controller knows whether there is another way
            self._lost(failed[0], in_words(error))
            self._driver.tell(ev.RecomputeFailed(failed[0], in_words(error)))
            return
        self.recompute_s += seconds
        self._driver.tell(ev.RecomputeDone(chunks, seconds, blind))

    async def _extend_timed(self, chunks: tuple[ChunkId, ...], failed: list[ChunkId], *, behind: bool) -> float:
        """``_extend_all`` in the compute thread; returns its seconds."""
        work = partial(self._extend_all, chunks, failed, behind=behind)
        return (await self._driver.compute(partial(self._timed, work)))[1]

    def _extend_all(self, chunks: tuple[ChunkId, ...], failed: list[ChunkId], *, behind: bool) -> None:
        """Compute chunks in one pass, or one by one where that fails: shorter passes need less memory.

        failed: is made to hold the chunk that is being computed. behind: see ``Recompute``.
        """
        if self._is_gone:
            raise StorageError(_GONE)
        try:
            self._extend(chunks[0], chunks[-1], behind=behind)
        except Exception:
            if len(chunks) == 1:
                raise
        else:
            return
        for chunk in chunks:
            failed[0] = chunk
            self._extend(chunk, chunk, behind=behind)

    def _extend(self, first: ChunkId, last: ChunkId, *, behind: bool) -> None:
        """Compute chunks on top of what is ready of their document or prompt, and write them into the prompt."""
        document = self._documents[first.document]
        start, stop = document.span(first.chunk)[0], document.span(last.chunk)[1]
        offset = self.prompt.offset(first.document)
        ids = (document.token_ids or ())[start:stop]
        seen = self.prompt.cache.slice(0, offset + start) if behind else None
        if seen is None and start:
            seen = self.prompt.document(first.document).slice(0, start)
        neutral = document.info.neutral_prefix if document.info and not behind else ()
        if neutral:  # nothing stands before a prompt, so tokens are computed elsewhere and moved
            from kvwire.runtime.neutral import compute_behind

            piece = compute_behind(self._engine, neutral, ids, seen)
        else:
            piece = self._engine.extend(seen, ids, offset=offset)
        self.prompt.write(first.document, start, piece)

    async def _start_head(self, index: int) -> None:
        try:
            _, seconds = await self._driver.compute(partial(self._timed, partial(self._start_here, index)))
        except Exception as error:  # noqa: BLE001 - the document can be recomputed
            self.misses.append(f"{self._found[index].document_id}: {in_words(error)}")
            self._driver.tell(ev.PrefixFailed(self.number, index, in_words(error)))
            return
        self._driver.tell(ev.PrefixComputed(self.number, index, seconds))

    def _start_here(self, index: int) -> None:
        document = self._documents[index]
        if self._is_gone:
            raise StorageError(_GONE)
        hidden = self._engine.prefix_states(document.token_ids or (), document.prefix_layers)
        self._make_decoder(index, document, hidden)

    async def _look(self) -> None:
        attention: tuple[tuple[float, ...], ...] = ()
        seconds = 0.0
        try:
            _, seconds = await self._driver.compute(partial(self._timed, self._look_here))
            attention = self._by_chunk()
        except Exception as error:  # noqa: BLE001 - finer levels then go to all alike
            self.can_look = not isinstance(error, MismatchError)
            self.misses.append(f"what the question attends to was not seen: {in_words(error)}")
        self.look_s += seconds
        self._driver.tell(ev.Looked(self.number, attention, seconds))

    def _look_here(self) -> None:
        if self._is_gone:
            raise StorageError(_GONE)
        self.attention = self._engine.attention_received(self.prompt.cache, self._question)

    def _by_chunk(self) -> tuple[tuple[float, ...], ...]:
        """What the question attends to, for ``Looked``."""
        if self.attention is None or not float(self.attention.sum()) > 0:
            return ()
        relative = self.attention * (sum(self.prompt.tokens) / self.attention.sum())  # gaps count for nothing
        rows = []
        for index in range(len(self._found)):
            document, start = self._documents[index], self.prompt.offset(index)
            count = len(self.inputs[index].tokens)
            spans = (document.span(chunk) for chunk in range(count))
            rows.append(tuple(float(relative[start + first : start + stop].mean()) for first, stop in spans))
        return tuple(rows)

    def _timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """When work began, and the seconds that it took, what it gave a GPU to do included."""
        started = self._driver.clock()
        work()
        self._engine.synchronize()
        return started, self._driver.clock() - started
