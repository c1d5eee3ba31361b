"""All chunks of a load side by side, one column for each thing that is known of them, and how they move on."""

from __future__ import annotations

from array import array
from enum import IntEnum
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from .documents import UNMEASURED
from .snapshot import Columns, UpgradeCandidates

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from .documents import DocumentPlanInput
    from .snapshot import Flags, Floats, Ints


T = TypeVar("T", bound=float)


class ChunkState(IntEnum):
    """Where a chunk is on its way into the prompt. From READY on it is valid there, and only becomes better."""

    PLANNED = 0  # nothing started; every plan may decide anew
    FETCHING = 1
    ARRIVED = 2
    DECODING = 3
    RECOMPUTING = 4
    READY = 5
    REFINING = 6  # ready, and a finer level is being fetched
    REFINED = 7  # ready, and a finer level is here
    REDECODING = 8  # being overwritten with a finer level
    FAILED = 9  # neither way is left


PLANNED, FETCHING, ARRIVED, DECODING, RECOMPUTING, READY, REFINING, REFINED, REDECODING, FAILED = ChunkState
"""The states by their own names: looking one up in its class takes seven times as long, and every event reads many."""

# Every move there is. Back to PLANNED: one way into the prompt is lost, or given up, and the other is left.
MOVES: dict[ChunkState, frozenset[ChunkState]] = {
    PLANNED: frozenset({FETCHING, RECOMPUTING, FAILED}),
    FETCHING: frozenset({ARRIVED, PLANNED}),
    ARRIVED: frozenset({DECODING, PLANNED}),
    DECODING: frozenset({READY, REFINED, PLANNED}),  # REFINED: to a coarser level than is here
    RECOMPUTING: frozenset({READY, PLANNED}),
    READY: frozenset({REFINING}),
    REFINING: frozenset({REFINED, READY}),
    REFINED: frozenset({REDECODING, READY}),
    REDECODING: frozenset({READY, ARRIVED}),  # ARRIVED: spoilt, but what it was made from is still here
    FAILED: frozenset(),
}

VALID = (READY, REFINING, REFINED)
"""States in which a chunk of the prompt can be used as it is."""
VALID_BYTES = bytes(VALID)

_FIXED = ("document", "chunk", "tokens", "context", "finest", "floor")  # columns before those of sizes
_MAY_MOVE = tuple(bytes(state in MOVES[old] for state in ChunkState) for old in ChunkState)
_RAISABLE = np.isin(np.arange(len(ChunkState)), (FETCHING, ARRIVED, DECODING, READY, REFINING, REFINED, REDECODING))


class ChunkTable:
    """Chunks of some documents, in the order in which these became known; n in all.

    Columns are Python's arrays: single entries are read and written at every event, whole columns only where a plan is
    made, and numpy then looks at the same memory. Nobody may keep such a look: a column that is looked at cannot grow.

    Attributes:
        document: Number of its document in the prompt ``[n]``.
        chunk: Its number there ``[n]``.
        tokens: Of each ``[n]``.
        context: Tokens that stand before it and that recomputing it sees: of its document, and where documents are to
            see each other of those before that as well ``[n]``.
        state: Its ``ChunkState`` ``[n]``.
        level: Asked for or in the prompt ``[n]``.
        valid_level: In the prompt; RECOMPUTE (-1) where it was recomputed ``[n]``.
        held: Bytes that were asked for or have arrived and are not released ``[n]``.
        top: Finest level that can be fetched, -1 for none ``[n]``.
        finest: Its document's finest ``[n]``.
        floor: Its document's own floor ``[n]``.
        can_text: It can be recomputed ``[n]``.
        layered: A finer level adds to the coarser ones ``[n]``.
        sizes: Bytes of levels 0..k, the last one that a chunk has repeated; below the floor those of the floor
            ``[L][n]``.
        errors: Once decoded up to level k, repeated likewise ``[L][n]``.
        exact_error: Its own finest error, 0 without a blob ``[n]``.
        counts: How many chunks are in each state.
        held_total: Sum of ``held``.
        in_prompt_order: Documents became known in the order of the prompt.
        has_floors: A document has a floor of its own.
    """

    def __init__(self) -> None:
        """Start without chunks."""
        self.document, self.chunk, self.tokens, self.context = (array("q") for _ in range(4))
        self.level, self.valid_level, self.held, self.top, self.finest, self.floor = (array("q") for _ in range(6))
        self.state, self.can_text, self.layered = bytearray(), bytearray(), bytearray()
        self.exact_error = array("d")
        self.sizes: list[array[int]] = [array("q")]
        self.errors: list[array[float]] = [array("d")]
        self.counts = [0] * len(ChunkState)
        self.held_total = 0
        self.in_prompt_order = True
        self.has_floors = False
        self._fixed: tuple[Ints, NDArray[np.float64]] | None = None

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.state)

    # Documents come.

    def add(self, number: int, tokens: Sequence[int]) -> int:
        """Append the chunks of a document; ``place`` tells what can be fetched of them."""
        start = len(self.state)
        self._fixed = None
        if start and self.document[-1] > number:
            self.in_prompt_order = False
        count = len(tokens)
        zeros, none = bytes(8 * count), array("q", (-1,)) * count
        self.document.extend(repeat(number, count))
        self.chunk.extend(range(count))
        self.tokens.extend(tokens)
        self.context.extend(accumulate(tokens[:-1], initial=0))
        for levels in (self.level, self.valid_level, self.top, self.finest):
            levels.extend(none)
        for numbers in (self.held, self.floor, *self.sizes):
            numbers.frombytes(zeros)
        for figures in (self.exact_error, *self.errors):
            figures.frombytes(zeros)
        for flags in (self.state, self.can_text, self.layered):
            flags.extend(bytes(count))
        self.counts[PLANNED] += count
        return start

    def place(self, start: int, chosen: DocumentPlanInput, *, has_text: bool) -> None:
        """Write what can be done about a document's chunks; before anything of it is fetched."""
        self._fixed = None
        self.has_floors |= chosen.floor > 0
        count = len(chosen.tokens)
        stop = start + count
        failed = self.state.count(FAILED, start, stop)
        self.counts[FAILED] -= failed
        self.counts[PLANNED] += failed
        self.state[start:stop] = bytes(count)
        rows = [_from_floor(row, chosen.floor) for row in chosen.fetch_bytes]
        lengths = [len(row) for row in rows] if rows else [0] * count
        levels = max(lengths)
        while len(self.sizes) < levels:
            self.sizes.append(array("q", self.sizes[-1]))
            self.errors.append(array("d", self.errors[-1]))
        self.top[start:stop] = array("q", [length - 1 for length in lengths])
        self.finest[start:stop] = array("q", (levels - 1,)) * count
        self.floor[start:stop] = array("q", (chosen.floor,)) * count
        self.can_text[start:stop] = bytes((has_text,)) * count
        self.layered[start:stop] = bytes((chosen.layered,)) * count
        given = chosen.errors or [[UNMEASURED ** (1 + level) for level in range(length)] for length in lengths]
        errors = [_from_floor(row, chosen.floor) for row in given]
        _write(self.sizes, start, rows or [()] * count, ragged=min(lengths) < levels)
        _write(self.errors, start, errors, ragged=min(lengths) < levels)
        self.exact_error[start:stop] = self.errors[-1][start:stop]

    def move_back(self, start: int, stop: int, tokens: int) -> None:
        """Have more tokens stand before a document."""
        self._fixed = None
        self.context[start:stop] = array("q", [context + tokens for context in self.context[start:stop]])

    def weigh(self, start: int, weights: Sequence[float]) -> None:
        """Have the errors of a document's chunks count more or less."""
        self._fixed = None
        part = slice(start, start + len(weights))
        for errors in (self.exact_error, *self.errors):
            errors[part] = array("d", [error * weight for error, weight in zip(errors[part], weights, strict=True)])

    # Single chunks.

    def move(self, at: int, state: ChunkState) -> bool:
        """Take a chunk to another state."""
        old = self.state[at]
        if not _MAY_MOVE[old][state]:
            return False
        self.state[at] = state
        self.counts[old] -= 1
        self.counts[state] += 1
        return True

    def hold(self, at: int, size: int) -> int:
        """Note how many bytes are held for a chunk from now on; returns by how many that is more."""
        more = size - self.held[at]
        self.held[at] = size
        self.held_total += more
        return more

    def lowest(self, at: int, floor: int) -> int:
        """The coarsest level to use of a chunk where there is a choice; -1 where it has no level."""
        return min(max(floor, self.floor[at]), self.finest[at])

    # Many chunks.

    def look(self, name: str) -> NDArray[Any]:
        """A column as numpy sees it; not to be kept. See the class."""
        column = getattr(self, name)
        return np.frombuffer(column, np.uint8 if isinstance(column, bytearray) else column.typecode)

    def having(self, *states: ChunkState) -> Iterator[int]:
        """Places of chunks in any of some states, in prompt order."""
        if not any(self.counts[state] for state in states):
            return iter(())
        if len(states) == 1 and self.in_prompt_order:
            return self._walk(states[0])
        state = self.look("state")
        flags = state == states[0]
        for other in states[1:]:
            flags |= state == other
        return iter(self._in_prompt_order(np.flatnonzero(flags)).tolist())

    def _walk(self, state: ChunkState) -> Iterator[int]:
        at = self.state.find(state)
        while at >= 0:
            yield at
            at = self.state.find(state, at + 1)

    def _in_prompt_order(self, places: Ints) -> Ints:
        if self.in_prompt_order:
            return places
        return np.asarray(places[np.argsort(self.look("document")[places], kind="stable")])

    @property
    def valid(self) -> int:
        """How many chunks can be used as they are."""
        counts = self.counts
        return counts[READY] + counts[REFINING] + counts[REFINED]

    def are_valid(self, count: int) -> bool:
        """Whether all of the first chunks in the table can be used as they are."""
        return not self.state[:count].lstrip(VALID_BYTES)

    def arrived(self) -> tuple[int, int, int]:
        """What waits to be decoded: chunks, their tokens and their bytes."""
        if not (self.counts[ARRIVED] or self.counts[REFINED]):
            return 0, 0, 0
        state = self.look("state")
        places = np.flatnonzero((state == ARRIVED) | (state == REFINED))
        sizes, level = self.sizes_by_level(), self.look("level")[places]
        size = int((sizes[level, places] * (level >= 0)).sum())
        return len(places), int(self.look("tokens")[places].sum()), size

    def unbegun(self) -> tuple[int, int, float] | None:
        """What text alone would have to compute: documents, tokens and pairs that attend; None where it cannot."""
        state = self.look("state")
        places = np.flatnonzero((state == PLANNED) | (state == FETCHING))
        if not self.look("can_text")[places].all():
            return None
        tokens, context = self.look("tokens")[places], self.look("context")[places]
        pairs = float((tokens * (context + tokens / 2)).sum())
        documents = int(np.count_nonzero(np.bincount(self.look("document")[places])))
        return documents, int(tokens.sum()), pairs

    def sizes_by_level(self) -> Ints:
        """Bytes of every chunk up to each level ``[L, n]``."""
        return self.fixed()[0][len(_FIXED) :]

    def errors_by_level(self) -> Floats:
        """Errors of every chunk once decoded up to each level ``[L, n]``."""
        return self.fixed()[1][1:]

    def fixed(self) -> tuple[Ints, NDArray[np.float64]]:
        """Copies of what stays as it is while chunks move on, so that many columns are read in one go."""
        if self._fixed is None:
            whole = (*(getattr(self, name) for name in _FIXED), *self.sizes)
            ints = np.array([np.frombuffer(each, np.int64) for each in whole])
            self._fixed = ints, np.array([np.frombuffer(each) for each in (self.exact_error, *self.errors)])
        return self._fixed

    def open(self, prefix_s: dict[int, float]) -> tuple[Columns, Ints]:
        """Chunks that nothing was started for, in prompt order."""
        places = self._in_prompt_order(np.flatnonzero(self.look("state") == PLANNED))
        ints, floats = self.fixed()
        ints, floats = ints.take(places, axis=1), floats.take(places, axis=1)
        document, chunk, tokens, context, finest, floor = ints[: len(_FIXED)]
        waits = np.zeros(len(places))
        if prefix_s and len(places):
            by_document = np.zeros(1 + max(*prefix_s, int(document.max())))
            by_document[[*prefix_s]] = [*prefix_s.values()]
            waits = by_document[document]
        columns = Columns(
            document=document,
            chunk=chunk,
            tokens=tokens,
            context=context,
            sizes=ints[len(_FIXED) :],
            errors=floats[1:],
            top=self.look("top")[places],
            finest=finest,
            exact_error=floats[0],
            can_text=self.look("can_text")[places].astype(np.bool_),
            prefix_s=waits,
            layered=self.look("layered")[places].astype(np.bool_),
            floor=floor if self.has_floors else None,
        )
        return columns, places

    def refinable(self, ceiling: int | None) -> tuple[UpgradeCandidates, Ints]:
        """Chunks of layered blobs that have a finer level than was asked for, up to a ceiling, in prompt order."""
        state, top = self.look("state"), self.look("top")
        most = top if ceiling is None else np.minimum(top, ceiling)
        able: Flags = (self.look("layered") > 0) & (self.look("held") > 0) & (self.look("level") < most)
        places = self._in_prompt_order(np.flatnonzero(able & _RAISABLE[state]))
        ints, floats = self.fixed()
        ints, floats = ints.take(places, axis=1), floats.take(places, axis=1)
        refinable = UpgradeCandidates(
            level=self.look("level")[places],
            top=most[places],
            sizes=ints[len(_FIXED) :],
            errors=floats[1:],
            tokens=ints[2],
            ready=state[places] == READY,
        )
        return refinable, places


def _from_floor(row: Sequence[T], floor: int) -> tuple[T, ...]:
    """A chunk's levels, in which those below a floor count as it, or as the last one where it is absent."""
    below = min(floor, len(row))
    return (*(row[min(floor, len(row) - 1)] for _ in range(below)), *row[below:])


def _write(columns: list[Any], start: int, rows: Sequence[Sequence[float]], *, ragged: bool) -> None:
    """Write rows ``[count][own levels]`` into columns ``[L][n]``, the last entry repeated; 0 where a row is empty."""
    if ragged:
        width = len(columns)
        rows = [[*row, *[row[-1] if row else 0] * (width - len(row))] for row in rows]
    stop = start + len(rows)
    part = array(columns[0].typecode, bytes(8 * len(rows)))
    for level, entries in enumerate(zip(*rows, strict=True)):
        part = array(columns[0].typecode, entries)
        columns[level][start:stop] = part
    for level in range(len(rows[0]), len(columns)):
        columns[level][start:stop] = part
