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
from kvwire.codec.sensitivity import perturbed
from kvwire.codec.statistics import Statistics, Vocabulary
from kvwire.codec.stored import AnyProfile, read_profile
from kvwire.types import CacheMeta, KVCache, PagedKVCache

__all__ = [
    "CHUNK_TOKENS",
    "AnyProfile",
    "Backend",
    "BlobDecoder",
    "CacheGenProfile",
    "CacheMeta",
    "KVCache",
    "Ladder",
    "Mark",
    "PagedKVCache",
    "Pending",
    "Plane",
    "Profile",
    "Statistics",
    "Vocabulary",
    "decode",
    "encode",
    "fit_cachegen_profile",
    "fit_profile",
    "inspect",
    "level_index",
    "perturbed",
    "planes_of",
    "positions_off",
    "positions_on",
    "read_head",
    "read_profile",
    "rotate",
    "rotation",
    "shift_keys",
    "uses_triton",
    "verify",
]
