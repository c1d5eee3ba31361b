"""What can go wrong between a store and a reader, as cases that the benchmark and the tests share.

Here are those of servers and networks, ``local`` has those of disks and processes. Each case ends as a
``Row``: how it ended, after how many requests and seconds. Right bytes are compared with what was written; an error is
one of ``kvwire.errors``; anything else is ``WRONG``.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import time
from collections import deque
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from test_parts.fault_proxy import FaultKind, FaultProxy, ProxyFault, ProxyRequest, nth
from test_parts.plain_blobs import build_blob as build
from test_parts.plain_blobs import read_blob_head as read_header

from kvwire.errors import KvwireError, StorageError
from kvwire.store import Catalog, HttpAddress, KeySpace, MemoryStore, S3Settings, S3Store, tenant_hash
from kvwire.transport import (
    AccessSettings,
    BlobFetcher,
    FetchSettings,
    HttpSource,
    HttpStore,
    HttpStoreSettings,
    ReadTimeouts,
    SegmentError,
    open_session,
    open_source,
    sign_url,
)
from kvwire.transport.testing import serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence
    from pathlib import Path

    from kvwire.store import Store
    from kvwire.transport import ByteSource
    from kvwire.transport.sources.http import Addresses

    FaultPlan = Callable[[ProxyRequest], ProxyFault | None]
    Run = Callable[["Bench"], Awaitable["Row"]]

RIGHT = "right bytes"
WRONG = "WRONG"
CONFIG = "ab" * 32
BLOB = build([[5_000, 10_000, 15_000]] * 12)
SECRET = bytes(range(32))
PROFILE = build([[30_000]], seed=2)
SPACE = KeySpace.of(tenant_hash("default"), CONFIG)
KEY = SPACE.blob(hashlib.sha256(BLOB).hexdigest())
SETTINGS = FetchSettings(
    backoff_s=0.02, max_backoff_s=0.1, gap_bytes=64, max_bytes=30_000, patience=ReadTimeouts(4, 4), retries=2
)
SHORT_PATIENCE = ReadTimeouts(0.4, 0.4)
WAITS = (FaultKind.SILENT, FaultKind.STALL)  # elsewhere a slow machine is no fault
S3_SETTINGS = S3Settings(connect_s=1.0, stall_s=0.3, total_s=1.5, attempts=3)
HTTP_SETTINGS = HttpStoreSettings(stall_s=0.3, total_s=1.5)


class S3Server(Protocol):
    """A running server with a bucket."""

    endpoint: str

    def address(self, prefix: str) -> str:
        """The address of a store in the bucket."""
        ...


@dataclass(frozen=True)
class Row:
    """How one case ended. misses: segments that did not come. attempts: requests that reached the proxy or server."""

    fault: str
    when: str
    transport: str
    outcome: str
    attempts: int
    misses: int
    seconds: float
    deadline_s: float

    @property
    def holds(self) -> bool:
        """Right bytes or a clear error, in time."""
        return not self.outcome.startswith(WRONG) and self.seconds <= self.deadline_s + GRACE_S


GRACE_S = 2.0  # a busy machine may notice a deadline late
ADDRESS_LIFE_S = 3  # counted from a whole second: two at least, which a busy machine may need for one fetch
OUTLIVED_S = ADDRESS_LIFE_S + 1.1


@dataclass(frozen=True)
class Case:
    """A fault that the proxy does. heals: when one such fault must end in right bytes."""

    name: str
    fault: ProxyFault
    deadline_s: float = 5.0
    heals: tuple[str, ...] = ("head", "once")


PROXIED = [
    Case("connection reset in mid-body", ProxyFault(FaultKind.RESET, after=20_000)),
    Case("connection closed in mid-body", ProxyFault(FaultKind.TRUNCATE, after=20_000)),
    Case("connection closed without an answer", ProxyFault(FaultKind.HANG_UP)),
    Case("status 500", ProxyFault(FaultKind.STATUS, status=500)),
    Case("status 503", ProxyFault(FaultKind.STATUS, status=503)),
    Case("status 429, Retry-After 1 s", ProxyFault(FaultKind.STATUS, status=429, retry_after="1")),
    Case("status 403", ProxyFault(FaultKind.STATUS, status=403)),
    Case("no answer", ProxyFault(FaultKind.SILENT)),
    Case("stall in mid-body", ProxyFault(FaultKind.STALL, after=20_000)),
    Case("slow drip, 20 kB/s", ProxyFault(FaultKind.DRIP, rate=20_000), deadline_s=2.0, heals=("once",)),
    Case("flipped byte", ProxyFault(FaultKind.FLIP, after=20_000)),
    Case("wrong Content-Range", ProxyFault(FaultKind.SHIFTED_RANGE)),
    Case("another range", ProxyFault(FaultKind.OTHER_RANGE)),
    Case("whole object instead of a range", ProxyFault(FaultKind.WHOLE)),
    Case("Content-Length too large", ProxyFault(FaultKind.LONG_LENGTH)),
    Case("Content-Length too small", ProxyFault(FaultKind.SHORT_LENGTH)),
    Case("another object between ranges", ProxyFault(FaultKind.REPLACED), heals=()),
    Case("garbage for a head", ProxyFault(FaultKind.GARBAGE)),
]
WHENS = {"head": "first request", "once": "second request", "always": "all but the first"}


@dataclass
class Bench:
    """A server behind a proxy, and a store that reaches it through the proxy. origin: the same objects without it."""

    kind: str
    origin: Store
    store: Any
    proxy: FaultProxy
    requests: int = 0
    started: float = field(default_factory=time.monotonic)

    def begin(self, plan: FaultPlan | None = None) -> None:
        """Start the clock and the count of requests."""
        self.proxy.plan = plan
        self.requests = self.proxy.requests
        self.started = time.monotonic()

    def row(self, fault: str, when: str, outcome: str, misses: int, deadline_s: float, how: str) -> Row:
        """How a case that began with ``begin`` ended."""
        seconds = round(time.monotonic() - self.started, 3)
        attempts = self.proxy.requests - self.requests
        self.proxy.plan = None
        return Row(fault, when, self.kind + how, outcome, attempts, misses, seconds, deadline_s)


def write_everything(store: Store) -> None:
    """What the cases read, written behind the proxy's back."""
    store.put(KEY, BLOB)
    store.put(SPACE.profile(hashlib.sha256(PROFILE).hexdigest()), PROFILE)


def named(error: KvwireError) -> str:
    """An error's class, with that of its cause where a segment's error only passes it on."""
    cause = error.__cause__ if isinstance(error, SegmentError) else None
    return f"{type(error).__name__} ({type(cause).__name__})" if cause else type(error).__name__


async def fetched(
    source: ByteSource,
    deadline_s: float,
    settings: FetchSettings = SETTINGS,
    between: Callable[[], Awaitable[object]] | None = None,
) -> tuple[str, int]:
    """Fetch the blob: how it ended, and how many segments are missing. ``between``: done when the header is in."""
    give_up_at = time.monotonic() + deadline_s
    misses: list[SegmentError] = []
    try:
        async with BlobFetcher(source, read_header=read_header, settings=settings) as fetcher:
            info = await fetcher.open(deadline=give_up_at)
            if between:
                await between()
            wanted = [segment for row in info.segments for segment in row]
            async for result in fetcher.fetch(wanted, deadline=give_up_at):
                if isinstance(result, SegmentError):
                    misses.append(result)
                elif result.data != BLOB[result.segment.offset : result.segment.end]:
                    return f"{WRONG} bytes", 0
    except KvwireError as error:
        return named(error), len(misses)
    except Exception as error:  # noqa: BLE001 - what must not happen is told, not raised
        return f"{WRONG} kind of error: {type(error).__name__}: {error}", len(misses)
    return (named(misses[0]) if misses else RIGHT), len(misses)


def got(store: Store) -> str:
    """Read a profile as the front door does, through ``Store.get``: how it ended."""
    try:
        data = Catalog(store).profiles.get(CONFIG, hashlib.sha256(PROFILE).hexdigest())
    except KvwireError as error:
        return named(error)
    except Exception as error:  # noqa: BLE001 - as above
        return f"{WRONG} kind of error: {type(error).__name__}: {error}"
    return RIGHT if data == PROFILE else f"{WRONG} bytes"


def plan_of(fault: ProxyFault, when: str) -> FaultPlan:
    """Which GETs of a fetch go wrong; the first one reads the header."""
    if when == "always":
        return nth(fault, *range(1, 10_000))
    return nth(fault, 0 if when == "head" else 1)


async def by_fetcher(case: Case, when: str, bench: Bench) -> Row:
    """One case of a proxied fault, read in ranges by a BlobFetcher."""
    async with open_session() as session:
        source = open_source(bench.store, KEY, session)
        settings = replace(SETTINGS, patience=SHORT_PATIENCE) if case.fault.kind in WAITS else SETTINGS
        bench.begin(plan_of(case.fault, when))
        outcome, misses = await fetched(source, case.deadline_s, settings)
        return bench.row(case.name, WHENS[when], outcome, misses, case.deadline_s, ", ranges")


async def by_get(case: Case, when: str, bench: Bench) -> Row:
    """One case of a proxied fault, met by ``Store.get``: the first time, or always."""
    fault = replace(case.fault, rate=case.fault.rate / 2)  # the profile is small
    bench.begin(nth(fault, *range(10_000 if when == "always" else 1)))
    outcome = await asyncio.to_thread(got, bench.store)
    when = "every request" if when == "always" else "first request"
    return bench.row(case.name, when, outcome, int(outcome != RIGHT), case.deadline_s, ", get")


@contextmanager
def http_benches(count: int) -> Iterator[list[Bench]]:
    """``kvwire serve`` behind that many proxies."""
    origin = MemoryStore()
    write_everything(origin)
    with ExitStack() as stack:
        url = stack.enter_context(serving(origin))
        proxies = [stack.enter_context(FaultProxy(url)) for _ in range(count)]
        stores = [stack.enter_context(closing(HttpStore(one.url, settings=HTTP_SETTINGS))) for one in proxies]
        yield [Bench("http", origin, *parts) for parts in zip(stores, proxies, strict=True)]


@contextmanager
def signed_bench(folder: Path) -> Iterator[Bench]:
    """``kvwire serve`` that takes signed URLs only, behind a proxy; there is no store that could sign."""
    keys = folder / "keys.json"
    keys.write_text(json.dumps({"one": {"secret": base64.b64encode(SECRET).decode()}}))
    keys.chmod(0o600)
    origin = MemoryStore()
    write_everything(origin)
    with serving(origin, access=AccessSettings(signing_keys=keys)) as url, FaultProxy(url) as proxy:
        yield Bench("http", origin, None, proxy)


@contextmanager
def s3_benches(server: S3Server, count: int) -> Iterator[list[Bench]]:
    """An S3 server behind that many proxies; the environment holds its credentials."""
    address = server.address("matrix")
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(server.endpoint)) for _ in range(count)]
        addresses = [address, *(address.replace(server.endpoint, proxy.url) for proxy in proxies)]
        origin, *stores = [stack.enter_context(closing(S3Store(url, settings=S3_SETTINGS))) for url in addresses]
        write_everything(origin)
        yield [Bench("s3", origin, *parts) for parts in zip(stores, proxies, strict=True)]


def short_lived(bench: Bench) -> closing[S3Store]:
    """The bench's S3 store, with addresses that live for a moment."""
    return closing(S3Store(bench.store.url, settings=replace(S3_SETTINGS, address_s=ADDRESS_LIFE_S)))


def first_answer(store: Store) -> None:
    """Read once; a server's first answer takes its time, on a busy machine longer than a store waits here."""
    for left in reversed(range(10)):
        try:
            store.get(KEY)
        except StorageError:
            if not left:
                raise
        else:
            return


async def in_turns(calls: Sequence[Run], benches: Sequence[Bench]) -> list[Row]:
    """Rows of many cases, as many at a time as there are benches; in the order of the calls."""
    left = deque(enumerate(calls))
    rows: dict[int, Row] = {}

    async def work(bench: Bench) -> None:
        await asyncio.to_thread(first_answer, bench.store)
        while left:
            number, call = left.popleft()
            rows[number] = await call(bench)

    await asyncio.gather(*(work(bench) for bench in benches))
    return [rows[number] for number in sorted(rows)]


def all_ranges() -> list[Run]:
    """Every proxied fault, met while a blob is fetched."""
    return [partial(by_fetcher, case, when) for case in PROXIED for when in WHENS]


def all_gets() -> list[Run]:
    """Every proxied fault, met by ``Store.get``."""
    return [partial(by_get, case, when) for case in PROXIED for when in ("once", "always")]


async def renewed_address(bench: Bench, find: Addresses, name: str) -> Row:
    """Addresses that live for a moment, and a reader that is told so only by the server."""
    async with open_session() as session:
        bench.begin()
        outcome, misses = await fetched(HttpSource(session, find), 12.0, between=partial(asyncio.sleep, OUTLIVED_S))
        return bench.row(name, "while fetching", outcome, misses, 12.0, ", ranges")


async def expired_address(bench: Bench, url: str, name: str) -> Row:
    """An address that nobody can renew."""
    async with open_session() as session:
        bench.begin()
        outcome, misses = await fetched(HttpSource(session, url), 12.0, between=partial(asyncio.sleep, OUTLIVED_S))
        return bench.row(name, "while fetching", outcome, misses, 12.0, ", ranges")


async def unreachable(store: Store, name: str, kind: str) -> list[Row]:
    """A host that cannot be found, or where nobody listens: read in ranges, and by ``get``."""
    started = time.monotonic()
    async with open_session(connect_s=1.0) as session:
        outcome, misses = await fetched(open_source(store, KEY, session), 5.0)
    rows = [Row(name, "always", f"{kind}, ranges", outcome, 0, misses, seconds_since(started), 5.0)]
    started = time.monotonic()
    outcome = await asyncio.to_thread(got, store)
    return [*rows, Row(name, "always", f"{kind}, get", outcome, 0, 1, seconds_since(started), 5.0)]


async def changed_between(bench: Bench, name: str, change: Callable[[Store], None]) -> Row:
    """The object is really another one, or gone, when its header has been read."""
    try:
        async with open_session() as session:
            bench.begin()
            source = open_source(bench.store, KEY, session)
            outcome, misses = await fetched(source, 5.0, between=partial(asyncio.to_thread, change, bench.origin))
            return bench.row(name, "after the header", outcome, misses, 5.0, ", ranges")
    finally:
        write_everything(bench.origin)


CHANGES: dict[str, Callable[[Store], None]] = {
    "object really replaced": lambda origin: origin.put(KEY, build([[5_000, 10_000, 15_000]] * 12, seed=9)),
    "object deleted": lambda origin: origin.delete(KEY),
}


def seconds_since(started: float) -> float:
    """To the millisecond."""
    return round(time.monotonic() - started, 3)


def signed_addresses(bench: Bench) -> Addresses:
    """Signed URLs of ``kvwire serve`` that live for a moment and say nothing of it."""
    return lambda refused: HttpAddress(  # noqa: ARG005 - there is nothing but fresh ones
        sign_url(bench.proxy.url, KEY, secret=SECRET, key_id="one", expires_at=time.time() + ADDRESS_LIFE_S)
    )


def presigned_addresses(store: S3Store) -> Addresses:
    """Presigned S3 addresses that say nothing of their expiry."""
    return lambda refused: replace(store.http_address(KEY, renew=refused), expires_at=math.inf)
