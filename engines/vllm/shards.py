"""Tensor-parallel workers of one model: the first one gets the heads of all, over a group of their own.

The group is made of processors' memory alone, so that it meets none of vLLM's own communication, and is used by one
thread of each worker, in the same order everywhere.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist

from kvwire.errors import KvwireError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

T = TypeVar("T")
_WAIT = timedelta(days=7)
"""Longest wait for the first worker, which may wait for a store; a worker whose process dies is noticed at once."""


class Shards:
    """One worker's end of the group: ``rank`` is its place among ``count`` workers."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Join the group; all its workers do so at the same time."""
        self._first = ranks[0]
        self._group = dist.new_group(list(ranks), timeout=_WAIT, backend="gloo", use_local_synchronization=True)
        self.rank, self.count = dist.get_rank(self._group), len(ranks)
        self._is_broken = False

    def agree(self, is_ready: bool) -> bool:  # noqa: FBT001 - the one thing that is said
        """Whether all workers are ready; each of them calls it."""

        def ask() -> bool:
            word = torch.tensor([int(is_ready)])
            dist.all_reduce(word, dist.ReduceOp.MIN, group=self._group)
            return bool(word.item())

        return self._together(ask)

    def gather(self, own: Tensor, copies: int = 1) -> Tensor | None:
        """Join a tensor of each worker; each of them calls it."""

        def collect() -> Tensor | None:
            data = own.contiguous().view(torch.uint8)
            parts = [torch.empty_like(data) for _ in range(self.count)] if self.rank == 0 else None
            dist.gather(data, parts, dst=self._first, group=self._group)
            return torch.cat([part.view(own.dtype) for part in parts[::copies]]) if parts else None

        return self._together(collect)

    def _together(self, call: Callable[[], T]) -> T:
        """Do what all do. Who fails leaves the group, so that nobody waits for it, now or later."""
        if self._is_broken:
            msg = "vLLM's workers are out of step since one failed while saving; its log says why: restart vLLM"
            raise KvwireError(msg)
        try:
            return call()
        except BaseException:
            self._is_broken = True
            dist.destroy_process_group(self._group)
            raise
