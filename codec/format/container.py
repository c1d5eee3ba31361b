"""Parse a blob's header: prologue, metadata, index, token ids. Specified in docs/format.md.

Headers are untrusted: claimed sizes are checked against the input's length before anything is allocated.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire._json import record
from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS, DEFAULT_METHOD, MAX_CHUNK_SYMBOLS, MAX_LEVELS
from kvwire.codec.format.header import (
    ALIGNMENT,
    BEGINNING,
    CRC_AT,
    ENTRY,
    MAGIC,
    MAX_BITS,
    MAX_CHUNK_TOKENS,
    MAX_HEADER_BYTES,
    MAX_SHIFT,
    MAX_STEP,
    MIN_BITS,
    MISSING,
    NEUTRAL,
    PART,
    PROLOGUE,
    SINKS,
    SOFT,
    VERSION,
    Header,
    Level,
    id_bytes,
    kept_sizes,
    soft_from_json,
    unpack_ids,
)
from kvwire.codec.format.metadata_json import (
    BlobMetadata,
    deviation_of,
    elements_per_token,
    meta_from_json,
    unpack_json,
)
from kvwire.errors import CorruptError, FormatVersionError, TruncatedError
from kvwire.types import BlobInfo, BlobPrefix, LevelInfo, SegmentInfo, digest_tokens

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.types import BlockDeviation, SoftTokensName

_DIGEST_CHARACTERS = 64
_FLAGGED = {
    NEUTRAL: "a neutral prefix", SOFT: "soft tokens", PART: "what it is a part of", SINKS: "attention sinks",
    BEGINNING: "how it begins a prompt",
}  # fmt: skip


def read_header(data: bytes, *, check: bool = True) -> BlobInfo:
    """Read what a blob says about itself from its first bytes.

    Args:
        data: At least the whole header.
        check: Whether to verify the header's checksum.

    Returns:
        Layout, levels, segments and token ids.

    Raises:
        TruncatedError: ``data`` ends too early; ``needed`` says how many bytes it takes.
        CorruptError: The header's checksum or content is wrong.
        FormatVersionError: The version, a flag or a codec is not known.
    """
    return parse_header(data, check=check).info


class _Prologue(NamedTuple):
    version: tuple[int, int]
    header_bytes: int
    file_bytes: int
    meta_stored: int
    meta_raw: int
    tokens: int
    chunk_tokens: int
    levels: int
    bits: int
    profile_bytes: int
    flags: int

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk_tokens)


def parse_header(data: bytes, *, check: bool = True) -> Header:
    """Parse the header in a blob's first bytes; see ``read_header`` for the errors."""
    fields = _prologue(data, check=check)
    parts = _parts(data, fields)
    metadata = parts.metadata
    meta, levels, digest = meta_from_json(metadata.meta), _levels(metadata.levels, fields.levels), metadata.profile
    lossy = any(not level.lossless for level in levels)
    wanted = 0 if parts.profile or not lossy else _DIGEST_CHARACTERS
    if len(digest) != wanted or (parts.profile and not lossy):
        msg = "the blob neither carries a profile nor names one, or has one that it does not need; fetch it again"
        raise CorruptError(msg)
    token_ids = unpack_ids(parts.ids, fields.tokens, fields.bits)
    if check and token_ids is not None and digest_tokens(token_ids) != meta.token_digest:
        raise CorruptError("the blob's token ids are not those that its metadata names; write the document again")
    _check_chunks(fields, levels, elements_per_token(meta.layers))
    segments = _segments(parts.entries, fields, levels)
    infos = _level_infos(levels, parts.entries, fields, elements_per_token(meta.layers), metadata)
    method = next((CODECS[level.codec].method for level in levels if not level.lossless), DEFAULT_METHOD)
    if (parts.sinks or parts.beginning) and not any(level.codec == CODEC_LAYERED for level in levels):
        raise CorruptError("the blob has attention sinks and no level that leaves them out; fetch it again")
    info = BlobInfo(
        fields.version, meta, fields.tokens, fields.chunk_tokens, fields.header_bytes, fields.file_bytes, digest,
        infos, segments, token_ids, method, metadata.prefix_layers, _deviation(metadata, fields.tokens),
        metadata.neutral_prefix or (), _soft(metadata, token_ids),
        None if metadata.prefix is None else BlobPrefix(*metadata.prefix),
        sinks=tuple(parts.sinks),
        opening=metadata.opening,
        can_begin=bool(parts.beginning),
        context_level=metadata.context_level,
    )  # fmt: skip
    if parts.kept:
        kept_sizes(parts.kept, meta.layers, fields.tokens)
    sinks = tuple(parts.sinks.values())
    return Header(info, levels, parts.profile, parts.kept, metadata.offset, sinks, parts.beginning)


def _check_flags(metadata: BlobMetadata, flags: int) -> None:
    """Refuse metadata that is there without its flag, or the other way round."""
    named = {
        NEUTRAL: metadata.neutral_prefix, SOFT: metadata.soft_tokens, PART: metadata.prefix, SINKS: metadata.sinks,
        BEGINNING: metadata.beginning,
    }  # fmt: skip
    for flag, found in named.items():
        if bool(found) != bool(flags & flag):
            raise CorruptError(f"the blob's flags and its metadata disagree on {_FLAGGED[flag]}; fetch it again")


def _check_together(metadata: BlobMetadata, tokens: int) -> None:
    """Refuse fields that no writer puts together."""
    neutral, places = metadata.neutral_prefix or (), [at for at, _ in metadata.sinks or ()]
    if metadata.opening > len(neutral):
        raise CorruptError(
            f"the blob claims {metadata.opening} opening tokens in a neutral prefix of {len(neutral)}; fetch it again"
        )
    if not all(at < following for at, following in pairwise([*places, tokens])):
        raise CorruptError(f"the blob's attention sinks are no ascending places among {tokens} tokens; fetch it again")
    if metadata.beginning and (metadata.kept_bytes or metadata.prefix or not neutral):
        raise CorruptError("the blob has a beginning, and is pruned, a part, or without neutral prefix; fetch it again")


def _deviation(metadata: BlobMetadata, tokens: int) -> BlockDeviation | None:
    try:
        return None if metadata.deviation is None else deviation_of(metadata.deviation, tokens)
    except ValueError as error:
        raise CorruptError(f"the blob's deviations are damaged ({error}); fetch it again") from error


def _soft(metadata: BlobMetadata, token_ids: tuple[int, ...] | None) -> SoftTokensName | None:
    """Read the name of the document's soft tokens, which have the highest token ids."""
    if metadata.soft_tokens is None:
        return None
    try:
        soft = soft_from_json(metadata.soft_tokens)
    except ValueError as error:
        raise CorruptError(f"the blob is damaged: {error}; fetch it again") from error
    if token_ids is None or max(token_ids) >= soft.first + soft.count:
        raise CorruptError("the blob's token ids lie beyond its soft tokens; fetch it again")
    return soft


def _prologue(data: bytes, *, check: bool) -> _Prologue:
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise CorruptError("this is no kvwire blob: it does not begin with the blob's signature")
    if len(data) < PROLOGUE.size:
        raise TruncatedError("the blob ends within its header; fetch it again", PROLOGUE.size)
    (_, major, minor, incompatible, _, header_bytes, file_bytes, crc, meta_stored, meta_raw, tokens, chunk_tokens,
     levels, bits, _, profile_bytes) = PROLOGUE.unpack_from(data)  # fmt: skip
    if major != VERSION[0] or incompatible & ~(NEUTRAL | SOFT | PART | SINKS | BEGINNING):
        msg = f"blob format {major}.{minor} (flags {incompatible:#x}) is newer than this kvwire; upgrade kvwire"
        raise FormatVersionError(msg)
    if not PROLOGUE.size <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes):
        raise CorruptError(f"the blob claims a header of {header_bytes} bytes; fetch it again")
    if len(data) < header_bytes:
        msg = f"the blob's header ends after {len(data)} of {header_bytes} bytes; fetch it again"
        raise TruncatedError(msg, header_bytes)
    if check and _header_crc(data[:header_bytes]) != crc:
        raise CorruptError("the blob's header does not match its checksum; fetch it again")
    fits = 1 <= chunk_tokens <= MAX_CHUNK_TOKENS and 1 <= levels <= MAX_LEVELS
    if not (tokens and fits and (not bits or MIN_BITS <= bits <= MAX_BITS)):
        raise CorruptError("the blob's header holds impossible numbers; fetch it again")
    return _Prologue(
        (major, minor), header_bytes, file_bytes, meta_stored, meta_raw, tokens, chunk_tokens, levels, bits,
        profile_bytes, incompatible,
    )  # fmt: skip


def _header_crc(header: bytes) -> int:
    """Compute the header's CRC-32 with zeros in place of the checksum."""
    crc = crc32(bytes(4), crc32(header[:CRC_AT]))
    return crc32(header[CRC_AT + 4 :], crc)


class _Parts(NamedTuple):
    metadata: BlobMetadata
    entries: NDArray[np.void]
    ids: bytes
    profile: bytes
    kept: bytes
    sinks: dict[int, bytes]
    beginning: bytes


def _parts(data: bytes, fields: _Prologue) -> _Parts:
    """Split the header into its parts, which must fill it; the index is ``[chunks, levels]``."""
    cells = fields.chunks * fields.levels
    sizes = (fields.meta_stored, cells * ENTRY.itemsize, id_bytes(fields.tokens, fields.bits), fields.profile_bytes)
    room = fields.header_bytes - PROLOGUE.size - sum(sizes)
    raw = unpack_json(data[PROLOGUE.size : PROLOGUE.size + fields.meta_stored], fields.meta_raw, "blob")
    metadata = record(raw, BlobMetadata, "the blob's metadata", "fetch it again")
    _check_flags(metadata, fields.flags)
    _check_together(metadata, fields.tokens)
    sinks = dict(metadata.sinks or ())
    room -= sum(sinks.values()) + metadata.beginning
    if not 0 <= room - metadata.kept_bytes < ALIGNMENT:
        raise CorruptError("the blob's header does not add up to its length; fetch it again")
    at, parts = PROLOGUE.size, []
    for size in (*sizes, metadata.kept_bytes, *sinks.values(), metadata.beginning):
        parts.append(bytes(data[at : at + size]))
        at += size
    index = np.frombuffer(parts[1], ENTRY).reshape(fields.chunks, fields.levels)
    _, _, ids, profile, kept, *frames, last = parts
    return _Parts(metadata, index, ids, profile, kept, dict(zip(sinks, frames, strict=True)), last)


def _levels(rows: Any, count: int) -> tuple[Level, ...]:  # noqa: ANN401 - JSON
    try:
        levels = tuple(_level(*row) for row in rows)
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptError(f"the blob's levels are damaged ({error}); fetch it again") from error
    lossless = [level.lossless for level in levels]
    if lossless != sorted(lossless) or len({level.codec for level in levels if not level.lossless}) > 1:
        raise CorruptError("the blob's levels stand in an order that no encoder writes; fetch it again")
    if len(levels) != count:
        raise CorruptError(f"the blob names {len(levels)} levels and holds {count}; fetch it again")
    return levels


def _level(name: Any, codec: Any, step: Any, shift: Any) -> Level:  # noqa: ANN401 - JSON
    if not isinstance(name, str) or type(codec) is not int:
        raise ValueError(f"level {name!r} coded in way {codec!r}")
    if codec not in CODECS:
        raise FormatVersionError(f"the blob's level {name!r} is coded in way {codec}; upgrade kvwire")
    if not CODECS[codec].refines:
        return Level(name, codec=codec)
    if type(step) not in {int, float} or not 1 / MAX_STEP <= float(step) <= MAX_STEP:
        raise ValueError(f"level {name!r} with step {step!r}")
    if type(shift) is not int or abs(shift) > MAX_SHIFT:
        raise ValueError(f"level {name!r} with shift {shift!r}")
    return Level(name, float(step), shift)


def _check_chunks(fields: _Prologue, levels: tuple[Level, ...], elements_of_token: int) -> None:
    """Bound the symbols of a chunk's independent levels; the profile bounds those of layered levels."""
    numbers = min(fields.tokens, fields.chunk_tokens) * elements_of_token
    if numbers > MAX_CHUNK_SYMBOLS and any(level.independent for level in levels):
        msg = f"the blob claims {numbers} numbers a chunk, {MAX_CHUNK_SYMBOLS} are allowed; fetch it again"
        raise CorruptError(msg)


def _segments(
    index: NDArray[np.void], fields: _Prologue, levels: tuple[Level, ...]
) -> tuple[tuple[SegmentInfo, ...], ...]:
    """Read the index; segments must fill the payload without gap or overlap."""
    rows, expected = [], fields.header_bytes
    for chunk, row in enumerate(index.tolist()):
        present = [entry for entry in row if entry[0] != MISSING]
        if present != row[: len(present)]:
            raise CorruptError(f"chunk {chunk} lacks a level below one that it has; fetch the blob's header again")
        cells = []
        for level, (offset, stored, symbols, crc, codec, flags, error, _) in enumerate(present):
            if codec != levels[level].codec or flags:
                msg = f"chunk {chunk} level {level} is coded in way {codec} (flags {flags:#x}); upgrade kvwire"
                raise FormatVersionError(msg)
            if offset != expected or offset + stored > fields.file_bytes:
                raise CorruptError(f"chunk {chunk} level {level} lies where it cannot; fetch the blob's header again")
            expected = offset + stored
            cells.append(SegmentInfo(chunk, level, offset, stored, symbols, crc, codec, error))
        rows.append(tuple(cells))
    if expected != fields.file_bytes:
        raise CorruptError("the blob's segments do not add up to its length; fetch it again")
    return tuple(rows)


def _level_infos(
    levels: tuple[Level, ...],
    index: NDArray[np.void],
    fields: _Prologue,
    elements_of_token: int,
    metadata: BlobMetadata,
) -> tuple[LevelInfo, ...]:
    out, below = [], fields.header_bytes
    chunk_tokens = np.full(fields.chunks, fields.chunk_tokens)
    chunk_tokens[-1] -= fields.chunks * fields.chunk_tokens - fields.tokens
    for level, column in zip(levels, index.T, strict=True):
        present = column[column["offset"] != MISSING]
        size = int(present["stored"].sum(dtype=np.int64))
        cumulative = (fields.header_bytes if level.independent else below) + size
        below = cumulative
        error = _mean_error(column, chunk_tokens)
        kl = None if metadata.error_to_kl is None else _predicted_kl(error, *metadata.error_to_kl)
        bits = 8.0 * cumulative / (fields.tokens * elements_of_token)
        kinds = (level.independent, level.lossless)
        out.append(LevelInfo(level.name, level.step, size, cumulative, bits, error, *kinds, kl))
    context = metadata.context_level
    before = None if context is None else out[min(context, len(out) - 1)].predicted_kl
    if before is not None:  # the error of the rows before coding adds to the error of coding
        out = [e if e.predicted_kl is None else replace(e, predicted_kl=e.predicted_kl + before) for e in out]
    return tuple(out)


def _predicted_kl(error: float, scale: float, exponent: float) -> float:
    """Return ``scale * error^exponent``; raises CorruptError where it is infinite."""
    try:
        kl: float = scale * error**exponent
    except OverflowError:
        kl = math.inf
    if kl == math.inf:
        msg = "the blob's errors and their calibration are impossible together; fetch the blob's header again"
        raise CorruptError(msg)
    return kl


def _mean_error(column: NDArray[np.void], tokens: NDArray[np.int64]) -> float:
    """Return the mean of the chunks' errors, weighted by their tokens."""
    present = column["offset"] != MISSING
    errors, energies = column["error"][present], column["energy"][present]  # not cast yet: casting a NaN may warn
    if not all(np.isfinite(each).all() and (each >= 0).all() for each in (errors, energies)):
        raise CorruptError("the blob's index holds impossible errors; fetch the blob's header again")
    return float(errors.astype(np.float64) @ tokens[present]) / float(tokens[present].sum()) if present.any() else 0.0
