"""Training losses: cross entropy of answers, or divergence from full attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import cross_entropy

from kvwire.training.sequences import IGNORED, batch_of, linked, plain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse import LinkLayout
    from kvwire.training.samples import Sample
    from kvwire.training.trainable import TrainableModel


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
