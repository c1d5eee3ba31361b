"""What links deliver against what they are asked for: the kernel's shaping of a real connection, and the emulated link.

Rates of one long transfer and of many short ranges at a time, steps of a schedule with an outage, and the time to the
first byte of 1 KiB through the fetcher. Rates are bytes of objects, so HTTP's headers count against a link. Needs root:
see ``shaped_parts/shaped_link.py``. Writes ``results/shaped.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import statistics
import tempfile
import time
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import RESULTS, table, write_json
from shaped_parts.shaped_link import ShapingSettings, shaped_link

from kvwire.store import FolderStore
from kvwire.transport import (
    BlobFetcher,
    EmulatedLink,
    FetchSettings,
    HttpSource,
    LinkedSource,
    LinkMeter,
    RateSchedule,
    open_session,
)
from kvwire.transport.testing import build_blob, read_blob_head, serving

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

    from kvwire.transport import ByteSource, LinkSample

    Rate = float | RateSchedule

OBJECT_BYTES = 200_000_000
BIT = 1 / 8
MBIT = 1e6 * BIT
RATES_MBIT = (20, 50, 200, 1000)
RTTS_S = (0.0, 0.02)
RANGE_BYTES = (4 << 10, 256 << 10)
PARALLEL = 16
SECONDS = 3.0
STEPS = RateSchedule((0.0, 2.0, 3.0, 4.0), (50 * MBIT, 0.0, 10 * MBIT, 200 * MBIT), 6.0)
REQUESTS = 200
CONNECTIONS = 40
KINDS = ("shaped", "emulated")


@dataclass
class Case:
    """A link that runs; sources over it share a session or open their own."""

    url: str
    token: str | None
    link: EmulatedLink | None
    begin: Callable[[], float | None]

    def source(self, session: Any, key: str) -> ByteSource:  # noqa: ANN401 - aiohttp's session
        """An object, over the link."""
        source = HttpSource(session, f"{self.url}/{key}", token=self.token)
        return LinkedSource(source, self.link) if self.link else source

    @asynccontextmanager
    async def opened(self, key: str) -> AsyncIterator[ByteSource]:
        """An object, over connections of its own."""
        async with open_session() as session:
            yield self.source(session, key)


@contextmanager
def running(kind: str, folder: Path, rate: Rate, rtt_s: float, settings: ShapingSettings) -> Iterator[Case]:
    """A server behind a link of one kind."""
    with ExitStack() as stack:
        if kind == "shaped":
            first = rate.rates[0] if isinstance(rate, RateSchedule) else rate
            link = stack.enter_context(shaped_link(folder, first, rtt_s, settings))
            case = Case(link.url, link.token, None, partial(link.follow, STEPS))
        else:
            url = stack.enter_context(serving(FolderStore(folder)))
            emulated = EmulatedLink(rate, rtt_s)
            case = Case(url, None, emulated, emulated.begin)
        asyncio.run(warm_up(case))
        yield case


async def warm_up(case: Case) -> None:
    """First requests take longer on either side, whatever the link."""
    async with open_session() as session:
        await HttpSource(session, f"{case.url}/big", token=case.token).read(0, 1, len)


async def long_transfer(case: Case, size: int) -> dict[str, float]:
    """One request: bytes a second of all its time, and of the second half alone, when TCP has found the rate."""
    began, got = time.monotonic(), [(time.monotonic(), 0)]
    async with case.opened("big") as source:
        await source.read(0, size, lambda data: got.append((time.monotonic(), got[-1][1] + len(data))))
    ended = got[-1][0]
    middle = next(index for index, (_, done) in enumerate(got) if done >= size // 2)
    late = (size - got[middle][1]) / (ended - got[middle][0])
    return {"whole": size / (ended - began), "second_half": late}


async def short_ranges(case: Case, seconds: float) -> float:
    """Ranges of 4 to 256 KiB, 16 at a time: bytes a second, without the first and the last second."""
    marks: list[tuple[float, int]] = []
    end = time.monotonic() + seconds + 2

    async def reader(rng: random.Random, source: ByteSource) -> None:
        while time.monotonic() < end:
            start, size = rng.randrange(OBJECT_BYTES // 2), rng.randrange(*RANGE_BYTES)
            await source.read(start, start + size, lambda data: marks.append((time.monotonic(), len(data))))

    async with open_session() as session:
        readers = [reader(random.Random(seed), case.source(session, "big")) for seed in range(PARALLEL)]
        await asyncio.gather(*readers)
    return sum(size for at, size in marks if end - 1 - seconds <= at < end - 1) / seconds


async def steps(case: Case) -> list[float]:
    """Bytes that come in each step of the schedule, over what the schedule carries; in the outage, bytes."""
    began, marks = case.begin() or time.monotonic(), []
    async with case.opened("big") as source:
        try:
            async with asyncio.timeout(6):
                await source.read(0, None, lambda data: marks.append((time.monotonic() - began, len(data))))
        except TimeoutError:
            pass
    bounds = list(pairwise([*STEPS.times, 6.0]))
    came = [sum(n for at, n in marks if a <= at < b) for a, b in bounds]
    wanted = [STEPS.bytes_by(b) - STEPS.bytes_by(a) for a, b in bounds]
    return [got / want if want else float(got) for got, want in zip(came, wanted, strict=True)]


async def first_bytes(case: Case) -> dict[str, dict[str, float]]:
    """Seconds to the first byte of 1 KiB: as the fetcher's meter tells it, as its caller waits, and when connecting."""
    told: list[float] = []

    def take(sample: LinkSample) -> None:
        if sample.first_byte_s is not None:
            told.append(sample.first_byte_s)

    waits = []
    async with open_session() as session:
        meter, settings = LinkMeter(take), FetchSettings(header_bytes=1)
        source = case.source(session, "blob")
        async with BlobFetcher(source, read_header=read_blob_head, settings=settings, meter=meter) as fetcher:
            info = await fetcher.open()
            meter.flush()
            told.clear()
            for chunk in range(REQUESTS):
                began = time.monotonic()
                async with aclosing(fetcher.fetch(info.reads(chunk, 0))) as arrivals:
                    waits += [time.monotonic() - began async for _ in arrivals]
                meter.flush()
    connecting = []
    for _ in range(CONNECTIONS):
        async with case.opened("big") as source:
            began = time.monotonic()
            await source.read(0, 1024, lambda _: connecting.append(time.monotonic() - began))  # noqa: B023 - awaited
    return {"told": spread(told), "waited": spread(waits), "connecting": spread(connecting)}


def spread(samples: list[float]) -> dict[str, float]:
    """Number, median and 90 % quantile."""
    return {"n": len(samples), "median": statistics.median(samples), "p90": statistics.quantiles(samples, n=10)[-1]}


def measure(folder: Path, settings: ShapingSettings, rates: tuple[int, ...]) -> dict[str, Any]:
    """All figures."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        for rtt_s in RTTS_S:
            for mbit in rates:
                rate = mbit * MBIT
                with running(kind, folder, rate, rtt_s, settings) as case:
                    size = int(min(OBJECT_BYTES, max(20e6, rate * SECONDS)))
                    row = asyncio.run(long_transfer(case, size))
                    row["short_ranges"] = asyncio.run(short_ranges(case, SECONDS))
                    first = asyncio.run(first_bytes(case))
                shares = {name: value / rate for name, value in row.items()}
                found[f"{kind} {mbit} Mbit/s {rtt_s * 1e3:g} ms"] = {"of_rate": shares, "first_byte_s": first}
                print(kind, mbit, rtt_s, {name: f"{share - 1:+.1%}" for name, share in shares.items()}, flush=True)
        with running(kind, folder, STEPS, 0.0, settings) as case:
            found[f"{kind} steps"] = asyncio.run(steps(case))
    return found


def show(found: dict[str, Any]) -> str:
    """The figures as tables."""
    rows = []
    for name, row in found.items():
        if "steps" not in name:
            shares = [f"{row['of_rate'][part] - 1:+.1%}" for part in ("whole", "second_half", "short_ranges")]
            times = [
                f"{row['first_byte_s'][part]['median'] * 1e3:.2f} / {row['first_byte_s'][part]['p90'] * 1e3:.2f}"
                for part in ("told", "waited", "connecting")
            ]
            rows.append([name, *shares, *times])
    head = ["link", "long transfer", "its second half", "short ranges", "first byte ms", "waited", "new connection"]
    lines = [table(head, rows), "", "steps 50, 0, 10, 200 Mbit/s: share of the schedule (in the outage: bytes)"]
    lines += [f"{kind}: " + ", ".join(f"{share:.3f}" for share in found[f"{kind} steps"]) for kind in KINDS]
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=list(RATES_MBIT), help="Mbit/s")
    parser.add_argument("--congestion", default="cubic", help="the server's TCP congestion control")
    parser.add_argument("--out", type=Path, default=RESULTS / "shaped.json")
    given = parser.parse_args()
    logging.getLogger("kvwire").setLevel(logging.ERROR)
    settings = ShapingSettings(congestion=given.congestion)
    with tempfile.TemporaryDirectory() as folder:
        store = FolderStore(folder)
        store.put("big", random.Random(0).randbytes(OBJECT_BYTES))
        store.put("blob", build_blob([[1024] for _ in range(REQUESTS)], seed=0))
        found = measure(Path(folder), settings, tuple(given.rates))
    print(show(found))
    write_json(given.out, "shaped", {"congestion": given.congestion, "rates_mbit": given.rates}, found)


if __name__ == "__main__":
    main()
