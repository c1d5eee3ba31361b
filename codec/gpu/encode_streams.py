"""Levels on the device to segments: tables, escapes, lanes, words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.entropy.rans import Lanes, lanes_for
from kvwire.codec.entropy.tables import ALPHABET, CLASSES, CONTEXTS
from kvwire.codec.format.segment import pack_segment
from kvwire.codec.gpu import encode_kernels as kernels
from kvwire.codec.gpu.encode_levels import COLUMN_BLOCK, ROW_BLOCK, block_of, coarser
from kvwire.codec.transform.quantiser import RATIO
from kvwire.codec.workers import each

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.gpu.encode_levels import Batch
    from kvwire.codec.gpu.profile import DeviceProfile

_LANE_BLOCK = 64
"""Lanes of a program, one for each thread: two warps of 32 threads, or one of 64."""
_WORD_BLOCK = 128


def encode_batch(batch: Batch, known: DeviceProfile, threads: int | None) -> list[list[tuple[bytes, int]]]:
    """Code a batch. Escapes become 0 in ``batch.symbols``."""
    chunks, levels, columns = batch.classes.shape
    rows = _rows(batch.classes)
    escapes = _escape(batch, rows[:, 0].contiguous(), known)
    counts = torch.cat([(rows >= 0).sum(2).flatten(), escapes.sum(1)]).cpu().numpy()  # the host waits
    entry, codes = torch.stack([batch.entry, batch.codes]).cpu().numpy()
    listed = _escaped(batch, counts[chunks * levels :])
    described = _described(batch, counts[: chunks * levels])
    coded = (rows >= 0).flatten().nonzero()[:, 0]
    of_column = (coded % max(1, columns)).int()
    lanes = encode_streams(batch.symbols, levels * columns, described, of_column, rows.flatten()[coded], known.packed)

    def packed(stream: int) -> tuple[bytes, int]:
        chunk, level = divmod(stream, levels)
        classes = np.where(entry[chunk] == level, codes[chunk], 0)[entry[chunk] >= level].astype(np.uint8)
        escaped = b"" if level else listed[chunk].tobytes()
        _, tokens, _, columns, *_ = described[stream]
        return pack_segment(classes.tobytes(), escaped, lanes[stream]), int(tokens * columns)

    segments = each(packed, range(chunks * levels), threads)
    return [segments[first : first + levels] for first in range(0, len(segments), levels)]


def _rows(classes: Tensor) -> Tensor:
    """Where each column's table begins in ``DeviceProfile.packed``, int32; -1 where it is not coded."""
    base = torch.arange(classes.shape[1], device=classes.device)[:, None] == 0
    row = classes.int() - 1
    row = torch.where(base, ALPHABET * row, CLASSES * ALPHABET + RATIO * CONTEXTS * row)
    return torch.where(classes > 0, row, -1)


def _escape(batch: Batch, rows: Tensor, known: DeviceProfile) -> Tensor:
    """Turn base symbols without a slot into escapes; int32 ``[chunks, columns]``, number of escapes."""
    chunks, levels, columns = batch.classes.shape
    escapes = torch.empty(chunks, columns, dtype=torch.int32, device=known.device)
    ends = torch.tensor(batch.bounds, device=known.device)
    block = block_of(COLUMN_BLOCK, columns)
    kernels.escape[(chunks, -(-columns // block))](
        batch.symbols, ends, rows, known.packed, escapes, columns, levels, ROWS=ROW_BLOCK, BLOCK=block
    )
    return escapes


def _escaped(batch: Batch, counts: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Escaped values of each chunk at level 0, token by token, column by column."""
    listed = np.zeros(0, "<i4")
    if counts.any():
        index = (batch.symbols[:, 0] == 0).flatten().nonzero()[:, 0]  # the host waits
        values = batch.values.flatten()[index]
        for _ in range(batch.classes.shape[1] - 1):
            values = coarser(values)
        listed = values.cpu().numpy().astype("<i4")
    return np.split(listed, np.cumsum(counts)[:-1])


def _described(batch: Batch, coded: NDArray[np.int64]) -> NDArray[np.int64]:
    """A batch's streams, level by level of chunk after chunk, as ``encode_streams`` takes them.

    coded: number of coded columns of each.
    """
    _, levels, columns = batch.classes.shape
    tokens = np.repeat(np.diff(batch.bounds), levels)
    lanes = np.array([lanes_for(int(symbols)) for symbols in tokens * coded], np.int64)
    first = np.repeat(batch.bounds[:-1], levels) * levels + np.tile(np.arange(levels), len(batch.bounds) - 1)
    room = lanes * tokens * -(-coded // lanes)
    return np.stack([first * columns, tokens, _before(coded), coded, lanes, _before(lanes), _before(room)], axis=1)


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Sum of all counts before each one."""
    out: NDArray[np.int64] = np.cumsum(counts) - counts
    return out


def encode_streams(
    symbols: Tensor, stride: int, described: NDArray[np.int64], columns: Tensor, rows: Tensor, packed: Tensor
) -> list[Lanes]:
    """Run the entropy coder over many streams at once, see ``encode_kernels.encode_lanes``."""
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
    totals = np.add.reduceat(host_counts.astype(np.int64), _before(of_stream))
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
