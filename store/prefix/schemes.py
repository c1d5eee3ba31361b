"""Ways of hashing prompts, by name: one table.

Each is a chain: a chunk's hash is that of the hash before it and of the chunk's token ids, as 32-bit words.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from blake3 import blake3

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


class Rule(NamedTuple):
    """What tells one chain from another: usual tokens of a chunk, byte order, hash, and what stands before the first.

    ``before`` takes the model configuration, as keys carry it (``KeySpace.config``).
    """

    chunk_tokens: int
    byte_order: str
    digest: Callable[[bytes], bytes]
    before: Callable[[str], bytes]


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


SCHEMES: dict[str, Rule] = {
    # kvwire's own also names the model.
    "kvwire": Rule(64, "<", _sha256, lambda config: _sha256(f"kvwire prefix\0{config}".encode())),
    # As LMCache's server makes them by default. Its other algorithms depend on vLLM's settings or on Python's hash
    # seed. Before the first chunk stand a hash of 0 as 64 bits and a token of 0 as 32.
    "lmcache": Rule(256, ">", lambda data: blake3(data).digest(), lambda _: blake3(bytes(12)).digest()),
    # Pages of SGLang's hierarchical cache, of requests without an extra key and without a cache salt.
    "sglang": Rule(64, "<", _sha256, lambda _: b""),
}


@dataclass(frozen=True)
class Chain:
    """One of ``SCHEMES`` with chunks of a length; a ``HashScheme``."""

    name: str
    chunk_tokens: int
    rule: Rule = field(repr=False)
    config: str = ""

    def hashes(self, token_ids: Sequence[int]) -> list[bytes]:
        """Hash a prompt, see ``HashScheme``."""
        import numpy as np

        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < 1 << 32):
            raise ArgumentError("token ids must lie in 0 to 2^32 - 1")
        words = np.asarray(token_ids, dtype=f"{self.rule.byte_order}u4").tobytes()
        before, found, size = self.rule.before(self.config), [], 4 * self.chunk_tokens
        for at in range(0, len(words) - size + 1, size):
            before = self.rule.digest(before + words[at : at + size])
            found.append(before)
        return found


def hash_scheme(told: str, config: str) -> HashScheme:
    """A way of hashing prompts.

    Args:
        told: Its name, with the tokens of a chunk where they are not the usual ones: ``lmcache``, ``lmcache:512``.
        config: The model configuration, as keys carry it (``KeySpace.config``).

    Returns:
        The scheme.

    Raises:
        ArgumentError: There is none of that name, or the chunk is none.
    """
    name, colon, digits = told.strip().partition(":")
    if name not in SCHEMES or (colon and not (digits.isascii() and digits.isdecimal())):
        known = ", ".join(SCHEMES)
        msg = f"an index is one of {known}, with the tokens of a chunk as in lmcache:256 if it must; got {told[:40]!r}"
        raise ArgumentError(msg)
    rule = SCHEMES[name]
    tokens = int(digits) if colon else rule.chunk_tokens
    if not 0 < tokens <= MAX_CHUNK_TOKENS:
        raise ArgumentError(f"a chunk of an index has 1 to {MAX_CHUNK_TOKENS} tokens, got {digits[:40]}")
    return Chain(f"{name}-{tokens}", tokens, rule, config)
