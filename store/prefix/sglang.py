"""SGLang's page hashes: SHA-256 over the hash before, none at first, and a page's token ids as little-endian words.

So its hierarchical cache names pages of requests without an extra key and without a cache salt.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.store.prefix.base import check_chunk_tokens, chunks_of

if TYPE_CHECKING:
    from collections.abc import Sequence

PAGE_TOKENS = 64


@dataclass(frozen=True)
class SglangPages:
    """SGLang's chain.

    Attributes:
        chunk_tokens: SGLang's ``--page-size``.
    """

    chunk_tokens: int = PAGE_TOKENS

    def __post_init__(self) -> None:
        """Refuse pages that are none."""
        check_chunk_tokens(self.chunk_tokens)

    @property
    def name(self) -> str:
        """As entries tell it."""
        return f"sglang-{self.chunk_tokens}"

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hash a prompt, see ``HashScheme``."""
        before, found = b"", []
        for chunk in chunks_of(token_ids, self.chunk_tokens, "<"):
            before = hashlib.sha256(before + chunk).digest()
            found.append(before)
        return found
