"""numba kernels that split floating-point numbers into fields and join them, for ``lossless``.

A number is sign | exponent | mantissa. Its symbol is one byte: sign (1 bit, flipped in columns marked so), distance of
its exponent below the column's reference, and the highest mantissa bits. The other mantissa bits are raw. The tests
have naive twins. No kernel checks an index: all shapes come from the layers, never from a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from numpy import int32, int64, uint8, uint16, uint32, uint64

from kvwire.codec.entropy.jit import jit

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from numpy.typing import NDArray

    from kvwire.codec.entropy.jit import U8, U16, U32

    U64: TypeAlias = NDArray[uint64]

    Bits: TypeAlias = NDArray[Any]
    """Numbers as unsigned integers of the same width."""

_MAX_DISTANCE_BITS = 5
"""31 octaves below a column's largest number cover practically all numbers; the byte has 2 bits left for mantissa."""
_TILE = 64
"""Columns whose histograms fit the L1 cache."""


class Fields(NamedTuple):
    """Bit counts of a number's fields.

    Attributes:
        width: All bits of a number.
        exponent: Exponent bits.
        mantissa: Mantissa bits.
        distance: Bits of the symbol's field for reference minus exponent.
        spare: Lowest mantissa bits that are zero in every number of the block and not stored.
    """

    width: int
    exponent: int
    mantissa: int
    distance: int
    spare: int

    @classmethod
    def of(cls, exponent: int, mantissa: int) -> Fields:
        """Describe a floating-point format."""
        return cls(1 + exponent + mantissa, exponent, mantissa, min(_MAX_DISTANCE_BITS, exponent), 0)

    @property
    def low(self) -> int:
        """Number of mantissa bits outside the symbol."""
        return self.mantissa - (7 - self.distance)

    @property
    def raw(self) -> int:
        """Number of bits stored raw."""
        return self.low - self.spare

    @property
    def top(self) -> int:
        """The largest exponent: all ones."""
        return (1 << self.exponent) - 1

    @property
    def escape(self) -> int:
        """The largest distance, which marks an exponent outside the field; a field for every exponent has no escape."""
        return (1 << self.distance) - 1


@jit
def survey(bits: Bits, fields: Fields, references: U16, negatives: U32, union: U64) -> None:
    """Set each column's reference to its largest exponent, count its negative numbers, and OR all bits.

    The exponent of all ones, that of infinity and NaN in most formats, is ignored.
    """
    heads, tokens, dim = bits.shape
    top = (1 << fields.exponent) - 1
    every = uint64(0)
    for h in range(heads):
        highest, below = references[h * dim : (h + 1) * dim], negatives[h * dim : (h + 1) * dim]
        for t in range(tokens):
            row = bits[h, t]
            for d in range(dim):
                exponent = uint16((row[d] >> fields.mantissa) & top)
                highest[d] = max(highest[d], exponent if exponent < top else uint16(0))
                below[d] += uint32(row[d] >> (fields.width - 1))
                every |= uint64(row[d])
    union[0] |= every


@jit
def split(bits: Bits, fields: Fields, references: U16, flips: U8, symbols: U8, column: int, raw: U64, at: int) -> None:
    """Write each number's symbol and its raw bits."""
    heads, tokens, dim = bits.shape
    high = 7 - fields.distance
    low = fields.mantissa - high
    top, kept, escape = (1 << fields.exponent) - 1, (1 << high) - 1, int32((1 << fields.distance) - 1)
    count = low - fields.spare
    mask = uint64((1 << count) - 1)
    word, fill = at >> 6, at & 63
    gathered = raw[word]
    for h in range(heads):
        reference, flip = references[h * dim : (h + 1) * dim], flips[h * dim : (h + 1) * dim]
        first = column + h * dim
        for t in range(tokens):
            row, out = bits[h, t], symbols[t, first : first + dim]
            for d in range(dim):
                distance = int32((int32(reference[d]) - int32(row[d] >> fields.mantissa)) & top)
                within = int32(min(distance, escape))
                sign = uint8(row[d] >> (fields.width - 1)) ^ flip[d]
                out[d] = uint8(sign << 7) | uint8(within << high) | uint8((row[d] >> low) & kept)
            for d in range(dim if count else 0):
                rest = (uint64(row[d]) >> uint64(fields.spare)) & mask
                gathered |= rest << uint64(fill)
                fill += count
                if fill >= 64:  # noqa: PLR2004 - bits of a word
                    raw[word] = gathered
                    word, fill = word + 1, fill - 64
                    gathered = rest >> uint64(count - fill)
    raw[word] = gathered


@jit
def join(symbols: U8, column: int, fields: Fields, references: U16, flips: U8, raw: U64, at: int, bits: Bits) -> None:
    """Undo ``split``; escaped numbers get an arbitrary exponent, which the caller replaces."""
    heads, tokens, dim = bits.shape
    high = 7 - fields.distance
    low = fields.mantissa - high
    top, distances, kept = (1 << fields.exponent) - 1, (1 << fields.distance) - 1, (1 << high) - 1
    count, spare = uint64(low - fields.spare), uint64(fields.spare)
    mask = (uint64(1) << count) - uint64(1)
    signs, exponents, uppers = uint64(fields.width - 1), uint64(fields.mantissa), uint64(low)
    start = uint64(at)
    for h in range(heads):
        reference, flip = references[h * dim : (h + 1) * dim], flips[h * dim : (h + 1) * dim]
        first = column + h * dim
        for t in range(tokens):
            row, out = symbols[t, first : first + dim], bits[h, t]
            for d in range(dim):
                exponent = uint64((int64(reference[d]) - int64((row[d] >> high) & distances)) & top)
                sign, upper = uint64((row[d] >> 7) ^ flip[d]), uint64(row[d] & kept)
                place = start + uint64(d) * count
                word, shift = place >> uint64(6), place & uint64(63)
                rest = raw[word] >> shift | (raw[word + uint64(1)] << uint64(1)) << (uint64(63) - shift)
                out[d] = sign << signs | exponent << exponents | upper << uppers | (rest & mask) << spare
            start += uint64(dim) * count


@jit
def histogram(symbols: U8, counts: U32) -> None:
    """Count the symbols of each column."""
    tokens, columns = symbols.shape
    for first in range(0, columns, _TILE):
        for t in range(tokens):
            for c in range(first, min(first + _TILE, columns)):
                counts[c, symbols[t, c]] += 1
