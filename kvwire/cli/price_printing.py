"""How ``kvwire plan --price`` shows money."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.whatif.price import Priced

_NAME = 28
_FEWEST = 0.5  # uses that are told as one


def describe_price(priced: Priced) -> dict[str, Any]:
    """Turn money into plain data."""
    return {**asdict(priced), "ways": [{**asdict(way), "total": way.total} for way in priced.ways]}


def price_lines(priced: Priced, plan: str) -> Iterator[str]:
    """Show money."""
    yield ""
    yield f"{'a million such requests':<{_NAME}}{'engine':>10}{'money':>10}{'egress':>10}{'total':>10}  pays from"
    for way in priced.ways:
        name = "this plan" if way.name == plan else way.name
        yield (
            f"{name[: _NAME - 1]:<{_NAME}}{way.gpu_hours:>8.3g} h{_money(way.gpu):>10}{_money(way.egress):>10}"
            f"{_money(way.total):>10}  {_uses(way.uses_a_month)}"
        )
    yield (
        f"stored: {priced.stored_bytes / 1e6:.3g} MB with all levels, {_money(priced.stored_month)} a month; "
        f"computed once: {_money(priced.computed_once)} of engine, "
        f"made up for after {_in_all(priced)}; engine: recomputing, decoding and closing."
    )


def _in_all(priced: Priced) -> str:
    uses = priced.ways[0].uses_in_all
    return "no number of uses" if uses is None else f"{max(1, round(uses)):,} uses by this plan"


def _uses(uses: float | None) -> str:
    if uses is None:
        return "-"
    return "1 use a month" if uses < 1 + _FEWEST else f"{uses:,.0f} uses a month"


def _money(amount: float) -> str:
    return f"{amount:.2e}" if 0 < amount < 0.01 else f"{amount:,.2f}"  # noqa: PLR2004
