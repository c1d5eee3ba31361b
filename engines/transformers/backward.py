"""Gradients with respect to cached keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers.devices import input_device
from kvwire.engines.transformers.plain import filled
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

_HALF_SCALE = 2.0**16
"""Loss scale in float16, where most gradients would otherwise be zero; reduced if it overflows."""


def backpropagated(
    model: PreTrainedModel, pairs: Sequence[tuple[Tensor, Tensor]], token_ids: Sequence[int], start: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Sample a token after each of some tokens, and compute gradients of their log-probabilities."""
    scale = _HALF_SCALE if model.dtype == torch.float16 else 1.0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:  # gradients of weights would keep every layer's input
            parameter.requires_grad_(False)
        found = _gradients(model, pairs, token_ids, start, seed, scale)
        while scale > 1 and not all(bool(one.isfinite().all()) for one in found):
            scale /= 16
            found = _gradients(model, pairs, token_ids, start, seed, scale)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:  # quantised weights, kernels, memory
        raise ArgumentError(f"the model cannot backpropagate to its cache ({error})") from error
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
    return list(zip(found[::2], found[1::2], strict=True))


def _gradients(
    model: PreTrainedModel,
    pairs: Sequence[tuple[Tensor, Tensor]],
    token_ids: Sequence[int],
    start: int,
    seed: int,
    scale: float,
) -> list[Tensor]:
    """Gradients of keys and values in turn, float32."""
    device = input_device(model)
    ids = torch.tensor([list(token_ids)], device=device)
    positions = torch.arange(start, start + len(token_ids), device=device)[None]
    with torch.enable_grad():
        leaves = [leaf.detach().clone().requires_grad_() for pair in pairs for leaf in pair]
        past = filled(zip(leaves[::2], leaves[1::2], strict=True), model.config)
        logits = model(input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True).logits[0]
        predicted = logits.float().log_softmax(-1)
        drawn = _draw(predicted.detach(), seed)
        total = predicted.gather(1, drawn[:, None]).sum() * (scale / len(token_ids) ** 0.5)
        found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [
        torch.zeros_like(leaf, dtype=torch.float32) if one is None else one.detach().float() / scale
        for leaf, one in zip(leaves, found, strict=True)
    ]


def _draw(log_probabilities: Tensor, seed: int) -> Tensor:
    """Sample one token per row by inverse transform: the same on every device."""
    places = torch.rand(len(log_probabilities), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sums = log_probabilities.cpu().double().exp().cumsum(-1)
    last = log_probabilities.shape[1] - 1
    drawn = torch.searchsorted(sums, places * sums[:, -1:]).squeeze(1).clamp(max=last)
    return drawn.to(log_probabilities.device)
