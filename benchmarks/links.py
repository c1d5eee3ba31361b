"""What training gives linked documents: link tokens K = 0, 1, 5 trained alike, anchors, wrappers, and repair."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from links_parts import prose
from links_parts.data import DOCUMENTS, MEASURED, WEIGHTS, held_out
from links_parts.measuring import accuracies, prose_loss, repairs, repairs_beside_links
from links_parts.runs import LINKS, RUNS, WRAPPERS, learn, untrained
from measure import RESULTS, SHARED, one_thread, table, write_json
from task_parts.families import chance

if TYPE_CHECKING:
    from collections.abc import Callable

_PROSE = 200
"""Stretches of prose that the general loss is measured on."""
_BESIDE = ("K = 0", "K = 1", "K = 5")
"""Trainings whose models are repaired beside their link tokens."""


def kept(folder: Path, name: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Measure once; a benchmark that was interrupted goes on.

    Args:
        folder: Keeps what was measured.
        name: Of the measurement.
        measure: Measures.

    Returns:
        What was measured, now or before.
    """
    path = folder / f"{name.replace(' ', '')}.json"
    if not path.is_file():
        started = time.process_time()
        found = measure()
        path.write_text(json.dumps({**found, "processor_s": time.process_time() - started}), encoding="utf-8")
        print(f"{name}: {time.process_time() - started:.0f} s of processor", flush=True)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def judged(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train and judge one model.

    Args:
        name: One of ``RUNS``, or another name for the model without training.
        chosen: The command line.

    Returns:
        Accuracies, the loss on prose, and losses of the training.
    """
    run = RUNS.get(name)
    learnt = learn(name, chosen.work, chosen.samples, chosen.seed, chosen.steps) if run else untrained()
    whole = bool(run and run.is_control) or name == "untrained, full"
    found = {
        "accuracy": accuracies(learnt, chosen.prompts, chosen.seed, whole=whole),
        "prose_loss": prose_loss(learnt, _PROSE, chosen.seed),
        "loss": [round(loss, 5) for loss in learnt.losses],
    }
    learnt.model.close()
    return found


def report(task: dict[str, dict[str, Any]]) -> str:
    """The results as a table.

    Args:
        task: Of ``judged``, by name.

    Returns:
        Lines of text.
    """
    rows = []
    for name, found in task.items():
        cells = [
            f"{each['accuracy']:.3f} ({each['least']:.3f}-{each['greatest']:.3f})"
            for each in (found["accuracy"][family] for family in MEASURED)
        ]
        rows.append([name, *cells, f"{found['prose_loss']:.4f}"])
    return table(["", *MEASURED, "prose loss"], rows)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, help="keeps data, states and what is done; the same one goes on")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS), help="which trainings")
    parser.add_argument("--steps", type=int, help="of every training, in place of each one's own")
    parser.add_argument("--samples", type=int, default=20_000, help="training prompts")
    parser.add_argument("--prompts", type=int, default=1000, help="held-out prompts of each family")
    parser.add_argument("--repair-prompts", type=int, default=1000, help="held-out prompts that are repaired")
    parser.add_argument("--prose-prompts", type=int, default=200, help="held-out prompts of prose; 0: none")
    parser.add_argument("--prose-steps", type=int, help="of every training on prose")
    parser.add_argument("--prose-models", nargs="*", default=list(prose.MODELS), help="models of prose")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "links.json")
    return parser.parse_args()


def measured(chosen: argparse.Namespace) -> dict[str, Any]:
    """Everything.

    Args:
        chosen: The command line.

    Returns:
        Chance, ``task``, ``repair``, ``repair_beside_links`` and ``prose``.
    """
    work = chosen.work
    work.mkdir(parents=True, exist_ok=True)
    names = ["untrained, full", "untrained, K = 0", *chosen.runs]
    task = {name: kept(work, f"judged {name}", lambda name=name: judged(name, chosen)) for name in names}
    results: dict[str, Any] = {
        "chance": {family: statistics.fmean(map(chance, held_out(family, 200, chosen.seed))) for family in MEASURED},
        "task": task,
    }
    if "full" in chosen.runs:
        model = learn("full", work, chosen.samples, chosen.seed, chosen.steps)
        found = kept(work, "repair", lambda: repairs(model, "redefined", chosen.repair_prompts, chosen.seed))
        found.pop("processor_s")
        results["repair"] = found
        control = task["full"]["prose_loss"]
        results["prose_loss_over_control"] = {name: each["prose_loss"] / control for name, each in task.items()}
    beside = {}
    for name in _BESIDE:
        if name in chosen.runs:
            model = learn(name, work, chosen.samples, chosen.seed, chosen.steps)
            count = chosen.repair_prompts
            measure = partial(repairs_beside_links, model, "redefined", count, chosen.seed)
            beside[name] = kept(work, f"repair beside {name}", measure)
            beside[name].pop("processor_s")
    if beside:
        results["repair_beside_links"] = beside
    if chosen.prose_prompts and (SHARED / "models").is_dir():
        results["prose"] = {
            name: kept(
                work,
                name,
                lambda name=name: prose.measure(name, work, chosen.prose_prompts, chosen.seed, chosen.prose_steps),
            )
            for name in chosen.prose_models
        }
        for found in results["prose"].values():
            found.pop("processor_s")
    return results


def main() -> None:
    """Train, measure, print, save, draw."""
    chosen = options()
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        chosen.work = chosen.work or Path(folder)
        results = measured(chosen)
    print(report(results["task"]))
    settings = {
        "seed": chosen.seed, "prompts": chosen.prompts, "documents": DOCUMENTS, "weights": WEIGHTS,
        "samples": chosen.samples, "steps": chosen.steps, "links": asdict(LINKS), "wrappers": asdict(WRAPPERS),
        "prose": {"prompts": chosen.prose_prompts, "recipe": asdict(prose.RECIPE), "cut": asdict(prose.CUT)},
    }  # fmt: skip
    write_json(chosen.out, "links", settings, results)
    try:
        from links_parts.picture import draw
    except ImportError:
        print("no picture without matplotlib")
    else:
        draw(results, chosen.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
