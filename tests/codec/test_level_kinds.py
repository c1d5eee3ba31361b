"""A level kind is one module and one row of the registry: a tiny one, defined here, goes all the way."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvwire.codec import (
    DEFAULT_METHOD,
    BlobDecoder,
    CacheGenProfile,
    Ladder,
    Profile,
    decode,
    encode,
    fit_cachegen_profile,
    inspect,
    kind_of_method,
    methods,
    read_profile,
    verify,
)
from kvwire.codec.backend import plane_width, planes_of
from kvwire.codec.format.codecs import CODEC_CACHEGEN, CODEC_LAYERED, CODEC_LOSSLESS, CODECS, SegmentCodec
from kvwire.codec.format.header import Level
from kvwire.codec.format.pack import EncodedSegment
from kvwire.codec.kinds.base import LevelDecoder, LevelEncoder, LevelKind, kind_of, profile_for
from kvwire.codec.kinds.lossless_grid import FORMATS
from kvwire.codec.kinds.outputs import DTYPES, positions_for
from kvwire.codec.kinds.requests import AnyProfile
from kvwire.codec.transform.analysis import gather_planes, scatter_planes
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, MismatchError, TruncatedError

from .synthetic import make_cache

HALF = 77
METHODS = methods()
MAGIC = b"\x89KVH\r\n\x1a\n"


@dataclass(frozen=True)
class HalfProfile:
    """Nothing but a name: stored float16 numbers need no profile, and every lossy kind has one."""

    model_id: str
    model_revision: str = ""
    notes: dict[str, str | int | float] = field(default_factory=dict)
    codec: int = HALF
    prefix_layers: int = 0
    outline: None = None

    @property
    def data(self):
        return MAGIC + self.model_id.encode()

    @property
    def digest(self):
        return hashlib.sha256(self.data).hexdigest()

    def check_fits(self, meta):
        if meta.model_id != self.model_id:
            raise MismatchError("another model")


class HalfEncoder(LevelEncoder):
    """Every element as float16, positions taken off."""

    levels = (Level("half", codec=HALF),)

    def __init__(self, request):
        request.profile.check_fits(request.cache.meta)
        self.profile_digest = request.profile.digest
        self._cache = request.cache

    def encode(self, start, stop):
        elements = gather_planes(self._cache, planes_of(self._cache.meta.layers), start, stop).numpy().astype("<f2")
        return [EncodedSegment(elements.tobytes(), elements.size, 0.0, 1.0)]


class HalfDecoder(LevelDecoder):
    """Back, positions put on."""

    def __init__(self, request):
        self._info = request.header.info
        self._cos_sin = positions_for(self._info, request.offset)

    def decode(self, piece, out, at):
        meta, (start, stop) = self._info.meta, self._info.chunk_span(piece.chunk)
        planes = planes_of(meta.layers)
        widths = [plane_width(meta.layers, plane) for plane in planes]
        if len(piece.segments[0]) != 2 * (stop - start) * sum(widths):
            raise CorruptError("a segment of another length")
        elements = np.frombuffer(piece.segments[0], "<f2").astype(np.float32).reshape(stop - start, -1)
        scatter_planes(torch.from_numpy(elements), tuple(planes), out, meta, at, self._cos_sin(start, stop))


class HalfKind(LevelKind):
    """The kind: what a module of its own would hold."""

    number = HALF
    title = "half"
    needs_profile = True

    def encoder(self, request):
        return HalfEncoder(request)

    def decoder(self, request):
        return HalfDecoder(request)

    def read_profile(self, data):
        return HalfProfile(data[len(MAGIC) :].decode())

    def fit(self, texts, settings):  # noqa: ARG002 - it has none
        return HalfProfile(texts.caches()[0].meta.model_id)


KIND = HalfKind()


@pytest.fixture
def half(monkeypatch):
    monkeypatch.setitem(CODECS, HALF, SegmentCodec(HALF, "module_of_half", method="half", profile_magic=MAGIC))
    monkeypatch.setitem(sys.modules, "module_of_half", SimpleNamespace(KIND=KIND))
    return HalfProfile(make_cache(1, 3).meta.model_id)


def close(found, wanted):
    """Whether two caches are alike but for the rounding to float16."""
    pairs = zip((*found.keys, *found.values), (*wanted.keys, *wanted.values), strict=True)
    return all(torch.allclose(a.float(), b.float(), rtol=2e-2, atol=2e-2) for a, b in pairs)


def test_a_registered_kind_goes_all_the_way(half, cache):
    blob = encode(cache, half, chunk_tokens=32, lossless=True)
    info = inspect(blob)
    assert verify(blob) == info
    assert (info.method, info.profile_digest, info.prefix_layers) == ("half", half.digest, 0)
    assert [(level.name, level.independent, level.lossless) for level in info.levels] == [
        ("half", True, False),
        ("lossless", True, True),
    ]
    assert {segment.codec for row in info.segments for segment in row} == {HALF, CODEC_LOSSLESS}
    again = read_profile(half.data)
    assert again == half
    assert isinstance(again, AnyProfile)
    assert close(decode(blob, None, half), cache)
    assert close(decode(blob, "half", half, threads=2), cache)
    assert close(decode(blob, "lossless"), cache)
    with pytest.raises(MismatchError, match="none was given"):
        decode(blob)


def test_a_registered_kind_decodes_chunk_by_chunk(half, cache):
    blob = encode(cache, half, chunk_tokens=32)
    whole, info = decode(blob, 0, half, offset=5), inspect(blob)
    decoder = BlobDecoder(blob[: info.header_bytes], half, offset=5)
    for chunk in reversed(range(info.chunks)):
        (segment,) = info.reads(chunk, 0)
        decoder.decode_chunk(chunk, [blob[segment.offset : segment.end]])
    assert not decoder.on_gpu
    assert close(decoder.cache, whole)
    with pytest.raises(TruncatedError):
        decoder.decode_chunk(0, [b""])


def test_a_kind_that_is_not_registered_is_a_newer_format(half, cache, monkeypatch):
    blob = encode(cache, half, chunk_tokens=32)
    monkeypatch.delitem(CODECS, HALF)
    with pytest.raises(FormatVersionError, match="coded in way 77; upgrade"):
        inspect(blob)
    with pytest.raises(CorruptError, match="no kvwire profile"):
        read_profile(half.data)


def test_a_corpus_asks_the_kind(half):
    cache, settings = make_cache(20, 1), SimpleNamespace(prefix_layers=0, ladder=None)
    kind = kind_of_method("half")
    assert methods() == (DEFAULT_METHOD, *METHODS[1:], "half")
    assert kind.number == HALF
    assert kind.codec is CODECS[HALF]
    fitted = kind.fit(SimpleNamespace(caches=lambda: [cache]), settings)
    assert kind.is_wanted(fitted, settings)
    assert kind.has_levels(inspect(encode(cache, fitted)), settings)
    kind.check_settings(settings)
    with pytest.raises(ArgumentError, match="half's method knows neither"):
        kind.check_settings(SimpleNamespace(prefix_layers=1, ladder=None))


class Texts:
    """Calibration texts whose caches are made up."""

    keeper = None

    def __init__(self):
        self.caches_made = [make_cache(200, seed) for seed in (1, 2)]
        self.calibrated = 0

    def caches(self):
        return self.caches_made

    def statistics(self, *, tokens):  # noqa: ARG002 - nothing is known
        return None

    def prefix_states(self, layers):
        return [torch.randn(cache.tokens, 8 * layers) for cache in self.caches_made]

    def calibrate_error(self, profile, ladder):  # noqa: ARG002 - nothing is measured
        self.calibrated += 1
        return profile


def test_every_kind_of_the_registry_keeps_the_contract(cache):
    for number, row in CODECS.items():
        kind = kind_of(number)
        assert isinstance(kind, LevelKind)
        assert (kind.number, kind.codec) == (number, row)
        assert row.number == number
    texts = Texts()
    for method in methods():
        kind, settings = kind_of_method(method), SimpleNamespace(prefix_layers=0, ladder=None)
        fitted = kind.fit(texts, settings)
        assert isinstance(fitted, AnyProfile)
        assert (fitted.codec, kind.is_wanted(fitted, settings)) == (kind.number, True)
        assert fitted.data.startswith(kind.codec.profile_magic)
        assert read_profile(fitted.data).digest == fitted.digest
        info = inspect(encode(cache, fitted))
        assert (info.method, kind.has_levels(info, settings)) == (method, True)
        others = [name for name in methods() if name != method]
        assert not any(kind_of_method(name).is_wanted(fitted, settings) for name in others)
    assert texts.calibrated == len(methods())


def test_layered_settings():
    kind, texts = kind_of(CODEC_LAYERED), Texts()
    with_prefix = SimpleNamespace(prefix_layers=2, ladder=Ladder(3.6, ("one", "two")))
    kind.check_settings(with_prefix)
    fitted = kind.fit(texts, with_prefix)
    assert isinstance(fitted, Profile)
    assert fitted.prefix_layers == 2
    assert kind.is_wanted(fitted, with_prefix)
    assert not kind.is_wanted(fitted, SimpleNamespace(prefix_layers=0, ladder=None))
    info = inspect(encode(make_cache(20, 3), levels=Ladder(3.6, ("one", "two"))))
    assert kind.has_levels(info, with_prefix)
    assert not kind.has_levels(info, SimpleNamespace(prefix_layers=0, ladder=None))


def test_cachegen_settings():
    kind = kind_of(CODEC_CACHEGEN)
    for settings in (SimpleNamespace(prefix_layers=1, ladder=None), SimpleNamespace(prefix_layers=0, ladder=Ladder())):
        with pytest.raises(ArgumentError, match="CacheGen's method knows neither prefix layers nor ladder"):
            kind.check_settings(settings)
    with pytest.raises(CorruptError, match="never do"):
        kind.read_profile_inside(b"")


def test_what_no_kind_is_for(cache, profile):
    with pytest.raises(ArgumentError, match="no method 'zip'; there are kvwire, cachegen"):
        kind_of_method("zip")
    other = fit_cachegen_profile([make_cache(100, 1)])
    assert isinstance(other, CacheGenProfile)
    info = SimpleNamespace(profile_digest=other.digest, meta=cache.meta)
    with pytest.raises(CorruptError, match="another method"):
        profile_for(SimpleNamespace(info=info, lossy_codec=profile.codec), other)
    assert set(DTYPES.values()) == set(FORMATS)


SCRIPT = """
import json, sys
from pathlib import Path
from kvwire.codec import decode
decode(Path(sys.argv[1]).read_bytes(), "fine")
print(json.dumps(sorted(name for name in sys.modules if name.startswith("kvwire.codec.kinds."))))
"""


def test_decoding_imports_the_kind_that_it_decodes_alone(cache, tmp_path):
    (tmp_path / "blob").write_bytes(encode(cache, lossless=True))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "blob")]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(told.stdout) == [
        f"kvwire.codec.kinds.{name}" for name in ("base", "layered", "outputs", "requests")
    ]
