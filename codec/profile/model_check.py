"""Whether a profile, of whichever level kind, was fitted on the model of a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvwire.codec.format.metadata_json import shapes_of
from kvwire.errors import MismatchError

if TYPE_CHECKING:
    from kvwire.types import CacheMeta, LayerSpec


class Fitted(Protocol):
    """What was fitted on caches of one model."""

    @property
    def model_id(self) -> str:
        """The model's name."""

    @property
    def model_revision(self) -> str:
        """Its revision; empty where it is not known."""

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """Its layers."""


def check_model(profile: Fitted, meta: CacheMeta, what: str, fit: str) -> None:
    """Compare a profile's model with a cache's.

    Args:
        profile: The profile.
        meta: Of the cache.
        what: What the profile is, in messages.
        fit: Public name of the function that fits such a profile.

    Raises:
        MismatchError: The cache is of another model or of another shape.
    """
    if shapes_of(meta.layers) != shapes_of(profile.layers):
        msg = f"the {what} fits another cache layout; fit one on caches of this model ({fit})"
        raise MismatchError(msg)
    if profile.model_revision and meta.model_revision and profile.model_revision != meta.model_revision:
        msg = (
            f"the {what} belongs to model {profile.model_id!r} ({profile.model_revision[:12]}), "
            f"the cache to {meta.model_id!r} ({meta.model_revision[:12]}); fit a profile for this model"
        )
        raise MismatchError(msg)
