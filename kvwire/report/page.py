"""The report as one HTML page, without network access or scripts."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING

from kvwire._html import as_text, facts, in_bytes, table, whole_page
from kvwire._version import __version__
from kvwire.report.figures import MEGABIT, bars, curves, in_bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.report.first_token import FirstTokens
    from kvwire.report.surveying import ConfigSurvey, Survey, Wrong
    from kvwire.types import BlobInfo


def write_page(survey: Survey, first: FirstTokens | None = None, hint: str = "") -> str:
    """Write the report.

    Args:
        survey: The store's survey.
        first: Times to first token; None: no machine was given.
        hint: Shown in their place: how to get them.

    Returns:
        A complete HTML page.
    """
    parts = [_summary(survey)]
    parts += [_config(number, each) for number, each in enumerate(survey.configs)]
    parts.append(_first_tokens(first, hint))
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(survey.at))
    title = f"kvwire: {survey.store}"
    header = (
        f'<h1>{as_text(survey.store)}</h1><p class="soft">Looked through on {when} in {survey.seconds:.1f} s by '
        f"kvwire {as_text(__version__)}; of blobs, only sampled headers were read.</p>"
    )
    footer = "Bytes are counted in thousands. Tenants are shown by their salted names."
    return whole_page(title, header, "".join(parts), footer)


def _figure(svg: str) -> str:
    return f'<figure tabindex="0">{svg}</figure>\n'


def _summary(survey: Survey) -> str:
    configs = survey.configs
    if not configs:
        return "<p>Nothing of kvwire's is in this store: <code>kvwire encode</code> puts documents there.</p>\n"
    summary = facts(
        [
            ("documents", f"{sum(each.documents for each in configs):,}"),
            ("tokens", f"{sum(each.tokens for each in configs):,}"),
            ("bytes", in_bytes(sum(each.bytes for each in configs))),
            ("tenants", f"{len({each.tenant for each in configs}):,}"),
            ("model configurations", f"{len({each.config for each in configs}):,}"),
        ]
    )
    if all(each.is_sound for each in configs):
        return summary + "<p>No entry is damaged, and every document's blob is there.</p>\n"
    return summary + '<p class="bad">There are problems; see below what to do.</p>\n'


def _config(number: int, config: ConfigSurvey) -> str:
    name = config.model_id or "a model without a record"
    window = f", window of {config.window:,} tokens" if config.window else ""
    parts = [
        f'<section aria-labelledby="c{number}"><h2 id="c{number}">{as_text(name)}</h2>\n',
        f'<p class="soft">Tenant {as_text(config.tenant)}, configuration {as_text(config.config)}{window}.</p>\n',
        facts(
            [
                ("documents", f"{config.documents:,}"),
                ("stored as text only", f"{config.texts_only:,}"),
                ("tokens", f"{config.tokens:,}"),
                ("bytes", in_bytes(config.bytes)),
            ]
        ),
        _health(config),
        _levels(config),
        _sample(config),
        _lengths(config),
        _ages(config),
        _objects(config),
        "</section>\n",
    ]
    return "".join(parts)


def _health(config: ConfigSurvey) -> str:
    checks = (
        ("entries that cannot be read", config.damaged, "encode these documents again, or give their key with --keys"),
        ("documents whose blob is gone", config.missing, "readers compute them from text; encode them again"),
        ("headers that cannot be read", config.unread, "run kvwire store verify, and encode them again"),
        ("objects of no known kind", config.unknown, "a later kvwire wrote them, or they are not kvwire's"),
        ("blobs that no document names", config.unnamed, "kvwire store gc deletes old ones"),
    )
    out = [_wrong(what, wrong, advice) for what, wrong, advice in checks if wrong.count]
    return "<h3>Problems</h3>\n" + "".join(out) if out else ""


def _wrong(what: str, wrong: Wrong, advice: str) -> str:
    size = f", {in_bytes(wrong.bytes)}" if wrong.bytes else ""
    items = "".join(f"<li>{as_text(name)}</li>" for name in wrong.named)
    more = f"<li>and {wrong.count - len(wrong.named):,} more</li>" if wrong.count > len(wrong.named) else ""
    return f"<p><strong>{wrong.count:,} {what}</strong>{size}: {as_text(advice)}.</p><ul>{items}{more}</ul>\n"


def _levels(config: ConfigSurvey) -> str:
    if not config.levels:
        return ""
    rows = []
    for name, total in config.levels.items():
        by_token = total.bytes / max(1, total.tokens)
        sampled = [level for info in config.sample.values() for level in info.levels if level.name == name]
        kl, bits = (
            _mean([level.predicted_kl for level in sampled]),
            _mean([level.bits_per_element for level in sampled]),
        )
        found = "" if bits is None else f"{bits:.3g}", "not measured" if kl is None else f"{kl:.2g}"
        rows.append((name, f"{total.documents:,}", in_bytes(total.bytes), f"{by_token:,.0f}", *found))
    svg = bars(
        "Bytes to fetch for each level", list(config.levels),
        [total.bytes / max(1, total.tokens) for total in config.levels.values()], "bytes a token", sideways=True,
    )  # fmt: skip
    caption = f"Levels, coarsest first; bits and KL divergence: means of {len(config.sample)} sampled documents"
    head = ("level", "documents", "bytes to fetch", "bytes a token", "bits a number", "expected KL, nats")
    return "<h3>Bytes by level</h3>\n" + table(caption, head, rows) + _figure(svg)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _sample(config: ConfigSurvey) -> str:
    """Plot rate against distortion of the sampled documents."""
    series: dict[str, tuple[list[float], list[float]]] = {}
    for document, info in _spread(list(config.sample.items())):
        points = _points(info)
        if len(points) > 1:
            series[document[:32]] = [bits for bits, _ in points], [error for _, error in points]
    if not series:
        return ""
    measured = all(level.predicted_kl is not None for info in config.sample.values() for level in info.levels)
    y = "expected KL divergence, nats" if measured else "relative error"
    svg = curves("Rate and distortion of sampled documents", series, "bits a number", y)
    return "<h3>Rate and distortion</h3>\n" + _figure(svg)


def _spread(items: Sequence[tuple[str, BlobInfo]]) -> list[tuple[str, BlobInfo]]:
    """Select five at most, evenly from shortest to longest."""
    most = 5
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _points(info: BlobInfo) -> list[tuple[float, float]]:
    errors = [each.measured_error if each.predicted_kl is None else each.predicted_kl for each in info.levels]
    bits = [each.bits_per_element for each in info.levels]
    return sorted((size, error) for size, error in zip(bits, errors, strict=True) if error > 0)


def _lengths(config: ConfigSurvey) -> str:
    if not config.lengths:
        return ""
    first, last = min(config.lengths), max(config.lengths)
    names = [f"{low:,}" for low, _ in pairwise(2**power for power in range(first, last + 2))]
    counts = [config.lengths[power] for power in range(first, last + 1)]
    svg = bars("Documents by length", names, counts, "documents")
    return "<h3>Documents by length, in tokens (at least)</h3>\n" + _figure(svg)


def _ages(config: ConfigSurvey) -> str:
    known = {day: count for day, count in config.ages.items() if day >= 0}
    if not known:
        return ""
    edges = [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    names, counts = [], []
    for low, high in [*pairwise(edges), (edges[-1], 1 << 30)]:
        if any(day >= low for day in known):
            names.append(f"{low} d")
            counts.append(sum(count for day, count in known.items() if low <= day < high))
    svg = bars("Blobs by age", names, counts, "blobs")
    return "<h3>Blobs by age, in days (at least)</h3>\n" + _figure(svg)


def _objects(config: ConfigSurvey) -> str:
    rows = [(name, f"{total.documents:,}", in_bytes(total.bytes)) for name, total in config.objects.items()]
    rows += [
        (f"profile {digest[:12] or 'inside the blob'}", f"{count:,} documents", "")
        for digest, count in config.profiles.most_common(8)
    ]
    return "<h3>Objects</h3>\n" + table("What is there besides the catalog", ("kind", "number", "bytes"), rows)


def _first_tokens(first: FirstTokens | None, hint: str) -> str:
    if first is None:
        return f"<section><h2>Time to the first token</h2><p>{as_text(hint)}</p></section>\n" if hint else ""
    shown = [name for name in first.ways if name in {"kvwire", "text only", "raw cache"}]
    levels = [name for name in first.ways if name.startswith("level ")]
    shown += [levels[-1]] if len(levels) > 1 else []
    megabits = [bandwidth / MEGABIT for bandwidth in first.bandwidths]
    series = {name: (megabits, first.ways[name]) for name in shown}
    svg = curves("Time to the first token", series, "bandwidth of the link", "seconds", to_words=in_bits)
    rows = [
        (in_bits(megabits[at]), *(f"{first.ways[name][at]:.3g}" for name in shown)) for at in range(0, len(megabits), 3)
    ]
    names = ", ".join(first.documents)
    return (
        '<section aria-labelledby="ttft"><h2 id="ttft">Time to the first token</h2>\n'
        f"<p>Simulated: {first.tokens:,} tokens ({as_text(names)}) and a question of {first.query_tokens} on "
        f"{as_text(first.engine)}, a round trip of {first.rtt_s * 1000:g} ms, no other load.</p>\n"
        + _figure(svg)
        + table("Seconds to the first token", ("bandwidth", *shown), rows)
        + "</section>\n"
    )
