"""Decoders' outputs: allocate and check them, place sinks, zero pruned entries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvwire.codec.backend import SIDES
from kvwire.codec.format.metadata_json import elements_per_token, shapes_of
from kvwire.codec.transform.analysis import scatter_planes
from kvwire.codec.transform.positions import rotation
from kvwire.codec.transform.sinks import sink_rows
from kvwire.errors import ArgumentError, KvwireError
from kvwire.types import KVCache, PagedKVCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from kvwire.codec.backend import Side
    from kvwire.codec.format.header import Header, Kept
    from kvwire.codec.profile.profile import Profile
    from kvwire.codec.transform.reconstruct import CosSin
    from kvwire.types import BlobInfo


_FLOATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _FLOATS}
"""Cache dtypes by name."""


def device_of(cache: KVCache) -> torch.device:
    """Return the device of a cache."""
    return next(tensor.device for tensor in (*cache.keys, *cache.values) if tensor.numel())


def positions_for(info: BlobInfo, offset: int | None) -> Callable[[int, int], CosSin]:
    """Return a function from a token span to its cosines and sines by RoPE regime."""

    def cos_sin(start: int, stop: int) -> CosSin:
        if offset is None:
            return {}
        return {index: rotation(info.meta.ropes[index], offset + start, stop - start) for index in _regimes(info)}

    return cos_sin


def check_positions(info: BlobInfo, offset: int | None) -> None:
    """Raise now, before anything is decoded, where a position is outside a RoPE regime's range."""
    if offset is None:
        return
    for regime in _regimes(info):
        rotation(info.meta.ropes[regime], offset, 1)
        rotation(info.meta.ropes[regime], offset + info.tokens - 1, 1)


def _regimes(info: BlobInfo) -> list[int]:
    indices = {index for spec in info.meta.layers for index in (spec.rope, spec.value_rope)}
    return sorted(index for index in indices if index is not None)


def drop_pruned(out: KVCache | PagedKVCache, kept: Kept | None, start: int, stop: int) -> None:
    """Zero the decoded entries that the pruned cache did not hold."""
    for layer, mask in enumerate(kept or ()):
        if mask is None:
            continue
        for side in SIDES:
            tensor = (out.keys if side == "key" else out.values)[layer]
            gone = ~mask[:, start:stop, None].to(tensor.device)
            if isinstance(out, PagedKVCache):
                part = out.take(side, layer, start, stop)
                out.put(side, layer, start, zero_masked(part, gone))
            else:
                zero_masked(tensor[:, start:stop], gone)


def zero_masked(tensor: Tensor, gone: Tensor) -> Tensor:
    """Zero some entries in place; float8 tensors cannot be filled, but zero bits are 0 there as well."""
    (tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor).masked_fill_(gone, 0)
    return tensor


def empty_chunk(out: PagedKVCache, tokens: int) -> KVCache:
    """Allocate a contiguous cache of one chunk, to be copied into pages."""
    pairs: list[list[Tensor]] = [[], []]
    for spec, *tensors in zip(out.meta.layers, out.keys, out.values, strict=True):
        for made, dim, tensor in zip(pairs, (spec.key_dim, spec.value_dim), tensors, strict=True):
            shape = (spec.kv_heads, 0 if spec.kind == "none" else tokens, dim)
            made.append(torch.zeros(shape, dtype=tensor.dtype, device=tensor.device))
    return KVCache(pairs[0], pairs[1], out.meta)


def check_out(out: KVCache | PagedKVCache, info: BlobInfo) -> None:
    """Raise ArgumentError where an output's layout or length differs from the blob's."""
    if shapes_of(out.meta.layers) != shapes_of(info.meta.layers) or out.tokens != info.tokens:
        msg = f"the output has another layout than the blob, or room for {out.tokens} and not {info.tokens} tokens"
        raise ArgumentError(msg)


def check_claim(info: BlobInfo, dtype: torch.dtype, max_tokens: int | None, max_bytes: int | None) -> None:
    """Compare a header's claims with the caller's limits, before anything is allocated."""
    size = info.tokens * elements_per_token(info.meta.layers) * dtype.itemsize
    limits = (("max_tokens", info.tokens, max_tokens), ("max_bytes", size, max_bytes))
    passed = [f"{name}={most}" for name, claimed, most in limits if most is not None and claimed > most]
    if passed:
        raise ArgumentError(
            f"the blob claims {info.tokens} tokens ({size} bytes decoded), more than {' and '.join(passed)}; "
            "raise the limit if you trust the blob"
        )


def empty_for(header: Header, device: str | torch.device, dtype: torch.dtype, offset: int | None) -> KVCache:
    """Allocate a zeroed cache for a blob.

    On the processor memory is used only as chunks are written, so a false header that claims many tokens costs little.
    """
    info, keys, values = header.info, [], []
    try:
        for spec in info.meta.layers:
            tokens = 0 if spec.kind == "none" else info.tokens
            keys.append(_zeros((spec.kv_heads, tokens, spec.key_dim), device, dtype))
            values.append(_zeros((spec.kv_heads, tokens, spec.value_dim), device, dtype))
    except (RuntimeError, MemoryError) as error:
        msg = f"no room for the decoded cache of {info.tokens} tokens on {device} ({error}); decode it elsewhere"
        raise KvwireError(msg) from error
    meta = replace(info.meta, dtype=str(dtype).removeprefix("torch."))
    meta = meta if offset is None else replace(meta, positions="on", offset=offset)
    return KVCache(keys, values, meta, info.token_ids, header.kept)


def _zeros(shape: tuple[int, int, int], device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Allocate zeros; on the processor as pages that the system clears on first touch."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)


class SinkPlacer:
    """Writes a blob's attention sinks into an output, at its positions."""

    def __init__(
        self, header: Header, profile: Profile, out: KVCache | PagedKVCache, offset: int | None, *, begins: bool
    ) -> None:
        """Decode the sinks' keys and values, and the first token's where the document begins a prompt."""
        info = header.info
        cos_sin = positions_for(info, offset)
        self._out, self._sinks = out, {}
        frames = dict(zip(info.sinks, header.sink_frames, strict=True))
        if begins and header.beginning:
            frames[0] = header.beginning
        for at, frame in frames.items():
            keys = [part.new_zeros(spec.kv_heads, 1, spec.key_dim, device="cpu")
                    for spec, part in zip(info.meta.layers, out.keys, strict=True)]  # fmt: skip
            values = [part.new_zeros(spec.kv_heads, 1, spec.value_dim, device="cpu")
                      for spec, part in zip(info.meta.layers, out.values, strict=True)]  # fmt: skip
            made = KVCache(keys, values, info.meta)
            for group, row in zip(profile.groups, sink_rows(profile, frame), strict=True):
                scatter_planes(row, group.planes, made, info.meta, 0, cos_sin(at, at + 1))
            self._sinks[at] = made

    def place(self, start: int, stop: int) -> bool:
        """Write the sinks of a token span; return whether there were any."""
        chosen = [at for at in self._sinks if start <= at < stop]
        for at in chosen:
            for layer, spec in enumerate(self._out.meta.layers):
                for side in SIDES if spec.kind != "none" else ():
                    self._put(side, layer, at)
        return bool(chosen)

    def _put(self, side: Side, layer: int, at: int) -> None:
        made, out = self._sinks[at], self._out
        part = (made.keys if side == "key" else made.values)[layer]
        target = (out.keys if side == "key" else out.values)[layer]
        part = part.to(target.device, non_blocking=True)
        if isinstance(out, PagedKVCache):
            out.put(side, layer, at, part)
        else:
            target[:, at : at + 1] = part
