"""Tensors to bits and back: positions, transform, quantiser, tables, entropy coder, container."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.codec.api.decode import BlobDecoder, decode
    from kvwire.codec.api.encode import CHUNK_TOKENS, encode, trial_blob
    from kvwire.codec.api.inspect import inspect, level_index, verify
    from kvwire.codec.backend import Backend, Plane, planes_of, uses_triton
    from kvwire.codec.fitting.fit import fit_profile
    from kvwire.codec.fitting.gathering import StatisticsBuilder
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.codec.format.codecs import DEFAULT_METHOD, error_of_method, methods
    from kvwire.codec.format.container import read_header
    from kvwire.codec.format.texts import pack_text, read_text, read_text_documents
    from kvwire.codec.gpu.streams import Pending, StreamEvent
    from kvwire.codec.kinds.base import LevelKind, kind_of_method, read_profile
    from kvwire.codec.kinds.cachegen_coding import fit_cachegen_profile
    from kvwire.codec.kinds.cachegen_profile import CacheGenProfile
    from kvwire.codec.kinds.requests import AnyProfile
    from kvwire.codec.profile.lazy import loaded_part, open_profile
    from kvwire.codec.profile.profile import ERROR_NOTE, Profile
    from kvwire.codec.transform.levels import Ladder
    from kvwire.codec.transform.positions import (
        positions_off,
        positions_on,
        rotate,
        rotation,
        rows_off,
        rows_on,
        shift_keys,
    )
    from kvwire.types import CacheMeta, KVCache, PagedKVCache

__all__ = [
    "CHUNK_TOKENS",
    "DEFAULT_METHOD",
    "ERROR_NOTE",
    "AnyProfile",
    "Backend",
    "BlobDecoder",
    "CacheGenProfile",
    "CacheMeta",
    "KVCache",
    "Ladder",
    "LevelKind",
    "PagedKVCache",
    "Pending",
    "Plane",
    "Profile",
    "Statistics",
    "StatisticsBuilder",
    "StreamEvent",
    "decode",
    "encode",
    "error_of_method",
    "fit_cachegen_profile",
    "fit_profile",
    "inspect",
    "kind_of_method",
    "level_index",
    "loaded_part",
    "methods",
    "open_profile",
    "pack_text",
    "planes_of",
    "positions_off",
    "positions_on",
    "read_header",
    "read_profile",
    "read_text",
    "read_text_documents",
    "rotate",
    "rotation",
    "rows_off",
    "rows_on",
    "shift_keys",
    "trial_blob",
    "uses_triton",
    "verify",
]

__getattr__ = lazy(__name__)
