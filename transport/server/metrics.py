"""Counters of a server, in a registry of their own; no label tells a tenant, an address or a key."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from kvwire._lazy import require

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
METHODS = ("GET", "HEAD", "PUT", "DELETE", "other")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Totals(NamedTuple):
    """Counts since the start, and two of this instant.

    Attributes:
        requests: Answered or broken off.
        refused: Answered with 4xx.
        failed: Answered with 5xx.
        first_byte_s: Seconds to the first byte, summed over all requests.
        sent: Bytes of bodies.
        received: Bytes of uploads.
        store_errors: Failures of the store behind.
        rate_limited: Requests over the rate.
        connections: Open now.
        in_flight: Requests being answered now.
    """

    requests: float
    refused: float
    failed: float
    first_byte_s: float
    sent: float
    received: float
    store_errors: float
    rate_limited: float
    connections: float
    in_flight: int


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
        self._in_flight = 0
        in_flight = Gauge("kvwire_http_requests_in_flight", "Requests being answered now.", registry=registry)
        in_flight.set_function(lambda: self._in_flight)
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

    @property
    def in_flight(self) -> int:
        """Requests being answered now."""
        return self._in_flight

    def begin(self) -> None:
        """A request came in."""
        self._in_flight += 1

    def end(self, method: str, status: int, seconds: float, first_byte_s: float) -> None:
        """Its answer is out, or was broken off."""
        self._in_flight -= 1
        method = method if method in self._seconds else "other"
        self._requests[method, status // 100].inc()
        self._seconds[method].observe(seconds)
        self._first[method].observe(first_byte_s)

    def totals(self) -> Totals:
        """Add up what there is by now."""
        found: defaultdict[str, float] = defaultdict(float)
        for metric in self._registry.collect():
            for sample in metric.samples:
                found[sample.name] += sample.value
                if sample.name == "kvwire_http_requests_total":
                    found[sample.labels["status"]] += sample.value
        return Totals(
            requests=found["kvwire_http_requests_total"],
            refused=found["4xx"],
            failed=found["5xx"],
            first_byte_s=found["kvwire_http_first_byte_seconds_sum"],
            sent=found["kvwire_http_sent_bytes_total"],
            received=found["kvwire_http_received_bytes_total"],
            store_errors=found["kvwire_store_errors_total"],
            rate_limited=found["kvwire_http_rate_limited_total"],
            connections=found["kvwire_http_connections"],
            in_flight=self._in_flight,
        )

    def render(self) -> bytes:
        """The page that Prometheus scrapes."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
