"""The CacheGen profile of a model: units of the bins and a distribution for each channel. See cachegen_coding."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.codec.backend import Side, plane_width, planes_of
from kvwire.codec.entropy.range_coder import are_valid
from kvwire.codec.format.arrays import pack_arrays, typed, unpack_arrays
from kvwire.codec.format.codecs import CODEC_CACHEGEN, CODECS, MAX_LEVELS
from kvwire.codec.format.metadata_json import check_model, error_to_kl_from_json, layers_from_json, layers_to_json
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.types import CacheMeta, LayerSpec

MAGIC = CODECS[CODEC_CACHEGEN].profile_magic
BINS = (0.5, 1.0, 1.5)
"""Bin of the deltas in the first, middle and last third of the layers, in the layer's unit (the paper's values)."""
ANCHOR_LIMIT = 127
"""Anchors are quantised to -127 .. 127; symbol 0 is -127."""
DELTA_LIMIT = 31
"""Deltas up to this size have symbols (symbol 1 is -31); larger ones, rare even at the finest bin, are escaped."""
ESCAPE = 0
"""The symbol of escaped deltas."""


@dataclass(frozen=True)
class Block:
    """Keys or values of one layer.

    Attributes:
        side: Keys or values.
        layer: Index of the layer.
        rows: The block's channels among those of all blocks.
    """

    side: Side
    layer: int
    rows: slice

    @property
    def width(self) -> int:
        """Number of channels: elements for one token."""
        return int(self.rows.stop - self.rows.start)


@dataclass(frozen=True, eq=False)
class CacheGenProfile:
    """Units and distributions, profiled on caches of one model.

    Blocks are all layers' keys, then all layers' values; channels go block by block.

    Attributes:
        model_id: The model.
        model_revision: The model's revision, or empty.
        layers: The model's layers.
        levels: Name and factor of each level.
        units: float32 ``[blocks]``, the unit of the bins.
        anchors: uint16 ``[channels, 255]``, frequencies of anchors' symbols.
        deltas: uint16 ``[levels, channels, 64]``, frequencies of deltas' symbols; symbol 0 is the escape.
        notes: Notes of the fit.
        error_to_kl: ``(a, b)`` of ``KL = a * error^b``, measured at calibration; None where it was not.
    """

    model_id: str
    model_revision: str
    layers: tuple[LayerSpec, ...]
    levels: tuple[tuple[str, float], ...]
    units: NDArray[np.float32]
    anchors: NDArray[np.uint16]
    deltas: NDArray[np.uint16]
    notes: dict[str, str | int | float] = field(default_factory=dict)
    error_to_kl: tuple[float, float] | None = None

    @property
    def codec(self) -> int:
        """Number of the level kind."""
        return CODEC_CACHEGEN

    @property
    def prefix_layers(self) -> int:
        """Always 0: CacheGen predicts nothing."""
        return 0

    @property
    def level_names(self) -> tuple[str, ...]:
        """Names of the levels, coarsest first."""
        return tuple(name for name, _ in self.levels)

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """All blocks in the order in which they are coded."""
        return blocks_of(self.layers)

    @property
    def channels(self) -> int:
        """Elements for one token in all blocks together."""
        return int(self.blocks[-1].rows.stop)

    def bins(self, level: int) -> NDArray[np.float32]:
        """Compute the bins of a level.

        Args:
            level: Index of the level.

        Returns:
            float32 ``[blocks]``, in the elements' unit.
        """
        thirds = np.array([BINS[3 * block.layer // len(self.layers)] for block in self.blocks])
        with np.errstate(all="ignore"):
            bins: NDArray[np.float32] = (self.units.astype(np.float64) * thirds * self.levels[level][1]).astype("f4")
        return bins

    def check_fits(self, meta: CacheMeta) -> None:
        """Compare with the layout of a cache.

        Args:
            meta: The layout of the cache.

        Raises:
            MismatchError: The cache is of another model or of another shape.
        """
        check_model(self, meta, "CacheGen profile", "kvwire.fit_cachegen_profile")

    @cached_property
    def data(self) -> bytes:
        """The profile as stored, see docs/format.md."""
        head: dict[str, Any] = {
            "model_id": self.model_id,
            "model_revision": self.model_revision,
            "layers": layers_to_json(self.layers),
            "levels": [list(level) for level in self.levels],
            "notes": self.notes,
        }
        if self.error_to_kl is not None:
            head["error_to_kl"] = list(self.error_to_kl)
        return pack_arrays(MAGIC, head, {"units": self.units, "anchors": self.anchors, "deltas": self.deltas})

    @property
    def outline(self) -> None:
        """Always None: the file has no sections that can be read alone."""
        return

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``data``: the profile's name."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> CacheGenProfile:
        """Read a stored profile.

        Args:
            data: The file's bytes.

        Returns:
            The profile.

        Raises:
            CorruptError: The bytes are no CacheGen profile.
            TruncatedError: They end too early.
            FormatVersionError: A later version wrote them.
        """
        head, arrays = unpack_arrays(MAGIC, data, what="CacheGen profile")
        try:
            profile = cls(
                str(head["model_id"]),
                str(head["model_revision"]),
                layers_from_json(head["layers"]),
                tuple(_level(*row) for row in head["levels"]),
                typed(arrays["units"], "f4"),
                typed(arrays["anchors"], "u2"),
                typed(arrays["deltas"], "u2"),
                dict(head["notes"]),
                error_to_kl_from_json(head.get("error_to_kl")),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"the CacheGen profile's description is damaged ({error}); fetch it again") from error
        _check(profile)
        profile.__dict__["data"] = bytes(
            data
        )  # fills the cached property: the digest must be of the bytes that were read
        return profile


def blocks_of(layers: tuple[LayerSpec, ...]) -> tuple[Block, ...]:
    """List the blocks of a layout."""
    out: list[Block] = []
    for side, layer in planes_of(layers):
        start = out[-1].rows.stop if out else 0
        out.append(Block(side, layer, slice(start, start + plane_width(layers, (side, layer)))))
    return tuple(out)


def _level(name: object, factor: object) -> tuple[str, float]:
    if not isinstance(name, str) or type(factor) not in {int, float}:
        raise ValueError(f"level {name!r}")
    return name, float(factor)  # type: ignore[arg-type] # checked above


def _check(profile: CacheGenProfile) -> None:
    """Check shapes, bins and frequencies."""
    levels, blocks, channels = len(profile.levels), len(profile.blocks), profile.channels
    shapes = (profile.units.shape, profile.anchors.shape, profile.deltas.shape)
    wanted = ((blocks,), (channels, 2 * ANCHOR_LIMIT + 1), (levels, channels, 2 * DELTA_LIMIT + 2))
    if not 1 <= levels <= MAX_LEVELS or shapes != wanted:
        raise CorruptError("the CacheGen profile's arrays do not fit its layers and levels; fetch it again")
    bins = np.array([profile.bins(level) for level in range(levels)])
    if not (np.isfinite(bins) & (bins > 0)).all() or not (are_valid(profile.anchors) and are_valid(profile.deltas)):
        raise CorruptError("the CacheGen profile's bins or frequencies are impossible; fetch it again")
