"""What level kinds are given: profiles, settings, calibration texts, requests to encode and to decode."""

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
"""A profile that says which KL divergence its blobs' errors mean."""


@runtime_checkable
class AnyProfile(Protocol):
    """A profile of any kind: what corpora, stores and decoders ask of it."""

    @property
    def codec(self) -> int:
        """Number of the level kind that it belongs to."""

    @property
    def model_id(self) -> str:
        """The model that it was fitted on; empty for one derived from a single cache."""

    @property
    def model_revision(self) -> str:
        """The model's revision; empty where it is not known."""

    @property
    def outline(self) -> tuple[int, str] | None:
        """Length and SHA-256 of what it says of its sections; None where it has none."""

    @property
    def prefix_layers(self) -> int:
        """Layers of the model that a reader computes anew; 0 where the kind knows none."""

    @property
    def notes(self) -> dict[str, str | int | float]:
        """What the fit says of itself; ``tokens``: how many it saw."""

    @property
    def data(self) -> bytes:
        """The profile as stored."""

    @property
    def digest(self) -> str:
        """SHA-256 of ``data``: the profile's name."""

    def check_fits(self, meta: CacheMeta) -> None:
        """Compare with the layout of a cache.

        Args:
            meta: Of the cache, or of a model's caches.

        Raises:
            MismatchError: The profile is of another model or of another shape.
        """


class CodingSettings(Protocol):
    """What a corpus is to be encoded with."""

    @property
    def prefix_layers(self) -> int:
        """Layers that readers compute anew, 0 for none."""

    @property
    def ladder(self) -> Ladder | None:
        """Quality levels; None for the kind's own."""


class Calibration(Protocol):
    """Texts to fit a profile on: each method computes what it tells when it is called."""

    @property
    def keeper(self) -> MomentKeeper | None:
        """Keeps what was summed of the caches; None: it is not kept."""

    def caches(self) -> list[KVCache]:
        """Compute the texts' caches.

        Returns:
            One for each text.
        """

    def statistics(self, *, tokens: bool) -> Statistics | None:
        """Gather what attention weighs.

        Args:
            tokens: Whether to gather what the vocabulary tells, too.

        Returns:
            Of all texts together; None where the engine knows nothing.
        """

    def prefix_states(self, layers: int) -> list[Tensor]:
        """Compute hidden states after the model's first layers.

        Args:
            layers: How many.

        Returns:
            float32 ``[tokens, hidden_size]`` for each text.
        """

    def calibrate_error(self, profile: Calibrated, ladder: Ladder | None) -> Calibrated:
        """Measure what errors cost in quality.

        Args:
            profile: To encode the texts with.
            ladder: Levels to measure at; None for the kind's own.

        Returns:
            The profile with its ``error_to_kl``.
        """


@dataclass(frozen=True, eq=False)
class EncodeRequest:
    """What ``encode`` was asked for.

    Attributes:
        cache: The document's cache, at least one token.
        profile: Of the kind; None where the caller gave none.
        levels: A ladder, a number of levels from 1 on, or None for all of the kind's own.
        chunk_tokens: Tokens of the longest chunk.
        hidden: float32 ``[tokens, hidden_size]`` of the prefix layers; None where the caller gave none.
        on_device: Whether Triton's kernels are to run on the cache's device, where the kind has any.
        beginning: The first token alone, where nothing stands before it; None where the caller gave none.
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
    """What a ``BlobDecoder`` was asked for.

    Attributes:
        header: Of the blob.
        profile: Of the kind, checked against the header; None for a kind without profiles.
        offset: Position of the document's first token in the prompt; None leaves positions off.
        check: Whether to compare streams and counts with what the index says.
        hidden: float32 ``[tokens, hidden_size]`` of the prefix layers; None where the caller gave none.
        rounded: Whether sums may have bfloat16's precision where the quantiser's step is coarse.
    """

    header: Header
    profile: AnyProfile | None
    offset: int | None
    check: bool
    hidden: Tensor | None
    rounded: bool = False
