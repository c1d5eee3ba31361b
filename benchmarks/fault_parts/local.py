"""Full disks, read-only disks, and processes that are killed: cases that the benchmark and the tests share.

Writers and readers are processes of their own. What they leave behind is opened again here, and every object in it is
compared with what its key says.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from test_parts.store_wrappers import CountingStore

from fault_parts.network import RIGHT, WRONG, Row, named, seconds_since
from kvwire.errors import KvwireError
from kvwire.store import FolderStore, MemoryStore, S3Settings, S3Store, content_digest, open_tiers
from kvwire.store.testing.samples import blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire.store import Store, TieredStore

PARTS = S3Settings(multipart_bytes=5 << 20, part_bytes=5 << 20)
DEADLINE_S = 20.0
_OBJECT_BYTES = 6 << 20
_PREAMBLE = """
import json, os, resource, signal, sys
from pathlib import Path
from kvwire.errors import KvwireError
from kvwire.store import FolderStore, MemoryStore, S3Settings, S3Store, open_tiers
from kvwire.store.testing.samples import blob
sys.path.append(sys.argv[3])
from test_parts.store_wrappers import CountingStore
place, size = sys.argv[1], int(sys.argv[2])
parts = S3Settings(multipart_bytes=5 << 20, part_bytes=5 << 20)
def tiers(remote, **options):
    return open_tiers(remote, memory_bytes=0, folder=place, folder_bytes=1 << 28, **options)
def limited(limit):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
def outcome(action):
    try:
        return action()
    except KvwireError as error:
        return type(error).__name__
"""
_STORES = {
    "folder": "FolderStore(place)",
    "s3, multipart": "S3Store(place, settings=parts)",
    "tiers, write-back": "tiers(FolderStore(place + '-behind'), write_back=True)",
}
_WRITER = """
store = {store}
for seed in range(10_000):
    print(seed, flush=True)
    store.put(*blob(seed, size))
"""
_READER = """
remote = MemoryStore()
for seed in range(4):
    remote.put(*blob(seed, size))
store = tiers(remote)
for turn in range(10_000):
    print(turn, flush=True)
    store.get(blob(turn % 4, size)[0], 0, size // 2 + turn)
"""
_FULL_FOLDER = """
store = FolderStore(place)
store.put(*blob(0, 1000))
limited(100_000)
print(json.dumps([outcome(lambda: store.put(*blob(1, size))), outcome(lambda: store.put(*blob(2, 1000)))]))
"""
_FULL_TIER = """
remote = MemoryStore()
for seed in range(4):
    remote.put(*blob(seed, size))
counted = CountingStore(remote)
store = tiers(counted)
limited(100_000)
for turn in range(2):
    for seed in range(4):
        key, data = blob(seed, size)
        if outcome(lambda: store.get(key)) != data:
            sys.exit("wrong")
    store.settle(10)
store.close()
print(json.dumps([counted.tally("get").requests + counted.tally("read").requests, store.counters().disk.write_errors]))
"""


def _row(fault: str, when: str, where: str, outcome: str, started: float, attempts: int = 1) -> Row:
    return Row(fault, when, where, outcome, attempts, 0, seconds_since(started), DEADLINE_S)


@contextmanager
def _program(text: str, place: str | Path, size: int) -> Iterator[subprocess.Popen[str]]:
    folder = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", _PREAMBLE + text, str(place), str(size), folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        process.stdout.close()


def _output(text: str, place: str | Path, size: int) -> Any:  # noqa: ANN401 - JSON
    with _program(text, place, size) as process:
        output = process.stdout.read()
        if process.wait(DEADLINE_S):
            return None
        return json.loads(output)


def full_disk(folder: Path) -> Row:
    """A file system that takes no file above 100 kB, as a full one takes none above what is left."""
    started = time.monotonic()
    large, small = _output(_FULL_FOLDER, folder, 1_000_000) or (f"{WRONG}: the writer died", "")
    with closing(FolderStore(folder)) as store:
        outcome = large if small is None and not _damaged(store) else f"{WRONG}: {small}, {_damaged(store)}"
        if sorted(path.name for path in folder.rglob(".tmp-*")):
            outcome = f"{WRONG}: litter is left"
    return _row("disk full", "while writing", "folder", outcome, started)


def full_disk_tier(folder: Path) -> Row:
    """The disk tier cannot be written: reads go on, from the remote."""
    started = time.monotonic()
    found = _output(_FULL_TIER, folder, 1_000_000)
    requests, errors = found or (0, 0)
    outcome = RIGHT if errors else f"{WRONG}: the disk was not even tried"
    return _row("disk full", "while reading", "disk tier", outcome, started, requests)


@contextmanager
def read_only_disk(folder: Path) -> Iterator[Callable[[], object] | None]:
    """A small file system that becomes read-only when ``lock()`` is called; None where this machine cannot have one."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode:
        yield None
        return
    try:
        yield lambda: subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_that_becomes_read_only(folder: Path) -> list[Row]:
    """Writing fails with words, reading goes on. No rows where it cannot be tried."""
    with read_only_disk(folder) as lock:
        if lock is None:
            return []
        started = time.monotonic()
        key, data = blob(0, 50_000)
        _fill_tiers(folder / "t")
        with closing(FolderStore(folder / "s")) as store:
            store.put(key, data)
            lock()
            outcome = _outcome(lambda: store.put(*blob(1, 50_000)))
            outcome = outcome if store.get(key) == data else f"{WRONG} bytes"
        rows = [_row("disk becomes read-only", "while writing", "folder", outcome, started)]
        started = time.monotonic()
        with closing(_small_tiers(folder / "t")) as tiers:
            right = all(tiers.get(key) == data for key, data in (blob(seed, 50_000) for seed in range(4)))
        return [*rows, _row("disk is read-only", "while reading", "disk tier", RIGHT if right else WRONG, started)]


def _small_tiers(folder: Path) -> TieredStore:
    remote = MemoryStore()
    for seed in range(4):
        remote.put(*blob(seed, 50_000))
    return open_tiers(remote, memory_bytes=0, folder=folder, folder_bytes=1 << 20)


def _fill_tiers(folder: Path) -> None:
    with closing(_small_tiers(folder)) as tiers:
        for seed in range(2):
            tiers.get(blob(seed, 50_000)[0])


def _outcome(action: Callable[[], object]) -> str:
    try:
        action()
    except KvwireError as error:
        return named(error)
    return RIGHT


def killed_writer(kind: str, place: str | Path, kills: int, seed: int) -> Row:
    """A writer is killed in the middle of puts: what can be read is whole, and writing again heals the rest."""
    started, rng, done = time.monotonic(), random.Random(seed), 0
    for _ in range(kills):
        with _program(_WRITER.format(store=_STORES[kind]), place, _OBJECT_BYTES) as process:
            for _ in range(rng.randint(1, 3)):
                process.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))  # somewhere in the middle of a put
            process.send_signal(signal.SIGKILL)
            done += process.wait(30) == -signal.SIGKILL
    with closing(_opened(kind, place)) as store:
        problem = _damaged(store)
        for number in range(3):
            key, data = blob(number, _OBJECT_BYTES)
            store.create(key, data)
            problem = problem or (None if store.get(key) == data else key)
    outcome = f"{WRONG} bytes: {problem}" if problem else RIGHT
    return _row("kill -9 of the writer", "in mid-put", kind, outcome, started, done)


def _opened(kind: str, place: str | Path) -> Store:
    if kind == "folder":
        return FolderStore(place)
    if kind == "s3, multipart":
        return S3Store(place, settings=PARTS)
    tiers = open_tiers(
        FolderStore(f"{place}-behind"), memory_bytes=0, folder=place, folder_bytes=1 << 28, write_back=True
    )
    tiers.flush(10)
    return tiers


def _damaged(store: Store) -> str | None:
    """A key whose bytes are not those that it names, if there is one."""
    for key in store.keys(""):
        if hashlib.sha256(store.get(key)).hexdigest() != content_digest(key):
            return key
    return None


def killed_reader(folder: Path, kills: int, seed: int) -> Row:
    """A reader that fills the disk tier is killed: the next process reads right bytes from what is left."""
    started, rng, done = time.monotonic(), random.Random(seed), 0
    for _ in range(kills):
        with _program(_READER, folder, _OBJECT_BYTES) as process:
            for _ in range(rng.randint(2, 8)):
                process.stdout.readline()
            time.sleep(rng.uniform(0, 0.02))
            process.send_signal(signal.SIGKILL)
            done += process.wait(30) == -signal.SIGKILL
    remote = MemoryStore()
    for number in range(4):
        remote.put(*blob(number, _OBJECT_BYTES))
    counted = CountingStore(remote)
    outcome = RIGHT
    with closing(open_tiers(counted, memory_bytes=0, folder=folder, folder_bytes=1 << 28)) as tiers:
        for number in range(4):
            key, data = blob(number, _OBJECT_BYTES)
            if tiers.get(key) != data:
                outcome = f"{WRONG} bytes: {key}"
    return _row("kill -9 of the reader", "while the tier is filled", "disk tier", outcome, started, done)
