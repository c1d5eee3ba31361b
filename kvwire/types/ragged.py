"""Pruned caches, whose heads store different tokens: as lists of entries, and as tensors with a mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

Entries = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""One head's positions, int64 ``[n]`` ascending, keys ``[n, key_dim]`` and values ``[n, value_dim]``."""


def dense_layer(layer: int, heads: Sequence[Entries], tokens: int) -> Entries:
    """Scatter a layer's entries into dense tensors."""
    if not heads:
        return torch.zeros(0, tokens, 0), torch.zeros(0, tokens, 0), torch.zeros(0, tokens, dtype=torch.bool)
    for head, entries in enumerate(heads):
        _check_entries(f"layer {layer}, head {head}", entries, heads[0], tokens)
    _, first_keys, first_values = heads[0]
    mask = torch.zeros(len(heads), tokens, dtype=torch.bool, device=first_keys.device)
    keys = first_keys.new_zeros(len(heads), tokens, first_keys.shape[1])
    values = first_values.new_zeros(len(heads), tokens, first_values.shape[1])
    for head, (positions, own_keys, own_values) in enumerate(heads):
        place = positions.to(keys.device)
        keys[head, place], values[head, place], mask[head, place] = own_keys, own_values, True
    return keys, values, mask


def entries_of(keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> Entries:
    """One head's entries set in ``mask``, bool ``[tokens]``, of keys and values ``[tokens, dim]``; None: all."""
    if mask is None:
        return torch.arange(len(keys), device=keys.device), keys, values
    positions = mask.nonzero()[:, 0].to(keys.device)
    return positions, keys[positions], values[positions]


def masked(tensor: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Set entries outside a mask to zero."""
    if mask is None:
        return tensor
    return torch.where(mask[..., None].to(tensor.device), tensor, torch.zeros_like(tensor))


def check_mask(layer: int, mask: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """Check that a layer's mask is bool ``[heads, tokens]``."""
    if mask is not None and (mask.dtype != torch.bool or tuple(mask.shape) != shape):
        raise ArgumentError(f"layer {layer}: kept must be bool {shape} or None, got {mask.dtype} {tuple(mask.shape)}")


def _check_entries(where: str, entries: Entries, first: Entries, tokens: int) -> None:
    positions = entries[0]
    if positions.ndim != 1 or positions.dtype != torch.int64:
        raise ArgumentError(f"{where}: positions must be int64 [n], got {positions.dtype} {tuple(positions.shape)}")
    for name, tensor, like in zip(("keys", "values"), entries[1:], first[1:], strict=True):
        fits = tensor.ndim == 2 and tensor.shape[1:] == like.shape[1:] and tensor.dtype == like.dtype  # noqa: PLR2004
        if not fits or len(tensor) != len(positions):
            raise ArgumentError(
                f"{where}: {name} must be [n, dim] for its {len(positions)} positions, of one dim and dtype for all "
                f"heads of the layer, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if len(positions) and not (
        int(positions[0]) >= 0 and int(positions[-1]) < tokens and bool((positions.diff() > 0).all())
    ):
        raise ArgumentError(f"{where}: positions must ascend and lie in 0 to {tokens - 1}, the document's tokens")
