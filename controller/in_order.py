"""Repair in document order: what of a load's rows is computed while later documents are fetched and decoded.

A row sees nothing behind it. So a document's rows can be computed once it and those before it are as they stay, and
this equals computing all rows at the end.
"""

from __future__ import annotations

from itertools import accumulate
from math import ceil
from typing import TYPE_CHECKING

from kvwire.controller.chunk_table import ChunkState
from kvwire.controller.repair import rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.repair import RepairOption

_READY = bytes((ChunkState.READY,))


class RepairInOrder:
    """How far the rows of a load are.

    Attributes:
        share: Of the rows, those that are computed in all; None before the first job begins, fixed from then on.
        documents: How many documents from the prompt's beginning on have theirs.
        left: Rows of the share that no job has computed; None before the first one has ended.
        refused: Documents that would have been next when there was no time for it beside the link.
        is_running: A job is under way.
    """

    def __init__(self, option: RepairOption | None) -> None:
        """Begin nothing.

        Args:
            option: What repairing the load's links may take; None: they stay as they are.
        """
        self._begins = option.begins if option else "closing"
        self.share: float | None = None
        self.documents = self.refused = 0
        self.left: int | None = None
        self.is_running = False

    def may_begin(self, share: float, *, has_looked: bool) -> bool:
        """Whether documents may be repaired before the last chunk is here.

        Args:
            share: Of the rows, those that are to be computed.
            has_looked: The question has looked at all documents.
        """
        return share > 0 and (self._begins == "documents" or (self._begins == "looked" and has_looked))

    @property
    def wants_order(self) -> bool:
        """Whether documents are wanted in the prompt's order, since their rows are known before any is here."""
        return self._begins == "documents"

    def stop(self) -> None:
        """Begin no more jobs: one failed."""
        self._begins = "closing"

    def rows_left(self, rows: int, share: float) -> int:
        """Rows of a share that are to be computed after the last chunk.

        Args:
            rows: All of them.
            share: Which share.

        Returns:
            How many.
        """
        if self.left is None or not self.share:
            return rows
        return min(rows, ceil(self.left * min(1.0, share / self.share)))


def final_documents(docs: Sequence[DocumentState], known: int, raised: Collection[int], *, looked: bool) -> int:
    """Documents, from the prompt's beginning on, that stay as they are.

    Args:
        docs: The load's, in prompt order.
        known: How many of them are known to.
        raised: Places of chunks that the plan raises to finer levels.
        looked: The plan knows what the question looks at: what it does not raise now, stays.

    Returns:
        How many; ``known`` where there are no others.
    """
    for doc in docs[known:]:
        table, part = doc.table, slice(doc.start, doc.stop)
        if table.state[part].strip(_READY):
            break
        # Bytes are kept of what may become finer.
        if any(table.held[part]) and (not looked or any(doc.start <= at < doc.stop for at in raised)):
            break
        known += 1
    return known


def expected_rows(share: float, tokens: Sequence[int], front: int, first: int, last: int) -> int:
    """Rows that some documents have of a share, were they spread evenly.

    Args:
        share: Of the prompt's rows.
        tokens: Of each document.
        front: Tokens from the prompt's beginning on that need no repair; at least the first document's.
        first: Number of the first document.
        last: The number behind that of the last one.

    Returns:
        How many; 0 where all of them are in the front.
    """
    ends = [0, *accumulate(tokens)]
    seen = 0 if share == 1 else max(front, tokens[0])
    open_ = ends[-1] - seen
    mine = max(0, ends[last] - max(ends[first], seen))
    return ceil(rows_of(share, ends[-1], tokens[0], front) * mine / open_) if open_ else 0


def beside_link(
    arrived_s: Sequence[float], decode_s: Sequence[float], job_s: Callable[[int, int], float], workers: int
) -> int:
    """How many documents of a prompt would be repaired while the rest of it is on its way.

    Args:
        arrived_s: When each document is here, ascending, in seconds from now.
        decode_s: Seconds of decoding each.
        job_s: Seconds of repairing documents from one number to before another.
        workers: As in ``ControllerSettings``.

    Returns:
        How many, from the first on; at most all but the last.
    """
    done, lane_s, free_s = 0, 0.0, 0.0
    for number, (here_s, work_s) in enumerate(zip(arrived_s[:-1], decode_s, strict=False)):
        valid_s = lane_s = max(lane_s if workers > 1 else free_s, here_s) + work_s
        begins_s = free_s = max(free_s, valid_s)
        seconds = job_s(done, number + 1)
        rest_s = sum(decode_s[number + 1 :]) if workers == 1 else 0.0
        if 0 < seconds <= arrived_s[-1] - begins_s - rest_s:
            done, free_s = number + 1, begins_s + seconds
    return done
