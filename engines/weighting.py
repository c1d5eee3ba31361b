"""Which weighting of errors suits a model: each is fitted on some calibration texts and measured on others."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import numpy as np
import torch

from kvwire.codec import Weighting, decode, encode, fit_profile, inspect
from kvwire.errors import KvwireError
from kvwire.reuse import link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec import Profile, Statistics
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

_FITTED, _MEASURED = 9, 3
"""Texts that trial profiles are fitted on, and others that they are measured on."""
_LONGEST, _LEAST = 512, 256
"""Tokens of a text."""
_BEFORE = 128
"""Tokens at most of another document that a measured one is linked behind."""
_LEVELS = 4
_COMPARED = slice(1, 3)
"""Levels that are coded, and those at whose divergence bits are compared."""
_GAIN = 0.75
"""Bits over the usual weighting's that another must stay below: trials err by a sixth, and other text may suffer."""
_TINY = 1e-12
_log = logging.getLogger("kvwire.engines")


@dataclass(frozen=True)
class _Text:
    """A document to measure on: its cache, what is read behind it, and what exact caches make of that in each use."""

    cache: KVCache
    before: KVCache
    rest: Sequence[int]
    exact: tuple[Tensor, ...]


def choose_weighting(engine: Engine, documents: Sequence[Sequence[int]], statistics: Statistics) -> Weighting:
    """Measure which weighting needs the fewest bits at equal KL divergence.

    Each is fitted on some of the texts, plane by plane, which is quick, and measured on others: on what follows a
    document at once, on what follows later, and behind another document. And on tokens in random order, which stand for
    text of another kind. The usual one stays unless another needs a quarter less in the mean, and no more in any of
    these uses, nor for tokens in random order.

    Args:
        engine: Of the model.
        documents: Token ids of calibration texts.
        statistics: Gathered from them.

    Returns:
        The weighting; ``mixed`` where gradients are missing or there is too little text to tell.
    """
    before = min(_BEFORE, engine.window // 8)
    longest = min(_LONGEST, engine.window - before)
    pieces = [ids[start : start + longest] for ids in documents for start in range(0, len(ids), longest)]
    pieces = [piece for piece in pieces if len(piece) >= _LEAST]
    count = _FITTED + _MEASURED
    if not statistics.fisher or len(pieces) < count:
        return "mixed"
    chosen = [pieces[number * len(pieces) // count] for number in range(count)]
    measured = chosen[:: count // _MEASURED]
    fitted = [ids for number, ids in enumerate(chosen) if number % (count // _MEASURED)]
    caches = engine.prefill(fitted)
    kinds = [
        [_text(engine, ids, other[:before]) for ids, other in zip(read, fitted, strict=False)]
        for read in (measured, [_in_random_order(ids) for ids in measured])
    ]
    if len({len(text.exact) for texts in kinds for text in texts}) > 1:  # only some can be linked: not alike
        return "mixed"
    curves: dict[Weighting, list[NDArray[np.float64]]] = {}
    for weighting in get_args(Weighting):
        profile = fit_profile(caches, replace(statistics, weighting=weighting), group_width=1)
        if profile is not None:
            curves[weighting] = [_curves(engine, profile, texts) for texts in kinds]
    return _best(curves)


def _in_random_order(ids: Sequence[int]) -> list[int]:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    return [ids[place] for place in order.tolist()]


def _text(engine: Engine, ids: Sequence[int], other: Sequence[int]) -> _Text:
    at = len(ids) * 5 // 8
    cache, before = engine.prefill([ids[:at], other])
    return _Text(cache, before, ids[at:], tuple(_read(engine, cache, before, ids[at:])))


def _read(engine: Engine, cache: KVCache, before: KVCache, rest: Sequence[int]) -> Iterator[Tensor]:
    """Log-probabilities of what follows a document at once, later, and at once behind another document."""
    found = engine.forward(engine.past_key_values(cache), rest, cache.tokens).float().log_softmax(-1)
    half = len(rest) // 2
    yield from (found[:half], found[half:])
    with suppress(KvwireError):  # some caches cannot be moved
        linked = link([before, cache])
        yield engine.forward(engine.past_key_values(linked), rest[:half], linked.tokens).float().log_softmax(-1)


def _curves(engine: Engine, profile: Profile, texts: Sequence[_Text]) -> NDArray[np.float64]:
    """Logarithms of the mean bits for each element and of the mean KL divergence, ``[levels, 1 + uses]``."""
    total: NDArray[np.float64] | float = 0.0
    for text in texts:
        blob = encode(text.cache, profile, _LEVELS)
        rows = []
        for index, level in enumerate(inspect(blob).levels):
            decoded = decode(blob, index, profile, engine.device, engine.dtype)
            found = _read(engine, decoded, text.before, text.rest)
            rows.append([level.bits_per_element, *map(_kl, text.exact, found)])
        total = total + np.array(rows)
    return np.log(np.maximum(total / len(texts), _TINY))


def _kl(exact: Tensor, found: Tensor) -> float:
    return float(torch.where(exact > -math.inf, exact.exp() * (exact - found), 0.0).sum(-1).mean())


def _best(curves: dict[Weighting, list[NDArray[np.float64]]]) -> Weighting:
    """The weighting with the least bits at the usual one's divergence, if it is clearly better and nowhere worse."""
    best: Weighting = "mixed"
    least = _GAIN
    for weighting, kinds in curves.items():
        in_use, elsewhere = (
            [_bits(mine, usual, use) for use in range(1, mine.shape[1])]
            for mine, usual in zip(kinds, curves["mixed"], strict=True)
        )
        mean, other = (math.exp(float(np.log(ratios).mean())) for ratios in (in_use, elsewhere))
        told = ", ".join(f"{ratio:.2f}" for ratio in in_use)
        _log.info("weighting %r: %.2f of the bits (%s), in random order %.2f", weighting, mean, told, other)
        if mean < least and max(*in_use, other) <= 1:
            best, least = weighting, mean
    return best


def _bits(mine: NDArray[np.float64], usual: NDArray[np.float64], use: int) -> float:
    """Bits of one curve over those of another at its divergence in a use, straight between levels."""
    falling = np.minimum.accumulate(mine[:, use])
    needed = np.interp(-usual[_COMPARED, use], -falling, mine[:, 0])
    return float(np.exp((needed - usual[_COMPARED, 0]).mean()))
