"""KVTC-like (NVIDIA, arXiv 2511.01815): un-rotated keys, PCA over all layers, bits allocated by dynamic programming.

Keys and values have a basis each, fitted offline on calibration caches over all layers and heads at once. Bits go to
groups of principal components so that the squared error on the calibration caches is least within a budget; none at all
is allowed. The codes are packed and deflated. The first 4 tokens, and the last ``tail``, stay in bfloat16 (the paper's
tail is 128). Like kvwire's profile, basis and allocation are shared by all documents and not counted.

Here a component has a fixed quantiser, fitted offline too, so that a document sends nothing but codes: the reading of
the paper that is kindest to it at low rates. ``kvtc_scaled`` is the quantiser as published, with scales in the stream.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from rivals.layout import as_matrix, from_bfloat16, from_matrix, pack, packed_bytes, rebuilt, to_bfloat16, unpack

from kvwire.codec import positions_off, positions_on

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire import KVCache

SINKS = 4
"""First tokens, which attention leans on: raw in the stream, left out of the calibration."""
GROUP = 8
"""Neighbouring components that share a number of bits; so a budget counts whole bytes for each token."""
MOST_BITS = 8
SAMPLE_TOKENS = 2048
"""Tokens on which quantisers and allocations are judged."""
_SPANS = (0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.4, 2.8, 3.3, 4.0, 5.0, 6.5)
"""Half-widths of a quantiser, in standard deviations, of which each component takes the best."""


class Quantiser(Protocol):
    """Coefficients ``[tokens, components]`` to bytes and back."""

    def encode(self, coefficients: Tensor) -> bytes:
        """All tokens at once."""

    def decode(self, data: bytes, tokens: int) -> Tensor:
        """The inverse, float32 ``[tokens, components]``."""


@dataclass(frozen=True)
class Basis:
    """mean: ``[width]``. vectors: ``[width, rank]``, orthonormal columns, the strongest first."""

    mean: Tensor
    vectors: Tensor

    def analyse(self, matrix: Tensor) -> Tensor:
        """Coefficients ``[tokens, rank]`` of elements ``[tokens, width]``."""
        return (matrix - self.mean) @ self.vectors

    def synthesise(self, coefficients: Tensor) -> Tensor:
        """Elements from the first coefficients."""
        return coefficients @ self.vectors[:, : coefficients.shape[1]].T + self.mean


@dataclass(frozen=True)
class Side:
    """How keys, or values, are coded."""

    basis: Basis
    quantiser: Quantiser


@dataclass(frozen=True)
class Choice:
    """Coding components ``start`` to ``stop`` with so many bits each: bytes for each token, squared error."""

    start: int
    stop: int
    bits: int
    cost: int
    error: float


@dataclass(frozen=True)
class Calibrated:
    """One side's basis, and the coefficients ``[tokens, rank]`` of some calibration tokens."""

    basis: Basis
    sample: Tensor

    @property
    def width(self) -> int:
        """Elements for one token."""
        return len(self.basis.mean)


def calibrate(caches: Sequence[KVCache]) -> tuple[Calibrated, Calibrated]:
    """Keys' and values' bases from calibration caches; the sinks, which stay raw, do not count."""
    off = [positions_off(cache) for cache in caches]
    keys = torch.cat([as_matrix(cache.keys)[SINKS:] for cache in off])
    values = torch.cat([as_matrix(cache.values)[SINKS:] for cache in off])
    return _calibrate_side(keys), _calibrate_side(values)


def _calibrate_side(matrix: Tensor) -> Calibrated:
    basis = fit_basis(matrix)
    return Calibrated(basis, basis.analyse(matrix[:: max(1, len(matrix) // SAMPLE_TOKENS)]))


def fit_basis(matrix: Tensor) -> Basis:
    """Principal components of ``[tokens, width]``, through the smaller of the two Gram matrices, in float64."""
    mean = matrix.mean(0)
    centred = (matrix - mean).double()
    tall = len(centred) >= centred.shape[1]
    energies, vectors = torch.linalg.eigh(centred.T @ centred if tall else centred @ centred.T)
    kept = energies.flip(0) > 1e-12 * energies[-1].clamp(min=1e-30)
    vectors = vectors.flip(1)[:, kept]
    if not tall:
        vectors = torch.nn.functional.normalize(centred.T @ vectors, dim=0)
    return Basis(mean, vectors.float().contiguous())


def allocate(choices: Iterable[Choice], components: int, budgets: Sequence[int]) -> list[list[Choice]]:
    """For each budget (bytes for each token) the choices that cover all components with the least error, in order.

    Exact, by dynamic programming over (components covered, bytes spent). Leaving a component out must be a choice.
    """
    most = max(budgets)
    ordered = sorted(choices, key=lambda choice: choice.stop)
    error = np.full((components + 1, most + 1), np.inf)
    chosen = np.full((components + 1, most + 1), -1, np.int32)
    error[0] = 0
    for index, choice in enumerate(ordered):
        if choice.cost > most:
            continue
        found = error[choice.start, : most + 1 - choice.cost] + choice.error
        better = found < error[choice.stop, choice.cost :]
        error[choice.stop, choice.cost :][better] = found[better]
        chosen[choice.stop, choice.cost :][better] = index
    return [_walk_back(ordered, chosen, components, budget) for budget in budgets]


def _walk_back(ordered: list[Choice], chosen: NDArray[np.int32], components: int, budget: int) -> list[Choice]:
    path: list[Choice] = []
    while components:
        path.append(ordered[chosen[components, budget]])
        components, budget = path[-1].start, budget - path[-1].cost
    return path[::-1]


def fit_quantisers(sample: Tensor) -> tuple[Tensor, Tensor]:
    """The best step of each component at 1 to 8 bits, and its squared error for each token.

    sample: ``[tokens, components]``. Returns two float32 ``[8, components]``.
    """
    deviation = sample.square().mean(0).sqrt().clamp(min=1e-20)
    steps, errors = [], []
    for bits in range(1, MOST_BITS + 1):
        tried = torch.stack([deviation * (2 * span / 2**bits) for span in _SPANS])
        found = torch.stack([(sample - _value(_code(sample, s, bits), s, bits)).square().mean(0) for s in tried])
        error, best = found.min(0)
        steps.append(tried.gather(0, best[None])[0])
        errors.append(error)
    return torch.stack(steps), torch.stack(errors)


def _code(coefficients: Tensor, step: Tensor, bits: int) -> Tensor:
    """0 to 2^bits - 1, cells of one width on both sides of zero."""
    half = 2 ** (bits - 1)
    return (torch.floor(coefficients / step) + half).clamp(0, 2**bits - 1)


def _value(codes: Tensor, step: Tensor, bits: int) -> Tensor:
    """The middle of a cell."""
    return (codes - (2 ** (bits - 1) - 0.5)) * step


@dataclass(frozen=True)
class FixedQuantiser:
    """Uniform, with the step of each component fixed offline.

    plan: which components get how many bits. steps: ``[8, components]``, from ``fit_quantisers``.
    """

    plan: tuple[Choice, ...]
    steps: Tensor

    def encode(self, coefficients: Tensor) -> bytes:
        """Component by component, so that DEFLATE sees like with like."""
        parts = []
        for run in self.plan:
            step = self.steps[run.bits - 1, run.start : run.stop]
            codes = _code(coefficients[:, run.start : run.stop], step, run.bits)
            parts.append(pack(codes.T.contiguous().numpy().astype(np.uint8).ravel(), run.bits))
        return b"".join(parts)

    def decode(self, data: bytes, tokens: int) -> Tensor:
        """The inverse, up to the last component that has bits."""
        out = torch.zeros(tokens, max((run.stop for run in self.plan), default=0))
        start = 0
        for run in self.plan:
            count = tokens * (run.stop - run.start)
            stop = start + packed_bytes(run.bits, count)
            codes = unpack(data[start:stop], run.bits, count).astype(np.float32).reshape(run.stop - run.start, tokens)
            step = self.steps[run.bits - 1, run.start : run.stop]
            out[:, run.start : run.stop] = _value(torch.from_numpy(codes).T, step, run.bits)
            start = stop
        assert start == len(data), "a stream must be read to its end"
        return out


def fit(calibrated: tuple[Calibrated, Calibrated], budgets: Sequence[float]) -> dict[float, tuple[Side, Side]]:
    """Keys' and values' coding for each budget in bits for each element before DEFLATE."""
    keys, values = (fit_side(side, budgets) for side in calibrated)
    return dict(zip(budgets, zip(keys, values, strict=True), strict=True))


def fit_side(side: Calibrated, budgets: Sequence[float]) -> list[Side]:
    """The coding of keys, or values, for each budget."""
    components = side.sample.shape[1]
    steps, errors = fit_quantisers(side.sample)
    every = torch.cat([side.sample.square().mean(0)[None], errors]).double().numpy()
    choices = [
        Choice(start, stop, bits, packed_bytes(bits, stop - start), float(every[bits, start:stop].sum()))
        for start in range(0, components, GROUP)
        for stop in [min(start + GROUP, components)]
        for bits in range(MOST_BITS + 1)
    ]
    plans = allocate(choices, components, [round(budget * side.width / 8) for budget in budgets])
    return [Side(side.basis, FixedQuantiser(tuple(c for c in plan if c.bits), steps)) for plan in plans]


def roundtrip(cache: KVCache, sides: tuple[Side, Side], tail: int = 0) -> tuple[bytes, KVCache]:
    """The stream and what it decodes to, float32, positions on. tail: last tokens that stay in bfloat16."""
    off = positions_off(cache)
    first = min(SINKS, cache.tokens)
    last = max(first, cache.tokens - tail)
    stream, decoded = b"", []
    for side, tensors in zip(sides, (off.keys, off.values), strict=True):
        matrix = as_matrix(tensors)
        raw = [to_bfloat16(matrix[:first]), to_bfloat16(matrix[last:])]
        coded = zlib.compress(side.quantiser.encode(side.basis.analyse(matrix[first:last])), 9)
        middle = side.quantiser.decode(zlib.decompress(coded), last - first)
        ends = [from_bfloat16(data, (-1, matrix.shape[1])) for data in raw]
        decoded.append(from_matrix(torch.cat([ends[0], side.basis.synthesise(middle), ends[1]]), tensors))
        stream += b"".join([*raw, coded])
    return stream, positions_on(rebuilt(off, *decoded), cache.meta.offset)
