"""kvwire ships the KV caches of language models like media.

Names are imported on first use, so that ``import kvwire`` is quick and rooms may import ``kvwire.errors`` and
``kvwire.types`` without a cycle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire._lazy import lazy
from kvwire._version import __version__

if TYPE_CHECKING:
    from kvwire.codec import (
        BlobDecoder,
        CacheGenProfile,
        Ladder,
        Pending,
        Profile,
        Statistics,
        decode,
        encode,
        fit_cachegen_profile,
        fit_profile,
        inspect,
        read_profile,
    )
    from kvwire.engines.transformers import TransformersEngine, generate_inputs, open_engine
    from kvwire.reuse import LinkedPrompt, link
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.coding import Coding, Document
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.loader import Loader
    from kvwire.runtime.quality import calibrate_error
    from kvwire.store import Keyring, open_tiers
    from kvwire.store.schemes import open_store
    from kvwire.types import CacheMeta, Chat, ChunkId, Decision, KVCache, LayerSpec, PagedKVCache, RopeRegime, Turn

__all__ = [
    "Answer",
    "BlobDecoder",
    "CacheGenProfile",
    "CacheMeta",
    "Chat",
    "ChunkId",
    "Coding",
    "Corpus",
    "Decision",
    "Document",
    "KVCache",
    "Keyring",
    "Ladder",
    "LayerSpec",
    "LinkedPrompt",
    "Loader",
    "PagedKVCache",
    "Pending",
    "Profile",
    "RopeRegime",
    "Statistics",
    "TransformersEngine",
    "Turn",
    "__version__",
    "calibrate_error",
    "decode",
    "encode",
    "fit_cachegen_profile",
    "fit_profile",
    "generate_inputs",
    "inspect",
    "link",
    "open_engine",
    "open_store",
    "open_tiers",
    "read_profile",
]

__getattr__ = lazy(__name__)


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted(__all__)
