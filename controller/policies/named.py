"""Policies by name, for tables and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError

from .adaptive import Adaptive
from .cachegen import CacheGen, CacheGenArtefact, CacheGenTimed
from .simple import CacheBlend, Fixed, Raw, TextOnly

if TYPE_CHECKING:
    from kvwire.types.rates import RateTrace

    from ..snapshot import Policy

_SIMPLE: dict[str, type[Policy]] = {
    "adaptive": Adaptive, "cachegen": CacheGen, "cachegen-timed": CacheGenTimed, "text": TextOnly, "raw": Raw,
    "cacheblend": CacheBlend,
}  # fmt: skip
_LEVEL = "level-"
_MOST_LEVELS = 8


def policy_names(levels: int) -> tuple[str, ...]:
    """Names of all policies for documents of so many levels."""
    fixed = tuple(Fixed(level).name for level in range(levels))
    return ("adaptive", "cachegen", "cachegen-timed", "cachegen-artefact", "cacheblend", *fixed, "text", "raw")


def policy_named(name: str, rate: RateTrace) -> Policy:
    """Make a policy by its name.

    Args:
        name: One of ``policy_names``.
        rate: The true one, which CacheGen's released artefact looks into.

    Returns:
        The policy.

    Raises:
        NotFoundError: There is no such policy; the message lists those there are.
    """
    if name in _SIMPLE:
        return _SIMPLE[name]()
    if name == "cachegen-artefact":
        return CacheGenArtefact(lambda now, seconds: rate.bytes_between(now, now + seconds) / seconds)
    level = name.removeprefix(_LEVEL)
    if level != name and level.isdecimal() and level.isascii() and int(level) < _MOST_LEVELS:
        return Fixed(int(level))
    raise NotFoundError(f"no policy is called {name!r}; choose one of {', '.join(policy_names(1))} and other levels")
