"""The lossless level, which holds the stored numbers bit for bit; ``lossless_streams`` describes its coding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from kvwire.codec.backend import planes_of
from kvwire.codec.format.codecs import CODEC_LOSSLESS
from kvwire.codec.format.header import Level
from kvwire.codec.format.pack import EncodedSegment
from kvwire.codec.kinds.base import LevelDecoder, LevelEncoder, LevelKind
from kvwire.codec.kinds.lossless_grid import FORMATS
from kvwire.codec.kinds.lossless_streams import decode_lossless, encode_lossless
from kvwire.codec.kinds.outputs import positions_for
from kvwire.codec.transform.analysis import gather_planes, scatter_planes
from kvwire.codec.transform.positions import positions_off, rotation
from kvwire.errors import FormatVersionError
from kvwire.types import KVCache

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.format.segment import ChunkSegments
    from kvwire.codec.kinds.requests import DecodeRequest, EncodeRequest

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FORMATS}


class LosslessEncoder(LevelEncoder):
    """Encodes one level on the processor."""

    levels = (Level("lossless", codec=CODEC_LOSSLESS),)

    def __init__(self, request: EncodeRequest) -> None:
        """Take the cache."""
        self._cache = request.cache

    def encode(self, start: int, stop: int) -> list[EncodedSegment]:
        """Encode one segment with error 0."""
        return [EncodedSegment(*encode_lossless(self._cache, start, stop), 0.0, 0.0)]


class LosslessDecoder(LevelDecoder):
    """Decodes chunks on the processor."""

    def __init__(self, request: DecodeRequest) -> None:
        """Take layout and positions."""
        self._info, self._stood, self._offset = request.header.info, request.header.offset, request.offset
        self._cos_sin = positions_for(self._info, self._offset)

    def decode(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        """Write the stored numbers, rotated if the output's offset differs from the stored one."""
        start, stop = self._info.chunk_span(piece.chunk)
        layers = self._info.meta.layers
        dtype = _DTYPES.get(self._info.meta.dtype)
        if dtype is None:
            msg = f"the blob's lossless level holds numbers of type {self._info.meta.dtype!r}; upgrade kvwire"
            raise FormatVersionError(msg)
        pairs = decode_lossless(piece.segments[0], stop - start, layers, dtype)
        stays = self._stood == self._offset
        if not stays:
            self._move(pairs, out, at, start, stop)
        for side, layer in planes_of(layers):
            if stays or layers[layer].rotary(side) is None:
                target = (out.keys if side == "key" else out.values)[layer]
                target[:, at : at + stop - start] = pairs[layer][side == "value"]

    def _move(self, pairs: list[tuple[Tensor, Tensor]], out: KVCache, at: int, start: int, stop: int) -> None:
        """Write the rotary planes at their new positions."""
        meta = self._info.meta
        cache = KVCache([k for k, _ in pairs], [v for _, v in pairs], replace(meta, positions="off"))
        if self._stood is None:
            moved, cos_sin = cache, self._cos_sin(start, stop)
        elif self._offset is None:
            stored = replace(meta, positions="on", offset=self._stood + start)
            moved, cos_sin = positions_off(replace(cache, meta=stored)), {}
        else:  # one rotation by the distance, as joins move computed caches: the bits are the same
            distance = self._offset - self._stood
            moved, cos_sin = cache, {at: rotation(regime, distance, 1) for at, regime in enumerate(meta.ropes)}
        for plane in planes_of(meta.layers):
            if meta.layers[plane[1]].rotary(plane[0]) is not None:
                elements = gather_planes(moved, (plane,), 0, stop - start)
                scatter_planes(elements, (plane,), out, meta, at, cos_sin)


class LosslessKind(LevelKind):
    """Codec 2: one level without a profile."""

    number: ClassVar[int] = CODEC_LOSSLESS
    title: ClassVar[str] = "lossless"

    def encoder(self, request: EncodeRequest) -> LevelEncoder:
        """Encode on the processor."""
        return LosslessEncoder(request)

    def decoder(self, request: DecodeRequest) -> LevelDecoder:
        """Decode on the processor."""
        return LosslessDecoder(request)


KIND = LosslessKind()
