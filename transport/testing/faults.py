"""How an HTTP exchange can go wrong, and how often."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    FaultPlan = Callable[["ProxyRequest"], "ProxyFault | None"]


class FaultKind(Enum):
    """What a proxy does to one exchange; the fields named here are those of ``ProxyFault``."""

    RESET = "connection reset"
    """The connection is reset ``after`` bytes of the body."""
    TRUNCATE = "truncated body"
    """The connection is closed in good order ``after`` bytes of the body."""
    HANG_UP = "closed without an answer"
    """The connection is closed when the request's head is in."""
    LOST_ANSWER = "answer lost"
    """The server does the work, and the connection is reset before a byte of its answer."""
    STATUS = "status"
    """The proxy answers with ``status`` itself, and with ``Retry-After`` where ``retry_after`` is given."""
    SILENT = "no answer"
    """Nothing is sent for ``seconds``, then the connection is closed."""
    STALL = "stall"
    """Nothing more is sent for ``seconds`` after ``after`` bytes of the body, then the connection is closed."""
    DRIP = "slow drip"
    """The body is sent at ``rate`` bytes/s."""
    FLIP = "flipped byte"
    """The byte ``after`` bytes into the body is another."""
    SHIFTED_RANGE = "wrong Content-Range"
    """``Content-Range`` tells bytes ``shift`` further on than those sent."""
    OTHER_RANGE = "other range"
    """The server is asked for bytes ``shift`` further on, and its honest answer is passed on."""
    WHOLE = "whole object instead of a range"
    """The server is asked without ``Range``: its answer is the whole object, with status 200."""
    LONG_LENGTH = "length too large"
    """``Content-Length`` is ``shift`` too large; the connection is closed after the body."""
    SHORT_LENGTH = "length too small"
    """``Content-Length`` is ``shift`` too small; all of the body is sent."""
    REPLACED = "replaced object"
    """Every byte and the tag are others, as if the object had been replaced; ``If-Match`` is ignored."""
    GARBAGE = "garbage for a head"
    """The answer begins with bytes that are no HTTP."""


@dataclass(frozen=True)
class ProxyFault:
    """One fault. after: bytes, random where None. rate: bytes/s. The kinds tell which of the fields they use."""

    kind: FaultKind
    after: int | None = None
    status: int = 503
    retry_after: str | None = None
    seconds: float = 3600.0
    rate: float = 1000.0
    shift: int = 7


@dataclass(frozen=True)
class ProxyRequest:
    """What a plan sees: number (from 0), method, path without its query, and the range asked for (None: none).

    end is exclusive; None where the range is open or there is none. query_names: names alone, for values may be secret.
    """

    number: int
    method: str
    path: str
    start: int | None = None
    end: int | None = None
    query_names: frozenset[str] = frozenset()


@dataclass
class ProxyRecord:
    """One exchange: what was asked, what is done to it, with which status and how many body bytes so far."""

    request: ProxyRequest
    fault: ProxyFault | None
    status: int = 0
    body_bytes: int = 0


def first(fault: ProxyFault, times: int = 1) -> FaultPlan:
    """A plan: the first GETs go wrong, all else goes well."""
    return nth(fault, *range(times))


def nth(fault: ProxyFault, *numbers: int) -> FaultPlan:
    """A plan: GETs of these numbers (from 0, counted by themselves) go wrong, all else goes well."""
    seen = 0

    def plan(request: ProxyRequest) -> ProxyFault | None:
        nonlocal seen
        if request.method != "GET":
            return None
        seen += 1
        return fault if seen - 1 in numbers else None

    return plan


def at_random(rates: Mapping[ProxyFault, float], seed: int) -> FaultPlan:
    """A plan: every fault with its probability, drawn from ``seed``, for requests of every method.

    Raises ArgumentError where the rates are no probabilities.
    """
    chosen = dict(rates)
    if any(rate < 0 for rate in chosen.values()) or sum(chosen.values()) > 1:
        msg = f"rates of faults must be 0 or more and at most 1 together, got {list(chosen.values())}"
        raise ArgumentError(msg)
    rng = random.Random(seed)  # noqa: S311 - repeatable faults, guards nothing

    def plan(_: ProxyRequest) -> ProxyFault | None:
        draw = rng.random()
        for fault, rate in chosen.items():
            if draw < rate:
                return fault
            draw -= rate
        return None

    return plan
