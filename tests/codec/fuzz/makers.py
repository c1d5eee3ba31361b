"""Profiles and blobs made by docs/format.md from nothing: whatever the text allows, small enough for a slow decoder."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from typing import NamedTuple

import numpy as np

from ..by_the_text import read_profile, tables_of
from ..streams_by_the_text import blocks_of
from .drafts import Cell, Draft
from .writers import LayeredWriter, cachegen_segment, frame, lossless_segment, some_frequencies

LAYERED, LOSSLESS, CACHEGEN = 1, 2, 3
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
VOCABULARY = 40
NAMES = ("", "a", "ü☃", "level " * 9)


class Made(NamedTuple):
    """A blob and what reads it: a profile's file, where one is named, and hidden states, where there are some.

    legal: nothing about it may be refused.
    """

    blob: bytes
    profile: bytes | None = None
    hidden: np.ndarray | None = None
    legal: bool = True


def packed_json(rng, value):
    """A frame of JSON in one of its many styles, and its raw length."""
    items = list(value.items())
    rng.shuffle(items)
    if rng.random() < 0.3:
        items.append(("unknown" + str(rng.integers(9)), [None, {"x": [1e300, -0.0, True]}]))
    style = {"indent": 1} if rng.random() < 0.2 else {"separators": (",", ":")}
    raw = json.dumps(dict(items), ensure_ascii=bool(rng.random() < 0.5), **style).encode()
    return frame(rng, raw), len(raw)


def rotary(rng, dim, ropes):
    """A regime that fits a dim, and the first of its dimensions; None where none does."""
    fitting = [at for at, rope in enumerate(ropes) if 2 * count_of(rope) <= dim]
    if not fitting or rng.random() < 0.3:
        return None, 0
    at = int(rng.choice(fitting))
    return at, int(rng.integers(dim - 2 * count_of(ropes[at]) + 1))


def count_of(rope):
    return len(base64.b64decode(rope["inv_freq"])) // 4


def make_ropes(rng):
    out = []
    for _ in range(rng.integers(1, 3)):
        frequencies_ = (rng.standard_normal(rng.integers(1, 4)) * 10.0 ** rng.integers(-3, 2)).astype("<f4")
        out.append(
            {
                "inv_freq": base64.b64encode(frequencies_.tobytes()).decode(),
                "interleaved": bool(rng.integers(2)),
                "attention_scaling": float(rng.choice([1, 0.5, 1.25])),
                "max_positions": None if rng.random() < 0.8 else 1 << 20,
                "kind": str(rng.choice(["default", "yarn", ""])),
            }
        )
    return out


def make_layers(rng, ropes):
    """One to four layers, at least one of which has a cache."""
    rows = []
    for _ in range(rng.integers(1, 5)):
        heads, key_dim, value_dim = (int(n) for n in rng.integers(1, (3, 8, 6)))
        kind = str(rng.choice(["full", "full", "sliding", "none"]))
        if kind == "none" and rng.random() < 0.5:
            heads = key_dim = value_dim = 0
        rope, start = rotary(rng, key_dim, ropes)
        value_rope = rotary(rng, value_dim, ropes)[0] if rng.random() < 0.3 else None
        row = [kind, heads, key_dim, value_dim, rope, None if rng.random() < 0.7 else int(rng.integers(1, 99))]
        rows.append(row if (value_rope, start) == (None, 0) and rng.random() < 0.8 else [*row, value_rope, start])
    if all(row[0] == "none" for row in rows):
        return make_layers(rng, ropes)
    return rows


def planes_of_layers(layers):
    return [(side, number, heads * dim) for side, number, heads, dim in blocks_of(layers)]


def numbers(rng, shape, size):
    """Floats that are mostly about ``size`` large."""
    out = rng.standard_normal(shape) * size
    return np.where(rng.random(shape) < 0.05, 0.0, out)


def bfloat16_bits(values):
    return (np.asarray(values, "<f4").view("<u4") >> 16).astype("<u2")


def make_group(rng, arrays, number, planes, layers, features):
    """Arrays of one group."""
    width, size = sum(plane[2] for plane in planes), 10.0 ** rng.integers(-2, 3)
    identity = not features and rng.random() < 0.3
    rank = width if identity else int(rng.integers(0 if rng.random() < 0.1 else 1, min(width, 8) + 1))
    own = {"mean": numbers(rng, width, size).astype(rng.choice(["<f2", "<f4"]))}
    own["spread"] = rng.integers(-50, 90, rank).astype("<i2")
    if identity:
        own["row_scale"] = np.abs(numbers(rng, width, 1)).astype("<f4") + np.float32(1e-3)
    elif rng.random() < 0.5:
        own["rows"] = bfloat16_bits(numbers(rng, (rank, width), 1))
    else:
        own["rows"] = rng.integers(-128, 128, (rank, width)).astype("|i1")
        own["row_exponent"] = rng.integers(-12, 4, rank).astype("<i2")
    if features:
        own["predictor"] = bfloat16_bits(numbers(rng, (features, width), 0.05 * size))
    for j, (_, layer, plane_width) in enumerate([] if identity else planes):
        heads = layers[layer][1]
        shape = (plane_width,) if rng.random() < 0.5 else (heads, plane_width // heads, plane_width // heads)
        own[f"metric{j}"] = np.ones(shape, "<f4")
    arrays |= {f"g{number}.{name}": array for name, array in own.items()}


def make_layered_profile(rng, layers, *, head_start=None):
    """Head and arrays of section 3.2."""
    head_start = bool(rng.random() < 0.3) if head_start is None else head_start
    table = rng.random() < 0.5
    hidden, r = int(rng.integers(1, 6)) if head_start else 0, int(rng.integers(1, 5)) if table else 0
    planes = planes_of_layers(layers)
    rng.shuffle(planes)
    planes = [(str(side), int(layer), int(width)) for side, layer, width in planes]
    ends = sorted({*(int(n) for n in rng.integers(1, len(planes) + 1, rng.integers(1, 3))), len(planes)})
    groups = [planes[start:stop] for start, stop in zip([0, *ends], ends, strict=False)]
    arrays = {
        "base": some_frequencies(rng, 42, 256, 4096, 0).astype("<u2"),
        "ternary": some_frequencies(rng, 126, 3, 4096, 1).reshape(42, 3, 3).astype("<u2"),
        "points": rng.integers(0, 2**15 + 1, (42, 2)).astype("<u2"),
    }
    if table:
        arrays["table"] = rng.integers(-128, 128, (VOCABULARY, r)).astype("|i1")
    for number, group in enumerate(groups):
        make_group(rng, arrays, number, group, layers, r + hidden)
    if rng.random() < 0.4:
        for number, group in enumerate(groups):
            width = sum(plane[2] for plane in group)
            arrays[f"g{number}.sink"] = numbers(rng, width, 1).astype("<f4")
            arrays[f"g{number}.sink_steps"] = np.abs(numbers(rng, width, 0.1)).astype("<f4") + np.float32(1e-4)
    head = {"groups": [[[side, layer] for side, layer, _ in group] for group in groups]}
    head |= {"head_start": int(rng.integers(1, 4)) if head_start else 0, "hidden_size": hidden}
    head["error_to_kl"] = None if rng.random() < 0.5 else [0.25, 1.5]
    return head, arrays


def make_cachegen_profile(rng, layers):
    """Head and arrays of section 7.1."""
    channels, blocks = sum(plane[2] for plane in planes_of_layers(layers)), len(planes_of_layers(layers))
    levels = [[str(rng.choice(NAMES)), float(rng.choice([2, 1, 0.5, 0.01]))] for _ in range(rng.integers(1, 4))]
    return {"levels": levels}, {
        "units": np.abs(numbers(rng, blocks, 1)).astype("<f4") + np.float32(1e-3),
        "anchors": some_frequencies(rng, channels, 255, 65536, 1).astype("<u2"),
        "deltas": some_frequencies(rng, len(levels) * channels, 64, 65536, 1).astype("<u2").reshape(-1, channels, 64),
    }


def pack_profile(rng, magic, head, arrays):
    """A profile's file (section 3.1); some arrays raw, some as frames."""
    rows, parts = [], []
    for name, array in arrays.items():
        raw = np.ascontiguousarray(array).tobytes()
        packed = frame(rng, raw)
        stored = packed if len(packed) < len(raw) and rng.random() < 0.7 else raw
        rows.append([name, array.dtype.str, list(array.shape), len(stored)])
        parts.append(stored)
    metadata, raw_length = packed_json(rng, {"arrays": rows, "head": head})
    body = metadata + b"".join(parts)
    minor, compatible = (0, 0) if rng.random() < 0.8 else (int(rng.integers(2**16)), int(rng.integers(2**32)))
    fixed = magic + struct.pack("<HHII", 1, minor, 0, compatible)
    out = fixed + struct.pack("<QIII", 40 + len(body), 0, len(metadata), raw_length) + body
    return out[:28] + struct.pack("<I", zlib.crc32(out)) + out[32:]


def make_profile(rng, codec, layers, revision, *, head_start=None):
    """A profile of either kind for layers; which layers have positions does not matter to it."""
    if codec == CACHEGEN:
        magic, (head, arrays) = b"\x89KVG\r\n\x1a\n", make_cachegen_profile(rng, layers)
    else:
        magic, (head, arrays) = b"\x89KVP\r\n\x1a\n", make_layered_profile(rng, layers, head_start=head_start)
    head |= {"model_id": "m", "model_revision": revision, "layers": layers, "notes": {"tokens": 1}}
    return pack_profile(rng, magic, head, arrays)


class BlobMaker:
    """Draws a blob part by part (section 2)."""

    def __init__(self, rng, *, profile=None, meta=None, head_start=None):
        self.rng = rng
        self.ropes = meta["ropes"] if meta else make_ropes(rng)
        self.layers = meta["layers"] if meta else make_layers(rng, self.ropes)
        self.tokens = int(rng.choice([1, 2, 9, 10, 11, int(rng.integers(1, 25))]))
        self.chunk_tokens = int(rng.choice([1, 3, 8, 16, 4096])) if self.tokens < 12 else int(rng.choice([7, 16, 999]))
        self.revision = str(rng.choice(["", "r"])) if meta is None else meta["model_revision"]
        self.codec = int(rng.choice([0, LAYERED, LAYERED, LAYERED, CACHEGEN])) if profile is None else LAYERED
        if profile is not None and profile.startswith(b"\x89KVG"):
            self.codec = CACHEGEN
        self.profile = profile
        if self.codec and profile is None:
            self.profile = make_profile(rng, self.codec, self.layers, self.revision, head_start=head_start)
        self.head, self.arrays = read_profile(self.profile) if self.profile else ({}, {})
        self.is_inside = self.codec == LAYERED and profile is None and bool(rng.random() < 0.3)
        self.levels = self.make_levels()
        needed = "table" in self.arrays
        vocabulary = len(self.arrays["table"]) if needed else 2 ** int(rng.integers(1, 33))
        self.ids = None if not needed and rng.random() < 0.3 else rng.integers(0, vocabulary, self.tokens)
        size = self.head.get("hidden_size") or 0
        self.hidden = numbers(rng, (self.tokens, size), 1).astype(np.float32) if size else None

    def make_levels(self):
        """Rows of the metadata's ``levels``."""
        rng, levels = self.rng, []
        count = 0
        if self.codec == CACHEGEN:
            count = int(rng.integers(1, len(self.head["levels"]) + 1))
        elif self.codec:
            count = int(rng.choice([1, 1, 2, 3, 5, 7]))
        step = 10.0 ** rng.integers(-3, 2)
        for k in range(count):
            layered = self.codec == LAYERED
            own = [step / 3**k, int(rng.integers(-9, 9))] if layered else [0, 0]
            levels.append([str(rng.choice(NAMES)), self.codec, *own])
        exact = rng.random() < 0.3 or not levels
        return [*levels, *([["exact", LOSSLESS, 0, 0]] if exact else [])]

    def chunk(self, tokens, dtype):
        """Segment and number of symbols of every level of one chunk."""
        rng, out, layered = self.rng, [], None
        if self.codec == LAYERED:
            groups = range(len(self.head["groups"]))
            spread = np.concatenate([self.arrays[f"g{i}.spread"] for i in groups]).tolist()
            layered = LayeredWriter(rng, tokens, spread, tables_of(self.arrays), len(self.levels))
        for level, (_, codec, _, shift) in enumerate(self.levels):
            if codec == LAYERED:
                out.append(layered.segment(level, shift))
            elif codec == CACHEGEN:
                out.append(cachegen_segment(rng, tokens, self.layers, level, self.arrays))
            else:
                out.append(lossless_segment(rng, tokens, self.layers, dtype))
        return out

    def kept(self):
        """Bits of what was kept, raw or in a frame; nothing where all was."""
        rng, raw = self.rng, b""
        if rng.random() < 0.7:
            return b""
        for kind, heads, *_ in self.layers:
            if kind != "none":
                raw += np.packbits(rng.random(heads * self.tokens) < rng.choice([0.0, 0.5, 1.0])).tobytes()
        packed = frame(rng, raw)
        return packed if len(packed) < len(raw) <= 256 * len(packed) else raw

    def sinks(self, kept):
        """Section 2.8: what is stored of each attention sink, by its place; most blobs have none."""
        rng, widths = self.rng, [len(array) for name, array in self.arrays.items() if name.endswith(".sink")]
        if self.codec != LAYERED or not widths or kept:
            return {}
        places = sorted({int(at) for at in rng.integers(0, self.tokens, rng.integers(0, 4))})
        return {at: self._sink(sum(widths)) for at in places}

    def _sink(self, width):
        codes = self.rng.integers(0, self.rng.choice([2, 60, 1 << 16]), width)
        return frame(self.rng, bytes(code % 256 for code in codes) + bytes(code // 256 for code in codes))

    def metadata(self, dtype, kept, sinks):
        """What the frame of JSON says."""
        digest = "" if self.ids is None else hashlib.sha256(self.ids.astype("<u4").tobytes()).hexdigest()
        meta = {"model_id": "m", "model_revision": self.revision, "tokenizer_digest": "", "token_digest": digest}
        stands_inside = self.is_inside or not self.codec
        record = {}
        if self.rng.random() < 0.3:
            block = int(self.rng.integers(1, self.tokens + 2))
            record["deviation"] = [block, base64.b64encode(self.rng.bytes(-(-self.tokens // block))).decode()]
        if sinks:
            record["sinks"] = [[at, len(stored)] for at, stored in sinks.items()]
        return record | {
            "levels": self.levels,
            "profile": "" if stands_inside else hashlib.sha256(self.profile).hexdigest(),
            "head_start": self.head.get("head_start") or 0,
            "error_to_kl": self.head.get("error_to_kl"),
            "offset": None if self.rng.random() < 0.5 else int(self.rng.integers(-50, 5000)),
            "kept_bytes": len(kept),
            "meta": meta | {"dtype": dtype, "layers": self.layers, "ropes": self.ropes},
        }

    def make(self):
        """The blob; the last chunks may lack their finest levels."""
        rng = self.rng
        dtype = str(rng.choice(DTYPES))
        spans = [min(self.chunk_tokens, self.tokens - at) for at in range(0, self.tokens, self.chunk_tokens)]
        chunks = [self.chunk(tokens, dtype) for tokens in spans]
        if rng.random() < 0.2:
            chunks[-1] = chunks[-1][: rng.integers(1, len(self.levels) + 1)]
        kept = self.kept()
        sinks, inside = self.sinks(kept), self.profile if self.is_inside else b""
        blob = pack_blob(rng, self, self.metadata(dtype, kept, sinks), chunks, (inside, kept, [*sinks.values()]))
        return Made(blob, None if self.is_inside else self.profile, self.hidden)


def pack_ids(rng, ids, tokens):
    """Bits of an id, and the packed ids; a writer may use more bits than it must."""
    if ids is None:
        return 0, bytes(tokens)
    least = max(8, int(ids.max()).bit_length())
    bits = least if rng.random() < 0.6 else int(rng.integers(least, 33))
    whole = sum(int(token) << at * bits for at, token in enumerate(ids))
    return bits, whole.to_bytes(-(-tokens * bits // 8), "little")


def pack_blob(rng, maker, metadata, chunks, parts):
    """All parts in order, index and checksums made."""
    bits, ids = pack_ids(rng, maker.ids, maker.tokens)
    cells = []
    for chunk in chunks:
        row = [
            Cell(data, symbols, codec, 0, *rng.random(2))
            for (data, symbols), (_, codec, *_) in zip(chunk, maker.levels, strict=False)
        ]
        cells.append(row + [None] * (len(maker.levels) - len(row)))
    flags = 8 if "sinks" in metadata else 0
    draft = Draft(metadata, maker.tokens, maker.chunk_tokens, len(maker.levels), bits, ids, *parts, cells, flags=flags)
    if rng.random() < 0.2:
        draft.minor, draft.compatible, draft.reserved = (int(n) for n in rng.integers(0, (2**16, 2**32, 2**16)))
    if rng.random() < 0.3:
        draft.padding = int(rng.integers(64))
    return draft.pack_with(*packed_json(rng, metadata))


def make_blob(rng, **how):
    """Any blob that the text allows."""
    return BlobMaker(rng, **how).make()
