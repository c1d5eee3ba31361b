"""Models whose chunks fit caches that hold nothing but plain keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError, MismatchError

if TYPE_CHECKING:
    from kvwire.types import CacheMeta

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def uniform(meta: CacheMeta) -> tuple[int, int]:
    """Key-value heads and dimension of a model whose layers are all alike."""
    shapes = {(spec.kv_heads, spec.key_dim, spec.value_dim, spec.kind, spec.value_rope) for spec in meta.layers}
    plain = [shape for shape in shapes if shape[1] == shape[2] and shape[3:] == ("full", None)]
    if len(shapes) != 1 or not plain:
        msg = (
            f"model {meta.model_id!r} has layers of several kinds, or latent attention: kvwire's adapters serve models "
            "whose layers all have full attention with keys and values of one shape"
        )
        raise MismatchError(msg)
    return plain[0][:2]


def heads_of(kv_heads: int, workers: int, worker: int) -> slice:
    """The key-value heads of one of several tensor-parallel workers, which share them where there are fewer heads."""
    if not 0 <= worker < workers or (kv_heads % workers and workers % kv_heads):
        msg = f"{kv_heads} key-value heads cannot be divided among {workers} workers"
        raise ArgumentError(msg)
    each = max(1, kv_heads // workers)
    first = worker * kv_heads // workers
    return slice(first, first + each)
