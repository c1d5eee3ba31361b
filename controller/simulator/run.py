"""A load in the simulated world."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import ceil
from typing import TYPE_CHECKING

from kvwire.types import ChunkId

from ..repair import expected_rows

if TYPE_CHECKING:
    from ..costs import CostModel
    from ..documents import DocumentPlanInput
    from ..events import Finish, Repair
    from ..repair import RepairOption
    from .arrivals import LoadArrival
    from .outcome import Outcome, Span


@dataclass(eq=False)
class Run:
    """A load."""

    arrival: LoadArrival  # what was asked for, and when
    number: int  # for the controller
    chunks: int  # how many it has
    received: float = 0.0  # bytes that came for it
    corrupt: set[ChunkId] = field(default_factory=set)  # chunks that cannot be decoded
    here: dict[ChunkId, int] = field(default_factory=dict)  # level up to which a chunk's bytes are here
    valid: set[ChunkId] = field(default_factory=set)  # chunks that are in the prompt
    spans: list[Span] = field(default_factory=list)  # what was done for it so far
    # which of its blobs a document is fetched from; 0 where nothing was fetched
    variants: dict[int, int] = field(default_factory=dict)
    refused: bool = False  # it was not admitted
    looked: bool = False  # it is known what the question attends to
    repaired: int = 0  # documents whose rows are computed, or being so
    rows: int = 0  # how many rows have been
    share: float = 0.0  # of the rows, those that are in all; 0 before the first are
    outcome: Outcome | None = None  # how it ended; None before
    _under_way: int = 0
    _all: int = 0

    def seen(self, first: ChunkId, *, behind: bool) -> list[ChunkId]:
        """Chunks that a pass sees."""
        documents = range(first.document + 1) if behind else (first.document,)
        counts = {number: len(self.arrival.documents[number][0].tokens) for number in documents}
        counts[first.document] = first.chunk
        return [ChunkId(number, chunk, self.number) for number in documents for chunk in range(counts[number])]

    def size(self, chunk: ChunkId, level: int) -> tuple[int, int]:
        """Tokens of a chunk, and bytes of a level of it."""
        given = self.given(chunk.document)
        return given.tokens[chunk.chunk], given.fetch_bytes[chunk.chunk][level]

    def are_valid(self, documents: int) -> bool:
        """Whether all chunks of the first documents are in the prompt."""
        counts = [len(given.tokens) for given in self.inputs[:documents]]
        return all(
            ChunkId(at, each, self.number) in self.valid for at, count in enumerate(counts) for each in range(count)
        )

    def begin_repair(self, costs: CostModel, asked: Repair) -> float:
        """Compute rows of documents, of which each has as many of the share as it has of the tokens."""
        tokens = [sum(given.tokens) for given in self.inputs]
        links = self.links
        rows = expected_rows(asked.share, tokens, asked.front, self.repaired, asked.documents, links)
        self.repaired, self.share, self._under_way = asked.documents, asked.share, rows
        self._all = expected_rows(asked.share, tokens, asked.front, 0, len(tokens), links)
        return replace(costs, repair_rows=rows, repair_looks=False).repair_s(sum(tokens[: asked.documents]))

    def end_repair(self) -> tuple[int, int]:
        """The rows that were under way, and how many of the share are left."""
        self.rows += self._under_way
        return self._under_way, max(0, self._all - self.rows)

    def _rows_left(self, rows: int, share: float) -> int:
        """Of a share's rows, those that are left for the closing."""
        if not (self.repaired and self.share):
            return rows
        return min(rows, ceil(max(0, self._all - self.rows) * min(1.0, share / self.share)))

    @property
    def inputs(self) -> list[DocumentPlanInput]:
        """Its documents, as the blobs that they are fetched from."""
        return [self.given(document) for document in range(len(self.arrival.documents))]

    def given(self, document: int) -> DocumentPlanInput:
        """A document, as the blob that it is fetched from."""
        return self.arrival.documents[document][self.variants.get(document, 0)]

    @property
    def prompt_tokens(self) -> int:
        """Of all documents."""
        return sum(sum(given.tokens) for given in self.inputs)

    def closing_costs(self, costs: CostModel, last: Finish) -> CostModel:
        """What computing costs, the repair and the question of this load included."""
        repair, first, links = self.repair, sum(self.inputs[0].tokens), self.links
        rows = repair.work(last.repair, self.prompt_tokens, first, last.front) if repair else 0
        return replace(
            costs,
            query_tokens=self.arrival.query_tokens + sum(self.arrival.links) - (self.rows if links else 0),
            repair_rows=self._rows_left(rows, last.repair),
            repair_looks=repair is not None and repair.looks and not self.looked,
        )

    @property
    def links(self) -> tuple[int, ...]:
        """Tokens that are computed behind each document, beside the link where they are."""
        return self.arrival.links if len(self.arrival.documents) > 1 and self.repair is None else ()

    @property
    def repair(self) -> RepairOption | None:
        """What repairing its links may take; None where it has none."""
        return self.arrival.repair if len(self.arrival.documents) > 1 else None

    def link_error(self, last: Finish) -> float:
        """Error that its links are left with."""
        blind = 1 - max(0, last.front - sum(self.inputs[0].tokens)) / self.prompt_tokens
        return blind * self.repair.error_left(last.repair) if self.repair else 0.0
