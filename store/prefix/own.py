"""kvwire's own chain, which also names the model: SHA-256 over the hash before and the chunk's token ids."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.store.prefix.base import check_chunk_tokens, chunks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNK_TOKENS = 64


@dataclass(frozen=True)
class OwnChain:
    """SHA-256 chain that begins with the model's configuration.

    Attributes:
        config: The model configuration, as keys carry it (``KeySpace.config``).
        chunk_tokens: Tokens of a chunk.
    """

    config: str
    chunk_tokens: int = CHUNK_TOKENS

    def __post_init__(self) -> None:
        """Refuse chunks that are none."""
        check_chunk_tokens(self.chunk_tokens)

    @property
    def name(self) -> str:
        """As entries tell it."""
        return f"kvwire-{self.chunk_tokens}"

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hash a prompt, see ``HashScheme``."""
        before = hashlib.sha256(f"kvwire prefix\0{self.config}".encode()).digest()
        found = []
        for chunk in chunks_of(token_ids, self.chunk_tokens, "<"):
            before = hashlib.sha256(before + chunk).digest()
            found.append(before)
        return found
