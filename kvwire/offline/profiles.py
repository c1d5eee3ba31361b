"""Profiles as files: fit them from texts, and summarise them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from kvwire.codec import ERROR_NOTE, CacheGenProfile, Profile, kind_of_method, methods
from kvwire.errors import ArgumentError
from kvwire.offline.pipeline import prepare_profile
from kvwire.runtime.coding import LEAST_TOKENS
from kvwire.runtime.corpus import Corpus
from kvwire.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.offline.refs import DocumentRef
    from kvwire.runtime.coding import Coding


@dataclass(frozen=True)
class ProfileLevel:
    """Expected loss of a level on text like that of the fit.

    Attributes:
        name: Name of the level.
        error: Attention-weighted squared error over energy.
        kl: Mean KL divergence of the next token, in nats, as blobs predict it; None if not known.
    """

    name: str
    error: float
    kl: float | None


@dataclass(frozen=True)
class ProfileSummary:
    """Description of a profile.

    Attributes:
        method: Method of the lossy levels.
        model: Name of the model.
        revision: Revision of the model.
        prefix_layers: Layers that readers compute.
        tokens: Tokens of the fit; 0 if not recorded.
        bytes: Size of the file.
        digest: SHA-256 of the file, its name in stores.
        levels: Coarsest first; empty if the fit measured none.
    """

    method: str
    model: str
    revision: str
    prefix_layers: int
    tokens: int
    bytes: int
    digest: str
    levels: tuple[ProfileLevel, ...]


def fit_profile_file(engine: Engine, refs: Sequence[DocumentRef], coding: Coding) -> AnyProfile:
    """Fit a profile on texts, as encoding would, without a store.

    Args:
        engine: The model's.
        refs: The texts.
        coding: How documents will be encoded.

    Returns:
        The profile; its ``data`` is the file.

    Raises:
        ArgumentError: There is too little text, or the method needs no profile.
        KvwireError: As ``Encoder.prepare`` says.
    """
    profile = prepare_profile(Corpus(engine, MemoryStore(), coding=coding), refs)
    if profile is None:
        msg = f"a profile needs at least {LEAST_TOKENS} tokens of text, which were not found; give more texts"
        raise ArgumentError(msg)
    return profile


def summarise(profile: AnyProfile) -> ProfileSummary:
    """Describe a profile.

    Args:
        profile: Of any kind.

    Returns:
        The summary.
    """
    tokens = profile.notes.get("tokens")
    return ProfileSummary(
        method=next(name for name in methods() if kind_of_method(name).number == profile.codec),
        model=profile.model_id,
        revision=profile.model_revision,
        prefix_layers=profile.prefix_layers,
        tokens=tokens if type(tokens) is int and tokens >= 0 else 0,
        bytes=len(profile.data),
        digest=profile.digest,
        levels=tuple(_levels(profile)) if isinstance(profile, (Profile, CacheGenProfile)) else (),
    )


def _levels(profile: Profile | CacheGenProfile) -> Iterator[ProfileLevel]:
    """The fit's notes on levels; files do not keep their order, and may hold anything."""
    noted = [(error, note) for note, error in profile.notes.items() if note.startswith(ERROR_NOTE)]
    sound = ((float(error), note) for error, note in noted if _is_number(error) and error >= 0)
    for error, note in sorted(sound)[::-1]:
        if math.isfinite(error):
            yield ProfileLevel(note.removeprefix(ERROR_NOTE), error, _kl(profile.error_to_kl, error))


def _is_number(noted: object) -> TypeGuard[int | float]:
    return isinstance(noted, int | float) and not isinstance(noted, bool)


def _kl(curve: tuple[float, float] | None, error: float) -> float | None:
    try:
        return None if curve is None else curve[0] * error ** curve[1]
    except (OverflowError, ZeroDivisionError):
        return math.inf
