"""What computing rows of linked prompts anew gives back of a full prefill, by selector and share, and what it costs.

    python benchmarks/reuse.py

links documents that follow each other in a book, computes shares of their rows anew, chosen by every selector, and
measures the KL divergence from a prefill of the whole prompt over the 32 tokens behind the question (the 16 tokens that
follow the documents). 100 % closed is a full prefill, 0 % blind links. The profile is fitted on every second book, and
so was the default selector chosen; prompts come from the others. Every ``--every``-th prompt is measured at all shares
and on top of every level of the codec, the rest where the promises are. Seconds are those of the clock here, of small
models on a processor; predicted ones are the cost model's for published shapes. Draws two pictures beside the JSON.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, SHARED, calibration, one_thread, table, write_json
from reuse_parts.figures import Sample, acceptance, equal_costs, on_levels, summed
from reuse_parts.measuring import NONE, costs, measure
from reuse_parts.picture import draw_closed, draw_ttft
from reuse_parts.predicting import BANDWIDTHS, MACHINES, predicted
from reuse_parts.prompts import DOCUMENTS, JUDGED, LENGTH, QUESTION, TOKENS, draw
from tqdm import tqdm

import kvwire
from kvwire.runtime.prefill import Neighbours

MODELS = ("ebook-llama-14m", "qwen3-8m")


def measured(path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All prompts of one model."""
    engine = kvwire.open_engine(path, dtype=torch.float32)
    documents = calibration(engine, args.fit, args.calibration, 8 * LENGTH, args.seed)
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    began = time.perf_counter()
    around, found = Neighbours(engine, documents), []
    for number in tqdm(range(args.prompts), desc=path.name, unit="prompt", disable=None, leave=False, file=sys.stderr):
        if args.minutes and time.perf_counter() - began > 60 * args.minutes:
            break
        prompt = draw(engine, args.text, number, args.seed)
        found.append(measure(engine, profile, prompt, around, thorough=number % args.every == 0))
    layers = len(engine.meta.layers)
    sample = Sample(found, costs(layers), args.seed)
    ways, levels = summed(sample), on_levels(found)
    gap = statistics.fmean(each.kl[NONE] for each in found)
    return {
        "prompts": len(found), "layers": layers, "prefill_token_layers": layers * TOKENS, "gap_kl": gap, "ways": ways,
        "equal_token_layers": equal_costs(sample), "acceptance": acceptance(sample), "on_levels": levels,
        "predicted": predicted(ways, levels["levels"], gap),
        "seconds": {part: statistics.median(each.whole[part] for each in found) for part in found[0].whole},
    }  # fmt: skip


def told(name: str, found: dict[str, Any]) -> None:
    """Print a model's tables."""
    head = ["", "rows", "token-layers", "closed", "95 %", "by prompt", "minus default", "select s", "repair s"]
    rows = []
    for way, shares in found["ways"].items():
        for share, each in shares.items():
            low, high = each["closed"]["interval"]
            other, taken = each.get("minus_default"), each["seconds"]
            rows.append([
                f"{way}, {100 * float(share):g} %", f"{each['rows']}", f"{each['token_layers']:.0f}",
                f"{each['closed']['pooled']:.1f}", f"{low:.0f} to {high:.0f}",
                f"{each['by_prompt']['mean']:.0f} +- {each['by_prompt']['sd']:.0f}",
                f"{other['pooled']:+.1f} ({other['interval'][0]:+.1f} to {other['interval'][1]:+.1f})" if other else "",
                f"{taken['select']:.3f}" if taken else "", f"{taken['repair']:.3f}" if taken else "",
            ])  # fmt: skip
    print(f"\n{name}, {found['prompts']} prompts: blind links lose KL {found['gap_kl']:.2e}; % of that closed")
    print(table(head, rows))
    levels = found["on_levels"]["levels"]
    rows = [
        [level, f"{each['bits']:.2f}", *(f"{kl:.2e}" for kl in each["kl"].values())] for level, each in levels.items()
    ]
    shares = [f"repair {100 * float(share):g} %" for share in next(iter(levels.values()))["kl"]]
    print(f"\nKL on top of levels\n{table(['level', 'bits', *shares], rows)}\n")
    for promise, each in found["acceptance"].items():
        said = ", ".join(f"{key} {value}" for key, value in each.items() if key not in {"met", "behind"})
        print(f"{'met' if each['met'] else 'MISSED'}: {promise} {said}")
    for each in found["acceptance"]["above every rival at equal token-layers"]["behind"]:
        print(f"  behind {each['rival']} at {each['share']:g}: {each['default']:.1f} against {each['closed']:.1f}")


def arguments() -> argparse.Namespace:
    """The command line."""
    books = sorted((SHARED / "text" / "books").glob("*.txt"))
    models = [SHARED / "models" / name for name in MODELS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=models, help="folders of Hugging Face models")
    parser.add_argument("--fit", type=Path, nargs="+", default=books[::2], help="texts that the profile is fitted on")
    parser.add_argument("--text", type=Path, nargs="+", default=books[1::2], help="texts that prompts are cut from")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="take no more prompts then, for each model; 0: no end"
    )
    parser.add_argument("--every", type=int, default=8, help="one prompt in so many is measured thoroughly")
    parser.add_argument("--calibration", type=int, default=16, help="windows that the profile is fitted on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "reuse.json")
    return parser.parse_args()


def main() -> None:
    """Measure, print, draw and write down."""
    args, began = arguments(), time.perf_counter()
    if not args.text or not args.fit:
        raise SystemExit("no texts to cut prompts from; name some with --text and --fit")
    one_thread()
    models = {}
    for path in args.models:
        models[path.name] = found = measured(path, args)
        told(path.name, found)
        sys.stdout.flush()
    settings = {
        "prompts": args.prompts, "documents": DOCUMENTS, "document_tokens": LENGTH, "question_tokens": QUESTION,
        "judged_tokens": JUDGED, "seed": args.seed, "every": args.every, "calibration_windows": args.calibration,
        "machines": MACHINES, "bandwidths_bit_s": BANDWIDTHS, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    write_json(args.out, "reuse", settings, models)
    draw_closed(models, args.out.with_suffix(".png"))
    draw_ttft(models, args.out.with_name(f"{args.out.stem}_ttft.png"))


if __name__ == "__main__":
    main()
