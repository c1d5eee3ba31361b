"""Many loads through one tiered store over a bad network, for as long as wanted: what must not grow, does not.

A process of its own holds the server (``kvwire serve``, or an S3 emulator) and the proxy that makes one exchange in
five go wrong. This process reads 64 blobs through small tiers, with many loads at a time, some of them left early or
cancelled, and compares every byte with what was written. Then everything is closed, and whatever is left of sockets,
files, threads and tasks is counted. Needs the ``dev`` packages. Writes ``results/soak.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack, aclosing, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fault_parts.servers import CREDENTIALS, ministack
from test_parts.fault_proxy import FaultKind, FaultProxy, ProxyFault, at_random
from test_parts.plain_blobs import build_blob, read_blob_head

from kvwire.errors import KvwireError
from kvwire.store import KeySpace, MemoryStore, S3Settings, S3Store, TierSettings, open_tiers
from kvwire.transport import (
    BlobFetcher,
    FetchSettings,
    HttpStore,
    HttpStoreSettings,
    LinkMeter,
    ReadTimeouts,
    SegmentError,
    open_session,
    open_source,
)
from kvwire.transport.testing import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import aiohttp

    from kvwire.store import Store, TieredStore

ROOT = Path(__file__).resolve().parents[1]
BLOBS = 64
LOADS_AT_A_TIME = 16
DEADLINE_S = 3.0
SPACE = KeySpace("0" * 32, "0" * 16)
MEMORY_BYTES, FOLDER_BYTES = 2_000_000, 5_000_000
FETCH = FetchSettings(
    backoff_s=0.02,
    max_backoff_s=0.2,
    max_bytes=60_000,
    gap_bytes=4096,
    patience=ReadTimeouts(0.5, 0.5),
    max_retry_after_s=1,
)
RATES = {
    ProxyFault(FaultKind.RESET): 0.02,
    ProxyFault(FaultKind.TRUNCATE): 0.02,
    ProxyFault(FaultKind.HANG_UP): 0.01,
    ProxyFault(FaultKind.LOST_ANSWER): 0.01,
    ProxyFault(FaultKind.STATUS, status=500): 0.02,
    ProxyFault(FaultKind.STATUS, status=503): 0.01,
    ProxyFault(FaultKind.STATUS, status=429, retry_after="0"): 0.01,
    ProxyFault(FaultKind.STATUS, status=403): 0.005,
    ProxyFault(FaultKind.SILENT, seconds=2): 0.005,
    ProxyFault(FaultKind.STALL, seconds=2): 0.01,
    ProxyFault(FaultKind.DRIP, rate=50_000): 0.01,
    ProxyFault(FaultKind.FLIP): 0.03,
    ProxyFault(FaultKind.SHIFTED_RANGE): 0.005,
    ProxyFault(FaultKind.OTHER_RANGE): 0.01,
    ProxyFault(FaultKind.WHOLE): 0.005,
    ProxyFault(FaultKind.LONG_LENGTH): 0.005,
    ProxyFault(FaultKind.SHORT_LENGTH): 0.005,
    ProxyFault(FaultKind.REPLACED): 0.005,
    ProxyFault(FaultKind.GARBAGE): 0.005,
}


def blobs(seed: int) -> dict[str, bytes]:
    """Key and bytes of each blob; the same in both processes."""
    rng = random.Random(seed)
    built = [
        build_blob(
            [[rng.randint(500, 30_000) for _ in range(3)] for _ in range(rng.randint(2, 10))], seed=seed + number
        )
        for number in range(BLOBS)
    ]
    return {SPACE.blob(hashlib.sha256(data).hexdigest()): data for data in built}


# The far side: server and proxy, in a process of their own.


def far_side(kind: str, seed: int) -> None:
    """Serve until the standard input ends; the proxy's address is the first line of output, its counts the second."""
    with ExitStack() as stack:
        upstream = stack.enter_context(s3_server(seed) if kind == "s3" else http_server(seed))
        with FaultProxy(upstream, at_random(RATES, seed), seed=seed) as proxy:
            print(proxy.url, flush=True)
            sys.stdin.read()
            faults = {kind.value: count for kind, count in sorted(proxy.faults.items(), key=lambda one: one[0].value)}
            print(json.dumps({"requests": proxy.requests, "faults": faults}), flush=True)


@contextmanager
def http_server(seed: int) -> Iterator[str]:
    """``kvwire serve`` over a store in memory."""
    store = MemoryStore()
    for key, data in blobs(seed).items():
        store.put(key, data)
    with serving(store) as url:
        yield url


@contextmanager
def s3_server(seed: int) -> Iterator[str]:
    """An S3 emulator."""
    with ministack() as server:
        with closing(S3Store(server.address("soak"))) as store:
            for key, data in blobs(seed).items():
                store.put(key, data)
        yield server.endpoint


@contextmanager
def behind_faults(kind: str, seed: int, told: dict[str, Any]) -> Iterator[Store]:
    """A store whose server is in another process; ``told`` gets what the proxy counted."""
    command = [sys.executable, __file__, "--far-side", kind, "--seed", str(seed)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url, "the far side did not start"
        if kind == "s3":
            settings = S3Settings(connect_s=1.0, stall_s=0.5, total_s=3.0)
            yield S3Store(f"s3://kvwire/soak?endpoint={url}&region=us-east-1", settings=settings)
        else:
            yield HttpStore(url, settings=HttpStoreSettings(stall_s=0.5, total_s=3.0))
    finally:
        process.stdin.close()
        with suppress(ValueError):
            told.update(json.loads(process.stdout.readline()))
        process.stdout.close()
        process.wait(30)


# The near side.


class Soak:
    """Loads for a while; counts how they end."""

    def __init__(self, tiers: TieredStore, session: aiohttp.ClientSession, seed: int) -> None:
        """Know what every byte should be."""
        self.tiers = tiers
        self.session = session
        self.meter = LinkMeter()
        self.rng = random.Random(seed)
        self.blobs = blobs(seed)
        self.keys = list(self.blobs)
        self.ends: Counter[str] = Counter()
        self.wrong = 0
        self.segments = 0
        self.late = 0

    def results(self) -> dict[str, Any]:
        """How the loads ended, and what was wrong."""
        return {
            "loads": dict(self.ends.most_common()),
            "wrong_bytes": self.wrong,
            "late": self.late,
            "segments": self.segments,
        }

    async def run(self, seconds: float) -> None:
        """Keep a number of loads going."""
        until = time.monotonic() + seconds

        async def work() -> None:
            while time.monotonic() < until:
                await self.one()

        await asyncio.gather(*(work() for _ in range(LOADS_AT_A_TIME)))

    async def one(self) -> None:
        """One load of some kind."""
        key = self.keys[min(int(self.rng.expovariate(1 / 12)), BLOBS - 1)]  # some blobs are wanted more than others
        draw = self.rng.random()
        try:
            if draw < 0.05:
                end = await self.whole(key)
            elif draw < 0.08:
                end = await asyncio.to_thread(self.written, key)
            elif draw < 0.12:
                self.tiers.prefetch(key)
                end = "hinted"
            elif draw < 0.2:
                end = await self.cancelled(key)
            else:
                end = await self.fetched(key, leave=draw > 0.92)
        except KvwireError as error:
            end = type(error).__name__
        self.ends[end] += 1

    async def fetched(self, key: str, *, leave: bool = False) -> str:
        """Fetch the levels up to one of them, or leave after a few segments."""
        data, level, started = self.blobs[key], self.rng.randrange(3), time.monotonic()
        source = open_source(self.tiers, key, self.session)
        misses: Counter[str] = Counter()
        async with BlobFetcher(source, read_header=read_blob_head, settings=FETCH, meter=self.meter) as fetcher:
            info = await fetcher.open(deadline=started + DEADLINE_S)
            wanted = [segment for row in info.segments for segment in row[: level + 1]]
            async with aclosing(fetcher.fetch(wanted, deadline=started + DEADLINE_S)) as results:
                async for result in results:
                    if isinstance(result, SegmentError):
                        misses[f"{type(result).__name__} ({type(result.__cause__).__name__})"] += 1
                        continue
                    self.segments += 1
                    self.wrong += result.data != data[result.segment.offset : result.segment.end]
                    if leave and self.rng.random() < 0.3:
                        return "left early"
        self.late += time.monotonic() - started > DEADLINE_S + 1
        return misses.most_common(1)[0][0] if misses else "right"

    async def cancelled(self, key: str) -> str:
        """A load that is broken off from outside."""
        try:
            async with asyncio.timeout(self.rng.uniform(0, 0.1)):
                return await self.fetched(key)
        except TimeoutError:
            return "cancelled"

    async def whole(self, key: str) -> str:
        """The whole object by ``get``, compared with its digest as readers of small objects do."""
        data = await asyncio.to_thread(self.tiers.get, key)
        if hashlib.sha256(data).hexdigest() not in key:
            self.tiers.distrust(key)
            return "get: CorruptError by digest"
        self.wrong += data != self.blobs[key]
        return "get: right"

    def written(self, key: str) -> str:
        """The object written once more."""
        self.tiers.put(key, self.blobs[key])
        return "written"


def held() -> dict[str, int]:
    """Sockets, files and threads of this process, and its memory in KiB."""
    kinds: Counter[str] = Counter()
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(OSError):
            kinds["sockets" if str(link.readlink()).startswith("socket:") else "files"] += 1
    status = Path("/proc/self/status").read_text(encoding="ascii")
    rss = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return {"sockets": kinds["sockets"], "files": kinds["files"], "threads": threading.active_count(), "rss_kib": rss}


def left_in(folder: Path) -> tuple[int, int]:
    """Temporary files, and bytes of all files."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return sum(path.suffix == ".tmp" for path in paths), sum(path.stat().st_size for path in paths)


async def near_side(kind: str, seconds: float, seed: int, folder: Path) -> dict[str, Any]:
    """Soak one kind of remote; everything that was opened is closed again before the counting."""
    told: dict[str, Any] = {}
    samples: list[dict[str, int]] = []
    before, tasks_before = held(), len(asyncio.all_tasks())

    async def look() -> None:
        while True:
            samples.append(held())
            await asyncio.sleep(min(1.0, seconds / 20))

    with behind_faults(kind, seed, told) as remote:
        settings = TierSettings(stall_s=1.0, answer_s=3.0, retry_s=1.0, put_s=3.0)
        options: dict[str, Any] = {"memory_bytes": MEMORY_BYTES, "folder": folder, "folder_bytes": FOLDER_BYTES}
        tiers = open_tiers(remote, settings=settings, **options)
        looking = asyncio.create_task(look())
        try:
            async with open_session() as session:
                soak = Soak(tiers, session, seed)
                await soak.run(seconds)
        finally:
            looking.cancel()
            with suppress(asyncio.CancelledError):
                await looking
            counters = tiers.counters()
            await asyncio.to_thread(tiers.close)
    await asyncio.get_running_loop().shutdown_default_executor()
    gc.collect()
    await asyncio.sleep(0.2)  # transports that were closed let go of their sockets in the loop
    after = held()
    leaks = {name: after[name] - before[name] for name in ("sockets", "files", "threads")}
    leaks["tasks"] = len(asyncio.all_tasks()) - tasks_before
    leaks["temporary files"], folder_bytes = left_in(folder)
    return {
        "seconds": seconds,
        **soak.results(),
        "proxy": told,
        "memory_hits": counters.memory.hits,
        "disk_hits": counters.disk.hits,
        "corrupt_files": counters.disk.corrupt,
        "folder_bytes": folder_bytes,
        "leaks": leaks,
        "most": {name: max(sample[name] for sample in samples) for name in samples[0]},
        "rss_growth_kib": growth_of([sample["rss_kib"] for sample in samples]),
    }


def growth_of(samples: list[int]) -> float:
    """How much greater the second half's median is than the second quarter's, when everything has settled."""
    half = len(samples) // 2
    return statistics.median(samples[half:]) - statistics.median(samples[half // 2 : half])


def verdict(results: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the results, in words."""
    problems = []
    for kind, one in results.items():
        problems += [f"{kind}: {one['wrong_bytes']} segments with wrong bytes"] if one["wrong_bytes"] else []
        problems += [f"{kind}: {one['late']} loads were late"] if one["late"] else []
        problems += [f"{kind}: {count} {name} are left" for name, count in one["leaks"].items() if count > 0]
        problems += [] if one["folder_bytes"] <= FOLDER_BYTES * 1.1 else [f"{kind}: the folder holds more than it may"]
        problems += [] if one["loads"].get("right") else [f"{kind}: nothing was ever right"]
    return problems


def main() -> None:
    """Soak, save, and fail where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all remotes together")
    parser.add_argument("--seconds", type=float, help="instead of --minutes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--remotes", nargs="+", choices=["http", "s3"], default=["http", "s3"])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    parser.add_argument("--far-side", choices=["http", "s3"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ |= CREDENTIALS
    if options.far_side:
        far_side(options.far_side, options.seed)
        return
    seconds = (options.seconds or options.minutes * 60) / len(options.remotes)
    results: dict[str, dict[str, Any]] = {}
    for kind in options.remotes:
        with tempfile.TemporaryDirectory() as name:
            results[kind] = asyncio.run(near_side(kind, seconds, options.seed, Path(name)))
        print(json.dumps({kind: results[kind]}, indent=1))
    from measure import write_json  # it imports torch, which must not be in the figures of memory

    settings = {"seed": options.seed, "loads_at_a_time": LOADS_AT_A_TIME, "blobs": BLOBS, "deadline_s": DEADLINE_S}
    write_json(options.out, "soak", settings, results)
    if problems := verdict(results):
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
