"""The encoder of the CacheGen paper (arXiv 2310.07240, section 5.2), a second method beside kvwire's own.

Tokens form groups of ten. A group's first token, the anchor, is quantised to 8 bits with one absmax scale for each
token of a layer's keys or values. The other nine are deltas against the decoded anchor, so that errors do not add.
Their bins are 0.5, 1 and 1.5 in the first, middle and last third of the layers. Anchors and deltas are
arithmetic-coded with a distribution for each layer, side and channel, profiled offline. A level is a factor on all
bins; none refines another.

The paper leaves three points open. A bin's unit here is the root mean square of the deltas of that layer's keys or
values, so that a bin means the same in every layer and model. Values beyond the profiled alphabet are escaped without
loss. Keys are coded with positions off, so that a decoded chunk fits any position; the paper codes stored keys.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np
import torch
import zstandard

from kvwire.codec.entropy.range_coder import decode_rows, encode_rows, frequencies_of
from kvwire.codec.entropy.tables import LARGEST
from kvwire.codec.format.metadata_json import decompress
from kvwire.codec.kinds.cachegen_profile import ANCHOR_LIMIT, DELTA_LIMIT, ESCAPE, CacheGenProfile, blocks_of
from kvwire.codec.transform.analysis import gather
from kvwire.errors import ArgumentError, CacheValueError, CorruptError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.kinds.cachegen_profile import Block
    from kvwire.types import KVCache

GROUP_TOKENS = 10
"""Tokens in a group: one anchor and nine deltas."""
LEVELS = (("coarse", 2.0), ("default", 1.0), ("fine", 0.5))
"""Name of each level, and the factor on all bins; the paper's bins are the default."""
_HEADER = struct.Struct("<II")
"""Bytes of the escape list, words."""
_PIECE = 1000
"""Calibration tokens gathered at a time, a multiple of the group."""
_LEAST_UNIT = 2.0**-100
"""Smaller than any cache's numbers, and large enough that all levels' bins are float32 numbers above 0."""
_SHARED_COUNTS = 64.0
"""Counts that each channel borrows from its block's distribution, since one channel sees few symbols."""


def quantise_anchors(elements: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Quantise anchors ``[groups, width]`` to 8 bits; scales are rounded up to float16 so that nothing is clipped."""
    anchors = elements[::GROUP_TOKENS]
    exact = np.abs(anchors).max(1).astype(np.float64) / ANCHOR_LIMIT
    if (exact > np.finfo(np.float16).max).any():
        msg = "a cache holds numbers above 8 million, too large to quantise; prefill the document again"
        raise CacheValueError(msg)
    scales = exact.astype(np.float16)
    scales = np.where(scales < exact, np.nextafter(scales, np.float16(np.inf)), scales)
    divisor = np.where(scales > 0, scales, 1).astype(np.float64)
    return np.rint(anchors / divisor[:, None]).astype(np.int32), scales


def restore_anchors(values: NDArray[np.int32], scales: NDArray[np.float16]) -> NDArray[np.float32]:
    """Decode anchors; the products are exact in float32."""
    return values.astype(np.float32) * scales.astype(np.float32)[:, None]


def _others(tokens: int) -> NDArray[np.intp]:
    """Return the indices of the tokens that are not anchors, ``[deltas]``."""
    index = np.arange(tokens)
    return index[index % GROUP_TOKENS > 0]


def deltas_of(elements: NDArray[np.float32], anchors: NDArray[np.float32]) -> NDArray[np.float64]:
    """Subtract decoded anchors from the other tokens."""
    others = _others(len(elements))
    return elements[others].astype(np.float64) - anchors[others // GROUP_TOKENS]


def quantise_deltas(deltas: NDArray[np.float64], width: np.float32) -> NDArray[np.int32]:
    """Round deltas to bins."""
    values = np.rint(deltas / np.float64(width))
    if values.size and float(np.abs(values).max()) >= LARGEST:
        msg = "a cache holds numbers too large for the profile's bins; fit the profile on caches like it"
        raise CacheValueError(msg)
    return values.astype(np.int32)


def _delta_symbols(values: NDArray[np.int32]) -> NDArray[np.uint8]:
    return np.where(np.abs(values) <= DELTA_LIMIT, values + DELTA_LIMIT + 1, ESCAPE).astype(np.uint8)


def encode_cachegen(cache: KVCache, profile: CacheGenProfile, level: int, start: int, stop: int) -> tuple[bytes, int]:
    """Encode tokens of a cache at one level; return the segment and its number of symbols."""
    profile.check_fits(cache.meta)
    _check_level(profile, level)
    if not 0 <= start < stop <= cache.tokens:
        raise ArgumentError(f"the cache has {cache.tokens} tokens, none from {start} to {stop}")
    scales, escaped, parts = [], [], []
    for block, width in zip(profile.blocks, profile.bins(level), strict=True):
        elements = gather(cache, block.side, (block.layer,), start, stop).numpy()
        anchors, scale = quantise_anchors(elements)
        deltas = quantise_deltas(deltas_of(elements, restore_anchors(anchors, scale)), width).T
        symbols = _delta_symbols(deltas)
        scales.append(scale)
        escaped.append(deltas[symbols == ESCAPE])
        parts.append(((anchors.T + ANCHOR_LIMIT).astype(np.uint8), profile.anchors[block.rows]))
        parts.append((symbols, profile.deltas[level, block.rows]))
    words = encode_rows(parts)
    escapes = _packed(np.concatenate(escaped).astype("<i4").tobytes())
    header = _HEADER.pack(len(escapes), len(words) // 4)
    return header + np.concatenate(scales).astype("<f2").tobytes() + escapes + words, (stop - start) * profile.channels


def decode_cachegen(data: bytes, profile: CacheGenProfile, level: int, tokens: int) -> list[Tensor]:
    """Decode a segment into float32 ``[tokens, width]`` for each block."""
    _check_level(profile, level)
    if tokens < 1:
        raise ArgumentError(f"a segment holds at least one token, not {tokens}")
    scales, escapes, words = _unpack(data, len(profile.blocks), -(-tokens // GROUP_TOKENS))
    groups = scales.shape[1]
    parts = [
        part
        for block in profile.blocks
        for part in ((groups, profile.anchors[block.rows]), (tokens - groups, profile.deltas[level, block.rows]))
    ]
    symbols = decode_rows(words, parts)
    values = _with_escapes(symbols[1::2], escapes)
    anchors = [restore_anchors(_anchor_values(part), scale) for part, scale in zip(symbols[::2], scales, strict=True)]
    bins = profile.bins(level)
    return [_restored(*part, tokens) for part in zip(anchors, values, bins, strict=True)]


def _check_level(profile: CacheGenProfile, level: int) -> None:
    if not 0 <= level < len(profile.levels):
        raise ArgumentError(f"the CacheGen profile has levels 0 to {len(profile.levels) - 1}, not {level}")


def _packed(raw: bytes) -> bytes:
    """Return a zstd frame; empty input stays empty."""
    return zstandard.ZstdCompressor(level=19, write_content_size=True).compress(raw) if raw else b""


def _unpack(data: bytes, blocks: int, groups: int) -> tuple[NDArray[np.float16], bytes, bytes]:
    """Split a segment into scales ``[blocks, groups]``, packed escapes and words."""
    escape_bytes, words = _HEADER.unpack_from(data) if len(data) >= _HEADER.size else (0, 0)
    at = _HEADER.size + 2 * blocks * groups
    if at + escape_bytes + 4 * words != len(data):
        raise CorruptError("a segment's parts do not add up to its length: it is damaged, fetch it again")
    scales = np.frombuffer(data, "<f2", blocks * groups, _HEADER.size).astype(np.float16).reshape(blocks, groups)
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise CorruptError("a segment has scales that no encoder writes: it is damaged, fetch it again")
    return scales, data[at : at + escape_bytes], data[at + escape_bytes :]


def _anchor_values(symbols: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Convert symbols ``[width, groups]`` to quantised anchors ``[groups, width]``."""
    return symbols.T.astype(np.int32) - ANCHOR_LIMIT


def _with_escapes(parts: list[NDArray[np.uint8]], packed: bytes) -> Iterator[NDArray[np.int32]]:
    """Yield each block's quantised deltas ``[deltas, width]`` from its symbols ``[width, deltas]``."""
    counts = [int(np.count_nonzero(symbols == ESCAPE)) for symbols in parts]
    raw = decompress(packed, 4 * sum(counts), "segment's escape list") if packed else b""
    escapes = np.frombuffer(raw, "<i4")
    if len(escapes) != sum(counts) or not ((escapes > -LARGEST) & (escapes < LARGEST)).all():
        raise CorruptError("a segment's escapes are not what its symbols call for: it is damaged, fetch it again")
    for symbols, own in zip(parts, np.split(escapes, np.cumsum(counts)[:-1]), strict=True):
        values = symbols.astype(np.int32) - (DELTA_LIMIT + 1)
        values[symbols == ESCAPE] = own
        yield values.T


def _restored(anchors: NDArray[np.float32], values: NDArray[np.int32], width: np.float32, tokens: int) -> Tensor:
    others = _others(tokens)
    out = np.repeat(anchors, GROUP_TOKENS, axis=0)[:tokens]
    with np.errstate(over="ignore"):
        out[others] += values.astype(np.float32) * width
    if not np.isfinite(out).all():
        raise CorruptError("a segment decodes to infinity: it is damaged, fetch it again")
    return torch.from_numpy(out)


def fit_cachegen_profile(caches: Sequence[KVCache]) -> CacheGenProfile:
    """Profile units and distributions on calibration caches: a few thousand tokens of text like the model's own.

    The fit reads the caches twice, a thousand tokens of one layer at a time: memory grows with the model's width
    alone.

    Args:
        caches: Caches of one layout.

    Returns:
        The profile.

    Raises:
        MismatchError: The caches are of different models.
        ArgumentError: None of them has two tokens.
        CacheValueError: One holds NaN, infinity or numbers that are too large.
    """
    if not any(cache.tokens > 1 for cache in caches):
        raise ArgumentError("a CacheGen profile needs at least one calibration cache of two tokens or more")
    meta = caches[0].meta
    if not all(cache.meta.shares_config(meta) for cache in caches):
        raise MismatchError("calibration caches must all come from one model with one layout")
    blocks = blocks_of(meta.layers)
    units = np.array([_unit(caches, block) for block in blocks], np.float32)
    channels = blocks[-1].rows.stop
    anchors = np.zeros((channels, 2 * ANCHOR_LIMIT + 1), np.uint16)
    deltas = np.zeros((len(LEVELS), channels, 2 * DELTA_LIMIT + 2), np.uint16)
    notes: dict[str, str | int | float] = {"tokens": sum(cache.tokens for cache in caches)}
    profile = CacheGenProfile(meta.model_id, meta.model_revision, meta.layers, LEVELS, units, anchors, deltas, notes)
    bins = [profile.bins(level) for level in range(len(LEVELS))]
    for index, block in enumerate(blocks):
        anchors[block.rows], deltas[:, block.rows] = _tables(caches, block, [widths[index] for widths in bins])
    return profile


def _pieces(caches: Sequence[KVCache], block: Block) -> Iterator[tuple[NDArray[np.int32], NDArray[np.float64]]]:
    """Yield quantised anchors ``[groups, width]`` and exact deltas ``[deltas, width]``, piece by piece."""
    for cache in caches:
        for start in range(0, cache.tokens, _PIECE):
            elements = gather(cache, block.side, (block.layer,), start, min(start + _PIECE, cache.tokens)).numpy()
            values, scales = quantise_anchors(elements)
            yield values, deltas_of(elements, restore_anchors(values, scales))


def _unit(caches: Sequence[KVCache], block: Block) -> float:
    """Return the root mean square of a block's deltas; 1 where there are none or all are 0."""
    energy, count = 0.0, 0
    for _, deltas in _pieces(caches, block):
        energy += float(np.square(deltas).sum())
        count += deltas.size
    return max(math.sqrt(energy / count), _LEAST_UNIT) if energy else 1.0


def _tables(
    caches: Sequence[KVCache], block: Block, bins: Sequence[np.float32]
) -> tuple[NDArray[np.uint16], NDArray[np.uint16]]:
    """Fit frequencies of a block's anchors ``[width, 255]`` and of its deltas at each level ``[levels, width, 64]``."""
    anchors = np.zeros((block.width, 2 * ANCHOR_LIMIT + 1))
    deltas = np.zeros((len(bins), block.width, 2 * DELTA_LIMIT + 2))
    for values, exact in _pieces(caches, block):
        anchors += _counts(values + ANCHOR_LIMIT, anchors.shape[1])
        for level, width in enumerate(bins):
            deltas[level] += _counts(_delta_symbols(quantise_deltas(exact, width)), deltas.shape[2])
    return _anchor_tables(anchors), np.stack([_delta_tables(counts) for counts in deltas])


def _counts(symbols: NDArray[np.integer], alphabet: int) -> NDArray[np.int64]:
    """Count each symbol in each column of ``[count, width]``: int64 ``[width, alphabet]``."""
    width = symbols.shape[1]
    index = symbols + np.arange(width) * alphabet
    return np.bincount(index.ravel(), minlength=width * alphabet).reshape(width, alphabet)


def _anchor_tables(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Fit anchors' frequencies; counts spread to near symbols, since anchors are few and their symbols many."""
    symbol = np.arange(counts.shape[1])
    return frequencies_of(counts @ (1 / (1 + np.square(symbol[:, None] - symbol, dtype=np.float64))))


def _delta_tables(counts: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Fit deltas' frequencies; each channel borrows counts from its block, whose channels are alike."""
    return frequencies_of(counts + _SHARED_COUNTS * counts.sum(0) / counts.sum())
