"""What else could travel: the raw cache, or int8; and what the device itself reaches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gpu_parts.timing import Device
    from kvwire.types import KVCache

_STAGING_BYTES = 1 << 28
"""Pinned memory for what travels unencoded: larger caches go through it piece by piece, each piece anew."""
_COPY_BYTES = 1 << 30
_MATRIX = 8192


def tensors_of(cache: KVCache) -> list[Tensor]:
    """Every tensor of a cache, keys first."""
    return [*cache.keys, *cache.values]


def copy_cases(source: KVCache, target: KVCache) -> list[Callable[[], object]]:
    """A device-to-device copy of the whole cache, both ways: neither side is what was read last."""

    def copied(a: KVCache, b: KVCache) -> Callable[[], object]:
        return lambda: torch._foreach_copy_(tensors_of(b), tensors_of(a))

    return [copied(source, target), copied(target, source)]


class Upload:
    """Bytes from pinned host memory to the device, in pieces of up to 256 MB."""

    def __init__(self, total: int, device: Device) -> None:
        """Allocate both ends."""
        self._total = total
        size = min(total, _STAGING_BYTES)
        self._host = device.pinned(torch.randint(0, 256, (size,), dtype=torch.uint8))
        self._target = torch.empty(size, dtype=torch.uint8, device=device.device)

    def __call__(self) -> None:
        """Copy everything."""
        left = self._total
        while left > 0:
            size = min(left, len(self._host))
            self._target[:size].copy_(self._host[:size], non_blocking=True)
            left -= size


def quantise_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """int8 ``[heads, tokens, dim]`` and float32 scales ``[heads, tokens, 1]``: each token and head has its own."""
    values = tensor.float()
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scale).round().to(torch.int8), scale


def dequantise_int8(quantised: Sequence[tuple[Tensor, Tensor]], out: Sequence[Tensor]) -> None:
    """The inverse, into bfloat16 tensors: one product a tensor, rounded once."""
    for (values, scale), target in zip(quantised, out, strict=True):
        torch.mul(values, scale, out=target)


def int8_bytes(quantised: Sequence[tuple[Tensor, Tensor]]) -> int:
    """What travels: a byte an element, a float16 scale."""
    return sum(values.numel() + 2 * scale.numel() for values, scale in quantised)


def copy_rate(device: Device) -> dict[str, Any]:
    """GB/s that a device-to-device copy moves, bytes read and bytes written both counted; and its milliseconds."""
    size = _COPY_BYTES if device.cuda else 1 << 16
    buffers = [torch.zeros(size, dtype=torch.uint8, device=device.device) for _ in range(4)]
    cases = [lambda a=a, b=b: b.copy_(a) for a, b in ((buffers[0], buffers[1]), (buffers[2], buffers[3]))]
    return _rate(device.timed(cases), 2 * size, "gb_s", 1e9)


def upload_rate(device: Device) -> dict[str, Any]:
    """GB/s from pinned host memory."""
    size = _STAGING_BYTES if device.cuda else 1 << 16
    return _rate(device.timed([Upload(size, device)]), size, "gb_s", 1e9)


def matmul_rate(device: Device) -> dict[str, Any]:
    """TFLOP/s of a large bfloat16 product."""
    side = _MATRIX if device.cuda else 64
    pairs = [[torch.randn(side, side, device=device.device, dtype=torch.bfloat16) for _ in range(2)] for _ in range(2)]
    out = torch.empty(side, side, device=device.device, dtype=torch.bfloat16)
    cases = [lambda a=a, b=b: torch.matmul(a, b, out=out) for a, b in pairs]
    return _rate(device.timed(cases), 2 * side**3, "tflop_s", 1e12)


def _rate(ms: dict[str, float], work: float, name: str, unit: float) -> dict[str, Any]:
    return {name: work / ms["median"] * 1e3 / unit, "ms": ms}
