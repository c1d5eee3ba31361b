"""Tiers before a remote store: how often the eviction policy hits beside plain LRU, and how fast hits are read.

Hit rates: whole objects of log-normal size (median 4 MiB) are used in a seeded Zipf order, alone and mixed with scans
of objects that are used once; the tier holds a share of all bytes. "requests" is the share of uses that hit, "bytes"
the share of bytes. Read throughput: 8 MiB objects read whole through a tiered store, from memory and from disk, against
the same bytes read from a ``FolderStore``, copied in memory and checked by CRC-32. Everything is in the page cache, so
the disk tier's figure is that of its checksum and of one copy; the memory tier gives out what it holds without copying.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import OrderedDict
from contextlib import closing
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isal.isal_zlib import crc32
from measure import RESULTS, interleaved, summary, table, write_json

from kvwire.store import FolderStore, MemoryStore, open_tiers
from kvwire.store.cache.disk_tier import HEADER_BYTES
from kvwire.store.cache.eviction import WindowTinyLfu
from kvwire.store.testing import samples

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MIB = 1 << 20
OBJECTS = 2000
USES = 30_000
SKEW = 0.9
SHARES = (0.01, 0.05, 0.2)
MEDIAN_BYTES = 4 * MIB
SIGMA = 1.0
BLOB_BYTES = 8 * MIB
BLOBS = 8
ROUNDS = 15
FILES = 100_000


class LeastRecentlyUsed:
    """Gives up what was not used for the longest time: what the tiers' policy is compared with."""

    def __init__(self, budget_bytes: int) -> None:
        """Start empty."""
        del budget_bytes
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def touched(self, name: bytes) -> None:
        """Move it to the end."""
        if name in self._order:
            self._order.move_to_end(name)

    def added(self, name: bytes, size: int) -> None:
        """Put it at the end."""
        del size
        self._order[name] = None
        self._order.move_to_end(name)

    def removed(self, name: bytes) -> None:
        """Forget it."""
        self._order.pop(name, None)

    def victim(self, excess: int) -> bytes:
        """The first in order."""
        del excess
        return next(iter(self._order))


POLICIES: dict[str, Callable[[int], LeastRecentlyUsed | WindowTinyLfu]] = {
    "lru": LeastRecentlyUsed,
    "tinylfu": WindowTinyLfu,
}


def sizes_of(rng: random.Random, number: int) -> list[int]:
    """Log-normal sizes in bytes."""
    return [max(1, int(MEDIAN_BYTES * rng.lognormvariate(0, SIGMA))) for _ in range(number)]


def zipf_trace(rng: random.Random) -> list[int]:
    """Objects in order of use."""
    weights = [1 / rank**SKEW for rank in range(1, OBJECTS + 1)]
    return rng.choices(range(OBJECTS), weights, k=USES)


def scanned_trace(rng: random.Random) -> list[int]:
    """The same with a scan of as many objects, each used once, after each 1000 uses."""
    trace = zipf_trace(rng)
    parts = [trace[start : start + 1000] for start in range(0, USES, 1000)]
    return [use for n, part in enumerate(parts) for use in [*part, *range(OBJECTS + n * 500, OBJECTS + n * 500 + 500)]]


def hit_rates(policy_name: str, trace: list[int], sizes: list[int], budget: int) -> dict[str, float]:
    """Shares of requests and bytes that hit, over the second half of a trace."""
    policy = POLICIES[policy_name](budget)
    held: dict[bytes, int] = {}
    held_bytes = hits = hit_bytes = asked_bytes = 0
    for turn, number in enumerate(trace):
        name, size = number.to_bytes(4, "big"), sizes[number]
        policy.touched(name)
        counts = turn >= len(trace) // 2
        asked_bytes += size * counts
        if name in held:
            hits += counts
            hit_bytes += size * counts
            continue
        held[name] = size
        held_bytes += size
        policy.added(name, size)
        while held_bytes > budget:
            victim = policy.victim(held_bytes - budget)
            held_bytes -= held.pop(victim)
            policy.removed(victim)
    return {"requests": hits / (len(trace) - len(trace) // 2), "bytes": hit_bytes / asked_bytes}


def all_hit_rates(seed: int, repeats: int) -> dict[str, Any]:
    """By trace, share and policy, over several seeds."""
    found: dict[str, Any] = {}
    for trace_name, make in (("zipf", zipf_trace), ("zipf with scans", scanned_trace)):
        for share in SHARES:
            samples_: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
            for repeat in range(repeats):
                rng = random.Random(seed + repeat)
                trace = make(rng)
                sizes = sizes_of(rng, max(trace) + 1)
                for policy in POLICIES:
                    samples_[policy].append(hit_rates(policy, trace, sizes, int(share * sum(sizes[:OBJECTS]))))
            found[f"{trace_name}, {share:.0%} of all bytes"] = {
                policy: {kind: summary([one[kind] for one in many]) for kind in ("requests", "bytes")}
                for policy, many in samples_.items()
            }
    return found


def throughput(folder: Path) -> dict[str, Any]:
    """GB/s of hits, of plain reads and of a copy in memory."""
    blobs = dict(samples.blob(number, BLOB_BYTES) for number in range(BLOBS))
    plain, remote = FolderStore(folder / "plain"), MemoryStore()
    for key, data in blobs.items():
        plain.put(key, data)
        remote.put(key, data)
    memory = open_tiers(remote, memory_bytes=2 * BLOBS * BLOB_BYTES)
    disk = open_tiers(remote, memory_bytes=0, folder=folder / "cache", folder_bytes=2 * BLOBS * BLOB_BYTES)
    with closing(memory), closing(disk):
        for key, data in blobs.items():
            assert memory.get(key) == data
            assert disk.get(key) == data
            assert disk.settle(60)
        keys: dict[str, Iterator[str]] = {name: cycle(blobs) for name in ("memory", "disk", "folder", "copy")}
        cases: dict[str, Callable[[], object]] = {
            "memory tier": lambda: memory.get(next(keys["memory"])),
            "memory tier, 64 KiB of it": lambda: memory.get(next(keys["memory"]), MIB, MIB + 65536),
            "disk tier": lambda: disk.get(next(keys["disk"])),
            "folder store": lambda: plain.get(next(keys["folder"])),
            "CRC-32 alone": lambda: crc32(blobs[next(keys["copy"])]),
            "copy in memory": lambda: bytearray(blobs[next(keys["copy"])]),
        }
        seconds = interleaved(cases, ROUNDS, time.perf_counter)  # the disk is read in threads of its own
        assert memory.counters().remote.bytes == disk.counters().remote.bytes == BLOBS * BLOB_BYTES
    found = {}
    for name, times in seconds.items():
        size = 65536 if "64 KiB" in name else BLOB_BYTES
        found[name] = {
            "us": summary([1e6 * one for one in times]),
            "gb_s": summary([size / one / 1e9 for one in times]),
        }
    return found


def start_time(folder: Path) -> dict[str, Any]:
    """Seconds until a folder of many files is taken over."""
    digits = [f"{number:064x}"[::-1] for number in range(FILES // 4)]
    for name in digits:
        parent = folder / "slot-0" / name[:2]
        parent.mkdir(parents=True, exist_ok=True)
        for start in range(4):
            with (parent / f"{name}-{start * 16:x}-{start * 16 + 16:x}.ext").open("wb") as file:
                file.truncate(HEADER_BYTES + 16)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        tiers = open_tiers(MemoryStore(), memory_bytes=0, folder=folder, folder_bytes=1 << 40)
        times.append(time.perf_counter() - began)
        assert tiers.counters().disk.extents == FILES
        tiers.close()
    return {"files": FILES, "seconds": summary(times)}


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3, help="traces for each figure")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        speeds = throughput(Path(name) / "speed")
        start = start_time(Path(name) / "start")
    rates = all_hit_rates(arguments.seed, arguments.repeats)
    print("\nhit rates: share of requests (share of bytes)")
    rows = [
        [case, *(f"{one[p]['requests']['median']:.1%} ({one[p]['bytes']['median']:.1%})" for p in POLICIES)]
        for case, one in rates.items()
    ]
    print(table(["trace and size", *POLICIES], rows))
    print("\nreads of 8 MiB objects, everything in the page cache")
    rows = [[case, f"{one['us']['median']:.1f}", f"{one['gb_s']['median']:.2f}"] for case, one in speeds.items()]
    print(table(["from", "us", "GB/s"], rows))
    print(f"\n{FILES} files are taken over in {start['seconds']['median']:.2f} s")
    settings = {
        "seed": arguments.seed,
        "repeats": arguments.repeats,
        "rounds": ROUNDS,
        "objects": OBJECTS,
        "uses": USES,
        "skew": SKEW,
        "median_bytes": MEDIAN_BYTES,
        "sigma": SIGMA,
        "blob_bytes": BLOB_BYTES,
    }
    write_json(RESULTS / "tiers.json", "tiers", settings, {"hit_rates": rates, "reads": speeds, "start": start})


if __name__ == "__main__":
    main()
