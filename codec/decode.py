"""``decode``: a blob, or just the segments that were fetched of it, to a cache."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.codec import _kernels
from kvwire.codec.container import Head, parse_head
from kvwire.codec.layout import shapes_of
from kvwire.codec.positions import rotation
from kvwire.codec.prediction import Text
from kvwire.codec.profile import Profile
from kvwire.codec.segment import MAX_CHUNK_SYMBOLS, ChunkState, decode_segment
from kvwire.codec.transform import scatter, synthesise
from kvwire.errors import ArgumentError, CorruptError, KvwireError, MismatchError, TruncatedError
from kvwire.types import BlobInfo, KVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.profile import Group
    from kvwire.types import SegmentInfo

_FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "float64": torch.float64}


class BlobDecoder:
    """Decodes chunks of one blob, in any order and at any level, into one preallocated cache.

    head: the blob's first bytes, at least ``BlobInfo.head_bytes`` of them, or what ``parse_head`` made of them.
    offset: the position of the document's first token in the prompt; None leaves positions off. dtype None: the dtype
    that the cache was encoded from.
    out: write into these tensors (a slice of a prompt's cache) rather than allocate; device and dtype are then theirs.
    ``cache`` is the output; tokens of chunks not decoded yet are zero.
    """

    def __init__(
        self,
        head: bytes | Head,
        profile: Profile | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        offset: int | None = 0,
        out: KVCache | None = None,
        check: bool = True,
        hidden: Tensor | None = None,
    ) -> None:
        """Parse the head, pick the profile and allocate the output; raises as ``decode`` does."""
        self._head = head if isinstance(head, Head) else parse_head(head, check=check)
        self._check = check
        self._offset = offset
        self._profile = _profile_for(self._head, profile)
        self._text = Text(self._profile, self.info.tokens, self.info.token_ids, hidden)
        self._check_positions()
        if dtype is not None and not dtype.is_floating_point:
            msg = f"a cache holds floating-point numbers, it cannot be decoded to {dtype}"
            raise ArgumentError(msg)
        dtype = dtype or _FLOATS.get(self.info.meta.dtype, torch.float32)
        self.cache = _empty(self.info, device, dtype, offset) if out is None else _checked_out(out, self.info)

    @property
    def info(self) -> BlobInfo:
        """What the blob says about itself."""
        return self._head.info

    def decode_chunk(self, chunk: int, segments: Sequence[bytes]) -> None:
        """Decode levels 0 to ``len(segments) - 1`` of a chunk into ``cache``.

        Raises CorruptError or TruncatedError where a segment is damaged, and then writes nothing; ArgumentError where
        the blob has no such chunk or not as many levels.
        """
        if not 0 <= chunk < self.info.chunks or not 1 <= len(segments) <= len(self.info.segments[chunk]):
            have = [len(row) for row in self.info.segments][chunk : chunk + 1]
            msg = f"{len(segments)} segments for chunk {chunk} of {self.info.chunks}, which has {have or 'no'} levels"
            raise ArgumentError(msg)
        start, stop = self.info.chunk_span(chunk)
        state = ChunkState(stop - start, self._profile.spread, self._profile.tables)
        for segment, data in zip(self.info.segments[chunk], segments, strict=False):
            self._advance(state, segment, data)
        step = self._head.levels[len(segments) - 1].step
        turns = self._turns(start, stop)
        at = 0
        for index, group in enumerate(self._profile.groups):
            expected = self._text.expected(index, start, stop)
            elements = synthesise(_coefficients(state, group, at, step), group, *expected)
            scatter(elements, group, self.cache, self.info.meta, start, turns)
            at += group.rank

    def _advance(self, state: ChunkState, segment: SegmentInfo, data: bytes) -> None:
        """Check one segment's bytes and decode them."""
        name = f"chunk {segment.chunk} level {segment.level}"
        if len(data) < segment.stored:
            msg = f"{name} ends after {len(data)} of {segment.stored} bytes; fetch it again"
            raise TruncatedError(msg, segment.end)
        if len(data) > segment.stored or (self._check and zlib.crc32(data) != segment.crc32):
            msg = f"{name} does not match its length or checksum; fetch it again"
            raise CorruptError(msg)
        shift = self._head.levels[segment.level].shift
        symbols = decode_segment(state, segment.level, shift, data, check=self._check)
        if self._check and symbols != segment.raw:
            msg = f"{name} holds {symbols} symbols, the index says {segment.raw}; fetch it again"
            raise CorruptError(msg)

    def _regimes(self) -> list[int]:
        return sorted({spec.rope for spec in self.info.meta.layers if spec.rope is not None})

    def _check_positions(self) -> None:
        """Fail now, and not in the middle, where a position lies beyond a regime's reach."""
        if self._offset is None:
            return
        for regime in self._regimes():
            rotation(self.info.meta.ropes[regime], self._offset, 1)
            rotation(self.info.meta.ropes[regime], self._offset + self.info.tokens - 1, 1)

    def _turns(self, start: int, stop: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Each regime's cosines and sines for a span of tokens; nothing where positions stay off."""
        if self._offset is None:
            return {}
        return {
            regime: rotation(self.info.meta.ropes[regime], self._offset + start, stop - start)
            for regime in self._regimes()
        }


def decode(
    blob: bytes,
    level: int | str | None = None,
    profile: Profile | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    offset: int | None = 0,
    check: bool = True,
    hidden: Tensor | None = None,
) -> KVCache:
    """Decode a whole blob at one quality level.

    level: index (negative counts from the finest), name, or None for the finest. profile: the one that the blob names;
    not needed where it carries its own. offset: position of the first token; None leaves positions off (keys as float
    of ``dtype``, un-rotated). dtype None: the dtype that the cache was encoded from. check: verify checksums.
    Memory: the output plus one chunk's working set. Raises TruncatedError, CorruptError, FormatVersionError,
    MismatchError (profile missing or wrong), RopeRegimeError (position out of reach), ArgumentError (no such level).
    """
    head = parse_head(blob, check=check)
    info = head.info
    if len(blob) < info.file_bytes:
        msg = f"the blob ends after {len(blob)} of {info.file_bytes} bytes; fetch it again"
        raise TruncatedError(msg, info.file_bytes)
    if len(blob) > info.file_bytes:
        msg = f"{len(blob) - info.file_bytes} bytes follow the blob's end; fetch it again"
        raise CorruptError(msg)
    index = level_index(info, level)
    for chunk, row in enumerate(info.segments):
        if len(row) <= index:
            msg = f"chunk {chunk} lacks level {index}; ask for a lower level"
            raise ArgumentError(msg)
    decoder = BlobDecoder(head, profile, device=device, dtype=dtype, offset=offset, check=check, hidden=hidden)
    for chunk, row in enumerate(info.segments):
        decoder.decode_chunk(chunk, [blob[s.offset : s.end] for s in row[: index + 1]])
    return decoder.cache


def inspect(blob: bytes) -> BlobInfo:
    """What a blob, or its head alone, says about itself; raises as ``read_head`` does. Segments are not looked at."""
    return parse_head(blob).info


def verify(blob: bytes) -> BlobInfo:
    """Check a whole blob, every segment's checksum included, without decoding it.

    Raises TruncatedError, CorruptError or FormatVersionError.
    """
    info = parse_head(blob).info
    if len(blob) < info.file_bytes:
        msg = f"the blob ends after {len(blob)} of {info.file_bytes} bytes; fetch it again"
        raise TruncatedError(msg, info.file_bytes)
    damaged = [s for row in info.segments for s in row if zlib.crc32(blob[s.offset : s.end]) != s.crc32]
    if damaged or len(blob) > info.file_bytes:
        what = f"chunk {damaged[0].chunk} level {damaged[0].level}" if damaged else "what follows the blob's end"
        msg = f"{what} does not match its checksum or length; fetch the blob again or write it anew"
        raise CorruptError(msg)
    return info


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
        found = _inside(head.profile_bytes)
    elif profile is None or profile.digest != wanted:
        have = "none was given" if profile is None else f"{profile.digest[:12]} was given"
        msg = f"the blob was encoded with profile {wanted[:12]}, {have}; pass profile= as stored beside the blob"
        raise MismatchError(msg)
    else:
        found = profile
    found.check_fits(head.info.meta)
    tokens = min(head.info.tokens, head.info.chunk_tokens)
    if tokens * found.rank > MAX_CHUNK_SYMBOLS:
        msg = f"a chunk of {tokens} tokens would hold {tokens * found.rank} symbols, {MAX_CHUNK_SYMBOLS} are allowed"
        raise CorruptError(msg)
    return found


def _inside(data: bytes) -> Profile:
    """The profile that the blob carries; bytes fetched anew would not lengthen it, so it is never "truncated"."""
    try:
        return Profile.from_bytes(data)
    except TruncatedError as error:
        msg = f"the profile inside the blob is damaged: {error}"
        raise CorruptError(msg) from error


def _checked_out(out: KVCache, info: BlobInfo) -> KVCache:
    if shapes_of(out.meta.layers) != shapes_of(info.meta.layers) or out.tokens != info.tokens:
        msg = f"the output has another layout than the blob, or room for {out.tokens} and not {info.tokens} tokens"
        raise ArgumentError(msg)
    return out


def _empty(info: BlobInfo, device: str | torch.device, dtype: torch.dtype, offset: int | None) -> KVCache:
    keys, values = [], []
    try:
        for spec in info.meta.layers:
            tokens = 0 if spec.kind == "none" else info.tokens
            keys.append(torch.zeros(spec.kv_heads, tokens, spec.key_dim, dtype=dtype, device=device))
            values.append(torch.zeros(spec.kv_heads, tokens, spec.value_dim, dtype=dtype, device=device))
    except (RuntimeError, MemoryError) as error:
        msg = f"no room for the decoded cache of {info.tokens} tokens on {device} ({error}); decode it elsewhere"
        raise KvwireError(msg) from error
    meta = replace(info.meta, dtype=str(dtype).removeprefix("torch."))
    meta = meta if offset is None else replace(meta, positions="on", offset=offset)
    return KVCache(keys, values, meta, info.token_ids)


def _coefficients(state: ChunkState, group: Group, start: int, step: float) -> Tensor:
    """A group's coefficients up to its last coded column, ``[tokens, columns]``: the KLT has sorted them."""
    coded = state.classes[start : start + group.rank].nonzero()[0]
    last = int(coded[-1]) + 1 if len(coded) else 0
    coefficients = torch.empty(state.tokens, last, dtype=torch.float32)
    _kernels.dequantise(state.values[:, start : start + last], step, coefficients.numpy())
    return coefficients
