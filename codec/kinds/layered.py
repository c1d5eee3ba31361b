"""kvwire's own levels: transform coefficients on a ladder of quantiser steps; each level refines the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from kvwire.codec.entropy.tables import scale_of
from kvwire.codec.format.codecs import CODEC_LAYERED, MAX_CHUNK_SYMBOLS
from kvwire.codec.format.header import Level
from kvwire.codec.format.pack import EncodedSegment
from kvwire.codec.format.segment import SegmentState, decode_segment
from kvwire.codec.gpu.staging import suits_gpu
from kvwire.codec.kinds.base import LevelDecoder, LevelEncoder, LevelKind
from kvwire.codec.kinds.outputs import device_of, positions_for
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.profile.profile import Profile
from kvwire.codec.transform.analysis import analyse, fast_bfloat16
from kvwire.codec.transform.levels import Ladder, ladder_for
from kvwire.codec.transform.reconstruct import place_group
from kvwire.codec.transform.sinks import find_sinks, frame_of_beginning
from kvwire.codec.workers import one_core
from kvwire.errors import ArgumentError, CorruptError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvwire.codec.format.segment import ChunkSegments
    from kvwire.codec.gpu.decode import DeviceDecoder
    from kvwire.codec.gpu.streams import Pending
    from kvwire.codec.kinds.base import Span
    from kvwire.codec.kinds.requests import AnyProfile, Calibration, CodingSettings, DecodeRequest, EncodeRequest
    from kvwire.types import BlobInfo, KVCache, PagedKVCache, SegmentInfo


class LayeredEncoder(LevelEncoder):
    """Encodes chunks on the processor."""

    def __init__(self, request: EncodeRequest) -> None:
        """Check the profile, or derive one from the cache."""
        cache, ladder = request.cache, ladder_for(request.levels)
        profile = cast("Profile | None", request.profile)
        used = _profile_of(cache, ladder) if profile is None else profile
        used.check_fits(cache.meta)
        if request.chunk_tokens * used.rank > MAX_CHUNK_SYMBOLS:
            most = MAX_CHUNK_SYMBOLS // used.rank
            raise ArgumentError(f"a chunk may hold {most} tokens of a model this wide, got {request.chunk_tokens}")
        named = zip(ladder.names, ladder.steps, ladder.shifts, strict=True)
        self.levels = tuple(Level(name, step, shift) for name, step, shift in named)
        self.profile_digest = "" if profile is None else used.digest
        self.profile_bytes = used.data if profile is None else b""
        self.prefix_layers, self.error_to_kl = used.prefix_layers, used.error_to_kl
        self._cache, self._ladder = cache, ladder
        self._text = TextPredictor(used, cache.tokens, cache.token_ids, request.hidden)
        self.sinks = find_sinks(cache, self._text)
        self._text.sinks = tuple(self.sinks)
        self.beginning = frame_of_beginning(request.beginning, used) if request.beginning else b""

    def encode_all(self, spans: Sequence[Span], threads: int | None) -> list[list[EncodedSegment]]:
        """Encode every chunk; matrices that the workers share are computed first."""
        for group in self._text.profile.groups:
            halved = group.rows is not None and fast_bfloat16()
            _ = group.halved_analysis if halved else group.analysis, group.metric_runs
        return super().encode_all(spans, threads)

    def encode(self, start: int, stop: int) -> list[EncodedSegment]:
        """Encode every level of the ladder."""
        from kvwire.codec.transform.levels import ChunkLevels  # decoders do not need it

        ladder, profile = self._ladder, self._text.profile
        coefficients, dropped = self._coefficients(start, stop)
        chunk = ChunkLevels(coefficients, ladder, profile.spread, profile.tables)
        energy = chunk.energy + dropped
        elements = (stop - start) * sum(group.width for group in profile.groups)
        segments = []
        for level in range(len(ladder.steps)):
            data, symbols, missed = chunk.encode(level)
            segments.append(EncodedSegment(data, symbols, (missed + dropped) / elements, energy / elements))
        return segments

    def _coefficients(self, start: int, stop: int) -> tuple[NDArray[np.float32], float]:
        return analyse(self._cache, self._text, start, stop, self._ladder.steps[-1])


class TrialEncoder(LayeredEncoder):
    """Encodes random coefficients with the profile's scales; solves no system and reads no cache."""

    def encode_all(self, spans: Sequence[Span], threads: int | None) -> list[list[EncodedSegment]]:
        """Encode every chunk without computing the analysis matrices."""
        return LevelEncoder.encode_all(self, spans, threads)

    def _coefficients(self, start: int, stop: int) -> tuple[NDArray[np.float32], float]:
        scales = scale_of(self._text.profile.spread) / np.sqrt(2)  # Laplacian, as the tables assume
        drawn = np.random.default_rng(start).laplace(0.0, scales, (stop - start, len(scales)))
        return drawn.astype(np.float32), 0.0


class _DeviceLayeredEncoder(LayeredEncoder):
    """Encodes many chunks at a time on the cache's device."""

    def encode(self, start: int, stop: int) -> list[EncodedSegment]:
        return self.encode_all([(start, stop)], 1)[0]

    def encode_all(self, spans: Sequence[Span], threads: int | None) -> list[list[EncodedSegment]]:
        from kvwire.codec.gpu.encode import DeviceEncoder  # Triton is optional

        return DeviceEncoder(self._cache, self._text, self._ladder, device_of(self._cache)).encode(spans, threads)


class LayeredDecoder(LevelDecoder):
    """Decodes chunks on the processor, or on the output's device by Triton's kernels.

    Attributes:
        device: The decoder on the device; None until ``use_device`` is called.
    """

    device: DeviceDecoder | None = None

    def __init__(self, request: DecodeRequest) -> None:
        """Check the inputs of the profile's predictors."""
        self._header, self._check, self._offset = request.header, request.check, request.offset
        self._rounded = request.rounded
        self._info, self._profile = request.header.info, cast("Profile", request.profile)
        self._text = TextPredictor(self._profile, self._info.tokens, self._info.token_ids, request.hidden)
        self._cos_sin = positions_for(self._info, self._offset)

    def decode(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        """Decode every level's symbols, then transform back group by group."""
        start, stop = self._info.chunk_span(piece.chunk)
        reads = self._info.reads(piece.chunk, piece.level)
        state = SegmentState(stop - start, self._profile.spread, self._profile.tables)
        for segment, data in zip(reads, piece.segments, strict=True):
            self._advance(state, segment, data)
        step = self._header.levels[reads[-1].level].step
        cos_sin = self._cos_sin(start, stop)
        first = 0
        for index, group in enumerate(self._profile.groups):
            expected = self._text.expected(index, start, stop)
            columns = slice(first, first + group.rank)
            place_group(state, group, columns, step, expected, out, self._info.meta, at, cos_sin, rounded=self._rounded)
            first += group.rank

    def _advance(self, state: SegmentState, segment: SegmentInfo, data: bytes) -> None:
        """Decode one segment's symbols."""
        shift = self._header.levels[segment.level].shift
        symbols = decode_segment(state, segment.level, shift, data, check=self._check)
        if self._check and symbols != segment.raw:
            name = f"chunk {segment.chunk} level {segment.level}"
            raise CorruptError(f"{name} holds {symbols} symbols, the index says {segment.raw}; fetch it again")

    def use_device(
        self, out: KVCache | PagedKVCache, workspace_bytes: int | None, finish: Callable[[int, int], bool] | None
    ) -> None:
        """Put the profile on the device and describe the output."""
        from kvwire.codec.gpu.decode import DeviceDecoder  # needs Triton

        self.device = DeviceDecoder(
            self._header,
            self._text,
            out,
            offset=self._offset,
            check=self._check,
            workspace_bytes=workspace_bytes,
            finish=finish,
        )

    @property
    def on_device(self) -> bool:
        """Whether Triton's kernels decode."""
        return self.device is not None

    def suits_device(self, piece: ChunkSegments) -> bool:
        """Return whether a GPU can decode the chunk, see ``suits_gpu``."""
        symbols = [segment.raw for segment in self._info.reads(piece.chunk, piece.level)]
        return self.device is not None and suits_gpu(piece, symbols)

    def submit(self, pieces: Sequence[ChunkSegments]) -> Pending:
        """Queue chunks on the device."""
        return cast("DeviceDecoder", self.device).decode(pieces)


class LayeredKind(LevelKind):
    """Codec 1; its profile comes from ``fit_profile``, or is derived from the cache and stored in the blob."""

    number: ClassVar[int] = CODEC_LAYERED
    title: ClassVar[str] = "kvwire"

    def encoder(self, request: EncodeRequest) -> LevelEncoder:
        """Encode on the processor, or on the cache's device if the request says so and gives a profile."""
        on_device = request.on_device and request.profile is not None
        return (_DeviceLayeredEncoder if on_device else LayeredEncoder)(request)

    def decoder(self, request: DecodeRequest) -> LevelDecoder:
        """Decode on the processor until ``use_device`` is called."""
        return LayeredDecoder(request)

    def read_profile(self, data: bytes) -> Profile:
        """Read a ``.kvp`` file."""
        return Profile.from_bytes(data)

    def read_profile_inside(self, data: bytes) -> Profile:
        """Read the profile inside a blob; TruncatedError would ask for more bytes in vain."""
        try:
            return Profile.from_bytes(data)
        except TruncatedError as error:
            raise CorruptError(f"the profile inside the blob is damaged: {error}") from error

    def check_blob(self, info: BlobInfo, profile: AnyProfile) -> None:
        """Check that the profile has the blob's prefix layers and sinks, and that a chunk is not too large."""
        rank, tokens = cast("Profile", profile).rank, min(info.tokens, info.chunk_tokens)
        if info.prefix_layers != profile.prefix_layers:
            msg = "the blob is coded for other prefix layers than its profile; fetch the blob's header again"
            raise CorruptError(msg)
        if (info.sinks or info.can_begin) and not cast("Profile", profile).has_sinks:
            raise CorruptError("the blob has attention sinks and its profile knows of none; encode the document anew")
        if tokens * rank > MAX_CHUNK_SYMBOLS:
            raise CorruptError(
                f"a chunk of {tokens} tokens would hold {tokens * rank} symbols, {MAX_CHUNK_SYMBOLS} are allowed; "
                "fetch the blob's header again"
            )

    def check_settings(self, settings: CodingSettings) -> None:
        """Accept every number of prefix layers and every ladder."""

    def fit(self, texts: Calibration, settings: CodingSettings) -> Profile | None:
        """Fit transform, prediction and tables, then measure the KL divergence of errors."""
        from kvwire.codec.fitting.fit import RANK_CUT, fit_profile
        from kvwire.codec.fitting.ladder import MARGIN

        layers = settings.prefix_layers
        caches = texts.caches()
        hidden = texts.prefix_states(layers) if layers else None
        statistics = texts.statistics(tokens=not layers)
        profile = fit_profile(
            caches, statistics, ladder=settings.ladder, prefix_layers=layers, hidden=hidden, keeper=texts.keeper,
            rank_cut=RANK_CUT if settings.ladder else RANK_CUT / MARGIN,
        )  # fmt: skip
        if profile is None:
            return None
        profile = texts.calibrate_error(profile, settings.ladder)
        return profile if settings.ladder else _with_default_levels(profile)

    def has_levels(self, info: BlobInfo, settings: CodingSettings) -> bool:
        """Return whether the blob's lossy levels have the ladder's names and steps."""
        ladder = settings.ladder or Ladder()
        steps = [(level.name, level.step) for level in info.levels if not level.independent]
        return steps == list(zip(ladder.names, ladder.steps, strict=True))


def _with_default_levels(profile: Profile) -> Profile:
    """Return the profile rescaled to the unit of the default levels, with their errors."""
    from kvwire.codec.fitting.fit import RANK_CUT
    from kvwire.codec.fitting.ladder import errors_of, with_unit

    return with_unit(profile, errors_of(profile), RANK_CUT)


def _profile_of(cache: KVCache, ladder: Ladder) -> Profile:
    from kvwire.codec.fitting.fit import identity_profile  # not needed with a fitted profile

    with one_core():  # sums on one core do not depend on the number of threads
        return identity_profile(cache, ladder)


KIND = LayeredKind()
