"""``decode``: a blob, or just the segments that were fetched of it, to a cache."""

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
    chunk_of,
    drop_pruned,
    empty_for,
)
from kvwire.codec.kinds.requests import DecodeRequest
from kvwire.codec.workers import each
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

    Tokens of chunks that are not decoded yet are zero, or what was there.
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
        """Parse the header, pick the profile and allocate the output; raises as ``decode`` does.

        Args:
            head: The blob's first bytes, at least ``BlobInfo.header_bytes`` of them, or what ``parse_header`` made of
                them.
            profile: The one that the blob names; not needed where it carries its own.
            device: Where the output is allocated.
            dtype: Of the output; None: the one that the cache was encoded from.
            offset: Position of the document's first token in the prompt; None leaves positions off.
            out: Write into these tensors (a slice of a prompt's cache, or an engine's pages) rather than allocate;
                device and dtype are then theirs.
            check: Whether to verify checksums.
            hidden: ``engine.prefix_states`` of the document, float32 ``[tokens, hidden_size]``, where the blob needs
                one.
            level: The only one that will be asked for; a lossless one needs no profile.
            backend: Which kernels run, see ``backend.Backend``.
            workspace_bytes: Device memory of a GPU for chunks under way, None for 15 % of the output; more of it takes
                more chunks at a time, which is sooner for short documents.
            max_tokens: Most tokens that the blob may claim, the model's window for one; None for any number.
            max_bytes: Most bytes to allocate for the output, None for any number: a constant cache of any size is a
                short blob, so a blob's length bounds nothing. Give one where blobs come from strangers.
            begins: Whether nothing stands before the document in its prompt.
            rounded: Whether sums of any output may have bfloat16's precision where the quantiser's step is
                coarse and the model large, which CPUs that multiply bfloat16 do twice as fast; it adds at most a
                hundredth to the error.
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
        if dtype is not None and not dtype.is_floating_point:
            raise ArgumentError(f"a cache holds floating-point numbers, it cannot be decoded to {dtype}")
        check_positions(self.info, offset)
        if out is not None:
            check_out(out, self.info)
        self._out = empty_for(self._header, device, dtype, offset) if out is None else out
        self._sinks: SinkPlacer | None = None
        if (self.info.sinks or (begins and self.info.can_begin)) and profile is not None:
            from kvwire.codec.kinds.outputs import SinkPlacer  # blobs of old have none

            self._sinks = SinkPlacer(self._header, cast("Profile", profile), self._out, offset, begins=begins)
        self._use_device(backend, workspace_bytes)

    def _use_device(self, backend: Backend, workspace_bytes: int | None) -> None:
        """Let lossy levels be decoded where the output lies, if their kind can."""
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
        """The output; a contiguous copy of it where it lies in pages."""
        return self._out.read() if isinstance(self._out, PagedKVCache) else self._out

    @property
    def info(self) -> BlobInfo:
        """What the blob says about itself."""
        return self._header.info

    @property
    def kept(self) -> Kept | None:
        """What a pruned cache still holds, a bool ``[kv_heads, tokens]`` for each layer; see ``KVCache``."""
        return self._header.kept

    def decode_chunk(self, chunk: int, segments: Sequence[bytes], level: int | None = None) -> None:
        """Decode a chunk into the output from what ``BlobInfo.reads`` names.

        Chunks may be decoded in any order, and several at a time from different threads. Where one is damaged, nothing
        of it is written.

        Args:
            chunk: Its index.
            segments: Their bytes, in order.
            level: None for the one that as many layered segments lead to.

        Raises:
            CorruptError: A segment is damaged.
            TruncatedError: A segment ends too early.
            ArgumentError: The blob has no such chunk or level.
        """
        self.submit([(chunk, segments, level)]).wait()

    def submit(self, chunks: Sequence[tuple[int, Sequence[bytes], int | None]]) -> Pending:
        """Decode chunks; a GPU works on after this returns, and on the processor all is done on return.

        A GPU waits for what the caller's stream had been given when the decoder was made; nothing may still read what
        the chunks will overwrite.

        Args:
            chunks: Each with its segments and level as in ``decode_chunk``.

        Returns:
            What tells when they are there, and raises as ``decode_chunk`` does where only the device sees what is
            wrong.

        Raises:
            CorruptError: The host sees that a segment is damaged.
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
        """Of lossy levels, or of lossless ones, made when they are first asked for."""
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
        """On the processor."""
        start, stop = self.info.chunk_span(piece.chunk)
        out, at = self._out, start
        if isinstance(out, PagedKVCache):
            out, at = chunk_of(out, stop - start), 0
        decoder.decode(piece, out, at)
        if isinstance(self._out, PagedKVCache):
            self._out.write(start, out)
        if decoder is self._lossy:
            self._finish(start, stop)
        else:
            drop_pruned(self._out, self._header.kept, start, stop)

    def _finish(self, start: int, stop: int) -> bool:
        """What follows the decoding of lossy levels; returns whether it wrote anything."""
        drop_pruned(self._out, self._header.kept, start, stop)
        placed = self._sinks is not None and self._sinks.place(start, stop)
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

    Memory: the output plus each thread's working set of a chunk.

    Args:
        blob: All its bytes.
        level: Index (negative counts from the last), name, or None for the finest that is not lossless.
        profile: The one that the blob names; not needed where it carries its own, nor for a lossless level.
        device: Where the output is allocated.
        dtype: Of the output; None: the one that the cache was encoded from.
        offset: Position of the first token; None leaves positions off (keys of ``dtype``, un-rotated).
        check: Whether to verify checksums.
        hidden: ``engine.prefix_states`` of the document, float32 ``[tokens, hidden_size]``, where the blob was encoded
            with one.
        threads: Chunks decoded at a time on the processor, None for one on every core.
        backend: Which kernels run, see ``backend.Backend``: by default Triton's on a GPU.
        max_tokens: Most tokens that the blob may claim, see ``BlobDecoder``.
        max_bytes: Most bytes that the cache may take.
        begins: Whether nothing stands before the document in its prompt; matters where ``BlobInfo.can_begin``.

    Returns:
        The cache.

    Raises:
        TruncatedError: The blob ends too early.
        CorruptError: The blob is damaged.
        FormatVersionError: A later version wrote it.
        MismatchError: The profile is missing or is another one.
        RopeRegimeError: A position is out of reach.
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
        each(lambda chunk: decoder.decode_chunk(chunk, segments(chunk), index), range(info.chunks), threads)
    return decoder.cache


def _whole_level(blob: bytes, info: BlobInfo, level: int | str | None) -> int:
    """Index of a level that every chunk of a whole blob has."""
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
