"""The entropy coder of CacheGen's levels: range coding with one integer table for each channel.

Rows of symbols share one stream of ``constriction``'s range coder, each row with its own table of 16-bit frequencies.
constriction works with 24 bits and adds one to each weight, so it gets 256 times the frequency minus one. These weights
add up to 2^24 minus the number of symbols, the total to which constriction scales: the factor is exactly one, float32
holds all numbers exactly, and the model equals the table bit for bit on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import constriction
import numpy as np

from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

TOTAL = 1 << 16
"""Sum of a table's frequencies; uint16 holds each, since no frequency is 0."""
_MODEL_BITS = 24
"""Precision of constriction's tables."""


def frequencies_of(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Turn weights ``[tables, symbols]`` into frequencies of at least 1."""
    rows, symbols = counts.shape
    share = counts / counts.sum(1, keepdims=True)
    out: NDArray[np.int64] = 1 + np.floor(share * (TOTAL - symbols)).astype(np.int64)
    out[np.arange(rows), out.argmax(1)] += TOTAL - out.sum(1)
    return out.astype(np.uint16)


def are_valid(tables: NDArray[np.uint16]) -> bool:
    """Return whether all frequencies are positive and each table adds up to TOTAL."""
    return bool((tables > 0).all() and (tables.sum(-1, dtype=np.int64) == TOTAL).all())


def encode_rows(parts: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint16]]]) -> bytes:
    """Encode parts, each symbols ``[rows, count]`` with tables ``[rows, alphabet]``, into one stream."""
    encoder = constriction.stream.queue.RangeEncoder()
    for symbols, tables in parts:
        if symbols.shape[1]:
            for row, table in zip(symbols.astype(np.int32), tables, strict=True):
                encoder.encode(row, _model(table))
    return bytes(encoder.get_compressed().astype("<u4").tobytes())


def decode_rows(data: bytes, parts: Iterable[tuple[int, NDArray[np.uint16]]]) -> list[NDArray[np.uint8]]:
    """Decode parts, each of a symbol count and tables ``[rows, alphabet]``, from a stream."""
    decoder = constriction.stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
    out = []
    try:
        for count, tables in parts:
            symbols = np.empty((len(tables), count), np.uint8)
            if count:
                for row, table in zip(symbols, tables, strict=True):
                    row[:] = decoder.decode(_model(table), count)
            out.append(symbols)
    except AssertionError as error:  # constriction's report of words that no encoder writes
        msg = "the words of a segment are not what an encoder writes: it is damaged, fetch it again"
        raise CorruptError(msg) from error
    if not decoder.maybe_exhausted():
        raise CorruptError("words of a segment are left over: it is damaged, fetch it again")
    return out


def _model(table: NDArray[np.uint16]) -> Any:  # noqa: ANN401 - constriction has no types
    fine = table.astype(np.int64) * ((1 << _MODEL_BITS) // TOTAL) - 1
    return constriction.stream.model.Categorical(fine.astype(np.float32), perfect=False)
