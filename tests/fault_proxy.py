"""A proxy before an HTTP server that makes exchanges go wrong, and plans of what goes wrong when.

It runs in a thread of its own. ``Host`` and the target are passed on as the client sent them, so that URLs signed for
the proxy's address stay valid.
"""

import asyncio
import fcntl
import io
import random
import socket
import struct
import sys
import termios
import threading
from collections import Counter, deque
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import Enum
from urllib.parse import parse_qsl, urlsplit

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

START_S = 10
HEADER_BYTES = 64 * 1024
PIECE_BYTES = 64 * 1024
DRIP_STEP_S = 0.02
INVERT = bytes(255 - value for value in range(256))
GARBAGE = b"\x00\xff\x13 no head at all \x9b\r\n\r\n"
AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # what aiohttp would add by itself


class FaultKind(Enum):
    """What is done to an exchange; ``after`` and the like are fields of ``ProxyFault``."""

    RESET = "connection reset"  # after bytes of the body
    TRUNCATE = "truncated body"  # closed in good order, after bytes of the body
    HANG_UP = "closed without an answer"
    LOST_ANSWER = "answer lost"  # the server does the work, and the connection is reset before a byte of its answer
    STATUS = "status"  # the proxy answers itself, with retry_after where that is given
    SILENT = "no answer"  # for seconds, then the connection is closed
    STALL = "stall"  # for seconds, after bytes of the body
    DRIP = "slow drip"  # the body comes at rate bytes/s
    FLIP = "flipped byte"  # the one after bytes into the body
    SHIFTED_RANGE = "wrong Content-Range"  # shift bytes further on than those sent
    OTHER_RANGE = "other range"  # the server is asked for bytes shift further on
    WHOLE = "whole object instead of a range"
    LONG_LENGTH = "length too large"  # by shift; closed after the body
    SHORT_LENGTH = "length too small"  # by shift; all of the body is sent
    REPLACED = "replaced object"  # other bytes, another tag; If-Match is ignored
    GARBAGE = "garbage for a head"


CUTTING = {FaultKind.RESET, FaultKind.TRUNCATE, FaultKind.STALL}


@dataclass(frozen=True)
class ProxyFault:
    """One fault; after: bytes, random where None."""

    kind: FaultKind
    after: int | None = None
    status: int = 503
    retry_after: str | None = None
    seconds: float = 3600.0
    rate: float = 1000.0
    shift: int = 7


@dataclass(frozen=True)
class ProxyRequest:
    """What a plan sees. end is exclusive; None where the range is open. Values of a query may be secret."""

    number: int
    method: str
    path: str
    start: int | None = None
    end: int | None = None
    query_names: frozenset[str] = frozenset()


@dataclass
class ProxyRecord:
    """One exchange: what was asked, what is done to it, with which status and how many body bytes so far."""

    request: ProxyRequest
    fault: ProxyFault | None
    status: int = 0
    body_bytes: int = 0


def first(fault, times=1):
    """A plan: the first GETs go wrong."""
    return nth(fault, *range(times))


def nth(fault, *numbers):
    """A plan: GETs of these numbers (from 0, counted by themselves) go wrong."""
    seen = 0

    def plan(request):
        nonlocal seen
        if request.method != "GET":
            return None
        seen += 1
        return fault if seen - 1 in numbers else None

    return plan


def at_random(rates, seed):
    """A plan: each fault with its probability, for requests of every method."""
    chosen, rng = dict(rates), random.Random(seed)
    if any(rate < 0 for rate in chosen.values()) or sum(chosen.values()) > 1:
        msg = f"rates of faults must be 0 or more and at most 1 together, got {list(chosen.values())}"
        raise ValueError(msg)
    return lambda _: rng.choices([*chosen, None], [*chosen.values(), 1 - sum(chosen.values())])[0]


class FaultProxy:
    """``with FaultProxy("http://127.0.0.1:9000", plan) as proxy: ... proxy.url``.

    plan: chooses the fault of each request, or None; called in the proxy's thread, and may be replaced at any time.
    """

    def __init__(self, upstream, plan=None, *, seed=0):
        self.upstream, self.plan = urlsplit(upstream), plan
        self.faults, self.requests = Counter(), 0
        self._records = deque(maxlen=100_000)
        self._rng = random.Random(seed)
        self._ready = threading.Event()

    @property
    def records(self):
        return list(self._records)

    def __enter__(self):
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fault-proxy", daemon=True)
        self._thread.start()
        assert self._ready.wait(START_S)
        return self

    def __exit__(self, *_):
        """Break off what still runs."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _run(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            # What has a body cannot be sent twice: it never takes a connection that the server may have closed.
            self._kept, self._fresh = [
                await stack.enter_async_context(
                    aiohttp.ClientSession(
                        connector=aiohttp.TCPConnector(limit=0, force_close=force_close),
                        auto_decompress=False,
                        cookie_jar=aiohttp.DummyCookieJar(),
                        timeout=aiohttp.ClientTimeout(total=None),
                        skip_auto_headers=AUTOMATIC,
                    )
                )
                for force_close in (False, True)
            ]
            limits = {"max_line_size": HEADER_BYTES, "max_field_size": HEADER_BYTES}
            server = web.Server(self._handle, handler_cancellation=True, access_log=None, **limits)
            listening = await self._loop.create_server(server, "127.0.0.1", 0)
            self.url = "http://{}:{}".format(*listening.sockets[0].getsockname())
            own = asyncio.all_tasks()
            self._ready.set()
            await self._stop.wait()
            for one in listening.sockets:  # what asyncio is accepting comes first: it would stay open
                self._loop.remove_reader(one.fileno())
            await asyncio.sleep(0)
            listening.close()
            while any("accept" in str(task.get_coro()) for task in asyncio.all_tasks() - own):
                await asyncio.sleep(0)
            for connection in list(server.connections):  # what is not sent yet would be waited for
                if connection.transport:
                    connection.transport.abort()
            await server.shutdown(0)

    async def _handle(self, request):
        record = ProxyRecord(asked := _asked(self.requests, request), self.plan(asked) if self.plan else None)
        self.requests += 1
        self.faults.update([record.fault.kind] if record.fault else [])
        self._records.append(record)
        exchange = Exchange(request, record, self._rng.random())
        try:
            await exchange.run(self)
        except (aiohttp.ClientError, OSError):
            exchange.leave()
        return _Sent(exchange.keeps)


class _Sent(web.StreamResponse):
    """An answer that is on the wire already."""

    def __init__(self, keeps):
        super().__init__()
        self._keeps = keeps

    @property
    def keep_alive(self):
        return self._keeps

    async def prepare(self, _):
        return None

    async def write_eof(self, _=b""):
        pass


class Exchange:
    """One request and its answer, written to the socket as the fault has it."""

    def __init__(self, request, record, draw):
        self.request, self.record, self.fault, self.draw = request, record, record.fault, draw
        self.kind = record.fault.kind if record.fault else None
        self.wire = request.transport
        self.wire.set_write_buffer_limits(0)
        self.keeps = request.keep_alive

    async def run(self, proxy):
        if self.kind is FaultKind.HANG_UP:
            return self.leave()
        if self.request.headers.get("Expect", "").lower() == "100-continue":
            await self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = b"".join([piece async for piece in self.request.content.iter_any()])
        if self.kind is FaultKind.SILENT:
            return await self.wait()
        if self.kind is FaultKind.GARBAGE:
            await self.write(GARBAGE)
            return self.leave()
        if self.kind is FaultKind.STATUS:
            self.record.status, after = self.fault.status, self.fault.retry_after
            return await self.write_header(f"{self.fault.status} Fault", {"Retry-After": after} if after else {}, 0)
        return await self.pass_on(proxy, body)

    async def pass_on(self, proxy, body):
        there = proxy.upstream
        url = URL(f"{there.scheme}://{there.netloc}{self.request.raw_path}", encoded=True)
        session, headers = proxy._fresh if body else proxy._kept, self.changed_request()
        async with session.request(
            self.request.method, url, headers=headers, data=io.BytesIO(body) if body else None, allow_redirects=False
        ) as answer:
            if self.kind is FaultKind.LOST_ANSWER:
                return self.reset()
            self.record.status = answer.status
            self.keeps &= answer.headers.get("Connection", "").lower() != "close" or session is proxy._fresh
            size, pieces = answer.content_length, answer.content.iter_chunked(PIECE_BYTES)
            if self.request.method == "HEAD" or answer.status in (204, 304):
                size = 0
            elif size is None:
                whole = await answer.read()
                size, pieces = len(whole), _once(whole)
            length = self.changed_length(answer, size)
            await self.write_header(f"{answer.status} {answer.reason}", self.changed_answer(answer), length)
            return await self.send(pieces, size)

    def changed_request(self):
        headers = CIMultiDict((name.decode(), value.decode("latin-1")) for name, value in self.request.raw_headers)
        for name in ("Expect", "Content-Length", "Transfer-Encoding"):
            headers.popall(name, None)
        if self.kind is FaultKind.REPLACED:
            headers.pop("If-Match", None)
        elif self.kind is FaultKind.WHOLE:
            headers.pop("Range", None)
        elif self.kind is FaultKind.OTHER_RANGE and (wanted := headers.get("Range")):
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            shift = self.fault.shift
            headers["Range"] = f"bytes={int(start) + shift}-{int(last) + shift if last else ''}"
        return headers

    def changed_length(self, answer, size):
        shift = {FaultKind.LONG_LENGTH: 1, FaultKind.SHORT_LENGTH: -1}.get(self.kind, 0)
        if shift:
            self.keeps = False
            return max(0, size + shift * self.fault.shift)
        return answer.content_length if self.request.method == "HEAD" else size

    def changed_answer(self, answer):
        headers = CIMultiDict((name.decode(), value.decode("latin-1")) for name, value in answer.raw_headers)
        for name in ("Transfer-Encoding", "Content-Length", "Connection"):
            headers.popall(name, None)
        told = headers.get("Content-Range")
        if self.kind is FaultKind.SHIFTED_RANGE and told:
            span, _, total = told.removeprefix("bytes ").partition("/")
            start, last = (int(one) + self.fault.shift for one in span.split("-"))
            headers["Content-Range"] = f"bytes {start}-{last}/{total}"
        elif self.kind is FaultKind.REPLACED:
            headers["ETag"] = '"another"'
        return headers

    async def send(self, pieces, size):
        """The body, cut or changed."""
        last = max(size - 1, 0)
        spot = min(last, self.fault.after if self.fault and self.fault.after is not None else int(self.draw * size))
        stop = spot if self.kind in CUTTING else size
        async for piece in pieces:
            if not size:
                break
            await self.write_body(self.changed(piece, spot)[: stop - self.record.body_bytes])
            if self.kind in CUTTING and self.record.body_bytes >= stop:
                break
        if self.kind is FaultKind.RESET:
            await self.delivered()
            self.reset()
        elif self.kind is FaultKind.STALL:
            await self.wait()
        elif self.kind is FaultKind.TRUNCATE or self.record.body_bytes < size:
            self.leave()

    def changed(self, piece, spot):
        at = spot - self.record.body_bytes
        if self.kind is FaultKind.FLIP and 0 <= at < len(piece):
            return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]
        return piece.translate(INVERT) if self.kind is FaultKind.REPLACED else piece

    async def write_header(self, status, headers, length):
        fields = [*headers.items(), *([("Content-Length", length)] if length is not None else [])]
        fields += [] if self.keeps else [("Connection", "close")]
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in fields)]
        await self.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))

    async def write_body(self, piece):
        is_slow = self.kind is FaultKind.DRIP
        step = max(1, int(self.fault.rate * DRIP_STEP_S) if is_slow else len(piece))
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            self.record.body_bytes += len(part)
            await self.write(part)
            if is_slow:
                await asyncio.sleep(len(part) / self.fault.rate)

    async def write(self, data):
        self.wire.write(data)
        await self.request.protocol._drain_helper()

    async def wait(self):
        """Keep silent until the time is over; where the client leaves, this is cancelled."""
        await asyncio.sleep(self.fault.seconds)
        self.leave()

    async def delivered(self):
        """Wait until the client's system has what was sent, since a reset discards the rest; half a second at most."""
        raw = self.wire.get_extra_info("socket")
        for _ in range(500):
            if not int.from_bytes(fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder):
                return
            await asyncio.sleep(0.001)

    def leave(self):
        self.keeps = False
        self.wire.close()

    def reset(self):
        self.keeps = False
        raw = self.wire.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close with RST, not FIN
        self.wire.abort()


async def _once(body):
    yield body


def _asked(number, request):
    parts = urlsplit(request.raw_path)
    names = frozenset(name for name, _ in parse_qsl(parts.query, keep_blank_values=True))
    start, _, last = request.headers.get("Range", "").removeprefix("bytes=").partition("-")
    if not start.isdigit():
        return ProxyRequest(number, request.method, parts.path, query_names=names)
    end = int(last) + 1 if last.isdigit() else None
    return ProxyRequest(number, request.method, parts.path, int(start), end, names)
