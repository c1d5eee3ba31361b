"""A real language model: bits at equal divergence against KVTC-like and CacheGen, predicted KL, and what a fit costs.

Everything is fitted on the same texts, novels and an encyclopaedia mixed, none of which is measured. kvwire is used as
``Corpus.calibrate`` does, ladder and prediction of the divergence included. The KVTC-like codec leaves the first four
tokens raw, which takes the attention sinks out of its way, and has its bits allocated by dynamic programming.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from cachegen import encode_size_and_reconstruct
from measure import SHARED, add_common_options, table, windows_in, write_json
from quality import (
    CONTINUATION,
    NOVEL,
    QUESTIONS,
    Exact,
    bits_at,
    compare,
    curve,
    predictions,
    question_windows,
    summarise,
)
from rivals import kvtc
from rivals.codecs import KVTC, RELEASED, Coding
from tqdm import tqdm

import kvwire
from kvwire.runtime.coding import Coding as Settings
from kvwire.runtime.coding import Document
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.prefill import link_opened, prefill_documents
from kvwire.runtime.quality import mean_kl
from kvwire.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvwire import KVCache, Profile, TransformersEngine

CONTEXT = 1024
KLS = (0.05, 0.02, 0.005, 0.001)
BUDGETS = (0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)
LINKED_READ = 128
OWN, ENCYCLOPAEDIA = "kvwire", "encyclopaedia"


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "real_model")
    parser.add_argument("--windows", type=int, default=4, help="of each kind of text")
    parser.add_argument("--linked", type=int, default=4, help="windows of each kind that are linked of four documents")
    parser.add_argument("--calibration", type=int, default=12, help=f"texts of {CONTEXT} tokens to fit on")
    parser.add_argument(
        "--name", default="", help="what the model is called in the results; its folder's name otherwise"
    )
    return parser.parse_args()


def texts_of(
    engine: TransformersEngine, args: argparse.Namespace
) -> tuple[list[list[int]], dict[str, list[list[int]]]]:
    """Texts to fit on, and windows to measure on by kind."""
    heldout = SHARED / "text" / "heldout"
    novel, wiki = heldout / "charles-dickens_great-expectations.txt", heldout / "wikitext2-test.txt"
    whole = wiki.read_text(encoding="utf-8")
    books = random.Random(args.seed).sample(sorted((SHARED / "text" / "books").glob("*.txt")), args.calibration)
    shares = args.calibration * 2 // 3
    chosen = [windows_in(engine, book.read_text(encoding="utf-8"), book.name, 1, CONTEXT, args.seed)[0]
              for book in books[:shares]]  # fmt: skip
    chosen += windows_in(engine, whole[: len(whole) // 2], wiki.name, args.calibration - shares, CONTEXT, args.seed)
    # What comes next measures the errors: two texts of each kind.
    held = CONTEXT - CONTEXT // 4
    chosen += [windows_in(engine, book.read_text(encoding="utf-8"), book.name, 1, held, args.seed)[0]
               for book in books[shares : shares + 2]]  # fmt: skip
    chosen += windows_in(engine, whole[: len(whole) // 2], f"{wiki.name} held out", 2, held, args.seed)
    size = CONTEXT + CONTINUATION + 1
    kinds = {
        NOVEL: windows_in(engine, novel.read_text(encoding="utf-8"), novel.name, args.windows, size, args.seed),
        ENCYCLOPAEDIA: windows_in(engine, whole[len(whole) // 2 :], wiki.name, args.windows, size, args.seed),
        QUESTIONS: question_windows(
            engine, SHARED / "text" / "qa" / "musique_s.json", args.windows, CONTEXT, args.seed
        ),
    }
    return chosen, kinds


def fitted_profile(engine: TransformersEngine, texts: list[list[int]], count: int) -> tuple[Profile, dict[str, float]]:
    """The profile as a corpus fits it, and processor seconds of its parts."""
    began = time.process_time()
    engine.prefill([ids[:CONTEXT] for ids in texts[:count]])
    prefill = time.process_time() - began
    began = time.process_time()
    engine.statistics(texts[:count])
    gathered = time.process_time() - began
    corpus = Corpus(engine, MemoryStore(), coding=Settings(calibration="full"))
    began = time.process_time()
    profile = corpus.calibrate([Document(str(n), tuple(ids)) for n, ids in enumerate(texts)], tokens=count * CONTEXT)
    whole = time.process_time() - began
    assert profile is not None
    return profile, {
        "prefill_s": prefill,
        "statistics_s": gathered,
        "calibrate_s": whole,
        "over_prefill": whole / prefill,
    }


def linked(engine: TransformersEngine, ids: list[int], profile: Profile) -> dict[str, float]:
    """KL divergence of four documents linked at each level, against the same linked exactly."""
    documents = [ids[start : start + CONTEXT // 4] for start in range(0, CONTEXT, CONTEXT // 4)]
    caches = prefill_documents(engine, documents)
    blobs = [kvwire.encode(cache, profile) for cache in caches]

    def read(parts: list[KVCache]) -> torch.Tensor:
        whole = link_opened(engine, parts)
        return engine.forward(engine.past_key_values(whole), ids[CONTEXT : CONTEXT + LINKED_READ], whole.tokens)

    exact = read(caches)
    return {
        level.name: mean_kl(exact, read([kvwire.decode(blob, index, profile, dtype=torch.float32) for blob in blobs]))
        for index, level in enumerate(kvwire.inspect(blobs[0]).levels)
    }


def speeds(engine: TransformersEngine, ids: list[int], profile: Profile) -> dict[str, float]:
    """Processor seconds of encoding, and of decoding each level to bfloat16, over the prefill's; medians of 3."""

    def seconds(act: Callable[[], object]) -> float:
        taken = []
        for _ in range(3):
            began = time.process_time()
            act()
            taken.append(time.process_time() - began)
        return statistics.median(taken)

    (cache,) = engine.prefill([ids[:CONTEXT]])
    blob = kvwire.encode(cache, profile)  # solves what is solved once
    prefill = seconds(lambda: engine.prefill([ids[:CONTEXT]]))
    found = {"prefill_s": prefill, "encode": seconds(lambda: kvwire.encode(cache, profile)) / prefill}
    for index, level in enumerate(kvwire.inspect(blob).levels):
        found[f"decode {level.name}"] = (
            seconds(lambda index=index: kvwire.decode(blob, index, profile, dtype=torch.bfloat16)) / prefill
        )
    return found


def codings(cache: KVCache, profile: Profile, sides: dict[float, Any]) -> Iterator[Coding]:
    """All codecs on one cache."""
    blob = kvwire.encode(cache, profile)
    for index, level in enumerate(kvwire.inspect(blob).levels):
        decoded = kvwire.decode(blob, index, profile, dtype=torch.float32)
        yield Coding(f"{OWN} {level.name}", OWN, level.cumulative_bytes, decoded)
    for budget, each in sides.items():
        stream, decoded = kvtc.roundtrip(cache, each)
        yield Coding(f"{KVTC} {budget:g}", KVTC, len(stream), decoded)
    size, decoded = encode_size_and_reconstruct(cache, 256, None)
    yield Coding(RELEASED, RELEASED, size, decoded)


def measure_window(
    engine: TransformersEngine, ids: list[int], profile: Profile, sides: dict[float, Any]
) -> Iterator[dict[str, Any]]:
    """Every codec on one window, and what kvwire's blobs predict."""
    (cache,) = engine.prefill([ids[:CONTEXT]])
    fed = ids[CONTEXT:-1]
    exact = Exact(predictions(engine, cache, fed, CONTEXT), fed, torch.tensor(ids[CONTEXT + 1 :])[:, None], CONTEXT)
    told = {level.name: level.predicted_kl for level in kvwire.inspect(kvwire.encode(cache, profile)).levels}
    elements = CONTEXT * cache.meta.elements_per_token
    for coding in codings(cache, profile, sides):
        point = compare(engine, exact, coding.cache, coding.codec, 8 * coding.size / elements)
        predicted = told.get(coding.codec.removeprefix(f"{OWN} ")) if coding.family == OWN else None
        yield {**point.__dict__, "family": coding.family, "predicted": predicted}


def main() -> None:
    """Fit, measure, print, save."""
    args = options()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    texts, kinds = texts_of(engine, args)
    profile, seconds = fitted_profile(engine, texts, args.calibration)
    print(f"fit: {seconds}; profile {len(profile.data) / 1e6:.1f} MB", flush=True)
    sides = kvtc.fit(kvtc.calibrate(engine.prefill([ids[:CONTEXT] for ids in texts[: args.calibration]])), BUDGETS)
    found: dict[str, Any] = {}
    points: list[dict[str, Any]] = []
    for kind, windows in kinds.items():
        mine: list[dict[str, Any]] = []
        for ids in tqdm(windows, desc=kind, unit="window", disable=None, file=sys.stderr):
            mine += measure_window(engine, ids, profile, sides)
        points += mine
        found[kind] = report(kind, mine)
    found["all"] = report("all", points)
    rows = [linked(engine, ids, profile) for windows in kinds.values() for ids in windows[: args.linked]]
    together = {name: statistics.fmean(row[name] for row in rows) for name in (rows[0] if rows else ())}
    print("four documents linked, against the same linked exactly:", {k: f"{kl:.2e}" for k, kl in together.items()})
    speed = speeds(engine, kinds[NOVEL][0], profile)
    print("over prefill:", {name: round(each, 3) for name, each in speed.items()}, flush=True)
    settings = {"model": args.name or args.model.resolve().name, "seed": args.seed, "windows": args.windows,
                "context_tokens": CONTEXT, "calibration_tokens": args.calibration * CONTEXT}  # fmt: skip
    results = {"fit": seconds, "profile_bytes": len(profile.data), "kinds": found, "linked_windows": len(rows),
               "linked_kl": together, "over_prefill": speed}  # fmt: skip
    write_json(args.out, "real_model", settings, results)


def report(kind: str, points: list[dict[str, Any]]) -> dict[str, Any]:
    """One kind of text: printed, and returned for the file."""
    figures = summarise(points)
    mine, theirs = curve(figures, OWN), curve(figures, KVTC)
    rows = [
        [name, f"{row['bits_per_element']['mean']:.3f}", f"{row['kl']['mean']:.2e}"] for name, row in figures.items()
    ]
    print(f"\n{kind}\n{table(['codec', 'bits/element', 'mean KL'], rows)}", flush=True)
    at = {f"{kl:g}": (bits_at(mine, kl), bits_at(theirs, kl)) for kl in KLS}
    for kl, (own, other) in at.items():
        print(f"KL {kl}: kvwire {own}, KVTC-like {other}, ratio {own / other if own and other else None}")
    released = figures[RELEASED]
    own = bits_at(mine, released["kl"]["mean"])
    print(f"of CacheGen as released at its KL: {own / released['bits_per_element']['mean'] if own else None}")
    apart = [p["predicted"] / p["kl"] for p in points if p["predicted"] and p["kl"] > 0]
    predicted: dict[str, list[float]] = {}
    for point in points:
        if point["predicted"]:
            predicted.setdefault(point["codec"], []).append(point["predicted"])
    ratios = {name: statistics.fmean(each) / figures[name]["kl"]["mean"] for name, each in predicted.items()}
    print("predicted over measured KL:", {name: round(ratio, 2) for name, ratio in ratios.items()}, flush=True)
    return {"codecs": figures, "bits_at": at, "released_ratio": own and own / released["bits_per_element"]["mean"],
            "predicted_over_measured": sorted(apart), "predicted_over_measured_by_level": ratios}  # fmt: skip


if __name__ == "__main__":
    main()
