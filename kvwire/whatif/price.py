"""Costs of a load in money, and the number of uses from which a stored cache pays off.

Source: KVLink, appendix A.7 (arXiv 2502.16002), which counts engine hours per million requests.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf, isfinite
from typing import TYPE_CHECKING, Self

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.whatif.plan import LoadPlan
    from kvwire.whatif.situation import Prediction

MILLION = 1_000_000
TEXT, RAW = "text only", "raw cache"
_HOUR_S, _GB = 3600.0, 1e9
_MOST_NAMED = 60


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices in any currency."""

    gpu_hour: float  # per hour of the engine
    gb_month: float = 0.0  # per gigabyte stored for a month
    egress: float = 0.0  # per gigabyte that leaves the store

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse prices such as ``gpu_hour=1.79,gb_month=0.023,egress=0``."""
        names, found = [each.name for each in fields(cls)], {}
        for part in text.split(","):
            name, _, value = (each.strip() for each in part.partition("="))
            try:
                number = float(value)
            except ValueError:
                number = inf
            if name not in names or name in found or not isfinite(number) or number < 0:
                msg = f"{part[:_MOST_NAMED]!r} is not a price: write {'=..., '.join(names)}=..., each once, from 0"
                raise ArgumentError(msg)
            found[name] = number
        if "gpu_hour" not in found:
            raise ArgumentError("prices need gpu_hour, what an hour of the engine costs")
        return cls(**found)


@dataclass(frozen=True)
class PricedWay:
    """Cost of a million requests in one way."""

    name: str  # name of the way
    gpu_hours: float  # engine hours for a million requests: recomputing, decoding and closing
    gpu: float  # their cost
    egress: float  # cost of the bytes that leave the store
    # monthly uses of the documents from which storing their caches costs less than prefill of their text; None: never
    uses_a_month: float | None
    uses_in_all: float | None  # uses that pay for computing the caches once; None: never

    @property
    def total(self) -> float:
        """Cost of a million requests, without storage."""
        return self.gpu + self.egress


@dataclass(frozen=True)
class Priced:
    """Costs of a plan."""

    prices: Prices  # the given prices
    stored_bytes: int  # size of the documents' caches with all levels
    stored_month: float  # cost of storing them for a month
    computed_once: float  # cost of computing them once, in engine time; coding uses none
    ways: tuple[PricedWay, ...]  # this plan first, then the alternatives


def price_plan(plan: LoadPlan, prices: Prices, stored_bytes: int, raw_bytes: int = 0) -> Priced:
    """Price a plan and its alternatives."""
    text = next((each for each in plan.alternatives if each.name == TEXT), None)
    if text is None:
        raise ArgumentError("prices need the comparison with text: leave out --no-compare (compare=False)")
    ways: Sequence[Prediction] = (plan.prediction, *plan.alternatives)
    once = text.prefill_s / _HOUR_S * prices.gpu_hour
    month = stored_bytes / _GB * prices.gb_month
    return Priced(
        prices=prices,
        stored_bytes=stored_bytes,
        stored_month=month,
        computed_once=once,
        ways=tuple(_priced(each, text, prices, once, raw_bytes if each.name == RAW else stored_bytes) for each in ways),
    )


def engine_s(way: Prediction) -> float:
    """Engine seconds of one request: recomputing, decoding, and the question's pass."""
    return way.prefill_s + way.decode_s + way.closing_s


def _priced(way: Prediction, text: Prediction, prices: Prices, once: float, stored_bytes: int) -> PricedWay:
    each, as_text = (_of_one(one, prices) for one in (way, text))
    saved = as_text - each
    month = stored_bytes / _GB * prices.gb_month
    pays = way.name != TEXT and saved > 0
    hours = engine_s(way) / _HOUR_S * MILLION
    return PricedWay(
        name=way.name,
        gpu_hours=hours,
        gpu=hours * prices.gpu_hour,
        egress=way.bytes / _GB * prices.egress * MILLION,
        uses_a_month=month / saved if pays else None,
        uses_in_all=once / saved if pays else None,
    )


def _of_one(way: Prediction, prices: Prices) -> float:
    return engine_s(way) / _HOUR_S * prices.gpu_hour + way.bytes / _GB * prices.egress
