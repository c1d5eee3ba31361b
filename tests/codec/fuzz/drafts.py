"""Blobs and profiles as editable parts, put together again with every length, offset and checksum made right."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

import zstandard

from .. import surgery as cut

MISSING = 2**64 - 1
MOST_BYTES = 1 << 20
"""Of a frame's content, which is small in all that is drafted here; damaged frames may claim anything."""


def unframed(data):
    """The content of a frame, or of nothing."""
    if data and zstandard.get_frame_parameters(data).content_size > MOST_BYTES:
        raise ValueError("a frame claims more than any list holds")
    return zstandard.ZstdDecompressor().decompress(data) if data else b""


class Cell(NamedTuple):
    """A segment with what the index says of it."""

    data: bytes
    symbols: int
    codec: int
    flags: int = 0
    error: float = 0.0
    energy: float = 0.0


@dataclass
class Draft:
    """A blob taken apart (section 2). cells: ``[chunk][level]``, None where a segment is missing."""

    metadata: dict
    tokens: int
    chunk_tokens: int
    levels: int
    id_bits: int
    ids: bytes
    inside: bytes
    kept: bytes
    sinks: list[bytes]
    cells: list[list[Cell | None]]
    minor: int = 0
    flags: int = 0
    compatible: int = 0
    reserved: int = 0
    padding: int | None = None

    @classmethod
    def read(cls, blob):
        """Take a sound blob apart."""
        names = ("tokens", "chunk_tokens", "levels", "id_bits", "minor", "incompatible", "compatible", "reserved")
        tokens, chunk_tokens, levels, bits, *versioned = (cut.get(blob, cut.BLOB_FIELDS, name) for name in names)
        inside = cut.get(blob, cut.BLOB_FIELDS, "profile_bytes")
        ids_at, tail = cut.index_at(blob) + 32 * cut.cells(blob), cut.tail_at(blob)
        flat = [cls._cell(blob, number) for number in range(cut.cells(blob))]
        metadata = cut.metadata(blob)
        kept_at = tail + inside
        return cls(
            metadata,
            tokens,
            chunk_tokens,
            levels,
            bits,
            blob[ids_at:tail],
            blob[tail:kept_at],
            blob[kept_at : kept_at + metadata["kept_bytes"]],
            cut.sink_frames(blob),
            [flat[at : at + levels] for at in range(0, len(flat), levels)],
            *versioned,
        )

    @staticmethod
    def _cell(blob, number):
        offset, _, symbols, _, codec, flags, error, energy = cut.ENTRY.unpack_from(
            blob, cut.index_at(blob) + 32 * number
        )
        return None if offset == MISSING else Cell(cut.segment(blob, number), symbols, codec, flags, error, energy)

    def index_and_payload(self, at):
        """From the first segment's offset."""
        index, payload = b"", []
        for row in self.cells:
            for level, cell in enumerate(row):
                if cell is None:
                    codec = self.metadata["levels"][level][1] if level < len(self.metadata["levels"]) else 1
                    index += cut.ENTRY.pack(MISSING, 0, 0, 0, codec if codec in {1, 2, 3} else 1, 0, 0.0, 0.0)
                    continue
                data, symbols, codec, flags, error, energy = cell
                index += cut.ENTRY.pack(at, len(data), symbols, zlib.crc32(data), codec, flags, error, energy)
                payload.append(data)
                at += len(data)
        return index, b"".join(payload)

    def pack(self):
        """The blob. Whatever was changed, its lengths add up, its order is right and its checksums hold."""
        self.metadata["kept_bytes"] = len(self.kept)
        rows = self.metadata.get("sinks")
        if isinstance(rows, list) and len(rows) == len(self.sinks):
            rows[:] = [[row[0], len(stored)] for row, stored in zip(rows, self.sinks, strict=True)]
        raw = json.dumps(self.metadata).encode()
        return self.pack_with(cut.frame(raw), len(raw))

    def pack_with(self, packed, raw_length):
        """The blob with this frame of metadata."""
        cells = sum(len(row) for row in self.cells)
        tail = self.ids + self.inside + self.kept + b"".join(self.sinks)
        used = 64 + len(packed) + 32 * cells + len(tail)
        head_bytes = -(-used // 64) * 64 if self.padding is None else used + self.padding
        index, payload = self.index_and_payload(head_bytes)
        lengths = (head_bytes, head_bytes + len(payload))
        fixed = struct.pack("<HHIIQQI", 1, self.minor, self.flags, self.compatible, *lengths, 0)
        counts = (len(packed), raw_length, self.tokens, self.chunk_tokens, self.levels, self.id_bits)
        fixed += struct.pack("<IIIIBBHI", *counts, self.reserved, len(self.inside))
        head = b"\x89KVW\r\n\x1a\n" + fixed + packed + index + tail
        return cut.sealed(head + bytes(head_bytes - used) + payload)


LISTS = {
    1: (cut.SEGMENT_FIELDS, 16, ("class_bytes", "escape_bytes")),
    2: (cut.LOSSLESS_FIELDS, 40, tuple(name for name in cut.LOSSLESS_FIELDS if name.endswith("_bytes"))),
}
"""For each codec the fields of a segment's header, its length, and the lists that follow it, in order."""


def lists_of(codec, data):
    """What is in a segment's lists, by the name of their length, and what follows them."""
    fields, at, names = LISTS[codec]
    out = {}
    for name in names:
        size = cut.get(data, fields, name)
        out[name] = unframed(data[at : at + size])
        at += size
    return out, data[at:]


def with_lists(codec, data, lists, rest):
    """The segment with other lists, each a frame that states its length."""
    fields, at, _ = LISTS[codec]
    head, body = data[:at], b""
    for name, raw in lists.items():
        packed = cut.frame(raw) if raw else b""
        head, body = cut.put(head, fields, name, len(packed)), body + packed
    return head + body + rest
