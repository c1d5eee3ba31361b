"""Forward passes that another thread can stop between two layers."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from kvwire.engines.base import PassStoppedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_AHEAD = 2  # layers queued on a GPU: enough that it never waits


@contextmanager
def stoppable(layers: Iterable[torch.nn.Module], stop: threading.Event) -> Iterator[None]:
    """Let passes that this thread runs through some layers end soon after an event is set.

    Meanwhile at most two layers are queued on a GPU, since a queued layer cannot be cancelled.
    """
    gate = _Gate(stop)
    hooks = [layer.register_forward_pre_hook(gate.before, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Gate:
    """Runs before every layer, in passes of the thread that created it."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop, self._thread = stop, threading.get_ident()
        self._given: deque[torch.cuda.Event] = deque()

    def before(
        self, _module: torch.nn.Module, inputs: tuple[object, ...], named: dict[str, object] | None = None
    ) -> None:
        """Raise if the pass is to stop. named: missing if another thread removes the hook meanwhile."""
        if threading.get_ident() != self._thread:
            return
        states = inputs[0] if inputs else (named or {}).get("hidden_states")
        if isinstance(states, torch.Tensor) and states.is_cuda:
            self._wait(states.device)
        if self._stop.is_set():
            raise PassStoppedError("the pass was asked to stop")

    def _wait(self, device: torch.device) -> None:
        """Wait until the device is at most ``_AHEAD`` layers behind."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call] # as torch has it
        done.record(torch.cuda.current_stream(device))
        self._given.append(done)
        if len(self._given) > _AHEAD:
            self._given.popleft().synchronize()
