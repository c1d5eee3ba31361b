"""A blob's bytes from its header and segments. Exactly specified in docs/format.md."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.format.header import (
    ALIGNMENT,
    BEGINNING,
    CRC_AT,
    ENTRY,
    MAGIC,
    MAX_HEADER_BYTES,
    NEUTRAL,
    PART,
    PROLOGUE,
    SINKS,
    SOFT,
    VERSION,
    pack_ids,
    pack_kept,
    soft_to_json,
)
from kvwire.codec.format.metadata_json import (
    MAX_JSON_BYTES,
    MAX_NEUTRAL,
    MAX_WIDTH,
    deviation_to_json,
    elements_per_token,
    meta_to_json,
    pack_json,
)
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvwire.codec.format.header import Kept, Level
    from kvwire.types import BlobPrefix, BlockDeviation, CacheMeta, SoftTokensName

_LARGEST_ERROR = 1e38
"""Float32 holds it."""


class Coded(NamedTuple):
    """One segment as encoded, and how far the chunk is off once it is decoded up to here.

    Attributes:
        data: The segment's bytes.
        symbols: How many it codes.
        error: Squared error for each element in the kind's metric; for layered levels the attention metric, in the
            profile's unit.
        energy: Of the same unit, what the profile does not expect of the chunk.
    """

    data: bytes
    symbols: int
    error: float
    energy: float


@dataclass(frozen=True, eq=False)
class Draft:
    """What the encoder hands to ``pack_blob``.

    Attributes:
        meta: Of the cache.
        token_ids: None where they are not known.
        tokens: Of the document.
        chunk_tokens: Tokens of every chunk but the last.
        levels: In the blob's order.
        profile_digest: Name of the profile; empty where it is inside or none is needed.
        profile_bytes: The profile inside; empty for none.
        segments: ``[chunk][level]``.
        prefix_layers: The profile's own.
        error_to_kl: The profile's own.
        kept: What a pruned cache holds; None where nothing was pruned.
        deviation: How far tokens move behind other documents; None where not measured.
        neutral_prefix: Token ids that the document was computed behind.
        soft_tokens: Which soft tokens some of its token ids are.
        prefix: What of the document the tokens stand behind; None: nothing, they are all of it.
        sinks: What is stored of each attention sink, by its place; in order.
        opening: How many of ``neutral_prefix``, the first ones, the tokenizer puts in front of any text.
        beginning: What is stored of the first token where the document begins a prompt; empty for nothing.
        context_level: See ``BlobInfo``.
    """

    meta: CacheMeta
    token_ids: tuple[int, ...] | None
    tokens: int
    chunk_tokens: int
    levels: tuple[Level, ...]
    profile_digest: str
    profile_bytes: bytes
    segments: Sequence[Sequence[Coded]]
    prefix_layers: int = 0
    error_to_kl: tuple[float, float] | None = None
    kept: Kept | None = None
    deviation: BlockDeviation | None = None
    neutral_prefix: tuple[int, ...] = ()
    soft_tokens: SoftTokensName | None = None
    prefix: BlobPrefix | None = None
    sinks: Mapping[int, bytes] = field(default_factory=dict)
    opening: int = 0
    beginning: bytes = b""
    context_level: int | None = None


def pack_blob(draft: Draft) -> bytes:
    """Lay out a whole blob."""
    if elements_per_token(draft.meta.layers) > MAX_WIDTH:
        msg = f"the cache has more than the {MAX_WIDTH} elements for a token that readers accept; split its layers"
        raise ArgumentError(msg)
    kept = b"" if draft.kept is None else pack_kept(draft.kept, draft.meta.layers, draft.tokens)
    metadata, metadata_raw = _metadata(draft, len(kept))
    bits, ids = pack_ids(draft.token_ids, draft.tokens)
    cells = len(draft.segments) * len(draft.levels)
    used = PROLOGUE.size + len(metadata) + cells * ENTRY.itemsize + len(ids) + len(draft.profile_bytes) + len(kept)
    sinks = b"".join(draft.sinks.values()) + draft.beginning
    used += len(sinks)
    header_bytes = -(-used // ALIGNMENT) * ALIGNMENT
    if header_bytes > MAX_HEADER_BYTES:
        msg = f"the blob's header would take {header_bytes} bytes of {MAX_HEADER_BYTES} allowed; split the document"
        raise ArgumentError(msg)
    index, end = _index(draft, header_bytes)
    flags = (NEUTRAL if draft.neutral_prefix else 0) | (SOFT if draft.soft_tokens else 0)
    flags |= (PART if draft.prefix else 0) | (SINKS if draft.sinks else 0) | (BEGINNING if draft.beginning else 0)
    prologue = PROLOGUE.pack(
        MAGIC, *VERSION, flags, 0, header_bytes, end, 0, len(metadata), metadata_raw,
        draft.tokens, draft.chunk_tokens, len(draft.levels), bits, 0, len(draft.profile_bytes),
    )  # fmt: skip
    header = bytearray(
        prologue + metadata + index.tobytes() + ids + draft.profile_bytes + kept + sinks + bytes(header_bytes - used)
    )
    header[CRC_AT : CRC_AT + 4] = struct.pack("<I", crc32(header))
    return bytes(header) + b"".join(coded.data for chunk in draft.segments for coded in chunk)


def _metadata(draft: Draft, kept_bytes: int) -> tuple[bytes, int]:
    """The metadata's frame and its raw length; raises ArgumentError where readers would not take it."""
    fields = {
        "meta": meta_to_json(draft.meta),
        "levels": [[level.name, level.codec, level.step, level.shift] for level in draft.levels],
        "profile": draft.profile_digest,
        "head_start": draft.prefix_layers,
        "error_to_kl": None if draft.error_to_kl is None else list(draft.error_to_kl),
        "offset": draft.meta.offset if draft.meta.positions == "on" else None,
        "kept_bytes": kept_bytes,
    }
    frame, raw = pack_json(fields | _rare(draft))
    if raw > MAX_JSON_BYTES:
        msg = f"the blob's metadata would take {raw} bytes of {MAX_JSON_BYTES} allowed; use larger blocks of deviations"
        raise ArgumentError(msg)
    return frame, raw


def _rare(draft: Draft) -> dict[str, Any]:
    """What few documents have: a blob without stays byte for byte what it was."""
    fields: dict[str, Any] = {}
    record = draft.deviation
    if record is not None and len(record.codes) != -(-draft.tokens // record.block):
        msg = f"{len(record.codes)} deviations of blocks of {record.block} are not those of {draft.tokens} tokens"
        raise ArgumentError(msg)
    if record is not None:
        fields["deviation"] = deviation_to_json(record)
    fields |= _behind(draft)
    if draft.soft_tokens is not None:
        fields["soft_tokens"] = soft_to_json(draft.soft_tokens)
    if draft.prefix:
        fields["prefix"] = [draft.prefix.tokens, draft.prefix.token_digest, draft.prefix.document]
    if draft.sinks:
        fields["sinks"] = [[at, len(frame)] for at, frame in draft.sinks.items()]
    if draft.beginning:
        fields["beginning"] = len(draft.beginning)
    if draft.context_level is not None:
        fields["context_level"] = draft.context_level
    return fields


def _behind(draft: Draft) -> dict[str, Any]:
    """The neutral prefix, and how much of it opens every text."""
    fields: dict[str, Any] = {}
    if len(draft.neutral_prefix) > MAX_NEUTRAL:
        raise ArgumentError(f"a neutral prefix takes {MAX_NEUTRAL} tokens at most, got {len(draft.neutral_prefix)}")
    if draft.neutral_prefix:
        fields["neutral_prefix"] = list(draft.neutral_prefix)
    if not 0 <= draft.opening <= len(draft.neutral_prefix):
        msg = f"{draft.opening} opening tokens are not the first of a neutral prefix of {len(draft.neutral_prefix)}"
        raise ArgumentError(msg)
    if draft.opening:
        fields["opening"] = draft.opening
    return fields


def _index(draft: Draft, offset: int) -> tuple[NDArray[np.void], int]:
    index = np.zeros((len(draft.segments), len(draft.levels)), ENTRY)
    for row, chunk in enumerate(draft.segments):
        for level, (data, symbols, error, energy) in enumerate(chunk):
            codec = draft.levels[level].codec
            sizes = (min(error, _LARGEST_ERROR), min(energy, _LARGEST_ERROR))
            index[row, level] = (offset, len(data), symbols, crc32(data), codec, 0, *sizes)
            offset += len(data)
    return index, offset
