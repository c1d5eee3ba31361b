"""The training loop: seeded, resumable, bit-identical for a seed on the same machine."""

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
    """Settings of a training.

    Attributes:
        method: The loss, see ``Method``.
        layout: How documents are linked.
        recipe: Length and learning rates.
        is_frozen: Whether only soft tokens learn; always so for wrappers.
        seed: Seed of the data's order and of the first embeddings.
        keep_every: Steps between saved states.
    """

    method: Method
    layout: LinkLayout
    recipe: Recipe
    is_frozen: bool = False
    seed: int = 0
    keep_every: int = 100

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        if self.method == "anchors" and self.layout.anchors is None:
            msg = f"the layout {self.layout.name} has no anchors to train; name one that has, such as anchors:100/25"
            raise ArgumentError(msg)
        if self.method == "wrappers" and not self.is_frozen:
            raise ArgumentError("wrappers learn from the model's own full prefill, so it stays frozen")

    def about(self, engine: TransformersEngine) -> dict[str, Any]:
        """Identity of the training; a saved state resumes only under the same one."""
        model = engine.meta.model_revision or engine.meta.model_id
        layout = hashlib.sha256(repr(self.layout).encode()).hexdigest()
        named = {"model": model, "method": self.method, "layout": layout, "frozen": self.is_frozen, "seed": self.seed}
        return {**named, "recipe": asdict(self.recipe)}


@dataclass(frozen=True)
class Trained:
    """Result of a training.

    Attributes:
        model: The trained model.
        losses: Mean over the learnt tokens of each step, in nats.
        counts: Samples drawn from each part of the data.
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
        engine: Runs the model, in float32 if its weights learn; they are changed.
        mixture: The data, at its start.
        what: The settings.
        state: File for saved states; None: none.
        resume: Resume from that file.
        tell: Called after each step with its number and loss.

    Returns:
        The model and its losses.

    Raises:
        ArgumentError: Nothing would learn, the data does not fit, or the state is of another training.
        MismatchError: The model cannot be trained this way.
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
    """Accumulate the gradients of one update; returns its mean loss."""
    size = what.recipe.micro_batch
    learnt = sum(sum(sample.is_learnt) for sample in samples)
    loss_of = divergence_loss if what.method == "wrappers" else answer_loss
    total = 0.0
    for start in range(0, len(samples), size):
        loss = loss_of(model, samples[start : start + size], what.layout) / learnt
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach())
    return total
