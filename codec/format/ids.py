"""Token ids, packed with as many bits as the largest needs. See docs/format.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

MIN_BITS = 8
"""Every token costs a byte, known or not: a blob cannot claim tokens that it does not pay for."""
MAX_BITS = 32


def pack_ids(ids: Sequence[int] | None, tokens: int) -> tuple[int, bytes]:
    """Pack token ids, lowest bit first."""
    if ids is None:
        return 0, bytes(tokens)
    bits = max(MIN_BITS, max(ids).bit_length())
    if min(ids) < 0 or bits > MAX_BITS:
        msg = f"token ids must be 0 to 2^{MAX_BITS} - 1, got {min(ids)} to {max(ids)}"
        raise ArgumentError(msg)
    wide = np.asarray(ids, "<u4").view(np.uint8).reshape(-1, 4)
    flat = np.unpackbits(wide, axis=1, bitorder="little")[:, :bits]
    return bits, np.packbits(flat.ravel(), bitorder="little").tobytes()


def id_bytes(tokens: int, bits: int) -> int:
    """Count the bytes that packed ids take."""
    return -(-tokens * max(MIN_BITS, bits) // 8)


def unpack_ids(data: bytes, tokens: int, bits: int) -> tuple[int, ...] | None:
    """Read ``pack_ids``: an id lies in the five bytes from the one that its first bit is in."""
    if not bits:
        return None
    padded = np.frombuffer(data + bytes(5), np.uint8)
    first_bit = np.arange(tokens, dtype=np.int64) * bits
    wide = np.zeros(tokens, np.uint64)
    for byte in range(5):
        wide |= padded[(first_bit >> 3) + byte].astype(np.uint64) << np.uint64(8 * byte)
    ids = (wide >> (first_bit & 7).astype(np.uint64)) & np.uint64((1 << bits) - 1)
    return tuple(ids.tolist())
