"""Offline encoding: documents a second, and the model's share of the time, one after another, side by side, and on Ray.

Each way writes the same documents into a folder of its own, with one profile, which is fitted before; blobs have to be
alike in all of them. The engine has one thread, so that a second core is free. ``prefill_share`` is the time in the
model over the time in all, for each engine: 1 where nothing ever waits but for the model. Ray is measured where it is
installed, from the first call to the last row, the start of its processes included; ``first_row_s`` is the first row's
time, which comes with the first batch of an actor. Writes ``results/offline.json``; ends with 1 where blobs differ.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

os.environ.setdefault("OMP_NUM_THREADS", "1")

from measure import RESULTS, add_common_options, default_texts, write_json

from kvwire.offline import (
    RaySettings,
    encode_on_ray,
    encode_serially,
    encode_side_by_side,
    find_documents,
    prepare_profile,
)
from kvwire.runtime.corpus import Corpus
from kvwire.store import FolderStore

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvwire.offline import DocumentRef, Row

    Measured: TypeAlias = tuple[dict[str, Any], list[str]]

PARTS = ("read_s", "tokenize_s", "look_up_s", "prefill_s", "encode_s", "upload_s")


def make_documents(folder: Path, texts: Sequence[Path], count: int, seed: int) -> list[DocumentRef]:
    """Pieces of texts of three lengths, in files."""
    rng, books = random.Random(seed), [path.read_text(encoding="utf-8") for path in texts]
    for number in range(count):
        book, size = books[number % len(books)], rng.choice([800, 2000, 4000])
        start = rng.randrange(max(1, len(book) - size))
        (folder / f"{number:05}.txt").write_text(book[start : start + size], encoding="utf-8")
    return find_documents([str(folder)])


def open_corpus(model: Path, store: Path) -> Corpus:
    """An engine with one thread, and a folder."""
    import torch

    from kvwire.engines.transformers import open_engine

    torch.set_num_threads(1)
    return Corpus(open_engine(model, dtype=torch.float32), FolderStore(store))


def measured(rows: Iterable[Row], engines: int) -> Measured:
    """Take all rows; figures and the blobs' digests."""
    started = time.perf_counter()
    first_s, done = 0.0, []
    for row in rows:
        first_s = first_s or time.perf_counter() - started
        done.append(row)
    wall = time.perf_counter() - started
    spent = {part: sum(getattr(row, part) for row in done) for part in PARTS}
    figures = {
        "engines": engines, "wall_s": wall, "first_row_s": first_s, "documents_per_s": len(done) / wall,
        "tokens_per_s": sum(row.tokens for row in done) / wall,
        "prefill_share": spent["prefill_s"] / (wall * engines), **spent,
    }  # fmt: skip
    return figures, [row.blob for row in done]


def ways(model: Path, folder: Path, refs: list[DocumentRef], actors: int) -> dict[str, Measured]:
    """Each way with its figures and digests."""
    corpus = open_corpus(model, folder / "serial")
    profile = prepare_profile(corpus, refs)
    next(encode_serially(Corpus(corpus.encoder().engine, FolderStore(folder / "warm")), refs[:1], None))
    found = {"serial": measured((work.row for work in encode_serially(corpus, refs, profile)), 1)}
    beside = Corpus(corpus.encoder().engine, FolderStore(folder / "side by side"))
    if profile is not None:
        beside.set_profile(profile)
    found["side by side"] = measured((work.row for work in encode_side_by_side(beside, refs, profile)), 1)
    if find_spec("ray") is not None:
        place = folder / f"ray, {actors} actors"
        if profile is not None:
            Corpus(corpus.encoder().engine, FolderStore(place)).set_profile(profile)
        settings = RaySettings(actors=actors, batch=max(1, min(32, len(refs) // (2 * actors))))
        rows = encode_on_ray(partial(open_corpus, model, place), refs, settings=settings)
        found[place.name] = measured(rows, actors)
    return found


def main() -> int:
    """Measure, compare, tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "offline")
    parser.add_argument("--documents", type=int, default=120)
    parser.add_argument("--actors", type=int, default=2)
    parser.set_defaults(out=RESULTS / "offline.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "texts").mkdir()
        refs = make_documents(folder / "texts", default_texts(), options.documents, options.seed)
        found = ways(options.model, folder, refs, options.actors)
    digests = [blobs for _, blobs in found.values()]
    alike = all(each == digests[0] for each in digests)
    for way, (figures, _) in found.items():
        said = f"{figures['documents_per_s']:.2f} documents/s, prefill {figures['prefill_share']:.0%} of the time"
        print(f"{way:<16} {figures['wall_s']:8.1f} s  {said}", flush=True)
    settings = {"model": options.model.name, "n": options.documents, "seed": options.seed, "threads": 1}
    results = {"blobs_alike": alike} | {way: figures for way, (figures, _) in found.items()}
    write_json(options.out, "offline", settings, results)
    return int(not alike)


if __name__ == "__main__":
    sys.exit(main())
