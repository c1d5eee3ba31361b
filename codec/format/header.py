"""What a blob's header holds, and the constants of its layout. Exactly specified in docs/format.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS

if TYPE_CHECKING:
    from kvwire.codec.format.kept import Kept
    from kvwire.types import BlobInfo

MAGIC = b"\x89KVW\r\n\x1a\n"
VERSION = (1, 0)
ALIGNMENT = 64
"""The payload begins on a cache line; segments follow each other without padding."""
MAX_HEADER_BYTES = 16 << 20
"""A million tokens in chunks of 256 with four levels take 3 MiB."""
MAX_CHUNK_TOKENS = 4096
"""A chunk's working set must stay small against the cache."""
MISSING = 0xFFFF_FFFF_FFFF_FFFF
"""Offset of a segment that is not in the blob."""
MAX_STEP = 2.0**64
MAX_SHIFT = 1024
"""Steps and shifts beyond these, or below one over MAX_STEP, leave the range of float32 and of the classes."""
PROLOGUE = struct.Struct("<8sHHIIQQIIIIIBBHI")
"""magic, major, minor, incompatible flags, compatible flags, header bytes, file bytes, CRC-32 of the header, metadata
stored, metadata raw, tokens, chunk tokens, levels, bits of a token id (0: unknown), reserved, bytes of the profile
inside."""
NEUTRAL = 1
"""Incompatible flag: the document was computed behind other tokens, which recomputing any of it needs."""
SOFT = 2
"""Incompatible flag: some token ids are those of trained embeddings, which no vocabulary has."""
PART = 4
"""Incompatible flag: the blob is a part of a document, and its numbers depend on the tokens before it."""
SINKS = 8
"""Incompatible flag: some tokens are attention sinks, which stand in the header and not in the segments."""
BEGINNING = 16
"""Incompatible flag: the header has the first token as it is where the document begins a prompt."""
CRC_AT = 36
ENTRY = np.dtype(
    [
        ("offset", "<u8"), ("stored", "<u4"), ("symbols", "<u4"), ("crc32", "<u4"),
        ("codec", "<u2"), ("flags", "<u2"), ("error", "<f4"), ("energy", "<f4"),
    ]
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """A level as the encoder made it.

    Attributes:
        name: What users call it.
        step: Quantiser step of a level that refines others; 0 for levels that stand alone.
        shift: Classes to subtract at that step; 0 for levels that stand alone.
        codec: Number of the level kind, of all its segments; see ``codecs.CODECS``.
    """

    name: str
    step: float = 0.0
    shift: int = 0
    codec: int = CODEC_LAYERED

    @property
    def independent(self) -> bool:
        """Whether its segments decode without those of the levels below."""
        return not CODECS[self.codec].refines

    @property
    def lossless(self) -> bool:
        """Whether its segments hold the stored numbers bit for bit."""
        return CODECS[self.codec].lossless


@dataclass(frozen=True, eq=False)
class Header:
    """A parsed header: what every reader sees (``info``) and what the decoder alone needs.

    Attributes:
        info: What the blob says about itself.
        levels: One for each of ``info.levels``.
        profile_bytes: The profile inside the blob; empty where it names one or needs none.
        kept_bits: ``kept`` as stored; empty where nothing was pruned.
        offset: Position of the first token where lossless levels hold rotated keys; None where keys are un-rotated.
        sink_frames: What each of ``info.sinks`` differs by from the profile's row of sinks, see ``pack_sink``.
        beginning: The same of the first token where the document begins a prompt; empty where it stands nowhere else
            than it was computed.
    """

    info: BlobInfo
    levels: tuple[Level, ...]
    profile_bytes: bytes
    kept_bits: bytes = b""
    offset: int | None = None
    sink_frames: tuple[bytes, ...] = ()
    beginning: bytes = b""

    @property
    def lossy_codec(self) -> int | None:
        """Codec of the levels that are not lossless; None where there are none. A blob has one at most."""
        return next((level.codec for level in self.levels if not level.lossless), None)

    @cached_property
    def kept(self) -> Kept | None:
        """For each layer a bool ``[kv_heads, tokens]`` of what the cache holds, None where it holds everything.

        None alone where nothing was pruned.
        """
        from kvwire.codec.format.kept import unpack_kept  # brings torch, which no server of blobs needs

        return unpack_kept(self.kept_bits, self.info.meta.layers, self.info.tokens) if self.kept_bits else None
