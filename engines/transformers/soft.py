"""Soft tokens in a model's embedding layer: trained embeddings for ids outside the vocabulary."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import torch

from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


class SoftEmbedding:
    """Hooks on a model's embedding layer that replace the rows of soft tokens.

    A soft token k is -1 - k, as layouts name it, or the vocabulary's size + k, as blobs and texts do.
    """

    def __init__(self, model: PreTrainedModel, rows: Tensor) -> None:
        """Register the hooks."""
        layer, text = model.get_input_embeddings(), model.config.get_text_config(decoder=True)
        if layer is None or getattr(text, "hidden_size_per_layer_input", None):
            raise MismatchError("the layers of this model read token ids themselves, which soft tokens lack; use none")
        self._rows, self._vocabulary, self._asked = rows, int(text.vocab_size), threading.local()
        self._hooks = (layer.register_forward_pre_hook(self._before), layer.register_forward_hook(self._after))

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _before(self, _module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = inputs[0]
        self._asked.ids = ids
        return (torch.where((ids < 0) | (ids >= self._vocabulary), 0, ids), *inputs[1:])

    def _after(self, _module: torch.nn.Module, _inputs: object, output: Tensor) -> Tensor:
        ids = self._asked.ids
        index = torch.where(ids < 0, -1 - ids, ids - self._vocabulary)
        is_soft = index >= 0
        rows = self._rows.to(output.device, output.dtype)[index.clamp(0, len(self._rows) - 1)]
        return torch.where((is_soft & (index < len(self._rows)))[..., None], rows, output)
