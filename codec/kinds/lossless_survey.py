"""Analysis by the lossless encoder: repeated rows, references, symbols, classes of columns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.entropy import exponent_kernels
from kvwire.codec.entropy.tables import ALPHABET, normalise
from kvwire.codec.kinds.lossless_grid import FLIP, MAX_CLASSES, ClassTables, escaped_in

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.entropy.exponent_kernels import Bits
    from kvwire.codec.kinds.lossless_grid import Grid

_NUMBERS_PER_CLASS = 1 << 15
"""A table costs about 80 bytes; for fewer numbers than this another table saves less."""
_BATCH = 1024
"""Columns that classes are fitted on, and columns whose histograms are in memory at a time."""
_ROUNDS = 4
_UNSEEN = 0.02
"""Count of a symbol that a class has not seen: expensive, but possible."""


def find_repeats(blocks: list[Bits], grid: Grid) -> Grid:
    """Find the rows that repeat in the first layer, and all blocks in which the same rows repeat.

    Equal hashes propose equal rows; a comparison confirms them.
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
    first = np.array_equal(bits[:, twins[0]], bits[:, originals[0]])  # rules most blocks out quickly
    return first and np.array_equal(bits[:, twins], bits[:, originals])


def _codes(bits: Bits) -> NDArray[np.int64]:
    """Return for each token 0 where its row's hash is new, k where it equals the hash of row k - 1."""
    heads, tokens, dim = bits.shape
    weights = np.random.default_rng(0).integers(1, 2**63, (heads, dim), np.uint64)
    hashes = np.zeros(tokens, np.uint64)
    for head, weight in zip(bits, weights, strict=True):
        hashes += head.astype(np.uint64) @ weight
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    ranks = np.argsort(np.argsort(first))
    return np.where(first[inverse] == np.arange(tokens), 0, ranks[inverse] + 1)


def survey(blocks: list[Bits], grid: Grid) -> tuple[Grid, NDArray[np.uint16], NDArray[np.uint8]]:
    """Find each block's spare bits and each column's reference exponent and sign flip."""
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


def split(
    blocks: list[Bits], grid: Grid, references: NDArray[np.uint16], flips: NDArray[np.uint8]
) -> tuple[list[NDArray[np.uint8]], bytes, NDArray[np.uint16]]:
    """Split numbers into symbols, raw bits and escapes."""
    symbols, escapes = grid.matrices(), []
    raw = np.zeros(grid.raw_bits // 64 + 2, np.uint64)
    for bits, block in zip(blocks, grid.blocks, strict=True):
        matrix = symbols[block.stream]
        side = references[block.columns], flips[block.columns]
        exponent_kernels.split(bits, block.fields, *side, matrix, block.first, raw, block.raw_start)
        row, column = escaped_in(matrix[:, block.in_stream], grid.fields)
        lost = bits[column // block.dim, row, column % block.dim]
        escapes.append((lost >> grid.fields.mantissa & grid.fields.top).astype(np.uint16))
    return symbols, raw.astype("<u8").tobytes()[: -(-grid.raw_bits // 8)], np.concatenate(escapes)


def cluster(symbols: list[NDArray[np.uint8]]) -> tuple[list[NDArray[np.int64]], ClassTables]:
    """Choose the columns' classes by k-means over histograms; the distance is the coded bits.

    Classes start as columns of similar mean symbol, are fitted on a sample, and then every column chooses one.
    """
    columns = sum(matrix.shape[1] for matrix in symbols)
    sample = np.concatenate([_histograms(matrix[:, :: -(-columns // _BATCH)]) for matrix in symbols])
    numbers = sum(matrix.size for matrix in symbols)
    wanted = min(max(numbers // _NUMBERS_PER_CLASS, 1), MAX_CLASSES, len(sample))
    means = sample @ (np.arange(ALPHABET, dtype=np.float32) % FLIP) / sample.sum(axis=1)
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
    tables = ClassTables.of(np.stack([normalise(row, row > 0) for row in sums[used]]))
    return [(np.cumsum(used) - 1)[own] for own in chosen], tables


def _histograms(symbols: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Count each symbol in each column, ``[columns, 256]``."""
    counts = np.zeros((symbols.shape[1], ALPHABET), np.uint32)
    exponent_kernels.histogram(np.ascontiguousarray(symbols), counts)
    return counts.astype(np.float32)


def _sums(counts: NDArray[np.float32], classes: NDArray[np.int64], wanted: int) -> NDArray[np.float32]:
    """Sum the histograms of each class, ``[classes, 256]``."""
    members = (classes[None, :] == np.arange(wanted)[:, None]).astype(np.float32)
    return np.asarray(members @ counts, np.float32)


def _costs(sums: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the cost of each symbol in each class, in sixteenths of a bit.

    Costs are whole numbers: their sums are exact, so the number of threads cannot change the choice.
    """
    counts = sums + np.float32(_UNSEEN)
    bits = np.log2(counts.sum(axis=1, keepdims=True)) - np.log2(counts)
    return np.asarray(np.rint(16 * bits), np.float32)
