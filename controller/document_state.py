"""One document of a load: which blob of it is used, what went wrong, and its part of the load's chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError
from kvwire.types import ChunkId, Decision

from .chunk_table import FAILED, PLANNED, VALID_BYTES, ChunkState, ChunkTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .documents import DocumentPlanInput


class DocumentState:
    """The chunks of one document: rows ``start`` to ``stop`` of its load's table."""

    def __init__(self, load: int, number: int, variants: tuple[DocumentPlanInput, ...], table: ChunkTable) -> None:
        """Append the document's chunks to the table; the first variant is the chosen one until ``choose``."""
        self.load, self.number, self.variants, self.table = load, number, variants, table
        if not variants or (len(variants) > 1 and any(each.tokens != variants[0].tokens for each in variants)):
            msg = f"document {number} needs at least one variant, and all of them chunks of the same tokens"
            raise ArgumentError(msg)
        self.count = len(variants[0].tokens)
        self.start = table.add(number, variants[0].tokens)
        self.stop = self.start + self.count
        self._ids = [ChunkId(number, chunk, load) for chunk in range(self.count)]
        self.reasons: dict[int, str] = {}  # why the plan did with a chunk what it did
        self.failures = 0  # fetches in a row that brought nothing
        self._given_up: dict[int, int] = {}  # finest levels of chunks that were never tried
        self._behind: set[int] = set()  # chunks that were recomputed behind the documents before this one
        self.prefix_done = self.prefix_running = False
        self.choose(0)

    def choose(self, variant: int) -> None:
        """Take one of the variants; before anything is fetched."""
        self.variant, self.troubles = variant, dict[int, str]()  # what went wrong with a chunk
        self.input = chosen = self.variants[variant]
        has_text = chosen.has_text or any(each.has_text for each in self.variants)
        self.table.place(self.start, chosen, has_text=has_text)
        if not has_text:
            for chunk, level in enumerate(self.table.top[self.start : self.stop]):
                if level < 0:
                    self.troubles[chunk] = "it has neither text nor a segment to fetch"
                    self.move(chunk, FAILED)

    @property
    def tokens(self) -> int:
        """Of the whole document."""
        context = self.table.context
        return context[self.stop - 1] + self.table.tokens[self.stop - 1] - context[self.start]

    @property
    def before(self) -> int:
        """Tokens of other documents that a forward pass over its beginning sees."""
        return self.table.context[self.start]

    def id(self, chunk: int) -> ChunkId:
        """The chunk's name."""
        return self._ids[chunk]

    def move(self, chunk: int, state: ChunkState) -> None:
        """Go to another state."""
        if not self.table.move(self.start + chunk, state):
            old = ChunkState(self.table.state[self.start + chunk])
            msg = f"{self.id(chunk)} is {old.name.lower()}: it cannot become {state.name.lower()}; report outcomes once"
            raise ArgumentError(msg)

    def lose(self, chunk: int, trouble: str, *, fetch: bool) -> None:
        """Go back to planned without one of the two ways, and fail where the other is gone as well.

        Without its text, a chunk that was given up with its document's blob is tried after all.
        """
        self.move(chunk, PLANNED)
        table, at = self.table, self.start + chunk
        if fetch:
            table.top[at] = -1
        else:
            table.can_text[at] = False
            table.top[at] = max(table.top[at], self._given_up.pop(chunk, -1))
        table.level[at] = -1
        self.note(chunk, trouble)
        self._fail_without_way(chunk)

    def _fail_without_way(self, chunk: int) -> None:
        if self.table.top[self.start + chunk] < 0 and not self.table.can_text[self.start + chunk]:
            self.move(chunk, FAILED)

    def give_up_blob(self, trouble: str, *, all_of_it: bool = False) -> None:
        """Fetch nothing more of this document where its text stands in, or not even where it does not."""
        table = self.table
        if all_of_it:
            self._given_up.clear()
        for chunk, at in enumerate(range(self.start, self.stop)):
            if table.state[at] == PLANNED and table.top[at] >= 0 and (table.can_text[at] or all_of_it):
                if not all_of_it:
                    self._given_up[chunk] = table.top[at]
                table.top[at] = -1
                self.note(chunk, trouble)
                self._fail_without_way(chunk)

    def limit(self, most_bytes: int) -> None:
        """Leave out levels that are larger than what may be held at all; before anything is fetched."""
        table = self.table
        if max(table.sizes[-1][self.start : self.stop]) <= most_bytes:
            return
        for chunk, at in enumerate(range(self.start, self.stop)):
            top = table.top[at]
            while top >= 0 and table.sizes[top][at] > most_bytes:
                top -= 1
            if top < table.top[at]:
                table.top[at] = top
                self.note(chunk, f"finer levels exceed the memory bound of {most_bytes} bytes")
                self._fail_without_way(chunk)

    def note(self, chunk: int, trouble: str) -> None:
        """Remember what went wrong."""
        before = self.troubles.get(chunk)
        self.troubles[chunk] = f"{before}; {trouble}" if before else trouble

    def size(self, chunk: int, level: int) -> int:
        """Bytes of a chunk up to a level; 0 below level 0."""
        return self.table.sizes[level][self.start + chunk] if level >= 0 else 0

    def coarsest(self, chunk: int, floor: int) -> int:
        """The coarsest level that what is here of a chunk can be decoded to."""
        table, at = self.table, self.start + chunk
        return min(table.level[at], max(floor, table.floor[at])) if table.layered[at] else table.level[at]

    def prefill_span(self, first: int, last: int) -> tuple[int, int]:
        """Tokens of a forward pass over chunks first..last, and tokens before them."""
        table, end = self.table, self.start + last
        start = table.context[self.start + first]
        return table.context[end] + table.tokens[end] - start, start

    def saw_before(self, chunks: Iterable[int]) -> None:
        """Note that chunks were recomputed behind the documents before this one."""
        self._behind.update(chunks)

    def front(self) -> int:
        """Tokens from its beginning on that see the documents before it."""
        count = next((chunk for chunk in range(self.count) if chunk not in self._behind), self.count)
        return sum(self.table.tokens[self.start : self.start + count])

    @property
    def is_valid(self) -> bool:
        """Whether all of its chunks are."""
        return self.ready_before() == self.count

    def ready_before(self) -> int:
        """The first chunk that is not valid yet; the number of chunks where all are."""
        return self.count - len(self.table.state[self.start : self.stop].lstrip(VALID_BYTES))

    def has(self, *states: ChunkState) -> bool:
        """Whether any chunk is in one of some states."""
        find = self.table.state.find
        return any(find(state, self.start, self.stop) >= 0 for state in states)

    @property
    def prefix_share_left(self) -> float:
        """Share of the document's forward pass that is still needed before anything of it can be decoded."""
        return 0.0 if self.prefix_done or self.prefix_running else self.input.prefix_share

    @property
    def waits_for_prefix(self) -> bool:
        """Whether nothing of it can be decoded yet."""
        return not self.prefix_done and self.input.prefix_share > 0

    def decisions(self) -> Iterator[Decision]:
        """What was done with each chunk."""
        levels = self.table.valid_level[self.start : self.stop]
        for chunk, (name, level) in enumerate(zip(self._ids, levels, strict=True)):
            reason, trouble = self.reasons.get(chunk, ""), self.troubles.get(chunk)
            text = f"{reason} ({trouble})" if trouble else reason
            yield Decision(name, "fetch", level, text) if level >= 0 else Decision(name, "recompute", None, text)
