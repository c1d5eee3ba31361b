"""BLAKE3 with 32 bytes of output, which hashlib does not have: the plain algorithm, some milliseconds a kilobyte.

Source: https://github.com/BLAKE3-team/BLAKE3-specs, sections 2.1 to 2.6.
"""

from __future__ import annotations

import struct

_START = (
    0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19,
)  # fmt: skip
_SHUFFLE = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_BLOCK_BYTES, _CHUNK_BYTES, _ROUNDS = 64, 1024, 7
_MASK = 0xFFFFFFFF
# Columns, then diagonals, of the state as a square of four by four words.
_MIXED = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip

_Words = tuple[int, ...]


def blake3(data: bytes) -> bytes:
    """Hash bytes."""
    return struct.pack("<8I", *_tree(data, 0, _ROOT))


def _tree(data: bytes, number: int, root: int) -> _Words:
    """Chaining value of the subtree over ``data``, whose first chunk has a number; ``root`` is the flag of the root."""
    if len(data) <= _CHUNK_BYTES:
        return _chunk(data, number, root)
    chunks = (len(data) - 1) // _CHUNK_BYTES
    left = 1 << (chunks.bit_length() - 1)  # the most chunks, a power of two, that leave some for the right side
    at = left * _CHUNK_BYTES
    both = _tree(data[:at], number, 0) + _tree(data[at:], number + left, 0)
    return _compress(_START, both, 0, _BLOCK_BYTES, _PARENT | root)


def _chunk(data: bytes, number: int, root: int) -> _Words:
    value: _Words = _START
    last = max(0, len(data) - 1) // _BLOCK_BYTES
    for index in range(last + 1):
        block = data[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
        flags = (_CHUNK_START if index == 0 else 0) | (_CHUNK_END | root if index == last else 0)
        words = struct.unpack("<16I", block.ljust(_BLOCK_BYTES, b"\0"))
        value = _compress(value, words, number, len(block), flags)
    return value


def _compress(value: _Words, words: _Words, counter: int, length: int, flags: int) -> _Words:
    state = [*value, *_START[:4], counter & _MASK, counter >> 32, length, flags]
    for _ in range(_ROUNDS):
        for place, (a, b, c, d) in enumerate(_MIXED):
            _mix(state, (a, b, c, d), words[2 * place], words[2 * place + 1])
        words = tuple(words[index] for index in _SHUFFLE)
    return tuple(low ^ high for low, high in zip(state[:8], state[8:], strict=True))


def _mix(state: list[int], at: tuple[int, int, int, int], first: int, second: int) -> None:
    a, b, c, d = (state[index] for index in at)
    a = (a + b + first) & _MASK
    d = _turned(d ^ a, 16)
    c = (c + d) & _MASK
    b = _turned(b ^ c, 12)
    a = (a + b + second) & _MASK
    d = _turned(d ^ a, 8)
    c = (c + d) & _MASK
    b = _turned(b ^ c, 7)
    state[at[0]], state[at[1]], state[at[2]], state[at[3]] = a, b, c, d


def _turned(word: int, by: int) -> int:
    return (word >> by) | (word << (32 - by)) & _MASK
