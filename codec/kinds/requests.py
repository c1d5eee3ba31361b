"""Inputs of level kinds: profiles, settings, calibration texts, requests to encode and to decode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire.codec.fitting.fit import MomentKeeper
    from kvwire.codec.fitting.statistics import Statistics
    from kvwire.codec.format.header import Header
    from kvwire.codec.kinds.cachegen_profile import CacheGenProfile
    from kvwire.codec.profile.profile import Profile
    from kvwire.codec.transform.levels import Ladder
    from kvwire.types import CacheMeta, KVCache


Calibrated = TypeVar("Calibrated", "Profile", "CacheGenProfile")
"""A profile with ``error_to_kl``, which turns its blobs' errors into a KL divergence."""


@runtime_checkable
class AnyProfile(Protocol):
    """A profile of any kind: the members that corpora, stores and decoders use."""

    @property
    def codec(self) -> int:
        """Codec number of the profile's level kind."""

    @property
    def model_id(self) -> str:
        """The model that the profile was fitted on; empty where it was derived from a single cache."""

    @property
    def model_revision(self) -> str:
        """The model's revision; empty where it is not known."""

    @property
    def outline(self) -> tuple[int, str] | None:
        """Length and SHA-256 of the description of the profile's sections; None where it has none."""

    @property
    def prefix_layers(self) -> int:
        """Number of the model's first layers that readers recompute; 0 for none."""

    @property
    def notes(self) -> dict[str, str | int | float]:
        """Notes of the fit; ``tokens`` is the number of tokens that it saw."""

    @property
    def data(self) -> bytes:
        """The profile as stored."""

    @property
    def digest(self) -> str:
        """SHA-256 of ``data``: the profile's name."""

    def check_fits(self, meta: CacheMeta) -> None:
        """Compare with the layout of a cache.

        Args:
            meta: The layout of a cache or of a model's caches.

        Raises:
            MismatchError: The profile is of another model or of another shape.
        """


class CodingSettings(Protocol):
    """How a corpus is to be encoded."""

    @property
    def prefix_layers(self) -> int:
        """Number of the model's first layers that readers recompute; 0 for none."""

    @property
    def ladder(self) -> Ladder | None:
        """Quality levels; None for the kind's own."""


class Calibration(Protocol):
    """Texts to fit a profile on; results are computed on each call."""

    @property
    def keeper(self) -> MomentKeeper | None:
        """Stores the caches' sums for later fits; None where they are not stored."""

    def caches(self) -> list[KVCache]:
        """Compute the cache of each text."""

    def statistics(self, *, tokens: bool) -> Statistics | None:
        """Gather statistics, with token features if ``tokens``; None where the engine has none."""

    def prefix_states(self, layers: int) -> list[Tensor]:
        """Compute float32 ``[tokens, hidden_size]`` of each text after the model's first ``layers``."""

    def calibrate_error(self, profile: Calibrated, ladder: Ladder | None) -> Calibrated:
        """Measure the KL divergence of the levels' errors (None: the kind's levels) and add ``error_to_kl``."""


@dataclass(frozen=True, eq=False)
class EncodeRequest:
    """The arguments of ``encode``.

    Attributes:
        cache: The document's cache, at least one token.
        profile: A profile of the kind, or None.
        levels: A ladder, a number of levels above 0, or None for all levels.
        chunk_tokens: Tokens of the longest chunk.
        hidden: float32 ``[tokens, hidden_size]`` after the prefix layers, or None.
        on_device: Whether to run Triton's kernels on the cache's device.
        beginning: Cache of the first token computed with nothing before it, or None.
    """

    cache: KVCache
    profile: AnyProfile | None
    levels: Ladder | int | None
    chunk_tokens: int
    hidden: Tensor | None
    on_device: bool
    beginning: KVCache | None = None


@dataclass(frozen=True, eq=False)
class DecodeRequest:
    """The arguments of a ``BlobDecoder``.

    Attributes:
        header: The blob's header.
        profile: A profile of the kind, checked against the header; None for a kind without profiles.
        offset: Position of the document's first token in the prompt; None leaves positions off.
        check: Whether to compare streams and counts with the index.
        hidden: float32 ``[tokens, hidden_size]`` after the prefix layers, or None.
        rounded: Whether values and rows may be rounded far more finely than the quantiser's step.
    """

    header: Header
    profile: AnyProfile | None
    offset: int | None
    check: bool
    hidden: Tensor | None
    rounded: bool = False
