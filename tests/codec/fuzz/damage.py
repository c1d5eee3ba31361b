"""Damage to blobs and profiles: bytes, fields, JSON, lists, streams, and whole parts in another order.

Whatever is changed, checksums, offsets and lengths are mostly mended, so that damage gets past them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from copy import deepcopy

import numpy as np
from zstandard import ZstdError

from kvwire.codec.format.codecs import MAX_LEVELS

from .. import surgery as cut
from .drafts import Draft, lists_of, unframed, with_lists

MOST_TOKENS = 1 << 16
"""Longer texts keep their digest."""
TOO_DAMAGED = (
    LookupError,
    MemoryError,
    OverflowError,
    TypeError,
    ValueError,
    ZeroDivisionError,
    struct.error,
    ZstdError,
)
"""What the surgeon meets in files that are too damaged already to be damaged where it was meant."""
NUMBERS = (0, 1, 2, 7, 63, 64, 255, 256, 4096, 65535, 2**31, 2**32 - 1)
ODD = (None, True, "", "\ud800", [], {}, [[]], -1, 0, 1, 10**30, -(10**400), 1.5, 1e308, 1e-308, "none", 2**20, 65536)
SEGMENT_FIELDS = {1: cut.SEGMENT_FIELDS, 2: cut.LOSSLESS_FIELDS, 3: cut.CACHEGEN_FIELDS}


def flip(rng, data):
    out = bytearray(data)
    for at in rng.integers(0, len(data), rng.integers(1, 5)):
        out[at] ^= 1 << rng.integers(8)
    return bytes(out)


def overwrite(rng, data):
    at, count = int(rng.integers(len(data))), int(rng.integers(1, 40))
    fill = rng.bytes(count) if rng.random() < 0.5 else bytes([rng.choice([0, 255, 128])]) * count
    return data[:at] + fill[: len(data) - at] + data[at + count :]


def truncate(rng, data):
    return data[: rng.integers(len(data))]


def splice(rng, data):
    start, stop, at = *sorted(rng.integers(0, len(data), 2)), rng.integers(len(data))
    stop = min(stop, start + 200)
    return data[:at] + data[start:stop] + data[at + (stop - start if rng.random() < 0.5 else 0) :]


BYTES = (flip, overwrite, truncate, splice)


def number(rng, was, form):
    bits = 8 * struct.calcsize(form)
    if form == "<f":
        return float(rng.choice([0.0, -1.0, np.inf, np.nan, 1e38]))
    choice = int(rng.choice([*NUMBERS, was + 1, was - 1, was * 2, was ^ (1 << int(rng.integers(bits))), 2**bits - 1]))
    return choice % 2**bits


def edit(rng, data, fields, base=0):
    """One field of a fixed layout."""
    name = str(rng.choice(list(fields)))
    try:
        was = int(np.nan_to_num(cut.get(data, fields, name, base)))
        return cut.put(data, fields, name, number(rng, was, fields[name][1]), base)
    except struct.error:
        return data


def change_json(rng, value):
    """One random place of the JSON replaced, dropped or doubled."""
    if isinstance(value, dict | list) and len(value) and rng.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = keys[rng.integers(len(keys))]
        if rng.random() < 0.1:
            del value[key]
        elif isinstance(value, list) and rng.random() < 0.1:
            value.append(deepcopy(value[key]))
        else:
            value[key] = change_json(rng, value[key])
        return value
    if isinstance(value, float) and rng.random() < 0.5:
        return value * float(rng.choice([-1, 0, 0.5, 3, 2.0**40, 2.0**-40]))
    if isinstance(value, int) and rng.random() < 0.5:
        return number(rng, value, "<Q") if rng.random() < 0.5 else value + int(rng.integers(-2, 3))
    return deepcopy(ODD[rng.integers(len(ODD))])


# Single bytes and fields: the layout is not looked at more than it must.


def edit_index(rng, blob):
    return edit(rng, blob, cut.ENTRY_FIELDS, cut.index_at(blob) + 32 * int(rng.integers(cut.cells(blob))))


def codec_of(blob, cell):
    return cut.get(blob, cut.ENTRY_FIELDS, "codec", cut.index_at(blob) + 32 * cell)


def edit_segment(rng, blob):
    cell = int(rng.integers(cut.cells(blob)))
    data, own = cut.segment(blob, cell), SEGMENT_FIELDS.get(codec_of(blob, cell), cut.SEGMENT_FIELDS)
    how = rng.choice([*BYTES, lambda rng, data: edit(rng, data, own)])
    return cut.with_segment(blob, cell, how(rng, data))


def edit_metadata(rng, blob):
    return cut.with_metadata(blob, change_json(rng, cut.metadata(blob)))


def edit_inside(rng, blob):
    """The profile inside, damaged at the same length and sealed."""
    size = cut.get(blob, cut.BLOB_FIELDS, "profile_bytes")
    if not 0 < size < len(blob):
        return edit_segment(rng, blob)
    at = cut.tail_at(blob)
    damaged = damage_profile(rng, blob[at : at + size])[:size]
    return blob[:at] + damaged.ljust(size, b"\0") + blob[at + size :]


def swap(rng, blob):
    """Two segments in each other's place, the index knowing it."""
    first, second = (int(cell) for cell in rng.integers(0, cut.cells(blob), 2))
    one, other = cut.segment(blob, first), cut.segment(blob, second)
    return cut.with_segment(cut.with_segment(blob, first, other), second, one)


# Parts: the blob is taken apart, changed and put together again.


def any_cell(rng, draft):
    places = [(row, level) for row, cells in enumerate(draft.cells) for level, cell in enumerate(cells) if cell]
    return places[rng.integers(len(places))]


def edit_list(rng, draft):
    """What is inside one of a segment's frames: classes, escapes, tables, references, rows."""
    row, level = any_cell(rng, draft)
    cell = draft.cells[row][level]
    lists, rest = lists_of(cell.codec, cell.data)
    name = str(rng.choice([each for each, raw in lists.items() if raw]))
    lists[name] = rng.choice([*BYTES, one_less_one_more])(rng, lists[name])
    draft.cells[row][level] = cell._replace(data=with_lists(cell.codec, cell.data, lists, rest))


def one_less_one_more(rng, data):
    """Two bytes changed so that their sum stays, as frequencies want it."""
    at, other = (int(each) for each in rng.integers(0, len(data), 2))
    out = bytearray(data)
    if out[at] and out[other] < 255 and at != other:
        out[at] -= 1
        out[other] += 1
    return bytes(out)


def edit_states(rng, draft):
    """A lane's state or length, or a word, of a layered stream; lengths still add up."""
    row, level = any_cell(rng, draft)
    cell = draft.cells[row][level]
    lists, rest = lists_of(1, cell.data)
    lanes, out = cut.get(cell.data, cut.SEGMENT_FIELDS, "lanes"), bytearray(rest)
    first, second = (4 * lanes + 2 * int(lane) for lane in rng.integers(0, lanes, 2))
    if first != second and rng.random() < 0.4:
        counts = struct.unpack_from("<H", out, first)[0], struct.unpack_from("<H", out, second)[0]
        struct.pack_into("<H", out, first, counts[0] + 1)
        struct.pack_into("<H", out, second, counts[1] - 1)
    else:
        out = bytearray(flip(rng, bytes(out[: 4 * lanes]))) + out[4 * lanes :]
    draft.cells[row][level] = cell._replace(data=with_lists(1, cell.data, lists, bytes(out)))


def move_chunks(rng, draft):
    """A chunk doubled, dropped, or in another's place; the number of tokens follows."""
    first, second = (int(each) for each in rng.integers(0, len(draft.cells), 2))
    how = rng.integers(3)
    if how == 0:
        draft.cells[first], draft.cells[second] = draft.cells[second], draft.cells[first]
    elif how == 1:
        draft.cells.insert(second, draft.cells[first])
        draft.tokens += draft.chunk_tokens
    elif len(draft.cells) > 1:
        del draft.cells[first]
        draft.tokens = max(1, draft.tokens - draft.chunk_tokens)
    if draft.tokens <= MOST_TOKENS:  # chunks may claim to be as long as they like
        size = -(-draft.tokens * max(8, draft.id_bits) // 8)
        draft.ids = draft.ids[:size].ljust(size, b"\0")
        mend_digest(draft)


def move_levels(rng, draft):
    """A level doubled, dropped, or in another's place, in the metadata and in every chunk."""
    order = list(range(draft.levels))
    how, at = rng.integers(3), int(rng.integers(draft.levels))
    if how == 0:
        order = [int(each) for each in rng.permutation(order)]
    elif how == 1 and len(order) < MAX_LEVELS:
        order.insert(at, int(rng.integers(draft.levels)))
    elif len(order) > 1:
        del order[at]
    draft.metadata["levels"] = [draft.metadata["levels"][level] for level in order]
    draft.cells = [[row[level] for level in order] for row in draft.cells]
    draft.levels = len(order)


def cut_levels(rng, draft):
    """The finest levels of a chunk are missing."""
    row = draft.cells[rng.integers(len(draft.cells))]
    row[int(rng.integers(len(row))) :] = [None] * (len(row) - int(rng.integers(len(row))))
    del row[draft.levels :]
    row += [None] * (draft.levels - len(row))


def regroup(rng, draft):
    """Other chunks for the same segments."""
    draft.chunk_tokens = int(rng.integers(1, 4097)) if rng.random() < 0.3 else draft.chunk_tokens + 1


def other_ids(rng, draft):
    """Another text, named by the metadata."""
    draft.ids = rng.choice([flip, overwrite])(rng, draft.ids)
    mend_digest(draft)


def mend_digest(draft):
    """The text's digest of the ids that are there."""
    tokens, bits = draft.tokens, draft.id_bits
    if bits and tokens <= MOST_TOKENS:
        digits = np.unpackbits(np.frombuffer(draft.ids, np.uint8), bitorder="little")[: tokens * bits]
        digits = np.pad(digits, (0, tokens * bits - len(digits))).reshape(tokens, bits)
        ids = (digits.astype(np.uint64) << np.arange(bits, dtype=np.uint64)).sum(1, dtype=np.uint64).astype("<u4")
        draft.metadata["meta"]["token_digest"] = hashlib.sha256(ids.tobytes()).hexdigest()


def other_kept(rng, draft):
    """Bits of kept entries, some where there were none."""
    layers = draft.metadata["meta"]["layers"]
    size = sum(-(-heads * draft.tokens // 8) for kind, heads, *_ in layers if kind != "none")
    raw = rng.bytes(size + int(rng.integers(-1, 2)))
    draft.kept = cut.frame(raw) if rng.random() < 0.3 else raw


def other_sinks(rng, draft):
    """A sink's numbers or its place, one sink less, or one more of other numbers; the flag follows, mostly."""
    rows = draft.metadata.get("sinks") or []
    at = int(rng.integers(len(rows))) if rows else 0
    how = rng.integers(4) if rows else 3
    if how == 0:
        draft.sinks[at] = cut.frame(rng.choice(BYTES)(rng, unframed(draft.sinks[at])))
    elif how == 1:
        rows[at][0] = int(rng.integers(-1, draft.tokens + 1))
    elif how == 2:
        del rows[at], draft.sinks[at]
    else:
        draft.sinks.append(cut.frame(rng.bytes(2 * int(rng.integers(1, 200)))))
        rows.append([min(draft.tokens - 1, 1 + max((row[0] for row in rows), default=-1)), 0])
    draft.metadata["sinks"] = rows or None
    if rng.random() < 0.9:
        draft.flags = draft.flags & ~8 | (8 if rows else 0)


def other_layout(rng, draft):
    """Heads and dims that still multiply to the same, regimes of other layers, other frequencies."""
    meta = draft.metadata["meta"]
    row = meta["layers"][rng.integers(len(meta["layers"]))]
    how = rng.integers(4)
    if how == 0:
        row[1], row[2] = row[2], row[1]
    elif how == 1:
        row[2], row[3] = row[3], row[2]
    elif how == 2:
        row[4] = None if rng.random() < 0.3 else int(rng.integers(len(meta["ropes"])))
    else:
        rope = meta["ropes"][rng.integers(len(meta["ropes"]))]
        frequencies = (rng.standard_normal(rng.integers(1, 4)) * 10.0 ** rng.integers(-3, 9)).astype("<f4")
        rope["inv_freq"] = base64.b64encode(frequencies.tobytes()).decode()
        rope["interleaved"] = bool(rng.integers(2))


def other_steps(rng, draft):
    """Steps, shifts, errors and energies."""
    for level in draft.metadata["levels"]:
        level[2] = float(2.0 ** rng.integers(-70, 70)) if rng.random() < 0.2 else level[2] * 1.5
        level[3] = level[3] + int(rng.integers(-2, 3)) if rng.random() < 0.2 else level[3]
    row, level = any_cell(rng, draft)
    error = float(rng.choice([0.0, 1e38, 1e-38, 0.5]))
    draft.cells[row][level] = draft.cells[row][level]._replace(error=error)


def flags(rng, draft):
    draft.minor, draft.compatible, draft.reserved = (int(each) for each in rng.integers(0, (2**16, 2**32, 2**16)))
    draft.padding = int(rng.integers(70))


PARTS = (
    edit_list,
    edit_list,
    edit_states,
    move_chunks,
    move_levels,
    cut_levels,
    regroup,
    other_ids,
    other_kept,
    other_sinks,
    other_layout,
    other_steps,
    flags,
)


def edit_parts(rng, blob):
    """One or two parts of a blob changed, everything else mended."""
    draft = Draft.read(blob)
    for _ in range(rng.integers(1, 3)):
        PARTS[rng.integers(len(PARTS))](rng, draft)
    return draft.pack()


SIMPLE = (*BYTES, lambda rng, data: edit(rng, data, cut.BLOB_FIELDS))
DEEP = (edit_index, edit_segment, edit_metadata, edit_inside, swap, *[edit_parts] * 7)


def damage_blob(rng, blob):
    """The blob after one to three changes."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        among = SIMPLE if rng.random() < 0.1 else DEEP
        try:
            blob = among[rng.integers(len(among))](rng, blob)
        except TOO_DAMAGED:
            continue
        if not blob:
            return blob
    return cut.sealed(blob) if rng.random() < 0.9 else blob


def edit_array(rng, meta, parts):
    """An array of a profile, in its frame or raw, its length told or not."""
    name = str(rng.choice(list(parts)))
    row = next(row for row in meta["arrays"] if row[0] == name)
    raw = math.prod(row[2]) * int(row[1][2])
    is_frame = row[3] < raw
    data = unframed(parts[name]) if is_frame and rng.random() < 0.8 else parts[name]
    data = rng.choice([*BYTES, one_less_one_more])(rng, data)
    parts[name] = cut.frame(data) if is_frame and rng.random() < 0.8 else data
    if rng.random() < 0.8:
        row[3] = len(parts[name])


def edit_profile_parts(rng, data):
    """One array changed, or several, or the description."""
    meta, parts = cut.profile_parts(data)
    for _ in range(rng.integers(3)):
        edit_array(rng, meta, parts)
    return cut.profile_of(data, change_json(rng, meta) if rng.random() < 0.4 else meta, parts)


def damage_profile(rng, data):
    """A profile after one or two changes."""
    if rng.random() < 0.8:
        try:
            data = edit_profile_parts(rng, data)
        except TOO_DAMAGED:
            return flip(rng, data)
    else:
        data = rng.choice([*BYTES, lambda r, d: edit(r, d, cut.PROFILE_FIELDS)])(rng, data)
    return cut.sealed_profile(data) if rng.random() < 0.9 else data


def damage_json(rng, data):
    """A JSON object after one to three changes."""
    value = json.loads(data)
    for _ in range(rng.integers(1, 4)):
        value = change_json(rng, value)
    return json.dumps(value).encode() if rng.random() < 0.9 else rng.choice(BYTES)(rng, json.dumps(value).encode())
