"""The ways of hashing prompts, by name: one table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.store.prefix import lmcache, own, sglang

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.store.prefix.base import HashScheme

# Of each: tokens of a chunk where none are named, and what makes it from the model configuration and tokens.
SCHEMES: dict[str, tuple[int, Callable[[str, int], HashScheme]]] = {
    "kvwire": (own.CHUNK_TOKENS, own.OwnChain),
    "lmcache": (lmcache.CHUNK_TOKENS, lambda _, tokens: lmcache.LmcacheChain(tokens)),
    "sglang": (sglang.PAGE_TOKENS, lambda _, tokens: sglang.SglangPages(tokens)),
}


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
    name, colon, tokens = told.strip().partition(":")
    if name not in SCHEMES or (colon and not (tokens.isascii() and tokens.isdecimal())):
        known = ", ".join(SCHEMES)
        msg = f"an index is one of {known}, with the tokens of a chunk as in lmcache:256 if it must; got {told[:40]!r}"
        raise ArgumentError(msg)
    usual, make = SCHEMES[name]
    return make(config, int(tokens) if colon else usual)
