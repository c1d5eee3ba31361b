"""The proxy's own numbers, in a registry of their own. No label tells a document, a tenant or an address."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire._lazy import require

if TYPE_CHECKING:
    from collections.abc import Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class ProxyMetrics:
    """What one proxy has done since it started."""

    def __init__(self) -> None:
        """Start at nothing."""
        require("prometheus_client", "serve", "kvwire vllm-proxy")
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self._registry = made = CollectorRegistry()
        self._requests = Counter(
            "kvwire_proxy_requests", "Requests, by what they ask for and class of status.", ["kind", "status"],
            registry=made,
        )  # fmt: skip
        self._first = Histogram(
            "kvwire_proxy_first_byte_seconds", "Time to the first byte of a completion.", ["kind"], buckets=_SECONDS,
            registry=made,
        )  # fmt: skip
        self._prepare = Histogram(
            "kvwire_proxy_prepare_seconds", "Time to look documents up and render them.", buckets=_SECONDS,
            registry=made,
        )  # fmt: skip
        self._outcomes = Counter(
            "kvwire_proxy_outcomes", "Requests for documents or prefixes, by what became of them.", ["outcome"],
            registry=made,
        )  # fmt: skip
        self._tokens = Counter(
            "kvwire_proxy_tokens", "Tokens that vLLM promised to load, by what became of them.", ["outcome"],
            registry=made,
        )  # fmt: skip
        self._failures = Counter(
            "kvwire_proxy_failures", "Requests that the proxy could not serve, by reason.", ["reason"], registry=made
        )
        self.in_flight = 0
        Gauge("kvwire_proxy_requests_in_flight", "Requests being answered now.", registry=made).set_function(
            lambda: self.in_flight
        )

    def ended(self, kind: str, status: int) -> None:
        """Count an answer."""
        self._requests.labels(kind, f"{status // 100}xx").inc()

    def first_byte(self, kind: str, seconds: float) -> None:
        """Count the time to an answer's first byte."""
        self._first.labels(kind).observe(seconds)

    def prepared(self, seconds: float) -> None:
        """Count the time that a request's body took."""
        self._prepare.observe(seconds)

    def failed(self, reason: str) -> None:
        """Count a request that could not be served."""
        self._failures.labels(reason).inc()

    def told(self, outcome: Mapping[str, Any] | None) -> None:
        """Count what became of a request's documents; None: it is not known."""
        if outcome is None:
            self._outcomes.labels("unknown").inc()
            return
        loaded, lost = int(outcome.get("loaded_tokens", 0)), int(outcome.get("lost_tokens", 0))
        self._tokens.labels("loaded").inc(loaded)
        self._tokens.labels("lost").inc(lost)
        kind = "refused" if "refused" in outcome else "trouble" if lost or "trouble" in outcome else "served"
        self._outcomes.labels(kind).inc()

    def render(self) -> bytes:
        """As Prometheus reads it."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
