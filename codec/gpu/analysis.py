"""``transform.analyse`` on a device: transform a batch of chunks to coefficients, one group at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from kvwire.codec.transform.analysis import (
    HALVED_STEP,
    LARGE_STEPS,
    fast_bfloat16,
    fill_pruned,
    pruned_entries,
    sample,
)
from kvwire.codec.transform.positions import rotate, rotation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec.gpu.profile import DeviceGroup, DeviceProfile
    from kvwire.codec.prediction.text import TextPredictor
    from kvwire.types import KVCache

_BFLOAT16_SINCE = (8, 0)
"""Least compute capability whose tensor cores multiply bfloat16."""
Span = tuple[int, int]
"""Start and stop token of a chunk."""


@dataclass(frozen=True, eq=False)
class Analysed:
    """Coefficients of a batch.

    Attributes:
        coefficients: float32 ``[tokens, rank]``.
        sums: Sum of each group's elements, not finite where an element is not.
        dropped: float64 ``[chunks]``, the energy that the coefficients leave out, in the groups' metric.
    """

    coefficients: Tensor
    sums: Tensor
    dropped: Tensor


class Transform:
    """``transform.analyse`` on a device; ``step`` is the finest quantiser step."""

    def __init__(self, cache: KVCache, text: TextPredictor, known: DeviceProfile, step: float) -> None:
        """Copy the text's token ids to the device."""
        self._cache, self._known, self._step = cache, known, step
        self._profile, self._sinks = text.profile, text.sinks
        self._ids = None if text.token_ids is None else torch.from_numpy(text.token_ids).to(known.device)
        self._hidden = text.hidden
        self._halved = step >= HALVED_STEP and _multiplies_bfloat16(known.device)

    def analyse(self, spans: Sequence[Span]) -> Analysed:
        """Transform consecutive chunks."""
        start, stop = spans[0][0], spans[-1][1]
        sampled, weights, lengths = self._sampled(spans)
        out = torch.empty(stop - start, self._profile.rank, dtype=torch.float32, device=self._known.device)
        parts = torch.split(out, [group.rank for group in self._profile.groups], 1)
        hidden = None if self._hidden is None else self._hidden[start:stop].to(out.device)
        sums, weighed, large = [], [], []
        for group, part in zip(self._known.groups, parts, strict=True):
            centred, total = self._centred(group, start, stop, hidden)
            sums.append(total)
            large.append(self._project(centred, group, part))
            if group.metric and group.rank < group.width:
                weighed.append((group, part, centred[sampled]))
        if self._halved:
            self._repeat(torch.stack(large).cpu(), parts, start, hidden)  # the host waits
        missing = [_left_out(rest, part[sampled], group) for group, part, rest in weighed]
        dropped = torch.zeros(len(spans), dtype=torch.float64, device=self._known.device)
        if missing:
            chunks = torch.split(torch.stack(missing) * weights, lengths, 1)
            dropped = torch.stack([chunk.sum() for chunk in chunks])
        return Analysed(out, torch.stack(sums), dropped)

    def _sampled(self, spans: Sequence[Span]) -> tuple[Tensor, Tensor, list[int]]:
        """Return the tokens that are measured, for how many each stands, and how many each chunk has."""
        found = [sample(*span) for span in spans]
        index = torch.cat([tokens + start - spans[0][0] for (tokens, _), (start, _) in zip(found, spans, strict=True)])
        weights = torch.cat([weights for _, weights in found])
        device = self._known.device
        return index.to(device), weights.to(device), [len(tokens) for tokens, _ in found]

    def _centred(self, group: DeviceGroup, start: int, stop: int, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return a group's elements minus their prediction, float32 ``[tokens, width]``, and the elements' sum.

        ``hidden``: hidden states of these tokens, on the device.
        """
        cache = self._cache
        out = torch.empty(stop - start, group.width, dtype=torch.float32, device=self._known.device)
        views = torch.split(out, [self._width(plane) for plane in group.planes], 1)
        cos_sin: dict[int, tuple[Tensor, Tensor]] = {}
        for (side, layer), view in zip(group.planes, views, strict=True):
            tensor = (cache.keys if side == "key" else cache.values)[layer][:, start:stop].detach().to(out.device)
            rotary = cache.meta.layers[layer].rotary(side) if cache.meta.positions == "on" else None
            if rotary is not None:
                index, first = rotary
                regime = cache.meta.ropes[index]
                if index not in cos_sin:
                    cos_sin[index] = rotation(regime, cache.meta.offset + start, stop - start, out.device)
                cos, sin = cos_sin[index]
                tensor = rotate(tensor, regime, cos, -sin, first)
            view.view(stop - start, len(tensor), -1).copy_(tensor.permute(1, 0, 2))
        total = out.sum()
        out -= self._expected(group, start, stop, hidden)
        for at in self._sinks:
            if start <= at < stop:
                out[at - start] = 0.0  # the header stores sinks
        if cache.kept is not None:
            pruned = pruned_entries(cache, group.planes, start, stop).to(out.device)
            analysis = None if group.scales is not None else group.analysis
            fill_pruned(out, pruned, analysis, group.variances(self._step))
        return out, total

    def _width(self, plane: tuple[str, int]) -> int:
        spec = self._cache.meta.layers[plane[1]]
        return spec.key_width if plane[0] == "key" else spec.value_width

    def _expected(self, group: DeviceGroup, start: int, stop: int, hidden: Tensor | None) -> Tensor:
        """Predict as ``TextPredictor.expected``; the factors are exact in TF32, so only sums round before the end."""
        out = group.mean
        if group.predictor is None:
            return out
        features = self._known.features
        if self._ids is not None and self._known.table is not None:
            said = self._known.table[self._ids[start:stop]].float()
            out = torch.addmm(out, said, group.predictor[:features].float()).bfloat16().float()
        if hidden is not None:
            out = out + hidden @ group.predictor[features:].float()
        return out

    def _project(self, centred: Tensor, group: DeviceGroup, out: Tensor) -> Tensor:
        """Write the coefficients; return bool ``[tokens]``, which tokens must be projected again in float32."""
        halved = self._halved and group.scales is None and group.rank > 0
        if group.scales is not None:
            out.copy_(centred / group.scales)
        elif halved:
            out.copy_(centred.bfloat16() @ group.halved_analysis)
        else:
            out.copy_(centred @ group.analysis)
        if not halved:
            return torch.zeros(len(out), dtype=torch.bool, device=out.device)
        return out.abs().amax(1) > LARGE_STEPS * self._step

    def _repeat(self, large: Tensor, parts: Sequence[Tensor], start: int, hidden: Tensor | None) -> None:
        """Project tokens with large coefficients in float32; ``large``: bool ``[groups, tokens]`` on the host."""
        for group, part, tokens in zip(self._known.groups, parts, large, strict=True):
            index = tokens.nonzero()[:, 0]
            if len(index):
                first, last = int(index[0]), int(index[-1]) + 1
                own = None if hidden is None else hidden[first:last]
                centred, _ = self._centred(group, start + first, start + last, own)
                part[index.to(part.device)] = centred[(index - first).to(part.device)] @ group.analysis


def _multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 matrices faster than float32 ones."""
    if device.type != "cuda":
        return fast_bfloat16()
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= _BFLOAT16_SINCE


def _left_out(centred: Tensor, coefficients: Tensor, group: DeviceGroup) -> Tensor:
    """``left_out`` on a device; changes the elements."""
    if group.scales is not None:
        centred[:, : coefficients.shape[1]] -= coefficients * group.scales[: coefficients.shape[1]]
    else:
        centred.addmm_(coefficients, cast("Tensor", group.rows).float(), alpha=-1)
    return _energies(centred, group.metric)


def _energies(centred: Tensor, metric: tuple[Tensor, ...]) -> Tensor:
    """Compute each row's squared length in the group's metric, float64 ``[tokens]``."""
    out, at = torch.zeros(len(centred), dtype=torch.float64, device=centred.device), 0
    for block in metric:
        width = len(block) if block.ndim == 1 else block.shape[0] * block.shape[1]
        part = centred[:, at : at + width]
        if block.ndim == 1:
            weighted = part * block
        else:
            heads = part.view(len(part), *block.shape[:2]).transpose(0, 1)
            weighted = (heads @ block).transpose(0, 1).flatten(1)
        out += (weighted * part).sum(1, dtype=torch.float64)
        at += width
    return out
