"""``decode``: a blob, or just the segments that were fetched of it, to a cache."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.codec import _kernels
from kvwire.codec.container import Head, parse_head
from kvwire.codec.positions import rotation
from kvwire.codec.profile import Profile
from kvwire.codec.segment import ChunkState, decode_segment
from kvwire.codec.transform import scatter, synthesise
from kvwire.errors import ArgumentError, CorruptError, MismatchError, TruncatedError
from kvwire.types import BlobInfo, KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.profile import Group
    from kvwire.types import CacheMeta

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class BlobDecoder:
    """Decodes chunks of one blob, in any order and at any level, into one preallocated cache.

    head: the blob's first bytes, at least ``BlobInfo.head_bytes`` of them. offset: the position of the document's first
    token in the prompt; None leaves positions off. dtype None: the dtype that the cache was encoded from.
    out: write into these tensors (a slice of a prompt's cache) rather than allocate; device and dtype are then theirs.
    ``cache`` is the output; tokens of chunks not decoded yet are zero.
    """

    def __init__(
        self,
        head: bytes,
        profile: Profile | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        offset: int | None = 0,
        out: KVCache | None = None,
        check: bool = True,
    ) -> None:
        """Parse the head, pick the profile and allocate the output; raises as ``decode`` does."""
        self._head: Head = parse_head(head, check=check)
        self._check = check
        self._profile = _profile_for(self._head, profile)
        meta = self._head.info.meta
        dtype = dtype or _FLOATS.get(meta.dtype, torch.float32)
        self.cache = out or _empty(meta, self._head.info, device, dtype, offset)
        if self.cache.tokens != self._head.info.tokens:
            msg = f"the output has room for {self.cache.tokens} tokens, the blob holds {self._head.info.tokens}"
            raise ArgumentError(msg)
        used = {spec.rope for spec in meta.layers if spec.rope is not None}
        tokens = self._head.info.tokens
        self._turns = {} if offset is None else {r: rotation(meta.ropes[r], offset, tokens) for r in sorted(used)}

    @property
    def info(self) -> BlobInfo:
        """What the blob says about itself."""
        return self._head.info

    def decode_chunk(self, chunk: int, segments: Sequence[bytes]) -> None:
        """Decode levels 0 to ``len(segments) - 1`` of a chunk into ``cache``; raises CorruptError, and then writes nothing."""
        if not 1 <= len(segments) <= len(self.info.segments[chunk]):
            msg = f"chunk {chunk} has levels 0 to {len(self.info.segments[chunk]) - 1}, got {len(segments)} segments"
            raise ArgumentError(msg)
        start, stop = self.info.chunk_span(chunk)
        state = ChunkState(stop - start, self._profile.spread, self._profile.tables)
        for segment, data in zip(self.info.segments[chunk], segments, strict=False):
            self._check_segment(segment.chunk, segment.level, segment.stored, segment.crc32, data)
            decode_segment(state, segment.level, self._head.levels[segment.level].shift, data, check=self._check)
        step = self._head.levels[len(segments) - 1].step
        turns = {regime: (cos[start:stop], sin[start:stop]) for regime, (cos, sin) in self._turns.items()}
        at = 0
        for group in self._profile.groups:
            scatter(_elements(state, group, at, step), group, self.cache, start, turns)
            at += group.rank

    def _check_segment(self, chunk: int, level: int, stored: int, crc32: int, data: bytes) -> None:
        if len(data) != stored:
            msg = f"chunk {chunk} level {level} has {len(data)} of {stored} bytes; fetch it again"
            raise TruncatedError(msg, stored)
        if self._check and zlib.crc32(data) != crc32:
            msg = f"chunk {chunk} level {level} does not match its checksum; fetch it again"
            raise CorruptError(msg)


def decode(
    blob: bytes,
    level: int | str | None = None,
    profile: Profile | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    offset: int | None = 0,
    check: bool = True,
) -> KVCache:
    """Decode a whole blob at one quality level.

    level: index (negative counts from the finest), name, or None for the finest. profile: the one that the blob names;
    not needed where it carries its own. offset: position of the first token; None leaves positions off (keys as float
    of ``dtype``, un-rotated). dtype None: the dtype that the cache was encoded from. check: verify checksums.
    Memory: the output plus one chunk's working set. Raises TruncatedError, CorruptError, FormatVersionError,
    MismatchError (profile missing or wrong), ArgumentError (no such level).
    """
    decoder = BlobDecoder(blob, profile, device=device, dtype=dtype, offset=offset, check=check)
    info = decoder.info
    if len(blob) < info.file_bytes:
        msg = f"the blob ends after {len(blob)} of {info.file_bytes} bytes; fetch it again"
        raise TruncatedError(msg, info.file_bytes)
    index = level_index(info, level)
    view = memoryview(blob)
    for chunk, row in enumerate(info.segments):
        if len(row) <= index:
            msg = f"chunk {chunk} lacks level {index}; ask for a lower level"
            raise ArgumentError(msg)
        decoder.decode_chunk(chunk, [bytes(view[s.offset : s.end]) for s in row[: index + 1]])
    return decoder.cache


def inspect(blob: bytes) -> BlobInfo:
    """What a blob, or its head alone, says about itself; raises as ``read_head`` does."""
    return parse_head(blob).info


def level_index(info: BlobInfo, level: int | str | None) -> int:
    """Index of a level given by index, name or None (the finest); raises ArgumentError naming the levels that exist."""
    names = [entry.name for entry in info.levels]
    if level is None:
        return len(names) - 1
    if isinstance(level, str) and level in names:
        return names.index(level)
    if isinstance(level, int) and -len(names) <= level < len(names):
        return level % len(names)
    msg = f"no level {level!r}; this blob has {', '.join(f'{i} ({name})' for i, name in enumerate(names))}"
    raise ArgumentError(msg)


def _profile_for(head: Head, profile: Profile | None) -> Profile:
    wanted = head.info.profile_digest
    if not wanted:
        found = Profile.from_bytes(head.profile_bytes)
    elif profile is None or profile.digest != wanted:
        have = "none was given" if profile is None else f"{profile.digest[:12]} was given"
        msg = f"the blob was encoded with profile {wanted[:12]}, {have}; pass profile= as stored beside the blob"
        raise MismatchError(msg)
    else:
        found = profile
    found.check_fits(head.info.meta)
    return found


def _empty(meta: CacheMeta, info: BlobInfo, device: str | torch.device, dtype: torch.dtype, offset: int | None) -> KVCache:
    keys, values = [], []
    for spec in meta.layers:
        tokens = 0 if spec.kind == "none" else info.tokens
        keys.append(torch.zeros(spec.kv_heads, tokens, spec.key_dim, dtype=dtype, device=device))
        values.append(torch.zeros(spec.kv_heads, tokens, spec.value_dim, dtype=dtype, device=device))
    placed = replace(meta, positions="off" if offset is None else "on", offset=offset or 0, dtype=str(dtype)[6:])
    return KVCache(keys, values, placed, info.token_ids)


def _elements(state: ChunkState, group: Group, start: int, step: float) -> Tensor:
    """A group's elements ``[tokens, width]`` from its coded columns: up to the last one, which the KLT's order makes nearly all of them."""
    coded = state.classes[start : start + group.rank].nonzero()[0]
    last = int(coded[-1]) + 1 if len(coded) else 0
    coefficients = torch.empty(state.tokens, last, dtype=torch.float32)
    _kernels.dequantise(state.values[:, start : start + last], step, coefficients.numpy())
    return synthesise(coefficients, group, slice(0, last))
