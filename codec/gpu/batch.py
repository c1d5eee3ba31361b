"""A batch of chunks on the device, and the memory that it lies in."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from kvwire.codec.gpu.streams import StreamEvent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.gpu.staging import DeviceBatch
    from kvwire.codec.gpu.streams import Queue

_PART_ALIGN = 64


class Workspace:
    """Device memory of one batch, kept for the next but one; ``free`` is reached when it may be written to."""

    def __init__(self) -> None:
        """Nothing is allocated before it is asked for."""
        self.free = StreamEvent()
        self._memory: Tensor | None = None

    def take(self, sizes: Sequence[int], least: int, device: torch.device, queues: Sequence[Queue]) -> list[Tensor]:
        """Parts of so many bytes, aligned; at least so much is allocated, on the queue that runs, for all of them."""
        rounded = [-(-size // _PART_ALIGN) * _PART_ALIGN for size in sizes]
        if self._memory is None or self._memory.numel() < sum(rounded):
            self._memory = None
            with torch.inference_mode(mode=False):  # what is kept must be writable in any mode
                self._memory = torch.empty(max(least, sum(rounded)), dtype=torch.uint8, device=device)
            for queue in queues:
                queue.keep(self._memory)
        parts = torch.split(self._memory[: sum(rounded)], rounded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class UploadedBatch(NamedTuple):
    """A batch on the device.

    buffer: the staged bytes. values: int16 or int32, ``[tokens, slots]`` for each chunk. progress, flags, peaks, wide,
    counts: int32, see ``decode_kernels``.
    """

    staged: DeviceBatch
    buffer: Tensor
    values: Tensor
    progress: Tensor
    flags: Tensor
    peaks: Tensor
    wide: Tensor
    counts: Tensor

    def part(self, name: str) -> Tensor:
        """A part of the staged bytes."""
        return self.staged.of(self.buffer, name)
