"""What documents that were computed behind a neutral prefix lose less when they are linked.

    python benchmarks/neutral_prefix.py

Prompts, questions and divergences are those of ``reuse.py``. Every document is computed behind some tokens, which are
dropped, and linked: behind kvwire's neutral texts (``kvwire encode --neutral-prefix``), behind its own last tokens,
behind one stretch of another book, the same for all documents, and, for comparison, behind the tokens that stand before
it in the prompt, which are not known at encode time. 100 % closed is a full prefill, 0 % documents alone; with repair,
both are repaired alike.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, SHARED, one_thread, table, windows, write_json
from reuse_parts.prompts import LENGTH, TOKENS, Judge, copy, draw
from tqdm import tqdm

import kvwire
from kvwire import KVCache, TransformersEngine
from kvwire.reuse import RepairInput, repair_prompt, selector_of
from kvwire.runtime.prefill import ALL, compute_behind, link_opened, neutral_prefix

MODELS = ("ebook-llama-14m", "qwen3-8m")
COUNTS = (128, 256, 512, ALL)
SHARES = (0.05, 0.15)
ALONE = "alone"


def prefixes(
    engine: TransformersEngine, documents: list[list[int]], other: list[int]
) -> dict[str, list[tuple[int, ...]]]:
    """What stands before each document, by name."""
    own = {
        f"neutral texts, {'all' if count == ALL else count}": [neutral_prefix(engine, ids, count) for ids in documents]
        for count in COUNTS
    }
    own["own last 32"] = [tuple(ids[-32:]) for ids in documents]
    before: list[tuple[int, ...]] = [(), *(tuple(ids[-32:]) for ids in documents[:-1])]
    return {ALONE: [()] * len(documents), **own, "another book's 512": [tuple(other)] * len(documents),
            "the prompt's 32": before}  # fmt: skip


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one model: divergences by way, with and without repair."""
    engine = kvwire.open_engine(path, dtype=torch.float32)
    type(engine).opening_tokens = property(lambda _: ())  # prompts of ``reuse.py`` have no BOS
    kl: dict[str, list[float]] = {}
    for number in tqdm(range(args.prompts), desc=path.name, unit="prompt", disable=None, leave=False, file=sys.stderr):
        prompt = draw(engine, args.text, number, args.seed)
        (other,) = windows(engine, args.fit[number % len(args.fit)], 1, 512, args.seed)
        documents = [list(prompt.text[start : start + LENGTH]) for start in range(0, TOKENS, LENGTH)]
        judge = Judge(engine, prompt)
        for way, behind in prefixes(engine, documents, other).items():
            pairs = zip(behind, documents, strict=True)
            linked = link_opened(engine, [compute_behind(engine, prefix, ids) for prefix, ids in pairs])
            judge.add(way, 0.0, linked)
            for share in SHARES:
                judge.add(way, share, repaired(engine, linked, prompt.text, prompt.question, share))
        judge.finish()
        for (way, share), each in judge.kl.items():
            kl.setdefault(f"{way}, {100 * share:g} % repaired" if share else way, []).append(each)
    return {"prompts": args.prompts, "gap_kl": statistics.fmean(kl[ALONE]), "ways": summed(kl)}


def repaired(
    engine: TransformersEngine, linked: KVCache, text: tuple[int, ...], question: tuple[int, ...], share: float
) -> KVCache:
    """A copy, with a share of its rows computed anew."""
    cache = copy(linked)
    lengths = (LENGTH,) * (TOKENS // LENGTH)
    repair_prompt(RepairInput(engine, cache, text, lengths, question), selector_of("attention"), share)
    return cache


def summed(kl: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Of the gap of blind links, closed by each way: pooled, and by prompt with its standard error."""
    out = {}
    for way, each in kl.items():
        closed = [100 * (1 - ours / blind) for ours, blind in zip(each, kl[ALONE], strict=True)]
        error = statistics.stdev(closed) / math.sqrt(len(closed)) if len(closed) > 1 else math.nan
        pooled = 100 * (1 - sum(each) / sum(kl[ALONE]))
        out[way] = {
            "kl": statistics.fmean(each),
            "closed": pooled,
            "by_prompt": statistics.fmean(closed),
            "error": error,
        }
    return out


def main() -> None:
    """Measure, print and write down."""
    books = sorted((SHARED / "text" / "books").glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [SHARED / "models" / name for name in MODELS]
    parser.add_argument("--models", type=Path, nargs="+", default=models, help="folders of Hugging Face models")
    parser.add_argument("--fit", type=Path, nargs="+", default=books[::2], help="texts that prefixes are cut from")
    parser.add_argument("--text", type=Path, nargs="+", default=books[1::2], help="texts that prompts are cut from")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "neutral_prefix.json")
    args, began = parser.parse_args(), time.perf_counter()
    one_thread()
    found = {path.name: measured(path, args) for path in args.models}
    for name, each in found.items():
        print(f"\n{name}, {each['prompts']} prompts: blind links lose KL {each['gap_kl']:.2e}; % of that closed")
        ways = each["ways"].items()
        rows = [[way, f"{row['closed']:.1f}", f"{row['by_prompt']:.1f} +- {row['error']:.1f}"] for way, row in ways]
        print(table(["behind", "pooled", "by prompt"], rows))
    settings = {"prompts": args.prompts, "document_tokens": LENGTH, "seed": args.seed, "shares": SHARES,
                "seconds": time.perf_counter() - began}  # fmt: skip
    write_json(args.out, "neutral_prefix", settings, found)


if __name__ == "__main__":
    main()
