"""Lazy profiles: the first sections are read at once, the others on demand.

A reader of coarse levels needs only a group's first rows, and no metric. All other access fetches what is missing, so a
lazy profile can do everything that a whole one can.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire._forks import reentrant_lock_of_process
from kvwire.codec.backend import plane_width
from kvwire.codec.format.arrays import describe, read_listed, typed
from kvwire.codec.profile.group import Group, QuantisedMatrix
from kvwire.codec.profile.profile import MAGIC, Profile, has_sound_metric, has_sound_outline
from kvwire.codec.profile.stored import (
    entries_of,
    group_of,
    metric_of,
    own_arrays,
    planes_of_json,
    predictor_of,
    sink_of,
    steps_of,
)
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.format.arrays import Arrays, Description, Section
    from kvwire.codec.profile.group import RoundedMatrices
    from kvwire.types import LayerSpec

    Fetch = Callable[[Sequence[Section]], list[bytes]]
    """Reads consecutive sections and compares each with its digest."""

_MATRIX = 2
_PIECE = re.compile(r"g([0-9]+)\.rows([0-9]+)(_wide)?")
_BAD = (KeyError, TypeError, ValueError, OverflowError)


def open_profile(outline: bytes, digest: str, fetch: Fetch, level: int = 0) -> Profile:
    """Open a stored profile that has sections and read the sections of the first levels.

    Args:
        outline: The bytes before the first section, already compared with their digest; see ``Profile.outline``.
        digest: The profile's digest.
        fetch: Reads sections; may be called later from any thread.
        level: The last level whose rows are read now.

    Returns:
        The profile.

    Raises:
        CorruptError: The bytes are no profile.
        TruncatedError: The outline ends too early.
        FormatVersionError: A later version wrote it.
        KvwireError: ``fetch`` failed.
    """
    sections = Sections(describe(MAGIC, outline, "profile"), fetch)
    if not sections.have_all_rows:
        return Profile.from_bytes(_checked(outline + sections.bytes(), digest))
    first, *others = sections.read(range(min(max(level, 0), sections.pieces - 1) + 1))
    profile = LazyProfile.of_arrays(sections.head, first, partial(LazyGroup, sections, first))
    named = len(outline), hashlib.sha256(outline).hexdigest()
    profile.__dict__.update(digest=digest, outline=named, _file=lambda: _checked(outline + sections.bytes(), digest))
    if not all(has_sound_outline(group, profile) and group.has_sound_steps() for group in sections.groups):
        raise _damaged("steps, classes or a predictor of another shape or range")
    for arrays in (first, *others):
        sections.take(arrays)
    return profile


def _checked(data: bytes, digest: str) -> bytes:
    """Compare a whole file with its digest, which the outline's digest does not replace."""
    if hashlib.sha256(data).hexdigest() != digest:
        msg = f"what was read as profile {digest[:12]} has another digest; copy it again from where it is whole"
        raise CorruptError(msg)
    return data


def loaded_part(profile: Profile) -> Profile:
    """Return the loaded part of a profile with the same digest, for trial runs that must not fetch.

    Args:
        profile: Any profile.

    Returns:
        The profile itself; for a lazy profile a copy of the rows read so far, with the unit matrix as metric.
    """
    if not isinstance(profile, LazyProfile):
        return profile
    groups = tuple(group.loaded_part() for group in profile.groups if isinstance(group, LazyGroup))
    fields = {name: getattr(profile, name) for name in Profile.__dataclass_fields__}
    out = Profile(**fields | {"groups": groups})
    out.__dict__["digest"] = profile.digest
    return out


def _damaged(problem: object) -> CorruptError:
    return CorruptError(f"the profile's sections contradict its description ({problem}); fetch it again")


class LazyProfile(Profile):
    """A profile whose groups are lazy."""

    _file: Callable[[], bytes]

    @cached_property
    def data(self) -> bytes:
        """The whole file, fetched; a copy made by ``replace`` is packed again."""
        whole: bytes = self._file() if "_file" in self.__dict__ else super().data
        return whole


class Sections:
    """The sections of one file, of which the first ones have been read.

    Attributes:
        head: The file's JSON fields.
        groups: The groups whose rows the sections hold, in order; each adds itself.
    """

    def __init__(self, file: Description, fetch: Fetch) -> None:
        """Take the description; nothing is read yet."""
        self._file, self._fetch, self.head = file, fetch, file.head
        self._lock = reentrant_lock_of_process()
        self._taken = 0
        self.groups: list[LazyGroup] = []

    @property
    def pieces(self) -> int:
        """Number of sections with rows: all but the last."""
        return len(self._file.sections) - 1

    @property
    def have_all_rows(self) -> bool:
        """Whether all groups have rows in pieces, as in files of ``fit_profile``'s profiles."""
        names = {row[0] for row in self._file.listed}
        return self.pieces > 0 and all(f"{name.partition('.')[0]}.rows_steps" in names for name in names if "." in name)

    def ends_of(self, index: int) -> list[int]:
        """Return where a group's pieces end, by the shapes of their arrays."""
        counts = [0] * self.pieces
        for name, _, shape, _ in self._file.listed:
            piece = _PIECE.fullmatch(name)
            if piece and int(piece[1]) == index:
                if len(shape) != _MATRIX or int(piece[2]) >= self.pieces:
                    raise ValueError(f"array {name}")
                counts[int(piece[2])] += shape[0]
        return list(itertools.accumulate(counts))

    def read(self, numbers: range) -> list[Arrays]:
        """Fetch consecutive sections."""
        sections = self._file.sections[numbers.start : numbers.stop]
        parts = zip(sections, self._fetch(sections), strict=True)
        return [read_listed(each.listed, memoryview(data), "profile", packed=self._file.packed) for each, data in parts]

    def take(self, arrays: Arrays) -> None:
        """Pass the next section's rows to the groups."""
        try:
            made = [
                group.rows_of_piece(self._taken, own_arrays(index, arrays)) for index, group in enumerate(self.groups)
            ]
        except _BAD as error:
            raise _damaged(error) from error
        for group, rows in zip(self.groups, made, strict=True):
            group.take(self._taken, rows)
        self._taken += 1

    def need(self, group: LazyGroup, count: int) -> None:
        """Fetch the sections up to a group's first ``count`` rows; several threads may call it."""
        while group.ready < count:
            with self._lock:
                if group.ready < count:
                    self.take(self.read(range(self._taken, self._taken + 1))[0])

    @cached_property
    def encoder_arrays(self) -> Arrays:
        """Arrays of the last section, which only encoders need."""
        return self.read(range(self.pieces, self.pieces + 1))[0]

    def all(self) -> Arrays:
        """Fetch all arrays."""
        return {name: array for arrays in self.read(range(self.pieces + 1)) for name, array in arrays.items()}

    def bytes(self) -> bytes:
        """Fetch all sections as they are stored."""
        return b"".join(self._fetch(self._file.sections)) if self._file.sections else b""


class LazyGroup(Group):
    """A group whose rows are fetched in pieces and whose metric is fetched on first use.

    Attributes:
        ready: Number of rows that have been read.
    """

    ready: int
    _sections: Sections
    _ends: list[int]
    _index: int
    _raw: Any
    _layers: tuple[LayerSpec, ...]
    _steps: NDArray[np.float32]
    _columns: NDArray[np.float32]

    def __init__(
        self,
        sections: Sections,
        first: Arrays,
        index: int,
        raw: Any,  # noqa: ANN401 - JSON
        *,
        layers: tuple[LayerSpec, ...],
    ) -> None:
        """Read the arrays of the first section, apart from rows."""
        own, planes = own_arrays(index, first), planes_of_json(raw)
        predictor, ends = predictor_of(own), sections.ends_of(index)
        mean, spread = typed(own["mean"], "f2", "f4").astype(np.float32), typed(own["spread"], "i2")
        self.__dict__.update(  # the class is frozen, and rows and metric are properties
            planes=planes, mean=mean, spread=spread, row_scale=None, cuts=tuple(ends[:-1]), solved={},
            predictor=None if predictor is None else predictor.values(), ready=0, _ends=ends, _sections=sections,
            _raw=raw, _index=index, _layers=layers, _columns=steps_of(own["rows_columns"], 1),
            _steps=steps_of(own["rows_steps"], 1), **dict(zip(("sink", "sink_steps"), sink_of(own), strict=True)),
        )  # fmt: skip
        sections.groups.append(self)

    def has_sound_steps(self) -> bool:
        """Return whether rows and steps are as many as the classes, and as wide as the mean."""
        return self._ends[-1] == self.rank == len(self._steps) and len(self._columns) == self.width

    def rows_of_piece(self, piece: int, own: Arrays) -> Tensor:
        """Multiply out and check the rows of a piece."""
        first, last = self._ends[piece - 1] if piece else 0, self._ends[piece]
        if first == last:
            return torch.empty(0, self.width, dtype=torch.bfloat16)
        entries = entries_of(f"rows{piece}", own)
        if entries.shape != (last - first, self.width):
            raise ValueError(f"rows {first} to {last} of group {self._index} have another shape")
        rows = QuantisedMatrix(entries, self._steps[first:last], self._columns).values()
        if not bool(torch.isfinite(rows).all()):
            raise ValueError(f"rows {first} to {last} of group {self._index} are out of range")
        return rows

    def take(self, piece: int, rows: Tensor) -> None:
        """Store the rows of a piece; may repeat an interrupted call."""
        end = self._ends[piece]
        self._buffer[end - len(rows) : end] = rows
        self.__dict__["ready"] = end

    @cached_property
    def _buffer(self) -> Tensor:
        """Room for all rows; unwritten pages take no memory."""
        return torch.empty(self.rank, self.width, dtype=torch.bfloat16)

    @property
    def loaded_rows(self) -> int:
        """Number of rows that have been read."""
        return self.ready

    def first_rows(self, count: int) -> Tensor:
        """Return the first rows; fetches missing ones."""
        self._sections.need(self, count)
        return self._buffer[:count]

    def first_synthesis(self, count: int) -> Tensor:
        """Return the first rows in float32; fetches missing ones."""
        self._sections.need(self, count)
        known: Tensor | None = self.__dict__.get("_widened")
        if known is None or len(known) < count:
            known = self.__dict__["_widened"] = self._buffer[: self.ready].float()
        return known[:count]

    @property
    def rows(self) -> Tensor:
        """All rows."""
        return self.first_rows(self.rank)

    @property
    def synthesis(self) -> Tensor:
        """All rows in float32."""
        return self.first_synthesis(self.rank)

    @cached_property
    def metric(self) -> tuple[NDArray[np.float32], ...]:
        """The metric of each plane, fetched on first use."""
        try:
            _, found = metric_of(self.planes, own_arrays(self._index, self._sections.encoder_arrays), self._layers)
        except _BAD as error:
            raise _damaged(error) from error
        if not has_sound_metric(self.planes, found, self._layers):
            raise _damaged(f"the metric of group {self._index}")
        return found

    @property
    def rounded(self) -> RoundedMatrices | None:
        """The rounded matrices for a file; fetches the whole profile."""
        try:
            return group_of(self._index, self._raw, self._sections.all(), layers=self._layers).rounded
        except _BAD as error:
            raise _damaged(error) from error

    def loaded_part(self) -> Group:
        """Return a group of the rows read so far, with the unit matrix as metric."""
        widths = np.split(np.ones(self.width, np.float32), np.cumsum(self._widths())[:-1])
        return Group(
            self.planes, self.mean, self.spread[: self.ready], self._buffer[: self.ready], None, tuple(widths),
            self.predictor,
        )  # fmt: skip

    def _widths(self) -> list[int]:
        return [plane_width(self._layers, plane) for plane in self.planes]
