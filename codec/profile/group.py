"""Groups of planes that a profile transforms together: mean, synthesis rows and metric of errors.

A fit rounds rows and predictor to whole numbers times a step per row and a step per column, and metrics to rounded
Cholesky factors; profiles store them so.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from kvwire._forks import lock_of_process
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane


LARGEST = 32767
"""Largest entry: int16."""
SMALL = 127
"""Entries up to this fit one byte."""
MIN_DIAGONAL_RATIO = 1e-2
"""Least ratio of diagonal entries in the Cholesky factor of the rows' Gram matrix at which float32 solves as accurately
as it stores."""
_DEPENDENT = 1e-7
"""The same ratio below which rows are dependent: its square is near the precision of float64. A fit on few tokens keeps
all directions and rounds most of them coarsely, which leaves ratios down to 1e-5."""
MOST_PIECES = 14
"""Most pieces of a group's rows: a file has at most 16 sections."""
ROWS_BYTES = 64 << 20
"""Bytes for a profile's cached expected rows: most tokens of a text are frequent ones."""
_BLOCK = 128
"""Rows computed at a time: their float64 copies stay small compared with a chunk."""


@dataclass(frozen=True, eq=False)
class QuantisedMatrix:
    """A matrix ``entries[i, j] * row_steps[i] * column_steps[j]``.

    Attributes:
        entries: int16 ``[rows, columns]``.
        row_steps: float32 ``[rows]``, above 0.
        column_steps: float32 ``[columns]``, above 0.
    """

    entries: NDArray[np.int16]
    row_steps: NDArray[np.float32]
    column_steps: NDArray[np.float32]

    def values(self) -> torch.Tensor:
        """Multiply out to bfloat16 ``[rows, columns]``."""
        out = torch.from_numpy(self.entries).float()
        out *= torch.from_numpy(self.row_steps)[:, None]
        out *= torch.from_numpy(self.column_steps)
        return out.bfloat16()


def wide_rows(entries: NDArray[np.int16]) -> int:
    """Count the rows up to the last one with an entry that needs two bytes."""
    wide = np.flatnonzero((np.abs(entries.astype(np.int32)) > SMALL).any(axis=1))
    return int(wide[-1]) + 1 if len(wide) else 0


def pieces(cuts: tuple[int, ...], rank: int) -> list[tuple[int, int]]:
    """Cut a group's rows into non-empty pieces: one for each level's additional rows, and one for the rest."""
    ends = [cut for cut in itertools.accumulate(cuts[: MOST_PIECES - 1], max) if cut < rank]
    return list(itertools.pairwise([0, *ends, rank]))


def zigzag(entries: NDArray[np.int16]) -> NDArray[np.uint16]:
    """Number the integers 0, -1, 1, -2, 2, ..., so that small ones have upper bytes of 0."""
    return ((entries << 1) ^ (entries >> 15)).view(np.uint16)


def unzigzag(numbers: NDArray[np.uint16]) -> NDArray[np.int16]:
    """Undo ``zigzag``."""
    return ((numbers >> 1) ^ -(numbers & 1)).view(np.int16)


@dataclass(frozen=True, eq=False)
class Factor:
    """A plane's metric as lower Cholesky factors, one for each head: entries times the step of their row.

    Attributes:
        entries: int8 ``[heads, dim * (dim + 1) / 2]``, row by row.
        steps: float32 ``[heads, dim]``, above 0.
    """

    entries: NDArray[np.int8]
    steps: NDArray[np.float32]

    @cached_property
    def metric(self) -> NDArray[np.float32]:
        """The metric, float32 ``[heads, dim, dim]``, symmetric and positive semidefinite."""
        heads, dim = self.steps.shape
        if self.entries.shape != (heads, dim * (dim + 1) // 2):
            msg = "a metric's factor in the profile has another shape than its steps; fetch the profile again"
            raise CorruptError(msg)
        out, (rows, columns) = np.empty((heads, dim, dim), np.float32), np.tril_indices(dim)
        for head in range(heads):
            lower = np.zeros((dim, dim), np.float32)
            with np.errstate(over="ignore", invalid="ignore"):  # readers check the result
                lower[rows, columns] = self.entries[head] * self.steps[head, rows]
                out[head] = np.tril(lower @ lower.T)
            out[head] += np.tril(out[head], -1).T
        return out


@dataclass(frozen=True, eq=False)
class RoundedMatrices:
    """A group's rounded matrices as they are stored; the group holds their values.

    Attributes:
        rows: The synthesis rows.
        predictor: The predictor; None where the group has none.
        factors: The factors of each plane's metric; None for a diagonal metric.
    """

    rows: QuantisedMatrix
    predictor: QuantisedMatrix | None
    factors: tuple[Factor | None, ...]


def _empty() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, eq=False)
class Solution:
    """Matrices that encoding computes from a group's rows and metric.

    Attributes:
        rows: The group's rows.
        metric: The group's metric.
        analysis: See ``Group.analysis``.
    """

    rows: torch.Tensor
    metric: tuple[NDArray[np.float32], ...]
    analysis: torch.Tensor

    def is_of(self, rows: torch.Tensor, metric: tuple[NDArray[np.float32], ...]) -> bool:
        """Return whether rows and metric are the same memory as these."""
        return rows.data_ptr() == self.rows.data_ptr() and rows.shape == self.rows.shape and metric is self.metric


@dataclass(frozen=True, eq=False)
class Group:
    """Planes (keys or values of some layers) that are transformed together.

    Attributes:
        planes: The planes in the order of their elements, each KV head by KV head; width is their sum.
        mean: float32 ``[width]``.
        spread: int16 ``[rank]``, each coefficient's class at step 1.
        rows: Synthesis rows, bfloat16 ``[rank, width]``: products with quantised values are exact in float32. None for
            the identity.
        row_scale: float32 ``[width]`` of the identity; None for a basis.
        metric: The metric of each plane's errors, symmetric blocks ``[heads, dim, dim]`` or a diagonal ``[width of the
            plane]``; only encoders use it.
        predictor: bfloat16 ``[features, width]``, from features of the text to elements; None without prediction.
        rounded: The rounded matrices for the file; None where rows, predictor and metric are not rounded.
        solved: Cache of the ``Solution``, shared with copies of the group.
        cuts: Number of first rows that suffice for each level of most texts, coarsest first, at most ``rank``. Files
            store the rows in pieces cut there, and readers of coarse levels fetch only the first ones.
        sink: float32 ``[width]``, the mean of attention sinks, un-rotated; empty where none is known.
        sink_steps: float32 ``[width]``, steps of the stored difference of a sink from ``sink``; empty likewise.
    """

    planes: tuple[Plane, ...]
    mean: NDArray[np.float32]
    spread: NDArray[np.int16]
    rows: torch.Tensor | None = None
    row_scale: NDArray[np.float32] | None = None
    metric: tuple[NDArray[np.float32], ...] = ()
    predictor: torch.Tensor | None = None
    rounded: RoundedMatrices | None = None
    cuts: tuple[int, ...] = ()
    sink: NDArray[np.float32] = field(default_factory=_empty)
    sink_steps: NDArray[np.float32] = field(default_factory=_empty)
    solved: dict[str, Solution] = field(default_factory=dict, repr=False)

    @property
    def rank(self) -> int:
        """Number of coefficients for one token."""
        return len(self.spread)

    @property
    def width(self) -> int:
        """Number of elements for one token."""
        return len(self.mean)

    @property
    def is_identity(self) -> bool:
        """Whether coefficients are scaled elements, without rows."""
        return self.row_scale is not None

    @property
    def scales(self) -> NDArray[np.float32]:
        """The scale of each element; only for the identity."""
        return cast("NDArray[np.float32]", self.row_scale)

    @property
    def loaded_rows(self) -> int:
        """Number of rows that are available without fetching."""
        return self.rank

    def first_rows(self, count: int) -> torch.Tensor:
        """Return the first synthesis rows, bfloat16 ``[count, width]``; not for the identity."""
        return cast("torch.Tensor", self.rows)[:count]

    def first_synthesis(self, count: int) -> torch.Tensor:
        """Return the first synthesis rows in float32; not for the identity."""
        return cast("torch.Tensor", self.synthesis)[:count]

    def rows_in_bytes(self, count: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the pieces with the first rows: begin, int8 ``[n, width]``, and float32 steps ``[width]``."""
        known = self._pieces_in_bytes  # another thread may put another dictionary there
        for begin, end in pieces(self.cuts, self.rank):
            if begin >= min(count, end):
                continue
            if begin not in known:
                rows = self.first_rows(end)[begin:].float()
                steps = rows.abs().amax(0).clamp_min(1e-30) / SMALL
                known[begin] = (rows / steps).round().to(torch.int8), steps
            yield begin, *known[begin]

    @cached_property
    def _pieces_in_bytes(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def synthesis(self) -> torch.Tensor | None:
        """The synthesis rows in float32 ``[rank, width]``; None for the identity."""
        return None if self.rows is None else self.rows.float()

    @property
    def analysis(self) -> torch.Tensor | None:
        """float32 ``[width, rank]``, from elements to the coefficients whose synthesis is nearest in the metric.

        The rows were orthonormal in the metric before rounding. Rounding errors are large in directions that the metric
        hardly weighs, so the coefficients solve the normal equations of the stored rows. None for the identity.
        """
        return None if self.synthesis is None else self._solution.analysis

    @property
    def _solution(self) -> Solution:
        """The solution for these rows and this metric, computed once for all copies of the group."""
        known, rows = self.solved.get("solution"), cast("torch.Tensor", self.rows)
        if known is None or not known.is_of(rows, self.metric):
            found = solve(cast("torch.Tensor", self.synthesis), tuple(map(torch.from_numpy, self.metric)))
            known = self.solved["solution"] = Solution(rows, self.metric, found)
        return known

    @cached_property
    def metric_runs(self) -> tuple[torch.Tensor, ...]:
        """``metric`` with neighbours of equal shape joined: one product for several planes costs half as much.

        Blocks are ``[heads of all, dim, dim]`` or a diagonal ``[width of all]``.
        """
        parts = map(torch.from_numpy, self.metric)
        return tuple(torch.cat(list(run)) for _, run in itertools.groupby(parts, key=lambda part: part.shape[1:]))

    @cached_property
    def halved_analysis(self) -> torch.Tensor:
        """``analysis`` in bfloat16."""
        return cast("torch.Tensor", self.analysis).bfloat16()  # not for the identity


def solve(synthesis: torch.Tensor, metric: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Compute ``Group.analysis`` on the device of the input.

    Rows rounded by a fit stay nearly orthonormal: float32 then loses no more than storing the result and takes half the
    time. Others take float64.
    """
    dual = weighted(synthesis, metric)
    gram = synthesis @ dual
    factor, failed_at = torch.linalg.cholesky_ex(gram)
    diagonal = factor.diagonal()
    if int(failed_at) or (len(gram) and bool(diagonal.amin() < MIN_DIAGONAL_RATIO * diagonal.amax())):
        return solve_precisely(synthesis, metric)
    return torch.cholesky_solve(dual.T, factor).T.contiguous()


def solve_precisely(synthesis: torch.Tensor, metric: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Compute ``Group.analysis`` in float64."""
    wide = weighted(synthesis.double(), tuple(block.double() for block in metric))
    factor, failed_at = torch.linalg.cholesky_ex(synthesis.double() @ wide)
    diagonal = factor.diagonal()
    if int(failed_at) or bool(diagonal.amin() < _DEPENDENT * diagonal.amax()):
        raise CorruptError("the profile's basis is not independent in its own metric; fetch the profile again")
    return torch.cholesky_solve(wide.T, factor).T.float().contiguous()


def weighted(synthesis: torch.Tensor, metric: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Multiply rows by the metric, ``[width, rank]``."""
    out = synthesis.new_empty(synthesis.shape[::-1])
    start = 0
    for block in metric:
        heads, dim = (len(block), 1) if block.ndim == 1 else block.shape[:2]
        stop = start + heads * dim
        part = synthesis[:, start:stop].reshape(-1, heads, dim)
        product = part * block[:, None] if block.ndim == 1 else torch.einsum("rhd,hde->rhe", part, block)
        out[start:stop] = product.reshape(-1, heads * dim).T
        start = stop
    return out


class Expectations:
    """Expected elements of one group by token, computed on first use and cached while there is room.

    Several threads may use it. The lock guards only the slots. Rows are computed outside it, so two threads may compute
    the same row, with equal results. A row with a slot never changes.
    """

    def __init__(self, group: Group, table: NDArray[np.int8], room_bytes: int) -> None:
        """Allocate at most the room: a small file may claim a large vocabulary for many groups."""
        self._table = table
        self._mean = torch.from_numpy(group.mean).double()
        predictor = cast("Tensor", group.predictor)  # groups without one are not looked up
        self._predictor = predictor[: table.shape[1]].double()
        slots = len(table) if 4 * len(table) < room_bytes else 0
        capacity = min(slots, (room_bytes - 4 * slots) // (2 * group.width))
        self._cached_rows = torch.empty(capacity, group.width, dtype=torch.bfloat16)
        self._slots = np.full(slots, -1, np.int32)
        self._used = 0
        self._lock = lock_of_process()

    def rows(self, token_ids: NDArray[np.int64]) -> Tensor:
        """Look up or compute the rows of some tokens, float32 ``[tokens, width]``."""
        if not len(self._slots):
            return self._compute(token_ids).float()
        with self._lock:
            slots = self._slots[token_ids]
        missing = token_ids[slots < 0]
        if not len(missing):
            return self._cached_rows[torch.from_numpy(slots)].float()
        computed = self._compute(missing)
        self._store(missing, computed)
        out = torch.empty(len(token_ids), self._cached_rows.shape[1])
        out[torch.from_numpy(slots < 0)] = computed.float()
        out[torch.from_numpy(slots >= 0)] = self._cached_rows[torch.from_numpy(slots[slots >= 0])].float()
        return out

    def cached(self, token_ids: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.uint32]] | None:
        """Return the cached rows without a copy, and each token's index; None where not all tokens fit the cache."""
        if not len(self._slots):
            return None
        with self._lock:
            slots = self._slots[token_ids]
        if slots.min(initial=0) < 0:
            self.rows(np.unique(token_ids[slots < 0]))
            with self._lock:
                slots = self._slots[token_ids]
        return None if slots.min(initial=0) < 0 else (self._cached_rows, slots.astype(np.uint32))

    def missing(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens without a cached row for which there is still room."""
        if not len(self._slots):
            return token_ids[:0]
        with self._lock:
            return token_ids[self._slots[token_ids] < 0][: len(self._cached_rows) - self._used]

    def _store(self, token_ids: NDArray[np.int64], computed: Tensor) -> None:
        """Cache rows while there is room, except those that another thread has cached meanwhile."""
        with self._lock:
            fresh = np.flatnonzero(self._slots[token_ids] < 0)[: len(self._cached_rows) - self._used]
            stop = self._used + len(fresh)
            self._cached_rows[self._used : stop] = computed[torch.from_numpy(fresh)]
            self._slots[token_ids[fresh]] = np.arange(self._used, stop)
            self._used = stop

    def _compute(self, token_ids: NDArray[np.int64]) -> Tensor:
        """Compute rows in float64 and round once, so that a token's row does not depend on the others computed."""
        out = torch.empty(len(token_ids), len(self._mean), dtype=torch.bfloat16)
        for start in range(0, len(token_ids), _BLOCK):
            features = torch.from_numpy(self._table[token_ids[start : start + _BLOCK]]).double()
            out[start : start + _BLOCK] = torch.addmm(self._mean, features, self._predictor)
        return out
