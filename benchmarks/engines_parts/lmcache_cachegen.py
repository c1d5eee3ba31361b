"""LMCache's own CacheGen: what its connector for it says on this machine, and its serde alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire import KVCache


@dataclass(frozen=True)
class CacheGenRun:
    """A prompt's chunks through the serde. cache: as decoded, which has whole chunks alone."""

    cache: KVCache
    bytes: int
    encode_s: float
    decode_s: float


def connector_words(model: Path, cache: KVCache) -> str:
    """Why the connector that CacheGen belongs to does not serve vLLM here; empty where it does.

    Args:
        model: Folder.
        cache: Of the model, for its shapes.
    """
    from lmcache.utils import EngineType
    from lmcache.v1.gpu_connector import CreateGPUConnector

    config, metadata = _parts(model, cache)
    try:
        CreateGPUConnector(config, metadata, EngineType.VLLM)
    except Exception as error:  # noqa: BLE001 - its words are the result
        return f"{type(error).__name__}: {error}"
    return ""


def through_cachegen(model: Path, cache: KVCache, chunk: int) -> CacheGenRun:
    """Encode and decode a cache as LMCache's remote backend would, chunk by chunk; kernels compile untimed.

    Args:
        model: Folder.
        cache: Positions on, of the whole prompt.
        chunk: Tokens of a chunk; what fills none is left out.
    """
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
    from lmcache.v1.storage_backend.naive_serde import CreateSerde

    config, metadata = _parts(model, cache)
    to_bytes, to_tensors = CreateSerde("cachegen", metadata, config)
    both = torch.stack([_flat(cache.keys), _flat(cache.values)])
    parts = both[:, :, : both.shape[2] // chunk * chunk].split(chunk, dim=2)

    def encoded(part: torch.Tensor) -> object:
        raw = part.contiguous().view(torch.uint8).flatten()
        told = MemoryObjMetadata(part.shape, part.dtype, 0, raw.numel(), 1, 0, MemoryFormat.KV_2LTD)
        return to_bytes.serialize(TensorMemoryObj(raw, told, None))

    to_tensors.deserialize(encoded(parts[0]))
    started = time.perf_counter()
    blobs = [encoded(part) for part in parts]
    between = time.perf_counter()
    decoded = [to_tensors.deserialize(blob).tensor for blob in blobs]
    ended = time.perf_counter()
    keys, values = torch.cat(decoded, 2).float()
    heads, dim = cache.keys[0].shape[0], cache.keys[0].shape[2]
    sides = [[each.view(-1, heads, dim).transpose(0, 1).contiguous() for each in side] for side in (keys, values)]
    size = sum(len(blob.byte_array) for blob in blobs)
    return CacheGenRun(type(cache)(*sides, cache.meta), size, between - started, ended - between)


def _flat(side: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([tensor.transpose(0, 1).flatten(1) for tensor in side])


def _parts(model: Path, cache: KVCache) -> tuple[object, object]:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

    heads, _, dim = cache.keys[0].shape
    config = LMCacheEngineConfig.from_defaults(chunk_size=256)
    metadata = LMCacheMetadata(
        model_name=str(model), world_size=1, local_world_size=1, worker_id=0, local_worker_id=0,
        kv_dtype=torch.float32, kv_shape=(len(cache.keys), 2, 256, heads, dim),
    )  # fmt: skip
    return config, metadata
