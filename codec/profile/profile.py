"""The profile of a model, shared by every blob of a corpus.

For each group of planes it holds the mean of the keys or values, a synthesis matrix from coefficients to un-rotated
keys or values, the metric that encoders need for the inverse, and the usual spread of each coefficient. It also holds
the entropy coder's tables. It is content-addressed: blobs name its digest.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from kvwire.codec.backend import plane_width, planes_of
from kvwire.codec.entropy.tables import Tables
from kvwire.codec.format.arrays import describe, pack_arrays, typed, unpack_arrays
from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS
from kvwire.codec.format.metadata_json import check_model, error_to_kl_from_json, layers_from_json, layers_to_json
from kvwire.codec.profile.group import ROWS_BYTES, Expectations
from kvwire.codec.profile.stored import arrays_of, group_of
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

    from kvwire.codec.backend import Plane
    from kvwire.codec.format.arrays import Arrays
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, LayerSpec

MAGIC = CODECS[CODEC_LAYERED].profile_magic
ERROR_NOTE = "error_"
"""Prefix of the notes that hold a level's error."""
MAX_FEATURES = 1 << 16
"""Most features of a token, far above embedding widths."""
_MATRIX = 2
_UNSOUND = "a group or the token table of the profile has arrays of the wrong shape or range; fetch it again"
_METRIC = re.compile(r"g[0-9]+\.metric[0-9]+(_steps)?")
_PIECE = re.compile(r"g[0-9]+\.rows([0-9]+)(_wide)?")
_STEPS = re.compile(r"g[0-9]+\.rows_steps")


class MakeGroup(Protocol):
    """Makes a group from its index and description."""

    def __call__(self, index: int, raw: Any, *, layers: tuple[LayerSpec, ...]) -> Group:  # noqa: ANN401 - JSON
        """See ``group_of``."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Groups, tables and the layout that they fit.

    Attributes:
        model_id: The model that the profile was fitted on; empty where it was derived from a single cache.
        model_revision: The model's revision; empty likewise.
        layers: The layout that the profile fits.
        groups: Planes that are transformed together; every plane is in one group.
        tables: The entropy coder's tables.
        notes: Notes of the fit.
        table: int8 ``[vocabulary, r]``, features of each token; None without prediction from tokens. A group's
            predictor has r rows for them first, then rows for the hidden state.
        prefix_layers: Number of the model's first layers whose output predicts the rest; 0 for none.
        hidden_size: Width of that output; 0 for none.
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
        """Number of the table's features for a token."""
        return 0 if self.table is None else self.table.shape[1]

    @property
    def has_sinks(self) -> bool:
        """Whether the profile has a row of attention sinks."""
        return all(group.sink.size for group in self.groups)

    @property
    def rank(self) -> int:
        """Number of coefficients for one token in all groups."""
        return sum(group.rank for group in self.groups)

    @cached_property
    def spread(self) -> NDArray[np.int64]:
        """Class at unit step of every coefficient, group by group."""
        return np.concatenate([group.spread for group in self.groups]).astype(np.int64)

    @cached_property
    def first_columns(self) -> NDArray[np.int64]:
        """Index of each group's first coefficient, and the total number."""
        return np.cumsum([0, *(group.rank for group in self.groups)])

    @cached_property
    def expectations(self) -> tuple[Expectations, ...]:
        """Each group's expected elements by token; needs a table."""
        table = cast("NDArray[np.int8]", self.table)  # profiles without one are not asked
        total = sum(group.width for group in self.groups)
        return tuple(Expectations(group, table, ROWS_BYTES * group.width // total) for group in self.groups)

    def check_fits(self, meta: CacheMeta) -> None:
        """Compare with the layout of a cache.

        Args:
            meta: The layout of the cache.

        Raises:
            MismatchError: The cache is of another model or of another shape.
        """
        check_model(self, meta, "profile", "kvwire.fit_profile")

    def read_all(self) -> None:
        """Fetch what encoding needs and is not read yet, so that damage shows; all sections have digests.

        Raises:
            CorruptError: It is damaged.
            StorageError: The store fails.
        """
        for group in self.groups:
            _ = group.rows, group.metric

    @cached_property
    def data(self) -> bytes:
        """The profile as stored, see docs/format.md."""
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
        return pack_arrays(MAGIC, head, arrays, packed=packed, sections=_sections(arrays) if packed else ())

    @cached_property
    def outline(self) -> tuple[int, str] | None:
        """Length and SHA-256 of the bytes before the first section, which describe all sections; None without any."""
        file = describe(MAGIC, self.data, "profile")
        return (file.start, hashlib.sha256(self.data[: file.start]).hexdigest()) if file.sections else None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``data``: the profile's name."""
        return hashlib.sha256(self.data).hexdigest()

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Read a stored profile.

        Args:
            data: The file's bytes.

        Returns:
            The profile.

        Raises:
            CorruptError: The bytes are no profile.
            TruncatedError: They end too early.
            FormatVersionError: A later version wrote them.
        """
        head, arrays = unpack_arrays(MAGIC, data, what="profile")
        profile = cls.of_arrays(head, arrays, partial(group_of, arrays=arrays))
        if not all(_sound(group, profile) for group in profile.groups):
            raise CorruptError(_UNSOUND)
        profile.__dict__["data"] = bytes(
            data
        )  # fills the cached property: the digest must be of the bytes that were read
        return profile

    @classmethod
    def of_arrays(cls, head: dict[str, Any], arrays: Arrays, make_group: MakeGroup) -> Self:
        """Make a profile from its file's contents, checked except for the groups' arrays."""
        try:
            layers = layers_from_json(head["layers"])
            groups = tuple(make_group(index, raw, layers=layers) for index, raw in enumerate(head["groups"]))
            profile = cls(
                str(head["model_id"]),
                str(head["model_revision"]),
                layers,
                groups,
                Tables(*(typed(arrays[name], "u2") for name in ("base", "ternary", "points"))),
                dict(head["notes"]),
                _table(arrays) if "table" in arrays else None,
                _count(head["head_start"]),
                _count(head["hidden_size"]),
                error_to_kl_from_json(head["error_to_kl"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise CorruptError(f"the profile's description is damaged ({error}); fetch it again") from error
        profile.tables.check()
        _check_planes(profile)
        return profile


def _sections(arrays: Arrays) -> list[list[str]]:
    """Assign arrays to sections: those of all readers, one for each further piece of rows, those of encoders."""
    numbers = {name: _section_of(name) for name in arrays}
    last = 1 + max(number for number in numbers.values() if number is not None)
    sections: list[list[str]] = [[] for _ in range(last + 1)]
    for name, number in numbers.items():
        sections[last if number is None else number].append(name)
    return sections


def _section_of(name: str) -> int | None:
    """Return an array's section; None for the last one."""
    if _METRIC.fullmatch(name):
        return None
    piece = _PIECE.fullmatch(name)
    return int(piece[1]) if piece else 0


def _table(arrays: Arrays) -> NDArray[np.int8]:
    """Return the table by token; files with rounded matrices store it by feature, which compresses better."""
    table: NDArray[np.int8] = typed(arrays["table"], "i1")
    return np.ascontiguousarray(table.T) if any(map(_STEPS.fullmatch, arrays)) else table


def _count(raw: Any) -> int:  # noqa: ANN401 - JSON
    if type(raw) is not int or not 0 <= raw <= MAX_FEATURES:
        raise ValueError(f"{raw!r} is no count")
    return raw


def _check_planes(profile: Profile) -> None:
    """Check that every plane is in exactly one group, sinks in all groups or none, and the table a matrix."""
    count = len(profile.layers)
    planes = [plane for group in profile.groups for plane in group.planes]
    if any(not 0 <= layer < count for _, layer in planes) or sorted(planes) != sorted(planes_of(profile.layers)):
        raise CorruptError("the profile does not cover every layer's keys and values exactly once; fetch it again")
    if any(group.sink.size for group in profile.groups) and not profile.has_sinks:
        msg = "some groups of the profile have a row of attention sinks and others have none; fetch it again"
        raise CorruptError(msg)
    table = profile.table
    if table is not None and not (table.ndim == _MATRIX and 0 < table.shape[1] <= MAX_FEATURES):
        raise CorruptError(_UNSOUND)


def _sound(group: Group, profile: Profile) -> bool:
    if not has_sound_outline(group, profile):
        return False
    if group.rows is None:
        scale = group.row_scale
        sound = scale is not None and scale.shape == group.mean.shape == group.spread.shape
        return sound and group.predictor is None and bool((np.isfinite(group.scales) & (group.scales > 0)).all())
    finite = bool(torch.isfinite(group.rows).all()) and group.rows.shape == (group.rank, group.width)
    return finite and has_sound_metric(group.planes, group.metric, profile.layers)


def has_sound_metric(
    planes: tuple[Plane, ...], metric: tuple[NDArray[np.float32], ...], layers: tuple[LayerSpec, ...]
) -> bool:
    """Return whether a metric is finite and fits the layout."""
    shapes = [(plane_width(layers, plane), layers[plane[1]].kv_heads) for plane in planes]
    return len(metric) == len(planes) and all(
        block.shape in ((width,), (heads, width // heads, width // heads)) and bool(np.isfinite(block).all())
        for block, (width, heads) in zip(metric, shapes, strict=True)
    )


def has_sound_sink(group: Group) -> bool:
    """Return whether a group's sink row is empty, or finite and as wide as the group."""
    sink, steps = group.sink, group.sink_steps
    if sink.shape == steps.shape == (0,):
        return True
    sound = sink.shape == steps.shape == group.mean.shape and np.isfinite(sink).all()
    return bool(sound and np.isfinite(steps).all() and (steps > 0).all())


def has_sound_outline(group: Group, profile: Profile) -> bool:
    """Return whether a group fits the layout, apart from its rows and metric."""
    width = sum(plane_width(profile.layers, plane) for plane in group.planes)
    features = profile.token_features + profile.hidden_size
    if group.spread.ndim != 1 or group.mean.shape != (width,) or group.rank > group.width:
        return False
    if not has_sound_sink(group):
        return False
    if not np.isfinite(group.mean).all() or (group.predictor is not None) != (features > 0):
        return False
    predictor = group.predictor
    return predictor is None or (predictor.shape == (features, width) and bool(torch.isfinite(predictor).all()))
