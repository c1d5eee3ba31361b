"""The training loop: seeded, resumable, bit-identical for a seed on a machine; losses and hyperparameters."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.nn.functional import cross_entropy

from kvwire.errors import ArgumentError
from kvwire.training.samples import IGNORED, batch_of, linked, plain
from kvwire.training.state import restore_state, save_state
from kvwire.training.trainable import TrainableModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch import Tensor

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkLayout
    from kvwire.training.samples import Sample
    from kvwire.training.sources import Mixture


@dataclass(frozen=True)
class Recipe:
    """Hyperparameters of AdamW and of batches.

    Attributes:
        steps: Updates.
        batch: Samples per update.
        learning_rate: The peak.
        warm_up: Updates of linear rise; half a cosine then falls to 0.
        betas: AdamW's.
        weight_decay: AdamW's.
        clip: Maximum norm of a gradient.
        most_tokens: Longest prompt including the layout's tokens; the model's window is a limit, too.
        micro_batch: Samples in memory at a time; affects results only by rounding.
    """

    steps: int = 1000
    batch: int = 32
    learning_rate: float = 1e-3
    warm_up: int = 50
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    clip: float = 1.0
    most_tokens: int = 4096
    micro_batch: int = 8

    def __post_init__(self) -> None:
        """Refuse settings that cannot work."""
        counts = (self.steps, self.batch, self.micro_batch, self.most_tokens)
        rates = (self.learning_rate, self.clip)
        if min(counts) < 1 or self.warm_up < 0 or not all(0 < rate < math.inf for rate in rates):
            msg = "steps, batch, micro-batch and tokens are at least 1, warm-up at least 0, rate and clip above 0"
            raise ArgumentError(msg)

    def rate(self, step: int) -> float:
        """Learning rate of an update.

        Args:
            step: Counted from 0.

        Returns:
            The rate.
        """
        if step < self.warm_up:
            return self.learning_rate * (step + 1) / self.warm_up
        left = max(1, self.steps - self.warm_up)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - self.warm_up) / left))


RECIPES = {
    "small": Recipe(),
    "kvlink": Recipe(steps=6000, batch=64, learning_rate=5e-6, warm_up=600, micro_batch=1),
    "kv-packet": Recipe(steps=1000, batch=32, learning_rate=5e-4, warm_up=0, micro_batch=1),
}
"""By name. ``small``: models of a few million parameters, in minutes on a processor. ``kvlink``: all parameters of
Llama-3 1B to 8B (arXiv 2502.16002). ``kv-packet``: soft tokens of a frozen model, from 5e-4 to 0 (arXiv 2604.13226;
steps and batch are ours)."""


def answer_loss(model: TrainableModel, samples: Sequence[Sample], layout: LinkLayout) -> Tensor:
    """Cross entropy of answers after linked documents.

    Args:
        model: The trained model.
        samples: Prompts with answers.
        layout: How documents are linked.

    Returns:
        Scalar: the sum over tokens of answers, in nats.
    """
    batch = batch_of([linked(sample, layout) for sample in samples]).to(model.device)
    wanted = batch.targets != IGNORED
    return cross_entropy(model.logits(batch, wanted).float(), batch.targets[wanted], reduction="sum")


def divergence_loss(model: TrainableModel, samples: Sequence[Sample], layout: LinkLayout) -> Tensor:
    """KL divergence of a model on linked documents from the same model in full prefill.

    Args:
        model: The model. Its untrained weights give the reference, so they must be frozen.
        samples: Prompts with continuations.
        layout: How documents are linked.

    Returns:
        Scalar: the sum over tokens of answers, in nats.
    """
    reference = batch_of([plain(sample) for sample in samples]).to(model.device)
    with torch.no_grad():
        exact = model.logits(reference, reference.targets != IGNORED).float().log_softmax(-1)
    batch = batch_of([linked(sample, layout) for sample in samples]).to(model.device)
    linked_logs = model.logits(batch, batch.targets != IGNORED).float().log_softmax(-1)
    return (exact.exp() * (exact - linked_logs)).sum()


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
