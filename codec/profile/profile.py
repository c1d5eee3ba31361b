"""The profile: what is learnt per model and shared by every blob of a corpus.

A profile holds, for each group of layers, the mean of its keys or values, a synthesis matrix that turns coefficients
into (un-rotated) keys or values, the attention metric that the encoder needs to go the other way, and how wide each
coefficient usually spreads. It also holds the entropy coder's tables. It is content-addressed: blobs name its digest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kvwire.codec.entropy.tables import Tables
from kvwire.codec.format.arrays import pack_arrays, unpack_arrays
from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS
from kvwire.codec.format.metadata_json import error_to_kl_from_json, layers_from_json, layers_to_json
from kvwire.codec.planes import plane_width, planes_of
from kvwire.codec.profile.expectations import ROWS_BYTES, Expectations
from kvwire.codec.profile.model_check import check_model
from kvwire.codec.profile.stored import arrays_of, group_of, typed
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvwire.codec.format.arrays import Arrays
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, LayerSpec

MAGIC = CODECS[CODEC_LAYERED].profile_magic
MAX_FEATURES = 1 << 16
"""Features of a token: embedding widths end far below."""
_MATRIX = 2


@dataclass(frozen=True, eq=False)
class Profile:
    """Groups, tables and the layout that they fit.

    Attributes:
        model_id: The model that it was fitted on; empty for a profile derived from one cache alone.
        model_revision: The model's revision; empty likewise.
        layers: The layout that it fits.
        groups: Planes that are transformed together; every plane is in one of them.
        tables: The entropy coder's.
        notes: What the fit says of itself.
        table: int8 ``[vocabulary, r]``, what each token says of its keys and values; None without prediction from
            tokens. A group's predictor has r rows for it first, then those of the hidden state.
        prefix_layers: Layers whose output predicts the rest; 0 for none.
        hidden_size: Width of that output; 0 without.
        error_to_kl: ``(a, b)`` of ``KL = a * error^b``, measured at calibration; None where it was not.
    """

    model_id: str
    model_revision: str
    layers: tuple[LayerSpec, ...]
    groups: tuple[Group, ...]
    tables: Tables
    notes: dict[str, str | int | float] = field(default_factory=dict)
    table: NDArray[np.int8] | None = None
    prefix_layers: int = 0
    hidden_size: int = 0
    error_to_kl: tuple[float, float] | None = None

    @property
    def codec(self) -> int:
        """Number of the level kind."""
        return CODEC_LAYERED

    @property
    def token_features(self) -> int:
        """Features that the table has for a token."""
        return 0 if self.table is None else self.table.shape[1]

    @property
    def needs_tokens(self) -> bool:
        """Whether coding needs the document's token ids."""
        return self.table is not None

    @property
    def rank(self) -> int:
        """Coefficients for one token, all groups together."""
        return sum(group.rank for group in self.groups)

    @cached_property
    def spread(self) -> NDArray[np.int64]:
        """Class at unit step of every coefficient, groups in order."""
        return np.concatenate([group.spread for group in self.groups]).astype(np.int64)

    @cached_property
    def first_columns(self) -> NDArray[np.int64]:
        """Index of each group's first coefficient, and behind the last group's last one."""
        return np.cumsum([0, *(group.rank for group in self.groups)])

    @cached_property
    def expectations(self) -> tuple[Expectations, ...]:
        """What the table says of each group's elements; needs a table."""
        table = cast("NDArray[np.int8]", self.table)  # without one, means are expected
        total = sum(group.width for group in self.groups)
        return tuple(Expectations(group, table, ROWS_BYTES * group.width // total) for group in self.groups)

    def check_fits(self, meta: CacheMeta) -> None:
        """Compare with the layout of a cache.

        Args:
            meta: Of the cache.

        Raises:
            MismatchError: The cache is of another model or of another shape.
        """
        check_model(self, meta, "profile", "kvwire.fit_profile")

    @cached_property
    def data(self) -> bytes:
        """The profile as stored: see docs/format.md."""
        arrays: Arrays = {"base": self.tables.base, "ternary": self.tables.ternary, "points": self.tables.points}
        packed = False
        for index, group in enumerate(self.groups):
            named = arrays_of(group)
            arrays |= {f"g{index}.{name}": array for name, array in named.items()}
            packed |= "rows_steps" in named
        if self.table is not None:
            arrays["table"] = self.table.T if packed else self.table
        head = {
            "model_id": self.model_id,
            "model_revision": self.model_revision,
            "layers": layers_to_json(self.layers),
            "groups": [[list(plane) for plane in group.planes] for group in self.groups],
            "head_start": self.prefix_layers,
            "hidden_size": self.hidden_size,
            "error_to_kl": None if self.error_to_kl is None else list(self.error_to_kl),
            "notes": self.notes,
        }
        return pack_arrays(MAGIC, head, arrays, packed=packed)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``data``: the profile's name."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Read a stored profile.

        Args:
            data: The file.

        Returns:
            The profile.

        Raises:
            CorruptError: The bytes are no profile.
            TruncatedError: They end too early.
            FormatVersionError: A later version wrote them.
        """
        head, arrays = unpack_arrays(MAGIC, data, what="profile")
        try:
            layers = layers_from_json(head["layers"])
            groups = tuple(group_of(index, raw, arrays, layers) for index, raw in enumerate(head["groups"]))
            profile = cls(
                str(head["model_id"]),
                str(head["model_revision"]),
                layers,
                groups,
                Tables(*(typed(arrays[name], "u2") for name in ("base", "ternary", "points"))),
                dict(head["notes"]),
                _table(arrays, groups) if "table" in arrays else None,
                _count(head["head_start"]),
                _count(head["hidden_size"]),
                error_to_kl_from_json(head["error_to_kl"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            msg = f"the profile's description is damaged ({error}); fetch it again"
            raise CorruptError(msg) from error
        profile.tables.check()
        _check_groups(profile)
        profile.__dict__["data"] = bytes(data)  # the cached property: a digest is of the bytes that were read
        return profile


def _table(arrays: Arrays, groups: tuple[Group, ...]) -> NDArray[np.int8]:
    """By token; where matrices are whole numbers and steps, it is stored by feature: each spreads in its own way."""
    table: NDArray[np.int8] = typed(arrays["table"], "i1")
    return np.ascontiguousarray(table.T) if any(group.stepped for group in groups) else table


def _count(raw: Any) -> int:  # noqa: ANN401 - JSON
    if type(raw) is not int or not 0 <= raw <= MAX_FEATURES:
        msg = f"{raw!r} is no count"
        raise ValueError(msg)
    return raw


def _check_groups(profile: Profile) -> None:
    """Every plane in exactly one group, every array finite and of the shape that the layout says."""
    count = len(profile.layers)
    planes = [plane for group in profile.groups for plane in group.planes]
    if any(not 0 <= layer < count for _, layer in planes) or sorted(planes) != sorted(planes_of(profile.layers)):
        msg = "the profile does not cover every layer's keys and values exactly once; fetch it again"
        raise CorruptError(msg)
    table = profile.table
    sound = table is None or (table.ndim == _MATRIX and 0 < table.shape[1] <= MAX_FEATURES)
    if not sound or not all(_sound(group, profile) for group in profile.groups):
        msg = "a group or the token table of the profile has arrays of the wrong shape or range; fetch it again"
        raise CorruptError(msg)


def _sound(group: Group, profile: Profile) -> bool:
    widths = [plane_width(profile.layers, plane) for plane in group.planes]
    tensors: list[torch.Tensor] = [t for t in (group.rows, group.predictor) if t is not None]
    arrays = [array for array in (group.mean, group.row_scale, *group.metric) if array is not None]
    if group.spread.ndim != 1 or group.mean.shape != (sum(widths),) or group.rank > group.width:
        return False
    if not all(bool(torch.isfinite(t).all()) for t in tensors) or not all(np.isfinite(a).all() for a in arrays):
        return False
    features = profile.token_features + profile.hidden_size
    if group.rows is None:
        scale = group.row_scale
        return (
            not features
            and scale is not None
            and scale.shape == (sum(widths),) == group.spread.shape
            and bool((scale > 0).all())
        )
    if (group.predictor is not None) != (features > 0):
        return False
    if group.predictor is not None and group.predictor.shape != (features, sum(widths)):
        return False
    heads = [profile.layers[layer].kv_heads for _, layer in group.planes]
    fits = [
        metric.shape in ((width,), (head, width // head, width // head))
        for metric, width, head in zip(group.metric, widths, heads, strict=True)
    ]
    return group.rows.shape == (group.rank, sum(widths)) and all(fits)
