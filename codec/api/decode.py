"""``decode``: a blob, or just the segments that were fetched of it, to a cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.api.inspect import level_index
from kvwire.codec.backend import uses_triton
from kvwire.codec.format.container import CODEC_LANES, CODEC_LOSSLESS, Header, parse_header
from kvwire.codec.format.segment import SegmentState, decode_segment
from kvwire.codec.gpu.staging import ChunkSegments, suits_gpu
from kvwire.codec.gpu.streams import Mark, Pending
from kvwire.codec.kinds.cachegen import CacheGenProfile, decode_cachegen
from kvwire.codec.kinds.lossless_streams import FORMATS, decode_lossless
from kvwire.codec.kinds.outputs import check_out, chunk_of, empty_for, without
from kvwire.codec.kinds.profiles import profile_for
from kvwire.codec.planes import SIDES, planes_of
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.profile.profile import Profile
from kvwire.codec.transform.analysis import gather_planes, scatter_planes
from kvwire.codec.transform.positions import positions_off, rotation
from kvwire.codec.transform.reconstruct import place_group
from kvwire.codec.workers import each
from kvwire.errors import (
    ArgumentError,
    CorruptError,
    FormatVersionError,
    TruncatedError,
)
from kvwire.types import BlobInfo, KVCache, PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.backend import Backend
    from kvwire.codec.format.kept import Kept
    from kvwire.codec.gpu.decode import DeviceDecoder
    from kvwire.types import SegmentInfo

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMATS}
"""Dtypes of caches by name."""


class BlobDecoder:
    """Decodes chunks of one blob, in any order and at any level, into one preallocated cache.

    head: the blob's first bytes, at least ``BlobInfo.header_bytes`` of them, or what ``parse_header`` made of them.
    offset: the position of the document's first token in the prompt; None leaves positions off. dtype None: the dtype
    that the cache was encoded from. hidden: ``engine.prefix_states`` of the document, where the blob needs one. level:
    the only one that will be asked for; a lossless one needs no profile. out: write into these tensors (a slice of a
    prompt's cache, or an engine's pages) rather than allocate; device and dtype are then theirs. Tokens of chunks that
    are not decoded yet are zero, or what was there. backend: which kernels run, see ``backend.Backend``.
    workspace_bytes: device memory of a GPU for chunks under way, None for 15 % of the output; more of it takes more
    chunks at a time, which is sooner for short documents.
    """

    def __init__(  # noqa: PLR0913 - a decoder's settings, each with its default
        self,
        head: bytes | Header,
        profile: Profile | CacheGenProfile | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        offset: int | None = 0,
        out: KVCache | PagedKVCache | None = None,
        check: bool = True,
        hidden: Tensor | None = None,
        level: int | None = None,
        backend: Backend = "auto",
        workspace_bytes: int | None = None,
    ) -> None:
        """Parse the head, pick the profile and allocate the output; raises as ``decode`` does."""
        self._head = head if isinstance(head, Header) else parse_header(head, check=check)
        self._check = check
        self._offset = offset
        alone = level is not None and self.info.levels[level_index(self.info, level)].lossless
        self._profile = None if alone else profile_for(self._head, profile)
        if isinstance(self._profile, Profile):
            self._layered = self._profile
            self._text = TextPredictor(self._profile, self.info.tokens, self.info.token_ids, hidden)
        self._check_positions()
        if dtype is not None and not dtype.is_floating_point:
            msg = f"a cache holds floating-point numbers, it cannot be decoded to {dtype}"
            raise ArgumentError(msg)
        dtype = dtype or DTYPES.get(self.info.meta.dtype, torch.float32)
        if out is not None:
            check_out(out, self.info)
        self._out = empty_for(self._head, device, dtype, offset) if out is None else out
        self._device = self._on_device(backend, workspace_bytes)

    def _on_device(self, backend: Backend, workspace_bytes: int | None) -> DeviceDecoder | None:
        """What decodes layered chunks on a GPU; None where the processor does."""
        devices = {tensor.device for tensor in (*self._out.keys, *self._out.values) if tensor.numel()}
        if len(devices) > 1 and backend == "triton":
            msg = f"Triton decodes onto one device, the output lies on {len(devices)}; use backend='numba'"
            raise ArgumentError(msg)
        layered = isinstance(self._profile, Profile) and any(each.codec == CODEC_LANES for each in self._head.levels)
        if len(devices) > 1 or not uses_triton(backend, devices.pop()) or not layered:
            return None
        from kvwire.codec.gpu.decode import DeviceDecoder  # needs Triton

        return DeviceDecoder(
            self._head,
            self._text,
            self._out,
            offset=self._offset,
            check=self._check,
            workspace_bytes=workspace_bytes,
            finish=self._drop_pruned if self._head.kept else None,
        )

    @property
    def on_gpu(self) -> bool:
        """Whether layered chunks are decoded by Triton's kernels."""
        return self._device is not None

    @property
    def cache(self) -> KVCache:
        """The output; a contiguous copy of it where it lies in pages."""
        return self._out.read() if isinstance(self._out, PagedKVCache) else self._out

    @property
    def info(self) -> BlobInfo:
        """What the blob says about itself."""
        return self._head.info

    @property
    def kept(self) -> Kept | None:
        """What a pruned cache still holds, a bool ``[kv_heads, tokens]`` for each layer; see ``KVCache``."""
        return self._head.kept

    def decode_chunk(self, chunk: int, segments: Sequence[bytes], level: int | None = None) -> None:
        """Decode a chunk into the output from what ``BlobInfo.reads`` names.

        level: None for the one that as many layered segments lead to. Chunks may be decoded in any order, and several
        at a time from different threads. Raises CorruptError or TruncatedError where a segment is damaged, and then
        writes nothing; ArgumentError where the blob has no such chunk or level.
        """
        self.submit([(chunk, segments, level)]).wait()

    def submit(self, chunks: Sequence[tuple[int, Sequence[bytes], int | None]]) -> Pending:
        """Decode chunks, each with its segments and level as in ``decode_chunk``; a GPU works on after this returns.

        Raises as ``decode_chunk`` does where the host sees what is wrong, else ``Pending.wait`` does. On the processor
        all is done on return. A GPU waits for what the caller's stream had been given when the decoder was made;
        nothing may still read what the chunks will overwrite.
        """
        pieces = [self._piece(*each) for each in chunks]
        suited = [self._device is not None and self._suits_gpu(piece) for piece in pieces]
        for piece, suits in zip(pieces, suited, strict=True):
            if not suits:
                self._decode_here(piece)
        if self._device is None or not any(suited):
            return Pending(Mark(), [Mark() for _ in self.info.meta.layers], [])
        return self._device.decode([piece for piece, suits in zip(pieces, suited, strict=True) if suits])

    def _suits_gpu(self, piece: ChunkSegments) -> bool:
        symbols = [segment.raw for segment in self.info.reads(piece.chunk, piece.level)]
        return self._head.levels[piece.level].codec == CODEC_LANES and suits_gpu(piece, symbols)

    def _piece(self, chunk: int, segments: Sequence[bytes], level: int | None) -> ChunkSegments:
        """Check a chunk's segments against the index."""
        level = len(segments) - 1 if level is None else level
        have = self.info.segments[chunk : chunk + 1]
        if (
            chunk < 0
            or not have
            or not 0 <= level < len(have[0])
            or len(self.info.reads(chunk, level)) != len(segments)
        ):
            levels = len(have[0]) if chunk >= 0 and have else "no"
            msg = (
                f"{len(segments)} segments for level {level} of chunk {chunk}; the blob has {self.info.chunks} chunks, "
                f"this one {levels} levels"
            )
            raise ArgumentError(msg)
        for segment, data in zip(self.info.reads(chunk, level), segments, strict=True):
            self._check_bytes(segment, data)
        if self._profile is None and self._head.levels[level].codec != CODEC_LOSSLESS:
            msg = f"the decoder was made for a lossless level alone, not for level {level}; make one without level="
            raise ArgumentError(msg)
        return ChunkSegments(chunk, level, segments)

    def _decode_here(self, piece: ChunkSegments) -> None:
        """On the processor."""
        start, stop = self.info.chunk_span(piece.chunk)
        out, at = self._out, start
        if isinstance(out, PagedKVCache):
            out, at = chunk_of(out, stop - start), 0
        codec = self._head.levels[piece.level].codec
        if codec == CODEC_LANES:
            self._decode_layered(piece, out, at)
        elif codec == CODEC_LOSSLESS:
            self._decode_lossless(piece, out, at)
        else:
            self._decode_cachegen(piece, out, at)
        if isinstance(self._out, PagedKVCache):
            self._out.write(start, out)
        if self._head.kept:
            self._drop_pruned(start, stop)

    def _decode_layered(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        text, profile = self._text, self._layered
        start, stop = self.info.chunk_span(piece.chunk)
        reads = self.info.reads(piece.chunk, piece.level)
        state = SegmentState(stop - start, profile.spread, profile.tables)
        for segment, data in zip(reads, piece.segments, strict=True):
            self._advance(state, segment, data)
        step = self._head.levels[reads[-1].level].step
        cos_sin = self._cos_sin(start, stop)
        first = 0
        for index, group in enumerate(profile.groups):
            expected = text.expected(index, start, stop)
            columns = slice(first, first + group.rank)
            place_group(state, group, columns, step, expected, out, self.info.meta, at, cos_sin)
            first += group.rank

    def _decode_cachegen(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        profile = cast("CacheGenProfile", self._profile)  # the constructor has seen to it
        start, stop = self.info.chunk_span(piece.chunk)
        blocks = decode_cachegen(piece.segments[0], profile, piece.level, stop - start)
        cos_sin = self._cos_sin(start, stop)
        for block, elements in zip(profile.blocks, blocks, strict=True):
            scatter_planes(elements, ((block.side, block.layer),), out, self.info.meta, at, cos_sin)

    def _decode_lossless(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        """Stored numbers as they are where the output stands where they stood, else moved."""
        start, stop = self.info.chunk_span(piece.chunk)
        layers = self.info.meta.layers
        dtype = DTYPES.get(self.info.meta.dtype)
        if dtype is None:
            msg = f"the blob's lossless level holds numbers of type {self.info.meta.dtype!r}; upgrade kvwire"
            raise FormatVersionError(msg)
        pairs = decode_lossless(piece.segments[0], stop - start, layers, dtype)
        if self._head.offset != self._offset:
            stood = self._head.offset
            meta = replace(self.info.meta, positions="off" if stood is None else "on", offset=(stood or 0) + start)
            moved = positions_off(KVCache([k for k, _ in pairs], [v for _, v in pairs], meta))
            cos_sin = self._cos_sin(start, stop)
            for plane in planes_of(layers):
                if layers[plane[1]].rotary(plane[0]) is None:
                    continue
                elements = gather_planes(moved, (plane,), 0, stop - start)
                scatter_planes(elements, (plane,), out, self.info.meta, at, cos_sin)
        stays = self._head.offset == self._offset
        for side, layer in planes_of(layers):
            if stays or layers[layer].rotary(side) is None:
                target = (out.keys if side == "key" else out.values)[layer]
                target[:, at : at + stop - start] = pairs[layer][side == "value"]

    def _drop_pruned(self, start: int, stop: int) -> None:
        """Entries that the cache never held are zero, whatever was decoded there."""
        for layer, mask in enumerate(self._head.kept or ()):
            if mask is None:
                continue
            for side in SIDES:
                tensor = (self._out.keys if side == "key" else self._out.values)[layer]
                gone = ~mask[:, start:stop, None].to(tensor.device)
                if isinstance(self._out, PagedKVCache):
                    part = self._out.take(side, layer, start, stop)
                    self._out.put(side, layer, start, without(part, gone))
                else:
                    without(tensor[:, start:stop], gone)

    def _check_bytes(self, segment: SegmentInfo, data: bytes) -> None:
        name = f"chunk {segment.chunk} level {segment.level}"
        if len(data) < segment.stored:
            msg = f"{name} ends after {len(data)} of {segment.stored} bytes; fetch it again"
            raise TruncatedError(msg, segment.end)
        if len(data) > segment.stored or (self._check and crc32(data) != segment.crc32):
            msg = f"{name} does not match its length or checksum; fetch it again"
            raise CorruptError(msg)

    def _advance(self, state: SegmentState, segment: SegmentInfo, data: bytes) -> None:
        """Decode one segment's symbols."""
        shift = self._head.levels[segment.level].shift
        symbols = decode_segment(state, segment.level, shift, data, check=self._check)
        if self._check and symbols != segment.raw:
            name = f"chunk {segment.chunk} level {segment.level}"
            msg = f"{name} holds {symbols} symbols, the index says {segment.raw}; fetch it again"
            raise CorruptError(msg)

    def _regimes(self) -> list[int]:
        indices = {index for spec in self.info.meta.layers for index in (spec.rope, spec.value_rope)}
        return sorted(index for index in indices if index is not None)

    def _check_positions(self) -> None:
        """Fail now, and not in the middle, where a position lies beyond a regime's reach."""
        if self._offset is None:
            return
        for regime in self._regimes():
            rotation(self.info.meta.ropes[regime], self._offset, 1)
            rotation(self.info.meta.ropes[regime], self._offset + self.info.tokens - 1, 1)

    def _cos_sin(self, start: int, stop: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Each regime's cosines and sines for a span of tokens; nothing where positions stay off."""
        if self._offset is None:
            return {}
        return {
            regime: rotation(self.info.meta.ropes[regime], self._offset + start, stop - start)
            for regime in self._regimes()
        }


def decode(  # noqa: PLR0913 - a decoder's settings, each with its default
    blob: bytes,
    level: int | str | None = None,
    profile: Profile | CacheGenProfile | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    offset: int | None = 0,
    check: bool = True,
    hidden: Tensor | None = None,
    threads: int | None = None,
    backend: Backend = "auto",
) -> KVCache:
    """Decode a whole blob at one quality level.

    level: index (negative counts from the last), name, or None for the finest of the layered ones. profile: the one
    that the blob names; not needed where it carries its own, nor for a lossless level. offset: position of the first
    token; None leaves positions off (keys as float of ``dtype``, un-rotated). dtype None: the dtype that the cache was
    encoded from. check: verify checksums. hidden: ``engine.prefix_states`` of the document, where the blob was encoded
    with one. threads: chunks decoded at a time on the processor, None for one on every core. backend: which kernels
    run, see ``backend.Backend``: by default Triton's on a GPU.
    Memory: the output plus each thread's working set of a chunk. Raises TruncatedError, CorruptError,
    FormatVersionError, MismatchError (profile missing or wrong), RopeRegimeError (position out of reach), ArgumentError
    (no such level).
    """
    head = parse_header(blob, check=check)
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
    decoder = BlobDecoder(
        head,
        profile,
        device=device,
        dtype=dtype,
        offset=offset,
        check=check,
        hidden=hidden,
        level=index,
        backend=backend,
    )
    view = memoryview(blob)

    def segments(chunk: int) -> list[bytes]:
        return [bytes(view[s.offset : s.end]) for s in info.reads(chunk, index)]

    if decoder.on_gpu and not info.levels[index].independent:
        decoder.submit([(chunk, segments(chunk), index) for chunk in range(info.chunks)]).wait()
    else:
        each(lambda chunk: decoder.decode_chunk(chunk, segments(chunk), index), range(info.chunks), threads)
    return decoder.cache
