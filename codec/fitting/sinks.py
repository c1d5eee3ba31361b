"""Fit a profile's row of attention sinks: the mean of calibration texts' first tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.transform.analysis import gather_planes
from kvwire.codec.transform.sinks import NEARER, compare, find_sinks, surprise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec.profile.group import Group
    from kvwire.codec.profile.profile import Profile
    from kvwire.types import KVCache

SINK_STEP = 0.25
"""Step of sinks, in finest steps: their error is then less than a tenth of the finest level's."""


def begins_text(cache: KVCache) -> bool:
    """Return whether a cache's first token begins its text: such a token is most likely a sink."""
    return cache.meta.offset == 0 and cache.kept is None


def learn_sinks(
    draft: Profile, caches: Sequence[KVCache], hidden: Sequence[Tensor] | None, finest: float
) -> tuple[Profile, list[TextPredictor]]:
    """Add a sink row to a draft profile if calibration texts begin with sinks; also return the texts' predictors."""
    firsts = {
        number: [gather_planes(cache, group.planes, 0, 1) for group in draft.groups]
        for number, cache in enumerate(caches)  # caches are large and loaded one at a time
        if begins_text(cache)
    }
    if firsts:
        rows = [torch.cat(parts) for parts in zip(*firsts.values(), strict=True)]
        groups = (_with_sink(*each, SINK_STEP * finest) for each in zip(draft.groups, rows, strict=True))
        made = replace(draft, groups=tuple(groups))
        texts = _texts(made, caches, hidden)
        if _are_sinks(caches, texts, tuple(firsts)):
            for text, cache in zip(texts, caches, strict=True):
                text.sinks = tuple(find_sinks(cache, text))
            return made, texts
    return draft, _texts(draft, caches, hidden)


def _are_sinks(caches: Sequence[KVCache], texts: Sequence[TextPredictor], begun: Sequence[int]) -> bool:
    """Return whether most first tokens are nearer to the mean of the others' than to their prediction.

    A single first token must be the worst predicted token of its text. ``begun``: the caches that begin a text.
    """
    count = len(begun)
    if count == 1:
        return bool(surprise(caches[begun[0]], texts[begun[0]]).argmax() == 0)
    shares = [compare(caches[number], texts[number], 0)[0] for number in begun]
    return float(np.median(shares)) * (count / (count - 1)) ** 2 < NEARER


def _texts(profile: Profile, caches: Sequence[KVCache], hidden: Sequence[Tensor] | None) -> list[TextPredictor]:
    states: Sequence[Tensor | None] = hidden or [None] * len(caches)
    return [TextPredictor(profile, c.tokens, c.token_ids, h) for c, h in zip(caches, states, strict=True)]


def _with_sink(group: Group, rows: Tensor, step: float) -> Group:
    steps = step / np.sqrt(np.maximum(_diagonal(group), np.float32(1e-30)))
    return replace(group, sink=rows.mean(0).numpy(), sink_steps=steps.astype(np.float32))


def _diagonal(group: Group) -> NDArray[np.float32]:
    parts = [block if block.ndim == 1 else np.diagonal(block, axis1=1, axis2=2).reshape(-1) for block in group.metric]
    return cast("NDArray[np.float32]", np.concatenate(parts))
