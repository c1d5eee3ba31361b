"""The one place that knows kvwire's device codec: its parts, run together and apart."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

import kvwire
from kvwire.codec import CHUNK_TOKENS
from kvwire.codec.format.container import parse_header
from kvwire.codec.format.segment import ChunkSegments, SegmentState, decode_segment
from kvwire.codec.gpu.batch import UploadedBatch, Workspace
from kvwire.codec.gpu.decode import DeviceDecoder
from kvwire.codec.gpu.profile import on_device
from kvwire.codec.prediction.text import TextPredictor

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvwire import KVCache, Profile
    from kvwire.codec.gpu.staging import DeviceBatch


def encode(cache: KVCache, profile: Profile, chunk_tokens: int = CHUNK_TOKENS) -> bytes:
    """All levels of the default ladder, encoded on the cache's device."""
    return kvwire.encode(cache, profile, chunk_tokens=chunk_tokens, backend="triton")


def decode(blob: bytes, level: int, profile: Profile, device: torch.device, dtype: torch.dtype) -> KVCache:
    """A whole blob, positions from 0."""
    return kvwire.decode(blob, level, profile, device=device, dtype=dtype, offset=0, backend="triton")


def decode_into(blob: bytes, level: int, profile: Profile, out: KVCache) -> None:
    """A whole blob into tensors that are there already."""
    decoder_of(blob, profile, out).decode(pieces_of(blob, level)).wait()


def moved(cache: KVCache, device: torch.device) -> KVCache:
    """A cache on another device."""
    return replace(cache, keys=[t.to(device) for t in cache.keys], values=[t.to(device) for t in cache.values])


def profile_bytes(profile: Profile, device: torch.device) -> int:
    """Device memory that a profile takes once it has been used."""
    return on_device(profile, device).bytes


def decoder_of(blob: bytes, profile: Profile, out: KVCache) -> DeviceDecoder:
    """A decoder that writes into ``out``, positions from 0."""
    header = parse_header(blob)
    return DeviceDecoder(header, TextPredictor(profile, header.info.tokens, header.info.token_ids), out, offset=0)


def pieces_of(blob: bytes, level: int) -> list[ChunkSegments]:
    """Every chunk of a blob at a level; the bytes are copies."""
    info = kvwire.inspect(blob)
    return [
        ChunkSegments(chunk, level, [bytes(blob[s.offset : s.end]) for s in info.reads(chunk, level)])
        for chunk in range(info.chunks)
    ]


@dataclass(eq=False)
class Load:
    """One copy of a blob's segments at one level, staged in pinned memory, and the ways to run its parts."""

    decoder: DeviceDecoder
    pieces: list[ChunkSegments]

    @cached_property
    def staged(self) -> list[DeviceBatch]:
        """Batches on the host, as large as the decoder makes them."""
        return self.stage()

    @cached_property
    def batches(self) -> list[UploadedBatch]:
        """The same on the device, each in memory of its own."""
        batches = [self.decoder.upload(staged, Workspace()) for staged in self.staged]
        if batches[0].buffer.is_cuda:
            torch.cuda.synchronize(batches[0].buffer.device)  # copies run on a stream of their own
        return batches

    def stage(self) -> list[DeviceBatch]:
        """What the host does: take segments apart and lay them out."""
        return list(self.decoder.batches(self.pieces))

    def ready(self) -> None:
        """From pinned host memory to the finished cache, checked; copying, decoding and placing overlap."""
        self.decoder.load(self.staged).wait()

    def upload(self) -> None:
        """Copy the bytes to the device, on the current stream."""
        for batch in self.batches:
            batch.buffer.copy_(batch.staged.buffer, non_blocking=True)

    def entropy(self) -> None:
        """Decode all streams, on the current stream."""
        for batch in self.batches:
            self.decoder.entropy(batch)

    def place(self) -> None:
        """Inverse transform, prediction, rotation, storing; on the current stream, after ``entropy``."""
        for batch in self.batches:
            self.decoder.place(batch)

    @property
    def staged_bytes(self) -> int:
        """Bytes that are copied to the device."""
        return sum(staged.buffer.numel() for staged in self.staged)


def symbols(load: Load, profile: Profile) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    """Quantised coded values of every chunk ``[tokens, coded columns]``: the device's, and the processor's."""
    load.entropy()
    return [pair for batch in load.batches for pair in _symbols(batch, load, profile)]


def _symbols(batch: UploadedBatch, load: Load, profile: Profile) -> list[tuple[NDArray[np.int32], NDArray[np.int32]]]:
    values, at, out = batch.values.cpu().numpy(), 0, []
    for parsed in batch.staged.pieces:
        state = SegmentState(parsed.tokens, profile.spread, profile.tables)
        for level, data in enumerate(parsed.piece.segments):
            decode_segment(state, level, load.decoder._header.levels[level].shift, data)  # noqa: SLF001
        columns = state.columns
        found = values[at : at + parsed.values].reshape(parsed.tokens, parsed.width)
        out.append((found[:, parsed.slots[columns]].astype("int32"), state.values[:, columns]))
        at += parsed.values
    return out
