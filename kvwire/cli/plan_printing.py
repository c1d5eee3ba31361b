"""What ``kvwire plan`` shows: the verdict in words, runs of chunks, alternatives and break-even points; or JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from math import isfinite, log10
from typing import TYPE_CHECKING, Any

from kvwire.cli.plan_inputs import COMPUTE
from kvwire.cli.say import error_as_data, say
from kvwire.whatif.break_even import FASTEST, SLOWEST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire.cli.plan_inputs import Prompt
    from kvwire.errors import KvwireError
    from kvwire.whatif.break_even import BreakEven
    from kvwire.whatif.plan import LoadPlan
    from kvwire.whatif.price import Priced
    from kvwire.whatif.situation import PlannedChunk, Prediction


_MOST_RUNS = 40
_NAME = 28
_PREFIXES = ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s"), (1.0, "bit/s"))
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TITLES = {
    "fetches": "several chunks are fetched",
    "fetches all": "nothing is recomputed",
    "beats text": "level {} alone beats text",
    "in time": "level {} as floor is in time",
}


def print_plan(
    prompt: Prompt, plan: LoadPlan, *, as_json: bool, error: KvwireError | None = None, priced: Priced | None = None
) -> None:
    """Show a plan."""
    if as_json:
        compute = {name: getattr(plan.scenario.settings, name) for name in COMPUTE}
        made_with = {"estimates": plan.scenario.estimates.to_state(), "compute": compute}
        told = {"notes": list(prompt.notes)} | ({"sizes": prompt.sizes} if prompt.sizes else {})
        shown = describe_plan(prompt.names, plan) | told | made_with | error_as_data(error)
        if priced is not None:
            shown["price"] = describe_price(priced)
        say(json.dumps(shown, allow_nan=False))
        return
    for line in (*_verdict(plan), *_chunk_table(prompt.names, plan)):
        say(line)
    if prompt.sizes:
        say(prompt.sizes)
    for note in prompt.notes:
        say(f"kvwire: {note}", err=True)
    if plan.alternatives:
        for line in (*_alternatives(plan), *_break_evens(plan)):
            say(line)
    for line in _tiers(plan) if plan.tiers else ():
        say(line)
    for line in () if priced is None else price_lines(priced, plan.prediction.name):
        say(line)


def describe_plan(names: Sequence[str], plan: LoadPlan) -> dict[str, Any]:
    """Turn a plan into plain data."""
    below, above = plan.unchanged
    tiers = [{**asdict(each), "prediction": _described(each.prediction)} for each in plan.tiers]
    return ({"tiers": tiers} if tiers else {}) | {
        "documents": list(names),
        "goal": asdict(plan.scenario.goal),
        "link": {"bandwidth": plan.scenario.bandwidth, "ttfb_s": plan.scenario.estimates.ttfb.value},
        "query_tokens": plan.scenario.query_tokens,
        "prediction": _described(plan.prediction),
        "expected_s": plan.expected_s,
        "chunks": [
            {**asdict(chunk), "document": names[chunk.document], "action": _action(chunk)} for chunk in plan.chunks
        ],
        "levels": list(plan.scenario.details.level_names),
        "alternatives": [_described(each) for each in plan.alternatives],
        "break_evens": [asdict(each) for each in plan.break_evens],
        "searched": {"slowest": SLOWEST, "fastest": FASTEST},
        "unchanged": {"below": below, "above": above},
    }


def _described(prediction: Prediction) -> dict[str, Any]:
    quality = prediction.quality_db
    old = {"heads_s": prediction.headers_s, "link_s": prediction.fetch_s}  # keys of version 0.1, until 0.2
    return {**asdict(prediction), **old, "quality_db": quality if isfinite(quality) else None}


def _action(chunk: PlannedChunk) -> str:
    return "recompute" if chunk.level is None else "fetch"


def _verdict(plan: LoadPlan) -> Iterator[str]:
    made, due = plan.prediction, plan.scenario.goal.deadline_s
    when = f"first token after {_time(made.ttft_s)}"
    if due is None:
        yield f"{when[0].upper()}{when[1:]}, over {_rate(plan.scenario.bandwidth)}."
    else:
        spare = f"In time by {_time(due - made.ttft_s)}" if made.in_time else f"Late by {_time(made.ttft_s - due)}"
        yield f"{spare}: {when}, over {_rate(plan.scenario.bandwidth)}."
    fetched = [chunk for chunk in plan.chunks if chunk.level is not None]
    total, rest = len(plan.chunks), len(plan.chunks) - len(fetched)
    levels = ", ".join(_level(plan, level) for level in sorted({c.level for c in fetched if c.level is not None}))
    if not fetched:
        yield f"All {total} chunks are recomputed from text: that is {plan.chunks[0].reason}."
    elif rest:
        yield f"Fetches {len(fetched)} of {total} chunks at {levels}, and recomputes {rest} meanwhile."
    else:
        yield f"Fetches all {total} chunks at {levels}."
    kl = "" if made.kl is None else f", expected KL {made.kl:.1e} nats"
    yield f"{_size(made.bytes)} of chunks, error {made.error:.2g} ({_decibels(made)}){kl}."
    parts = (("headers", made.headers_s), ("fetching", made.fetch_s), ("decoding", made.decode_s),
             ("recomputing", made.prefill_s), ("closing", made.closing_s))  # fmt: skip
    yield f"{', '.join(f'{name} {_time(seconds)}' for name, seconds in parts)} (parts overlap)."
    if not made.played:
        yield "The load is too large to be played through: these are the sums that the policy expects."


def _chunk_table(names: Sequence[str], plan: LoadPlan) -> Iterator[str]:
    yield ""
    yield f"{'document':<{_NAME}}{'chunks':>10}{'tokens':>8}  {'what':<20}{'bytes':>9}{'dB':>7}  why"
    runs = [list(run) for _, run in groupby(plan.chunks, lambda chunk: (chunk.document, chunk.level))]
    for run in runs[:_MOST_RUNS]:
        first, last = run[0], run[-1]
        tokens = sum(chunk.tokens for chunk in run)
        error = sum(chunk.tokens * chunk.error for chunk in run) / tokens
        which = f"{first.chunk}" if len(run) == 1 else f"{first.chunk}-{last.chunk}"
        what = "recompute" if first.level is None else _level(plan, first.level)
        quality = f"{-10 * log10(error):.1f}" if error > 0 else "-"
        size = _size(sum(chunk.bytes for chunk in run))
        yield (
            f"{_short(names[first.document]):<{_NAME}}{which:>10}{tokens:>8}  {what:<20}{size:>9}{quality:>7}  "
            f"{'; '.join(dict.fromkeys(chunk.reason for chunk in run))}"
        )
    if len(runs) > _MOST_RUNS:
        yield f"... and {len(runs) - _MOST_RUNS} more runs of chunks; --json has them all"


def _alternatives(plan: LoadPlan) -> Iterator[str]:
    yield ""
    yield f"{'instead':<{_NAME}}{'first token':>12}{'bytes':>10}{'error':>9}{'dB':>7}{'KL':>9}  in time"
    for each in (plan.prediction, *plan.alternatives):
        name = "this plan" if each is plan.prediction else each.name
        kl = "-" if each.kl is None else f"{each.kl:.1e}"
        about = " " if each.played else "~"
        in_time = "-" if plan.scenario.goal.deadline_s is None else "yes" if each.in_time else "no"
        yield (
            f"{_short(name):<{_NAME}}{about + _time(each.ttft_s):>12}{_size(each.bytes):>10}{each.error:>9.1e}"
            f"{_decibels(each).removesuffix(' dB'):>7}{kl:>9}  {in_time}"
        )
    if not all(each.played for each in plan.alternatives):
        yield "~: too large to be played through; as the policy expects it"


def _break_evens(plan: LoadPlan) -> Iterator[str]:
    yield ""
    yield f"{'from which bandwidth on':<{_NAME}}(now {_rate(plan.scenario.bandwidth)})"
    for each in plan.break_evens:
        title = _TITLES[each.what].format(each.level)
        yield f"{title:<{_NAME}}{_point(each):>14}"
    if not SLOWEST <= plan.scenario.bandwidth <= FASTEST:
        yield f"the link lies outside the range that was searched, {_rate(SLOWEST)} to {_rate(FASTEST)}"
        return
    below, above = (None if edge is None else _rate(edge) for edge in plan.unchanged)
    edges = [f"below {below}" if below else "", f"above {above}" if above else ""]
    yield f"some chunk changes: {' and '.join(filter(None, edges)) or 'at no bandwidth'}"


def _tiers(plan: LoadPlan) -> Iterator[str]:
    yield ""
    yield f"{'kept on':<{_NAME}}{'first token':>12}{'bytes':>10}{'KL':>9}{'a month':>12}  fast enough"
    for each in plan.tiers:
        made = each.prediction
        kl = "-" if made.kl is None else f"{made.kl:.1e}"
        verdict = "yes, and the cheapest" if each.is_cheapest else "yes" if each.is_fast_enough else "no"
        yield (
            f"{_short(each.tier.name):<{_NAME}}{_time(made.ttft_s):>12}{_size(made.bytes):>10}{kl:>9}"
            f"{_money(each.cost_per_month):>12}  {verdict}"
        )


def _point(point: BreakEven) -> str:
    return point.holds if point.bandwidth is None else _rate(point.bandwidth)


def _level(plan: LoadPlan, level: int) -> str:
    names = plan.scenario.details.level_names
    return f"level {level} ({names[level]})" if level < len(names) else f"level {level}"


def _decibels(prediction: Prediction) -> str:
    return f"{prediction.quality_db:.1f} dB" if isfinite(prediction.quality_db) else "exact"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _rate(bandwidth: float) -> str:
    bits = 8 * bandwidth
    factor, unit = next((each for each in _PREFIXES if bits >= each[0]), _PREFIXES[-1])
    return f"{bits / factor:.3g} {unit}"


def _size(size: int) -> str:
    factor, unit = next((each for each in _SIZES if size >= each[0]), _SIZES[-1])
    return f"{size / factor:.1f} {unit}"


def _short(name: str) -> str:
    return name if len(name) < _NAME else f"{name[: _NAME - 4]}..."


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
