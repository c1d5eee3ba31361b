"""Counters of a server, in a registry of their own, and the page of them for people.

No label tells a tenant, an address or a key.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from kvwire._html import as_text, facts, in_bytes, table, whole_page
from kvwire._lazy import require
from kvwire._version import __version__
from kvwire.store import TieredStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "HEAD", "PUT", "DELETE", "other")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
REFRESH_S = 5
_KEPT = 121  # instants
_NOW_S, _LATE_S = 10.0, 60.0
_WIDTH, _HEIGHT, _TOP = 480, 110, 18
_MINUTE, _HOUR, _DAY = 60, 3600, 86400


_TOTALS = {
    "kvwire_http_requests_total": "requests",
    "kvwire_http_first_byte_seconds_sum": "first_byte_s",
    "kvwire_http_sent_bytes_total": "sent",
    "kvwire_http_received_bytes_total": "received",
    "kvwire_store_errors_total": "store_errors",
    "kvwire_http_rate_limited_total": "rate_limited",
    "kvwire_http_connections": "connections",
    "kvwire_http_requests_in_flight": "in_flight",
}
"""What the page tells, summed over all labels; ``4xx`` and ``5xx`` are requests by class of status."""


class ServerMetrics:
    """What one server has done since it started."""

    def __init__(self) -> None:
        """Start at zero."""
        require("prometheus_client", "serve", "kvwire serve")
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = CollectorRegistry()
        registry = self._registry
        requests = Counter(
            "kvwire_http_requests", "Requests, by method and class of status.", ["method", "status"], registry=registry
        )
        seconds = Histogram(
            "kvwire_http_request_seconds", "Time to the last byte.", ["method"], buckets=_SECONDS, registry=registry
        )
        first = Histogram(
            "kvwire_http_first_byte_seconds", "Time to the first byte.", ["method"], buckets=_SECONDS, registry=registry
        )
        # Children are made once: looking them up by label costs more than counting.
        self._requests = {(m, d): requests.labels(m, f"{d}xx") for m in METHODS for d in range(1, 6)}
        self._seconds = {method: seconds.labels(method) for method in METHODS}
        self._first = {method: first.labels(method) for method in METHODS}
        self.in_flight = 0
        in_flight = Gauge("kvwire_http_requests_in_flight", "Requests being answered now.", registry=registry)
        in_flight.set_function(lambda: self.in_flight)
        self.sent_bytes = Counter("kvwire_http_sent_bytes", "Bytes of bodies sent.", registry=registry)
        self.received_bytes = Counter("kvwire_http_received_bytes", "Bytes of uploads received.", registry=registry)
        self.connections = Gauge("kvwire_http_connections", "Open connections.", registry=registry)
        self.connections_refused = Counter(
            "kvwire_http_connections_refused", "Connections over the limit.", registry=registry
        )
        self.rate_limited = Counter("kvwire_http_rate_limited", "Requests over the rate.", registry=registry)
        self.uploads_accepted = Counter("kvwire_uploads_accepted", "Uploads written.", registry=registry)
        self.uploads_refused = Counter(
            "kvwire_uploads_refused", "Uploads not written, by reason.", ["reason"], registry=registry
        )
        self.store_errors = Counter("kvwire_store_errors", "Failures of the store behind.", registry=registry)
        self.spool_bytes = Gauge("kvwire_spool_bytes", "Bytes of running uploads.", registry=registry)

    def begin(self) -> None:
        """A request came in."""
        self.in_flight += 1

    def end(self, method: str, status: int, seconds: float, first_byte_s: float) -> None:
        """Its answer is out, or was broken off."""
        self.in_flight -= 1
        method = method if method in self._seconds else "other"
        self._requests[method, status // 100].inc()
        self._seconds[method].observe(seconds)
        self._first[method].observe(first_byte_s)

    def malformed(self, status: int) -> None:
        """Count an answer to what was no request."""
        self.begin()
        self.end("other", status, 0.0, 0.0)

    def totals(self) -> dict[str, float]:
        """Add up what there is by now; see ``_TOTALS``."""
        found: defaultdict[str, float] = defaultdict(float)
        for sample in (sample for metric in self._registry.collect() for sample in metric.samples):
            if name := _TOTALS.get(sample.name):
                found[name] += sample.value
                if name == "requests":
                    found[sample.labels["status"]] += sample.value
        return found

    def render(self) -> bytes:
        """The page that Prometheus scrapes."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


class Instant(NamedTuple):
    """What was counted by then; at: seconds of a clock that never jumps."""

    at: float
    totals: dict[str, float]


class StatusPage:
    """Remembers two minutes of a server's counters, one look a second, and shows them."""

    def __init__(self, store: Store, metrics: ServerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        """Look for the first time."""
        self._store, self._metrics, self._clock = store, metrics, clock
        self._first = Instant(clock(), metrics.totals())
        self._seen = deque([self._first], maxlen=_KEPT)

    def look(self) -> None:
        """Remember what is counted now."""
        self._seen.append(Instant(self._clock(), self._metrics.totals()))

    def render(self) -> str:
        """Show it."""
        now = Instant(self._clock(), self._metrics.totals())
        seen = [*(each for each in self._seen if each.at <= now.at), now]
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        up = _duration(now.at - self._first.at)
        header = (
            f'<h1>kvwire serve</h1><p class="soft">At {when}, up for {up}, kvwire {as_text(__version__)}. '
            f"The page renews itself every {REFRESH_S} seconds.</p>"
        )
        parts = [_summary(now, _since(seen, _NOW_S), _since(seen, _LATE_S)), _curves(seen), self._windows(seen, now)]
        parts.append(self._tiers())
        footer = "Rates are means over the last ten seconds. Bytes are counted in thousands."
        return whole_page("kvwire: status", header, "".join(parts), footer, refresh_s=REFRESH_S)

    def _windows(self, seen: Sequence[Instant], now: Instant) -> str:
        rows = []
        for name, before in (
            ("last 10 seconds", _since(seen, _NOW_S)),
            ("last minute", _since(seen, _LATE_S)),
            ("since the start", self._first),
        ):
            then, later = before.totals, now.totals
            served = later["requests"] - then["requests"]
            first_s = (later["first_byte_s"] - then["first_byte_s"]) / served if served else 0.0
            rows.append(
                (
                    name, f"{served:,.0f}", f"{later['4xx'] - then['4xx']:,.0f}",
                    f"{later['5xx'] - then['5xx']:,.0f}",
                    in_bytes(later["sent"] - then["sent"]), in_bytes(later["received"] - then["received"]),
                    f"{first_s * 1000:.3g} ms" if served else "",
                )
            )  # fmt: skip
        head = ("", "requests", "refused (4xx)", "failed (5xx)", "sent", "received", "mean to first byte")
        return "<h2>Requests</h2>\n" + table("Requests and bytes of bodies", head, rows)

    def _tiers(self) -> str:
        if not isinstance(self._store, TieredStore):
            return "<h2>Caches</h2>\n<p>The store is read as it is, without tiers (--cache, --memory-size).</p>\n"
        counted = self._store.counters()
        rows = []
        for name, tier in (("memory", counted.memory), ("disk", counted.disk)):
            looks = tier.hits + tier.misses
            rows.append(
                (
                    name, f"{tier.hits:,}", f"{tier.misses:,}", f"{tier.hits / looks:.1%}" if looks else "",
                    in_bytes(tier.hit_bytes), in_bytes(tier.held_bytes), f"{tier.evictions:,}",
                    f"{tier.corrupt + tier.write_errors:,}",
                )
            )  # fmt: skip
        head = ("tier", "hits", "misses", "hit rate", "served", "held", "evicted", "errors")
        remote = counted.remote
        return (
            "<h2>Caches</h2>\n"
            + table("Tiers since the start", head, rows)
            + f"<p>Behind them: {remote.requests:,} requests, {in_bytes(remote.bytes)}, "
            f"{remote.failures:,} failures.</p>\n"
        )


def _summary(now: Instant, before: Instant, late: Instant) -> str:
    seconds = max(now.at - before.at, 1e-9)
    then, later = before.totals, now.totals
    failed = later["5xx"] - late.totals["5xx"] + later["store_errors"] - late.totals["store_errors"]
    shown = facts(
        [
            ("requests a second", f"{(later['requests'] - then['requests']) / seconds:,.3g}"),
            ("sent", f"{in_bytes((later['sent'] - then['sent']) / seconds)}/s"),
            ("received", f"{in_bytes((later['received'] - then['received']) / seconds)}/s"),
            ("being answered", f"{later['in_flight']:,.0f}"),
            ("connections", f"{later['connections']:,.0f}"),
            ("slowed down, last minute", f"{later['rate_limited'] - late.totals['rate_limited']:,.0f}"),
        ]
    )
    if not failed:
        return shown + "<p>Nothing failed in the last minute.</p>\n"
    return shown + (
        f'<p class="bad">{failed:,.0f} failures in the last minute: see the log, and whether the store behind '
        "answers (<code>/readyz</code>).</p>\n"
    )


def _since(seen: Sequence[Instant], seconds: float) -> Instant:
    """The earliest instant that is no longer ago."""
    return next(each for each in seen if seen[-1].at - each.at <= seconds)


def _curves(seen: Sequence[Instant]) -> str:
    pairs = [(before, after) for before, after in pairwise(seen) if after.at > before.at]
    spans = [after.at - before.at for before, after in pairs]
    ago = [seen[-1].at - after.at for _, after in pairs]
    sent = [(b.totals["sent"] - a.totals["sent"]) / span for (a, b), span in zip(pairs, spans, strict=True)]
    asked = [(b.totals["requests"] - a.totals["requests"]) / span for (a, b), span in zip(pairs, spans, strict=True)]
    return (
        "<h2>The last two minutes</h2>\n"
        + _curve("Sent", ago, sent, lambda most: f"{in_bytes(most)}/s")
        + _curve("Requests", ago, asked, lambda most: f"{most:,.3g} a second")
    )


def _curve(name: str, ago: Sequence[float], values: Sequence[float], say: Callable[[float], str]) -> str:
    most = max(values, default=0.0)
    last = say(values[-1] if values else 0.0)
    words = f"{name} over the last two minutes: at most {say(most)}, now {last}"
    points = " ".join(
        f"{_WIDTH * (1 - back / (_KEPT - 1)):.1f},{_HEIGHT - (_HEIGHT - _TOP) * value / (most or 1.0):.1f}"
        for back, value in zip(ago, values, strict=True)
    )
    return (
        f'<figure tabindex="0"><svg role="img" style="min-width: 0" viewBox="0 0 {_WIDTH} {_HEIGHT + 4}" '
        f'aria-label="{as_text(words)}">'
        f'<text x="0" y="12" font-size="12" fill="var(--soft)">{as_text(name)}, at most {as_text(say(most))}</text>'
        f'<path d="M0 {_HEIGHT}H{_WIDTH}" stroke="var(--line)"/>'
        f'<polyline points="{points}" fill="none" stroke="var(--link)" stroke-width="1.5"/></svg></figure>\n'
    )


def _duration(seconds: float) -> str:
    for size, name, smaller, small_name in ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name} {int(seconds % size // smaller)} {small_name}"
    return f"{int(seconds // _MINUTE)} min {int(seconds % _MINUTE)} s"
