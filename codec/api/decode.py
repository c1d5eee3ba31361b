"""Decode a whole blob (``decode``) or the segments that have arrived (``BlobDecoder``) into a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from isal.isal_zlib import crc32  # zlib's checksum, some 15 times as fast

from kvwire.codec.api.inspect import level_index
from kvwire.codec.backend import uses_triton
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.header import Header
from kvwire.codec.format.segment import ChunkSegments
from kvwire.codec.gpu.streams import Pending, StreamEvent
from kvwire.codec.kinds.base import kind_of, profile_for
from kvwire.codec.kinds.outputs import (
    DTYPES,
    check_claim,
    check_out,
    check_positions,
    drop_pruned,
    empty_chunk,
    empty_for,
)
from kvwire.codec.kinds.requests import DecodeRequest
from kvwire.codec.workers import map_parallel
from kvwire.errors import ArgumentError, CorruptError, TruncatedError
from kvwire.types import KVCache, PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.backend import Backend
    from kvwire.codec.format.header import Kept
    from kvwire.codec.kinds.base import LevelDecoder
    from kvwire.codec.kinds.outputs import SinkPlacer
    from kvwire.codec.kinds.requests import AnyProfile
    from kvwire.codec.profile.profile import Profile
    from kvwire.types import BlobInfo, SegmentInfo


class BlobDecoder:
    """Decodes chunks of one blob, in any order and at any level, into one preallocated cache.

    Tokens of chunks that are not decoded yet are zero; in a given ``out`` they are unchanged.
    """

    def __init__(  # noqa: PLR0913 - a decoder's settings, each with its default
        self,
        head: bytes | Header,
        profile: AnyProfile | None = None,
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
        max_tokens: int | None = None,
        max_bytes: int | None = None,
        begins: bool = False,
        rounded: bool = False,
    ) -> None:
        """Parse the header, choose the profile and allocate the output; raises as ``decode`` does.

        Args:
            head: The blob's first ``BlobInfo.header_bytes`` bytes or more, or the header that ``parse_header`` read.
            profile: The profile that the blob names; not needed where the blob carries its own.
            device: Device of the output.
            dtype: Dtype of the output; None for the dtype of the encoded cache.
            offset: Position of the document's first token in the prompt; None leaves positions off.
            out: Tensors to write into (a slice of a prompt's cache, or an engine's pages); their device and dtype
                replace ``device`` and ``dtype``. None allocates.
            check: Whether to verify checksums.
            hidden: ``engine.prefix_states`` of the document, float32 ``[tokens, hidden_size]``, where the blob needs
                one.
            level: The only level that will be decoded; a lossless one needs no profile.
            backend: Which kernels run, see ``backend.Backend``.
            workspace_bytes: GPU memory for chunks being decoded, None for 15 % of the output. More memory takes more
                chunks at a time, which decodes short documents sooner.
            max_tokens: Most tokens that the blob may claim, such as the model's window; None for any number.
            max_bytes: Most bytes to allocate for the output, None for any number. A constant cache of any size makes
                a short blob, so a blob's length bounds nothing: set this for blobs from strangers.
            begins: Whether the document begins its prompt.
            rounded: Whether values and rows of wide models may be rounded to 8 bits, which they always may for
                bfloat16: sooner on CPUs that multiply bytes, 0.1 to 0.4 % more squared error (SmolLM2-135M-Instruct).
        """
        self._header = head if isinstance(head, Header) else parse_header(head, check=check)
        dtype = dtype or DTYPES.get(self.info.meta.dtype, torch.float32)
        check_claim(self.info, dtype, max_tokens, max_bytes if out is None else None)
        self._check = check
        self._decoders: dict[int, LevelDecoder] = {}
        independent = level is not None and self.info.levels[level_index(self.info, level)].lossless
        profile = None if independent else profile_for(self._header, profile)
        self._request = DecodeRequest(self._header, profile, offset, check, hidden, rounded)
        self._lossy = None if profile is None else kind_of(profile.codec).decoder(self._request)
        if not dtype.is_floating_point:
            raise ArgumentError(f"a cache holds floating-point numbers, it cannot be decoded to {dtype}")
        check_positions(self.info, offset)
        if out is not None:
            check_out(out, self.info)
        self._out = empty_for(self._header, device, dtype, offset) if out is None else out
        self._sinks: SinkPlacer | None = None
        if (self.info.sinks or (begins and self.info.can_begin)) and profile is not None:
            from kvwire.codec.kinds.outputs import SinkPlacer  # many blobs have no sinks

            self._sinks = SinkPlacer(self._header, cast("Profile", profile), self._out, offset, begins=begins)
        self._use_device(backend, workspace_bytes)

    def _use_device(self, backend: Backend, workspace_bytes: int | None) -> None:
        """Decode lossy levels on the output's device if their kind has kernels for it."""
        devices = {tensor.device for tensor in (*self._out.keys, *self._out.values) if tensor.numel()}
        finishes = self._header.kept or self._sinks
        if len(devices) > 1 and backend == "triton":
            msg = f"Triton decodes onto one device, the output lies on {len(devices)}; use backend='numba'"
            raise ArgumentError(msg)
        if len(devices) == 1 and uses_triton(backend, devices.pop()) and self._lossy is not None:
            self._lossy.use_device(self._out, workspace_bytes, self._finish if finishes else None)

    @property
    def on_gpu(self) -> bool:
        """Whether lossy chunks are decoded by Triton's kernels."""
        return self._lossy is not None and self._lossy.on_device

    @property
    def cache(self) -> KVCache:
        """The output; a contiguous copy where the output is paged."""
        return self._out.read() if isinstance(self._out, PagedKVCache) else self._out

    @property
    def info(self) -> BlobInfo:
        """What the blob says about itself."""
        return self._header.info

    @property
    def kept(self) -> Kept | None:
        """Masks of the entries that a pruned cache holds, bool ``[kv_heads, tokens]`` per layer; see ``KVCache``."""
        return self._header.kept

    def decode_chunk(self, chunk: int, segments: Sequence[bytes], level: int | None = None) -> None:
        """Decode a chunk into the output from the segments that ``BlobInfo.reads`` names.

        Chunks may be decoded in any order and from several threads. A damaged chunk writes nothing.

        Args:
            chunk: Index of the chunk.
            segments: Bytes of each segment, in order.
            level: Index of the level; None for the level that this many layered segments reach.

        Raises:
            CorruptError: A segment is damaged.
            TruncatedError: A segment ends too early.
            ArgumentError: The blob has no such chunk or level.
        """
        self.submit([(chunk, segments, level)]).wait()

    def submit(self, chunks: Sequence[tuple[int, Sequence[bytes], int | None]]) -> Pending:
        """Decode chunks; the processor has finished on return, a GPU goes on working.

        The GPU first waits for the work that the caller's stream held when the decoder was made; work queued later
        must not still read the tokens that the chunks overwrite.

        Args:
            chunks: Each chunk with its segments and level, as for ``decode_chunk``.

        Returns:
            A handle to wait on; it raises as ``decode_chunk`` does where only the device detects damage.

        Raises:
            CorruptError: The host detects a damaged segment.
            TruncatedError: A segment ends too early.
            ArgumentError: The blob has no such chunk or level.
        """
        pieces = [self._piece(*each) for each in chunks]
        decoders = [self._decoder(self._header.levels[piece.level].codec) for piece in pieces]
        on_device: list[ChunkSegments] = []
        for piece, decoder in zip(pieces, decoders, strict=True):
            if decoder is self._lossy and decoder.suits_device(piece):
                on_device.append(piece)
            else:
                self._decode_here(piece, decoder)
        if self._lossy is None or not on_device:
            return Pending(StreamEvent(), [StreamEvent() for _ in self.info.meta.layers], [])
        return self._lossy.submit(on_device)

    def _decoder(self, codec: int) -> LevelDecoder:
        """Return a codec's decoder; lossless ones are made on first use."""
        if self._lossy is not None and codec == self._header.lossy_codec:
            return self._lossy
        if codec not in self._decoders:
            self._decoders[codec] = kind_of(codec).decoder(self._request)
        return self._decoders[codec]

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
            raise ArgumentError(
                f"{len(segments)} segments for level {level} of chunk {chunk}; the blob has {self.info.chunks} chunks, "
                f"this one {levels} levels"
            )
        for segment, data in zip(self.info.reads(chunk, level), segments, strict=True):
            self._check_bytes(segment, data)
        if self._lossy is None and not self._header.levels[level].lossless:
            msg = f"the decoder was made for a lossless level alone, not for level {level}; make one without level="
            raise ArgumentError(msg)
        return ChunkSegments(chunk, level, segments)

    def _decode_here(self, piece: ChunkSegments, decoder: LevelDecoder) -> None:
        """Decode a chunk on the processor."""
        start, stop = self.info.chunk_span(piece.chunk)
        out, at = self._out, start
        if isinstance(out, PagedKVCache):
            out, at = empty_chunk(out, stop - start), 0
        decoder.decode(piece, out, at)
        if isinstance(self._out, PagedKVCache):
            self._out.write(start, out)
        if decoder is self._lossy:
            self._finish(start, stop)
        else:
            drop_pruned(self._out, self._header.kept, start, stop)

    def _finish(self, start: int, stop: int) -> bool:
        """Write sinks and zero pruned entries after lossy levels; return whether anything may have been written."""
        placed = self._sinks is not None and self._sinks.place(start, stop)
        drop_pruned(self._out, self._header.kept, start, stop)
        return placed or self._header.kept is not None

    def _check_bytes(self, segment: SegmentInfo, data: bytes) -> None:
        name = f"chunk {segment.chunk} level {segment.level}"
        if len(data) < segment.stored:
            msg = f"{name} ends after {len(data)} of {segment.stored} bytes; fetch it again"
            raise TruncatedError(msg, segment.end)
        if len(data) > segment.stored or (self._check and crc32(data) != segment.crc32):
            raise CorruptError(f"{name} does not match its length or checksum; fetch it again")


def decode(  # noqa: PLR0913 - a decoder's settings, each with its default
    blob: bytes,
    level: int | str | None = None,
    profile: AnyProfile | None = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    *,
    offset: int | None = 0,
    check: bool = True,
    hidden: Tensor | None = None,
    threads: int | None = None,
    backend: Backend = "auto",
    max_tokens: int | None = None,
    max_bytes: int | None = None,
    begins: bool = False,
) -> KVCache:
    """Decode a whole blob at one quality level.

    It takes memory for the output and for one chunk's working set per thread.

    Args:
        blob: The whole blob.
        level: Index (negative counts from the last), name, or None for the finest lossy level.
        profile: The profile that the blob names; not needed where the blob carries its own, nor for a lossless level.
        device: Device of the output.
        dtype: Dtype of the output; None for the dtype of the encoded cache.
        offset: Position of the first token; None leaves positions off (keys of ``dtype``, un-rotated).
        check: Whether to verify checksums.
        hidden: ``engine.prefix_states`` of the document, float32 ``[tokens, hidden_size]``, where the blob was encoded
            with one.
        threads: Chunks decoded at a time on the processor, None for one per core.
        backend: Which kernels run, see ``backend.Backend``; by default Triton's on a GPU.
        max_tokens: Most tokens that the blob may claim, see ``BlobDecoder``.
        max_bytes: Most bytes that the cache may take.
        begins: Whether the document begins its prompt; matters where ``BlobInfo.can_begin``.

    Returns:
        The cache.

    Raises:
        TruncatedError: The blob ends too early.
        CorruptError: The blob is damaged.
        FormatVersionError: A later version wrote it.
        MismatchError: The profile is missing or the wrong one.
        RopeRegimeError: A position is outside the RoPE regime's range.
        ArgumentError: There is no such level, an argument is out of range, or the blob claims more than a limit.
    """
    header = parse_header(blob, check=check)
    info = header.info
    index = _whole_level(blob, info, level)
    decoder = BlobDecoder(
        header,
        profile,
        device=device,
        dtype=dtype,
        offset=offset,
        check=check,
        hidden=hidden,
        level=index,
        backend=backend,
        max_tokens=max_tokens,
        max_bytes=max_bytes,
        begins=begins,
    )
    view = memoryview(blob)

    def segments(chunk: int) -> list[bytes]:
        return [bytes(view[s.offset : s.end]) for s in info.reads(chunk, index)]

    if decoder.on_gpu and not info.levels[index].lossless:
        decoder.submit([(chunk, segments(chunk), index) for chunk in range(info.chunks)]).wait()
    else:
        map_parallel(lambda chunk: decoder.decode_chunk(chunk, segments(chunk), index), range(info.chunks), threads)
    return decoder.cache


def _whole_level(blob: bytes, info: BlobInfo, level: int | str | None) -> int:
    """Return a level's index; raises where the blob is not whole or a chunk lacks the level."""
    if len(blob) < info.file_bytes:
        msg = f"the blob ends after {len(blob)} of {info.file_bytes} bytes; fetch it again"
        raise TruncatedError(msg, info.file_bytes)
    if len(blob) > info.file_bytes:
        raise CorruptError(f"{len(blob) - info.file_bytes} bytes follow the blob's end; fetch it again")
    index = level_index(info, level)
    for chunk, row in enumerate(info.segments):
        if len(row) <= index:
            raise ArgumentError(f"chunk {chunk} lacks level {index}; ask for a lower level")
    return index
