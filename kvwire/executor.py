"""The thin executor around the controller's session: it carries out instructions and reports what happened.

It decides nothing. Fetching runs on the event loop; forward passes run in one worker thread, decoding in the same or in
another, so that the link and the processor are busy at once.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar, cast

from kvwire import controller as ctl
from kvwire.codec import CHUNK_TOKENS, BlobDecoder, PlainBlob, Profile, read_head
from kvwire.errors import ArgumentError, KvwireError, StorageError
from kvwire.reuse import LinkedPrompt
from kvwire.transport import BlobFetcher, LinkMeter, SegmentError, open_session, open_source
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from kvwire.codec import AnyProfile, Backend, BlobReader
    from kvwire.corpus import Corpus
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.store import CatalogEntry
    from kvwire.transport import EmulatedLink, FetchSettings, LinkSample
    from kvwire.types import BlobInfo, ChunkId

T = TypeVar("T")
_TICK_S = 0.05


@dataclass(frozen=True)
class Source:
    """A document as the catalog knows it before anything is fetched.

    entry None: only its text is known or kept. profile None: the blob carries its own, or the profile could not be
    read, as ``trouble`` says.
    """

    document_id: str
    entry: CatalogEntry | None
    profile: AnyProfile | None
    text: tuple[int, ...] | None
    trouble: str = ""


@dataclass(eq=False)
class _Document:
    """A document of a running load. decoder None: its blob cannot be used, its text stands in."""

    source: Source
    token_ids: tuple[int, ...] | None
    info: BlobInfo | None = None
    reader: BlobReader = field(default_factory=PlainBlob)
    fetcher: BlobFetcher | None = None
    decoder: BlobDecoder | None = None

    @property
    def tokens(self) -> int:
        return self.info.tokens if self.info else len(self.token_ids or ())

    def span(self, chunk: int) -> tuple[int, int]:
        if self.info:
            return self.info.chunk_span(chunk)
        return chunk * CHUNK_TOKENS, min((chunk + 1) * CHUNK_TOKENS, self.tokens)

    def plan_input(self) -> ctl.DocumentPlanInput:
        has_text = self.token_ids is not None
        if self.info and self.decoder:
            return ctl.DocumentPlanInput.from_blob(self.info, has_text=has_text)
        step = self.info.chunk_tokens if self.info else CHUNK_TOKENS
        spans = [self.span(chunk) for chunk in range(-(-self.tokens // step))]
        return ctl.DocumentPlanInput(tuple(stop - start for start, stop in spans), (), has_text)


class Executor:
    """One load: ``open`` the blobs' heads, then ``drive`` a session to its end; ``prompt`` is then complete.

    misses: what went wrong and was healed by recomputing, in words. bytes: received, heads included. decode_s,
    recompute_s: compute spent. fetched_at: when the last bytes that were used arrived, on ``clock``.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        corpus: Corpus,
        sources: Sequence[Source],
        *,
        link: EmulatedLink | None,
        fetch: FetchSettings,
        backend: Backend = "auto",
        workers: int = 1,
    ) -> None:
        """Take the parts; enter the context to begin. workers: 2 to decode beside forward passes."""
        self._engine = engine
        self._corpus = corpus
        self._sources = sources
        self._link = link
        self._fetch_settings = fetch
        self._backend, self._workers = backend, workers
        self.clock = time.monotonic
        self._meter = LinkMeter(self._sampled, self.clock)
        self._samples: list[LinkSample] = []
        self._events: asyncio.Queue[ctl.Event | BaseException] = asyncio.Queue()
        self._arrived: dict[ChunkId, tuple[int, list[bytes]]] = {}
        self._fetches: dict[ChunkId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._documents: list[_Document] = []
        self.misses: list[str] = []
        self.bytes = 0
        self.decode_s = self.recompute_s = self.fetched_at = 0.0

    async def __aenter__(self) -> Self:
        """Open the connection pool and the compute thread."""
        self._stack = AsyncExitStack()
        self._http = await self._stack.enter_async_context(open_session())
        self._pool = ThreadPoolExecutor(1, "kvwire-compute")
        self._decode_pool = self._pool if self._workers == 1 else ThreadPoolExecutor(1, "kvwire-decode")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop everything that is still under way."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()
        for pool in {self._pool, self._decode_pool}:
            await asyncio.to_thread(pool.shutdown, wait=True, cancel_futures=True)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run work in the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def samples(self) -> list[LinkSample]:
        """What the link showed since the last call."""
        taken, self._samples = self._samples, []
        return taken

    def _sampled(self, sample: LinkSample) -> None:
        self._samples.append(sample)
        self.bytes += sample.wire_bytes

    async def open(self, query_tokens: int, *, limit_s: float) -> list[ctl.DocumentPlanInput]:
        """Read all heads at once and lay out the prompt; returns what a session plans with.

        limit_s: longest wait for a head whose document could be recomputed instead; other heads are waited for as long
        as the fetcher's patience lasts.
        Raises what reading a head raised where the document's text is not known either, and ArgumentError where the
        prompt does not fit the model's window.
        """
        limits = [None if source.text is None else limit_s for source in self._sources]
        opening = [
            asyncio.create_task(self._open(source, limit)) for source, limit in zip(self._sources, limits, strict=True)
        ]
        try:
            self._documents = list(await asyncio.gather(*opening))
        finally:
            for task in opening:
                task.cancel()
            await asyncio.gather(*opening, return_exceptions=True)
        total = sum(document.tokens for document in self._documents) + query_tokens
        if total > self._engine.window:
            msg = (
                f"documents and question are {total} tokens, the model's window is {self._engine.window}; "
                "name fewer documents"
            )
            raise ArgumentError(msg)
        tokens = [document.tokens for document in self._documents]
        dtype, device = self._engine.model.dtype, self._engine.device
        self.prompt = LinkedPrompt(tokens, self._engine.meta, dtype=dtype, device=device)
        for index, document in enumerate(self._documents):
            await self._add_decoder(index, document)
        return [document.plan_input() for document in self._documents]

    async def _open(self, source: Source, limit_s: float | None) -> _Document:
        if source.entry is None:
            if source.trouble:
                self.misses.append(f"{source.document_id}: {source.trouble}")
            return _Document(source, source.text)
        document = _Document(source, source.text)

        reader = document.reader = self._corpus.catalog.blob_reader()
        at = open_source(self._corpus.catalog.store, source.entry.blob_key, self._http)
        settings = replace(self._fetch_settings, head_bytes=max(1, source.entry.head_bytes))
        known = partial(BlobFetcher, at, settings=settings, link=self._link, meter=self._meter)
        fetcher = known(read_head=reader.read_head, check=reader.check)
        await self._stack.enter_async_context(fetcher)
        try:
            info = await fetcher.open(deadline=None if limit_s is None else self.clock() + limit_s)
            self._corpus.check_blob(info, source.entry)
        except KvwireError as error:
            document.token_ids = source.text or self._ids_of(reader.head, source.entry)
            if document.token_ids is None:
                document.token_ids = await self._stored_text(source.entry)
            if document.token_ids is None:
                raise
            self.misses.append(f"{source.document_id}: {error}")
            return document
        if source.text is not None and info.token_ids not in (None, source.text):
            self.misses.append(f"{source.document_id}: its text has changed since it was encoded; encode it again")
            return document
        self.fetched_at = self.clock()
        document.info, document.fetcher, document.token_ids = info, fetcher, info.token_ids or source.text
        return document

    def _ids_of(self, head: bytes, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from a head whose blob is of no use otherwise, where they are the ones that the catalog names."""
        ids = read_head(head).token_ids if head else None
        return ids if ids is not None and digest_tokens(ids) == entry.token_digest else None

    async def _stored_text(self, entry: CatalogEntry) -> tuple[int, ...] | None:
        """Token ids from beside the blob, None where they are lost too."""
        try:
            return await asyncio.to_thread(self._corpus.text, entry)
        except KvwireError:
            return None

    async def _add_decoder(self, index: int, document: _Document) -> None:
        if not document.info:
            return
        try:
            if document.source.trouble:
                raise StorageError(document.source.trouble)
            part, offset = self.prompt.document(index), self.prompt.offset(index)
            hidden, layers = None, document.info.head_start
            wanted = isinstance(document.source.profile, Profile) and document.source.profile.hidden_size
            if layers and wanted and document.token_ids is not None:
                hidden = await self.compute(partial(self._engine.head_start, document.token_ids, layers))
            profile = document.source.profile
            decoder = BlobDecoder(
                document.reader.head, profile, out=part, offset=offset, hidden=hidden, backend=self._backend
            )
            if decoder.kept is not None:
                self.prompt.keep(index, decoder.kept)
            document.decoder = decoder
        except KvwireError as error:
            if document.token_ids is None:
                raise
            self.misses.append(f"{document.source.document_id}: {error}")

    async def drive(self, session: ctl.LoadSession, deadline_s: float | None) -> ctl.Finish:
        """Feed events to the session and carry out what it says until it is over.

        Raises StorageError where a chunk can be neither fetched nor recomputed.
        """
        ticker = self._spawn(self._tick())
        event: ctl.Event = ctl.Started(deadline_s)
        try:
            while True:
                for instruction in session.handle(event, self.clock()):
                    if isinstance(instruction, ctl.Finish):
                        return instruction
                    self._carry_out(instruction)
                came = await self._events.get()
                if isinstance(came, BaseException):
                    raise came
                event = came
                for sample in self.samples():
                    self._report(session, sample)
        finally:
            ticker.cancel()

    def _report(self, session: ctl.LoadSession, sample: LinkSample) -> None:
        """Measurements bring no instructions; the event that follows them does."""
        now = self.clock()
        if sample.first_byte_s is not None:
            session.handle(ctl.FirstByte(sample.first_byte_s), now)
        if sample.timed_bytes:
            session.handle(ctl.TransferProgress(sample.timed_bytes, sample.started, sample.ended), now)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._meter.flush()
            self._events.put_nowait(ctl.Tick())

    def _carry_out(self, instruction: ctl.Instruction) -> None:
        match instruction:
            case ctl.Fetch(chunk, level):
                self._fetches[chunk] = self._spawn(self._fetch(chunk, level))
            case ctl.Decode(chunk, _):
                self._spawn(self._decode(chunk))
            case ctl.Recompute(first, last):
                self._spawn(self._recompute(first, last))
            case ctl.Cancel(chunk):
                self.misses.append(f"{self._name(chunk)}: given up, recomputing it is sooner")
                self._fetches[chunk].cancel()
            case ctl.Fail(reason):
                raise StorageError(reason)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        """End the load with the error of a task that broke: it reports nothing any more, and would be waited for."""
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._events.put_nowait(error)

    def _name(self, chunk: ChunkId) -> str:
        return f"{self._documents[chunk.document].source.document_id} chunk {chunk.chunk}"

    def _lost(self, chunk: ChunkId, error: Exception) -> None:
        self.misses.append(f"{self._name(chunk)}: {_words(error)}")

    async def _fetch(self, chunk: ChunkId, level: int) -> None:
        try:
            parts = await self._segments(chunk, level)
        except Exception as error:  # noqa: BLE001 - whatever it is, the chunk can be recomputed
            self._lost(chunk, error)
            self._events.put_nowait(ctl.ChunkFailed(chunk, _words(error)))
            return
        self.fetched_at = self.clock()
        self._arrived[chunk] = (level, parts)
        self._events.put_nowait(ctl.ChunkArrived(chunk, level))

    async def _segments(self, chunk: ChunkId, level: int) -> list[bytes]:
        """What a chunk needs for a level; raises the first segment's error."""
        document = self._documents[chunk.document]
        if document.info is None or document.fetcher is None:
            msg = f"{self._name(chunk)} has no blob to fetch from"
            raise ArgumentError(msg)
        parts: dict[int, bytes] = {}
        reads = document.info.reads(chunk.chunk, level)
        async with aclosing(document.fetcher.fetch(reads)) as arrivals:
            async for arrival in arrivals:
                if isinstance(arrival, SegmentError):
                    raise arrival
                parts[arrival.segment.level] = arrival.data
        return [parts[segment.level] for segment in reads]

    async def _decode(self, chunk: ChunkId) -> None:
        decoder, (level, parts) = self._documents[chunk.document].decoder, self._arrived.pop(chunk)
        known = cast("BlobDecoder", decoder)  # planned only where there is one
        work = partial(known.decode_chunk, chunk.chunk, parts, level)
        try:
            timed = partial(self._timed, work)
            seconds = await asyncio.get_running_loop().run_in_executor(self._decode_pool, timed)
        except Exception as error:  # noqa: BLE001 - out of memory, for one: the chunk can be recomputed
            self._lost(chunk, error)
            self._events.put_nowait(ctl.DecodeFailed(chunk, _words(error)))
            return
        self.decode_s += seconds
        self._events.put_nowait(ctl.DecodeDone(chunk, seconds))

    async def _recompute(self, first: ChunkId, last: ChunkId) -> None:
        try:
            seconds = await self.compute(lambda: self._timed(lambda: self._extend(first, last)))
        except Exception as error:  # noqa: BLE001 - the session knows whether there is another way
            self._lost(first, error)
            self._events.put_nowait(ctl.RecomputeFailed(first, _words(error)))
            return
        self.recompute_s += seconds
        chunks = tuple(replace(first, chunk=index) for index in range(first.chunk, last.chunk + 1))
        self._events.put_nowait(ctl.RecomputeDone(chunks, seconds))

    def _extend(self, first: ChunkId, last: ChunkId) -> None:
        """Compute chunks on top of what is ready of their document, and write them into the prompt."""
        document = self._documents[first.document]
        start, stop = document.span(first.chunk)[0], document.span(last.chunk)[1]
        part = self.prompt.document(first.document)
        ids = (document.token_ids or ())[start:stop]
        prefix = part.slice(0, start) if start else None
        piece = self._engine.extend(prefix, ids, offset=self.prompt.offset(first.document))
        self.prompt.write(first.document, start, piece)

    def _timed(self, work: Callable[[], object]) -> float:
        started = self.clock()
        work()
        return self.clock() - started


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"
