"""How a folder store's catalog behaves with many documents: rates, latencies and bytes on the disk.

    python benchmarks/catalog.py --entries 200000 --folder /tmp/catalog

Entries look like those of real documents. Lookups and pages are of random places, from a database that was just opened;
the operating system may have it in memory, as it would on a server that is in use.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import shutil
import sqlite3
import statistics
import tempfile
import time
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.store import Catalog, CatalogEntry, FolderStore, KeySpace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CONFIG = hashlib.sha256(b"a model").hexdigest()
SINGLE = 300
"""Puts of one entry each: every one waits for the disk."""
LOOKUPS = 5000
PAGES = 100
PAGE_ENTRIES = 1000


def document(number: int) -> str:
    """A document's id."""
    return f"corpus/part-{number % 97:02d}/document-{number:09d}"


def entry(space: KeySpace, number: int) -> CatalogEntry:
    """An entry as long as those of real documents."""
    sha256 = hashlib.sha256(b"blob %d" % number).hexdigest()
    token_digest = hashlib.sha256(b"tokens %d" % number).hexdigest()
    levels = tuple(
        (name, 100_000 * (index + 1)) for index, name in enumerate(("base", "low", "middle", "high", "best"))
    )
    return CatalogEntry(document(number), space.blob(sha256), sha256, 500_000, 4096, 2000, token_digest, CONFIG, levels)


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and tail in microseconds."""
    ordered = sorted(seconds)
    return {
        "median_us": round(statistics.median(ordered) * 1e6, 1),
        "p99_us": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 1),
    }


def pairs(space: KeySpace, numbers: range) -> Iterator[tuple[str, bytes]]:
    """Keys and entries."""
    for number in numbers:
        yield space.document(document(number)), entry(space, number).to_json()


def measure(folder: Path, entries: int, seed: int) -> dict[str, Any]:
    """All figures, of a store that is made in ``folder``."""
    chosen = random.Random(seed)
    with closing(FolderStore(folder)) as store:
        space = Catalog(store).keys(CONFIG)
        ready = list(pairs(space, range(entries, entries + SINGLE)))
        single = [timed(lambda key=key, data=data: store.put(key, data)) for key, data in ready]
        making = timed(lambda: sum(len(data) for _, data in pairs(space, range(entries))))
        batched = timed(lambda: store.put_many(pairs(space, range(entries)))) - making
    size = sum(path.stat().st_size for path in folder.iterdir())
    with closing(FolderStore(folder)) as store:
        catalog = Catalog(store)
        numbers = [chosen.randrange(entries) for _ in range(LOOKUPS)]
        gets = [timed(lambda n=n: store.get(space.document(document(n)))) for n in numbers]
        parsed = [timed(lambda n=n: catalog.by_document(CONFIG, document(n))) for n in numbers]
        absent = [timed(lambda n=n: catalog.by_document(CONFIG, f"absent {n}")) for n in numbers]
        starts = [space.document(document(chosen.randrange(entries))) for _ in range(PAGES)]
        keys = [timed(lambda at=at: list(islice(store.scan(space.documents, at), PAGE_ENTRIES))) for at in starts]
        pages = [timed(lambda at=at: list(catalog.documents(CONFIG, after=at, limit=PAGE_ENTRIES))) for at in starts]
        whole = timed(lambda: sum(1 for _ in store.scan(space.documents)))
    return {
        "entries": entries + SINGLE,
        "entry_bytes": round(statistics.mean(len(data) for _, data in ready), 1),
        "database_bytes": size,
        "bytes_per_entry": round(size / (entries + SINGLE), 1),
        "put_one": spread(single) | {"per_s": round(len(single) / sum(single))},
        "put_many_per_s": round(entries / batched),
        "get": spread(gets),
        "lookup": spread(parsed),
        "lookup_absent": spread(absent),
        "page_of_1000_keys": spread(keys),
        "page_of_1000_entries": spread(pages),
        "list_all_keys_s": round(whole, 3),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=200_000)
    parser.add_argument("--folder", type=Path, help="empty or new; default: a temporary one, removed afterwards")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kvwire-catalog-"))
    try:
        result = measure(folder, options.entries, options.seed)
    finally:
        if options.folder is None:
            shutil.rmtree(folder)
    about = {"machine": platform.machine(), "python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    text = json.dumps({"about": about, "seed": options.seed, **result}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
