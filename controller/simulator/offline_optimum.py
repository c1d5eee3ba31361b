"""The offline optimum of one load: a bound on what any controller could do that sees the whole future.

Every schedule obeys the following, whatever its order; the bound is the best choice of recomputing or fetching, for
each chunk, that obeys it:

- what is fetched goes through the link between the first round trip's end and the last arrival, at the true rates;
- the decode of what arrives last, and so at least the shortest decode that there is, comes after that arrival;
- all decodes come after the first arrival, the least that can be fetched at all, and share one lane;
- all recomputation shares one lane, which with one worker is also that of the decodes; a recomputed chunk costs what
  its own context makes it cost, and a decode's fixed cost comes once, if at all;
- a pass is of one document, so that its fixed cost comes once for each document of which anything is recomputed, and of
  so many documents only so many tokens can be recomputed in the time that this leaves. The least error is the least
  over all numbers of such documents, or over 16 spans of numbers. For times and bytes two simpler bounds follow, and
  the higher one counts: a fixed cost once in all, or for each chunk its share of its document's pass.

What is relaxed, always in the optimistic direction: the order on the link and in the lanes (that recomputing waits for
earlier chunks to be decoded, that a decode waits for its own bytes, that neither is interrupted), fixed costs of a
document's passes beyond the first, and round trips beyond the first. Times and bytes are bounded by dynamic programming
with costs rounded down, errors by a linear relaxation, in which a chunk may be fetched in part at one level and in part
at another: they may belong to no schedule, least so in loads of a few chunks.

A mean load's best schedule takes about 2 % longer than the bound, tens of percent longer in the few loads of two to
eight chunks where recomputing has to wait for a chunk that is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from kvwire.errors import ArgumentError

from ._knapsack import Savings, fits, least_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvwire.types.rates import RateTrace

    from ..costs import CostModel, PrefillCost
    from ..documents import DocumentPlanInput

    Floats = NDArray[np.float64]

Objective = Literal["earliest", "quality", "cheapest"]

_HALVINGS = 50
_MOST_SPANS = 16  # of numbers of documents
_SLACK = 1e-9  # of a deadline, relative; for rounding


@dataclass(frozen=True)
class Optimum:
    """What no controller can better; each figure by itself.

    Attributes:
        ttft_s: Seconds from the load's start; infinite, and never in time, where the link does not bring what must be
            fetched.
        error: Mean over tokens, by the deadline; where nothing is in time or the soonest is wanted, by ``ttft_s``.
        bytes: Fetched, likewise.
        in_time: Whether ``ttft_s`` is within the deadline, if there is one.
    """

    ttft_s: float
    error: float
    bytes: float
    in_time: bool


def optimum(  # noqa: PLR0913 - a load has as many sides
    documents: Sequence[DocumentPlanInput],
    costs: CostModel,
    rate: RateTrace,
    *,
    start_s: float = 0.0,
    rtt_s: float = 0.0,
    objective: Objective,
    deadline_s: float | None = None,
    floor: int = 0,
    workers: int = 1,
) -> Optimum:
    """Bound what any controller can reach for a load.

    Args:
        documents: In prompt order.
        costs: What computing costs.
        rate: Of the link.
        start_s: Second of the trace at which the load begins.
        rtt_s: Before the first byte.
        objective: "earliest", "quality" or "cheapest"; the latter two become "earliest" where nothing is in time.
        deadline_s: Seconds from the load's start to the first token, or None for no limit.
        floor: The lowest level that may be fetched where there is a choice.
        workers: 1 (decoding and recomputing take turns) or 2 (a lane each).

    Returns:
        The bound.

    Raises:
        ArgumentError: For a chunk that can neither be fetched nor recomputed, and for settings that cannot be.
    """
    _check(objective, workers, floor, start_s, rtt_s, deadline_s)
    limit = inf if deadline_s is None else deadline_s
    counts = (False, True) if len(documents) > 1 and costs.prefill.base_s else (False,)
    options = [_Options(documents, costs, floor, shared=shared) for shared in counts]
    loads = [_Load(each, costs, rate, start_s, rtt_s, workers) for each in options]
    closing_s = costs.closing_s(sum(sum(document.tokens) for document in documents))
    ready_s = max(load.earliest_s for load in loads)
    by_s = limit * (1 + _SLACK) - closing_s
    in_time = isfinite(ready_s) and ready_s <= by_s
    if objective == "earliest" or not in_time:
        by_s = ready_s
    ttft_s = min(ready_s + closing_s, limit) if in_time else ready_s + closing_s
    error = max(load.least_error(by_s) for load in loads)
    return Optimum(ttft_s, error, max(load.least_bytes(by_s) for load in loads), in_time)


def _check(objective: str, workers: int, floor: int, *times: float | None) -> None:
    if objective not in get_args(Objective) or workers not in {1, 2} or floor < 0:
        raise ArgumentError(
            f"an objective is one of {', '.join(get_args(Objective))}, workers are 1 or 2 and a floor is at least 0, "
            f"got {objective!r}, {workers} and {floor}"
        )
    if any(time is not None and not (isfinite(time) and time >= 0) for time in times):
        raise ArgumentError(f"start, round trip and deadline must be finite seconds of at least 0, got {times}")


class _Options:
    """What can be done about each chunk, as arrays ``[chunks, 1 + levels]``: recompute, or fetch a level.

    size: bytes. prefill_s, decode_s: seconds without fixed costs; with ``shared`` a chunk that is recomputed bears its
    share of its document's pass, otherwise ``fixed_s`` comes besides. error: share of the load's mean; infinite where
    the option is not there. lengths: of the documents that can be recomputed, longest first. shortest_decode_s: of any
    arrival that completes a chunk; first_bytes: of any arrival.
    """

    def __init__(self, documents: Sequence[DocumentPlanInput], costs: CostModel, floor: int, *, shared: bool) -> None:
        chunks = sum(len(document.tokens) for document in documents)
        if not chunks:
            raise ArgumentError("a load needs at least one document")
        shape = (chunks, 2 + max(document.finest for document in documents))
        self.tokens = np.concatenate([np.array(document.tokens, dtype=np.float64) for document in documents])
        self.size, self.prefill_s, self.decode_s = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.error = np.full(shape, inf)
        self.shared_s, self.fixed_s = (costs.prefill.base_s, 0.0) if shared else (0.0, costs.prefill.base_s)
        self.lengths = sorted((sum(document.tokens) for document in documents if document.has_text), reverse=True)
        self.shortest_decode_s = self.first_bytes = inf
        row = 0
        for document in documents:
            self._add(document, costs, floor, row)
            row += len(document.tokens)
        self.error *= (self.tokens / self.tokens.sum())[:, None]

    def _add(self, document: DocumentPlanInput, costs: CostModel, floor: int, row: int) -> None:
        context = 0
        for chunk, tokens in enumerate(document.tokens):
            sizes = document.fetch_bytes[chunk] if document.fetch_bytes else ()
            lowest = _lowest_level(document, sizes, floor)
            if lowest is None and not document.has_text:
                msg = f"chunk {chunk} of a document has neither text nor a level to fetch; give it one of them"
                raise ArgumentError(msg)
            seconds = costs.prefill.marginal(tokens, context)
            if document.has_text:
                self.prefill_s[row, 0] = seconds + self.shared_s / len(document.tokens)
                self.error[row, 0] = document.error(chunk, None)
            if lowest is not None:
                # The reader's head start counts for the whole pass, and recomputing goes on from there.
                self.prefill_s[row, 1:] = document.prefix_share * seconds
                fetched = np.array(sizes[lowest:], dtype=np.float64)
                levels = slice(1 + lowest, 1 + len(sizes))
                self.size[row, levels] = fetched
                self.decode_s[row, levels] = costs.decode.token_s * tokens + costs.decode.byte_s * fetched
                self.error[row, levels] = [document.error(chunk, level) for level in range(lowest, len(sizes))]
                self._arrival(document, costs, tokens, sizes, lowest)
            context += tokens
            row += 1

    def _arrival(
        self, document: DocumentPlanInput, costs: CostModel, tokens: int, sizes: tuple[int, ...], lowest: int
    ) -> None:
        """Note the least that the first arrival and the last one can be: layers may come one by one."""
        layers = np.diff(sizes, prepend=0) if document.layered else np.array(sizes[lowest:])
        self.first_bytes = min(self.first_bytes, float(layers[0]))
        last_s = costs.decode.token_s * tokens + costs.decode.byte_s * float(layers.min())
        self.shortest_decode_s = min(self.shortest_decode_s, last_s)

    @cached_property
    def can_recompute(self) -> NDArray[np.bool_]:
        """Which chunks have text."""
        return np.asarray(np.isfinite(self.error[:, 0]), dtype=np.bool_)

    @cached_property
    def lowest(self) -> NDArray[np.int64]:
        """The option that fetches least, for each chunk; 0 where none can be fetched."""
        there = np.isfinite(self.error[:, 1:])
        return np.where(there.any(axis=1), 1 + there.argmax(axis=1), 0) if there.size else np.zeros(len(there), int)

    def sums(self, choice: NDArray[np.int64]) -> tuple[float, float, float]:
        """Bytes, seconds of decode and seconds of prefill of a choice."""
        rows = np.arange(len(choice))
        return tuple(float(part[rows, choice].sum()) for part in (self.size, self.decode_s, self.prefill_s))  # type: ignore[return-value]


def _most_tokens(lengths: Sequence[int], cost: PrefillCost, seconds: float) -> float:
    """The most tokens of documents of these lengths that can be recomputed in some seconds, without fixed costs.

    A token attends to all those before it in its document, so that it takes least to go equally far in each.
    """
    low, high = 0.0, float(max(lengths))

    def tokens(far: float) -> list[float]:
        return [min(far, length) for length in lengths]

    def fits(far: float) -> bool:
        return sum(cost.token_s * each + cost.pair_s * each**2 / 2 for each in tokens(far)) <= seconds

    if fits(high):
        return float(sum(lengths))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return sum(tokens(high))


def _lowest_level(document: DocumentPlanInput, sizes: tuple[int, ...], floor: int) -> int | None:
    """The lowest level of a chunk that may be fetched: the document's finest stands for all above it."""
    wanted = min(max(floor, document.floor), document.finest)
    if 0 <= wanted < len(sizes):
        return wanted
    return None if document.has_text or not sizes else len(sizes) - 1


@dataclass(frozen=True)
class _Load:
    """A load and what it meets. Instants are seconds from its start."""

    options: _Options
    costs: CostModel
    rate: RateTrace
    start_s: float
    rtt_s: float
    workers: int

    @cached_property
    def first_arrival_s(self) -> float:
        """Before this nothing can be decoded."""
        return self.arrival_s(self.options.first_bytes) if isfinite(self.options.first_bytes) else inf

    def arrival_s(self, size: float) -> float:
        """When so many bytes can be here."""
        return self.rate.time_to(size, self.start_s + self.rtt_s) - self.start_s

    def bytes_by(self, instant_s: float) -> float:
        """Bytes that can be here by an instant."""
        if instant_s < self.rtt_s:
            return -1.0
        return self.rate.bytes_between(self.start_s + self.rtt_s, self.start_s + instant_s)

    @cached_property
    def _ways(self) -> list[_Way]:
        ways = (_Way(self, recompute=r, fetch=f) for r, f in ((True, True), (False, True), (True, False)))
        return [way for way in ways if way.is_open]

    @cached_property
    def earliest_s(self) -> float:
        """The soonest that all chunks can be ready."""
        return min(way.earliest_s for way in self._ways)

    def _in_time(self, by_s: float) -> list[_Way]:
        return [way for way in self._ways if way.earliest_s <= by_s]

    def least_bytes(self, by_s: float) -> float:
        """The fewest bytes with which all can be ready by an instant, no sooner than ``earliest_s``."""
        return min(way.least_bytes(by_s) for way in self._in_time(by_s))

    def least_error(self, by_s: float) -> float:
        """The least error that can be ready by an instant, no sooner than ``earliest_s``."""
        ways = self._in_time(by_s)
        error = min(way.least_error(by_s) for way in ways)
        # Where nothing fits, rounding is at work.
        return error if isfinite(error) else min(way.least_error(by_s, by_documents=False) for way in ways)


@dataclass(frozen=True, eq=False)
class _Way:
    """Loads that recompute something, fetch something, or do both: each with the fixed costs that this takes."""

    load: _Load
    recompute: bool
    fetch: bool

    @property
    def is_open(self) -> bool:
        """Whether the documents allow for it."""
        can_fetch, can_recompute = self.load.options.lowest > 0, self.load.options.can_recompute
        if self.recompute and self.fetch:
            return bool(can_fetch.any() and can_recompute.any())
        return bool(can_fetch.all() if self.fetch else can_recompute.all())

    def ready_s(self, choice: NDArray[np.int64]) -> float:
        """The soonest that a choice's sums allow all chunks to be ready, in seconds from the start."""
        size, decode_s, prefill_s = self.load.options.sums(choice)
        lane_s = self._fixed_s + prefill_s + (decode_s if self._shared else 0.0)
        if not self.fetch:
            return lane_s
        base_s = self.load.costs.decode.base_s
        return max(lane_s, self.load.arrival_s(size) + self._tail_s, self.load.first_arrival_s + base_s + decode_s)

    @cached_property
    def earliest_s(self) -> float:
        """The soonest that all chunks can be ready, whatever is chosen at or above the floor."""
        fetching, recomputing = self._extremes
        high = min(self.ready_s(fetching), self.ready_s(recomputing))
        if not (self.fetch and self.recompute) or not isfinite(high):
            return high
        savings, low = self._savings(high), 0.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fits(savings, middle) else (middle, high)
        return high

    def least_bytes(self, instant_s: float) -> float:
        """The fewest bytes that must be fetched for computing to be done by an instant."""
        if not (self.fetch and self.recompute) or not isfinite(instant_s):
            return self.load.options.sums(self._extremes[1])[0]
        saved = self._savings(instant_s).most(self._spare_s(instant_s))
        return max(0.0, self.load.options.sums(self._leanest)[0] - float(saved[0]))

    def least_error(self, instant_s: float, *, by_documents: bool = True) -> float:
        """The least error that can be ready by an instant, no sooner than ``earliest_s``.

        by_documents: Whether passes are counted by the documents that they are of; the error is then infinite where
        there is no time for as many as are needed.
        """
        options = self.load.options
        value = options.error.copy()
        value[:, 0 if not self.recompute else slice(0)] = inf
        value[:, slice(0) if self.fetch else slice(1, None)] = inf
        lane = options.prefill_s + options.decode_s if self._shared else options.prefill_s
        uses = np.stack([options.size, options.decode_s, lane])
        budgets = np.full(3, inf)
        if isfinite(instant_s):
            decode_s = instant_s - self.load.first_arrival_s - self.load.costs.decode.base_s if self.fetch else inf
            size = self.load.bytes_by(instant_s - self._tail_s) if self.fetch else inf
            budgets = np.array([size, decode_s, instant_s - self._fixed_s])
        several = self.recompute and isfinite(instant_s) and options.fixed_s and len(options.lengths) > 1
        if not (several and by_documents):
            return least_value(value, uses, budgets)
        ways = self._by_documents(uses, budgets)
        found = [least_value(value, *way) for way in ways if fits(value, *way)]
        return min(found, default=inf)

    def _by_documents(self, uses: Floats, budgets: Floats) -> list[tuple[Floats, Floats]]:
        """Uses and budgets for each number of documents of which anything may be recomputed.

        Of very many documents for each span of numbers: the fixed costs of the fewest, the tokens of the most.
        """
        options, prefill = self.load.options, self.load.costs.prefill
        tokens = np.zeros_like(options.size)
        tokens[:, 0] = options.tokens
        ways, count = [], len(options.lengths)
        span = -(-count // _MOST_SPANS)
        for more in range(0, count, span):
            lane_s = budgets[2] - more * options.fixed_s
            most = _most_tokens(options.lengths[: more + span], prefill, lane_s)
            ways.append((np.stack([*uses, tokens]), np.array([*budgets[:2], lane_s, most])))
        return ways

    @property
    def _shared(self) -> bool:
        return self.load.workers == 1

    @property
    def _fixed_s(self) -> float:
        """Fixed costs in the lane that recomputes, but for those that chunks bear."""
        costs = self.load.costs
        decode_s = costs.decode.base_s if self.fetch and self._shared else 0.0
        return decode_s + (self.load.options.fixed_s if self.recompute else 0.0)

    @property
    def _tail_s(self) -> float:
        """Seconds from the last arrival on."""
        return self.load.costs.decode.base_s + self.load.options.shortest_decode_s

    @cached_property
    def _extremes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The choices to fetch, and to recompute, all that can be."""
        options = self.load.options
        fetching = options.lowest if self.fetch else np.zeros_like(options.lowest)
        return fetching, np.where(options.can_recompute, 0, fetching) if self.recompute else fetching

    def _lane_s(self, choice: NDArray[np.int64]) -> Floats:
        """Seconds of each chunk in the lane that recomputes."""
        options, rows = self.load.options, np.arange(len(choice))
        decode_s = options.decode_s[rows, choice] if self._shared else 0.0
        return np.asarray(options.prefill_s[rows, choice] + decode_s)

    @cached_property
    def _leanest(self) -> NDArray[np.int64]:
        """The choice with the least computing: to fetch, but where recomputing costs no more."""
        fetching, recomputing = self._extremes
        return np.where(self._lane_s(recomputing) <= self._lane_s(fetching), recomputing, fetching)

    @cached_property
    def _swaps(self) -> NDArray[np.bool_]:
        """Chunks that spare compute can spare the link."""
        return np.asarray(self._leanest != self._extremes[1])

    def _spare_s(self, instant_s: float) -> float:
        return instant_s - self._fixed_s - float(self._lane_s(self._leanest).sum())

    def _savings(self, latest_s: float) -> Savings:
        """What recomputing saves of bytes and of decode, for compute that ends by ``latest_s`` or sooner."""
        options, rows = self.load.options, np.flatnonzero(self._swaps)
        leanest, recomputing = self._leanest, self._extremes[1]
        cost = (self._lane_s(recomputing) - self._lane_s(leanest))[rows]
        saved = np.stack([options.size[rows, leanest[rows]], options.decode_s[rows, leanest[rows]]], axis=1)
        return Savings(cost, saved, min(float(cost.sum()), max(self._spare_s(latest_s), 0.0)))

    def _fits(self, savings: Savings, instant_s: float) -> bool:
        """Whether everything can be ready by an instant."""
        spare_s = self._spare_s(instant_s)
        if spare_s < 0:
            return False
        size, decode_s, _ = self.load.options.sums(self._leanest)
        least = np.array([size, decode_s]) - savings.most(spare_s)
        room_s = instant_s - self.load.first_arrival_s - self.load.costs.decode.base_s
        return bool(least[0] <= self.load.bytes_by(instant_s - self._tail_s) and least[1] <= room_s)
