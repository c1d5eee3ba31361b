"""Where a finer level does most good: chunks that the question attends to, others of the same number, all of them.

    python benchmarks/where_to_refine.py

links documents of a book in a shuffled order at one level of the codec, raises a third of the chunks by one level, and
measures the KL divergence from the same documents linked exactly, over the 32 tokens behind the question. Chunks are
chosen by the question's attention over the coarsest level, at random, and as the prompt's last, the best choice that
looks at nothing. The figure is what is left of the divergence of the lower level: all chunks raised leave the least.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import RESULTS, SHARED, calibration, one_thread, summary, table, write_json
from reuse_parts.measuring import levels_of
from reuse_parts.prompts import DOCUMENTS, LENGTH, TOKENS, Prompt, copy, draw, expected
from tqdm import tqdm

import kvwire
from kvwire import link

if TYPE_CHECKING:
    from kvwire import KVCache, TransformersEngine

MODELS = ("ebook-llama-14m", "qwen3-8m")
CHUNKS = (32, 128)
WAYS = ("attention", "random", "last", "all")
SHARE = 3


def shuffled(prompt: Prompt, draws: random.Random) -> Prompt:
    """The same documents in another order: the one that the question follows stands anywhere."""
    order = list(range(DOCUMENTS))
    draws.shuffle(order)
    alone = [prompt.alone[at] for at in order]
    text = tuple(token for at in order for token in prompt.text[at * LENGTH : (at + 1) * LENGTH])
    return replace(prompt, text=text, alone=alone, linked=link(alone))


def mixed(low: KVCache, high: KVCache, raised: list[int], chunk: int) -> KVCache:
    """Some chunks of one cache, the rest of another."""
    mask = torch.zeros(TOKENS // chunk, dtype=torch.bool)
    mask[raised] = True
    where = mask.repeat_interleave(chunk)[None, :, None]
    out = copy(low)
    for ours, theirs in ((out.keys, high.keys), (out.values, high.values)):
        for mine, other in zip(ours, theirs, strict=True):
            mine.copy_(torch.where(where, other, mine))
    return out


def left(
    engine: TransformersEngine, levels: dict[str, KVCache], prompt: Prompt, draws: random.Random
) -> dict[Any, Any]:
    """Divergence after raising chunks over that before, by chunk length, level and way."""
    names = list(levels)
    exact = expected(engine, [prompt.linked], prompt.follows)[0]
    attention = engine.look(levels[names[0]], prompt.question).attention
    out = {}
    for chunk in CHUNKS:
        count = TOKENS // chunk
        seen = attention.view(count, chunk).sum(1).argsort(descending=True)[: count // SHARE].tolist()
        chosen = {
            "attention": seen, "random": draws.sample(range(count), count // SHARE),
            "last": list(range(count - count // SHARE, count)), "all": list(range(count)),
        }  # fmt: skip
        for lower, upper in itertools.pairwise(names):
            caches = [levels[lower], *(mixed(levels[lower], levels[upper], chosen[way], chunk) for way in WAYS)]
            log_q = expected(engine, caches, prompt.follows)
            before, *after = (exact.exp() * (exact - log_q)).sum(-1).mean(-1).tolist()
            out |= {(chunk, lower, way): (kl, before) for way, kl in zip(WAYS, after, strict=True)}
    return out


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one model."""
    engine = kvwire.open_engine(path, dtype=torch.float32)
    documents = calibration(engine, args.fit, args.calibration, 8 * LENGTH, args.seed)
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    draws, found = random.Random(args.seed), []
    for number in tqdm(range(args.prompts), desc=path.name, unit="prompt", disable=None, leave=False, file=sys.stderr):
        prompt = shuffled(draw(engine, args.text, number, args.seed), draws)
        levels = {name: cache for name, (cache, _) in dict(levels_of(profile, prompt, all_of_them=True)).items()}
        found.append(left(engine, levels, prompt, draws))
    figures: dict[str, dict[str, Any]] = {}
    for chunk, level, way in found[0]:
        pairs = [each[chunk, level, way] for each in found]
        pooled = statistics.fmean(after for after, _ in pairs) / statistics.fmean(before for _, before in pairs)
        name = f"chunks of {chunk}, above {level}"
        figures.setdefault(name, {})[way] = {"pooled": pooled, "by_prompt": summary([a / b for a, b in pairs])}
    return figures


def arguments() -> argparse.Namespace:
    """The command line."""
    books = sorted((SHARED / "text" / "books").glob("*.txt"))
    models = [SHARED / "models" / name for name in MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=models, help="folders of Hugging Face models")
    parser.add_argument("--fit", type=Path, nargs="+", default=books[::2], help="texts that the profile is fitted on")
    parser.add_argument("--text", type=Path, nargs="+", default=books[1::2], help="texts that prompts are cut from")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--calibration", type=int, default=16, help="windows that the profile is fitted on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "where_to_refine.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print and write down."""
    args = arguments()
    if not args.text or not args.fit:
        msg = "no texts to cut prompts from; name some with --text and --fit"
        raise SystemExit(msg)
    one_thread()
    models = {}
    for path in args.models:
        models[path.name] = found = measured(path, args)
        rows = [[name, *(f"{each[way]['pooled']:.2f}" for way in WAYS)] for name, each in found.items()]
        print(f"\n{path.name}: what is left where a third of the chunks, or all, are one level finer")
        print(table(["", *WAYS], rows), flush=True)
    settings = {
        "prompts": args.prompts, "documents": DOCUMENTS, "document_tokens": LENGTH, "raised": 1 / SHARE,
        "seed": args.seed, "calibration_windows": args.calibration,
    }  # fmt: skip
    write_json(args.out, "where_to_refine", settings, models)


if __name__ == "__main__":
    main()
