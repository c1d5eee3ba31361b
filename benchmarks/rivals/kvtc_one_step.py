"""KVTC's transform with one quantiser step for all components and no bit allocation: nobody's codec, a harder rival.

Where DEFLATE follows, one step is what theory advises, and no coefficient is ever clipped, which helps on text unlike
the calibration's. A code is a byte, so that DEFLATE sees symbols rather than packed bits; components that are zero
throughout a document are left out. Large codes have a second byte, in a plane of its own. All else is as in ``kvtc``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rivals.kvtc import Side

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rivals.kvtc import Calibrated
    from torch import Tensor

_LARGEST = 2**15 - 1
_COUNT = "<I"


@dataclass(frozen=True)
class OneStep:
    """step: the distance between values, in units of the coefficients."""

    step: float

    def encode(self, coefficients: Tensor) -> bytes:
        """How many components are kept, then low and then high bytes of their codes, component by component."""
        codes = torch.round(coefficients / self.step).clamp(-_LARGEST, _LARGEST).to(torch.int32)
        used = codes.any(0).nonzero()
        kept = int(used.max()) + 1 if len(used) else 0
        unsigned = torch.where(codes < 0, -2 * codes - 1, 2 * codes)[:, :kept].T.numpy().astype("<u2")
        planes = [(unsigned & 255).astype(np.uint8), (unsigned >> 8).astype(np.uint8)]
        return struct.pack(_COUNT, kept) + planes[0].tobytes() + planes[1].tobytes()

    def decode(self, data: bytes, tokens: int) -> Tensor:
        """The inverse, up to the last component kept."""
        (kept,) = struct.unpack_from(_COUNT, data)
        low, high = np.frombuffer(data, np.uint8, offset=struct.calcsize(_COUNT)).reshape(2, -1).astype(np.int32)
        unsigned = low + 256 * high
        codes = np.where(unsigned % 2, -(unsigned + 1) // 2, unsigned // 2).astype(np.float32)
        return torch.from_numpy(codes).reshape(kept, tokens).T * self.step


def fit(calibrated: tuple[Calibrated, Calibrated], steps: Sequence[float]) -> dict[float, tuple[Side, Side]]:
    """Keys' and values' coding for each step, in units of the root mean square of a centred element."""
    keys, values = ([Side(side.basis, OneStep(step * _deviation(side))) for step in steps] for side in calibrated)
    return dict(zip(steps, zip(keys, values, strict=True), strict=True))


def _deviation(side: Calibrated) -> float:
    return float((side.sample.square().sum(1).mean() / side.width).sqrt())
