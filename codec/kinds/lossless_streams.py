"""Lossless coding: one segment holds every number of some tokens bit for bit. Specified in docs/format.md.

A column (a dimension of a head over the tokens) has its own scale and often its own sign. A symbol of one byte holds a
number's sign relative to the column's usual sign, its octaves below the column's largest number and its highest
mantissa bits. rANS codes it with one of a few tables, which the encoder finds by clustering the columns' histograms.
The other mantissa bits are noise and stay raw. In the first layer equal tokens give equal numbers: such rows are
stored once.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard

from kvwire.codec.entropy import exponent_kernels
from kvwire.codec.entropy.rans import MAX_LANES, Lanes, decode_base, encode_base, lanes_for
from kvwire.codec.entropy.tables import ALPHABET
from kvwire.codec.format.codecs import MAX_CHUNK_SYMBOLS
from kvwire.codec.format.metadata_json import decompress
from kvwire.codec.kinds.lossless_grid import (
    FLIP,
    FORMATS,
    MAX_CLASSES,
    ClassTables,
    Grid,
    block_shapes,
    escaped_in,
    raise_damaged,
)
from kvwire.codec.kinds.lossless_survey import cluster, find_repeats, split, survey
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from numpy.typing import NDArray

    from kvwire.codec.entropy.exponent_kernels import Bits, Fields
    from kvwire.types import KVCache, LayerSpec

_LISTS = ("table", "class", "reference", "block", "row", "escape")
_HEADER = struct.Struct("<6I2I2HHH")
"""Bytes of the six lists; words and lanes of the two streams; number of classes; reserved."""
_SHARED = 128
"""Added to a block's spare bits in its byte where the block uses the row list."""
_LEVEL = 9
"""zstd level of the lists; level 19 saves 0.01 % of a segment and slows the encoder by a quarter."""
_SIGNED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Integer dtype to view floats of this bit width as."""


def encode_lossless(cache: KVCache, start: int, stop: int) -> tuple[bytes, int]:
    """Encode tokens of a cache; return the segment and its number of symbols."""
    fields, tensors = _stored(cache, start, stop)
    shapes = block_shapes(cache.meta.layers)
    if not _numbers(stop - start, shapes):
        return b"", 0
    blocks = [_bits(tensor[:, start:stop], fields) for tensor in tensors]
    grid = find_repeats(blocks, Grid.plain(fields, shapes, stop - start))
    blocks = [bits[:, grid.fresh] if shared else bits for bits, shared in zip(blocks, grid.shared, strict=True)]
    grid, references, flips = survey(blocks, grid)
    symbols, raw, escapes = split(blocks, grid, references, flips)
    chosen, tables = cluster(symbols)
    classes = np.zeros(len(flips), np.int64)
    for stream, own in enumerate(chosen):
        classes[grid.stream_of == stream] = own
    lists = (
        _planes(tables.base.astype("<u2")),
        (classes + FLIP * flips).astype(np.uint8).tobytes(),
        _planes(references.astype("<u2")),
        (grid.spares + _SHARED * grid.shared).astype(np.uint8).tobytes(),
        _planes(grid.codes.astype("<u4")) if grid.shared.any() else b"",
        _planes(escapes.astype("<u2")),
    )
    streams = [
        encode_base(matrix, own + 1, tables, lanes_for(matrix.size)) if matrix.size else None
        for matrix, own in zip(symbols, chosen, strict=True)
    ]
    return _pack(lists, streams, len(tables.base)) + raw, sum(matrix.size for matrix in symbols)


def decode_lossless(
    data: bytes, tokens: int, layers: tuple[LayerSpec, ...], dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Decode a segment into keys and values of each layer; takes one more byte of memory per number."""
    fields, shapes = _fields(dtype), block_shapes(layers)
    if _numbers(tokens, shapes):
        blocks = _decode(data, Grid.plain(fields, shapes, tokens), dtype)
    elif data:
        raise_damaged("without numbers holds bytes")
    else:
        blocks = (torch.empty((heads, tokens, dim), dtype=dtype) for heads, dim in shapes)
    return [_empty_layer(spec, dtype) if spec.kind == "none" else (next(blocks), next(blocks)) for spec in layers]


def _empty_layer(spec: LayerSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.empty((spec.kv_heads, 0, spec.key_dim), dtype=dtype)
    return keys, torch.empty((spec.kv_heads, 0, spec.value_dim), dtype=dtype)


def _stored(cache: KVCache, start: int, stop: int) -> tuple[Fields, list[torch.Tensor]]:
    """Return the dtype's fields and the keys and values of each layer that has a cache."""
    if not 0 <= start <= stop <= cache.tokens:
        raise ArgumentError(f"tokens {start} to {stop} are not within the cache's {cache.tokens}")
    layers = zip(cache.meta.layers, cache.keys, cache.values, strict=True)
    tensors = [tensor for spec, key, value in layers if spec.kind != "none" for tensor in (key, value)]
    dtypes = {tensor.dtype for tensor in tensors} or {torch.float32}
    if len(dtypes) > 1:
        msg = f"a lossless segment holds one dtype, this cache has {sorted(map(str, dtypes))}; convert it first"
        raise ArgumentError(msg)
    return _fields(dtypes.pop()), tensors


def _fields(dtype: torch.dtype) -> Fields:
    if dtype not in FORMATS:
        raise ArgumentError(f"a lossless segment cannot hold {dtype}, only {', '.join(map(str, FORMATS))}")
    return FORMATS[dtype]


def _numbers(tokens: int, shapes: list[tuple[int, int]]) -> int:
    """Count a segment's numbers, repeats included; raises ArgumentError where there are too many."""
    numbers = tokens * sum(heads * dim for heads, dim in shapes)
    if numbers > MAX_CHUNK_SYMBOLS:
        msg = f"{numbers} numbers are more than the {MAX_CHUNK_SYMBOLS} of a lossless segment; take fewer tokens"
        raise ArgumentError(msg)
    return numbers


def _bits(tensor: torch.Tensor, fields: Fields) -> Bits:
    signed = tensor.detach().cpu().contiguous().view(_SIGNED[fields.width])
    return signed.numpy().view(f"u{fields.width // 8}")


def _pack(lists: tuple[bytes, ...], streams: list[Lanes | None], classes: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True, write_checksum=False)
    packed = [compressor.compress(raw) if raw else b"" for raw in lists]
    words = [len(stream.words) if stream else 0 for stream in streams]
    lanes = [len(stream.states) if stream else 0 for stream in streams]
    parts = [_HEADER.pack(*map(len, packed), *words, *lanes, classes, 0), *packed]
    for stream in filter(None, streams):
        parts += [stream.states.astype("<u4").tobytes(), stream.counts.astype("<u2").tobytes()]
        parts.append(stream.words.astype("<u2").tobytes())
    return b"".join(parts)


def _planes(array: NDArray[Any]) -> bytes:
    """Return all lowest bytes, then the next ones, and so on: small numbers give planes of zeros."""
    return array.ravel().view(np.uint8).reshape(array.size, array.itemsize).T.tobytes()


def _unplanes(raw: bytes, dtype: str) -> NDArray[Any]:
    planes = np.frombuffer(raw, np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).ravel().astype(dtype.replace("<", "="))


def _decode(data: bytes, plain: Grid, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Check everything, then yield the tensor of each block."""
    parts = _Parts(data)
    grid, fields = parts.grid(plain), plain.fields
    columns = sum(heads * dim for heads, dim in plain.shapes)
    classes, flips = parts.classes(
        columns
    )  # first: its length proves the number of columns, by which memory is allocated
    references = parts.exponents("reference", columns, fields)
    tables = parts.tables()
    symbols = [parts.symbols(s, classes[grid.stream_of == s], tables, rows) for s, rows in enumerate(grid.rows)]
    raw = parts.raw(grid.raw_bits)
    escaped = [escaped_in(symbols[block.stream][:, block.in_stream], fields) for block in grid.blocks]
    escapes = parts.exponents("escape", sum(len(row) for row, _ in escaped), fields)
    lost = np.split(escapes, np.cumsum([len(row) for row, _ in escaped])[:-1])
    for block, place, exponents in zip(grid.blocks, escaped, lost, strict=True):
        matrix = symbols[block.stream]
        side = references[block.columns], flips[block.columns]
        bits = np.empty((block.heads, len(matrix), block.dim), f"u{fields.width // 8}")
        exponent_kernels.join(matrix, block.first, block.fields, *side, raw, block.raw_start, bits)
        _place_escapes(bits, fields, place, exponents)
        bits = bits[:, grid.sources] if block.stream else bits
        yield torch.from_numpy(np.ascontiguousarray(bits).view(np.uint8)).view(dtype)


def _place_escapes(
    bits: Bits, fields: Fields, escaped: tuple[NDArray[np.intp], NDArray[np.intp]], exponents: NDArray[np.uint16]
) -> None:
    """Set the exponents of a block's escaped numbers."""
    row, column = escaped
    place = column // bits.shape[2], row, column % bits.shape[2]
    kind = bits.dtype.type
    bits[place] = bits[place] & ~kind(fields.top << fields.mantissa) | exponents.astype(kind) << kind(fields.mantissa)


class _Parts:
    """The parts of a segment's bytes; each method checks its part and raises CorruptError."""

    def __init__(self, data: bytes) -> None:
        """Split the bytes by the header's lengths."""
        if len(data) < _HEADER.size:
            raise_damaged("ends within its header")
        fixed = _HEADER.unpack_from(data)
        self._words, self._lanes, self._classes = fixed[6:8], fixed[8:10], fixed[10]
        streams = [6 * lanes + 2 * words for lanes, words in zip(self._lanes, self._words, strict=True)]
        ends = np.cumsum([_HEADER.size, *fixed[:6], *streams], dtype=np.int64).tolist()
        if ends[-1] > len(data) or not 1 <= self._classes <= MAX_CLASSES or max(self._lanes) > MAX_LANES:
            raise_damaged("has parts that do not fit it")
        pieces = [data[start:stop] for start, stop in pairwise(ends)]
        self._lists, self._streams = dict(zip(_LISTS, pieces, strict=False)), pieces[len(_LISTS) :]
        self._raw = memoryview(data)[ends[-1] :]

    def _list(self, name: str, length: int) -> bytes:
        """Decompress a list whose length is known; an empty list is stored as no bytes."""
        packed = self._lists[name]
        return decompress(packed, length, f"lossless segment's {name} list") if packed or length else b""

    def tables(self) -> ClassTables:
        """Read the frequencies of each class."""
        raw = self._list("table", 2 * ALPHABET * self._classes)
        return ClassTables.of(_unplanes(raw, "<u2").reshape(self._classes, ALPHABET))

    def classes(self, columns: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Read class and sign flip of each column."""
        raw = np.frombuffer(self._list("class", columns), np.uint8)
        classes = (raw % FLIP).astype(np.int64)
        if classes.max() >= self._classes:
            raise_damaged("names a class with no table")
        return classes, raw // np.uint8(FLIP)

    def grid(self, plain: Grid) -> Grid:
        """Return the plain grid with the segment's spare bits and repeated rows."""
        raw = np.frombuffer(self._list("block", len(plain.shapes)), np.uint8)
        grid = replace(plain, shared=raw >= _SHARED, spares=(raw % _SHARED).astype(np.int64))
        if grid.spares.max() > grid.fields.low:
            raise_damaged("spares more bits than its numbers have")
        tokens = len(plain.codes) if grid.shared.any() else 0
        codes = _unplanes(self._list("row", 4 * tokens), "<u4").astype(np.int64)
        if (codes > np.cumsum(codes == 0)).any():
            raise_damaged("refers to later rows")
        return replace(grid, codes=codes) if tokens else grid

    def exponents(self, name: str, count: int, fields: Fields) -> NDArray[np.uint16]:
        """Read a list of exponents: the columns' references or the escapes."""
        exponents: NDArray[np.uint16] = _unplanes(self._list(name, 2 * count), "<u2")
        if count and exponents.max() > fields.top:
            raise_damaged("has an exponent beyond its dtype's")
        return exponents

    def symbols(self, stream: int, classes: NDArray[np.int64], tables: ClassTables, rows: int) -> NDArray[np.uint8]:
        """Decode one of the streams, ``[rows, columns]``."""
        piece, lanes, words = self._streams[stream], self._lanes[stream], self._words[stream]
        if (lanes == 0) != (len(classes) == 0) or (words and not lanes):
            raise_damaged("has a stream without columns, or columns without a stream")
        if not lanes:
            return np.empty((rows, 0), np.uint8)
        states = np.frombuffer(piece, "<u4", lanes).astype(np.uint32)
        counts = np.frombuffer(piece, "<u2", lanes, 4 * lanes).astype(np.uint16)
        if int(counts.sum(dtype=np.int64)) != words:
            raise_damaged("has lanes that do not add up to its words")
        coded = Lanes(states, counts, np.frombuffer(piece, "<u2", words, 6 * lanes).astype(np.uint16))
        return decode_base(coded, classes + 1, tables, rows)

    def raw(self, count: int) -> NDArray[np.uint64]:
        """Return the raw bits in 64-bit words, with one spare word: a read may span two."""
        if len(self._raw) != -(-count // 8):
            raise_damaged("has parts that do not add up to its length")
        words = np.zeros(count // 64 + 2, "<u8")
        words.view(np.uint8)[: len(self._raw)] = np.frombuffer(self._raw, np.uint8)
        return words.astype(np.uint64, copy=False)
