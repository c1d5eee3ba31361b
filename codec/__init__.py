"""Tensors to bits and back: positions, transform, quantiser, tables, entropy coder, container."""

from kvwire.codec.backend import Backend, uses_triton
from kvwire.codec.cachegen import CacheGenProfile, fit_cachegen_profile
from kvwire.codec.container import read_head
from kvwire.codec.decode import BlobDecoder, decode
from kvwire.codec.encode import CHUNK_TOKENS, encode
from kvwire.codec.fit import fit_profile
from kvwire.codec.inspection import inspect, level_index, verify
from kvwire.codec.positions import positions_off, positions_on, rotate, rotation, shift_keys
from kvwire.codec.profile import Plane, Profile, planes_of
from kvwire.codec.quantiser import Ladder
from kvwire.codec.queues import Mark, Pending
from kvwire.codec.sealing import BlobReader, PlainBlob, SealedBlob, TenantKey, TenantKeys, derived, is_sealed
from kvwire.codec.sensitivity import perturbed
from kvwire.codec.statistics import Statistics, Vocabulary
from kvwire.codec.stored import AnyProfile, read_profile
from kvwire.codec.texts import pack_text, read_text
from kvwire.types import CacheMeta, KVCache, PagedKVCache

__all__ = [
    "CHUNK_TOKENS",
    "AnyProfile",
    "Backend",
    "BlobDecoder",
    "BlobReader",
    "CacheGenProfile",
    "CacheMeta",
    "KVCache",
    "Ladder",
    "Mark",
    "PagedKVCache",
    "Pending",
    "PlainBlob",
    "Plane",
    "Profile",
    "SealedBlob",
    "Statistics",
    "TenantKey",
    "TenantKeys",
    "Vocabulary",
    "decode",
    "derived",
    "encode",
    "fit_cachegen_profile",
    "fit_profile",
    "inspect",
    "is_sealed",
    "level_index",
    "pack_text",
    "perturbed",
    "planes_of",
    "positions_off",
    "positions_on",
    "read_head",
    "read_profile",
    "read_text",
    "rotate",
    "rotation",
    "shift_keys",
    "uses_triton",
    "verify",
]
