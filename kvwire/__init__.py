"""kvwire ships the KV caches of language models like media.

Names are imported when they are first used, so that ``import kvwire`` is quick and rooms may import ``kvwire.errors``
and ``kvwire.types`` without a cycle.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from kvwire.corpus import Coding, Corpus, Document
    from kvwire.engines.transformers import TransformersEngine, open_engine
    from kvwire.load import Answer, Loader
    from kvwire.open import open_store
    from kvwire.quality import calibrate_error
    from kvwire.reuse import LinkedPrompt, link
    from kvwire.store import Keyring, open_tiers
    from kvwire.types import CacheMeta, ChunkId, Decision, KVCache, LayerSpec, PagedKVCache, RopeRegime

__version__ = "0.1.0"

_HOMES = {
    "kvwire.codec": (
        "BlobDecoder",
        "CacheGenProfile",
        "Ladder",
        "Pending",
        "Profile",
        "Statistics",
        "decode",
        "encode",
        "fit_cachegen_profile",
        "fit_profile",
        "inspect",
        "read_profile",
    ),
    "kvwire.quality": ("calibrate_error",),
    "kvwire.corpus": ("Coding", "Corpus", "Document"),
    "kvwire.engines.transformers": ("TransformersEngine", "open_engine"),
    "kvwire.load": ("Answer", "Loader"),
    "kvwire.open": ("open_store",),
    "kvwire.reuse": ("LinkedPrompt", "link"),
    "kvwire.store": ("Keyring", "open_tiers"),
    "kvwire.types": ("CacheMeta", "ChunkId", "Decision", "KVCache", "LayerSpec", "PagedKVCache", "RopeRegime"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Answer",
    "BlobDecoder",
    "CacheGenProfile",
    "CacheMeta",
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
    "calibrate_error",
    "decode",
    "encode",
    "fit_cachegen_profile",
    "fit_profile",
    "inspect",
    "link",
    "open_engine",
    "open_store",
    "open_tiers",
    "read_profile",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - any of the names above
    """Import a public name from its room."""
    if name not in _HOME_OF:
        msg = f"module 'kvwire' has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted(__all__)
