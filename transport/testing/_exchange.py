"""One request and its answer, with or without a fault."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING

from kvwire.errors import StorageError
from kvwire.transport.testing._http1 import MAX_HEADER_BYTES, Head, exactly, framed, read_answer
from kvwire.transport.testing.faults import FaultKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvwire.transport.testing.faults import ProxyRecord

_DRIP_STEP_S = 0.02
_DELIVERY_STEP_S = 0.001
_DELIVERY_CHECKS = 500  # a client that reads nothing cannot hold the proxy for longer
_INVERT = bytes(255 - value for value in range(256))
_CUTTING = frozenset({FaultKind.RESET, FaultKind.TRUNCATE, FaultKind.STALL})
_LOCAL = frozenset({FaultKind.STATUS, FaultKind.SILENT, FaultKind.GARBAGE})
_GARBAGE = b"\x00\xff\x13 no head at all \x9b\r\n\r\n"


class Upstream:
    """The connection to the real server that belongs to one client's connection."""

    def __init__(self, host: str, port: int) -> None:
        """Remember the address; nothing is opened yet."""
        self._address = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    @property
    def kept(self) -> bool:
        """Whether a connection is open from an exchange before."""
        return self._streams is not None

    async def streams(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The connection, opened where there is none."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(*self._address, limit=MAX_HEADER_BYTES)
        return self._streams

    def close(self) -> None:
        """Let go of the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Exchange:
    """Takes a request whose head is in, and sends the answer. ``broken``: the client's connection is used up."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        behind: Upstream,
        head: Head,
        record: ProxyRecord,
        draw: float,
    ) -> None:
        """Keep what belongs to it. draw: 0 to 1, the place of a fault that names none."""
        self._reader = reader
        self._writer = writer
        self._behind = behind
        self._head = head
        self._record = record
        self._fault = record.fault
        self._kind = record.fault.kind if record.fault else None
        self._draw = draw
        self.broken = (head.get("Connection") or "").lower() == "close"

    async def run(self) -> None:
        """Answer. Raises OSError, EOFError, ValueError or StorageError where one of the sides breaks it off."""
        if self._kind is FaultKind.HANG_UP:
            self.broken = True
        elif self._kind in _LOCAL:
            await self._answer_here()
        else:
            await self._pass_on()

    async def _request_body(self) -> AsyncIterator[bytes]:
        if (self._head.get("Expect") or "").lower() == "100-continue":
            self._head.drop("Expect")
            self._writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._head.get("Transfer-Encoding"):
            msg = "the proxy takes requests with a Content-Length only"
            raise StorageError(msg)
        return exactly(self._reader, self._head.length or 0)

    async def _answer_here(self) -> None:
        assert self._fault is not None  # noqa: S101 - only faults are answered here
        async for _ in await self._request_body():
            pass
        if self._kind is FaultKind.SILENT:
            await self._wait()
        elif self._kind is FaultKind.GARBAGE:
            self._writer.write(_GARBAGE)
            self.broken = True
        else:
            status = self._record.status = self._fault.status
            after = self._fault.retry_after
            fields = [("Content-Length", "0"), *([("Retry-After", after)] if after is not None else [])]
            self._writer.write(Head(f"HTTP/1.1 {status} Fault", fields).encode())
        await self._writer.drain()

    async def _pass_on(self) -> None:
        method = self._head.line.split(" ", 1)[0]
        self._change_request()
        answer, reader = await self._asked()
        size, pieces = await framed(reader, answer, method)
        whole = False
        try:
            if self._kind is FaultKind.LOST_ANSWER:
                self._reset()
                return
            self._record.status = answer.status
            self.broken |= (answer.get("Connection") or "").lower() == "close"
            self._change_answer(answer)
            self._writer.write(answer.encode())
            whole = await self._send(pieces, size)
        finally:
            if not whole or self.broken:
                self._behind.close()

    async def _asked(self) -> tuple[Head, asyncio.StreamReader]:
        """Send the request on; a connection that the server closed meanwhile is opened anew."""
        if self._head.length:
            self._behind.close()  # a body cannot be sent twice: never risk a connection that may be closed
        body = await self._request_body()
        while True:
            kept = self._behind.kept
            reader, writer = await self._behind.streams()
            try:
                writer.write(self._head.encode())
                async for piece in body:
                    writer.write(piece)
                    await writer.drain()
                return await read_answer(reader), reader
            except (OSError, EOFError, StorageError):
                self._behind.close()
                if not kept:
                    raise

    def _change_request(self) -> None:
        fault = self._fault
        if fault is None:
            return
        if self._kind is FaultKind.REPLACED:
            self._head.drop("If-Match")
        elif self._kind is FaultKind.WHOLE:
            self._head.drop("Range")
        elif self._kind is FaultKind.OTHER_RANGE and (wanted := self._head.get("Range")):
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            shifted = f"{int(start) + fault.shift}-{int(last) + fault.shift if last else ''}"
            self._head.replace("Range", f"bytes={shifted}")

    def _change_answer(self, answer: Head) -> None:
        fault = self._fault
        if fault is None:
            return
        told = answer.get("Content-Range")
        if self._kind is FaultKind.SHIFTED_RANGE and told:
            span, _, total = told.removeprefix("bytes ").partition("/")
            start, _, last = span.partition("-")
            answer.replace("Content-Range", f"bytes {int(start) + fault.shift}-{int(last) + fault.shift}/{total}")
        elif self._kind is FaultKind.REPLACED:
            answer.replace("ETag", '"another"')
        elif self._kind in (FaultKind.LONG_LENGTH, FaultKind.SHORT_LENGTH):
            change = fault.shift if self._kind is FaultKind.LONG_LENGTH else -fault.shift
            answer.replace("Content-Length", str(max(0, (answer.length or 0) + change)))
            self.broken = True

    async def _send(self, pieces: AsyncIterator[bytes], size: int) -> bool:
        """Send the body, cut or changed; whether all of it could be sent."""
        fault, last = self._fault, max(size - 1, 0)
        spot = min(last, fault.after if fault and fault.after is not None else int(self._draw * size))
        stop = spot if self._kind in _CUTTING else size
        async for piece in pieces:
            await self._write(self._changed(piece, spot)[: stop - self._record.body_bytes])
            if self._kind in _CUTTING and self._record.body_bytes >= stop:
                break
        if self._kind in _CUTTING:
            await self._writer.drain()
            await self._cut()
            return False
        self.broken |= self._record.body_bytes < size
        await self._writer.drain()
        return self._record.body_bytes == size

    def _changed(self, piece: bytes, spot: int) -> bytes:
        at = spot - self._record.body_bytes
        if self._kind is FaultKind.FLIP and 0 <= at < len(piece):
            return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
        return piece.translate(_INVERT) if self._kind is FaultKind.REPLACED else piece

    async def _write(self, piece: bytes) -> None:
        step = len(piece)
        if self._fault and self._kind is FaultKind.DRIP:
            step = max(1, int(self._fault.rate * _DRIP_STEP_S))
        for start in range(0, len(piece), max(1, step)):
            part = piece[start : start + step]
            self._record.body_bytes += len(part)
            self._writer.write(part)
            await self._writer.drain()
            if self._fault and self._kind is FaultKind.DRIP:
                await asyncio.sleep(len(part) / self._fault.rate)

    async def _cut(self) -> None:
        self.broken = True
        if self._kind is FaultKind.RESET:
            await self._delivered()
            self._reset()
        elif self._kind is FaultKind.STALL:
            await self._wait()

    async def _wait(self) -> None:
        """Keep silent until the time is over or the client leaves."""
        self.broken = True
        assert self._fault is not None  # noqa: S101 - only a fault waits
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._fault.seconds):
                await self._reader.read(1)

    async def _delivered(self) -> None:
        """Wait until the client's system has what was sent: a reset discards the rest."""
        raw = self._writer.get_extra_info("socket")
        for _ in range(_DELIVERY_CHECKS):
            unsent = fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, bytes(4))
            if not int.from_bytes(unsent, sys.byteorder):
                return
            await asyncio.sleep(_DELIVERY_STEP_S)

    def _reset(self) -> None:
        self.broken = True
        raw = self._writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with RST, not FIN
        self._writer.transport.abort()
