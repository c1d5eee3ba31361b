"""Training of link tokens, wrappers and anchors, so that models read linked documents well."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.training.loop import RECIPES, Recipe, Trained, Training, answer_loss, divergence_loss, train
    from kvwire.training.output import report_of, write_report, write_trained
    from kvwire.training.samples import Batch, Sample, Turn, batch_of, linked, plain
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
