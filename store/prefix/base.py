"""What a way of hashing prompts has to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MAX_CHUNK_TOKENS = 1 << 16


class HashScheme(Protocol):
    """Chained hashes: each is of one chunk of a prompt and, through the one before it, of all that stands before.

    Attributes:
        name: Of the scheme with the tokens of its chunks, as entries tell it: ``lmcache-256``.
        chunk_tokens: Tokens of a chunk. A prompt's end that fills no chunk has no hash.
    """

    @property
    def name(self) -> str:
        """See the class."""
        ...

    @property
    def chunk_tokens(self) -> int:
        """See the class."""
        ...

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hash a prompt.

        Args:
            token_ids: From the prompt's first token on, each from 0 to 2^32 - 1.

        Returns:
            The hash of each whole chunk, in order.

        Raises:
            ArgumentError: A token id does not fit 32 bits.
        """
        ...


def check_chunk_tokens(tokens: int) -> int:
    """Refuse chunks of no length, or of too many tokens."""
    if type(tokens) is not int or not 0 < tokens <= MAX_CHUNK_TOKENS:
        msg = f"a chunk of an index has 1 to {MAX_CHUNK_TOKENS} tokens, got {str(tokens)[:40]}"
        raise ArgumentError(msg)
    return tokens


def chunks_of(token_ids: Sequence[int], chunk_tokens: int, byte_order: str) -> Iterator[bytes]:
    """Whole chunks of a prompt, as 32-bit words."""
    import numpy as np

    if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < 1 << 32):
        msg = "token ids must lie in 0 to 2^32 - 1"
        raise ArgumentError(msg)
    words = np.asarray(token_ids, dtype=f"{byte_order}u4").tobytes()
    size = 4 * chunk_tokens
    yield from (words[at : at + size] for at in range(0, len(words) - size + 1, size))
