"""Levels of the CacheGen paper as a level kind; ``cachegen_coding`` describes how they are coded."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

from kvwire.codec.format.codecs import CODEC_CACHEGEN
from kvwire.codec.format.header import Level
from kvwire.codec.format.pack import EncodedSegment
from kvwire.codec.kinds.base import LevelDecoder, LevelEncoder, LevelKind
from kvwire.codec.kinds.cachegen_coding import decode_cachegen, encode_cachegen, fit_cachegen_profile
from kvwire.codec.kinds.cachegen_profile import CacheGenProfile
from kvwire.codec.kinds.outputs import positions_for
from kvwire.codec.transform.analysis import gather, scatter_planes
from kvwire.errors import ArgumentError, CorruptError

if TYPE_CHECKING:
    from kvwire.codec.format.segment import ChunkSegments
    from kvwire.codec.kinds.requests import AnyProfile, Calibration, CodingSettings, DecodeRequest, EncodeRequest
    from kvwire.types import BlobInfo, KVCache


class CacheGenEncoder(LevelEncoder):
    """Encodes each level independently."""

    def __init__(self, request: EncodeRequest) -> None:
        """Check profile and levels."""
        profile, levels = cast("CacheGenProfile", request.profile), request.levels
        profile.check_fits(request.cache.meta)
        known = levels is None or (type(levels) is int and 1 <= levels <= len(profile.level_names))
        if not known:
            msg = f"a CacheGen profile has levels of its own, {len(profile.level_names)}; give their number or None"
            raise ArgumentError(msg)
        names = profile.level_names[: cast("int | None", levels)]
        self.levels = tuple(Level(name, codec=CODEC_CACHEGEN) for name in names)
        self.profile_digest, self.error_to_kl = profile.digest, profile.error_to_kl
        self._cache, self._profile = request.cache, profile

    def encode(self, start: int, stop: int) -> list[EncodedSegment]:
        """Encode each level; errors, of un-rotated keys and values, are relative to the chunk's variance."""
        out = []
        blocks = [gather(self._cache, b.side, (b.layer,), start, stop) for b in self._profile.blocks]
        energy = sum(float((block - block.mean(0)).square().sum()) for block in blocks)
        for level in range(len(self.levels)):
            data, symbols = encode_cachegen(self._cache, self._profile, level, start, stop)
            decoded = decode_cachegen(data, self._profile, level, stop - start)
            error = sum(float((a - b).square().sum()) for a, b in zip(blocks, decoded, strict=True))
            out.append(EncodedSegment(data, symbols, error / energy if energy else 0.0, 1.0))
        return out


class CacheGenDecoder(LevelDecoder):
    """Decodes chunks on the processor."""

    def __init__(self, request: DecodeRequest) -> None:
        """Take profile and positions."""
        self._info, self._profile = request.header.info, cast("CacheGenProfile", request.profile)
        self._cos_sin = positions_for(self._info, request.offset)

    def decode(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        """Decode every block, then put positions on."""
        start, stop = self._info.chunk_span(piece.chunk)
        blocks = decode_cachegen(piece.segments[0], self._profile, piece.level, stop - start)
        cos_sin = self._cos_sin(start, stop)
        for block, elements in zip(self._profile.blocks, blocks, strict=True):
            scatter_planes(elements, ((block.side, block.layer),), out, self._info.meta, at, cos_sin)


class CacheGenKind(LevelKind):
    """Codec 3; its profiles come from ``fit_cachegen_profile`` and are never inside a blob."""

    number: ClassVar[int] = CODEC_CACHEGEN
    title: ClassVar[str] = "CacheGen"
    needs_profile: ClassVar[bool] = True

    def encoder(self, request: EncodeRequest) -> LevelEncoder:
        """Encode on the processor."""
        return CacheGenEncoder(request)

    def decoder(self, request: DecodeRequest) -> LevelDecoder:
        """Decode on the processor."""
        return CacheGenDecoder(request)

    def read_profile(self, data: bytes) -> CacheGenProfile:
        """Read a ``.kvg`` file."""
        return CacheGenProfile.from_bytes(data)

    def check_blob(self, info: BlobInfo, profile: AnyProfile) -> None:
        """Check that the profile has as many levels as the blob."""
        levels = sum(not level.lossless for level in info.levels)
        if levels > len(cast("CacheGenProfile", profile).level_names):
            msg = "the blob has levels that its CacheGen profile does not know; fetch the blob's header again"
            raise CorruptError(msg)

    def fit(self, texts: Calibration, settings: CodingSettings) -> CacheGenProfile:  # noqa: ARG002 - it has none
        """Fit units and distributions, then measure the KL divergence of the levels' errors."""
        return texts.calibrate_error(fit_cachegen_profile(texts.caches()), None)


KIND = CacheGenKind()
