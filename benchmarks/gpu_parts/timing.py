"""Clocks and memory of a device: events on a GPU, the wall clock on a processor (for dry runs of the code alone)."""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_FLUSH_BYTES = 256 << 20
"""Written before every timed call: more than any GPU keeps in its caches."""


@dataclass(frozen=True)
class Effort:
    """How often a call is timed: at least ``least`` times, at most ``most``, ``budget_s`` seconds in between."""

    least: int = 5
    most: int = 30
    budget_s: float = 0.25
    warm_up: int = 2


@dataclass
class Device:
    """Where everything runs. On a processor figures mean nothing: it is there so that the code can be tried."""

    device: torch.device
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        """Allocate what flushes the caches."""
        self._flush = torch.zeros(_FLUSH_BYTES if self.cuda else 1, dtype=torch.uint8, device=self.device)

    @property
    def cuda(self) -> bool:
        """Whether it is a GPU."""
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        """Wait for everything under way."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def timed(self, calls: Sequence[Callable[[], object]], effort: Effort | None = None) -> dict[str, float]:
        """Milliseconds of a call: n, median, least, greatest and both quartiles.

        calls: the same work on different buffers, taken in turns, so that no input is still in a cache. The caches are
        overwritten before each call, outside of the time that is taken. Time runs on the device, from the moment the
        call is issued; a call that makes the device wait for the host is charged for it.
        """
        effort = effort or self.effort
        for index in range(effort.warm_up):
            calls[index % len(calls)]()
        self.synchronise()
        found: list[float] = []
        start = time.perf_counter()
        while len(found) < effort.least or (len(found) < effort.most and time.perf_counter() - start < effort.budget_s):
            found.append(self._once(calls[len(found) % len(calls)]))
        return spread(found)

    def _once(self, call: Callable[[], object]) -> float:
        self._flush.add_(1)
        self.synchronise()
        if not self.cuda:
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def peak_extra(self, call: Callable[[], object]) -> int:
        """Bytes of device memory that a call takes at most, beyond what was allocated before; 0 on a processor."""
        if not self.cuda:
            call()
            return 0
        self.synchronise()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        call()
        self.synchronise()
        return torch.cuda.max_memory_allocated(self.device) - before

    def allocated(self) -> int:
        """Bytes of device memory that tensors occupy; 0 on a processor."""
        self.synchronise()
        return torch.cuda.memory_allocated(self.device) if self.cuda else 0

    def free_bytes(self) -> int:
        """Bytes that can still be allocated, those that torch keeps for itself included."""
        if not self.cuda:
            return 1 << 33
        gc.collect()
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host that the device can fetch by itself."""
        host = tensor.cpu()
        return host.pin_memory() if self.cuda else host

    def facts(self) -> dict[str, Any]:
        """Name, memory and versions."""
        if not self.cuda:
            return {"name": "processor: a dry run, figures mean nothing"}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda or "",
            "hip": torch.version.hip or "",
        }


def spread(samples: Sequence[float]) -> dict[str, float]:
    """n, median, least, greatest, and the lower and upper quartile."""
    ordered = sorted(samples)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else ordered * 3
    return {
        "n": len(ordered),
        "median": statistics.median(ordered),
        "least": ordered[0],
        "greatest": ordered[-1],
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
    }


def wall(call: Callable[[], object], device: Device) -> dict[str, float]:
    """Milliseconds of a call by the host's clock, until the device has nothing left to do.

    Long calls are timed less often than ``Device.timed`` would; a first one is not counted.
    """
    call()
    found: list[float] = []
    start = time.perf_counter()
    while not found or (len(found) < device.effort.most and time.perf_counter() - start < device.effort.budget_s):
        device.synchronise()
        begin = time.perf_counter()
        call()
        device.synchronise()
        found.append(1e3 * (time.perf_counter() - begin))
    return spread(found)
