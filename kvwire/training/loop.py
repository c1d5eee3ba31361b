"""The training loop: seeded, resumable, the same bits from the same seed on the same machine."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from kvwire.errors import ArgumentError
from kvwire.training.losses import answer_loss, divergence_loss
from kvwire.training.state import restore_state, save_state
from kvwire.training.trainable import TrainableModel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkLayout
    from kvwire.training.recipes import Recipe
    from kvwire.training.samples import Sample
    from kvwire.training.sources import Mixture

Method = Literal["links", "wrappers", "anchors"]
"""``links`` and ``anchors``: loss on answers. ``wrappers``: divergence from the frozen model's own full prefill."""


@dataclass(frozen=True)
class Training:
    """What is trained, and how.

    Attributes:
        method: The loss, see ``Method``.
        layout: How documents are linked.
        recipe: How long and how fast.
        is_frozen: Whether soft tokens alone learn; wrappers are always trained so.
        seed: Of the data's order and of the first embeddings.
        keep_every: Steps between two states that are kept.
    """

    method: Method
    layout: LinkLayout
    recipe: Recipe
    is_frozen: bool = False
    seed: int = 0
    keep_every: int = 100

    def __post_init__(self) -> None:
        """Refuse what cannot be trained."""
        if self.method == "anchors" and self.layout.anchors is None:
            msg = f"the layout {self.layout.name} has no anchors to train; name one that has, such as anchors:100/25"
            raise ArgumentError(msg)
        if self.method == "wrappers" and not self.is_frozen:
            msg = "wrappers learn from the model's own full prefill, so it stays frozen"
            raise ArgumentError(msg)

    def about(self, engine: TransformersEngine) -> dict[str, Any]:
        """What two runs have to share so that one may go on from the other's state."""
        model = engine.meta.model_revision or engine.meta.model_id
        layout = hashlib.sha256(repr(self.layout).encode()).hexdigest()
        named = {"model": model, "method": self.method, "layout": layout, "frozen": self.is_frozen, "seed": self.seed}
        return {**named, "recipe": asdict(self.recipe)}


@dataclass(frozen=True)
class Trained:
    """What came of it.

    Attributes:
        model: With what was learnt.
        losses: Mean over the learnt tokens of each step, in nats.
        counts: How many samples each part of the data gave.
    """

    model: TrainableModel
    losses: list[float]
    counts: dict[str, int]


def train(
    engine: TransformersEngine, mixture: Mixture, what: Training, *, state: Path | None = None, resume: bool = False,
    tell: Callable[[int, float], None] | None = None,
) -> Trained:  # fmt: skip
    """Train. On a processor, the same seed, threads and versions give the same bits, interrupted or not.

    Args:
        engine: Runs the model, in float32 where its own weights learn; these are changed.
        mixture: The data, from its beginning.
        what: What is trained, and how.
        state: File that keeps how far it has got; None: nowhere.
        resume: Goes on from that file.
        tell: Called with the number of steps done and the last one's loss.

    Returns:
        The model and how it learnt.

    Raises:
        ArgumentError: Nothing would learn, the data does not fit, or the state is of another training.
        MismatchError: The model cannot be trained so.
        CorruptError: The state is damaged.
        StorageError: It cannot be read or written.
    """
    torch.manual_seed(what.seed)
    model = TrainableModel(engine, what.layout, is_frozen=what.is_frozen, seed=what.seed)
    parameters, recipe = model.parameters(), what.recipe
    optimiser = torch.optim.AdamW(
        list(parameters.values()), lr=recipe.learning_rate, betas=recipe.betas, weight_decay=recipe.weight_decay
    )
    about = {**what.about(engine), "data": mixture.digest}
    losses: list[float] = []
    if resume and state is not None:
        losses, mixture.counts = restore_state(state, about, parameters, optimiser)
    while len(losses) < recipe.steps:
        for group in optimiser.param_groups:
            group["lr"] = recipe.rate(len(losses))
        losses.append(_step(model, [mixture.draw() for _ in range(recipe.batch)], what))
        torch.nn.utils.clip_grad_norm_(parameters.values(), recipe.clip)
        optimiser.step()
        optimiser.zero_grad()
        if state is not None and (len(losses) % what.keep_every == 0 or len(losses) == recipe.steps):
            save_state(state, about, parameters, optimiser, losses, mixture.counts)
        if tell is not None:
            tell(len(losses), losses[-1])
    return Trained(model, losses, dict(mixture.counts))


def _step(model: TrainableModel, samples: list[Sample], what: Training) -> float:
    """Add up the gradients of one update; returns its mean loss."""
    size = what.recipe.micro_batch
    learnt = sum(sum(sample.is_learnt) for sample in samples)
    loss_of = divergence_loss if what.method == "wrappers" else answer_loss
    total = 0.0
    for start in range(0, len(samples), size):
        loss = loss_of(model, samples[start : start + size], what.layout) / learnt
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total
