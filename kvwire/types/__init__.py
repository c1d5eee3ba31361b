"""Plain data types that every room shares."""

from kvwire.types.blob import BlobInfo, LevelInfo, SegmentInfo
from kvwire.types.cache import CacheMeta, KVCache, LayerSpec, Side, digest_tokens
from kvwire.types.decision import ChunkId, Decision
from kvwire.types.magic import SEALED_MAGIC, TEXT_MAGIC
from kvwire.types.paged import PagedKVCache
from kvwire.types.rope import RopeRegime

__all__ = [
    "SEALED_MAGIC",
    "TEXT_MAGIC",
    "BlobInfo",
    "CacheMeta",
    "ChunkId",
    "Decision",
    "KVCache",
    "LayerSpec",
    "LevelInfo",
    "PagedKVCache",
    "RopeRegime",
    "SegmentInfo",
    "Side",
    "digest_tokens",
]
