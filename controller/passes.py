"""What a load's plan wants to have recomputed, as forward passes that can run."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .chunk_table import PLANNED

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from .chunk_table import ChunkTable
    from .costs import CostModel
    from .document_state import DocumentState


class WantedPasses:
    """Chunks that are to be recomputed, by document; true while there may be some."""

    def __init__(self, table: ChunkTable) -> None:
        """Want nothing yet."""
        self._table = table
        self._wanted = bytearray()
        self._docs: deque[DocumentState] = deque()

    def __bool__(self) -> bool:
        """Whether there may be chunks left to recompute."""
        return bool(self._docs)

    def want(
        self, places: NDArray[np.int64], still_open: NDArray[np.int64], doc: Callable[[int], DocumentState]
    ) -> bool:
        """Take over what a new plan wants."""
        before, self._wanted, self._docs = self._wanted, bytearray(len(self._table)), deque()
        if len(places):
            np.frombuffer(self._wanted, np.uint8)[places] = 1
            documents = np.flatnonzero(np.bincount(self._table.look("document")[places]))
            self._docs.extend(map(doc, documents.tolist()))
        if not self._table.counts[PLANNED]:
            return True
        if len(before) != len(self._wanted):
            return False
        earlier, later = (np.frombuffer(each, np.uint8)[still_open] for each in (before, self._wanted))
        return bool(np.array_equal(earlier, later))

    def wants(self, at: int) -> bool:
        """Whether a chunk is to be recomputed."""
        return bool(self._wanted[at])

    def give_up(self, at: int) -> None:
        """Want a chunk no longer."""
        self._wanted[at] = 0

    def _may_want(self, doc: DocumentState) -> bool:
        return doc.has(PLANNED) and self._wanted.find(1, doc.start, doc.stop) >= 0

    def next(self, costs: CostModel, limit_s: float) -> tuple[DocumentState, list[int]] | None:
        """Find the first forward pass that can run now and that the plan wants."""
        state, can_text, wanted = self._table.state, self._table.can_text, self._wanted
        while self._docs and not self._may_want(self._docs[0]):
            self._docs.popleft()
        for doc in self._docs:
            first = doc.ready_before()
            run: list[int] = []
            for chunk in range(first, doc.count):
                at = doc.start + chunk
                if not (wanted[at] and can_text[at]) or state[at] != PLANNED:
                    break
                if run and costs.prefill.seconds(*doc.prefill_span(first, chunk)) > limit_s:
                    break
                run.append(chunk)
            if run:
                return doc, run
        return None
