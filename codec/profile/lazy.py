"""Profiles of which only the first sections are read: the rest is fetched when something needs it.

A reader of coarse levels needs a group's first rows alone, and no metric. Whatever asks for more gets more, so a lazy
profile does everything that a whole one does.
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
    from kvwire.codec.profile.group import SteppedGroup
    from kvwire.types import LayerSpec

    Fetch = Callable[[Sequence[Section]], list[bytes]]
    """Reads sections that follow each other, and compares each with its digest."""

_MATRIX = 2
_PIECE = re.compile(r"g([0-9]+)\.rows([0-9]+)(_wide)?")
_BAD = (KeyError, TypeError, ValueError, OverflowError)


def open_profile(outline: bytes, digest: str, fetch: Fetch, level: int = 0) -> Profile:
    """Open a stored profile that has sections and read what the first levels need.

    Args:
        outline: What stands before the first section, already compared with its digest; see ``Profile.outline``.
        digest: The profile's.
        fetch: Reads sections; may be called later, from any thread.
        level: Up to which level to read now.

    Returns:
        The profile.

    Raises:
        CorruptError: What was read is no profile.
        TruncatedError: The outline ends too early.
        FormatVersionError: A later version wrote it.
        KvwireError: Whatever ``fetch`` raises.
    """
    sections = Sections(describe(MAGIC, outline, "profile"), fetch)
    if not sections.have_all_rows:
        return Profile.from_bytes(_checked(outline + sections.bytes(), digest))
    first, *others = sections.read(range(min(max(level, 0), sections.pieces - 1) + 1))
    profile = LazyProfile.of_arrays(sections.head, first, partial(LazyGroup, sections, first))
    named = len(outline), hashlib.sha256(outline).hexdigest()
    profile.__dict__.update(digest=digest, outline=named, _file=lambda: _checked(outline + sections.bytes(), digest))
    if not all(has_sound_outline(group, profile) and group.has_sound_steps() for group in sections.groups):
        problem = "steps, classes or a predictor of another shape or range"
        raise _damaged(problem)
    for arrays in (first, *others):
        sections.take(arrays)
    return profile


def _checked(data: bytes, digest: str) -> bytes:
    """A whole file, compared with its digest: an outline alone proves no more than its name does."""
    if hashlib.sha256(data).hexdigest() != digest:
        msg = f"what was read as profile {digest[:12]} has another digest; copy it again from where it is whole"
        raise CorruptError(msg)
    return data


def loaded_part(profile: Profile) -> Profile:
    """Take what is here of a profile, by the same name: for trial runs, which are to fetch nothing.

    Args:
        profile: Any.

    Returns:
        The profile; of a lazy one the rows that were read, with the unit matrix as metric.
    """
    if not isinstance(profile, LazyProfile):
        return profile
    groups = tuple(group.loaded_part() for group in profile.groups if isinstance(group, LazyGroup))
    fields = {name: getattr(profile, name) for name in Profile.__dataclass_fields__}
    out = Profile(**fields | {"groups": groups})
    out.__dict__["digest"] = profile.digest
    return out


def _damaged(problem: object) -> CorruptError:
    return CorruptError(f"the profile's sections contradict what it says of them ({problem}); fetch it again")


class LazyProfile(Profile):
    """A profile whose groups are lazy."""

    _file: Callable[[], bytes]

    @cached_property
    def data(self) -> bytes:
        """The file, fetched whole; what ``replace`` made of a lazy profile is packed anew."""
        whole: bytes = self._file() if "_file" in self.__dict__ else super().data
        return whole


class Sections:
    """The sections of one file, and how far their rows were read.

    Attributes:
        head: The file's.
        groups: Those whose rows they hold, in order; each adds itself.
    """

    def __init__(self, told: Description, fetch: Fetch) -> None:
        """Read nothing yet."""
        self._told, self._fetch, self.head = told, fetch, told.head
        self._lock = reentrant_lock_of_process()
        self._taken = 0
        self.groups: list[LazyGroup] = []

    @property
    def pieces(self) -> int:
        """Sections with rows; the last section has none."""
        return len(self._told.sections) - 1

    @property
    def have_all_rows(self) -> bool:
        """Whether the rows of all groups lie in pieces, as they do in files of ``fit_profile``'s profiles."""
        names = {row[0] for row in self._told.listed}
        return self.pieces > 0 and all(f"{name.partition('.')[0]}.rows_steps" in names for name in names if "." in name)

    def ends_of(self, index: int) -> list[int]:
        """Tell where a group's pieces end, by the shapes of their arrays alone."""
        counts = [0] * self.pieces
        for name, _, shape, _ in self._told.listed:
            piece = _PIECE.fullmatch(name)
            if piece and int(piece[1]) == index:
                if len(shape) != _MATRIX or int(piece[2]) >= self.pieces:
                    raise ValueError(f"array {name}")
                counts[int(piece[2])] += shape[0]
        return list(itertools.accumulate(counts))

    def read(self, numbers: range) -> list[Arrays]:
        """Fetch some sections that follow each other."""
        sections = self._told.sections[numbers.start : numbers.stop]
        parts = zip(sections, self._fetch(sections), strict=True)
        return [read_listed(each.listed, memoryview(data), "profile", packed=self._told.packed) for each, data in parts]

    def take(self, arrays: Arrays) -> None:
        """Give the groups the rows of the next section."""
        try:
            made = [group.made(self._taken, own_arrays(index, arrays)) for index, group in enumerate(self.groups)]
        except _BAD as error:
            raise _damaged(error) from error
        for group, rows in zip(self.groups, made, strict=True):
            group.take(self._taken, rows)
        self._taken += 1

    def need(self, group: LazyGroup, count: int) -> None:
        """Fetch what a group's first rows lie in; several threads may ask for the same."""
        while group.ready < count:
            with self._lock:
                if group.ready < count:
                    self.take(self.read(range(self._taken, self._taken + 1))[0])

    @cached_property
    def of_encoders(self) -> Arrays:
        """The last section."""
        return self.read(range(self.pieces, self.pieces + 1))[0]

    def all(self) -> Arrays:
        """Fetch all arrays."""
        return {name: array for arrays in self.read(range(self.pieces + 1)) for name, array in arrays.items()}

    def bytes(self) -> bytes:
        """Fetch all sections as they are stored."""
        return b"".join(self._fetch(self._told.sections)) if self._told.sections else b""


class LazyGroup(Group):
    """A group whose rows come in pieces, and whose metric is fetched by those who need it.

    Attributes:
        ready: How many of its rows are here.
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
        """Read what does not lie in pieces."""
        own, planes = own_arrays(index, first), planes_of_json(raw)
        told, ends = predictor_of(own), sections.ends_of(index)
        mean, spread = typed(own["mean"], "f2", "f4").astype(np.float32), typed(own["spread"], "i2")
        self.__dict__.update(  # the class is frozen, and has its rows and its metric as properties
            planes=planes, mean=mean, spread=spread, row_scale=None, cuts=tuple(ends[:-1]), solved={},
            predictor=None if told is None else told.values(), ready=0, _ends=ends, _sections=sections, _raw=raw,
            _index=index, _layers=layers, _columns=steps_of(own["rows_columns"], 1),
            _steps=steps_of(own["rows_steps"], 1), **dict(zip(("sink", "sink_steps"), sink_of(own), strict=True)),
        )  # fmt: skip
        sections.groups.append(self)

    def has_sound_steps(self) -> bool:
        """Whether rows and steps are as many as the classes, and as wide as the mean."""
        return self._ends[-1] == self.rank == len(self._steps) and len(self._columns) == self.width

    def made(self, piece: int, own: Arrays) -> Tensor:
        """Make the rows of a piece."""
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
        """Take in the rows of a piece; again, where that was interrupted before."""
        end = self._ends[piece]
        self._buffer[end - len(rows) : end] = rows
        self.__dict__["ready"] = end

    @cached_property
    def _buffer(self) -> Tensor:
        """Of all rows; what is not written yet takes no memory."""
        return torch.empty(self.rank, self.width, dtype=torch.bfloat16)

    @property
    def loaded_rows(self) -> int:
        """Those that were fetched."""
        return self.ready

    def first_rows(self, count: int) -> Tensor:
        """As of every group; fetches what is missing."""
        self._sections.need(self, count)
        return self._buffer[:count]

    def first_synthesis(self, count: int) -> Tensor:
        """As of every group; fetches what is missing."""
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
        """The metric of each plane."""
        try:
            _, found = metric_of(self.planes, own_arrays(self._index, self._sections.of_encoders), self._layers)
        except _BAD as error:
            raise _damaged(error) from error
        if not has_sound_metric(self.planes, found, self._layers):
            problem = f"the metric of group {self._index}"
            raise _damaged(problem)
        return found

    @property
    def stepped(self) -> SteppedGroup | None:
        """What the matrices were rounded to, for a file."""
        try:
            return group_of(self._index, self._raw, self._sections.all(), layers=self._layers).stepped
        except _BAD as error:
            raise _damaged(error) from error

    def loaded_part(self) -> Group:
        """The rows that are here, with the unit matrix as metric."""
        widths = np.split(np.ones(self.width, np.float32), np.cumsum(self._widths())[:-1])
        return Group(
            self.planes, self.mean, self.spread[: self.ready], self._buffer[: self.ready], None, tuple(widths),
            self.predictor,
        )  # fmt: skip

    def _widths(self) -> list[int]:
        return [plane_width(self._layers, plane) for plane in self.planes]
