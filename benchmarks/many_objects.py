"""A folder store with many small objects: time and memory for each, of writing, listing, checking and collecting.

    python benchmarks/many_objects.py --objects 10000 100000

Needs Linux, which tells a process its peak of memory.

Half of the objects are texts, which are files, and half are the entries that name them, which are rows. Every stage is
a process of its own; its memory is the peak over what it held after its first object. Texts and entries are written
one at a time, as encoding does: each waits for the disk.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import RESULTS, write_json

from kvwire.codec import pack_text, read_text
from kvwire.store import Catalog, CatalogEntry, FolderStore, collect, verify_store
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = "c" * 64
TOKENS = 60
STAGES = ("put texts", "put entries", "ls", "verify", "gc --dry-run")


def token_ids(seed: int, number: int) -> list[int]:
    """A text's, quick to make."""
    start = (seed * 1_000_003 + number) * 7919
    return [(start + place * 104_729) % 4_294_967 for place in range(TOKENS)]


def texts(store: FolderStore, seed: int, count: int) -> Iterator[None]:
    """Write a text at a time."""
    space = Catalog(store).keys(CONFIG)
    for number in range(count):
        ids = token_ids(seed, number)
        store.put(space.text(digest_tokens(ids)), pack_text(ids))
        yield


def entries(store: FolderStore, seed: int, count: int) -> Iterator[None]:
    """Write an entry at a time."""
    space = Catalog(store).keys(CONFIG)
    for number in range(count):
        digest = digest_tokens(token_ids(seed, number))
        entry = CatalogEntry(f"document {number}", "", "", 0, 0, TOKENS, digest, "", ())
        store.put(space.document(entry.document_id), entry.to_json())
        yield


def listing(store: FolderStore) -> Iterator[None]:
    """List documents, as ``kvwire store ls`` does, and all keys."""
    for _ in Catalog(store).documents(CONFIG):
        yield
    for _ in store.scan(""):
        yield


def whole(action: Callable[[], object]) -> Iterator[None]:
    """What cannot be stopped after the first object."""
    yield
    action()


def work(stage: str, store: FolderStore, seed: int, count: int) -> Iterator[None]:
    """A stage, object by object."""
    read_text(pack_text([1]))  # what checking imports is no object's memory
    if stage == "put texts":
        return texts(store, seed, count)
    if stage == "put entries":
        return entries(store, seed, count)
    if stage == "ls":
        return listing(store)
    if stage == "verify":
        return whole(lambda: verify_store(store, [Catalog(store)]))
    return whole(lambda: collect(store, grace_s=0, dry_run=True))


def memory_bytes(of: str) -> int:
    """Of this process: what it holds (VmRSS), or the most since the last reset (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(of))


def reset_peak() -> None:
    """Importing takes more for a moment than it leaves behind: that is no object's memory."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def run_stage(stage: str, folder: Path, seed: int, count: int) -> dict[str, float]:
    """Seconds, processor seconds and growth of one stage, in this process."""
    with closing(FolderStore(folder)) as store:
        going = work(stage, store, seed, count)
        started, used = time.perf_counter(), time.process_time()
        list(islice(going, 1))
        reset_peak()
        held = memory_bytes("VmRSS")
        for _ in going:
            pass
        return {
            "seconds": time.perf_counter() - started,
            "processor_s": time.process_time() - used,
            "growth_bytes": memory_bytes("VmHWM") - held,
        }


def measured(stage: str, folder: Path, seed: int, count: int) -> dict[str, float]:
    """The same in a process of its own, for each object."""
    words = ["--stage", stage, "--folder", str(folder), "--seed", str(seed), "--objects", str(2 * count)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    found = json.loads(done.stdout)
    objects = count if stage.startswith("put") else 2 * count
    return {
        "objects": objects,
        "seconds": found["seconds"],
        "us_per_object": found["seconds"] / objects * 1e6,
        "processor_us_per_object": found["processor_s"] / objects * 1e6,
        "growth_bytes": found["growth_bytes"],
        "growth_bytes_per_object": found["growth_bytes"] / objects,
    }


def measure(objects: int, seed: int, within: Path | None) -> dict[str, Any]:
    """All stages on one store."""
    folder = Path(tempfile.mkdtemp(prefix="kvwire-many-", dir=within))
    try:
        result: dict[str, Any] = {}
        for stage in STAGES:
            result[stage] = measured(stage, folder, seed, objects // 2)
            told = result[stage]
            print(
                f"{objects:>8} {stage:<14} {told['us_per_object']:9.1f} us  "
                f"{told['growth_bytes'] / 1e6:7.1f} MB  {told['growth_bytes_per_object']:7.1f} B an object",
                flush=True,
            )
        used = [path.stat() for path in folder.rglob("*") if path.is_file()]
        result["disk_bytes"] = sum(512 * about.st_blocks for about in used)
        return result
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Measure and save; with ``--stage``, one stage for the process that asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, nargs="+", default=[10_000, 100_000], help="of each store, in turn")
    parser.add_argument("--folder", type=Path, help="where stores are made; default: the temporary folder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "many_objects.json")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(run_stage(options.stage, options.folder, options.seed, options.objects[0] // 2)))
        return
    results = {str(objects): measure(objects, options.seed, options.folder) for objects in options.objects}
    settings = {"seed": options.seed, "tokens": TOKENS, "n": 1}
    write_json(options.out, "many_objects", settings, results)


if __name__ == "__main__":
    main()
