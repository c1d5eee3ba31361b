"""Caches to coefficients and back, group by group.

The transform is an attention-weighted Karhunen-Loeve transform (KVTC, arXiv 2511.01815, without the weights): in the
metric that attention puts on errors, coefficients are uncorrelated and all deserve the same step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvwire.codec.entropy import value_kernels
from kvwire.codec.transform.positions import rotate, rotation, within
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
"""Quantiser step from which on what bfloat16 rounds off the elements adds little to the quantiser's own error: three
per cent at the default ladder's finest level."""
LARGE_STEPS = 1024
"""Coefficients beyond this many steps are worth float32."""


MANY_TOKENS = 64


def gather(cache: KVCache, side: Side, layers: tuple[int, ...], start: int, stop: int) -> Tensor:
    """Collect tokens of some layers, positions taken off."""
    return gather_planes(cache, tuple((side, layer) for layer in layers), start, stop)


def gather_planes(cache: KVCache, planes: Sequence[Plane], start: int, stop: int) -> Tensor:
    """Collect tokens of any planes, in their order, positions taken off."""
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
    """Gather tokens as ``gather_planes`` does and subtract the prediction, in one pass where the kernel can read."""
    rows, of_token = expected
    sources = [(cache.keys if side == "key" else cache.values)[layer].detach() for side, layer in planes]
    if all(map(plain, sources)):
        out = _taken(cache, planes, sources, start, expected)
        if math.isfinite(float(out.sum())):
            return out
    out = gather_planes(cache, planes, start, stop)
    out -= rows[0] if len(rows) == 1 else rows[torch.from_numpy(of_token.astype(np.int64))].float()
    return out


def _taken(
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
    """Show a tensor to the kernels."""
    halved = tensor.dtype == torch.bfloat16
    return (tensor.view(torch.uint16) if halved else tensor).numpy(), halved


def plain(tensor: Tensor) -> bool:
    """Ask whether the kernels can read and write a tensor."""
    return tensor.device.type == "cpu" and tensor.dtype in (torch.float32, torch.bfloat16) and tensor.stride(-1) == 1


def analyse(
    cache: KVCache, text: TextPredictor, start: int, stop: int, step: float = 0.0, *, weighs: bool = True
) -> tuple[NDArray[np.float32], float]:
    """Transform tokens to coefficients."""
    parts, dropped = [], 0.0
    sampled = slice(None, None, sampling_step(start, stop))
    halved = step >= HALVED_STEP and fast_bfloat16()
    for index, group in enumerate(text.profile.groups):
        centred = centre_planes(cache, group.planes, start, stop, text.expected(index, start, stop))
        if text.sinks:
            centred[[at - start for at in text.sinks if start <= at < stop]] = 0.0  # the header has them
        if cache.kept is not None:
            _forget_pruned(centred, cache, group.planes, start, stop)
        coefficients = _project(centred, group, step if halved else None)
        parts.append(coefficients.numpy())
        if weighs and group.metric and group.rank < group.width:
            missing = metric_energy(centred[sampled], group) - kept_energy(coefficients[sampled], group)
            dropped += max(0.0, missing) * (stop - start) / len(centred[sampled])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1), dropped


def sampling_step(start: int, stop: int) -> int:
    """Choose the tokens whose energies are weighed."""
    return 8 if start and stop - start >= MANY_TOKENS else 1


def fast_bfloat16() -> bool:
    """Ask the processor."""
    known = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(bool(ask()) for ask in known if ask is not None)


def _forget_pruned(centred: Tensor, cache: KVCache, planes: Sequence[Plane], start: int, stop: int) -> None:
    """Let entries that the cache does not hold be just what is expected: that costs least."""
    at = 0
    for side, layer in planes:
        spec, mask = cache.meta.layers[layer], cache.kept[layer] if cache.kept else None
        width = spec.key_width if side == "key" else spec.value_width
        if mask is not None:
            part = centred[:, at : at + width].view(stop - start, spec.kv_heads, -1)
            part.masked_fill_(~mask[:, start:stop].cpu().T[:, :, None], 0.0)
        at += width


def _project(centred: Tensor, group: Group, halved_step: float | None) -> Tensor:
    """Coefficients ``[tokens, rank]`` of a group's elements ``[tokens, width]``, the expectation taken off.

    halved_step: None for float32. Else products run in bfloat16, but for tokens with a coefficient so large, against
    this step, that eight bits of it would not do: the first tokens of a text often are such.
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


def energy_of(coefficients: NDArray[np.floating]) -> float:
    """Sum the squares of coefficients: the metric makes them orthonormal."""
    return float(np.square(coefficients, dtype=np.float32).sum(dtype=np.float64))


def kept_energy(coefficients: Tensor, group: Group) -> float:
    """Sum up the squared lengths, in a group's metric, of what coefficients stand for.

    That is not quite the sum of their squares: the rows are no longer orthonormal. What is left out is a ten-thousandth
    of the whole, and would be lost in the difference.
    """
    if group.is_identity:
        return energy_of(coefficients.numpy())
    return float((coefficients @ group.gram).mul_(coefficients).sum(dtype=torch.float64))


def metric_energy(centred: Tensor, group: Group) -> float:
    """Sum up the squared lengths of some tokens in a group's metric."""
    total, start = 0.0, 0
    for metric in group.metric_runs:
        width = len(metric) if metric.ndim == 1 else metric.shape[0] * metric.shape[1]
        part = centred[:, start : start + width]
        if metric.ndim == 1:
            weighted = part * metric
        else:
            part = part.view(len(part), *metric.shape[:2]).transpose(0, 1)
            weighted = part @ metric
        total += float(weighted.mul_(part).sum(dtype=torch.float64))
        start += width
    return total


def synthesise(coefficients: Tensor, group: Group, rows: Tensor, of_token: NDArray[np.uint32]) -> Tensor:
    """Transform the first coefficients of a group back, all others being zero, and add what is expected.

    Only the coefficients given cost anything: the product runs over those rows of the synthesis matrix.
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
    """Write planes' elements into a cache."""
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
        target[:, start : start + tokens] = within(part, target.dtype)
