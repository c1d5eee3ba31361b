"""The profile: what is learnt per model and shared by every blob of a corpus.

A profile holds, for each group of layers, the mean of its keys or values, a synthesis matrix that turns coefficients
into (un-rotated) keys or values, the attention metric that the encoder needs to go the other way, and how wide each
coefficient usually spreads. It also holds the entropy coder's tables. It is content-addressed: blobs name its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from kvwire.codec.arrays import pack_arrays, unpack_arrays
from kvwire.codec.layout import layers_from_json, layers_to_json, shapes_of
from kvwire.codec.tables import Tables
from kvwire.errors import CorruptError, MismatchError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.arrays import Arrays
    from kvwire.types import CacheMeta, LayerSpec

Side = Literal["key", "value"]
SIDES: tuple[Side, ...] = ("key", "value")
MAGIC = b"\x89KVP\r\n\x1a\n"


@dataclass(frozen=True, eq=False)
class Group:
    """Keys or values of neighbouring layers, transformed together.

    layers: the layers, ascending. width: elements for one token, layer by layer, head by head. mean: float32
    ``[width]``. rows: synthesis, ``[rank, width]`` in float16, each row scaled by row_scale float32 ``[rank]``; None
    for the identity, where row_scale has one entry per element. metric: symmetric blocks ``[heads, dim, dim]`` (or a
    diagonal ``[width]``) of the attention metric, for each layer in order; the encoder's only.
    spread: int16 ``[rank]``, the class of each coefficient at step 1.
    """

    side: Side
    layers: tuple[int, ...]
    mean: NDArray[np.float32]
    row_scale: NDArray[np.float32]
    spread: NDArray[np.int16]
    rows: NDArray[np.float16] | None = None
    metric: tuple[NDArray[np.float32], ...] = ()

    @property
    def rank(self) -> int:
        """Coefficients for one token."""
        return len(self.row_scale)

    @property
    def width(self) -> int:
        """Elements for one token."""
        return len(self.mean)

    @cached_property
    def synthesis(self) -> torch.Tensor | None:
        """float32 ``[rank, width]``, coefficients to elements; None for the identity."""
        if self.rows is None:
            return None
        return torch.from_numpy(self.rows.astype(np.float32) * self.row_scale[:, None])

    @cached_property
    def analysis(self) -> torch.Tensor | None:
        """float32 ``[width, rank]``, elements to the coefficients whose synthesis lies nearest in the metric.

        The basis was orthonormal in the metric before its rows were rounded to float16. What rounding added matters in
        directions that attention hardly weighs, so the coefficients solve the normal equations of the rows as stored.
        """
        synthesis = self.synthesis
        if synthesis is None:
            return None
        dual = _weighted(synthesis, self.metric)
        factor, failed_at = torch.linalg.cholesky_ex(synthesis @ dual)
        if int(failed_at):
            msg = "the profile's basis is not independent in its own metric; fetch the profile again"
            raise CorruptError(msg)
        return torch.cholesky_solve(dual.T, factor).T.contiguous()


def _weighted(synthesis: torch.Tensor, metric: tuple[NDArray[np.float32], ...]) -> torch.Tensor:
    """The metric times the rows ``[rank, width]``, transposed: ``[width, rank]``."""
    out = torch.empty(synthesis.shape[::-1])
    start = 0
    for block in map(torch.from_numpy, metric):
        heads, dim = (len(block), 1) if block.ndim == 1 else block.shape[:2]
        stop = start + heads * dim
        part = synthesis[:, start:stop].reshape(-1, heads, dim)
        weighted = part * block[:, None] if block.ndim == 1 else torch.einsum("rhd,hde->rhe", part, block)
        out[start:stop] = weighted.reshape(-1, heads * dim).T
        start = stop
    return out


@dataclass(frozen=True, eq=False)
class Profile:
    """Groups, tables and the layout that they fit.

    model_id, model_revision: the model that it was fitted on, both empty for a profile derived from one cache alone.
    """

    model_id: str
    model_revision: str
    layers: tuple[LayerSpec, ...]
    groups: tuple[Group, ...]
    tables: Tables
    notes: dict[str, str | int | float] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Coefficients for one token, all groups together."""
        return sum(group.rank for group in self.groups)

    @cached_property
    def spread(self) -> NDArray[np.int64]:
        """Class at unit step of every coefficient, groups in order."""
        return np.concatenate([group.spread for group in self.groups]).astype(np.int64)

    def check_fits(self, meta: CacheMeta) -> None:
        """Raise MismatchError where a cache is of another model or of another shape."""
        if shapes_of(meta.layers) != shapes_of(self.layers):
            msg = "the profile fits another cache layout; fit one on caches of this model (kvwire.fit_profile)"
            raise MismatchError(msg)
        if self.model_revision and meta.model_revision and self.model_revision != meta.model_revision:
            msg = (
                f"the profile belongs to model {self.model_id!r} ({self.model_revision[:12]}), "
                f"the cache to {meta.model_id!r} ({meta.model_revision[:12]}); fit a profile for this model"
            )
            raise MismatchError(msg)

    @cached_property
    def data(self) -> bytes:
        """The profile as stored: see docs/format.md."""
        arrays: Arrays = {"base": self.tables.base, "ternary": self.tables.ternary}
        for index, group in enumerate(self.groups):
            arrays |= {f"g{index}.{name}": array for name, array in _stored(group).items()}
        described = [{"side": group.side, "layers": list(group.layers)} for group in self.groups]
        head = {
            "model_id": self.model_id,
            "model_revision": self.model_revision,
            "layers": layers_to_json(self.layers),
            "groups": described,
            "notes": self.notes,
        }
        return pack_arrays(MAGIC, head, arrays)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``data``: the profile's name."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Read a stored profile; raises CorruptError, TruncatedError or FormatVersionError."""
        head, arrays = unpack_arrays(MAGIC, data, what="profile")
        try:
            layers = layers_from_json(head["layers"])
            groups = tuple(_group(index, raw, arrays) for index, raw in enumerate(head["groups"]))
            profile = cls(
                str(head["model_id"]),
                str(head["model_revision"]),
                layers,
                groups,
                Tables(_typed(arrays["base"], "u2"), _typed(arrays["ternary"], "u2")),
                dict(head["notes"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            msg = f"the profile's description is damaged ({error}); fetch it again"
            raise CorruptError(msg) from error
        profile.tables.check()
        _check_groups(profile)
        profile.__dict__["data"] = bytes(data)  # the cached property: a digest is of the bytes that were read
        return profile


def side_widths(layers: tuple[LayerSpec, ...], side: Side) -> list[int]:
    """Elements for one token of each layer's keys or values; 0 for layers without a cache."""
    return [0 if s.kind == "none" else (s.key_width if side == "key" else s.value_width) for s in layers]


def _stored(group: Group) -> Arrays:
    """A group's arrays by name; a mean that float16 holds exactly is stored so."""
    small = bool((np.abs(group.mean) <= np.finfo(np.float16).max).all())
    half = group.mean.astype(np.float16) if small else None
    exact = half is not None and np.array_equal(half.astype(np.float32), group.mean)
    named: Arrays = {"mean": half if half is not None and exact else group.mean}
    named |= {"row_scale": group.row_scale, "spread": group.spread}
    if group.rows is not None:
        named["rows"] = group.rows
    return named | {f"metric{number}": block for number, block in enumerate(group.metric)}


def _typed(array: NDArray[np.generic], *kinds: str) -> Any:  # noqa: ANN401 - an array of one of the kinds
    """A writable copy in native order; raises ValueError where the array is of another type."""
    if array.dtype.str[1:] not in kinds:
        msg = f"an array is of type {array.dtype}, not {' or '.join(kinds)}"
        raise ValueError(msg)
    return array.astype(array.dtype.newbyteorder("="))


def _group(index: int, raw: dict[str, Any], arrays: Arrays) -> Group:
    prefix = f"g{index}."
    side, layers = raw["side"], raw["layers"]
    if side not in SIDES or any(type(layer) is not int for layer in layers) or layers != sorted(layers):
        msg = f"group {index}"
        raise ValueError(msg)
    rows = arrays.get(prefix + "rows")
    if rows is None and prefix + "metric0" in arrays:
        msg = f"group {index} has a metric and no rows"
        raise ValueError(msg)
    metrics = [] if rows is None else [arrays[f"{prefix}metric{number}"] for number in range(len(layers))]
    return Group(
        side,
        tuple(layers),
        _typed(arrays[prefix + "mean"], "f2", "f4").astype(np.float32),
        _typed(arrays[prefix + "row_scale"], "f4"),
        _typed(arrays[prefix + "spread"], "i2"),
        None if rows is None else _typed(rows, "f2"),
        tuple(_typed(metric, "f4") for metric in metrics),
    )


def _check_groups(profile: Profile) -> None:
    """Every layer's keys and values in exactly one group, every array finite and of the shape that the layout says."""
    for side in SIDES:
        widths = side_widths(profile.layers, side)
        groups = [group for group in profile.groups if group.side == side]
        seen = sorted(layer for group in groups for layer in group.layers)
        if seen != [layer for layer, width in enumerate(widths) if width]:
            msg = f"the profile does not cover every layer's {side}s exactly once; fetch it again"
            raise CorruptError(msg)
        if not all(_sound(group, profile.layers) for group in groups):
            msg = f"a {side} group of the profile has arrays of the wrong shape or range; fetch it again"
            raise CorruptError(msg)


def _sound(group: Group, layers: tuple[LayerSpec, ...]) -> bool:
    widths = side_widths(layers, group.side)
    width = sum(widths[layer] for layer in group.layers)
    arrays: list[NDArray[Any]] = [group.mean, group.row_scale, *group.metric]
    arrays += [] if group.rows is None else [group.rows]
    if group.row_scale.ndim != 1 or group.spread.shape != (group.rank,) or group.mean.shape != (width,):
        return False
    if not all(np.isfinite(array).all() for array in arrays):
        return False
    if group.rows is None:
        return group.rank == width and bool((group.row_scale > 0).all())
    fits = []
    for layer, metric in zip(group.layers, group.metric, strict=True):
        heads = layers[layer].kv_heads
        dim = widths[layer] // heads
        fits.append(metric.shape in ((widths[layer],), (heads, dim, dim)))
    return group.rows.shape == (group.rank, width) and all(fits)
