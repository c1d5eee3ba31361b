"""Chunks of several documents side by side, as policies see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .board import ChunkState, among
from .policies.base import Columns, Refinable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from .board import DocumentBoard
    from .policies.base import Floats, Ints

_S = ChunkState
_RAISABLE = (_S.FETCHING, _S.ARRIVED, _S.DECODING, _S.READY, _S.REFINING, _S.REFINED, _S.REDECODING)


class Selection:
    """Some chunks of each of some documents; n in all.

    where: position of each one's document in the list ``[n]``. chunk: its number there ``[n]``.
    """

    def __init__(self, boards: Sequence[DocumentBoard], picks: Sequence[Ints]) -> None:
        """Take the chosen chunks of each document."""
        self._pairs = list(zip(boards, picks, strict=True))
        self._levels = max((len(board.sizes) for board in boards), default=1)
        self.where: Ints = np.repeat(np.arange(len(boards)), [len(pick) for pick in picks])
        self.chunk: Ints = self.picked(lambda board: np.arange(board.count), np.int64)

    def picked(self, values: Callable[[DocumentBoard], NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        """A row of each document's ``[its chunks]``, of the chosen chunks ``[n]``."""
        rows = [values(board)[pick] for board, pick in self._pairs]
        return np.concatenate([*rows, np.zeros(0, dtype)]).astype(dtype)

    def spread(self, values: Callable[[DocumentBoard], float], dtype: type[np.generic]) -> NDArray[Any]:
        """A figure of each document, for each of its chosen chunks ``[n]``."""
        return np.array([*(values(board) for board, _ in self._pairs), 0], dtype)[self.where]

    def stacked(self, values: Callable[[DocumentBoard], NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
        """Rows ``[own levels, its chunks]`` of each document, its last level repeated ``[levels, n]``."""
        parts = []
        for board, pick in self._pairs:
            rows = values(board)
            parts.append(rows[np.minimum(np.arange(self._levels), len(rows) - 1)][:, pick])
        return np.concatenate([*parts, np.zeros((self._levels, 0), dtype)], axis=1).astype(dtype)


def open_columns(boards: Sequence[DocumentBoard], head_s: dict[int, float]) -> tuple[Columns, Selection]:
    """Chunks that nothing was started for. head_s: seconds of head start that documents still need, by number."""
    some = Selection(boards, [np.flatnonzero(board.state == _S.PLANNED) for board in boards])
    columns = Columns(
        document=some.spread(lambda board: board.number, np.int64),
        chunk=some.chunk,
        tokens=some.picked(lambda board: board.tokens, np.int64),
        context=some.picked(lambda board: board.context, np.int64),
        sizes=some.stacked(lambda board: board.sizes, np.int64),
        errors=some.stacked(lambda board: board.errors, np.float64),
        top=some.picked(lambda board: board.top, np.int64),
        finest=some.spread(lambda board: board.finest, np.int64),
        exact_error=some.picked(lambda board: board.exact_error, np.float64),
        can_text=some.picked(lambda board: board.can_text, np.bool_),
        head_s=some.spread(lambda board: head_s.get(board.number, 0.0), np.float64),
    )
    return columns, some


def refinable_columns(boards: Sequence[DocumentBoard], ceiling: int | None) -> tuple[Refinable, Selection]:
    """Chunks of layered blobs that have a finer level than was asked for, up to a ceiling."""

    def most(board: DocumentBoard) -> Ints:
        return board.top if ceiling is None else np.minimum(board.top, ceiling)

    def able(board: DocumentBoard) -> Ints:
        if not board.input.layered:
            return np.zeros(0, np.int64)
        return np.flatnonzero(among(board.state, _RAISABLE) & (board.held > 0) & (board.level < most(board)))

    some = Selection(boards, [able(board) for board in boards])
    sizes: Ints = some.stacked(lambda board: board.sizes, np.int64)
    errors: Floats = some.stacked(lambda board: board.errors, np.float64)
    refinable = Refinable(
        level=some.picked(lambda board: board.level, np.int64),
        top=some.picked(most, np.int64),
        sizes=sizes,
        errors=errors,
        tokens=some.picked(lambda board: board.tokens, np.int64),
        ready=some.picked(lambda board: board.state == _S.READY, np.bool_),
    )
    return refinable, some
