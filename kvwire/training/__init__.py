"""Training of link tokens, wrappers and anchors, so that models read linked documents well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.training.loop import Trained, Training, train
    from kvwire.training.losses import answer_loss, divergence_loss
    from kvwire.training.output import report_of, write_report, write_trained
    from kvwire.training.recipes import RECIPES, Recipe
    from kvwire.training.samples import Sample, Turn
    from kvwire.training.sequences import Batch, batch_of, linked, plain
    from kvwire.training.sources import Mixture, Samples, Text, TextCut, read_source
    from kvwire.training.trainable import TrainableModel

__all__ = [
    "RECIPES",
    "Batch",
    "Mixture",
    "Recipe",
    "Sample",
    "Samples",
    "Text",
    "TextCut",
    "TrainableModel",
    "Trained",
    "Training",
    "Turn",
    "answer_loss",
    "batch_of",
    "divergence_loss",
    "linked",
    "plain",
    "read_source",
    "report_of",
    "train",
    "write_report",
    "write_trained",
]

__getattr__ = lazy(__name__)
