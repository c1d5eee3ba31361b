"""Chunks of several documents side by side, as policies see them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvwire.controller.document_state import ChunkState, among
from kvwire.controller.policies.base import Columns, UpgradeCandidates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.policies.base import Flags, Floats, Ints

_S = ChunkState
_RAISABLE = (_S.FETCHING, _S.ARRIVED, _S.DECODING, _S.READY, _S.REFINING, _S.REFINED, _S.REDECODING)


class ChunkTable:
    """All chunks of some documents; n in all. What never changes is laid out once, and again for other variants.

    Attributes:
        where: Position of each one's document in the list ``[n]``.
        chunk: Its number there ``[n]``.
    """

    def __init__(self, docs: Sequence[DocumentState]) -> None:
        """Lay out what never changes.

        Args:
            docs: States of the documents.
        """
        self._boards = docs
        counts = [doc.count for doc in docs]
        levels = max((len(doc.sizes) for doc in docs), default=1)
        self.where: Ints = np.repeat(np.arange(len(docs)), counts)
        self.chunk: Ints = np.concatenate([np.arange(0), *(np.arange(count) for count in counts)])
        self._document: Ints = np.array([*(doc.number for doc in docs), 0])[self.where]
        self._finest: Ints = np.array([*(doc.finest for doc in docs), 0])[self.where]
        self._layered: Flags = np.array([*(doc.input.layered for doc in docs), False])[self.where]
        self._tokens: Ints = self._joined("tokens", np.int64)
        self._context: Ints = self._joined("context", np.int64)
        self._exact_error: Floats = self._joined("exact_error", np.float64)
        self._sizes: Ints = self._stacked("sizes", levels, np.int64)
        self._errors: Floats = self._stacked("errors", levels, np.float64)

    def _joined(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """Rows ``[its chunks]`` of all documents ``[n]``."""
        return np.concatenate([np.zeros(0, dtype), *(getattr(doc, name) for doc in self._boards)])

    def _stacked(self, name: str, levels: int, dtype: type[np.generic]) -> NDArray[Any]:
        """Rows ``[own levels, its chunks]`` of all documents, the last level repeated ``[levels, n]``."""
        parts = [getattr(doc, name) for doc in self._boards]
        grown = [part[np.minimum(np.arange(levels), len(part) - 1)] for part in parts]
        return np.concatenate([np.zeros((levels, 0), dtype), *grown], axis=1)

    def open(self, prefix_s: dict[int, float]) -> tuple[Columns, Ints]:
        """Chunks that nothing was started for, and which of all they are.

        Args:
            prefix_s: Seconds of computing prefix layers that documents still need, by number.

        Returns:
            The chunks as columns, and their positions among all.
        """
        picked = np.flatnonzero(self._joined("state", np.uint8) == _S.PLANNED)
        columns = Columns(
            document=self._document[picked],
            chunk=self.chunk[picked],
            tokens=self._tokens[picked],
            context=self._context[picked],
            sizes=self._sizes[:, picked],
            errors=self._errors[:, picked],
            top=self._joined("top", np.int64)[picked],
            finest=self._finest[picked],
            exact_error=self._exact_error[picked],
            can_text=self._joined("can_text", np.bool_)[picked],
            prefix_s=np.array([*(prefix_s.get(doc.number, 0.0) for doc in self._boards), 0.0])[self.where[picked]],
            layered=self._layered[picked],
        )
        return columns, picked

    def refinable(self, ceiling: int | None) -> tuple[UpgradeCandidates, Ints]:
        """Chunks of layered blobs that have a finer level than was asked for, up to a ceiling; and which they are.

        Args:
            ceiling: Finest level that is worth waiting for; None: any.

        Returns:
            The candidates, and their positions among all chunks.
        """
        state, level = self._joined("state", np.uint8), self._joined("level", np.int64)
        top = self._joined("top", np.int64)
        most = top if ceiling is None else np.minimum(top, ceiling)
        held = self._joined("held", np.int64) > 0
        picked = np.flatnonzero(self._layered & held & (level < most) & among(state, _RAISABLE))
        refinable = UpgradeCandidates(
            level=level[picked],
            top=most[picked],
            sizes=self._sizes[:, picked],
            errors=self._errors[:, picked],
            tokens=self._tokens[picked],
            ready=state[picked] == _S.READY,
        )
        return refinable, picked
