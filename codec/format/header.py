"""Fields of a blob's header, including the masks of pruned caches. Specified in docs/format.md."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import zstandard

from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS
from kvwire.codec.format.metadata_json import decompress, unpack_json
from kvwire.errors import ArgumentError, CorruptError
from kvwire.types import SoftTokensName

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvwire.types import BlobInfo, LayerSpec


MAX_SOFT = 4096
"""Most soft tokens of one file."""
_DIGEST = re.compile("[0-9a-f]{64}")
MIN_BITS = 8
"""Every token takes at least a byte, even without ids, so that a short blob cannot claim many tokens."""
MAX_BITS = 32
Kept: TypeAlias = "tuple[torch.Tensor | None, ...]"
"""Masks of a pruned cache: bool ``[kv_heads, tokens]`` for each layer, None where it holds everything."""
_MOST_PACKED = 256
"""Most bytes that one byte of the frame may unpack to: more would let a short file claim much memory."""
MAGIC = b"\x89KVW\r\n\x1a\n"
VERSION = (1, 0)
ALIGNMENT = 64
"""Bytes: the payload begins on a cache line; segments follow without padding."""
MAX_HEADER_BYTES = 16 << 20
"""A million tokens in chunks of 256 with four levels take 3 MiB."""
MAX_CHUNK_TOKENS = 4096
"""A chunk's working set must stay small compared with the cache."""
MISSING = 0xFFFF_FFFF_FFFF_FFFF
"""Offset of a segment that is not in the blob."""
MAX_STEP = 2.0**64
MAX_SHIFT = 1024
"""Steps beyond MAX_STEP or its inverse, and larger shifts, leave the range of float32 or of the classes."""
PROLOGUE = struct.Struct("<8sHHIIQQIIIIIBBHI")
"""Magic, major, minor, incompatible flags, compatible flags, header bytes, file bytes, CRC-32 of the header, metadata
stored, metadata raw, tokens, chunk tokens, levels, bits of a token id (0: unknown), reserved, bytes of the profile
inside."""
NEUTRAL = 1
"""Incompatible flag: the document was computed behind other tokens, which recomputation needs."""
SOFT = 2
"""Incompatible flag: some token ids are of trained embeddings, which are in no vocabulary."""
PART = 4
"""Incompatible flag: the blob is a part of a document, and its numbers depend on the tokens before it."""
SINKS = 8
"""Incompatible flag: some tokens are attention sinks, stored in the header and not in the segments."""
BEGINNING = 16
"""Incompatible flag: the header stores the first token for prompts that begin with the document."""
CRC_AT = 36
ENTRY = np.dtype(
    [
        ("offset", "<u8"), ("stored", "<u4"), ("symbols", "<u4"), ("crc32", "<u4"),
        ("codec", "<u2"), ("flags", "<u2"), ("error", "<f4"), ("energy", "<f4"),
    ]
)  # fmt: skip
_STORED_AT, _RAW_AT = 8, 9
"""Indices of the metadata's stored and raw length among the prologue's fields."""


def soft_to_json(soft: SoftTokensName) -> list[Any]:
    """Write the name of a document's soft tokens."""
    raw = [soft.digest, soft.first, soft.count]
    try:
        soft_from_json(raw)
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    return raw


def soft_from_json(raw: Any) -> SoftTokensName:  # noqa: ANN401 - JSON
    """Read the name of a document's soft tokens."""
    sound = isinstance(raw, list) and [type(each) for each in raw] == [str, int, int]
    if not sound or not _DIGEST.fullmatch(raw[0]) or not 0 < raw[2] <= MAX_SOFT or not 0 < raw[1] <= (1 << 32) - raw[2]:
        raise ValueError(f"soft tokens are named by a SHA-256, their first id and their number, at most {MAX_SOFT}")
    return SoftTokensName(*raw)


def pack_ids(ids: Sequence[int] | None, tokens: int) -> tuple[int, bytes]:
    """Pack token ids, lowest bit first; return the bits of an id and the bytes."""
    if ids is None:
        return 0, bytes(tokens)
    bits = max(MIN_BITS, max(ids).bit_length())
    if min(ids) < 0 or bits > MAX_BITS:
        raise ArgumentError(f"token ids must be 0 to 2^{MAX_BITS} - 1, got {min(ids)} to {max(ids)}")
    wide = np.asarray(ids, "<u4").view(np.uint8).reshape(-1, 4)
    flat = np.unpackbits(wide, axis=1, bitorder="little")[:, :bits]
    return bits, np.packbits(flat.ravel(), bitorder="little").tobytes()


def id_bytes(tokens: int, bits: int) -> int:
    """Count the bytes that packed ids take."""
    return -(-tokens * max(MIN_BITS, bits) // 8)


def unpack_ids(data: bytes, tokens: int, bits: int) -> tuple[int, ...] | None:
    """Read ``pack_ids``; an id of up to 32 bits spans at most five bytes."""
    if not bits:
        return None
    padded = np.frombuffer(data + bytes(5), np.uint8)
    first_bit = np.arange(tokens, dtype=np.int64) * bits
    wide = np.zeros(tokens, np.uint64)
    for byte in range(5):
        wide |= padded[(first_bit >> 3) + byte].astype(np.uint64) << np.uint64(8 * byte)
    ids = (wide >> (first_bit & 7).astype(np.uint64)) & np.uint64((1 << bits) - 1)
    return tuple(ids.tolist())


def pack_kept(kept: Kept, layers: tuple[LayerSpec, ...], tokens: int) -> bytes:
    """Pack the masks of a pruned cache: bits of each layer with a cache, padded to whole bytes."""
    parts = [
        np.packbits(np.ones(spec.kv_heads * tokens, bool) if mask is None else mask.cpu().numpy(), axis=None)
        for spec, mask in zip(layers, kept, strict=True)
        if spec.kind != "none"
    ]
    raw = b"".join(part.tobytes() for part in parts)
    packed = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw)
    return packed if len(packed) < len(raw) <= _MOST_PACKED * len(packed) else raw


def kept_sizes(data: bytes, layers: tuple[LayerSpec, ...], tokens: int) -> list[int]:
    """Return the bytes of each layer's mask bits."""
    sizes = [0 if spec.kind == "none" else -(-spec.kv_heads * tokens // 8) for spec in layers]
    if not len(data) <= sum(sizes) <= _MOST_PACKED * len(data):
        raise CorruptError("the blob's list of kept entries does not fit its layout; fetch it again")
    return sizes


def unpack_kept(data: bytes, layers: tuple[LayerSpec, ...], tokens: int) -> Kept:
    """Read ``pack_kept``."""
    import torch  # servers of blobs do without

    sizes = kept_sizes(data, layers, tokens)
    raw = data if len(data) == sum(sizes) else decompress(data, sum(sizes), "list of kept entries")
    out: list[torch.Tensor | None] = []
    at = 0
    for spec, size in zip(layers, sizes, strict=True):
        bits = np.unpackbits(np.frombuffer(raw, np.uint8, size, at), count=spec.kv_heads * tokens if size else 0)
        mask = torch.from_numpy(bits.view(bool)).reshape(spec.kv_heads, tokens if size else 0)
        out.append(None if bool(mask.all()) else mask)
        at += size
    return tuple(out)


@dataclass(frozen=True)
class Level:
    """A level as stored in the metadata.

    Attributes:
        name: The level's name for users.
        step: Quantiser step of a refining level; 0 for an independent one.
        shift: Classes to subtract at that step; 0 for an independent level.
        codec: Codec number of all its segments; see ``codecs.CODECS``.
    """

    name: str
    step: float = 0.0
    shift: int = 0
    codec: int = CODEC_LAYERED

    @property
    def independent(self) -> bool:
        """Whether the level's segments decode without those of lower levels."""
        return not CODECS[self.codec].refines

    @property
    def lossless(self) -> bool:
        """Whether the level's segments hold the stored numbers bit for bit."""
        return CODECS[self.codec].lossless


@dataclass(frozen=True, eq=False)
class Header:
    """A parsed header: ``info`` for every reader, the other fields for decoders.

    Attributes:
        info: What the blob says about itself.
        levels: One for each of ``info.levels``.
        profile_bytes: The profile inside the blob; empty where it names one or needs none.
        kept_bits: ``kept`` as stored; empty where nothing was pruned.
        offset: Position of the first token where lossless levels hold rotated keys; None where keys are un-rotated.
        sink_frames: Difference of each of ``info.sinks`` from the profile's sink row, see ``pack_sink``.
        beginning: The same for the first token of a document that begins a prompt; empty for none.
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
        """Codec of the lossy levels, one at most; None where there are none."""
        return next((level.codec for level in self.levels if not level.lossless), None)

    @cached_property
    def kept(self) -> Kept | None:
        """Masks of a pruned cache; None where nothing was pruned."""
        return unpack_kept(self.kept_bits, self.info.meta.layers, self.info.tokens) if self.kept_bits else None


def header_names(blob: bytes) -> Iterator[str]:
    """Yield every string in a blob's metadata."""
    if not blob.startswith(MAGIC) or len(blob) < PROLOGUE.size:
        return
    fields = PROLOGUE.unpack_from(blob)
    stored = blob[PROLOGUE.size : PROLOGUE.size + fields[_STORED_AT]]
    try:
        values: list[object] = [unpack_json(stored, fields[_RAW_AT], "blob")]
    except CorruptError:
        return
    while values:
        value = values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict):
            values += [*value, *value.values()]
        elif isinstance(value, list):
            values += value
