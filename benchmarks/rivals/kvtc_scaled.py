"""KVTC with the quantiser as published: groups of components that carry a scale of their own for every token.

Groups of 1 to 1024 neighbouring components; each is left out, or coded in 2 or 4 bits between its least and greatest
coefficient at that token (two float16 in the stream), or cast to 8-bit floats (e4m3, no scale). Dynamic programming
chooses the groups, their types and so the rank, the 32 bits of a scale counted. Everything else is as in ``kvtc``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from rivals.kvtc import Choice, Side, allocate
from rivals.layout import from_half, pack, packed_bytes, to_half, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rivals.kvtc import Calibrated
    from torch import Tensor

SIZES = (1, 16, 64, 256, 1024)
INTEGER_BITS = (2, 4)
FLOAT_BITS = 8
SCALE_BYTES = 4
ALIGNMENT = 16
"""Groups of more than one component start at multiples of this: a finer grid costs time and gains next to nothing."""
SAMPLE_TOKENS = 256
"""Tokens on which a plan is judged: every group at every place is tried."""
_FLOAT8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class ScaledQuantiser:
    """plan: the groups that have bits, in order."""

    plan: tuple[Choice, ...]

    def encode(self, coefficients: Tensor) -> bytes:
        """Group by group: scales, then codes."""
        return b"".join(encode_group(coefficients[:, run.start : run.stop], run.bits) for run in self.plan)

    def decode(self, data: bytes, tokens: int) -> Tensor:
        """The inverse, up to the last component that has bits."""
        out = torch.zeros(tokens, max((run.stop for run in self.plan), default=0))
        start = 0
        for run in self.plan:
            stop = start + group_bytes(run.stop - run.start, run.bits, tokens)
            out[:, run.start : run.stop] = decode_group(data[start:stop], tokens, run.stop - run.start, run.bits)
            start = stop
        assert start == len(data), "a stream must be read to its end"
        return out


def group_bytes(size: int, bits: int, tokens: int = 1) -> int:
    """Bytes of a group."""
    if bits in {0, FLOAT_BITS}:
        return size * tokens * bits // 8
    return SCALE_BYTES * tokens + packed_bytes(bits, size * tokens)


def encode_group(part: Tensor, bits: int) -> bytes:
    """``[tokens, size]`` in 2, 4 or 8 bits."""
    if bits == FLOAT_BITS:
        limit = torch.finfo(_FLOAT8).max
        return part.T.clamp(-limit, limit).to(_FLOAT8).contiguous().view(torch.uint8).numpy().tobytes()
    least = to_half(part.amin(1))
    step = to_half((part.amax(1) - part.amin(1)) / (2**bits - 1))
    low, size = from_half(least, (-1, 1)), from_half(step, (-1, 1))
    codes = torch.round((part - low) / torch.where(size == 0, torch.ones_like(size), size)).clamp(0, 2**bits - 1)
    return least + step + pack(codes.T.contiguous().numpy().astype(np.uint8).ravel(), bits)


def decode_group(data: bytes, tokens: int, size: int, bits: int) -> Tensor:
    """The inverse, float32 ``[tokens, size]``."""
    if bits == FLOAT_BITS:
        return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(_FLOAT8).float().reshape(size, tokens).T
    low, step = from_half(data[: 2 * tokens], (-1, 1)), from_half(data[2 * tokens : 4 * tokens], (-1, 1))
    codes = unpack(data[4 * tokens :], bits, size * tokens).astype(np.float32).reshape(size, tokens)
    return torch.from_numpy(codes).T * step + low


def choices(sample: Tensor) -> Iterator[Choice]:
    """Every group that a plan may use, with its squared error for each token; sample ``[tokens, components]``."""
    components = sample.shape[1]
    energy = sample.square().mean(0)
    for start in range(components):
        yield Choice(start, start + 1, 0, 0, float(energy[start]))
        for size in SIZES:
            stop = start + size
            if stop > components or (size > 1 and start % ALIGNMENT):
                continue
            part = sample[:, start:stop]
            for bits in (FLOAT_BITS,) if size == 1 else (*INTEGER_BITS, FLOAT_BITS):
                error = float(
                    (decode_group(encode_group(part, bits), len(part), size, bits) - part).square().mean(0).sum()
                )
                yield Choice(start, stop, bits, group_bytes(size, bits), error)


def fit(calibrated: tuple[Calibrated, Calibrated], budgets: Sequence[float]) -> dict[float, tuple[Side, Side]]:
    """Keys' and values' coding for each budget in bits for each element before DEFLATE."""
    keys, values = (fit_side(side, budgets) for side in calibrated)
    return dict(zip(budgets, zip(keys, values, strict=True), strict=True))


def fit_side(side: Calibrated, budgets: Sequence[float]) -> list[Side]:
    """The coding of keys, or values, for each budget."""
    sample = side.sample[:: max(1, len(side.sample) // SAMPLE_TOKENS)]
    plans = allocate(choices(sample), sample.shape[1], [round(budget * side.width / 8) for budget in budgets])
    return [Side(side.basis, ScaledQuantiser(tuple(c for c in plan if c.bits))) for plan in plans]
