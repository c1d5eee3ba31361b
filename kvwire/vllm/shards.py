"""Tensor-parallel workers of one model: the first one gets the heads of all, over a group of their own.

The group is made of processors' memory alone, so that it meets none of vLLM's own communication, and is used by one
thread of each worker, in the same order everywhere.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_WAIT = timedelta(days=7)
"""Longest wait for the first worker, which may wait for a store; a worker that dies is noticed at once."""


class Shards:
    """One worker's end of the group.

    Attributes:
        rank: This worker's place among them.
        count: How many there are.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        """Join the group; all its workers do so at the same time.

        Args:
            ranks: Of the workers in ``torch.distributed``, in the order of their heads.
        """
        self._first = ranks[0]
        self._group = dist.new_group(list(ranks), timeout=_WAIT, backend="gloo", use_local_synchronization=True)
        self.rank, self.count = dist.get_rank(self._group), len(ranks)

    def agree(self, is_ready: bool) -> bool:  # noqa: FBT001 - the one thing that is said
        """Whether all workers are ready; each of them calls it.

        Args:
            is_ready: Whether this one is.

        Returns:
            The same in every worker.
        """
        word = torch.tensor([int(is_ready)])
        dist.all_reduce(word, dist.ReduceOp.MIN, group=self._group)
        return bool(word.item())

    def gather(self, own: Tensor) -> list[Tensor]:
        """Collect a tensor of each worker; each of them calls it.

        Args:
            own: This one's, in the processor's memory, of the same shape and dtype everywhere.

        Returns:
            All of them, in the order of their heads; in other workers than the first nothing.
        """
        data = own.contiguous().view(torch.uint8)
        parts = [torch.empty_like(data) for _ in range(self.count)] if self.rank == 0 else None
        dist.gather(data, parts, dst=self._first, group=self._group)
        return [part.view(own.dtype) for part in parts or ()]
