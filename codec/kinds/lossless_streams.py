"""A cache bit for bit: one segment holds every number of some tokens as it is stored. Specified in docs/format.md.

A column (a dimension of a head over the tokens) has a scale of its own, and often a sign. So numbers are coded as sign
against the column's usual one, octaves below the column's largest number, and highest mantissa bits: one byte, by rANS,
with one of a few tables that the encoder finds by clustering the columns' histograms. The other mantissa bits are
noise and stay raw. In the first layer equal tokens give equal numbers: such rows are stored once.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard

from kvwire.codec.entropy import exponent_kernels
from kvwire.codec.entropy.exponent_kernels import Fields
from kvwire.codec.entropy.rans import MAX_LANES, Lanes, decode_base, encode_base, lanes_for
from kvwire.codec.entropy.rans_naive import PROBABILITY_BITS
from kvwire.codec.entropy.tables import ALPHABET, CONTEXTS, POINTS, Tables, _normalise
from kvwire.codec.format.metadata_json import decompress
from kvwire.codec.format.segment import MAX_CHUNK_SYMBOLS
from kvwire.errors import ArgumentError, CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, NoReturn

    from numpy.typing import NDArray

    from kvwire.codec.entropy.exponent_kernels import Bits
    from kvwire.types import KVCache, LayerSpec

FORMATS = {
    torch.float64: Fields.of(11, 52),
    torch.float32: Fields.of(8, 23),
    torch.bfloat16: Fields.of(8, 7),
    torch.float16: Fields.of(5, 10),
    torch.float8_e4m3fn: Fields.of(4, 3),
    torch.float8_e4m3fnuz: Fields.of(4, 3),
    torch.float8_e5m2: Fields.of(5, 2),
    torch.float8_e5m2fnuz: Fields.of(5, 2),
}
"""Every dtype that a lossless segment can hold."""
MAX_CLASSES = 32
_NUMBERS_PER_CLASS = 1 << 15
"""A table costs about 80 bytes; with fewer numbers than this, another one saves less."""
_BATCH = 1024
"""Columns that the classes are fitted on, and columns whose histograms are held at a time."""
_ROUNDS = 4
_UNSEEN = 0.02
"""Count of a symbol that a class has not met yet: dear, not impossible."""
_LISTS = ("table", "class", "reference", "block", "row", "escape")
_HEADER = struct.Struct("<6I2I2HHH")
"""Bytes of the six lists; words and lanes of the two streams; classes, reserved."""
_FLIP = 128
"""Added to a column's class where its signs are flipped."""
_SHARED = 128
"""Added to a block's spare bits where it follows the row list."""
_LEVEL = 9
"""Of zstd, for the lists; 19 takes 0.01 % off a segment and a quarter off the encoder's speed."""
_TOTAL = 1 << PROBABILITY_BITS
_SIGNED = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}
"""Integers that a tensor of floats of this width can be viewed as."""


@dataclass(frozen=True, eq=False)
class ClassTables(Tables):
    """Base tables of any number of classes up to MAX_CLASSES; there are no refinements."""

    @classmethod
    def of(cls, base: NDArray[np.uint16]) -> ClassTables:
        """Tables from uint16 ``[classes, 256]``; raises CorruptError where a row does not add up to 4096."""
        if not (base.sum(axis=1, dtype=np.int64) == _TOTAL).all():
            _refuse("has frequencies that do not add up to 4096")
        return cls(base, np.zeros((len(base), CONTEXTS, 3), np.uint16), np.zeros((len(base), POINTS), np.uint16))

    @cached_property
    def lookup(self) -> NDArray[np.uint32]:
        """As in ``Tables``, in a few passes over all classes at once."""
        entries = np.repeat(np.arange(self.base.size, dtype=np.uint32), self.base.ravel())
        bias = np.tile(np.arange(_TOTAL, dtype=np.uint32), len(self.base)) - self.base_starts[entries]
        frequency = self.base.ravel()[entries].astype(np.uint32) - np.uint32(1)
        packed = entries % np.uint32(ALPHABET) << np.uint32(24) | bias << np.uint32(PROBABILITY_BITS) | frequency
        return np.asarray(packed, np.uint32)


@dataclass(frozen=True)
class Block:
    """Keys or values of one layer: where its columns lie in its stream and among all, and its first raw bit."""

    heads: int
    dim: int
    stream: int
    first: int
    columns: slice
    fields: Fields
    raw_start: int

    @property
    def in_stream(self) -> slice:
        """Its columns in its stream."""
        return slice(self.first, self.first + self.heads * self.dim)


@dataclass(frozen=True, eq=False)
class Grid:
    """Which bits a segment stores: blocks of columns, over all tokens (stream 0) or over distinct rows (stream 1).

    shapes: ``(heads, dim)`` of each block. codes: ``[tokens]``; 0 for a row of its own, k for the same as row k - 1.
    shared: bool ``[blocks]``; whether the block follows the codes. spares: ``[blocks]``, lowest mantissa bits that are
    zero in all its numbers.
    """

    fields: Fields
    shapes: list[tuple[int, int]]
    codes: NDArray[np.int64]
    shared: NDArray[np.bool_]
    spares: NDArray[np.int64]

    @classmethod
    def plain(cls, fields: Fields, shapes: list[tuple[int, int]], tokens: int) -> Grid:
        """A row for each token of every block, and no bit to spare."""
        blocks = len(shapes)
        return cls(fields, shapes, np.zeros(tokens, np.int64), np.zeros(blocks, np.bool_), np.zeros(blocks, np.int64))

    @cached_property
    def fresh(self) -> NDArray[np.intp]:
        """Tokens that have a row of their own."""
        return np.flatnonzero(self.codes == 0)

    @cached_property
    def sources(self) -> NDArray[np.int64]:
        """Row of each token."""
        return np.where(self.codes == 0, np.cumsum(self.codes == 0), self.codes) - 1

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of the two streams."""
        return len(self.codes), len(self.fresh)

    @cached_property
    def stream_of(self) -> NDArray[np.int64]:
        """Stream of each column."""
        return np.repeat(self.shared.astype(np.int64), [heads * dim for heads, dim in self.shapes])

    @cached_property
    def blocks(self) -> list[Block]:
        """All blocks in order."""
        ends, raw, out = [0, 0], 0, []
        for (heads, dim), stream, spare in zip(self.shapes, map(int, self.shared), map(int, self.spares), strict=True):
            width, fields = heads * dim, self.fields._replace(spare=spare)
            among = slice(sum(ends), sum(ends) + width)
            out.append(Block(heads, dim, stream, ends[stream], among, fields, raw))
            ends[stream] += width
            raw += self.rows[stream] * width * fields.raw
        return out

    @property
    def raw_bits(self) -> int:
        """Raw bits of all blocks."""
        last = self.blocks[-1]
        return last.raw_start + self.rows[last.stream] * last.heads * last.dim * last.fields.raw

    def matrices(self) -> list[NDArray[np.uint8]]:
        """Room for the symbols of both streams, ``[rows, columns]``."""
        return [
            np.empty((rows, int((self.stream_of == stream).sum())), np.uint8) for stream, rows in enumerate(self.rows)
        ]


def encode_lossless(cache: KVCache, start: int, stop: int) -> tuple[bytes, int]:
    """Write tokens ``start`` to ``stop`` of a cache as they are; returns the bytes and the number of coded symbols.

    Raises ArgumentError where the range is not within the cache, is too large for a segment, or where dtypes differ or
    are not among FORMATS.
    """
    fields, tensors = _stored(cache, start, stop)
    shapes = block_shapes(cache.meta.layers)
    if not _numbers(stop - start, shapes):
        return b"", 0
    blocks = [_bits(tensor[:, start:stop], fields) for tensor in tensors]
    grid = _find_repeats(blocks, Grid.plain(fields, shapes, stop - start))
    blocks = [bits[:, grid.fresh] if shared else bits for bits, shared in zip(blocks, grid.shared, strict=True)]
    grid, references, flips = _survey(blocks, grid)
    symbols, raw, escapes = _split(blocks, grid, references, flips)
    chosen, tables = _cluster(symbols)
    classes = np.zeros(len(flips), np.int64)
    for stream, own in enumerate(chosen):
        classes[grid.stream_of == stream] = own
    lists = (
        _planes(tables.base.astype("<u2")),
        (classes + _FLIP * flips).astype(np.uint8).tobytes(),
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
    """Read a segment: keys and values of every layer, ``[heads, tokens, dim]`` of ``dtype`` on the CPU, bit for bit.

    tokens, layers, dtype: of what was encoded. A layer without a cache gives tensors of no tokens. Raises CorruptError
    where the bytes cannot be what was written, and then gives nothing; ArgumentError where a segment cannot hold the
    shape or dtype. Memory: the output, a byte for each number, and the segment.
    """
    fields, shapes = _fields(dtype), block_shapes(layers)
    if _numbers(tokens, shapes):
        blocks = _decode(data, Grid.plain(fields, shapes, tokens), dtype)
    elif data:
        _refuse("of no numbers holds bytes")
    else:
        blocks = (torch.empty((heads, tokens, dim), dtype=dtype) for heads, dim in shapes)
    return [_nothing(spec, dtype) if spec.kind == "none" else (next(blocks), next(blocks)) for spec in layers]


def block_shapes(layers: tuple[LayerSpec, ...]) -> list[tuple[int, int]]:
    """Heads and dim of keys, then of values, of each layer that has a cache."""
    cached = [spec for spec in layers if spec.kind != "none"]
    return [(spec.kv_heads, dim) for spec in cached for dim in (spec.key_dim, spec.value_dim)]


def _nothing(spec: LayerSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys = torch.empty((spec.kv_heads, 0, spec.key_dim), dtype=dtype)
    return keys, torch.empty((spec.kv_heads, 0, spec.value_dim), dtype=dtype)


def _stored(cache: KVCache, start: int, stop: int) -> tuple[Fields, list[torch.Tensor]]:
    """The dtype's fields, and keys and values of each layer that has a cache."""
    if not 0 <= start <= stop <= cache.tokens:
        msg = f"tokens {start} to {stop} are not within the cache's {cache.tokens}"
        raise ArgumentError(msg)
    layers = zip(cache.meta.layers, cache.keys, cache.values, strict=True)
    tensors = [tensor for spec, key, value in layers if spec.kind != "none" for tensor in (key, value)]
    dtypes = {tensor.dtype for tensor in tensors} or {torch.float32}
    if len(dtypes) > 1:
        msg = f"a lossless segment holds one dtype, this cache has {sorted(map(str, dtypes))}; convert it first"
        raise ArgumentError(msg)
    return _fields(dtypes.pop()), tensors


def _fields(dtype: torch.dtype) -> Fields:
    if dtype not in FORMATS:
        msg = f"a lossless segment cannot hold {dtype}, only {', '.join(map(str, FORMATS))}"
        raise ArgumentError(msg)
    return FORMATS[dtype]


def _numbers(tokens: int, shapes: list[tuple[int, int]]) -> int:
    """Numbers of a segment without repeats; raises ArgumentError where there are too many."""
    numbers = tokens * sum(heads * dim for heads, dim in shapes)
    if numbers > MAX_CHUNK_SYMBOLS:
        msg = f"{numbers} numbers are more than the {MAX_CHUNK_SYMBOLS} of a lossless segment; take fewer tokens"
        raise ArgumentError(msg)
    return numbers


def _bits(tensor: torch.Tensor, fields: Fields) -> Bits:
    """A tensor's numbers as unsigned integers of their width, contiguous, on the CPU."""
    signed = tensor.detach().cpu().contiguous().view(_SIGNED[fields.width])
    return signed.numpy().view(f"u{fields.width // 8}")


def _find_repeats(blocks: list[Bits], grid: Grid) -> Grid:
    """The grid with the rows that repeat in the first layer, and all blocks in which the same rows repeat.

    A hash proposes which rows are equal; the comparison decides.
    """
    for bits in blocks[:2]:
        codes = _codes(bits)
        twins = np.flatnonzero(codes)
        repeated = replace(grid, codes=codes)
        originals = repeated.fresh[repeated.sources[twins]]
        shared = np.array([len(twins) > 0 and _same(block, twins, originals) for block in blocks])
        if shared.any():
            return replace(repeated, shared=shared)
    return grid


def _same(bits: Bits, twins: NDArray[np.intp], originals: NDArray[np.intp]) -> bool:
    first = np.array_equal(bits[:, twins[0]], bits[:, originals[0]])  # tells most blocks at once
    return first and np.array_equal(bits[:, twins], bits[:, originals])


def _codes(bits: Bits) -> NDArray[np.int64]:
    """0 for tokens whose row's hash is new, k for those that hash as row k - 1 does."""
    heads, tokens, dim = bits.shape
    weights = np.random.default_rng(0).integers(1, 2**63, (heads, dim), np.uint64)
    hashes = np.zeros(tokens, np.uint64)
    for head, weight in zip(bits, weights, strict=True):
        hashes += head.astype(np.uint64) @ weight
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))
    return np.where(first[inverse] == np.arange(tokens), 0, ranks[inverse] + 1)


def _survey(blocks: list[Bits], grid: Grid) -> tuple[Grid, NDArray[np.uint16], NDArray[np.uint8]]:
    """The grid with spare bits found; each column's reference exponent, and 1 where its signs are flipped."""
    columns = len(grid.stream_of)
    references, negatives = np.zeros(columns, np.uint16), np.zeros(columns, np.uint32)
    spares = []
    for bits, block in zip(blocks, grid.blocks, strict=True):
        union = np.zeros(1, np.uint64)
        exponent_kernels.survey(bits, grid.fields, references[block.columns], negatives[block.columns], union)
        used = int(union[0]) | 1 << grid.fields.low
        spares.append((used & -used).bit_length() - 1)
    rows = np.array(grid.rows)[grid.stream_of]
    return replace(grid, spares=np.array(spares)), references, (2 * negatives > rows).astype(np.uint8)


def _split(
    blocks: list[Bits], grid: Grid, references: NDArray[np.uint16], flips: NDArray[np.uint8]
) -> tuple[list[NDArray[np.uint8]], bytes, NDArray[np.uint16]]:
    """Symbols of both streams, the raw bits, and the exponents that no symbol could tell."""
    symbols, escapes = grid.matrices(), []
    raw = np.zeros(grid.raw_bits // 64 + 2, np.uint64)
    for bits, block in zip(blocks, grid.blocks, strict=True):
        matrix = symbols[block.stream]
        side = references[block.columns], flips[block.columns]
        exponent_kernels.split(bits, block.fields, *side, matrix, block.first, raw, block.raw_start)
        row, column = _escaped(matrix[:, block.in_stream], grid.fields)
        lost = bits[column // block.dim, row, column % block.dim]
        escapes.append((lost >> grid.fields.mantissa & grid.fields.top).astype(np.uint16))
    return symbols, raw.astype("<u8").tobytes()[: -(-grid.raw_bits // 8)], np.concatenate(escapes)


def _escaped(symbols: NDArray[np.uint8], fields: Fields) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns where a symbol's distance is the escape, by row, then by column."""
    if fields.exponent <= fields.distance:
        return np.zeros(0, np.intp), np.zeros(0, np.intp)
    escape = np.uint8(fields.escape << 7 - fields.distance)
    row, column = np.divmod(np.flatnonzero((symbols & escape) == escape), symbols.shape[1])
    return row, column


def _cluster(symbols: list[NDArray[np.uint8]]) -> tuple[list[NDArray[np.int64]], ClassTables]:
    """Class of each stream's columns, and the classes' tables: k-means over histograms, by the bits that a table costs.

    Classes begin as columns of like mean symbol, are fitted on some of the columns, then all columns choose.
    """
    columns = sum(matrix.shape[1] for matrix in symbols)
    sample = np.concatenate([_histograms(matrix[:, :: -(-columns // _BATCH)]) for matrix in symbols])
    numbers = sum(matrix.size for matrix in symbols)
    wanted = min(max(numbers // _NUMBERS_PER_CLASS, 1), MAX_CLASSES, len(sample))
    means = sample @ (np.arange(ALPHABET, dtype=np.float32) % _FLIP) / sample.sum(axis=1)
    classes = np.argsort(np.argsort(means, kind="stable"), kind="stable") * wanted // len(sample)
    for _ in range(_ROUNDS):
        classes = (sample @ _costs(_sums(sample, classes, wanted)).T).argmin(axis=1)
    costs = _costs(_sums(sample, classes, wanted))
    chosen = [np.zeros(matrix.shape[1], np.int64) for matrix in symbols]
    sums = np.zeros((wanted, ALPHABET))
    for matrix, own in zip(symbols, chosen, strict=True):
        for first in range(0, len(own), _BATCH):
            counts = _histograms(matrix[:, first : first + _BATCH])
            own[first : first + _BATCH] = (counts @ costs.T).argmin(axis=1)
            sums += _sums(counts, own[first : first + _BATCH], wanted)
    used = sums.any(axis=1)
    tables = ClassTables.of(np.stack([_normalise(row, row > 0) for row in sums[used]]))
    return [(np.cumsum(used) - 1)[own] for own in chosen], tables


def _histograms(symbols: NDArray[np.uint8]) -> NDArray[np.float32]:
    """How often each symbol occurs in each column, ``[columns, 256]``."""
    counts = np.zeros((symbols.shape[1], ALPHABET), np.uint32)
    exponent_kernels.histogram(np.ascontiguousarray(symbols), counts)
    return counts.astype(np.float32)


def _sums(counts: NDArray[np.float32], classes: NDArray[np.int64], wanted: int) -> NDArray[np.float32]:
    """Histogram of each class, ``[classes, 256]``."""
    members = (classes[None, :] == np.arange(wanted)[:, None]).astype(np.float32)
    return np.asarray(members @ counts, np.float32)


def _costs(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """Sixteenths of a bit that each symbol takes in each class.

    All are whole numbers: sums of them are exact, so that the number of threads cannot change what is chosen.
    """
    counts = sums + np.float32(_UNSEEN)
    bits = np.log2(counts.sum(axis=1, keepdims=True)) - np.log2(counts)
    return np.asarray(np.rint(16 * bits), np.float32)


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
    """All lowest bytes, then the next ones, and so on: small numbers then leave planes of zeros."""
    return array.ravel().view(np.uint8).reshape(array.size, array.itemsize).T.tobytes()


def _unplanes(raw: bytes, dtype: str) -> NDArray[Any]:
    planes = np.frombuffer(raw, np.uint8).reshape(np.dtype(dtype).itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype).ravel().astype(dtype.replace("<", "="))


def _decode(data: bytes, plain: Grid, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Check everything, then join block by block."""
    parts = _Parts(data)
    grid, fields = parts.grid(plain), plain.fields
    columns = sum(heads * dim for heads, dim in plain.shapes)
    classes, flips = parts.classes(columns)  # the first list of a column's length: it has to be paid for
    references = parts.exponents("reference", columns, fields)
    tables = parts.tables()
    symbols = [parts.symbols(s, classes[grid.stream_of == s], tables, rows) for s, rows in enumerate(grid.rows)]
    raw = parts.raw(grid.raw_bits)
    escaped = [_escaped(symbols[block.stream][:, block.in_stream], fields) for block in grid.blocks]
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
    """The parts of a segment's bytes, each checked as it is asked for; all raise CorruptError."""

    def __init__(self, data: bytes) -> None:
        """Find where everything lies."""
        if len(data) < _HEADER.size:
            _refuse("ends within its header")
        fixed = _HEADER.unpack_from(data)
        self._words, self._lanes, self._classes = fixed[6:8], fixed[8:10], fixed[10]
        streams = [6 * lanes + 2 * words for lanes, words in zip(self._lanes, self._words, strict=True)]
        ends = np.cumsum([_HEADER.size, *fixed[:6], *streams], dtype=np.int64).tolist()
        if ends[-1] > len(data) or not 1 <= self._classes <= MAX_CLASSES or max(self._lanes) > MAX_LANES:
            _refuse("has parts that do not fit it")
        pieces = [data[start:stop] for start, stop in pairwise(ends)]
        self._lists, self._streams = dict(zip(_LISTS, pieces, strict=False)), pieces[len(_LISTS) :]
        self._raw = memoryview(data)[ends[-1] :]

    def _list(self, name: str, length: int) -> bytes:
        """A compressed list of a length that is known from elsewhere; nothing stands for the empty list."""
        packed = self._lists[name]
        return decompress(packed, length, f"lossless segment's {name} list") if packed or length else b""

    def tables(self) -> ClassTables:
        """Frequencies of each class."""
        raw = self._list("table", 2 * ALPHABET * self._classes)
        return ClassTables.of(_unplanes(raw, "<u2").reshape(self._classes, ALPHABET))

    def classes(self, columns: int) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Class and sign flip of each column."""
        raw = np.frombuffer(self._list("class", columns), np.uint8)
        classes = (raw % _FLIP).astype(np.int64)
        if classes.max() >= self._classes:
            _refuse("names a class that it has no table for")
        return classes, raw // np.uint8(_FLIP)

    def grid(self, plain: Grid) -> Grid:
        """The plain grid with the segment's spare bits and repeated rows."""
        raw = np.frombuffer(self._list("block", len(plain.shapes)), np.uint8)
        grid = replace(plain, shared=raw >= _SHARED, spares=(raw % _SHARED).astype(np.int64))
        if grid.spares.max() > grid.fields.low:
            _refuse("spares more bits than there are")
        tokens = len(plain.codes) if grid.shared.any() else 0
        codes = _unplanes(self._list("row", 4 * tokens), "<u4").astype(np.int64)
        if (codes > np.cumsum(codes == 0)).any():
            _refuse("refers to rows that do not come before")
        return replace(grid, codes=codes) if tokens else grid

    def exponents(self, name: str, count: int, fields: Fields) -> NDArray[np.uint16]:
        """A list of exponents: the columns' references, or the escapes."""
        exponents: NDArray[np.uint16] = _unplanes(self._list(name, 2 * count), "<u2")
        if count and exponents.max() > fields.top:
            _refuse("has an exponent that its dtype has not")
        return exponents

    def symbols(self, stream: int, classes: NDArray[np.int64], tables: ClassTables, rows: int) -> NDArray[np.uint8]:
        """Decode one of the streams, ``[rows, columns]``."""
        piece, lanes, words = self._streams[stream], self._lanes[stream], self._words[stream]
        if (lanes == 0) != (len(classes) == 0) or (words and not lanes):
            _refuse("has a stream without columns, or columns without a stream")
        if not lanes:
            return np.empty((rows, 0), np.uint8)
        states = np.frombuffer(piece, "<u4", lanes).astype(np.uint32)
        counts = np.frombuffer(piece, "<u2", lanes, 4 * lanes).astype(np.uint16)
        if int(counts.sum(dtype=np.int64)) != words:
            _refuse("has lanes that do not add up to its words")
        coded = Lanes(states, counts, np.frombuffer(piece, "<u2", words, 6 * lanes).astype(np.uint16))
        return decode_base(coded, classes + 1, tables, rows)

    def raw(self, count: int) -> NDArray[np.uint64]:
        """The raw bits in 64-bit words, with one to spare."""
        if len(self._raw) != -(-count // 8):
            _refuse("has parts that do not add up to its length")
        words = np.zeros(count // 64 + 2, "<u8")
        words.view(np.uint8)[: len(self._raw)] = np.frombuffer(self._raw, np.uint8)
        return words.astype(np.uint64, copy=False)


def _refuse(what: str) -> NoReturn:
    msg = f"a lossless segment {what}: it is damaged, fetch it again"
    raise CorruptError(msg)
