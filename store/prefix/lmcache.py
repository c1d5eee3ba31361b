"""LMCache's chunk hashes, as its server makes them by default: BLAKE3 over the hash before and the token ids.

Its hash algorithms other than ``blake3`` depend on vLLM's settings or on Python's hash seed, and are not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blake3 import blake3

from kvwire.store.prefix.base import check_chunk_tokens, chunks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_TOKENS = 256
_BEFORE_ALL = bytes(12)  # a hash of 0 as 64 bits, a token of 0 as 32: what stands before the first chunk


@dataclass(frozen=True)
class LmcacheChain:
    """LMCache's chain.

    Attributes:
        chunk_tokens: LMCache's ``chunk_size``.
    """

    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        """Refuse chunks that are none."""
        check_chunk_tokens(self.chunk_tokens)

    @property
    def name(self) -> str:
        """As entries tell it."""
        return f"lmcache-{self.chunk_tokens}"

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hash a prompt, see ``HashScheme``."""
        before, found = blake3(_BEFORE_ALL).digest(), []
        for chunk in chunks_of(token_ids, self.chunk_tokens, ">"):
            before = blake3(before + chunk).digest()
            found.append(before)
        return found
