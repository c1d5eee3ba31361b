"""A tiny model whose tasks need attention across documents: made on two cores, and what blind linking costs it."""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import RESULTS, one_thread, table, write_json
from task_parts.evaluation import View, blind, correct, full, repaired, share
from task_parts.families import FAMILIES, Prompt, Size, chance, make
from task_parts.model import FOLDER, SEED, is_kept, load, save
from task_parts.training import STEPS, train

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import LlamaForCausalLM

HELD_OUT = "held out"
"""Seeds held-out prompts; training never draws from it."""


def held_out(family: str, count: int, size: Size | None = None, seed: int = SEED) -> list[Prompt]:
    """Prompts that training did not see.

    Args:
        family: One of ``FAMILIES``.
        count: How many.
        size: How large.
        seed: Of the draw.

    Returns:
        The prompts.
    """
    draw = random.Random(f"{HELD_OUT} {family} {seed}")
    return [make(family, draw, size) for _ in range(count)]


class Progress:
    """Prints how well each family is answered while the model learns."""

    def __init__(self, prompts: int = 60) -> None:
        """Draw what is asked.

        Args:
            prompts: Of each family.
        """
        self._prompts = {family: held_out(family, prompts, seed=SEED + 1) for family in FAMILIES}
        self._started = time.monotonic()

    def __call__(self, step: int, model: LlamaForCausalLM) -> None:
        """Ask.

        Args:
            step: Number of steps done.
            model: As it is now.
        """
        model.set_attn_implementation("sdpa")
        cells = []
        for family, prompts in self._prompts.items():
            seen, unseen = (sum(correct(model, prompts, look)) / len(prompts) for look in (full, blind))
            cells.append(f"{family} {seen:.2f} {unseen:.2f}")
        model.set_attn_implementation("eager")
        print(f"{step:5d}  {time.monotonic() - self._started:5.0f} s  (full, K = 0)  {'  '.join(cells)}", flush=True)


def look_at_random(prompt: Prompt) -> View:
    """Repair as many rows as the question needs, but others: drawn at random.

    Args:
        prompt: The prompt.

    Returns:
        The pass.
    """
    tokens = sum(map(len, prompt.documents))
    return repaired(prompt, random.Random(repr(prompt.documents)).sample(range(tokens), len(prompt.questions[0].rows)))


VIEWS: dict[str, Callable[[Prompt], View]] = {
    "full prefill": full,
    "K = 0": blind,
    "the question's rows": lambda prompt: repaired(prompt, prompt.questions[0].rows),
    "all dependent rows": lambda prompt: repaired(prompt, prompt.labels),
    "as many at random": look_at_random,
}
"""What is measured, by what is repaired."""


def measure_family(model: LlamaForCausalLM, family: str, count: int, size: Size) -> dict[str, Any]:
    """Answer held-out prompts of one family in every way.

    Args:
        model: The model.
        family: One of ``FAMILIES``.
        count: How many prompts.
        size: How large.

    Returns:
        Chance, the shares of rows, and an accuracy with its interval for each of ``VIEWS``.
    """
    prompts = held_out(family, count, size)
    tokens = sum(size.tokens)
    return {
        "chance": statistics.fmean(map(chance, prompts)),
        "question_rows_share": statistics.fmean(len(prompt.questions[0].rows) / tokens for prompt in prompts),
        "dependent_rows_share": statistics.fmean(len(prompt.labels) / tokens for prompt in prompts),
        "accuracy": {name: share(correct(model, prompts, look)) for name, look in VIEWS.items()},
    }


def report(results: dict[str, dict[str, Any]]) -> str:
    """The results as a table.

    Args:
        results: Of ``measure_family``, by family.

    Returns:
        Lines of text.
    """
    rows = []
    for family, found in results.items():
        cells = [
            f"{each['accuracy']:.3f} ({each['least']:.3f}-{each['greatest']:.3f})"
            for each in found["accuracy"].values()
        ]
        needs = f"{found['question_rows_share']:.1%}, {found['dependent_rows_share']:.1%}"
        rows.append([family, f"{found['chance']:.3f}", needs, *cells])
    return table(["family", "chance", "rows", *VIEWS], rows)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", action="store_true", help="make the weights anew, also where they are kept")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the weights are kept")
    parser.add_argument("--prompts", type=int, default=1000, help="held-out prompts of each family")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(Size().tokens), help="length of each document")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=RESULTS / "task_model.json")
    return parser.parse_args()


def main() -> None:
    """Train where needed, measure, print, save."""
    args = options()
    one_thread()
    if args.train or not is_kept(args.folder):
        save(train(args.seed, watch=Progress()), args.folder)
    model = load(args.folder)
    size = Size(tuple(args.tokens))
    results = {family: measure_family(model, family, args.prompts, size) for family in FAMILIES}
    print(report(results))
    settings = {
        "seed": args.seed,
        "training_steps": STEPS,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "size": asdict(size),
        "prompts": args.prompts,
    }
    write_json(args.out, "task_model", settings, results)


if __name__ == "__main__":
    main()
