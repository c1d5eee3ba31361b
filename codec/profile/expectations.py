"""What a profile's token table says of a group's elements, computed on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from kvwire._forks import lock_of_process

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.profile.group import Group

ROWS_BYTES = 64 << 20
"""Memory of a profile for expected elements of tokens that were met before: most words of a text are frequent ones."""

_BLOCK = 128
"""Rows computed at a time: what float64 takes stays small against a chunk."""


class Expectations:
    """Expected elements of one group by token, computed on first use and kept while there is room.

    Several threads may ask at a time. The lock guards the slots alone. Rows are computed outside it, so two threads may
    compute the same row, and then get the same numbers. A row that has a slot never changes.
    """

    def __init__(self, group: Group, table: NDArray[np.int8], room_bytes: int) -> None:
        """Allocate no more than the room: a small file may claim a large vocabulary for each of many groups."""
        self._table = table
        self._mean = torch.from_numpy(group.mean).double()
        predictor = cast("Tensor", group.predictor)  # a group without one expects its mean
        self._predictor = predictor[: table.shape[1]].double()
        slots = len(table) if 4 * len(table) < room_bytes else 0
        capacity = min(slots, (room_bytes - 4 * slots) // (2 * group.width))
        self._kept = torch.empty(capacity, group.width, dtype=torch.bfloat16)
        self._slots = np.full(slots, -1, np.int32)
        self._used = 0
        self._lock = lock_of_process()

    def rows(self, token_ids: NDArray[np.int64]) -> Tensor:
        """Look up or compute the rows of some tokens."""
        if not len(self._slots):
            return self._compute(token_ids).float()
        with self._lock:
            slots = self._slots[token_ids]
        missing = token_ids[slots < 0]
        if not len(missing):
            return self._kept[torch.from_numpy(slots)].float()
        computed = self._compute(missing)
        self._keep(missing, computed)
        out = torch.empty(len(token_ids), self._kept.shape[1])
        out[torch.from_numpy(slots < 0)] = computed.float()
        out[torch.from_numpy(slots >= 0)] = self._kept[torch.from_numpy(slots[slots >= 0])].float()
        return out

    def kept(self, token_ids: NDArray[np.int64]) -> tuple[Tensor, NDArray[np.uint32]] | None:
        """Show the rows of some tokens where they are kept: nothing is copied."""
        if not len(self._slots):
            return None
        with self._lock:
            slots = self._slots[token_ids]
        if slots.min(initial=0) < 0:
            self.rows(np.unique(token_ids[slots < 0]))
            with self._lock:
                slots = self._slots[token_ids]
        return None if slots.min(initial=0) < 0 else (self._kept, slots.astype(np.uint32))

    def missing(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tell which rows there is still room to compute and keep."""
        if not len(self._slots):
            return token_ids[:0]
        with self._lock:
            return token_ids[self._slots[token_ids] < 0][: len(self._kept) - self._used]

    def _keep(self, token_ids: NDArray[np.int64], computed: Tensor) -> None:
        """Give rows a slot while there is room, but for those that another thread has kept by now."""
        with self._lock:
            fresh = np.flatnonzero(self._slots[token_ids] < 0)[: len(self._kept) - self._used]
            stop = self._used + len(fresh)
            self._kept[self._used : stop] = computed[torch.from_numpy(fresh)]
            self._slots[token_ids[fresh]] = np.arange(self._used, stop)
            self._used = stop

    def _compute(self, token_ids: NDArray[np.int64]) -> Tensor:
        """In float64 and rounded once, so that a token's row does not depend on those computed with it."""
        out = torch.empty(len(token_ids), len(self._mean), dtype=torch.bfloat16)
        for start in range(0, len(token_ids), _BLOCK):
            features = torch.from_numpy(self._table[token_ids[start : start + _BLOCK]]).double()
            out[start : start + _BLOCK] = torch.addmm(self._mean, features, self._predictor)
        return out
