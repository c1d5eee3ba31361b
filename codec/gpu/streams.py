"""GPU streams and events; they do nothing in Triton's interpreter, where everything runs in order."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch

from kvwire.errors import CorruptError, KvwireError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor


class StreamEvent:
    """A point in a stream, as ``torch.cuda.Event``: reached once everything queued before it is done."""

    def __init__(self, event: torch.cuda.Event | None = None, device: torch.device | None = None) -> None:
        """Wrap a CUDA event.

        Args:
            event: None where there is nothing to wait for.
            device: Device of the event.
        """
        self._event, self._device = event, device

    def wait(self) -> None:
        """Block until the event is reached."""
        if self._event is not None:
            self._event.synchronize()

    def hold(self, stream: torch.cuda.Stream | None = None) -> None:
        """Make a stream wait for the event; the caller does not wait.

        Args:
            stream: None for the device's current stream.
        """
        if self._event is not None:
            (stream or torch.cuda.current_stream(self._device)).wait_event(self._event)


class Queue:
    """A stream of a GPU; without effect on the processor."""

    def __init__(self, device: torch.device) -> None:
        """Open a stream."""
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self) -> AbstractContextManager[object]:
        """Return a context in which work is queued on this stream."""
        if self._stream is None:
            return nullcontext()
        return cast("AbstractContextManager[object]", torch.cuda.stream(self._stream))

    def record(self) -> StreamEvent:
        """Record an event after the work queued so far."""
        return StreamEvent() if self._stream is None else StreamEvent(self._stream.record_event(), self._device)

    def after(self, event: StreamEvent) -> None:
        """Make later work wait for an event of another queue."""
        event.hold(self._stream)

    def keep(self, tensor: Tensor) -> None:
        """Tell the allocator that this queue uses a tensor allocated on another."""
        if self._stream is not None:
            tensor.record_stream(self._stream)


def current_event(device: torch.device) -> StreamEvent:
    """Record an event on the caller's current stream."""
    return (
        StreamEvent(torch.cuda.current_stream(device).record_event(), device)
        if device.type == "cuda"
        else StreamEvent()
    )


MISCOUNTED, DAMAGED, STALLED = 1, 2, 3
"""Flags of a chunk, the worst one wins: escapes and their list differ in number; a lane does not end in the state it
began with; the level below never came."""


class Pending:
    """Chunks that are being decoded.

    Attributes:
        done: Reached when all chunks are decoded.
        layers: For each layer of the cache, reached when all chunks are decoded in it; first layers come first.
    """

    def __init__(self, done: StreamEvent, layers: list[StreamEvent], flags: list[tuple[Tensor, list[int]]]) -> None:
        """Take the events and flags to wait for.

        Args:
            done: As the attribute.
            layers: As the attribute.
            flags: int32 ``[chunks]`` on the host, complete once ``done`` is reached, with the chunks' indices.
        """
        self.done = done
        self.layers = layers
        self._flags = flags

    def wait(self) -> None:
        """Block until all chunks are decoded.

        Raises:
            CorruptError: A chunk is damaged; its output is unchanged.
            KvwireError: A kernel gave up waiting for a level.
        """
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
