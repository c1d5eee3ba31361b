"""Which errors in a cache change answers, for any engine: what gradients of drawn tokens tell.

Caches are read as they are used: a question may follow a document at once, or much later, or the document may stand
among others. Right behind it the last tokens weigh several times what others do, and layers that look far back hardly
count: so all three are gathered.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kvwire.errors import KvwireError
from kvwire.reuse import link

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.codec import StatisticsBuilder
    from kvwire.engines.base import Engine
    from kvwire.types import KVCache

_PIECES = 6
"""Of calibration texts, spread over all of them; each gives the gradients of one cache."""
_LONGEST, _LEAST = 384, 64
"""Tokens of a piece."""
_READ = 96
"""Tokens at most that are drawn behind a cache."""
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
    """Give a builder the gradients of a few pieces of text, read right behind, late, and in third place by turns.

    The first token of each document does not count: it is most likely an attention sink, whose gradients say nothing of
    other tokens, and codecs keep sinks nearly exactly.
    """
    if not isinstance(engine, GradientEngine):
        return 0
    count = 0
    for number, (cache, firsts, at, token_ids) in enumerate(_uses(engine, _pieces(engine, documents))):
        try:
            gradients = engine.cache_gradients(cache, token_ids, seed=number)
        except KvwireError as error:
            _log.warning("gradients of %d caches weigh errors, no more can be had: %s", count, error)
            break
        if all(bool(part.isfinite().all()) for part in (*gradients.keys, *gradients.values)):
            builder.add_gradients(gradients.slice(0, at), leave_out=firsts)
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


def _uses(engine: Engine, pieces: list[Sequence[int]]) -> Iterator[tuple[KVCache, tuple[int, ...], int, Sequence[int]]]:
    """Caches, where documents begin in them, how many of their tokens count, and what is read behind them."""
    for number, ids in enumerate(pieces):
        read = min(_READ, len(ids) // 4)
        at, third = len(ids) - read, (len(ids) - read) // 3
        use = number % 3
        if use == 0:
            yield engine.prefill([ids[:at]])[0], (0,), at, ids[at:]
        elif use == 1:
            yield engine.prefill([ids[:at]])[0], (0,), at * 3 // 5, ids[at:]
        else:
            documents = [pieces[number - 2][:third], pieces[number - 1][:third], ids[:third]]
            with suppress(KvwireError):  # some caches cannot be moved that far
                linked = link(engine.prefill(documents))
                firsts = (0, len(documents[0]), len(documents[0]) + len(documents[1]))
                yield linked, firsts, linked.tokens, ids[third : third + read]
