"""Cache layouts and metadata as JSON, and checked reading of untrusted JSON."""

from __future__ import annotations

import base64
import itertools
import json
import math
import re
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
import zstandard

from kvwire._json import strict_json
from kvwire.codec.format.codecs import MAX_SINKS
from kvwire.errors import ArgumentError, CorruptError, MismatchError
from kvwire.types import BlobPrefix, BlockDeviation, CacheMeta, LayerSpec, RopeRegime

MAX_JSON_BYTES = 1 << 20
"""A thousand layers take a tenth of this; hostile text of this length makes some tens of megabytes of objects."""
_MAX_BLOCK = 1 << 16
"""Most tokens that share a deviation."""
MAX_NEUTRAL = 4096
"""Most tokens of a neutral prefix."""
_SHA256 = re.compile("[0-9a-f]{64}")
_MAX_DIM = 1 << 20
"""Larger than any layer's dimensions; products of two still fit 64 bits."""
MAX_WIDTH = 1 << 23
"""Most elements for one token in all layers: several times those of the widest models without shared heads."""
_STEEPEST = 8.0
"""Largest exponent of ``error_to_kl``."""
_PAIR = 2
_SHORT = 6
"""Fields of a layer row that omits ``value_rope`` (None) and ``key_rope_start`` (0)."""


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
    if raw is None:
        return None
    numbers = [float(number) for number in raw if type(number) in {int, float}] if type(raw) is list else []
    scale, exponent = numbers if len(numbers) == len(raw) else (0.0, 0.0)
    if not (0 < scale < math.inf and 0 < exponent <= _STEEPEST):
        raise ValueError(f"error_to_kl {raw!r}")
    return scale, exponent


def deviation_to_json(deviation: BlockDeviation | None) -> list[Any] | None:
    """Write deviations as they are stored."""
    return None if deviation is None else [deviation.block, base64.b64encode(deviation.codes).decode()]


def deviation_from_json(raw: Any, tokens: int) -> BlockDeviation | None:  # noqa: ANN401 - JSON
    """Read ``deviation_to_json``."""
    if raw is None:
        return None
    block, text = raw
    if type(block) is not int or not 1 <= block <= _MAX_BLOCK or not isinstance(text, str):
        raise ValueError(f"deviations of blocks of {block!r}")
    codes = base64.b64decode(text, validate=True)
    if len(codes) != -(-tokens // block):
        raise ValueError(f"{len(codes)} deviations of blocks of {block} tokens")
    return BlockDeviation(block, codes)


def neutral_from_json(raw: Any) -> tuple[int, ...]:  # noqa: ANN401 - JSON
    """Read the token ids that a document was computed behind."""
    if raw is None:
        return ()
    sound = isinstance(raw, list) and all(type(token) is int and 0 <= token < 1 << 32 for token in raw)
    if not sound or not 0 < len(raw) <= MAX_NEUTRAL:
        raise ValueError(f"the neutral prefix is no list of 1 to {MAX_NEUTRAL} token ids")
    return tuple(raw)


def sinks_from_json(raw: Any, tokens: int) -> dict[int, int]:  # noqa: ANN401 - JSON
    """Read which tokens of a blob are attention sinks."""
    if raw is None:
        return {}
    sound = isinstance(raw, list) and 0 < len(raw) <= MAX_SINKS and all(map(_is_sink, raw))
    places = [at for at, _ in raw] if sound else []
    if not sound or not all(at < following for at, following in itertools.pairwise([*places, tokens])):
        msg = f"the attention sinks are no list of 1 to {MAX_SINKS} ascending places among {tokens} tokens, with sizes"
        raise ValueError(msg)
    return dict(raw)


def _is_sink(raw: Any) -> bool:  # noqa: ANN401 - JSON
    pair = isinstance(raw, list) and len(raw) == _PAIR and all(type(number) is int for number in raw)
    return pair and raw[0] >= 0 and 0 < raw[1] < 1 << 32


def prefix_from_json(raw: Any) -> BlobPrefix | None:  # noqa: ANN401 - JSON
    """Read the name of the tokens before a part of a document."""
    match raw:
        case None:
            return None
        case [int(tokens), str(digest), str(name)] if type(tokens) is int and _SHA256.fullmatch(digest):
            if 0 < tokens < 1 << 32:
                return BlobPrefix(tokens, digest, name)
    raise ValueError("the prefix of a part is a number of tokens, their SHA-256 and a document's name")


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
