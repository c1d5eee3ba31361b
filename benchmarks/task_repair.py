"""Which selectors find the rows that tasks need: accuracy of the task model by what chooses, and by how many rows."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measure import RESULTS, one_thread, table, write_json
from task_model import held_out
from task_parts.evaluation import share
from task_parts.model import load

from kvwire.engines.transformers import TransformersEngine
from kvwire.reuse import RepairInput, link, repair_prompt, selector_of

if TYPE_CHECKING:
    from task_parts.families import Prompt

    from kvwire.types import KVCache

FAMILIES = ("repeat", "chain", "legend", "needle")
SELECTORS = ("attention", "blend", "cacheblend", "lmcache", "first", "random")
SHARES = (0.03, 0.06, 0.15, 0.3)


def answers_right(engine: TransformersEngine, prompt: Prompt, cache: KVCache) -> bool:
    """Whether the model answers a prompt's first question on top of a cache of its documents.

    Args:
        engine: Runs the task model.
        prompt: The prompt.
        cache: Of its documents, at positions from 0.

    Returns:
        Whether the answer is the expected one.
    """
    question = prompt.questions[0]
    logits = engine.forward(engine.past_key_values(cache), question.ids, cache.tokens, logits=1)
    return int(logits[-1].argmax()) == question.answer


def measure_family(engine: TransformersEngine, prompts: list[Prompt]) -> dict[str, Any]:
    """Answer prompts of one family from full prefill, linked blindly, and repaired in every way.

    Args:
        engine: Runs the task model.
        prompts: Of one family.

    Returns:
        Accuracies with intervals: ``full``, ``blind``, and by selector and share.
    """
    full, blind = [], []
    hits: dict[str, dict[str, list[bool]]] = {name: {str(share): [] for share in SHARES} for name in SELECTORS}
    for prompt in prompts:
        text = tuple(token for ids in prompt.documents for token in ids)
        caches = engine.prefill(prompt.documents)
        (whole,) = engine.prefill([text])
        full.append(answers_right(engine, prompt, whole))
        blind.append(answers_right(engine, prompt, link(caches)))
        lengths = tuple(len(ids) for ids in prompt.documents)
        for name in SELECTORS:
            for part in SHARES:
                linked = link(caches)
                given = RepairInput(engine, linked, text, lengths, tuple(prompt.questions[0].ids))
                repair_prompt(given, selector_of(name), part)
                hits[name][str(part)].append(answers_right(engine, prompt, linked))
    repaired = {name: {part: share(found) for part, found in row.items()} for name, row in hits.items()}
    return {"full": share(full), "blind": share(blind), "repaired": repaired}


def report(results: dict[str, dict[str, Any]]) -> str:
    """The results as a table.

    Args:
        results: Of ``measure_family``, by family.

    Returns:
        Lines of text.
    """
    rows = []
    for family, found in results.items():
        for name, row in found["repaired"].items():
            ends = [f"{found[end]['accuracy']:.2f}" for end in ("full", "blind")]
            rows.append([family, name, *ends, *(f"{row[str(part)]['accuracy']:.2f}" for part in SHARES)])
    return table(["family", "selector", "full", "K = 0", *(f"{part:.0%}" for part in SHARES)], rows)


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200, help="of each family")
    parser.add_argument("--out", type=Path, default=RESULTS / "task_repair.json")
    chosen = parser.parse_args()
    started = time.perf_counter()
    one_thread()
    engine = TransformersEngine(load(), model_id="task model")
    results = {}
    for family in FAMILIES:
        results[family] = measure_family(engine, held_out(family, chosen.prompts))
        print(f"{family}: {time.perf_counter() - started:.0f} s", flush=True)
    print(report(results))
    layers = len(engine.meta.layers)
    settings = {"prompts": chosen.prompts, "layers": layers, "check_layer": {"blend": 2, "cacheblend": 1}}
    write_json(chosen.out, "task_repair", settings, results)


if __name__ == "__main__":
    main()
