"""Streams of a GPU, or nothing where Triton's kernels run in its interpreter: there, everything happens in order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch

from kvwire.errors import CorruptError, KvwireError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class StreamEvent:
    """A point in a queue, as ``torch.cuda.Event``: reached once everything queued before it is done."""

    def __init__(self, event: torch.cuda.Event | None = None, device: torch.device | None = None) -> None:
        """Keep the event.

        Args:
            event: None where there is nothing to wait for.
            device: Of the event.
        """
        self._event, self._device = event, device

    def wait(self) -> None:
        """Block until it is reached."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream | None = None) -> None:
        """Let a stream go on only once it is reached; the caller does not wait.

        Args:
            stream: None for the device's current one.
        """
        if self._event is not None:
            (stream or torch.cuda.current_stream(self._device)).wait_event(self._event)


class Queue:
    """A stream of a device."""

    def __init__(self, device: torch.device) -> None:
        """Open a stream; on the processor there is none."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self) -> AbstractContextManager[object]:
        """Enter the queue."""
        if self._stream is None:
            return nullcontext()
        return cast("AbstractContextManager[object]", torch.cuda.stream(self._stream))

    def record(self) -> StreamEvent:
        """Record this point."""
        return StreamEvent() if self._stream is None else StreamEvent(self._stream.record_event(), self._device)

    def after(self, event: StreamEvent) -> None:
        """Let what follows wait for an event of another queue."""
        event.hold(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Tell the allocator that this queue uses a tensor that was allocated for another."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def current_event(device: torch.device) -> StreamEvent:
    """Record this point of the caller's own stream."""
    return (
        StreamEvent(torch.cuda.current_stream(device).record_event(), device)
        if device.type == "cuda"
        else StreamEvent()
    )


MISCOUNTED, DAMAGED, STALLED = 1, 2, 3
"""What kernels say of a chunk, the worst counting: escapes and their list differ in number; a lane did not end as it
began; the level below never came."""


class Pending:
    """Chunks whose decoding is under way.

    Attributes:
        done: Reached when all are there.
        layers: Likewise for each layer of the cache; those of the first come first.
    """

    def __init__(self, done: StreamEvent, layers: list[StreamEvent], flags: list[tuple[Tensor, list[int]]]) -> None:
        """Keep what to wait for.

        Args:
            done: Reached when all are there.
            layers: Likewise for each layer of the cache.
            flags: int32 on the host, complete once done is reached, and the chunks that they are of.
        """
        self.done = done
        self.layers = layers
        self._flags = flags

    def wait(self) -> None:
        """Block until all is there; raises what went wrong with a chunk, whose output was then left alone."""
        self.done.wait()
        for flags, chunks in self._flags:
            for flag, chunk in zip(flags.tolist(), chunks, strict=True):
                if flag:
                    raise _failure(flag, chunk)


def _failure(flag: int, chunk: int) -> KvwireError:
    if flag == STALLED:
        msg = f"chunk {chunk}: the GPU gave up waiting for a level that never came; decode it with backend='numba'"
        return KvwireError(msg)
    if flag == MISCOUNTED:
        msg = "the segment's escape list decompresses to another length than it should; fetch it again"
        return CorruptError(msg)
    msg = "a lane of the entropy coder does not end in the state it began with; fetch the segment again"
    return CorruptError(msg)
