"""Cache layouts and metadata as JSON, and checked reading of untrusted JSON."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import Annotated, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import zstandard
from msgspec import Meta

from kvwire._json import Sha256, strict_json
from kvwire.codec.format.codecs import MAX_LEVELS, MAX_SINKS
from kvwire.errors import ArgumentError, CorruptError, MismatchError
from kvwire.types import BlockDeviation, CacheMeta, LayerSpec, RopeRegime

MAX_JSON_BYTES = 1 << 20
"""A thousand layers take a tenth of this; hostile text of this length makes some tens of megabytes of objects."""
_MAX_BLOCK = 1 << 16
"""Most tokens that share a deviation."""
_MAX_LAYERS = 1 << 20
_MAX_OFFSET = 1 << 31
MAX_NEUTRAL = 4096
"""Most tokens of a neutral prefix."""
_MAX_DIM = 1 << 20
"""Larger than any layer's dimensions; products of two still fit 64 bits."""
MAX_WIDTH = 1 << 23
"""Most elements for one token in all layers: several times those of the widest models without shared heads."""
_STEEPEST = 8.0
"""Largest exponent of ``error_to_kl``."""
_SHORT = 6
"""Fields of a layer row that omits ``value_rope`` (None) and ``key_rope_start`` (0)."""
_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Size: TypeAlias = Annotated[int, Meta(gt=0, lt=1 << 32)]
_TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]
ErrorToKl: TypeAlias = tuple[Annotated[float, Meta(gt=0)], Annotated[float, Meta(gt=0, le=_STEEPEST)]]
PrefixName: TypeAlias = tuple[_Size, Sha256, str]
"""Of the tokens before a part of a document: their number and digest, and the name of a document that has them."""


class BlobMetadata(msgspec.Struct):
    """A blob's metadata, see docs/format.md; what is ``Any`` here is checked where it is read."""

    profile: str
    kept_bytes: _Count
    prefix_layers: Annotated[int, Meta(ge=0, le=_MAX_LAYERS)] = msgspec.field(name="head_start")
    meta: Any = None
    levels: Any = None
    soft_tokens: Any = None
    error_to_kl: ErrorToKl | None = None
    offset: Annotated[int, Meta(ge=-_MAX_OFFSET, le=_MAX_OFFSET)] | None = None
    context_level: Annotated[int, Meta(ge=0, lt=MAX_LEVELS)] | None = None
    deviation: tuple[Annotated[int, Meta(ge=1, le=_MAX_BLOCK)], str] | None = None
    neutral_prefix: Annotated[tuple[_TokenId, ...], Meta(min_length=1, max_length=MAX_NEUTRAL)] | None = None
    opening: _Count = 0
    prefix: PrefixName | None = None
    sinks: Annotated[list[tuple[_Count, _Size]], Meta(min_length=1, max_length=MAX_SINKS)] | None = None
    beginning: _Count = 0


def pack_json(value: object) -> tuple[bytes, int]:
    """Write canonical JSON, zstd-compressed; return it with its raw length in bytes."""
    raw = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw), len(raw)


def unpack_json(data: bytes, raw_length: int, what: str) -> dict[str, Any]:
    """Read what ``pack_json`` wrote."""
    if raw_length > MAX_JSON_BYTES:
        raise CorruptError(f"the {what}'s metadata claims {raw_length} bytes, more than the {MAX_JSON_BYTES} allowed")
    raw = decompress(data, raw_length, what)
    try:
        value = strict_json(raw)
    except ArgumentError as error:
        msg = f"the {what}'s metadata is not JSON as kvwire writes it ({error}); fetch it again"
        raise CorruptError(msg) from error
    if not isinstance(value, dict):
        raise CorruptError(f"the {what}'s metadata is not a JSON object; fetch it again")
    return value


def decompress(data: bytes, raw_length: int, what: str) -> bytes:
    """Decompress a zstd frame into exactly ``raw_length`` bytes.

    The frame's claimed size is compared first, since the decompressor allocates by it.
    """
    try:
        claimed = zstandard.get_frame_parameters(data).content_size
        raw = zstandard.ZstdDecompressor().decompress(data, allow_extra_data=False) if claimed == raw_length else b""
    except (zstandard.ZstdError, MemoryError) as error:
        raise CorruptError(f"the {what} does not decompress ({error}); fetch it again") from error
    if claimed != raw_length or len(raw) != raw_length:
        raise CorruptError(f"the {what} decompresses to another length than it should; fetch it again")
    return raw


def elements_per_token(layers: tuple[LayerSpec, ...]) -> int:
    """Count the numbers cached for one token."""
    return sum(spec.key_width + spec.value_width for spec in layers if spec.kind != "none")


def shapes_of(layers: tuple[LayerSpec, ...]) -> list[tuple[bool, int, int, int]]:
    """List the shapes that must be equal for one cache's coefficients to fit another's layers."""
    return [(s.kind == "none", s.kv_heads, s.key_dim, s.value_dim) for s in layers]


def layers_to_json(layers: tuple[LayerSpec, ...]) -> list[list[int | str | None]]:
    """Write layers as they are stored."""
    rows: list[list[int | str | None]] = []
    for s in layers:
        more = [] if (s.value_rope, s.key_rope_start) == (None, 0) else [s.value_rope, s.key_rope_start]
        rows.append([s.kind, s.kv_heads, s.key_dim, s.value_dim, s.rope, s.window, *more])
    return rows


def layers_from_json(rows: list[list[Any]]) -> tuple[LayerSpec, ...]:
    """Read ``layers_to_json``."""
    out = []
    for row in rows:
        kind, heads, key_dim, value_dim, rope, window, value_rope, start = (
            [*row, None, 0] if len(row) == _SHORT else row
        )
        numbers = [n for n in (heads, key_dim, value_dim, rope, window, value_rope, start) if n is not None]
        sound = kind in ("full", "sliding", "none") and None not in (heads, key_dim, value_dim, start)
        if not sound or any(type(n) is not int or not 0 <= n <= _MAX_DIM for n in numbers):
            raise ValueError(f"impossible layer {row}")
        if kind != "none" and not (heads and key_dim and value_dim):
            raise ValueError("a layer with a cache needs heads and dims above 0")
        out.append(LayerSpec(heads, key_dim, value_dim, kind, rope, window, value_rope, start))
    if not 0 < elements_per_token(tuple(out)) <= MAX_WIDTH:
        raise ValueError(f"no layer has a cache, or all together more than {MAX_WIDTH} elements for a token")
    return tuple(out)


def meta_to_json(meta: CacheMeta) -> dict[str, Any]:
    """Write a cache's meta as it is stored in a blob: positions are always off there."""
    fields = asdict(meta)
    for name in ("positions", "offset"):
        del fields[name]
    fields["layers"] = layers_to_json(meta.layers)
    for rope, regime in zip(fields["ropes"], meta.ropes, strict=True):
        rope["inv_freq"] = base64.b64encode(np.asarray(regime.inv_freq, "<f4").tobytes()).decode()
    return fields


def meta_from_json(fields: Any) -> CacheMeta:  # noqa: ANN401 - JSON
    """Read ``meta_to_json``."""
    try:
        ropes = tuple(_rope(raw) for raw in fields["ropes"])
        layers = layers_from_json(fields["layers"])
        for spec in layers:
            _check_rope(spec, ropes)
        names = ("model_id", "model_revision", "tokenizer_digest", "dtype", "token_digest")
        if any(not isinstance(fields[name], str) for name in names):
            raise ValueError("a name is not a string")  # noqa: TRY301 - reported below
        return CacheMeta(**{name: fields[name] for name in names}, layers=layers, ropes=ropes, positions="off")
    except (KeyError, TypeError, ValueError, OverflowError, ArgumentError) as error:
        raise CorruptError(f"the blob's metadata is damaged ({error}); fetch it again") from error


def _check_rope(spec: LayerSpec, ropes: tuple[RopeRegime, ...]) -> None:
    for rotary, dim in ((spec.rotary("key"), spec.key_dim), (spec.rotary("value"), spec.value_dim)):
        if rotary is not None and (rotary[0] >= len(ropes) or rotary[1] + ropes[rotary[0]].rotary_dim > dim):
            raise ValueError("a layer refers to a RoPE regime that does not fit it")
    if spec.rope is None and spec.key_rope_start:
        raise ValueError("a layer without a RoPE regime says where its rotary part starts")


def _rope(raw: dict[str, Any]) -> RopeRegime:
    inv_freq = np.frombuffer(base64.b64decode(raw["inv_freq"], validate=True), "<f4")
    limit, scaling = raw["max_positions"], float(raw["attention_scaling"])
    if not np.isfinite(inv_freq).all() or not np.isfinite(scaling) or not (limit is None or type(limit) is int):
        raise ValueError("impossible RoPE regime")
    return RopeRegime(tuple(map(float, inv_freq)), bool(raw["interleaved"]), scaling, limit, str(raw["kind"]))


def error_to_kl_from_json(raw: Any) -> tuple[float, float] | None:  # noqa: ANN401 - JSON
    """Read ``Profile.error_to_kl``."""
    try:
        found: ErrorToKl | None = msgspec.convert(raw, ErrorToKl | None)
    except msgspec.ValidationError as error:
        raise ValueError(f"error_to_kl: {error}") from error
    return found


def deviation_to_json(deviation: BlockDeviation | None) -> list[Any] | None:
    """Write deviations as they are stored."""
    return None if deviation is None else [deviation.block, base64.b64encode(deviation.codes).decode()]


def deviation_of(named: tuple[int, str], tokens: int) -> BlockDeviation:
    """Read ``deviation_to_json``."""
    block, text = named
    codes = base64.b64decode(text, validate=True)
    if len(codes) != -(-tokens // block):
        raise ValueError(f"{len(codes)} deviations of blocks of {block} tokens")
    return BlockDeviation(block, codes)


class Fitted(Protocol):
    """A profile that was fitted on caches of one model."""

    @property
    def model_id(self) -> str:
        """The model's name."""

    @property
    def model_revision(self) -> str:
        """The model's revision; empty where it is not known."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The model's layers."""


def check_model(profile: Fitted, meta: CacheMeta, what: str, fit: str) -> None:
    """Raise MismatchError where a profile's layout or model differs from a cache's."""
    if shapes_of(meta.layers) != shapes_of(profile.layers):
        raise MismatchError(f"the {what} fits another cache layout; fit one on caches of this model ({fit})")
    if profile.model_revision and meta.model_revision and profile.model_revision != meta.model_revision:
        raise MismatchError(
            f"the {what} belongs to model {profile.model_id!r} ({profile.model_revision[:12]}), "
            f"the cache to {meta.model_id!r} ({meta.model_revision[:12]}); fit a profile for this model"
        )
