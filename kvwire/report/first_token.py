"""When the first token of a prompt comes, over the bandwidth of the link: kvwire, and what else there is."""

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
        documents: Ids of the prompt's, in order.
        tokens: Of these.
        query_tokens: Length of the question.
        rtt_s: Seconds of a round trip.
        engine: What computes, in words.
        bandwidths: Bytes per second.
        ways: By name: seconds at each bandwidth; ``kvwire`` first.
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
    """Simulate a prompt over links of some bandwidths.

    Args:
        names: Of the documents, in prompt order.
        situation: Holds the documents, what computing costs, and the time to a first byte. Both count as known, as
            they are after some loads: what hedges against them is not what the links are compared by.
        engine: What computes, in words.
        bandwidths: Bytes per second.
        on_progress: Called with 1 for each bandwidth.

    Returns:
        The seconds, by way; a way that cannot be had at every bandwidth is left out.

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
