"""The trainings that are compared: the same data, steps, seeds and settings; only the layout differs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from task_parts.model import load

from kvwire.engines.transformers import TransformersEngine
from kvwire.reuse import PLAIN, LinkLayout, SoftTokens, anchors, soft_links, wrappers
from kvwire.training import Mixture, Recipe, TextCut, TrainableModel, Training, read_source, train
from links_parts.data import write_files

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.training.loop import Method

DOCUMENTS = 5
LINKS = Recipe(steps=800, batch=24, learning_rate=3e-3, warm_up=50, betas=(0.9, 0.98), micro_batch=24)
WRAPPERS = Recipe(steps=150, batch=16, learning_rate=1e-2, warm_up=20, micro_batch=16)
_CUT = TextCut((1, 1), 1, 2)
"""Of plain text, of which there is none: every file holds samples."""


@dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
        layout: How documents are linked.
        method: See ``Training``; wrappers learn alone, from the divergence.
        is_control: Whether documents are read in full prefill, to tell what training itself changes.
    """

    layout: LinkLayout
    method: Method = "links"
    is_control: bool = False


RUNS = {
    "K = 5": Run(soft_links(5, DOCUMENTS)),
    "K = 1": Run(soft_links(1, DOCUMENTS)),
    "K = 0": Run(PLAIN),
    "full": Run(PLAIN, is_control=True),
    "wrappers 4+4": Run(wrappers(4, 4), "wrappers"),
    "wrappers 8+8": Run(wrappers(8, 8), "wrappers"),
    "anchors 25 %": Run(anchors(4, 1), "anchors"),
    "anchors 50 %": Run(anchors(4, 2), "anchors"),
}


@dataclass(frozen=True)
class Learnt:
    """A model after its training.

    Attributes:
        engine: Runs it.
        model: With its soft tokens.
        layout: That it reads linked documents in.
        losses: Of every step.
    """

    engine: TransformersEngine
    model: TrainableModel
    layout: LinkLayout
    losses: list[float]

    def finish(self) -> None:
        """Have the engine run the model, with what was learnt, as loads do."""
        self.model.close()
        if self.layout.soft_tokens:
            name, revision = self.engine.meta.model_id, self.engine.meta.model_revision
            self.engine.use_soft_tokens(SoftTokens(self.model.soft, self.layout.name, name, revision))


def untrained() -> Learnt:
    """The task model as it is, and plain linking."""
    engine = TransformersEngine(load(), model_id="task model")
    return Learnt(engine, TrainableModel(engine, PLAIN, is_frozen=False), PLAIN, [])


def learn(name: str, folder: Path, samples: int, seed: int, steps: int | None = None) -> Learnt:
    """Train, or go on, or take what is done.

    Args:
        name: One of ``RUNS``.
        folder: Keeps data and states.
        samples: Of the heaviest family.
        seed: Of all.
        steps: Fewer or more than the recipe's.

    Returns:
        The model.
    """
    run, is_frozen = RUNS[name], RUNS[name].method == "wrappers"
    recipe = WRAPPERS if is_frozen else LINKS
    if steps is not None:
        recipe = replace(recipe, steps=steps)
    data = folder / ("whole" if run.is_control else "linked")
    weights = write_files(data, samples, seed, linked=not run.is_control)
    parts = {
        path.stem: read_source(path, _no_text, _CUT) for path in weights if not (is_frozen and path.stem == "prose")
    }
    mixture = Mixture(parts, {path.stem: weight for path, weight in weights.items()}, seed)
    engine = TransformersEngine(load(), model_id="task model")
    what = Training(run.method, run.layout, recipe, is_frozen, seed)
    state = folder / f"{name.replace(' ', '')}.pt"

    def tell(step: int, loss: float) -> None:
        if step % 100 == 0:
            print(json.dumps({"run": name, "step": step, "loss": round(loss, 4)}), flush=True)

    trained = train(engine, mixture, what, state=state, resume=state.is_file(), tell=tell)
    engine.model.eval()
    return Learnt(engine, trained.model, run.layout, trained.losses)


def _no_text(text: str) -> list[int]:
    raise ValueError(f"the task model has no words, got {len(text)} characters")
