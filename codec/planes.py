"""Planes of a cache: the keys or the values of one layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from kvwire.types import LayerSpec

Side = Literal["key", "value"]
SIDES: tuple[Side, ...] = ("key", "value")
Plane = tuple[Side, int]
"""The keys or the values of one layer."""


def plane_width(layers: tuple[LayerSpec, ...], plane: Plane) -> int:
    """Count the elements of a plane for one token."""
    side, layer = plane
    spec = layers[layer]
    return 0 if spec.kind == "none" else (spec.key_width if side == "key" else spec.value_width)


def planes_of(layers: tuple[LayerSpec, ...]) -> list[Plane]:
    """List every plane that holds something.

    Args:
        layers: Of the model.

    Returns:
        All keys by layer, then all values.
    """
    return [(side, layer) for side in SIDES for layer in range(len(layers)) if plane_width(layers, (side, layer))]
