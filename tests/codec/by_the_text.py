"""A second decoder of blobs, written from docs/format.md alone: slow, plain, and in float64.

Beside each number goes its noise: how far a decoder in float32 may be off, by the format's own words. That is 2^-19 of
the sizes of all terms of a sum (some tens of terms, each rounded), the step to the other bfloat16 number where an
expectation lies within noise of the middle between two, and 2^-22 of an angle's size. Where noise is not finite, the
text says nothing: a number beyond float32, an angle beyond counting.
"""

from __future__ import annotations

import base64
import hashlib
import math
import struct
from functools import lru_cache

import numpy as np
import torch

from . import surgery as cut
from .streams_by_the_text import read_cachegen, read_lanes, read_lossless, unframed

LOSSLESS, CACHEGEN = 2, 3
FLOAT_NOISE, ANGLE_NOISE = 2.0**-19, 2.0**-22
LEAST, MOST = 2.0**-120, 2.0**120
"""Sizes that leave float32 room for every partial sum."""


class UndefinedError(Exception):
    """The text leaves the result to the decoder: a value left 32 bits."""


def clip(value):
    return min(max(value, 1), 42)


def bfloat16(bits):
    return (bits.astype("<u4") << 16).view("<f4").astype(np.float64)


def rounded(numbers):
    """To the nearest bfloat16 number, ties to even."""
    return torch.from_numpy(numbers).float().bfloat16().double().numpy()


def read_profile(data):
    """Head and arrays of section 3; floats and rows as numbers."""
    meta, parts = cut.profile_parts(data)
    packed, arrays = cut.get(data, cut.PROFILE_FIELDS, "incompatible") & 1, {}
    assert_sections(data, meta)
    for name, dtype, shape, stored in meta["arrays"]:
        item = int(dtype[2])
        raw = parts[name] if stored == math.prod(shape) * item else unframed(parts[name])
        if packed and stored < len(raw):
            raw = bytes(raw[plane * len(raw) // item + n] for n in range(len(raw) // item) for plane in range(item))
        array = np.frombuffer(raw, dtype).reshape(shape)
        bits = dtype == "<u2" and name.partition(".")[2] in {"rows", "predictor"}
        arrays[name] = bfloat16(array) if bits else array.astype(np.int64 if dtype[1] in "iu" else np.float64)
    for name in [name for name in arrays if name.endswith(".row_exponent")]:
        rows = name.replace("row_exponent", "rows")
        arrays[rows] = arrays[rows] * 2.0 ** arrays[name][:, None]
    if "table" in arrays and any(name.endswith(".rows_steps") for name in arrays):
        arrays["table"] = arrays["table"].T
    for name in [name for name in arrays if name.endswith("_wide")]:
        if next(row[1] for row in meta["arrays"] if row[0] == name) == "<u2":
            arrays[name] = np.where(arrays[name] % 2, -(arrays[name] + 1) // 2, arrays[name] // 2)
    for name in [name.removesuffix("_steps") for name in arrays if name.endswith(".rows_steps")]:
        pieces = [f"{name}{k}" for k in range(16) if f"{name}{k}" in arrays]
        kinds = [kind for piece in pieces for kind in (f"{piece}_wide", piece) if kind in arrays]
        if pieces:
            arrays[name] = np.concatenate([arrays[kind] for kind in kinds])
    for name in [name.removesuffix("_columns") for name in arrays if name.endswith("_columns")]:
        entries = np.concatenate([arrays.get(f"{name}_wide", arrays[name][:0]), arrays[name]]).astype(np.float32)
        steps, columns = (arrays[f"{name}_{kind}"].astype(np.float32) for kind in ("steps", "columns"))
        arrays[name] = rounded((entries * steps[:, None] * columns).astype(np.float64))
    return meta["head"], arrays


def assert_sections(data, meta):
    """Section 3.1: what flag 2 says."""
    assert (cut.get(data, cut.PROFILE_FIELDS, "incompatible") & 2 != 0) == ("sections" in meta)
    at, sizes = 40 + cut.get(data, cut.PROFILE_FIELDS, "meta_stored"), [row[3] for row in meta["arrays"]]
    for count, stored, sha256 in meta.get("sections", []):
        assert hashlib.sha256(data[at : at + stored]).hexdigest() == sha256
        assert sum(sizes[:count]) == stored
        at, sizes = at + stored, sizes[count:]
    assert not meta.get("sections") or (at == len(data) and not sizes)


def tables_of(arrays):
    """Starts of the base tables by class, of the ternary ones by class and context."""
    return [_starts(each.tobytes(), each.dtype.str, each.shape) for each in (arrays["base"], arrays["ternary"])]


@lru_cache(16)
def _starts(data, dtype, shape):
    """Of tables that every chunk of a blob asks for: as lists they take a while."""
    tables = np.frombuffer(data, dtype).reshape(shape)
    return np.concatenate([0 * tables[..., :1], tables.cumsum(-1)], -1).tolist()


def read_segment(data, level, shift, classes, values, spread, tables):
    """One segment of section 4, in place: values are lists by token, classes 0 while open."""
    word_count, class_bytes, escape_bytes, lanes, _ = struct.unpack_from("<IIIHH", data)
    at = 16 + class_bytes
    codes = iter(unframed(data[16:at]))
    escapes = iter(np.frombuffer(unframed(data[at : at + escape_bytes]), "<i4").tolist())
    for column, cls in enumerate(classes):
        code = 0 if cls else next(codes)
        if cls:
            classes[column] = clip(cls + 6)
        elif code:
            difference = (code - 1) // 2 if code % 2 else -(code // 2)
            classes[column] = clip(clip(spread[column] - shift) + difference)
    coded = [column for column, cls in enumerate(classes) if cls]

    def starts(token, index):
        cls = classes[coded[index]] - 1
        return tables[1][cls][min(abs(values[token][coded[index]]), 2)] if level else tables[0][cls]

    stream = data[at + escape_bytes :]
    assert len(stream) == 6 * lanes + 2 * word_count
    symbols = read_lanes(stream, lanes, len(values), len(coded), starts)
    for (token, index), symbol in sorted(symbols.items()):
        was = values[token][coded[index]]
        if not level:
            values[token][coded[index]] = symbol - 128 if symbol else next(escapes)
        else:
            values[token][coded[index]] = 3 * was + (symbol - 1 if was >= 0 else 1 - symbol)
            if abs(values[token][coded[index]]) >= 2**31:
                raise UndefinedError
    assert next(escapes, None) is None


def size_of(value, cls, points):
    """Size of a value in steps, by its column's class."""
    return abs(value) - (points[cls - 1, abs(value) - 1] / 65536 if 1 <= abs(value) <= 2 else 0)


def coefficients_of(segments, level, steps, tokens, spread, arrays):
    """Coefficients of a chunk at a level, ``[tokens, columns]``."""
    values, classes, tables = [[0] * len(spread) for _ in range(tokens)], [0] * len(spread), tables_of(arrays)
    for k in range(level + 1):
        read_segment(segments[k], k, steps[k][3], classes, values, spread, tables)
    sizes = [
        [
            math.copysign(size_of(v, cls, arrays["points"]), v) if cls else 0.0
            for v, cls in zip(row, classes, strict=True)
        ]
        for row in values
    ]
    return np.array(sizes) * steps[level][2]


def expected(ids, hidden, group, features):
    """What the text says of a group's elements, and how sure that is."""
    mean, predictor = group["mean"], group.get("predictor")
    elements, noise = np.tile(mean, (len(ids), 1)), np.zeros((len(ids), len(mean)))
    if predictor is not None and features is not None:
        told = features[ids]
        elements = mean + told @ predictor[: told.shape[1]]
        sizes = abs(mean) + abs(told) @ abs(predictor[: told.shape[1]])
        near = FLOAT_NOISE * sizes
        noise = rounded(elements + near) - rounded(elements - near) + noise_of(sizes)
        elements = rounded(elements)
    if predictor is not None and hidden is not None:
        rest = predictor[len(predictor) - hidden.shape[1] :]
        elements, noise = elements + hidden @ rest, noise + noise_of(abs(hidden) @ abs(rest))
    return elements, noise


def noise_of(sizes):
    """Of sums whose terms have these sizes in all."""
    return np.where(sizes < MOST, FLOAT_NOISE * sizes + LEAST, np.inf)


def layered(coefficients, step, ids, hidden, head, arrays, layers):
    """Un-rotated planes ``[tokens, heads, dim]`` of a chunk by side and layer, each with its noise."""
    planes, start = {}, 0
    hidden = hidden if head["hidden_size"] else None
    for i, planes_of_group in enumerate(head["groups"]):
        group = {name.partition(".")[2]: array for name, array in arrays.items() if name.startswith(f"g{i}.")}
        own = coefficients[:, start : start + len(group["spread"])]
        start += own.shape[1]
        rows = np.diag(group["row_scale"]) if "rows" not in group else group["rows"]
        elements, noise = expected(np.zeros(len(own), int) if ids is None else ids, hidden, group, arrays.get("table"))
        sizes = abs(own) @ abs(rows)
        beyond = np.where(sizes / min(step, 1.0) < MOST, 0.0, np.inf)  # the step may come after the sum
        noise = noise + noise_of(sizes + abs(elements)) + beyond
        elements = elements + own @ rows
        for side, layer in planes_of_group:
            _, heads, key_dim, value_dim, *_ = layers[layer]
            dim = key_dim if side == "key" else value_dim
            planes[side, layer] = [part[:, : heads * dim].reshape(-1, heads, dim) for part in (elements, noise)]
            elements, noise = elements[:, heads * dim :], noise[:, heads * dim :]
    return planes


def read_sinks(blob, head, *, begins):
    """Sections 2.8 and 2.9: the numbers q of each sink, by its place."""
    found = {}
    places = [place for place, _ in head.get("sinks") or []]
    frames = cut.sink_frames(blob)[: None if begins else len(places)]
    for place, stored in zip([*places, *[0] * (len(frames) - len(places))], frames, strict=True):
        raw = np.frombuffer(unframed(stored), np.uint8).astype(np.int64)
        codes = raw[: len(raw) // 2] + 256 * raw[len(raw) // 2 :]
        found[place] = np.where(codes % 2, -(codes + 1) // 2, codes // 2)
    return found


def put_sinks(planes, sinks, start, head, arrays, layers):
    """Write the sinks among a chunk's tokens, the first of which is ``start``, over its un-rotated planes, in place."""
    count = len(next(iter(planes.values()))[0])
    for place, steps in sinks.items():
        if not start <= place < start + count:
            continue
        left = steps
        for i, planes_of_group in enumerate(head["groups"]):
            sink, unit = arrays[f"g{i}.sink"], arrays[f"g{i}.sink_steps"]
            own, left = left[: len(sink)], left[len(sink) :]
            elements, sizes = sink + own * unit, abs(sink) + abs(own * unit)
            noise = noise_of(sizes)
            for side, layer in planes_of_group:
                _, heads, key_dim, value_dim, *_ = layers[layer]
                dim = key_dim if side == "key" else value_dim
                for whole, part in zip(planes[side, layer], (elements, noise), strict=True):
                    whole[place - start] = part[: heads * dim].reshape(heads, dim)
                elements, noise = elements[heads * dim :], noise[heads * dim :]
        assert not len(left)


def turned(part, noise, rope, first, offset):
    """A plane ``[tokens, heads, dim]`` placed at offset, offset + 1, ...; its rotary part begins at ``first``."""
    frequencies = np.frombuffer(base64.b64decode(rope["inv_freq"]), "<f4").astype(np.float64)
    half, out, out_noise = len(frequencies), part.copy(), noise.copy()
    for j, frequency in enumerate(frequencies):
        a, b = (2 * j, 2 * j + 1) if rope["interleaved"] else (j, j + half)
        a, b = first + a, first + b
        angle = ((offset + np.arange(len(part))) * frequency)[:, None]
        out[..., a] = part[..., a] * np.cos(angle) - part[..., b] * np.sin(angle)
        out[..., b] = part[..., b] * np.cos(angle) + part[..., a] * np.sin(angle)
        sizes = abs(part[..., a]) + abs(part[..., b])
        both = noise[..., a] + noise[..., b] + noise_of(sizes) + ANGLE_NOISE * abs(angle) * sizes
        out_noise[..., a] = out_noise[..., b] = both
    return out, out_noise


def placed(planes, meta, offset):
    """Un-rotated planes at the positions from offset on; None leaves them as they are."""
    out = {}
    for (side, layer), (part, noise) in planes.items():
        _, _, _, _, rope, _, value_rope, start = [*meta["layers"][layer], None, 0][:8]
        regime, first = (rope, start) if side == "key" else (value_rope, 0)
        still = regime is None or offset is None
        out[side, layer] = (part, noise) if still else turned(part, noise, meta["ropes"][regime], first, offset)
    return out


def read_ids(data, tokens, bits):
    """Token ids of section 2.4; None where they are not known."""
    whole = int.from_bytes(data, "little")
    return np.array([whole >> token * bits & (1 << bits) - 1 for token in range(tokens)]) if bits else None


def read_kept(blob, meta, tokens):
    """For each layer bool ``[heads, tokens]``; all true where nothing is said."""
    at = cut.tail_at(blob) + cut.get(blob, cut.BLOB_FIELDS, "profile_bytes")
    data = blob[at : at + cut.kept_bytes(blob)]
    sizes = [0 if kind == "none" else -(-heads * tokens // 8) for kind, heads, *_ in meta["layers"]]
    raw = data if len(data) in {0, sum(sizes)} else unframed(data)
    out, start = [], 0
    for (_, heads, *_), size in zip(meta["layers"], sizes, strict=True):
        bits = "".join(f"{byte:08b}" for byte in raw[start : start + size])
        count = heads * tokens if size else 0
        out.append(
            np.array([bit != "0" for bit in bits[:count] or "1" * count], bool).reshape(heads, tokens if size else 0)
        )
        start += size
    return out


class TextPredictor:
    """A blob, taken apart."""

    def __init__(self, blob, profile, hidden=None, *, begins=False):
        names = ("tokens", "chunk_tokens", "levels", "id_bits", "profile_bytes")
        self.tokens, self.chunk_tokens, self.level_count, bits, inside = (
            cut.get(blob, cut.BLOB_FIELDS, name) for name in names
        )
        self.blob, self.head = blob, cut.metadata(blob)
        tail = cut.tail_at(blob)
        ids_at = cut.index_at(blob) + 32 * cut.cells(blob)
        self.ids = read_ids(blob[ids_at:tail], self.tokens, bits)
        self.kept = read_kept(blob, self.head["meta"], self.tokens)
        self.hidden, self.begins = hidden, begins
        self.stored_profile = blob[tail : tail + inside] if inside else profile
        self.profile, self.arrays = {}, {}

    @staticmethod
    def offset_of(blob):
        """Where levels of codec 2 stand; None where their positions are off."""
        return cut.metadata(blob).get("offset")

    def chunk(self, number, level):
        """Un-rotated planes of a chunk, or those stored and where they stand; each with its noise."""
        span = slice(number * self.chunk_tokens, min((number + 1) * self.chunk_tokens, self.tokens))
        count, meta = span.stop - span.start, self.head["meta"]
        segments = [cut.segment(self.blob, number * self.level_count + k) for k in range(self.level_count)]
        codec = self.head["levels"][level][1]
        if codec == LOSSLESS:
            exact = read_lossless(segments[level], count, meta["layers"], meta["dtype"])
            return {plane: (part, np.zeros(part.shape)) for plane, part in exact.items()}
        if not self.profile:  # levels of codec 2 need none
            self.profile, self.arrays = read_profile(self.stored_profile)
        if codec == CACHEGEN:
            alone = read_cachegen(segments[level], count, meta["layers"], self.profile["levels"], level, self.arrays)
            return {plane: (part, noise_of(abs(part))) for plane, part in alone.items()}
        groups = range(len(self.profile["groups"]))
        spread = np.concatenate([self.arrays[f"g{i}.spread"] for i in groups]).tolist()
        steps = self.head["levels"]
        coefficients = coefficients_of(segments, level, steps, count, spread, self.arrays)
        ids = None if self.ids is None else self.ids[span]
        hidden = None if self.hidden is None else self.hidden[span]
        planes = layered(coefficients, steps[level][2], ids, hidden, self.profile, self.arrays, meta["layers"])
        sinks = read_sinks(self.blob, self.head, begins=self.begins)
        put_sinks(planes, sinks, span.start, self.profile, self.arrays, meta["layers"])
        return planes

    def decode_with_noise(self, level, offset):
        """Keys and values by side and layer, ``[heads, tokens, dim]``, at the positions from offset on, with noise."""
        meta = self.head["meta"]
        parts = [self.chunk(number, level) for number in range(-(-self.tokens // self.chunk_tokens))]
        planes = {
            plane: [np.concatenate([part[plane][which] for part in parts]) for which in (0, 1)] for plane in parts[0]
        }
        stood = self.head.get("offset") if self.head["levels"][level][1] == LOSSLESS else None
        if stood != offset:
            planes = placed(unplaced(planes, meta, stood), meta, offset)
        return {
            (side, layer): [np.where(self.kept[layer][:, :, None], part.transpose(1, 0, 2), 0) for part in both]
            for (side, layer), both in planes.items()
        }

    def decode(self, level, offset):
        """The numbers alone."""
        return {plane: part for plane, (part, _) in self.decode_with_noise(level, offset).items()}


def unplaced(planes, meta, stood):
    """Planes at the positions from ``stood`` on, turned back."""
    if stood is None:
        return planes
    back = {**meta, "ropes": [{**rope, "inv_freq": negative(rope["inv_freq"])} for rope in meta["ropes"]]}
    return placed(planes, back, stood)


def negative(inv_freq):
    return base64.b64encode((-np.frombuffer(base64.b64decode(inv_freq), "<f4")).tobytes())
