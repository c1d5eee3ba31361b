"""What choosing rows better could still give back of a full prefill: the shipped selector beside one that knows all.

    python benchmarks/selection_limit.py

Prompts, questions and divergences are those of ``reuse.py``. ``knows all`` is told what nobody can know before a
prefill: by how much each row's keys and values are off, and how the tokens that are judged depend on them (gradients of
the log-probability of next tokens that the model draws). It takes the rows whose deviation moves these tokens most, to
first order. ``knows sizes`` knows of the deviation its size alone, ``question's gradients`` what the question's own
tokens depend on, and of deviations their mean size on other prompts. Rows are computed anew as in every repair.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from link_shift import SHARES, figures
from measure import RESULTS, SHARED, one_thread, table, windows, write_json
from reuse_parts.prompts import DOCUMENTS, JUDGED, LENGTH, TOKENS, Judge, Prompt, copy, draw
from tqdm import tqdm
from transformers import DynamicCache

import kvwire
from kvwire import KVCache, TransformersEngine, link
from kvwire.reuse import RepairInput, rows_for, selector_of
from kvwire.reuse.repair.selectors.base import highest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

MODELS = ("ebook-llama-14m", "qwen3-8m")
BLIND, SHIPPED, KNOWS, SIZES, QUESTION = "no shift", "attention", "knows all", "knows sizes", "question's gradients"
DRAWN = 4
"""Next tokens that are drawn at each place."""
OTHERS = 6
"""Prompts that the mean size of deviations is taken from."""
_LENGTHS = (LENGTH,) * DOCUMENTS


def planes(cache: KVCache) -> list[Tensor]:
    """Keys and values of all layers ``[kv_heads, tokens, dim]``."""
    return [*cache.keys, *cache.values]


def gradients(
    engine: TransformersEngine, cache: KVCache, follows: Sequence[int], last: int, seed: int
) -> list[list[Tensor]]:
    """What log-probabilities of tokens that the model draws behind the last places depend on, by draw and plane."""
    leaves = [tensor.clone()[None].requires_grad_() for tensor in planes(cache)]
    layers = len(leaves) // 2
    past = DynamicCache(ddp_cache_data=list(zip(leaves[:layers], leaves[layers:], strict=True)))
    at = torch.arange(cache.tokens, cache.tokens + len(follows))[None]
    out = engine.model(
        input_ids=torch.tensor([list(follows)]), position_ids=at, past_key_values=past, use_cache=True,
        logits_to_keep=last,
    )  # fmt: skip
    log_p = torch.log_softmax(out.logits[0].double(), -1)
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(DRAWN):
        tokens = torch.multinomial(log_p.detach().exp(), 1, generator=drawn)
        slopes = torch.autograd.grad(log_p.gather(1, tokens).sum(), leaves, retain_graph=True)
        found.append([slope[0] for slope in slopes])
    return found


def by_row(slopes: list[list[Tensor]], off: list[Tensor], *, directed: bool) -> Tensor:
    """How far a deviation of each row moves what was drawn ``[tokens]``: along it, or of that size in any direction."""
    total = torch.zeros(TOKENS)
    for draw_ in slopes:
        if directed:
            total += sum((slope * each).sum((0, 2)) for slope, each in zip(draw_, off, strict=True)) ** 2  # type: ignore[operator]
        else:
            total += sum((slope * each).square().sum((0, 2)) for slope, each in zip(draw_, off, strict=True))  # type: ignore[arg-type]
    return total.sqrt()


def mean_sizes(engine: TransformersEngine, books: list[Path], seed: int) -> list[Tensor]:
    """Root mean square of the deviations of other prompts' rows, by plane and head ``[kv_heads, 1, 1]``."""
    sums: list[Tensor] = []
    for number in range(OTHERS):
        (ids,) = windows(engine, books[number % len(books)], 1, TOKENS, seed + 1000 + number)
        blind = link(engine.prefill([ids[start : start + LENGTH] for start in range(0, TOKENS, LENGTH)]))
        (whole,) = engine.prefill([ids])
        found = [
            (new - old)[:, LENGTH:].square().mean((1, 2), keepdim=True)
            for new, old in zip(planes(whole), planes(blind), strict=True)
        ]
        sums = found if not sums else [one + other for one, other in zip(sums, found, strict=True)]
    return [(each / OTHERS).sqrt() for each in sums]


def scores(engine: TransformersEngine, prompt: Prompt, sizes: list[Tensor], seed: int) -> dict[str, Tensor]:
    """What each way thinks of each row of a prompt."""
    (whole,) = engine.prefill([list(prompt.text)])
    off = [new - old for new, old in zip(planes(whole), planes(prompt.linked), strict=True)]
    judged = gradients(engine, prompt.linked, prompt.follows, JUDGED, seed)
    asked = gradients(engine, prompt.linked, prompt.question, len(prompt.question), seed)
    given = RepairInput(engine, copy(prompt.linked), prompt.text, _LENGTHS, prompt.question)
    chooses: Any = selector_of(SHIPPED)
    return {
        SHIPPED: chooses.scores(given),
        KNOWS: by_row(judged, off, directed=True),
        SIZES: by_row(judged, off, directed=False),
        QUESTION: by_row(asked, sizes, directed=False),
    }


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one model."""
    engine = kvwire.open_engine(path, dtype=torch.float32)
    for weight in engine.model.parameters():
        weight.requires_grad_(False)
    sizes, kl = mean_sizes(engine, args.fit, args.seed), list[dict[tuple[str, float], float]]()
    for number in tqdm(range(args.prompts), desc=path.name, unit="prompt", disable=None, leave=False):
        prompt = draw(engine, args.text, number, args.seed)
        judge = Judge(engine, prompt)
        judge.add(BLIND, 0.0, prompt.linked)
        for way, found in scores(engine, prompt, sizes, args.seed).items():
            for share in SHARES[1:]:
                cache = copy(prompt.linked)
                engine.update_rows(cache, prompt.text, highest(found, rows_for(share, _LENGTHS), _LENGTHS))
                judge.add(way, share, cache)
        judge.finish()
        kl.append(judge.kl)
    return {
        "prompts": len(kl),
        "gap_kl": float(np.mean([each[BLIND, 0.0] for each in kl])),
        "ways": {
            way: {f"{share:g}": closed(kl, way, share, args.seed) for share in SHARES[1:]}
            for way in (SHIPPED, KNOWS, SIZES, QUESTION)
        },
    }


def closed(kl: list[dict[tuple[str, float], float]], way: str, share: float, seed: int) -> dict[str, Any]:
    """What a way closes, and how much more than the shipped selector at the same share."""
    as_plain = [each | {(BLIND, share): each[SHIPPED, share]} for each in kl]
    found = figures(as_plain, (way, share), seed)
    found["minus_shipped"] = found.pop("minus_plain")
    return found


def main() -> None:
    """Measure, print, save."""
    books = sorted((SHARED / "text" / "books").glob("*.txt"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=[SHARED / "models" / name for name in MODELS])
    parser.add_argument("--fit", type=Path, nargs="+", default=books[::2], help="texts of the mean size of deviations")
    parser.add_argument("--text", type=Path, nargs="+", default=books[1::2], help="texts to judge on")
    parser.add_argument("--prompts", type=int, default=80)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "selection_limit.json")
    args = parser.parse_args()
    one_thread()
    results = {path.name: measured(path, args) for path in args.models}
    for name, found in results.items():
        rows = [
            [way, *(f"{each['closed']['pooled']:.1f} ({each['minus_shipped']['pooled']:+.1f})" for each in by.values())]
            for way, by in found["ways"].items()
        ]
        print(f"\n{name}, {found['prompts']} prompts: % of the gap that is closed (more than the shipped selector)")
        print(table(["way", *(f"{100 * share:g} %" for share in SHARES[1:])], rows))
    settings = {"seed": args.seed, "documents": DOCUMENTS, "tokens": LENGTH, "drawn": DRAWN, "others": OTHERS}
    write_json(args.out, "selection_limit", settings, results)


if __name__ == "__main__":
    main()
