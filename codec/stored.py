"""Profiles of either method, as a store holds them."""

from __future__ import annotations

from typing import TypeAlias

from kvwire.codec.cachegen import CacheGenProfile
from kvwire.codec.cachegen_profile import MAGIC as CACHEGEN_MAGIC
from kvwire.codec.profile import Profile

AnyProfile: TypeAlias = Profile | CacheGenProfile


def read_profile(data: bytes) -> AnyProfile:
    """Read a stored profile, whichever it is; raises CorruptError, TruncatedError or FormatVersionError."""
    kind = CacheGenProfile if data[: len(CACHEGEN_MAGIC)] == CACHEGEN_MAGIC else Profile
    return kind.from_bytes(data)
