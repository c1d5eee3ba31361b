"""Profiles of either method, as a store holds them and as a blob wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from kvwire.codec.format.segment import MAX_CHUNK_SYMBOLS
from kvwire.codec.kinds.cachegen import CacheGenProfile
from kvwire.codec.kinds.cachegen_profile import MAGIC as CACHEGEN_MAGIC
from kvwire.codec.profile.profile import Profile
from kvwire.errors import CorruptError, MismatchError, TruncatedError

if TYPE_CHECKING:
    from kvwire.codec.format.container import Header
    from kvwire.types import BlobInfo

AnyProfile: TypeAlias = Profile | CacheGenProfile


def read_profile(data: bytes) -> AnyProfile:
    """Read a stored profile, whichever it is; raises CorruptError, TruncatedError or FormatVersionError."""
    kind = CacheGenProfile if data[: len(CACHEGEN_MAGIC)] == CACHEGEN_MAGIC else Profile
    return kind.from_bytes(data)


def profile_for(head: Header, profile: Profile | CacheGenProfile | None) -> Profile | CacheGenProfile | None:
    """What a blob is decoded with; raises MismatchError or CorruptError where the one given is not the one it names."""
    wanted = head.info.profile_digest
    found: Profile | CacheGenProfile
    if all(level.lossless for level in head.info.levels):
        return None
    if not wanted:
        found = _inside(head.profile_bytes)
    elif profile is None or profile.digest != wanted:
        have = "none was given" if profile is None else f"{profile.digest[:12]} was given"
        msg = f"the blob was encoded with profile {wanted[:12]}, {have}; pass profile= as stored beside the blob"
        raise MismatchError(msg)
    else:
        found = profile
    found.check_fits(head.info.meta)
    _check_method(head.info, found)
    return found


def _check_method(info: BlobInfo, profile: Profile | CacheGenProfile) -> None:
    """A profile must be of the blob's method, and a chunk's working set within bounds."""
    if isinstance(profile, CacheGenProfile):
        levels = sum(not level.lossless for level in info.levels)
        if info.method != "cachegen" or levels > len(profile.level_names):
            msg = "the blob has levels that its CacheGen profile does not know; fetch the blob's head again"
            raise CorruptError(msg)
        return
    tokens = min(info.tokens, info.chunk_tokens)
    if info.method != "kvwire" or info.prefix_layers != profile.prefix_layers:
        msg = "the blob is of another method or head start than the profile that it names; fetch the blob's head again"
        raise CorruptError(msg)
    if tokens * profile.rank > MAX_CHUNK_SYMBOLS:
        msg = f"a chunk of {tokens} tokens would hold {tokens * profile.rank} symbols, {MAX_CHUNK_SYMBOLS} are allowed"
        raise CorruptError(msg)


def _inside(data: bytes) -> Profile:
    """The profile that the blob carries; bytes fetched anew would not lengthen it, so it is never "truncated"."""
    try:
        return Profile.from_bytes(data)
    except TruncatedError as error:
        msg = f"the profile inside the blob is damaged: {error}"
        raise CorruptError(msg) from error
