"""A batch of chunks on the device and its memory."""

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
    """Device memory of one batch, reused by the next but one; ``free`` is reached when it may be overwritten."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self.free = StreamEvent()
        self._memory: Tensor | None = None

    def take(self, sizes: Sequence[int], least: int, device: torch.device, queues: Sequence[Queue]) -> list[Tensor]:
        """Return aligned parts; reallocate on the current queue where the memory is too small."""
        rounded = [-(-size // _PART_ALIGN) * _PART_ALIGN for size in sizes]
        if self._memory is None or self._memory.numel() < sum(rounded):
            self._memory = None
            with torch.inference_mode(mode=False):  # later writes may run in any mode
                self._memory = torch.empty(max(least, sum(rounded)), dtype=torch.uint8, device=device)
            for queue in queues:
                queue.keep(self._memory)
        parts = torch.split(self._memory[: sum(rounded)], rounded)
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]


class UploadedBatch(NamedTuple):
    """A batch on the device.

    Attributes:
        staged: The batch on the host.
        buffer: The staged bytes.
        values: int16 or int32, ``[tokens, slots]`` for each chunk.
        progress: int32, see ``decode_kernels.decode_streams``.
        flags: int32 ``[chunks]``, 0 or the fault of each, see ``streams``.
        peaks: int32 ``[slots]``, the largest size of each slot's values.
        wide: int32 ``[chunks, groups]``, see ``decode_kernels.last_wide``.
        counts: int32, see ``decode_kernels.count_escapes``.
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
        """Return a part of the staged bytes by name."""
        return self.staged.of(self.buffer, name)
