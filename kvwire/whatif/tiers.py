"""On which device to keep a prompt's caches: the cheapest of those that are fast enough.

CacheBlend (arXiv 2405.16444) takes the cheapest device whose loads take no longer than computing what is computed
anyway. Here all that a load does is planned and played, and the first token decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, Self

from kvwire.controller.policies import Adaptive
from kvwire.errors import ArgumentError
from kvwire.transport import parse_link
from kvwire.whatif.situation import known_link

if TYPE_CHECKING:
    from kvwire.whatif.situation import PlanScenario, Prediction

LATER = 1.05
"""Without a deadline: times the fastest device's first token that still counts as fast enough."""
_MOST_TIERS, _MOST_NAMED = 16, 60
_GB = 1e9
_FORM = "write NAME=BANDWIDTH,PRICE or NAME=BANDWIDTH,LATENCY,PRICE, such as nvme=38gbit,0.1ms,0.08"


@dataclass(frozen=True)
class Tier:
    """A device that caches could be kept on.

    Attributes:
        name: For people.
        bandwidth: Bytes per second.
        ttfb_s: Seconds to the first byte.
        gb_month: Price of a gigabyte for a month, in any currency.
    """

    name: str
    bandwidth: float
    ttfb_s: float
    gb_month: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a device such as ``nvme=38gbit,0.1ms,0.08``."""
        name, _, rest = text.partition("=")
        link, _, price = rest.rpartition(",")
        try:
            gb_month, found = float(price), parse_link(link)
        except (ArgumentError, ValueError):
            gb_month, found = inf, None
        if found is None or not name or not isfinite(gb_month) or gb_month < 0:
            raise ArgumentError(f"{text[:_MOST_NAMED]!r} is not a device: {_FORM}")
        return cls(name, found.bandwidth_bytes_s, found.rtt_s, gb_month)


def parse_tiers(text: str) -> tuple[Tier, ...]:
    """Parse several, separated by spaces."""
    tiers = tuple(map(Tier.parse, text.split()))
    if not 0 < len(tiers) <= _MOST_TIERS or len({tier.name for tier in tiers}) < len(tiers):
        raise ArgumentError(f"name 1 to {_MOST_TIERS} devices, each once: {_FORM}")
    return tiers


@dataclass(frozen=True)
class PlannedTier:
    """What loads from a device do.

    Attributes:
        tier: The device.
        prediction: Of a load from it.
        cost_per_month: Of keeping the documents' caches there, in the currency of the prices.
        is_fast_enough: The first token is in time; without a deadline, not much later than from the fastest device.
        is_cheapest: It is the cheapest of those.
    """

    tier: Tier
    prediction: Prediction
    cost_per_month: float
    is_fast_enough: bool
    is_cheapest: bool = False


def plan_tiers(situation: PlanScenario, tiers: tuple[Tier, ...], stored_bytes: int) -> tuple[PlannedTier, ...]:
    """Plan the same load from each device, in their order."""
    found = []
    for tier in tiers:
        there = replace(situation, estimates=known_link(situation.estimates, tier.bandwidth, tier.ttfb_s))
        found.append(there.predict(tier.name, Adaptive()))
    due = situation.goal.deadline_s
    if due is None:
        due = LATER * min(prediction.ttft_s for prediction in found)
    planned = [
        PlannedTier(tier, prediction, stored_bytes / _GB * tier.gb_month, prediction.ttft_s <= due)
        for tier, prediction in zip(tiers, found, strict=True)
    ]
    fast = [each for each in planned if each.is_fast_enough]
    cheapest = min(fast, key=lambda each: (each.cost_per_month, each.prediction.ttft_s), default=None)
    return tuple(replace(each, is_cheapest=each is cheapest) for each in planned)
