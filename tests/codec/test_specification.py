"""A second decoder, written from docs/format.md alone, agrees with the codec on the golden files."""

from __future__ import annotations

import base64
import math
import struct

import numpy as np
import pytest
import zstandard

from kvwire.codec import Profile, decode

from . import surgery as cut
from .write_golden import GOLDEN


def clip(value):
    return min(max(value, 1), 42)


def unframed(data):
    return zstandard.ZstdDecompressor().decompress(data) if data else b""


def read_profile(data):
    """Head and arrays of section 3."""
    meta, parts = cut.profile_parts(data)
    arrays = {}
    for name, dtype, shape, stored in meta["arrays"]:
        raw = parts[name] if stored == math.prod(shape) * int(dtype[2]) else unframed(parts[name])
        arrays[name] = np.frombuffer(raw, dtype).reshape(shape).astype(np.int64 if dtype[1] in "iu" else np.float64)
    return meta["head"], arrays


def read_lane(state, words, walk, table_of):
    """One lane of section 4.1: the symbols along its walk; table_of gives the frequencies of a place."""
    out, words = [], iter(words)
    for place in walk:
        slot, frequencies = state % 4096, table_of(*place)
        symbol = int(np.searchsorted(np.cumsum(frequencies), slot, side="right"))
        state = int(frequencies[symbol]) * (state // 4096) + slot - int(frequencies[:symbol].sum())
        if state < 65536:
            state = 65536 * state + next(words)
        out.append(symbol)
    assert state == 65536
    assert next(words, None) is None
    return out


def read_segment(data, level, shift, classes, values, spread, arrays):
    """One segment of section 4, in place: values are lists by token, classes 0 while open."""
    word_count, class_bytes, escape_bytes, lanes, _ = struct.unpack_from("<IIIHH", data)
    at = 16 + class_bytes
    codes = iter(unframed(data[16:at]))
    escapes = iter(np.frombuffer(unframed(data[at : at + escape_bytes]), "<i4").tolist())
    at += escape_bytes
    states = struct.unpack_from(f"<{lanes}I", data, at)
    lengths = struct.unpack_from(f"<{lanes}H", data, at + 4 * lanes)
    words = struct.unpack_from(f"<{word_count}H", data, at + 6 * lanes)
    for column, cls in enumerate(classes):
        code = 0 if cls else next(codes)
        if cls:
            classes[column] = clip(cls + 6)
        elif code:
            difference = (code - 1) // 2 if code % 2 else -(code // 2)
            classes[column] = clip(clip(spread[column] - shift) + difference)
    coded = [column for column, cls in enumerate(classes) if cls]

    def table(token, index):
        cls = classes[coded[index]] - 1
        return arrays["base"][cls] if not level else arrays["ternary"][cls, min(abs(values[token][coded[index]]), 2)]

    symbols = {}
    for lane, (state, length) in enumerate(zip(states, lengths, strict=True)):
        walk = [(token, index) for index in range(lane, len(coded), lanes) for token in range(len(values))]
        symbols |= zip(walk, read_lane(state, words[:length], walk, table), strict=True)
        words = words[length:]
    for (token, index), symbol in sorted(symbols.items()):
        was = values[token][coded[index]]
        if not level:
            values[token][coded[index]] = symbol - 128 if symbol else next(escapes)
        else:
            values[token][coded[index]] = 3 * was + (symbol - 1 if was >= 0 else 1 - symbol)


def coefficients_of(blob, level, spread, arrays):
    """Coefficients of every token at a level."""
    tokens, chunk_tokens, levels = (
        cut.get(blob, cut.BLOB_FIELDS, name) for name in ("tokens", "chunk_tokens", "levels")
    )
    steps = cut.metadata(blob)["levels"]
    out = []
    for chunk in range(-(-tokens // chunk_tokens)):
        values = [[0] * len(spread) for _ in range(min(chunk_tokens, tokens - chunk * chunk_tokens))]
        classes = [0] * len(spread)
        for k in range(level + 1):
            read_segment(cut.segment(blob, chunk * levels + k), k, steps[k][2], classes, values, spread, arrays)
        out += values
    return np.array(out) * steps[level][1]


def turned(part, rope, offset):
    """Keys ``[tokens, heads, dim]`` placed at offset, offset + 1, ..."""
    frequencies = np.frombuffer(base64.b64decode(rope["inv_freq"]), "<f4").astype(np.float64)
    half, out = len(frequencies), part.copy()
    for j, frequency in enumerate(frequencies):
        a, b = (2 * j, 2 * j + 1) if rope["interleaved"] else (j, j + half)
        angle = ((offset + np.arange(len(part))) * frequency)[:, None]
        out[..., a] = part[..., a] * np.cos(angle) - part[..., b] * np.sin(angle)
        out[..., b] = part[..., b] * np.cos(angle) + part[..., a] * np.sin(angle)
    return out


def decode_by_the_text(blob, level, profile, offset):
    """Keys and values by layer, ``[tokens, heads, dim]``."""
    size = cut.get(blob, cut.BLOB_FIELDS, "profile_bytes")
    tokens, bits = (cut.get(blob, cut.BLOB_FIELDS, name) for name in ("tokens", "id_bits"))
    at = cut.index_at(blob) + 32 * cut.cells(blob) + -(-tokens * max(8, bits) // 8)
    head, arrays = read_profile(blob[at : at + size] if size else profile)
    count = len(head["groups"])
    spread = np.concatenate([arrays[f"g{i}.spread"] for i in range(count)]).tolist()
    coefficients, start = coefficients_of(blob, level, spread, arrays), 0
    meta, found = cut.metadata(blob)["meta"], {}
    for i, group in enumerate(head["groups"]):
        mean, scale, rows = (arrays.get(f"g{i}.{name}") for name in ("mean", "row_scale", "rows"))
        own = coefficients[:, start : start + len(scale)] * scale
        start += len(scale)
        elements = mean + (own if rows is None else own @ rows)
        for layer in group["layers"]:
            _, heads, key_dim, value_dim, rope, _ = meta["layers"][layer]
            dim = key_dim if group["side"] == "key" else value_dim
            part, elements = elements[:, : heads * dim].reshape(-1, heads, dim), elements[:, heads * dim :]
            placed = group["side"] == "key" and rope is not None
            found[group["side"], layer] = turned(part, meta["ropes"][rope], offset) if placed else part
    return found


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("v1.0-*.kvw")), ids=lambda path: path.stem)
def test_a_decoder_made_from_the_specification_agrees(path):
    blob, stored = path.read_bytes(), (GOLDEN / "v1.0.kvp").read_bytes()
    for level in range(cut.get(blob, cut.BLOB_FIELDS, "levels")):
        cache = decode(blob, level, Profile.from_bytes(stored), offset=3)
        found = decode_by_the_text(blob, level, stored, 3)
        assert len(found) == 2 * sum(spec.kind != "none" for spec in cache.meta.layers)
        for (side, layer), part in found.items():
            ours = (cache.keys if side == "key" else cache.values)[layer]
            np.testing.assert_allclose(ours.double().numpy(), part.transpose(1, 0, 2), atol=2e-3, rtol=2e-3)
