"""Time to first token over the link's bandwidth: kvwire and its alternatives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwire.controller.policies import Adaptive
from kvwire.whatif.alternatives import predict_alternatives
from kvwire.whatif.situation import known_link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.whatif.situation import PlanScenario

BANDWIDTHS = tuple(1.25e5 * 10 ** (step / 3) for step in range(13))
"""Bytes per second: 1 Mbit/s to 10 Gbit/s."""


@dataclass(frozen=True)
class FirstTokens:
    """Seconds to the first token.

    Attributes:
        documents: Ids of the prompt's documents, in order.
        tokens: Their total length.
        query_tokens: Length of the question.
        rtt_s: Round-trip time in seconds.
        engine: Name of the engine.
        bandwidths: Bytes per second.
        ways: Seconds at each bandwidth, by name; ``kvwire`` first.
    """

    documents: tuple[str, ...]
    tokens: int
    query_tokens: int
    rtt_s: float
    engine: str
    bandwidths: tuple[float, ...]
    ways: dict[str, tuple[float, ...]]


def first_tokens(
    names: Sequence[str],
    situation: PlanScenario,
    engine: str,
    *,
    bandwidths: Sequence[float] = BANDWIDTHS,
    on_progress: Callable[[int], None] | None = None,
) -> FirstTokens:
    """Simulate a prompt over links of several bandwidths.

    Args:
        names: Of the documents, in prompt order.
        situation: The documents, computing costs, and time to first byte. Both count as certain, as after some loads:
            links are compared without hedging.
        engine: Name of the engine.
        bandwidths: Bytes per second.
        on_progress: Called with 1 for each bandwidth.

    Returns:
        The seconds by way; ways that fail at some bandwidth are left out.

    Raises:
        ArgumentError: A document has neither text nor a blob.
    """
    rtt_s = situation.estimates.ttfb.value
    rows: list[dict[str, float]] = []
    for bandwidth in bandwidths:
        here = replace(situation, estimates=known_link(situation.estimates, bandwidth, rtt_s, known_engine=True))
        made = [here.predict("kvwire", Adaptive()), *predict_alternatives(here)]
        rows.append({prediction.name: prediction.ttft_s for prediction in made})
        if on_progress:
            on_progress(1)
    ways = {name: tuple(row[name] for row in rows) for name in rows[0] if all(name in row for row in rows)}
    tokens = sum(sum(variants[0].tokens) for variants in situation.documents)
    return FirstTokens(tuple(names), tokens, situation.query_tokens, rtt_s, engine, tuple(bandwidths), ways)
