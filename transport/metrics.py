"""Counters of the server, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter


class ServerMetrics:
    """Requests by class of status, bytes sent and requests in flight; no label tells a tenant or a key."""

    def __init__(self) -> None:
        """Start at zero."""
        self._requests: Counter[str] = Counter({f"{digit}xx": 0 for digit in range(2, 6)})
        self._sent_bytes = 0
        self._in_flight = 0

    @property
    def in_flight(self) -> int:
        """Requests being answered now."""
        return self._in_flight

    def begin(self) -> None:
        """A request came in."""
        self._in_flight += 1

    def end(self, status: int) -> None:
        """Its answer is out, or was broken off."""
        self._in_flight -= 1
        self._requests[f"{status // 100}xx"] += 1

    def sent(self, size: int) -> None:
        """Bytes of an object went out."""
        self._sent_bytes += size

    def render(self) -> str:
        """The page that Prometheus scrapes."""
        lines = [
            "# HELP kvwire_http_requests_total Requests answered, by class of status.",
            "# TYPE kvwire_http_requests_total counter",
            *(f'kvwire_http_requests_total{{status="{name}"}} {n}' for name, n in sorted(self._requests.items())),
            "# HELP kvwire_http_sent_bytes_total Bytes of objects sent.",
            "# TYPE kvwire_http_sent_bytes_total counter",
            f"kvwire_http_sent_bytes_total {self._sent_bytes}",
            "# HELP kvwire_http_requests_in_flight Requests being answered now.",
            "# TYPE kvwire_http_requests_in_flight gauge",
            f"kvwire_http_requests_in_flight {self._in_flight}",
        ]
        return "\n".join(lines) + "\n"
