"""What ``encode --drop-tokens`` costs: text read on after a shortened context, against the whole one.

Beside it: as many tokens dropped at random, as many dropped from the beginning, and no context but its first token.
KL divergence and change of perplexity over the tokens that follow.
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import TYPE_CHECKING

import torch
from measure import add_common_options, default_texts, summary, table, windows, write_json
from quality import Exact, compare, predictions

import kvwire
from kvwire.reuse import drop_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire import TransformersEngine

CONTEXT, FOLLOWING = 512, 128


def ways(engine: TransformersEngine, ids: Sequence[int], share: float, draw: random.Random) -> dict[str, list[int]]:
    """The contexts that are compared; all but the last one are of equal length."""
    chosen = list(drop_tokens(engine, ids, share))
    count = len(chosen) - 1
    places = sorted(draw.sample(range(1, len(ids)), count))
    return {
        "--drop-tokens": chosen,
        "at random": [ids[0], *(ids[place] for place in places)],
        "the oldest": [ids[0], *ids[-count:]],
        "all": [ids[0]],
    }


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "drop_tokens")
    parser.add_argument("--windows", type=int, default=2, help="from each text")
    parser.add_argument("--share", type=float, default=0.3, help="of the tokens that is dropped")
    args = parser.parse_args()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    draw = random.Random(args.seed)
    kls: dict[str, list[float]] = {}
    losses: dict[str, list[float]] = {}
    for path in default_texts():
        for ids in windows(engine, path, args.windows, CONTEXT + FOLLOWING + 1, args.seed):
            context, fed, targets = ids[:CONTEXT], ids[CONTEXT:-1], torch.tensor(ids[CONTEXT + 1 :])[:, None]
            (cache,) = engine.prefill([context])
            exact = Exact(predictions(engine, cache, fed, CONTEXT), fed, targets, CONTEXT)
            for name, shortened in ways(engine, context, args.share, draw).items():
                (cache,) = engine.prefill([shortened])
                found = Exact(exact.log_p, fed, targets, len(shortened))
                point = compare(engine, found, cache, name, 0.0)
                kls.setdefault(name, []).append(point.kl)
                losses.setdefault(name, []).append(point.perplexity_change)
    rows = [
        [name, f"{statistics.fmean(kls[name]):.3f}", f"{100 * statistics.fmean(losses[name]):+.0f} %"] for name in kls
    ]
    print(table([f"dropped, {100 * args.share:g} %", "KL", "perplexity"], rows))
    settings = {"model": args.model.resolve().name, "seed": args.seed, "share": args.share, "context_tokens": CONTEXT,
                "following_tokens": FOLLOWING, "windows_per_text": args.windows}  # fmt: skip
    results = {name: {"kl": summary(kls[name]) | {"mean": statistics.fmean(kls[name])},
                      "perplexity_change": summary(losses[name])} for name in kls}  # fmt: skip
    write_json(args.out, "drop_tokens", settings, results)


if __name__ == "__main__":
    main()
