"""Write a blob's header and segments. Specified in docs/format.md."""

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
"""Just below the largest float32, in which the index stores errors."""


class EncodedSegment(NamedTuple):
    """One encoded segment, and the error of its chunk decoded up to this level.

    Attributes:
        data: The segment's bytes.
        symbols: Number of coded symbols.
        error: Squared error per element in the kind's metric; for layered levels the attention metric, in the
            profile's unit.
        energy: Squared difference per element between chunk and prediction, in the same unit.
    """

    data: bytes
    symbols: int
    error: float
    energy: float


@dataclass(frozen=True, eq=False)
class Draft:
    """A blob's contents, the input of ``pack_blob``; see also ``encode``, ``LevelEncoder`` and ``BlobInfo``.

    Attributes:
        token_ids: None where they are not known.
        chunk_tokens: Tokens of every chunk but the last.
        profile_digest: SHA-256 of the profile; empty where it is inside or none is needed.
        profile_bytes: The profile inside; empty for none.
        segments: ``[chunk][level]``.
        kept: Masks of a pruned cache; None where nothing was pruned.
        sinks: Stored bytes of each attention sink by token index, ascending.
        beginning: Stored bytes of the first token for a document that begins a prompt; empty for none.
    """

    meta: CacheMeta
    token_ids: tuple[int, ...] | None
    tokens: int
    chunk_tokens: int
    levels: tuple[Level, ...]
    profile_digest: str
    profile_bytes: bytes
    segments: Sequence[Sequence[EncodedSegment]]
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
    """Return a whole blob's bytes."""
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
    """Return the metadata's frame and raw length; raises ArgumentError where readers would refuse it."""
    fields = {
        "meta": meta_to_json(draft.meta),
        "levels": [[level.name, level.codec, level.step, level.shift] for level in draft.levels],
        "profile": draft.profile_digest,
        "head_start": draft.prefix_layers,
        "error_to_kl": None if draft.error_to_kl is None else list(draft.error_to_kl),
        "offset": draft.meta.offset if draft.meta.positions == "on" else None,
        "kept_bytes": kept_bytes,
    }
    frame, raw = pack_json(fields | _optional_fields(draft))
    if raw > MAX_JSON_BYTES:
        msg = f"the blob's metadata would take {raw} bytes of {MAX_JSON_BYTES} allowed; use larger blocks of deviations"
        raise ArgumentError(msg)
    return frame, raw


def _optional_fields(draft: Draft) -> dict[str, Any]:
    """Return metadata that few documents have; blobs without it keep their bytes."""
    fields: dict[str, Any] = {}
    record = draft.deviation
    if record is not None and len(record.codes) != -(-draft.tokens // record.block):
        msg = f"{len(record.codes)} deviations of blocks of {record.block} are not those of {draft.tokens} tokens"
        raise ArgumentError(msg)
    if record is not None:
        fields["deviation"] = deviation_to_json(record)
    fields |= _neutral_fields(draft)
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


def _neutral_fields(draft: Draft) -> dict[str, Any]:
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
