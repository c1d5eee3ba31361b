"""Profiles of any kind, as a store holds them and as a blob wants them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS
from kvwire.codec.kinds.base import kind_of
from kvwire.errors import CorruptError, MismatchError

if TYPE_CHECKING:
    from kvwire.codec.format.header import Header
    from kvwire.codec.kinds.requests import AnyProfile


def read_profile(data: bytes) -> AnyProfile:
    """Read a stored profile, of whichever kind its first bytes say.

    Args:
        data: The file's bytes.

    Returns:
        The profile.

    Raises:
        CorruptError: The bytes are no profile.
        TruncatedError: They end too early.
        FormatVersionError: A later version wrote them.
    """
    magics = {codec.profile_magic: number for number, codec in CODECS.items() if codec.profile_magic}
    found = next((number for magic, number in magics.items() if data.startswith(magic)), CODEC_LAYERED)
    return kind_of(found).read_profile(data)


def profile_for(header: Header, profile: AnyProfile | None) -> AnyProfile | None:
    """Choose what a blob's lossy levels are decoded with, and check it."""
    wanted, codec = header.info.profile_digest, header.lossy_codec
    if codec is None:
        return None
    if not wanted:
        profile = kind_of(codec).read_profile_inside(header.profile_bytes)
    elif profile is None or profile.digest != wanted:
        have = "none was given" if profile is None else f"{profile.digest[:12]} was given"
        msg = f"the blob was encoded with profile {wanted[:12]}, {have}; pass profile= as stored beside the blob"
        raise MismatchError(msg)
    profile.check_fits(header.info.meta)
    if profile.codec != codec:
        msg = (
            "the blob is of another method than the profile that it names, which does not know its levels; "
            "fetch the blob's header again"
        )
        raise CorruptError(msg)
    kind_of(codec).check_blob(header.info, profile)
    return profile
