"""What the learnt mean shift of linked documents gives back of a full prefill, alone and under repair.

    python benchmarks/link_shift.py

Prompts, questions and divergences are those of ``reuse.py``. The shift is learnt on prompts of every second book, from
growing numbers of them, and judged on prompts of the others, with shares of the rows computed anew as the default
selector chooses them on the shifted cache, and on the cache before the shift. 100 % closed is a full prefill, 0 % blind
links. Differences are of the same prompts, with 95 % intervals of a bootstrap over prompts. With ``--documents``, the
prompt has fewer and longer documents than the shift was learnt on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, SHARED, one_thread, table, windows, write_json
from reuse_parts.prompts import DOCUMENTS, JUDGED, LENGTH, QUESTION, TOKENS, Judge, copy, draw
from tqdm import tqdm

import kvwire
from kvwire import KVCache, TransformersEngine, link
from kvwire.reuse import LinkShift, RepairInput, ShiftLearner, repair_prompt, rows_for, selector_of

MODELS = ("ebook-llama-14m", "qwen3-8m")
SELECTOR = "attention"
SHARES = (0.0, 0.05, 0.15)
PLAIN, BEFORE = "no shift", "chosen before"
DRAWS = 4000
"""Of the bootstrap over prompts."""
Point = tuple[str, float]


def learnt(engine: TransformersEngine, args: argparse.Namespace, name: str) -> tuple[dict[int, LinkShift], float]:
    """Shifts by the number of prompts that they were learnt from, and seconds for each prompt."""
    learner, out, began = ShiftLearner(engine.meta), {}, time.perf_counter()
    for number in tqdm(range(max(args.learn)), desc=f"{name}, learning", unit="prompt", disable=None, leave=False):
        path = args.fit[number % len(args.fit)]
        (ids,) = windows(engine, path, 1, TOKENS, args.seed + 1000 + number)
        learner.add(engine.prefill(cut(ids, LENGTH)), engine.prefill([ids])[0])
        if number + 1 in args.learn:
            out[number + 1] = learner.finish()
    return out, (time.perf_counter() - began) / max(args.learn)


def cut(ids: list[int], length: int) -> list[list[int]]:
    """Documents of a text."""
    return [list(ids[start : start + length]) for start in range(0, len(ids), length)]


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one model: divergences by way and share."""
    engine = kvwire.open_engine(path, dtype=torch.float32)
    shifts, learn_s = learnt(engine, args, path.name)
    length, kl, applying = TOKENS // args.documents, list[dict[Point, float]](), []
    for number in tqdm(range(args.prompts), desc=path.name, unit="prompt", disable=None, leave=False, file=sys.stderr):
        prompt = draw(engine, args.text, number, args.seed)
        blind = link(engine.prefill(cut(list(prompt.text), length)))
        caches = {PLAIN: blind}
        for count, shift in shifts.items():
            caches[f"{count} prompts"] = shifted = copy(blind)
            began = time.perf_counter()
            shift.apply(shifted, (length,) * args.documents)
            applying.append(time.perf_counter() - began)
        judge = Judge(engine, prompt)
        for share in SHARES:
            for way, cache in caches.items():
                judge.add(way, share, repaired(engine, cache, prompt.text, prompt.question, length, share))
            if share:
                judge.add(BEFORE, share, repaired(engine, shifted, prompt.text, prompt.question, length, share, blind))
        judge.finish()
        kl.append(judge.kl)
    most = f"{max(args.learn)} prompts"
    largest = shifts[max(args.learn)]
    return {
        "prompts": len(kl), "gap_kl": statistics.fmean(each[PLAIN, 0.0] for each in kl),
        "bytes": len(largest.data), "tokens": largest.tokens, "learn_s_a_prompt": learn_s,
        "apply_s": statistics.median(applying),
        "ways": {
            way: {f"{share:g}": figures(kl, (way, share), args.seed) for share in SHARES if (way, share) in kl[0]}
            for way in (PLAIN, *(f"{count} prompts" for count in shifts), BEFORE)
        },
        "shift": most,
    }  # fmt: skip


def repaired(
    engine: TransformersEngine, linked: KVCache, text: tuple[int, ...], question: tuple[int, ...], length: int,
    share: float, seen: KVCache | None = None,
) -> KVCache:  # fmt: skip
    """A copy with a share of its rows computed anew, as the selector chooses them on it or on another cache."""
    cache = copy(linked)
    if not share:
        return cache
    lengths = (length,) * (TOKENS // length)
    given, selector = RepairInput(engine, cache, text, lengths, question), selector_of(SELECTOR)
    if seen is None:
        repair_prompt(given, selector, share)
        return cache
    looking = RepairInput(engine, copy(seen), text, lengths, question)
    engine.update_rows(cache, text, selector.choose(looking, rows_for(share, lengths)).rows)
    return cache


def figures(kl: list[dict[Point, float]], point: Point, seed: int) -> dict[str, Any]:
    """What a way closes, pooled, and how much more than without a shift at the same share."""
    gap, ours, plain = (
        np.array([each[name] for each in kl]) for name in ((PLAIN, 0.0), point, (PLAIN, point[1]))
    )  # fmt: skip
    drawn = np.random.default_rng(seed).integers(0, len(gap), (DRAWS, len(gap)))

    def pooled(won: Any) -> dict[str, Any]:  # noqa: ANN401
        spread = 100 * won[drawn].sum(1) / gap[drawn].sum(1)
        return {"pooled": float(100 * won.sum() / gap.sum()), "interval": np.quantile(spread, (0.025, 0.975)).tolist()}

    out = {"kl": float(ours.mean()), "closed": pooled(gap - ours)}
    return out if point[0] == PLAIN else out | {"minus_plain": pooled(plain - ours)}


def told(name: str, found: dict[str, Any]) -> None:
    """Print a model's table."""
    rows = []
    for way, shares in found["ways"].items():
        for share, each in shares.items():
            low, high = each["closed"]["interval"]
            more = each.get("minus_plain")
            rows.append([
                f"{way}, {100 * float(share):g} %", f"{each['closed']['pooled']:.1f}", f"{low:.1f} to {high:.1f}",
                f"{more['pooled']:+.1f} ({more['interval'][0]:+.1f} to {more['interval'][1]:+.1f})" if more else "",
            ])  # fmt: skip
    print(f"\n{name}, {found['prompts']} prompts: blind links lose KL {found['gap_kl']:.2e}; % of that closed")
    print(table(["learnt from, rows repaired", "closed", "95 %", "minus no shift"], rows))
    print(f"{found['bytes']} bytes, {1e3 * found['apply_s']:.2f} ms to add, {found['learn_s_a_prompt']:.2f} s a prompt")


def main() -> None:
    """Measure, print and write down."""
    books = sorted((SHARED / "text" / "books").glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [SHARED / "models" / name for name in MODELS]
    parser.add_argument("--models", type=Path, nargs="+", default=models, help="folders of Hugging Face models")
    parser.add_argument("--fit", type=Path, nargs="+", default=books[::2], help="texts that the shift is learnt on")
    parser.add_argument("--text", type=Path, nargs="+", default=books[1::2], help="texts that prompts are cut from")
    parser.add_argument("--learn", type=int, nargs="+", default=[8, 16, 48], help="prompts that it is learnt from")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="of a prompt that is judged")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "link_shift.json")
    args, began = parser.parse_args(), time.perf_counter()
    one_thread()
    found = {}
    for path in args.models:
        found[path.name] = measured(path, args)
        told(path.name, found[path.name])
        sys.stdout.flush()
    settings = {
        "prompts": args.prompts, "documents": args.documents, "document_tokens": TOKENS // args.documents,
        "learnt_document_tokens": LENGTH, "question_tokens": QUESTION, "judged_tokens": JUDGED, "selector": SELECTOR,
        "seed": args.seed, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    write_json(args.out, "link_shift", settings, found)


if __name__ == "__main__":
    main()
