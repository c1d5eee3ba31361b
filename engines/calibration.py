"""Which errors in a cache change answers, for any engine: noise in one layer at a time, and gradients of drawn tokens.

For gradients caches are read as they are used: a question may follow a document at once, or much later, or the document
may stand among others. Right behind it the last tokens weigh several times what others do, and layers that look far
back hardly count: so all three are gathered.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from kvwire.codec import perturbed, planes_of, positions_on
from kvwire.errors import KvwireError
from kvwire.reuse import link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import Plane, Statistics, StatisticsBuilder
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

_PIECES = 24
"""Of calibration texts, spread over all of them."""
_LONGEST, _LEAST = 1280, 64
"""Tokens of a piece."""
_READ = 192
"""Tokens at most that are drawn behind a cache."""
_NOISY_DOCUMENTS, _NOISY_TOKENS = 3, 768
"""Documents, and tokens of each, that layers' sensitivities are measured on."""
_NOISE = 0.02
"""Noise in a layer's keys or values, as a share of their energy: small enough that its effect grows in proportion."""
_log = logging.getLogger("kvwire.engines")


@runtime_checkable
class GradientEngine(Protocol):
    """What an engine has that can backpropagate to a cache."""

    def cache_gradients(self, cache: KVCache, token_ids: Sequence[int], *, seed: int = 0) -> KVCache:
        """Backpropagate from drawn tokens to the cache before them.

        Behind each of the tokens one is drawn from what the model predicts there, so the mean of the gradients' squares
        is the Fisher information, which is what small errors make of the KL divergence.

        Args:
            cache: What stands before the tokens, positions on.
            token_ids: What follows; they are read, and those drawn are not.
            seed: Of the draw.

        Returns:
            In the cache's shape and at its positions, of any float dtype, the gradient of the sum of the drawn tokens'
            log-probabilities over the square root of their number.

        Raises:
            ArgumentError: The model cannot backpropagate.
        """
        ...


def gather_gradients(engine: Engine, documents: Sequence[Sequence[int]], builder: StatisticsBuilder) -> int:
    """Give a builder the gradients of some pieces of text, each read right behind, late, and in third place.

    Args:
        engine: Of the model; one that is no ``GradientEngine`` gives nothing.
        documents: Token ids of calibration texts.
        builder: What sums them.

    Returns:
        How many caches' gradients were added; with 0, attention's own metric is all that a fit has.
    """
    if not isinstance(engine, GradientEngine):
        return 0
    count = 0
    for number, (cache, at, token_ids) in enumerate(_uses(engine, _pieces(engine, documents))):
        try:
            gradients = engine.cache_gradients(cache, token_ids, seed=number)
        except KvwireError as error:
            _log.warning("gradients of %d caches weigh errors, no more can be had: %s", count, error)
            break
        if all(bool(part.isfinite().all()) for part in (*gradients.keys, *gradients.values)):
            builder.add_gradients(gradients.slice(0, at))
            count += 1
        else:
            _log.warning("gradients of a cache are not finite and left out; is the model's dtype too narrow?")
    return count


def _pieces(engine: Engine, documents: Sequence[Sequence[int]]) -> list[Sequence[int]]:
    longest = min(_LONGEST, engine.window)
    pieces = [ids[start : start + longest] for ids in documents for start in range(0, len(ids), longest)]
    pieces = [piece for piece in pieces if len(piece) >= _LEAST]
    count = min(_PIECES, len(pieces))
    return [pieces[number * len(pieces) // count] for number in range(count)]


def _uses(engine: Engine, pieces: list[Sequence[int]]) -> Iterator[tuple[KVCache, int, Sequence[int]]]:
    """Caches, how many of their tokens count, and what is read behind them."""
    for number, ids in enumerate(pieces):
        read = min(_READ, len(ids) // 4)
        at = (len(ids) - read) * 3 // 5
        (cache,) = engine.prefill([ids[:at]])
        yield cache, at, ids[at : at + read]
        if number % 2 == 0:
            (whole,) = engine.prefill([ids[:-read]])
            yield whole, at, ids[-read:]
        else:
            before = [other % len(pieces) for other in (number - 1, number - 2)]
            others = [pieces[other][: at // 2] for other in before if other != number]
            with suppress(KvwireError):  # some caches cannot be moved that far
                linked = link(engine.prefill([*others, ids[: at // 2]]))
                yield linked, linked.tokens, ids[at // 2 : at // 2 + read]


def measure_sensitivity(
    engine: Engine, documents: Sequence[Sequence[int]], statistics: Statistics
) -> dict[Plane, float]:
    """Mean KL divergence that noise in each plane of a cached context causes in what follows it.

    Args:
        engine: Of the model.
        documents: Token ids of calibration texts; the longest few are used.
        statistics: What is known of the model otherwise: noise is white in attention's metric.

    Returns:
        In nats, by plane; empty where all documents are too short. Planes whose divergence is not finite are left out.
    """
    total: dict[Plane, float] = {}
    longest = min(_NOISY_TOKENS, engine.window)
    chosen = [ids[:longest] for ids in sorted(documents, key=len, reverse=True)[:_NOISY_DOCUMENTS]]
    chosen = [taken for taken in chosen if len(taken) >= _LEAST]
    for taken in chosen:
        at = len(taken) * 3 // 4
        (cache,) = engine.prefill([taken[:at]])
        exact = _log_probabilities(engine, cache, taken[at:])
        for plane in planes_of(engine.meta.layers):
            noisy = _log_probabilities(engine, perturbed(cache, plane, statistics, _NOISE), taken[at:])
            apart = torch.where(exact > -math.inf, exact.exp() * (exact - noisy), 0.0).sum(-1).mean()
            total[plane] = total.get(plane, 0.0) + float(apart) / len(chosen)
    if lost := [plane for plane, value in total.items() if not math.isfinite(value)]:
        _log.warning("noise in %s gives no finite answers; they count as average", lost)
    return {plane: value for plane, value in total.items() if math.isfinite(value)}


def _log_probabilities(engine: Engine, cache: KVCache, rest: Sequence[int]) -> Tensor:
    past = engine.past_key_values(positions_on(cache, 0) if cache.meta.positions == "off" else cache)
    return engine.forward(past, rest, cache.tokens).float().log_softmax(-1)
