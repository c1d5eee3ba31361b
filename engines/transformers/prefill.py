"""Prefilling documents side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.cache_utils import DynamicCache

from kvwire.engines.transformers.plain import tensors_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel


def batches_of(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Put documents of like lengths together.

    Args:
        lengths: Of the documents, in tokens.
        batch_tokens: Most tokens of a batch, padding included; a longer document has a batch of its own.

    Yields:
        Numbers of documents, the shortest first.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        if batch and (len(batch) + 1) * lengths[index] > batch_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def prefill_batch(
    model: PreTrainedModel, device: torch.device, documents: Sequence[Sequence[int]]
) -> list[list[tuple[Tensor, Tensor]]]:
    """Run documents in one batch, padded on the right, where causal attention never looks.

    Args:
        model: The model.
        device: Where it takes token ids.
        documents: Token ids of each.

    Returns:
        For each document, keys and values ``[kv_heads, tokens, dim]`` of every layer, which own their memory.
    """
    ids = torch.zeros(len(documents), max(map(len, documents)), dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = torch.tensor(document)
    past = DynamicCache()  # without the configuration, so that sliding layers keep every token
    model(input_ids=ids.to(device), past_key_values=past, use_cache=True, logits_to_keep=1)
    found = tensors_of(past)
    out = []
    for row, document in enumerate(documents):
        pairs = [(keys[row, :, : len(document)], values[row, :, : len(document)]) for keys, values in found]
        if len(documents) > 1:  # a view would keep the whole batch alive
            pairs = [(keys.clone(), values.clone()) for keys, values in pairs]
        out.append(pairs)
    return out
