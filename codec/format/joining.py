"""Join the headers of a document's parts into one header of the whole document.

Parts follow in the order of their tokens; each names all tokens before its own by their digest. The joined header
describes a virtual blob: the parts' headers in a row, then their payloads.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.format.header import Header
from kvwire.codec.format.metadata_json import elements_per_token
from kvwire.errors import CorruptError, MismatchError
from kvwire.types import BlobPrefix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types import BlobInfo, LevelInfo, SegmentInfo

_ADVICE = "encode the whole document anew"


def join_headers(headers: Sequence[Header]) -> Header:
    """Join the parts' headers into one that decodes chunks of all parts."""
    first, info = headers[0], join_infos([header.info for header in headers])
    for header in headers:
        start = 0 if header.info.prefix is None else header.info.prefix.tokens
        offset = None if first.offset is None else first.offset + start
        if header.profile_bytes or header.kept_bits or header.levels != first.levels:
            msg = f"the parts of the document are coded in different ways, or hold what no part may: {_ADVICE}"
            raise MismatchError(msg)
        if header.offset != offset and any(level.lossless for level in header.levels):
            raise MismatchError(f"a part of the document begins at position {header.offset}, not {offset}: {_ADVICE}")
    frames = tuple(frame for header in headers for frame in header.sink_frames)
    return Header(info, first.levels, b"", offset=first.offset, sink_frames=frames, beginning=first.beginning)


def join_infos(infos: Sequence[BlobInfo]) -> BlobInfo:
    """Join the parts' ``BlobInfo``."""
    first = infos[0]
    ids, digest = _chained(infos)
    for info in infos:
        if _shared_settings(info) != _shared_settings(first):
            raise MismatchError(f"the parts of the document are of several models, profiles or ladders: {_ADVICE}")
    starts, segments = _placed(infos)
    return replace(
        first,
        meta=replace(first.meta, token_digest=digest),
        tokens=len(ids),
        chunk_tokens=max(info.chunk_tokens for info in infos),
        header_bytes=sum(info.header_bytes for info in infos),
        file_bytes=sum(info.file_bytes for info in infos),
        levels=tuple(_joined(infos, level) for level in range(len(first.levels))),
        segments=segments,
        token_ids=ids,
        deviation=None,
        chunk_starts=starts,
        sinks=_sinks(infos),
        context_level=min((each.context_level for each in infos if each.context_level is not None), default=None),
    )


def _shared_settings(info: BlobInfo) -> tuple[object, ...]:
    names = [level.name for level in info.levels]
    behind = (info.prefix_layers, info.neutral_prefix, info.opening, info.soft_tokens)
    return replace(info.meta, token_digest=""), info.profile_digest, names, behind


def _chained(infos: Sequence[BlobInfo]) -> tuple[tuple[int, ...], str]:
    """Return all token ids and their digest; raises CorruptError where a part does not follow those before it."""
    ids: list[int] = []
    digest = hashlib.sha256()
    for number, info in enumerate(infos):
        expected = BlobPrefix(len(ids), digest.hexdigest()) if number else None
        if (info.prefix and replace(info.prefix, document="")) != expected:
            found = "no part" if info.prefix is None else f"behind {info.prefix.tokens} tokens"
            raise CorruptError(
                f"part {number} of the document is not the one behind its first {len(ids)} tokens ({found}): {_ADVICE}"
            )
        if info.token_ids is None:
            raise CorruptError(f"part {number} of the document does not say its token ids: {_ADVICE}")
        ids += info.token_ids
        digest.update(np.asarray(info.token_ids, "<u4").tobytes())
    return tuple(ids), digest.hexdigest()


def _sinks(infos: Sequence[BlobInfo]) -> tuple[int, ...]:
    starts = itertools.accumulate((info.tokens for info in infos), initial=0)
    return tuple(start + at for start, info in zip(starts, infos, strict=False) for at in info.sinks)


def _placed(infos: Sequence[BlobInfo]) -> tuple[tuple[int, ...], tuple[tuple[SegmentInfo, ...], ...]]:
    """Return each chunk's first token, and its segments with the document's chunk numbers and offsets."""
    starts: list[int] = []
    rows: list[tuple[SegmentInfo, ...]] = []
    tokens, at = 0, sum(info.header_bytes for info in infos)
    for info in infos:
        shift, chunks = at - info.header_bytes, len(rows)
        starts += [tokens + info.chunk_span(chunk)[0] for chunk in range(info.chunks)]
        rows += [
            tuple(replace(each, chunk=chunks + each.chunk, offset=each.offset + shift) for each in row)
            for row in info.segments
        ]
        tokens += info.tokens
        at += info.file_bytes - info.header_bytes
    return tuple(starts), tuple(rows)


def _joined(infos: Sequence[BlobInfo], number: int) -> LevelInfo:
    """Join one level of all parts: bytes are summed, errors averaged over tokens."""
    levels, tokens = [info.levels[number] for info in infos], sum(info.tokens for info in infos)
    cumulative = sum(level.cumulative_bytes for level in levels)

    def mean(values: Sequence[float]) -> float:
        return sum(value * info.tokens for value, info in zip(values, infos, strict=True)) / tokens

    kl = [level.predicted_kl for level in levels if level.predicted_kl is not None]
    return replace(
        levels[0],
        bytes=sum(level.bytes for level in levels),
        cumulative_bytes=cumulative,
        bits_per_element=8.0 * cumulative / (tokens * elements_per_token(infos[0].meta.layers)),
        measured_error=mean([level.measured_error for level in levels]),
        predicted_kl=mean(kl) if len(kl) == len(levels) else None,
    )
