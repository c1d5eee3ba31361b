"""Wrappers on models of prose: trained on books, judged on another book by the divergence from full prefill."""

from __future__ import annotations

import statistics
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from measure import SHARED

from kvwire.engines.transformers.opening import open_engine
from kvwire.reuse import PLAIN, LinkLayout, read_layout
from kvwire.training import Mixture, Recipe, Text, TextCut, TrainableModel, Training, divergence_loss, train

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.training import Sample

MODELS = ("ebook-llama-14m", "qwen3-8m")
LAYOUTS = ("wrappers:4+4", "wrappers:8+8")
RECIPE = Recipe(steps=60, batch=2, learning_rate=1e-2, warm_up=0, micro_batch=2)
CUT = TextCut((4, 4), 48, 48, given=16)
_BOOKS, _FIRST, _CHARACTERS = 4, 20_000, 300_000
"""Every fourth book, and which of its characters are read: behind title pages and tables of contents."""
NORMAL_95 = 1.959964


def books() -> list[Path]:
    """The books to train on."""
    return sorted((SHARED / "text" / "books").glob("*.txt"))[::_BOOKS]


def _read(engine: TransformersEngine, paths: Sequence[Path], place: str) -> Text:
    texts = (path.read_text(encoding="utf-8")[_FIRST : _FIRST + _CHARACTERS] for path in paths)
    return Text(tuple(token for text in texts for token in engine.tokenize(text)), CUT, place)


def measure(name: str, folder: Path, prompts: int, seed: int, steps: int | None) -> dict[str, Any]:
    """Train wrappers for one model and judge them on a book that they never saw.

    Args:
        name: One of ``MODELS``.
        folder: Keeps states.
        prompts: How many are judged.
        seed: Of the training.
        steps: In place of the recipe's.

    Returns:
        Divergences with intervals for ``K = 0`` and every layout, paired differences, and losses.
    """
    engine = open_engine(SHARED / "models" / name, dtype=torch.float32)
    held = SHARED / "text" / "heldout" / "charles-dickens_great-expectations.txt"
    judged = list(_drawn(_read(engine, [held], held.name), prompts))
    with closing(TrainableModel(engine, PLAIN, is_frozen=False)) as model:
        blind = divergences(model, judged, PLAIN)
    results: dict[str, Any] = {"K = 0": spread(blind)}
    recipe = RECIPE if steps is None else Recipe(**{**RECIPE.__dict__, "steps": steps})
    text = _read(engine, books(), "books")
    for layout in map(read_layout, LAYOUTS):
        state = folder / f"{name}-{layout.name.replace(':', '-')}.pt"
        what = Training("wrappers", layout, recipe, is_frozen=True, seed=seed, keep_every=20)
        trained = train(
            engine, Mixture({"books": text}, {"books": 1.0}, seed), what, state=state, resume=state.is_file()
        )
        with closing(trained.model) as model:
            wrapped = divergences(model, judged, layout)
        paired = spread([ours - theirs for ours, theirs in zip(wrapped, blind, strict=True)])
        results[layout.name] = {**spread(wrapped), "minus K = 0": paired, "loss": trained.losses}
        print(f"{name} {layout.name}: {statistics.fmean(wrapped):.5f}, K = 0 {statistics.fmean(blind):.5f}", flush=True)
    return results


def _drawn(text: Text, count: int) -> Iterator[Sample]:
    for turn in range(count):
        yield text.draw(turn, "judged")


@torch.no_grad()
def divergences(model: TrainableModel, samples: Sequence[Sample], layout: LinkLayout) -> list[float]:
    """Divergence of each prompt.

    Args:
        model: The model.
        samples: The prompts.
        layout: How their documents are linked.

    Returns:
        Means over the tokens of each, in nats.
    """
    return [float(divergence_loss(model, [sample], layout)) / sum(sample.is_learnt) for sample in samples]


def spread(values: Sequence[float]) -> dict[str, float]:
    """A mean with its 95 % interval.

    Args:
        values: At least two.

    Returns:
        n, mean, median, and both ends.
    """
    mean, half = statistics.fmean(values), NORMAL_95 * statistics.stdev(values) / len(values) ** 0.5
    return {
        "n": len(values), "mean": mean, "median": statistics.median(values),
        "least": mean - half, "greatest": mean + half,
    }  # fmt: skip
