"""Blobs and profiles taken apart and put together again, by docs/format.md and not by the codec's own code."""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import zlib

import zstandard

ENTRY = struct.Struct("<QIIIHHff")


def laid_out(text):
    """Fields by name from "name:letter name:letter ...", letters as in ``struct``: offset and form of each."""
    fields, at = {}, 0
    for item in text.split():
        name, letter = item.split(":")
        fields[name] = (at, "<" + letter)
        at += struct.calcsize("<" + letter)
    return fields


ENTRY_FIELDS = laid_out("offset:Q stored:I symbols:I crc32:I codec:H flags:H error:f energy:f")
VERSIONED = "magic:Q major:H minor:H incompatible:I compatible:I "
BLOB_FIELDS = laid_out(
    VERSIONED + "head_bytes:Q file_bytes:Q crc:I meta_stored:I meta_raw:I tokens:I chunk_tokens:I levels:B id_bits:B "
    "reserved:H profile_bytes:I"
)
PROFILE_FIELDS = laid_out(VERSIONED + "file_bytes:Q crc:I meta_stored:I meta_raw:I")
SEGMENT_FIELDS = laid_out("words:I class_bytes:I escape_bytes:I lanes:H reserved:H")

LOSSLESS_FIELDS = laid_out(
    "table_bytes:I class_bytes:I reference_bytes:I block_bytes:I row_bytes:I escape_bytes:I words0:I words1:I lanes0:H "
    "lanes1:H classes:H reserved:H"
)
CACHEGEN_FIELDS = laid_out("escape_bytes:I words:I")


def get(data, fields, name, base=0):
    at, form = fields[name]
    return struct.unpack_from(form, data, base + at)[0]


def put(data, fields, name, value, base=0):
    at, form = fields[name]
    out = bytearray(data)
    struct.pack_into(form, out, base + at, value)
    return bytes(out)


def sealed(blob):
    """The blob with the header's checksum made right, where there is a header."""
    if len(blob) < 64:
        return blob
    head = put(blob, BLOB_FIELDS, "crc", 0)[: min(get(blob, BLOB_FIELDS, "head_bytes"), len(blob))]
    return put(blob, BLOB_FIELDS, "crc", zlib.crc32(head))


def sealed_profile(data):
    """With sections, the checksum covers what stands before them; otherwise all."""
    if len(data) < 40:
        return data
    covered = put(data, PROFILE_FIELDS, "crc", 0)
    if get(data, PROFILE_FIELDS, "incompatible") & 2:
        covered = covered[: 40 + get(data, PROFILE_FIELDS, "meta_stored")]
    return put(data, PROFILE_FIELDS, "crc", zlib.crc32(covered))


def field(blob, name, value):
    """One field of the prologue changed and the header sealed again."""
    return sealed(put(blob, BLOB_FIELDS, name, value))


def index_at(blob):
    return 64 + get(blob, BLOB_FIELDS, "meta_stored")


def entry(blob, cell, name, value):
    """One field of an index entry changed; cell counts chunks times levels."""
    return sealed(put(blob, ENTRY_FIELDS, name, value, index_at(blob) + 32 * cell))


def cells(blob):
    chunks = -(-get(blob, BLOB_FIELDS, "tokens") // get(blob, BLOB_FIELDS, "chunk_tokens"))
    return chunks * get(blob, BLOB_FIELDS, "levels")


def metadata(blob):
    return json.loads(zstandard.ZstdDecompressor().decompress(blob[64 : index_at(blob)]))


def kept_bytes(blob):
    return metadata(blob)["kept_bytes"]


def sink_sizes(blob):
    """Bytes of each attention sink, in the order of their tokens."""
    return [size for _, size in metadata(blob).get("sinks") or ()]


def sinks_at(blob):
    """Where the attention sinks begin: behind what is kept."""
    return tail_at(blob) + get(blob, BLOB_FIELDS, "profile_bytes") + kept_bytes(blob)


def sink_frames(blob):
    """What is stored of each attention sink, and at last of the first token as it begins a prompt, where that is."""
    at, frames = sinks_at(blob), []
    for size in [*sink_sizes(blob), *[metadata(blob).get("beginning", 0)][: "beginning" in metadata(blob)]]:
        frames.append(blob[at : at + size])
        at += size
    return frames


def tail_at(blob):
    """Where the profile inside begins, what is kept after it, and the attention sinks at last."""
    ids = -(-get(blob, BLOB_FIELDS, "tokens") * max(8, get(blob, BLOB_FIELDS, "id_bits")) // 8)
    return index_at(blob) + 32 * cells(blob) + ids


def frame(raw):
    return zstandard.ZstdCompressor(level=3, write_content_size=True).compress(raw)


def with_metadata(blob, text, packed=None, raw_length=None, frames=None):
    """Another metadata part, and other frames of sinks: all parts behind it move, and so do the index's offsets."""
    raw = text if isinstance(text, bytes) else json.dumps(text).encode()
    packed = frame(raw) if packed is None else packed
    old_head, at = get(blob, BLOB_FIELDS, "head_bytes"), index_at(blob)
    entries = [list(ENTRY.unpack_from(blob, at + 32 * cell)) for cell in range(cells(blob))]
    rest = blob[at + 32 * len(entries) : sinks_at(blob)] + b"".join(sink_frames(blob) if frames is None else frames)
    used = 64 + len(packed) + 32 * len(entries) + len(rest)
    header_bytes = -(-used // 64) * 64
    index = b"".join(ENTRY.pack(offset + header_bytes - old_head, *rest) for offset, *rest in entries)
    head = blob[:64] + packed + index + rest + bytes(header_bytes - used)
    out = head + blob[old_head:]
    out = put(out, BLOB_FIELDS, "head_bytes", header_bytes)
    out = put(out, BLOB_FIELDS, "file_bytes", len(out))
    out = put(out, BLOB_FIELDS, "meta_stored", len(packed))
    return sealed(put(out, BLOB_FIELDS, "meta_raw", len(raw) if raw_length is None else raw_length))


def with_sinks(blob, places, frames):
    """Other attention sinks, listed and stored; the flag follows."""
    sinks = [[at, len(frame)] for at, frame in zip(places, frames, strict=True)]
    out = with_metadata(blob, metadata(blob) | {"sinks": sinks or None}, frames=frames)
    return field(out, "incompatible", get(out, BLOB_FIELDS, "incompatible") & ~8 | (8 if sinks else 0))


def with_segment(blob, cell, data):
    """Other bytes for one segment: later segments move, the index and its checksums follow."""
    at, out = index_at(blob), bytearray()
    payload, index = b"", b""
    expected = get(blob, BLOB_FIELDS, "head_bytes")
    for number in range(cells(blob)):
        offset, stored, symbols, _, codec, flags, error, energy = ENTRY.unpack_from(blob, at + 32 * number)
        part = data if number == cell else blob[offset : offset + stored]
        index += ENTRY.pack(expected, len(part), symbols, zlib.crc32(part), codec, flags, error, energy)
        expected += len(part)
        payload += part
    head = blob[: get(blob, BLOB_FIELDS, "head_bytes")]
    out = head[:at] + index + head[at + len(index) :] + payload
    return sealed(put(out, BLOB_FIELDS, "file_bytes", len(out)))


def segment(blob, cell):
    offset, stored, *_ = ENTRY.unpack_from(blob, index_at(blob) + 32 * cell)
    return blob[offset : offset + stored]


def profile_metadata(data):
    return json.loads(zstandard.ZstdDecompressor().decompress(data[40 : 40 + get(data, PROFILE_FIELDS, "meta_stored")]))


def profile_parts(data):
    """Metadata, and the stored bytes of every array by name."""
    meta, at, parts = profile_metadata(data), 40 + get(data, PROFILE_FIELDS, "meta_stored"), {}
    for name, _, _, stored in meta["arrays"]:
        parts[name] = data[at : at + stored]
        at += stored
    return meta, parts


def profile_of(data, meta, parts, raw_length=None):
    """A profile from metadata and the arrays' stored bytes, joined in the order of ``parts``.

    Where it has sections, they get the lengths and the digests that they have now; arrays stay in theirs, if they can.
    """
    if isinstance(meta, dict) and "sections" in meta:
        meta = meta | {"sections": _sections_of(data, parts)}
    raw = meta if isinstance(meta, bytes) else json.dumps(meta).encode()
    packed = frame(raw)
    out = data[:40] + packed + b"".join(parts.values())
    out = put(out, PROFILE_FIELDS, "file_bytes", len(out))
    out = put(out, PROFILE_FIELDS, "meta_stored", len(packed))
    return sealed_profile(put(out, PROFILE_FIELDS, "meta_raw", len(raw) if raw_length is None else raw_length))


def _sections_of(data, parts):
    before, numbers = profile_metadata(data), {}
    names = iter(row[0] for row in before["arrays"])
    for number, (count, *_) in enumerate(before["sections"]):
        numbers |= dict.fromkeys(itertools.islice(names, count), number)
    found, number = [[] for _ in before["sections"]], 0
    for name, part in parts.items():
        number = max(number, numbers.get(name, len(found) - 1))
        found[number].append(part)
    return [[len(each), sum(map(len, each)), hashlib.sha256(b"".join(each)).hexdigest()] for each in found]
