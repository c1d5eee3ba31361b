"""The entropy coder of the CacheGen profile: range coding with one integer table for each channel.

Rows of symbols follow each other in one stream of ``constriction``'s range coder, each row with a table of its own.
Tables are 16-bit frequencies; constriction works with 24 bits and adds one to whatever it is given, so it is given
256 times the frequency less one. These add up to 2^24 less the number of symbols, which is the total that constriction
scales to: it scales by exactly one, in floats that hold all the numbers exactly, and the model is the table, bit for
bit, wherever it is built. docs/format.md specifies the stream without naming a library.
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
"""Every table's frequencies add up to this; a uint16 holds each, since no table has a symbol of frequency 0."""
_MODEL_BITS = 24
"""Precision of constriction's tables."""


def frequencies_of(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Turn weights into tables."""
    rows, symbols = counts.shape
    share = counts / counts.sum(1, keepdims=True)
    out: NDArray[np.int64] = 1 + np.floor(share * (TOTAL - symbols)).astype(np.int64)
    out[np.arange(rows), out.argmax(1)] += TOTAL - out.sum(1)
    return out.astype(np.uint16)


def sound(tables: NDArray[np.uint16]) -> bool:
    """Check tables."""
    return bool((tables > 0).all() and (tables.sum(-1, dtype=np.int64) == TOTAL).all())


def encode_rows(parts: Iterable[tuple[NDArray[np.uint8], NDArray[np.uint16]]]) -> bytes:
    """Code parts after each other."""
    encoder = constriction.stream.queue.RangeEncoder()
    for symbols, tables in parts:
        if symbols.shape[1]:
            for row, table in zip(symbols.astype(np.int32), tables, strict=True):
                encoder.encode(row, _model(table))
    return bytes(encoder.get_compressed().astype("<u4").tobytes())


def decode_rows(data: bytes, parts: Iterable[tuple[int, NDArray[np.uint16]]]) -> list[NDArray[np.uint8]]:
    """Read ``encode_rows``."""
    decoder = constriction.stream.queue.RangeDecoder(np.frombuffer(data, "<u4").astype(np.uint32))
    out = []
    try:
        for count, tables in parts:
            symbols = np.empty((len(tables), count), np.uint8)
            if count:
                for row, table in zip(symbols, tables, strict=True):
                    row[:] = decoder.decode(_model(table), count)
            out.append(symbols)
    except AssertionError as error:  # how constriction reports words that no encoder writes
        msg = "the words of a segment are not what an encoder writes: it is damaged, fetch it again"
        raise CorruptError(msg) from error
    if not decoder.maybe_exhausted():
        raise CorruptError("words of a segment are left over: it is damaged, fetch it again")
    return out


def _model(table: NDArray[np.uint16]) -> Any:  # noqa: ANN401 - constriction has no types
    """A table ``[symbols]`` as constriction has it, exactly; see the module's text."""
    fine = table.astype(np.int64) * ((1 << _MODEL_BITS) // TOTAL) - 1
    return constriction.stream.model.Categorical(fine.astype(np.float32), perfect=False)
