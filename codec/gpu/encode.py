"""Encode layered levels on the cache's device, many chunks at a time.

The host receives sizes, class lists, escapes and words and packs the segments; all else stays on the device. Equal
quantised values give the same bytes as on the processor. Sums run in another order, so a rare value may differ by one.

The host waits for the device up to six times a batch: for tokens whose coefficients are too large for bfloat16, for
errors and checks, for class lists, for escapes if there are any, for the lanes' lengths, and for the words.
"""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire.codec.backend import interpreted
from kvwire.codec.entropy.rans import Lanes, lanes_for
from kvwire.codec.entropy.tables import ALPHABET, CLASSES, CONTEXTS, FINEST_SCALE, GRID_PER_LEVEL, LARGEST
from kvwire.codec.format.pack import EncodedSegment
from kvwire.codec.format.segment import pack_segment
from kvwire.codec.gpu import encode_kernels as kernels
from kvwire.codec.gpu.analysis import Transform
from kvwire.codec.gpu.profile import on_device
from kvwire.codec.transform.analysis import gather_planes
from kvwire.codec.transform.levels import RATIO, quantise
from kvwire.codec.workers import map_parallel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.gpu.analysis import Span
    from kvwire.codec.gpu.profile import DeviceProfile
    from kvwire.codec.prediction.text import TextPredictor
    from kvwire.codec.transform.levels import Ladder
    from kvwire.types import KVCache


_LANE_BLOCK = 64
"""Lanes of a program, one per thread: two warps of 32 threads, or one of 64."""
_WORD_BLOCK = 128
COLUMN_BLOCK = 128
ROW_BLOCK = 4
_ROWS = 1024
"""Tokens quantised at a time: their float32 copy stays small compared with the batch."""
WORKING_BYTES = 1 << 30
"""Bytes of device memory for a batch's working set, besides cache and profile: enough lanes to keep a GPU busy.
A single chunk may take more."""
WORKING_SHARE = 0.15
"""The same as a share of the cache's bytes, where that is more."""


def encode_batch(batch: Batch, known: DeviceProfile, threads: int | None) -> list[list[tuple[bytes, int]]]:
    """Encode a batch into segments and symbol counts ``[chunk][level]``; escapes become 0 in ``batch.symbols``."""
    chunks, levels, columns = batch.classes.shape
    rows = _rows(batch.classes)
    escapes = _mark_escapes(batch, rows[:, 0].contiguous(), known)
    counts = torch.cat([(rows >= 0).sum(2).flatten(), escapes.sum(1)]).cpu().numpy()  # the host waits
    entry, codes = torch.stack([batch.entry, batch.codes]).cpu().numpy()
    listed = _escaped_values(batch, counts[chunks * levels :])
    described = _stream_table(batch, counts[: chunks * levels])
    coded = (rows >= 0).flatten().nonzero()[:, 0]
    of_column = (coded % max(1, columns)).int()
    lanes = encode_streams(batch.symbols, levels * columns, described, of_column, rows.flatten()[coded], known.packed)

    def packed(stream: int) -> tuple[bytes, int]:
        chunk, level = divmod(stream, levels)
        classes = np.where(entry[chunk] == level, codes[chunk], 0)[entry[chunk] >= level].astype(np.uint8)
        escaped = b"" if level else listed[chunk].tobytes()
        _, tokens, _, columns, *_ = described[stream]
        return pack_segment(classes.tobytes(), escaped, lanes[stream]), int(tokens * columns)

    segments = map_parallel(packed, range(chunks * levels), threads)
    return [segments[first : first + levels] for first in range(0, len(segments), levels)]


def _rows(classes: Tensor) -> Tensor:
    """Return the start of each column's table in ``DeviceProfile.packed``, int32; -1 where it is not coded."""
    base = torch.arange(classes.shape[1], device=classes.device)[:, None] == 0
    row = classes.int() - 1
    row = torch.where(base, ALPHABET * row, CLASSES * ALPHABET + RATIO * CONTEXTS * row)
    return torch.where(classes > 0, row, -1)


def _mark_escapes(batch: Batch, rows: Tensor, known: DeviceProfile) -> Tensor:
    """Turn base symbols without a slot into escapes and count them, int32 ``[chunks, columns]``."""
    chunks, levels, columns = batch.classes.shape
    escapes = torch.empty(chunks, columns, dtype=torch.int32, device=known.device)
    ends = torch.tensor(batch.bounds, device=known.device)
    block = block_of(COLUMN_BLOCK, columns)
    kernels.escape[(chunks, -(-columns // block))](
        batch.symbols, ends, rows, known.packed, escapes, columns, levels, ROWS=ROW_BLOCK, BLOCK=block
    )
    return escapes


def _escaped_values(batch: Batch, counts: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Return each chunk's escaped values at level 0, token by token, column by column."""
    listed = np.zeros(0, "<i4")
    if counts.any():
        index = (batch.symbols[:, 0] == 0).flatten().nonzero()[:, 0]  # the host waits
        values = batch.values.flatten()[index]
        for _ in range(batch.classes.shape[1] - 1):
            values = coarser(values)
        listed = values.cpu().numpy().astype("<i4")
    return np.split(listed, np.cumsum(counts)[:-1])


def _stream_table(batch: Batch, coded: NDArray[np.int64]) -> NDArray[np.int64]:
    """Describe all streams for ``encode_streams``, given each one's number of columns."""
    _, levels, columns = batch.classes.shape
    tokens = np.repeat(np.diff(batch.bounds), levels)
    lanes = np.array([lanes_for(int(symbols)) for symbols in tokens * coded], np.int64)
    first = np.repeat(batch.bounds[:-1], levels) * levels + np.tile(np.arange(levels), len(batch.bounds) - 1)
    room = lanes * tokens * -(-coded // lanes)
    starts = _exclusive_sums(coded), _exclusive_sums(lanes), _exclusive_sums(room)
    return np.stack([first * columns, tokens, starts[0], coded, lanes, *starts[1:]], axis=1)


def _exclusive_sums(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of all counts before each one."""
    out: NDArray[np.int64] = np.cumsum(counts) - counts
    return out


def encode_streams(
    symbols: Tensor, stride: int, described: NDArray[np.int64], columns: Tensor, rows: Tensor, packed: Tensor
) -> list[Lanes]:
    """Entropy-code many streams at once, see ``encode_kernels.encode_lanes``."""
    _, tokens, _, coded, of_stream, _, _ = described.T
    lanes, room = int(of_stream.sum()), int((of_stream * tokens * -(-coded // of_stream)).sum())
    device = symbols.device
    states, counts = torch.empty(2, lanes, dtype=torch.int32, device=device)
    begins = torch.empty(lanes, dtype=torch.int64, device=device)
    words = torch.empty(room, dtype=torch.int16, device=device)
    streams = torch.from_numpy(described).to(device)
    stream_of = torch.from_numpy(np.repeat(np.arange(len(described), dtype=np.int32), of_stream)).to(device)
    block = block_of(_LANE_BLOCK, lanes)
    warps = 1 if torch.version.hip else 2
    kernels.encode_lanes[(-(-lanes // block),)](
        symbols, stride, streams, stream_of, columns, rows, packed, words, states, begins, counts, lanes,
        BLOCK=block, num_warps=warps,
    )  # fmt: skip
    targets = counts.cumsum(0) - counts
    host_states, host_counts = torch.stack([states, counts]).cpu().numpy()  # the host waits
    totals = np.add.reduceat(host_counts.astype(np.int64), _exclusive_sums(of_stream))
    out = torch.empty(int(totals.sum()), dtype=torch.int16, device=device)
    kernels.gather_words[(lanes,)](words, begins, counts, targets, out, BLOCK=_WORD_BLOCK)
    of_lanes = np.cumsum(of_stream)[:-1]
    pieces = zip(
        np.split(host_states.view(np.uint32), of_lanes),
        np.split(host_counts.astype(np.uint16), of_lanes),
        np.split(out.cpu().numpy().view(np.uint16), np.cumsum(totals)[:-1]),  # the host waits
        strict=True,
    )
    return [Lanes(*piece) for piece in pieces]


def quantise_on_device(coefficients: Tensor, step: float) -> tuple[Tensor, Tensor]:
    """Quantise as ``transform.levels.quantise`` does, unchecked; return values and the largest size in steps."""
    out = torch.empty(coefficients.shape, dtype=torch.int32, device=coefficients.device)
    sizes = [torch.zeros((), dtype=torch.float32, device=coefficients.device)]
    for part, target in zip(torch.split(coefficients, _ROWS), torch.split(out, _ROWS), strict=True):
        scaled = part * float(np.float32(1.0 / step))
        if scaled.numel():
            sizes.append(scaled.abs().amax())
        target.copy_(scaled.round_())
    return out, torch.stack(sizes).amax()


def measure_columns(coefficients: Tensor, bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return each column's class at unit step and sum of squares, ``[chunks, columns]``."""
    chunks, columns = len(bounds) - 1, coefficients.shape[1]
    ends = torch.tensor(bounds, device=coefficients.device)
    magnitudes, squares = torch.empty(2, chunks, columns, dtype=torch.float32, device=coefficients.device)
    block = block_of(COLUMN_BLOCK, columns)
    kernels.measure[(chunks, -(-columns // block))](coefficients, ends, magnitudes, squares, columns, BLOCK=block)
    scale = (magnitudes / ends.diff()[:, None]).double() * math.sqrt(2)
    grid = GRID_PER_LEVEL * torch.log(scale.clamp(min=1e-30) / FINEST_SCALE) / math.log(3.0)
    return grid.round_().long() + 1, squares


@dataclass(frozen=True, eq=False)
class Batch:
    """Consecutive quantised chunks and the contents of their segments, on the device.

    Attributes:
        bounds: Chunk i has rows ``bounds[i]`` to ``bounds[i + 1]``.
        values: int32 ``[tokens, columns]`` of the last level.
        symbols: uint8 ``[tokens, levels, columns]``, see ``encode_kernels.split``.
        classes: uint8 ``[chunks, levels, columns]``, 0 while a column is not coded.
        entry: uint8 ``[chunks, columns]``, the level at which a column enters; the number of levels for never.
        codes: uint8 ``[chunks, columns]``, the column's byte in the class list of that level.
    """

    bounds: tuple[int, ...]
    values: Tensor
    symbols: Tensor
    classes: Tensor
    entry: Tensor
    codes: Tensor


def split_values(
    values: Tensor, unit: Tensor, bounds: tuple[int, ...], shifts: tuple[int, ...], known: DeviceProfile
) -> Batch:
    """Split quantised values into levels; choose the level and class at which each column enters."""
    (tokens, columns), chunks, levels = values.shape, len(bounds) - 1, len(shifts)
    symbols = torch.empty(tokens, levels, columns, dtype=torch.uint8, device=values.device)
    size = torch.empty(chunks, columns, dtype=torch.int32, device=values.device)
    ends = torch.tensor(bounds, device=values.device)
    block = block_of(COLUMN_BLOCK, columns)
    grid = (chunks, -(-columns // block))
    kernels.split[grid](values, ends, symbols, size, columns, LEVELS=levels, ROWS=ROW_BLOCK, BLOCK=block)
    entry = torch.zeros_like(size)
    for _ in shifts:
        entry += size == 0
        size = coarser(size)
    coded, codes = torch.zeros_like(unit), torch.zeros_like(unit)
    classes = torch.empty(chunks, levels, columns, dtype=torch.uint8, device=values.device)
    for level, shift in enumerate(shifts):
        fresh, chosen = entry == level, (unit - shift).clamp(1, CLASSES)
        delta = chosen - (known.spread - shift).clamp(1, CLASSES)
        codes = torch.where(fresh, torch.where(delta >= 0, 2 * delta, -2 * delta - 1) + 1, codes)
        risen = torch.where(coded > 0, (coded + GRID_PER_LEVEL).clamp(1, CLASSES), 0)
        coded = torch.where(fresh, chosen, risen)
        classes[:, level] = coded
    return Batch(bounds, values, symbols, classes, entry.to(torch.uint8), codes.to(torch.uint8))


def squared_errors(coefficients: Tensor, batch: Batch, steps: tuple[float, ...], known: DeviceProfile) -> Tensor:
    """Sum the squared errors of every chunk at every level, float64 ``[chunks, levels]``."""
    chunks, levels, columns = batch.classes.shape
    missed = torch.empty(batch.classes.shape, dtype=torch.float32, device=coefficients.device)
    ends = torch.tensor(batch.bounds, device=coefficients.device)
    sizes = torch.tensor(steps, dtype=torch.float32, device=coefficients.device)
    block = block_of(COLUMN_BLOCK, columns)
    grid = (chunks, -(-columns // block), levels)
    kernels.squared_errors[grid](
        coefficients,
        batch.values,
        ends,
        batch.classes,
        known.sizes,
        sizes,
        missed,
        columns,
        LEVELS=levels,
        ROWS=ROW_BLOCK,
        BLOCK=block,
    )
    return missed.sum(2, dtype=torch.float64)


def coarser(values: Tensor) -> Tensor:
    """Round values to the next coarser level."""
    return torch.div(values + 1, RATIO, rounding_mode="floor")


def block_of(usual: int, count: int) -> int:
    """Choose the elements of a program; all in the interpreter, whose time depends on programs alone."""
    return 1 << max(0, count - 1).bit_length() if interpreted() else usual


class DeviceEncoder:
    """Encodes the chunks of one cache on its device, in layered levels."""

    def __init__(
        self,
        cache: KVCache,
        text: TextPredictor,
        ladder: Ladder,
        device: torch.device,
        working_bytes: int | None = None,
    ) -> None:
        """Copy the profile to the device unless it is there already."""
        self._device = device
        self._cache, self._text, self._ladder = cache, text, ladder
        self._known = on_device(text.profile, self._device)
        whole = sum(tensor.nbytes for tensor in (*cache.keys, *cache.values))
        self._room = max(WORKING_BYTES, int(WORKING_SHARE * whole)) if working_bytes is None else working_bytes
        self._transform = Transform(cache, text, self._known, self._ladder.steps[-1])

    def encode(self, spans: Sequence[Span], threads: int | None) -> list[list[EncodedSegment]]:
        """Encode consecutive chunks."""
        current: AbstractContextManager[Any] = nullcontext()
        if self._device.type == "cuda":
            current = torch.cuda.device(self._device)
        with current, torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            return [coded for batch in self._batches(spans) for coded in self._encode_batch(batch, threads)]

    def _batches(self, spans: Sequence[Span]) -> Iterator[Sequence[Span]]:
        """Split the spans into batches that fit the working set, at least one chunk each."""
        profile, levels = self._text.profile, len(self._ladder.steps)
        # Bytes. Each coefficient: float32, int32 value, and a symbol and a 16-bit word for each level. Each element of
        # the widest group: four float32 copies. Each column of a chunk: its place, class and table at each level.
        a_token = profile.rank * (8 + 3 * levels) + 16 * max(group.width for group in profile.groups)
        a_chunk = (40 * levels + 80) * profile.rank
        longest = max(stop - start for start, stop in spans)
        count = max(1, self._room // (longest * a_token + a_chunk))
        return (spans[first : first + count] for first in range(0, len(spans), count))

    def _encode_batch(self, spans: Sequence[Span], threads: int | None) -> list[list[EncodedSegment]]:
        ladder = self._ladder
        bounds = tuple(token - spans[0][0] for token in (*(start for start, _ in spans), spans[-1][1]))
        analysed = self._transform.analyse(spans)
        coefficients = analysed.coefficients
        values, largest = quantise_on_device(coefficients, ladder.steps[-1])
        unit, squares = measure_columns(coefficients, bounds)
        batch = split_values(values, unit, bounds, ladder.shifts, self._known)
        missed = squared_errors(coefficients, batch, ladder.steps, self._known)
        energies = torch.stack([squares.sum(1, dtype=torch.float64), analysed.dropped])
        checked = torch.cat([largest[None], analysed.sums]).double()
        found = torch.cat([checked, missed.flatten(), energies.flatten()]).cpu().numpy()  # the host waits
        self._check(spans, coefficients, found[: len(checked)])
        del analysed, coefficients
        errors = found[len(checked) :][: missed.numel()].reshape(missed.shape)
        energy, dropped = found[len(checked) + missed.numel() :].reshape(2, -1)
        elements = np.diff(bounds) * sum(group.width for group in self._text.profile.groups)
        segments = encode_batch(batch, self._known, threads)
        return [
            [
                EncodedSegment(*segment, float((error + dropped[chunk]) / elements[chunk]), each_energy)
                for segment, error in zip(segments[chunk], errors[chunk], strict=True)
            ]
            for chunk, each_energy in enumerate(((energy + dropped) / elements).tolist())
        ]

    def _check(self, spans: Sequence[Span], coefficients: Tensor, found: NDArray[np.float64]) -> None:
        """Repeat the processor's checks, which name the fault, where numbers look wrong.

        ``found``: the largest size in steps, then each group's sum of elements, which may overflow.
        """
        if not np.isfinite(found[1:]).all():
            for (start, stop), group in itertools.product(spans, self._text.profile.groups):
                gather_planes(self._cache, group.planes, start, stop)
        if not found[0] < LARGEST:
            quantise(coefficients.cpu().numpy(), self._ladder.steps[-1])
