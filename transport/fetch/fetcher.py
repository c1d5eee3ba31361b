"""Fetches a blob: its header first, then any of its segments."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Self

from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.errors import CorruptError, DeadlineError, KvwireError, StorageError, TruncatedError
from kvwire.transport.fetch.metering import LinkMeter
from kvwire.transport.fetch.run import FATAL, FetchHooks, FetchRun
from kvwire.transport.fetch.types import FetchCounts, FetchedSegment, FetchSettings
from kvwire.transport.sources.base import LinkedSource, read_patiently

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from kvwire.store import Data
    from kvwire.transport.errors import SegmentError
    from kvwire.transport.fetch.metering import Transfer
    from kvwire.transport.links import EmulatedLink
    from kvwire.transport.sources.base import ByteSource
    from kvwire.types import BlobInfo, SegmentInfo

_MAX_HEADER_READS = 8  # a header tells its length after one or two; more would be a header that leads in circles


class BlobFetcher:
    """Reads one version of one blob over any source.

    Attributes:
        counts: What has been done so far.
        faults: What the last failed attempt at a segment met, in words, by its offset; none once it has come.
    """

    def __init__(
        self,
        source: ByteSource,
        *,
        read_header: Callable[[bytes], BlobInfo] | None = None,
        check: Callable[[SegmentInfo, bytes], bytes] | None = None,
        settings: FetchSettings | None = None,
        link: EmulatedLink | None = None,
        meter: LinkMeter | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        """Take over the source; nothing is read yet.

        Args:
            source: Of the blob; closing the fetcher closes it.
            read_header: Parses the beginning of a blob (default: the codec's).
            check: Takes a segment as it was stored, and gives its content or raises CorruptError (default: compares the
                CRC-32).
            settings: How the blob is fetched.
            link: An emulated link in front of the source.
            meter: Shared by fetchers that use one link at the same time.
            rng: Spreads the pauses before retries.
            sleep: Makes them.
        """
        self._source: ByteSource = LinkedSource(source, link) if link else source
        self._read_header = read_header or _codec_read_header
        self._check = check or check_crc
        self._settings = settings or FetchSettings()
        self._meter = meter or LinkMeter()
        self._rng = rng or random.Random()  # noqa: S311 - spreads retries, guards nothing
        self._sleep = sleep
        self._prefix = b""
        self._next_is_local = False
        self._source.on_local = self._mark_local
        self.counts = FetchCounts()
        self.faults: dict[int, str] = {}

    @property
    def url(self) -> str:
        """Where the blob is, for people."""
        return self._source.url

    async def open(self, *, deadline: float | None = None) -> BlobInfo:
        """Read the header, in one request where it is no longer than ``header_bytes``.

        Payload that comes along is kept for ``fetch``. Damaged headers and failed requests are tried again.

        Args:
            deadline: On the meter's clock, in seconds; None to wait as long as it takes.

        Returns:
            What the header says.

        Raises:
            DeadlineError: The header is not there by the deadline.
        """
        left_s = None if deadline is None else max(0.0, deadline - self._meter.now())
        try:
            async with asyncio.timeout(left_s):
                return await self._open()
        except TimeoutError as error:
            if isinstance(error, KvwireError):
                raise
            raise DeadlineError(f"{self.url}: no header by the deadline; check the server and the network") from error

    async def _open(self) -> BlobInfo:
        failed = 0
        while True:
            try:
                return await self._open_once()
            except FATAL:
                raise
            except (StorageError, CorruptError) as error:
                failed += 1
                if self._settings.is_over(failed, error):
                    raise
                if isinstance(error, CorruptError):
                    needed = error.needed if isinstance(error, TruncatedError) else 0
                    self._source.distrust(0, max(len(self._prefix), self._settings.header_bytes, needed))
                await self._sleep(self._settings.backoff(failed, self._rng.random(), error))

    async def fetch(
        self, segments: Sequence[SegmentInfo], *, deadline: float | None = None
    ) -> AsyncGenerator[FetchedSegment | SegmentError, None]:
        """Give every segment once, when its last byte is in.

        Wrap it in ``contextlib.aclosing`` where the loop may be left early: that breaks off what still runs.

        Args:
            segments: In the order of importance; neighbours in it that are neighbours in the blob share a request.
            deadline: On the meter's clock (``time.monotonic``), in seconds. What has not come by then is given as a
                SegmentError whose cause is a DeadlineError, and its requests are broken off.

        Yields:
            The FetchedSegment, or the SegmentError that it met.

        Raises:
            ReplacedError: The object was replaced while it was read.
            NotFoundError: The object is gone.
            AuthError: The object may not be read any more.
        """
        at_hand: list[FetchedSegment] = []
        missing: list[SegmentInfo] = []
        for segment in segments:
            data = self._at_hand(segment)
            if data is None:
                missing.append(segment)
            else:
                at_hand.append(FetchedSegment(segment, data))
        hooks = FetchHooks(self._check, self._received, self._rng.random, self._sleep, self.faults)
        run = FetchRun(self._source, self._settings, self._meter, self.counts, hooks, deadline)
        try:
            run.start(missing)
            for arrival in at_hand:
                yield arrival
            while await run.wait():
                for result in run.take():
                    yield result
        finally:
            await run.close()

    async def close(self) -> None:
        """Let go of the source and of the bytes read so far."""
        self._prefix = b""
        self._source.on_local = None  # a cycle would keep both until Python collects garbage
        await self._source.close()

    async def __aenter__(self) -> Self:
        """Close at the end of the block."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close."""
        await self.close()

    def _at_hand(self, segment: SegmentInfo) -> bytes | None:
        """The segment, where it came along with the header undamaged; segments of no bytes need no request either."""
        if segment.stored and segment.end > len(self._prefix):
            return None
        try:
            return self._check(segment, self._prefix[segment.offset : segment.end] if segment.stored else b"")
        except CorruptError:
            return None

    def _mark_local(self, _: int) -> None:
        """What the sink gets next did not cross the link."""
        self._next_is_local = True

    def _received(self, transfer: Transfer, size: int) -> None:
        """Count bytes that came in, over the link or, where the source has just said so, from a copy on this side."""
        if self._next_is_local:
            self._next_is_local = False
            transfer.received_locally(size)
            self.counts.local_bytes += size
        else:
            transfer.received(size)
            self.counts.wire_bytes += size

    async def _open_once(self) -> BlobInfo:
        self._prefix = await self._read(0, min(self._settings.header_bytes, self._settings.max_head_bytes))
        for _ in range(_MAX_HEADER_READS):
            try:
                info = self._read_header(self._prefix)
            except TruncatedError as error:
                await self._lengthen(error)
                continue
            self._check_size(info)
            return info
        raise CorruptError(f"{self.url}: the header asks for more again and again; write the blob again")

    async def _lengthen(self, error: TruncatedError) -> None:
        have, needed = len(self._prefix), error.needed
        size = self._source.size
        if needed <= have or (size is not None and needed > size):
            raise error
        if needed > self._settings.max_head_bytes:
            msg = f"{self.url}: a header of {needed} bytes is over the limit of {self._settings.max_head_bytes}"
            raise CorruptError(msg) from error
        self._prefix += await self._read(have, needed)
        if len(self._prefix) < needed:
            raise error

    def _check_size(self, info: BlobInfo) -> None:
        size = self._source.size
        if size is not None and size < info.file_bytes:
            msg = f"{self.url} has {size} of {info.file_bytes} bytes: it was cut short; write the blob again"
            raise TruncatedError(msg, info.file_bytes)

    async def _read(self, start: int, end: int) -> bytes:
        transfer = self._meter.begin()
        pieces: list[Data] = []

        def take(data: Data) -> None:
            self._received(transfer, len(data))
            pieces.append(data)

        self.counts.requests += 1
        try:
            await read_patiently(self._source, start, end, take, self._settings.patience)
        finally:
            transfer.end()
        return b"".join(pieces)


def check_crc(segment: SegmentInfo, stored: bytes) -> bytes:
    """Compare a segment's CRC-32 with the one in the index."""
    if crc32(stored) != segment.crc32:
        raise CorruptError(f"the CRC-32 of bytes {segment.offset} to {segment.end} is wrong")
    return stored


def _codec_read_header(data: bytes) -> BlobInfo:
    """The codec's reader, imported when a blob is opened: serving files needs no tensors."""
    from kvwire.codec import read_header

    return read_header(data)
