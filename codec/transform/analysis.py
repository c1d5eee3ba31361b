"""Transform caches to coefficients and back, group by group.

The transform is an attention-weighted Karhunen-Loeve transform (KVTC, arXiv 2511.01815, is the unweighted one): in
attention's metric of errors, coefficients are uncorrelated and the same quantiser step is right for all.
"""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire.codec.entropy import value_kernels
from kvwire.codec.entropy.tables import scale_of
from kvwire.codec.transform.positions import clamp_to, rotate, rotation
from kvwire.errors import CacheValueError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.backend import Plane, Side
    from kvwire.codec.prediction.text import TextPredictor
    from kvwire.codec.profile.group import Group
    from kvwire.types import CacheMeta, KVCache


HALVED_STEP = 0.02
"""Least quantiser step at which rounding elements to bfloat16 adds little to the quantiser's error: 3 % at the default
ladder's finest level."""
LARGE_STEPS = 1024
"""Coefficients of more steps than this are computed in float32."""
FILL_STEPS = 8
"""Steps of the conjugate gradients that fill pruned elements."""
_FLAT = 1e-6
"""A curvature so much less than others is rounding error: dividing by it would give huge elements, or NaN."""
MANY_TOKENS = 64
"""Chunks of at least this many tokens measure the energy that is left out by every eighth token."""
FIRST_TOKENS = 8
"""So many tokens of a document are all measured: attention sinks are among them, whose energies differ."""


def gather(cache: KVCache, side: Side, layers: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Collect tokens of one side of some layers with positions off, float32 ``[tokens, width]``."""
    return gather_planes(cache, tuple((side, layer) for layer in layers), start, stop)


def gather_planes(cache: KVCache, planes: Sequence[Plane], start: int, stop: int) -> Tensor:
    """Collect tokens of planes in the given order with positions off, float32 ``[tokens, width]``."""
    parts = []
    cos_sin: dict[int, tuple[Tensor, Tensor]] = {}
    for side, layer in planes:
        tensor = (cache.keys if side == "key" else cache.values)[layer][:, start:stop].detach()
        rotary = cache.meta.layers[layer].rotary(side) if cache.meta.positions == "on" else None
        if rotary is None:
            part = tensor.to("cpu", torch.float32)
        else:
            index, first = rotary
            regime = cache.meta.ropes[index]
            if index not in cos_sin:
                cos_sin[index] = rotation(regime, cache.meta.offset + start, stop - start)
            cos, sin = cos_sin[index]
            part = rotate(tensor.cpu(), regime, cos, -sin, first)
        parts.append(part.permute(1, 0, 2).reshape(stop - start, -1))
    out = torch.cat(parts, 1)
    if not math.isfinite(float(out.sum())) and not np.isfinite(out.numpy()).all():
        bad = next(plane for plane, part in zip(planes, parts, strict=True) if not np.isfinite(part.numpy()).all())
        raise CacheValueError(f"layer {bad[1]}'s {bad[0]}s hold NaN or infinity; prefill the document again in float32")
    return out


def centre_planes(
    cache: KVCache, planes: Sequence[Plane], start: int, stop: int, expected: tuple[Tensor, NDArray[np.uint32]]
) -> Tensor:
    """Gather tokens as ``gather_planes`` and subtract the prediction, in one pass where the kernel can read them."""
    rows, of_token = expected
    sources = [(cache.keys if side == "key" else cache.values)[layer].detach() for side, layer in planes]
    if all(map(plain, sources)):
        out = _centre_with_kernel(cache, planes, sources, start, expected)
        if math.isfinite(float(out.sum())):
            return out
    out = gather_planes(cache, planes, start, stop)
    out -= rows[0] if len(rows) == 1 else rows[torch.from_numpy(of_token.astype(np.int64))].float()
    return out


def _centre_with_kernel(
    cache: KVCache,
    planes: Sequence[Plane],
    sources: list[Tensor],
    start: int,
    expected: tuple[Tensor, NDArray[np.uint32]],
) -> Tensor:
    (rows, expand_rows), of_token = bits_of(expected[0]), expected[1]
    out = torch.empty(len(of_token), rows.shape[1])
    elements, unrotated = out.numpy(), np.empty((len(of_token), 0), np.float32)
    cos_sin: dict[int, tuple[NDArray[np.float32], NDArray[np.float32]]] = {}
    at = 0
    for (side, layer), source in zip(planes, sources, strict=True):
        rotary = cache.meta.layers[layer].rotary(side) if cache.meta.positions == "on" else None
        (cosines, sines), interleaved, first = (unrotated, unrotated), False, 0
        if rotary is not None:
            index, first = rotary
            if index not in cos_sin:
                cos, sin = rotation(cache.meta.ropes[index], cache.meta.offset + start, len(of_token))
                cos_sin[index] = cos.numpy(), sin.numpy()
            (cosines, sines), interleaved = cos_sin[index], cache.meta.ropes[index].interleaved
        value_kernels.take_elements(
            *bits_of(source), start, rows, expand_rows, of_token, at, cosines, sines, interleaved, first, elements
        )  # fmt: skip
        at += source.shape[0] * source.shape[2]
    return out


def bits_of(tensor: Tensor) -> tuple[NDArray[Any], bool]:
    """View a tensor as numpy, bfloat16 as uint16 bits; also return whether it is bits."""
    halved = tensor.dtype == torch.bfloat16
    return (tensor.view(torch.uint16) if halved else tensor).numpy(), halved


def plain(tensor: Tensor) -> bool:
    """Return whether the kernels can read and write a tensor."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16) and tensor.stride(-1) == 1


def analyse(
    cache: KVCache, text: TextPredictor, start: int, stop: int, step: float = 0.0, *, weighs: bool = True
) -> tuple[NDArray[np.float32], float]:
    """Transform tokens to coefficients ``[tokens, rank]``; also return the energy that they leave out.

    ``step``: the finest quantiser step; ``weighs``: whether to measure that energy.
    """
    parts, dropped = [], 0.0
    sampled, weights = sample(start, stop)
    halved = step >= HALVED_STEP and fast_bfloat16()
    for index, group in enumerate(text.profile.groups):
        centred = centre_planes(cache, group.planes, start, stop, text.expected(index, start, stop))
        if text.sinks:
            centred[[at - start for at in text.sinks if start <= at < stop]] = 0.0  # the header stores them
        if cache.kept is not None:
            pruned = pruned_entries(cache, group.planes, start, stop)
            fill_pruned(centred, pruned, group.analysis, variances_of(group, step))
        coefficients = _project(centred, group, step if halved else None)
        parts.append(coefficients.numpy())
        if weighs and group.metric and group.rank < group.width:
            dropped += float(left_out(centred[sampled], coefficients[sampled], group) @ weights)
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), dropped


def sample(start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return which of a chunk's tokens are measured, int64, and for how many each stands, float64."""
    tokens = stop - start
    first = tokens if tokens < MANY_TOKENS else FIRST_TOKENS if start == 0 else 0
    others = torch.arange(first, tokens, 8)
    weights = torch.full((first + len(others),), (tokens - first) / max(1, len(others)), dtype=torch.float64)
    weights[:first] = 1.0
    return torch.cat([torch.arange(first), others]), weights


@cache
def fast_bfloat16() -> bool:
    """Return whether the processor multiplies bfloat16 faster than float32.

    Intel's do so with AMX only: without it, one with AVX512_BF16 took twice as long as in float32, where AMD's takes
    half. No clock decides, so that equal hardware encodes equal bytes.
    """
    native, amx = (getattr(torch.cpu, f"_is_{name}_supported", bool)() for name in ("avx512_bf16", "amx_tile"))
    try:
        vendor = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        vendor = ""
    return bool(amx or (native and "AuthenticAMD" in vendor))


def pruned_entries(cache: KVCache, planes: Sequence[Plane], start: int, stop: int) -> Tensor:
    """Return which elements ``gather_planes`` collects of pruned entries, bool ``[tokens, width]``."""
    parts = []
    for side, layer in planes:
        spec, mask = cache.meta.layers[layer], cache.kept[layer] if cache.kept else None
        width = spec.key_width if side == "key" else spec.value_width
        if mask is None:
            parts.append(torch.zeros(stop - start, width, dtype=torch.bool))
        else:
            parts.append((~mask[:, start:stop]).T.cpu().repeat_interleave(width // spec.kv_heads, 1))
    return torch.cat(parts, 1)


def fill_pruned(centred: Tensor, pruned: Tensor, analysis: Tensor | None, variances: Tensor) -> None:
    """Fill pruned elements with what costs least to code; decoders drop them.

    That is the conditional mean, given the token's kept elements, where coefficients have these variances. Conjugate
    gradients come close: 21 to 39 % fewer bytes than the prediction at levels 2 to 4 (SmolLM2, half of each head kept).

    Args:
        centred: float32 ``[tokens, width]``, elements minus their prediction; changed in place.
        pruned: bool ``[tokens, width]``.
        analysis: ``Group.analysis``; None for the identity, whose elements stay at the prediction.
        variances: float32 ``[rank]``, of the coefficients.
    """
    centred.masked_fill_(pruned, 0.0)
    rows = (pruned.any(1) & ~pruned.all(1)).nonzero()[:, 0]
    if analysis is None or not len(rows):
        return
    filled, free = centred[rows], pruned[rows]

    def slope(elements: Tensor) -> Tensor:
        """Half the gradient of the coefficients' squares over their variances, at pruned elements."""
        return ((elements @ analysis / variances) @ analysis.T).masked_fill_(~free, 0.0)

    tiny = torch.finfo(torch.float32).tiny
    curvature = (analysis.square() / variances).sum(1)
    curvature = curvature.clamp(min=max(_FLAT**2 * float(curvature.max()), tiny))
    residual = -slope(filled)
    scaled = residual / curvature
    direction, before = scaled, (residual * scaled).sum(1, keepdim=True)
    for _ in range(FILL_STEPS):
        change = slope(direction)
        bend = (direction * change).sum(1, keepdim=True)
        is_flat = bend <= _FLAT * (curvature * direction.square()).sum(1, keepdim=True)  # the row is filled already
        length = (before / bend).masked_fill_(is_flat, 0.0)
        filled += length * direction
        residual -= length * change
        scaled = residual / curvature
        after = (residual * scaled).sum(1, keepdim=True)
        direction = scaled + after / before.clamp(min=tiny) * direction
        before = after
    centred[rows] = filled


def variances_of(group: Group, step: float) -> Tensor:
    """Return the expected variances of a group's coefficients, float32 ``[rank]``.

    Coefficients below the steps cost nothing: the default ladder's second finest serves all its levels.
    """
    return torch.from_numpy((np.square(scale_of(group.spread)) + (3 * step) ** 2).astype(np.float32))


def _project(centred: Tensor, group: Group, halved_step: float | None) -> Tensor:
    """Compute coefficients ``[tokens, rank]`` of a group's centred elements ``[tokens, width]``.

    ``halved_step``: None for float32; else products run in bfloat16, except for tokens with coefficients of more than
    LARGE_STEPS, such as the first of a text.
    """
    analysis = group.analysis
    if analysis is None:
        return centred / torch.from_numpy(group.scales)
    if halved_step is None or not group.rank:
        return centred @ analysis
    out = (centred.bfloat16() @ group.halved_analysis).float()
    large = out.abs().amax(1) > LARGE_STEPS * halved_step
    if bool(large.any()):
        out[large] = centred[large] @ analysis
    return out


def left_out(centred: Tensor, coefficients: Tensor, group: Group) -> Tensor:
    """Squared distance, in a group's metric, of tokens from what their coefficients give, float64 ``[tokens]``.

    A difference of energies is too inexact: what is left out is tiny, and bfloat16 products round more than that.
    """
    if group.is_identity:
        rest = centred.clone()
        rest[:, : coefficients.shape[1]] -= coefficients * torch.from_numpy(group.scales)[: coefficients.shape[1]]
    else:
        rest = torch.addmm(centred, coefficients, group.first_synthesis(coefficients.shape[1]), alpha=-1)
    return metric_energies(rest, group)


def metric_energies(centred: Tensor, group: Group) -> Tensor:
    """Squared length of each token in a group's metric, float64 ``[tokens]``."""
    total, start = torch.zeros(len(centred), dtype=torch.float64), 0
    for metric in group.metric_runs:
        width = len(metric) if metric.ndim == 1 else metric.shape[0] * metric.shape[1]
        part = centred[:, start : start + width]
        if metric.ndim == 1:
            weighted = part * metric
        else:
            heads = part.view(len(part), *metric.shape[:2]).transpose(0, 1)
            weighted = (heads @ metric).transpose(0, 1).flatten(1)
        total += (weighted * part).sum(1, dtype=torch.float64)
        start += width
    return total


def synthesise(coefficients: Tensor, group: Group, rows: Tensor, of_token: NDArray[np.uint32]) -> Tensor:
    """Transform a group's first coefficients back, with all others zero, and add the prediction.

    The product runs only over the synthesis rows of the given coefficients.
    """
    out = rows[torch.from_numpy(of_token.astype(np.int64))].float()
    given = coefficients.shape[1]
    if group.is_identity:
        out[:, :given] += coefficients * torch.from_numpy(group.scales)[:given]
        return out
    return out.addmm_(coefficients, group.first_synthesis(given))


def scatter_planes(
    elements: Tensor,
    planes: Sequence[Plane],
    out: KVCache,
    meta: CacheMeta,
    start: int,
    cos_sin: dict[int, tuple[Tensor, Tensor]],
) -> None:
    """Write planes' elements ``[tokens, width]`` into a cache, rotated by ``cos_sin`` where it is not empty."""
    tokens, at = len(elements), 0
    for side, layer in planes:
        spec = meta.layers[layer]
        dim = spec.key_dim if side == "key" else spec.value_dim
        part = elements[:, at : at + spec.kv_heads * dim].reshape(tokens, spec.kv_heads, dim).permute(1, 0, 2)
        at += spec.kv_heads * dim
        rotary = spec.rotary(side)
        if rotary is not None and cos_sin:
            index, first = rotary
            part = rotate(part, meta.ropes[index], *cos_sin[index], first)
        target = (out.keys if side == "key" else out.values)[layer]
        target[:, start : start + tokens] = clamp_to(part, target.dtype)
