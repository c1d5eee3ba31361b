"""A model in training: its learning parameters, and passes over prompts in a layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers.masks import attention_mask
from kvwire.engines.transformers.soft import SoftEmbedding
from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkLayout
    from kvwire.training.samples import Batch

_NOISE = 0.3
"""Standard deviation of link tokens' initial embeddings, as a share of the vocabulary's."""


class TrainableModel:
    """A transformers model with soft tokens beside its vocabulary.

    Attributes:
        soft: Embeddings of the layout's soft tokens, float32 ``[soft tokens, hidden]``; may be empty.
    """

    def __init__(self, engine: TransformersEngine, layout: LinkLayout, *, is_frozen: bool, seed: int = 0) -> None:
        """Choose the learning parameters.

        Args:
            engine: Runs the model, which is changed unless frozen.
            layout: Layout with the soft tokens.
            is_frozen: Whether only they learn.
            seed: Seed of the initial embeddings.

        Raises:
            ArgumentError: The model is frozen and the layout has no soft tokens: nothing would learn.
            MismatchError: The layout has ids that the model's vocabulary lacks, or the model is quantised.
        """
        self._engine, self._model, self.is_frozen = engine, engine.model, is_frozen
        if is_frozen and not layout.soft_tokens:
            raise ArgumentError(
                f"the layout {layout.name} has no soft tokens, and the model is frozen; name links:K, wrappers:H+T "
                "or anchors:S/A"
            )
        highest = max((*layout.cached_tokens, *layout.computed_tokens), default=0)
        if highest >= engine.vocabulary_size:
            raise MismatchError(
                f"the layout {layout.name} needs token id {highest}, the model's vocabulary has "
                f"{engine.vocabulary_size}; name links:K, whose tokens are trained embeddings"
            )
        if not is_frozen and getattr(self._model, "is_quantized", False):
            raise MismatchError("a quantised model cannot be trained: open it unquantised, or train with --frozen")
        self._model.requires_grad_(not is_frozen)
        self.soft = torch.nn.Parameter(_first_embeddings(self._model, layout, seed))
        self._hook = SoftEmbedding(self._model, self.soft) if self.soft.numel() else None

    def close(self) -> None:
        """Remove hooks and soft tokens; trained weights stay."""
        self._model.requires_grad_(True)
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @property
    def device(self) -> torch.device:
        """Device of token ids."""
        return self._engine.device

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Learning parameters by name; tied weights once."""
        own = {} if self.is_frozen else dict(self._model.named_parameters())
        return {**own, **({"soft_tokens": self.soft} if self.soft.numel() else {})}

    def logits(self, batch: Batch, wanted: Tensor) -> Tensor:
        """Run prompts and return the logits of some rows.

        Args:
            batch: The prompts.
            wanted: The rows, bool ``[prompts, tokens]``.

        Returns:
            ``[rows, vocabulary]``, prompt by prompt.
        """
        mask = attention_mask(self._model, self._engine.meta, batch.visible)
        shaped = (
            {kind: each.transpose(0, 1) for kind, each in mask.items()}
            if isinstance(mask, dict)
            else mask.transpose(0, 1)
        )
        places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device)
        out = self._model(
            input_ids=batch.token_ids,
            position_ids=places.expand_as(batch.token_ids),
            attention_mask=shaped,
            use_cache=False,
        )
        logits: Tensor = out.logits[wanted]
        return logits


def _first_embeddings(model: PreTrainedModel, layout: LinkLayout, seed: int) -> Tensor:
    """Initial embeddings: zero inside caches, which disturbs least, else the vocabulary's mean plus noise."""
    table = model.get_input_embeddings()
    weight = torch.as_tensor(table.weight)
    every: Tensor = table(torch.arange(len(weight), device=weight.device)).detach().float()
    count = layout.soft_tokens
    if layout.cached_tokens and not layout.anchors:
        return every.new_zeros(count, every.shape[1])
    noise = torch.randn(count, every.shape[1], generator=torch.Generator().manual_seed(seed))
    first: Tensor = every.mean(0) + _NOISE * every.std() * noise.to(every.device)
    return first
