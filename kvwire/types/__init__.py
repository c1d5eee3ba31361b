"""Plain data types that every room shares."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.types.blob import BlobInfo, BlobPrefix, BlockDeviation, LevelInfo, SegmentInfo, SoftTokensName
    from kvwire.types.cache import CacheMeta, KVCache, LayerSpec, RopeRegime, Side, digest_tokens
    from kvwire.types.chat import Chat, RenderedChat, Turn
    from kvwire.types.decision import ChunkId, Decision
    from kvwire.types.magic import SEALED_MAGIC, SHIFT_MAGIC, TEXT_MAGIC
    from kvwire.types.paged import PagedKVCache
    from kvwire.types.rates import RateTrace

__all__ = [
    "SEALED_MAGIC",
    "SHIFT_MAGIC",
    "TEXT_MAGIC",
    "BlobInfo",
    "BlobPrefix",
    "BlockDeviation",
    "CacheMeta",
    "Chat",
    "ChunkId",
    "Decision",
    "KVCache",
    "LayerSpec",
    "LevelInfo",
    "PagedKVCache",
    "RateTrace",
    "RenderedChat",
    "RopeRegime",
    "SegmentInfo",
    "Side",
    "SoftTokensName",
    "Turn",
    "digest_tokens",
]

__getattr__ = lazy(__name__)
