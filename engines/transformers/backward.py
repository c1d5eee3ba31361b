"""Gradients by cached keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.engines.transformers.plain import filled
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import PreTrainedModel


def backpropagated(
    model: PreTrainedModel, pairs: Sequence[tuple[Tensor, Tensor]], token_ids: Sequence[int], start: int, seed: int
) -> list[tuple[Tensor, Tensor]]:
    """Draw a token behind each of some tokens, and take the gradients of their log-probabilities.

    Args:
        model: A decoder.
        pairs: Keys and values ``[1, kv_heads, tokens, dim]`` of each layer, as the model takes them.
        token_ids: What is read on top of them.
        start: Position of the first.
        seed: Of the draw.

    Returns:
        Gradients in the shapes of ``pairs``, of the sum over the square root of the number of tokens; zeros where a
        layer does not reach the answer.

    Raises:
        ArgumentError: The model cannot backpropagate.
    """
    leaves = [
        (keys.detach().clone().requires_grad_(), values.detach().clone().requires_grad_()) for keys, values in pairs
    ]
    flat = [leaf for pair in leaves for leaf in pair]
    ids = torch.tensor([list(token_ids)], device=model.device)
    positions = torch.arange(start, start + len(token_ids), device=model.device)[None]
    try:
        with torch.enable_grad():
            past = filled(leaves, model.config)
            logits = model(input_ids=ids, position_ids=positions, past_key_values=past, use_cache=True).logits[0]
            predicted = logits.float().log_softmax(-1)
            drawn = _draw(predicted.detach(), seed)
            total = predicted.gather(1, drawn[:, None]).sum() / len(token_ids) ** 0.5
            found = torch.autograd.grad(total, flat, allow_unused=True)
    except (RuntimeError, NotImplementedError) as error:  # quantised weights, kernels without a way back, memory
        msg = f"the model cannot backpropagate to its cache ({error})"
        raise ArgumentError(msg) from error
    known = [torch.zeros_like(leaf) if one is None else one.detach() for leaf, one in zip(flat, found, strict=True)]
    return list(zip(known[::2], known[1::2], strict=True))


def _draw(log_probabilities: Tensor, seed: int) -> Tensor:
    """One token for each row, the same on every device: by the place of a uniform number in the distribution."""
    places = torch.rand(len(log_probabilities), 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    sums = log_probabilities.double().exp().cumsum(-1)
    last = torch.tensor(log_probabilities.shape[1] - 1)
    return torch.searchsorted(sums.cpu(), places * sums[:, -1:].cpu()).squeeze(1).clamp(max=last).to(sums.device)
