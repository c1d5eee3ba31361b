"""Which errors in a cache change answers, for any engine: by gradients of sampled tokens.

A question may follow a document at once or much later, or the document may stand among others. Right before it, the
last tokens weigh several times what others do, and layers of long reach hardly count: so all three cases are sampled.
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
"""Pieces of calibration text, spread evenly; each gives the gradients of one cache."""
_LONGEST, _LEAST = 384, 64
"""Tokens per piece."""
_READ = 96
"""Most tokens sampled after a cache."""
_log = logging.getLogger("kvwire.engines")


@runtime_checkable
class GradientEngine(Protocol):
    """An engine that can backpropagate to a cache."""

    def cache_gradients(self, cache: KVCache, token_ids: Sequence[int], *, seed: int = 0) -> KVCache:
        """Backpropagate from sampled tokens to the cache before them.

        After each of the tokens one is sampled from the model's prediction, so the mean square of the gradients is the
        Fisher information, which relates small errors to KL divergence.

        Args:
            cache: Cache before the tokens, positions on.
            token_ids: The tokens after it; the model reads them, not the sampled ones.
            seed: Seed of the samples.

        Returns:
            In the cache's shape and at its positions, of any float dtype: the gradient of the sum of the sampled
            tokens' log-probabilities over the square root of their number.

        Raises:
            ArgumentError: The model cannot backpropagate.
        """
        ...


def gather_gradients(engine: Engine, documents: Sequence[Sequence[int]], builder: StatisticsBuilder) -> int:
    """Give a builder gradients of some pieces of text: followed by the question at once, late, and in third place.

    The first token of each document is left out: it is likely an attention sink, whose gradients are unlike other
    tokens', and codecs store sinks nearly exactly.
    """
    if not isinstance(engine, GradientEngine):
        return 0
    count = 0
    for number, (cache, firsts, at, token_ids) in enumerate(_uses(engine, _pieces(engine, documents))):
        try:
            gradients = engine.cache_gradients(cache, token_ids, seed=number)
        except KvwireError as error:
            _log.warning("errors are weighed by gradients of only %d caches: %s", count, error)
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
    """Caches, the start of the document in each, how many tokens count, and the tokens to read after them."""
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
