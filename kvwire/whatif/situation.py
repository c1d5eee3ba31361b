"""One prompt, link and engine, and the outcome of any policy there.

A policy makes its first plan through a real controller that knows all documents and has started nothing. The simulator
then runs the load, with a real controller too. Telling a controller of many documents takes much longer than planning,
so one controller serves many plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log10
from typing import TYPE_CHECKING

import numpy as np

from kvwire import controller as ctl
from kvwire.controller import events as ev
from kvwire.controller.policies import RECOMPUTE, Adaptive, Plan, RepairRule
from kvwire.controller.simulator import LoadArrival, World, constant
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.controller.policies import PlanRequest, Policy
    from kvwire.controller.simulator import Outcome

    Variants = tuple[ctl.DocumentPlanInput, ...]


@dataclass(frozen=True, kw_only=True)
class Details:
    """Facts about documents that only reports need."""

    level_names: tuple[str, ...] = ()  # level 0 first
    # for each document, the KL divergence in nats predicted for each level; empty if not known
    level_kl: tuple[tuple[float, ...], ...] = ()
    header_bytes: int = 0  # bytes of all headers, which are read before planning
    raw_token_bytes: int = 0  # uncompressed bytes of one token's cache; 0 leaves out that comparison
    # cost of decoding an uncompressed cache
    raw_decode: ctl.DecodeCost = field(default_factory=lambda: ctl.DecodeCost(0.0, 0.0))


@dataclass(frozen=True)
class PlannedChunk:
    """The treatment of one chunk."""

    document: int  # its number in the prompt
    chunk: int  # its number in the document
    tokens: int  # its length
    level: int | None  # final level; None: recomputed
    first_level: int | None  # level in the first plan; None: recomputed
    reason: str  # the decision's reason in words
    bytes: int  # bytes to fetch
    error: float  # error of the resulting cache


@dataclass(frozen=True)
class Prediction:
    """Predicted outcome of a load, in seconds from the request; the parts overlap."""

    name: str  # the policy or alternative
    ttft_s: float  # time to first token
    headers_s: float  # until all headers are read
    fetch_s: float  # while chunks are being fetched
    decode_s: float  # decoding chunks
    prefill_s: float  # recomputing chunks
    closing_s: float  # from the last chunk to the first token
    bytes: int  # bytes of chunks fetched, including wasted ones
    error: float  # mean over tokens
    kl: float | None  # mean over tokens of the predicted KL divergence, in nats; None if a blob has no prediction
    levels: tuple[int, ...]  # tokens at each level
    recomputed: int  # number of recomputed tokens
    in_time: bool  # whether the first token meets the deadline, if there is one
    played: bool  # whether the simulator ran the load; else (too long) these are the policy's estimates

    @property
    def quality_db(self) -> float:
        """Error in decibels, higher is better; infinite without error."""
        return -10 * log10(self.error) if self.error > 0 else inf


_BETWEEN_S = 1.0  # longer than the controller reuses a plan


class _RecordingPolicy:
    """A policy that starts nothing and records the last request.

    policy: used only to choose between variants, which takes plans of the documents known so far. repair_share: of a
    policy that decides how many rows to repair.
    """

    name, preemptible = "recording", True
    repair_share: Callable[[float, float], float]

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def plan(self, request: PlanRequest) -> Plan:
        """Return an empty plan: no fetch, no recompute."""
        self.request, levels = request, np.zeros(request.chunks.count, np.int64)
        if self._policy is None:
            return Plan(levels, (), 0.0, 0.0, 0, in_time=True, reason="nothing begins")
        answer = self._policy.plan(request)
        return replace(answer, levels=levels, order=(), upgraded=frozenset(), refine=(), refine_levels=())


@dataclass(frozen=True, eq=False)
class QueriedPlan:
    """A request and a policy's plan for it."""

    request: PlanRequest  # the policy's input
    plan: Plan  # its output
    inputs: tuple[ctl.DocumentPlanInput, ...]  # the chosen variant of each document


class PlanQuery:
    """One prompt, goal and engine; plans for any link and policy."""

    def __init__(
        self,
        documents: tuple[Variants, ...],
        estimates: ctl.Estimates,
        goal: ctl.Goal,
        settings: ctl.ControllerSettings,
        query_tokens: int,
        repair: ctl.RepairOption | None = None,
    ) -> None:
        """Keep the prompt's inputs; the controller is made on first use."""
        self._repair = repair if len(documents) > 1 else None
        self._documents, self._estimates = documents, estimates
        self._goal, self._settings, self._query_tokens = goal, settings, query_tokens
        self._choosing = any(len(variants) > 1 for variants in documents)
        self._prepared: tuple[ctl.Controller, _RecordingPolicy] | None = None
        self._now = 0.0

    def ask(self, policy: Policy, bandwidth: ctl.BandwidthEstimator, since_s: float) -> QueriedPlan:
        """Let a policy plan the prompt."""
        if self._prepared is None or self._choosing or isinstance(policy, RepairRule):
            self._prepared = self._prepare(policy, bandwidth, since_s)
        else:
            self._prepared[0].estimates.bandwidth = bandwidth
            self._now += _BETWEEN_S
            self._prepared[0].handle(ev.Tick(), self._now)
        controller, recorder = self._prepared
        last = recorder.request
        left_s = None if last.left_s is None else last.left_s + (last.now - since_s)
        # A controller's first request is for cautious first steps; the whole load's plan is wanted.
        request = replace(last, left_s=left_s, now=since_s, risk=0.0, pass_chunks=inf)
        inputs = tuple(doc.input for doc in controller.loads[0].docs)
        return QueriedPlan(request, policy.plan(request), inputs)

    def _prepare(
        self, policy: Policy, bandwidth: ctl.BandwidthEstimator, since_s: float
    ) -> tuple[ctl.Controller, _RecordingPolicy]:
        """Make a controller that knows all documents."""
        estimates = self._estimates.copy()
        recorder = _RecordingPolicy(policy if self._choosing or isinstance(policy, RepairRule) else None)
        if isinstance(policy, RepairRule):
            recorder.repair_share = policy.repair_share
        estimates.bandwidth = bandwidth
        controller = ctl.Controller(estimates, self._settings, recorder)
        controller.handle(ev.LoadRequested(0, len(self._documents), self._query_tokens, self._goal, self._repair), 0.0)
        self._now = since_s
        for number, variants in enumerate(self._documents):
            for instruction in controller.handle(ev.IndexKnown(0, number, variants), since_s):
                if isinstance(instruction, ev.Fail):
                    raise ArgumentError(f"{instruction.reason}; give the document's text, or encode it again")
        return controller, recorder


_MOST_PLAYED_S = 30.0  # longer loads take the simulator too long; the policy's estimate replaces it
_LANES = ("link", "decode", "prefill")
_MOST_PLAYED_DOCUMENTS = 64  # for the same reason


def known_link(
    costs: ctl.CostModel | ctl.Estimates, bandwidth: float, ttfb_s: float, *, known_engine: bool = False
) -> ctl.Estimates:
    """Make estimates for a link with known bandwidth."""
    if not (0 < bandwidth < inf and 0 <= ttfb_s < inf):
        msg = f"a link needs a bandwidth above 0 and a round trip of 0 or more, got {bandwidth} B/s and {ttfb_s} s"
        raise ArgumentError(msg)
    made = costs.copy() if isinstance(costs, ctl.Estimates) else ctl.Estimates(costs, bandwidth, ttfb_s)
    made.bandwidth = ctl.BandwidthEstimator(bandwidth, prior_error=0.0)
    made.ttfb = ctl.RecentMedian(ttfb_s, 0.0)
    if known_engine:
        made.prefill = ctl.PrefillEstimator(made.prefill.cost, spread=0.0)
        made.decode = ctl.DecodeEstimator(made.decode.cost, spread=0.0)
    return made


@dataclass(frozen=True, eq=False)
class Forecast:
    """A policy's first plan."""

    plan: Plan  # the policy's output
    headers_s: float  # seconds until all headers are read
    closing_s: float  # seconds from the last chunk to the first token
    levels: dict[tuple[int, int], int]  # by document and chunk; RECOMPUTE (-1) where a chunk is recomputed
    inputs: tuple[ctl.DocumentPlanInput, ...]  # the chosen variant of each document

    @property
    def ttft_s(self) -> float:
        """Seconds from the request to the first token."""
        return self.headers_s + self.plan.finish_s


@dataclass(frozen=True, eq=False)
class SimulatedLoad:
    """The outcome of a policy in the simulator."""

    outcome: Outcome  # the simulator's record of the load
    inputs: tuple[ctl.DocumentPlanInput, ...]  # the variant used of each document


@dataclass(frozen=True, eq=False)
class PlanScenario:
    """One prompt, link and engine."""

    documents: tuple[Variants, ...]  # in prompt order, each with its variants
    estimates: ctl.Estimates  # of link and engine; not changed
    goal: ctl.Goal = field(default_factory=ctl.Goal)  # deadline, floor and objective of the load
    settings: ctl.ControllerSettings = field(default_factory=ctl.ControllerSettings)  # the controller's
    query_tokens: int = 32  # length of the question
    details: Details = field(default_factory=Details)  # facts for reports
    repair: ctl.RepairOption | None = None  # limits and benefit of repairing links; None: no repair

    @property
    def bandwidth(self) -> float:
        """Expected bytes per second."""
        return self.estimates.bandwidth.value

    @property
    def headers_s(self) -> float:
        """Seconds until all headers are read."""
        return self._headers_s(self.bandwidth)

    @property
    def costs(self) -> ctl.CostModel:
        """Costs of computing."""
        return self.estimates.costs(self.query_tokens)

    @property
    def finest(self) -> int:
        """The finest level of any document."""
        return max(variant.finest for variants in self.documents for variant in variants)

    @property
    def levels(self) -> range:
        """Levels to compare: all, or only the finest if it is below the floor."""
        return range(self.finest if self.goal.floor > self.finest >= 0 else 0, self.finest + 1)

    def without_floors(self) -> PlanScenario:
        """The same without the documents' own floors, to compare levels by number."""
        documents = tuple(tuple(replace(each, floor=0) for each in variants) for variants in self.documents)
        return replace(self, documents=documents)

    def forecast(self, policy: Policy | None = None, bandwidth: float | None = None) -> Forecast:
        """Let a policy plan, with all headers read and nothing started."""
        estimator = self.estimates.bandwidth
        if bandwidth is not None:
            horizons = estimator.horizons
            estimator = ctl.BandwidthEstimator(bandwidth, prior_error=estimator.error, horizons=horizons)
        headers_s = self._headers_s(estimator.value)
        queried = self._inquiry.ask(policy or Adaptive(), estimator, headers_s)
        chunks, plan = queried.request.chunks, queried.plan
        places = zip(chunks.document.tolist(), chunks.chunk.tolist(), strict=True)
        levels = dict(zip(places, plan.levels.tolist(), strict=True))
        closing_s = queried.request.costs.closing_s(queried.request.prompt_tokens)
        return Forecast(plan, headers_s, closing_s, levels, queried.inputs)

    @cached_property
    def _inquiry(self) -> PlanQuery:
        return PlanQuery(self.documents, self.estimates, self.goal, self.settings, self.query_tokens, self.repair)

    def _headers_s(self, bandwidth: float) -> float:
        return self.estimates.ttfb.value + self.details.header_bytes / bandwidth

    def play(self, policy: Policy, forecast: Forecast) -> SimulatedLoad | None:
        """Simulate the load on a link of constant bandwidth; None if it is too large."""
        if forecast.ttft_s > _MOST_PLAYED_S or len(self.documents) > _MOST_PLAYED_DOCUMENTS:
            return None
        log: list[ctl.LogEntry] = []
        controller = ctl.Controller(self.estimates.copy(), self.settings, policy, record=log.append)
        world = World(
            controller, constant(self.bandwidth), self.costs, rtt_s=self.estimates.ttfb.value,
            workers=self.settings.workers, decode_threads=self.settings.decode_threads,
        )  # fmt: skip
        arrival = LoadArrival(0.0, self.documents, self.goal, self.query_tokens, self.headers_s, repair=self.repair)
        (outcome,) = world.run([arrival])
        fetches = [each for entry in log for each in entry.instructions if isinstance(each, ev.Fetch)]
        variants = {fetch.chunk.document: fetch.variant for fetch in fetches}
        inputs = tuple(each[variants.get(number, 0)] for number, each in enumerate(self.documents))
        return SimulatedLoad(outcome, inputs)

    def predict(self, name: str, policy: Policy) -> Prediction:
        """Plan with a policy, and simulate the plan if possible."""
        forecast = self.forecast(policy)
        return self.prediction(name, forecast, self.play(policy, forecast))

    def prediction(self, name: str, forecast: Forecast, played: SimulatedLoad | None) -> Prediction:
        """Summarise a policy's plan."""
        chunks = planned_chunks(forecast, played)
        tokens = sum(chunk.tokens for chunk in chunks)
        levels = [0] * (1 + max((chunk.level for chunk in chunks if chunk.level is not None), default=-1))
        for chunk in chunks:
            if chunk.level is not None:
                levels[chunk.level] += chunk.tokens
        due = inf if self.goal.deadline_s is None else self.goal.deadline_s
        ttft_s = played.outcome.ttft_s if played else forecast.ttft_s
        lanes = [_busy_s(played.outcome, lane) for lane in _LANES] if played else self._planned_lanes(chunks)
        return Prediction(
            name=name, ttft_s=ttft_s, headers_s=self.headers_s, fetch_s=lanes[0], decode_s=lanes[1], prefill_s=lanes[2],
            closing_s=forecast.closing_s, bytes=played.outcome.received if played else forecast.plan.bytes,
            error=sum(chunk.tokens * chunk.error for chunk in chunks) / tokens, levels=tuple(levels),
            kl=self._kl(chunks, played.inputs if played else forecast.inputs),
            recomputed=sum(chunk.tokens for chunk in chunks if chunk.level is None), in_time=ttft_s <= due,
            played=played is not None,
        )  # fmt: skip

    def _planned_lanes(self, chunks: Sequence[PlannedChunk]) -> list[float]:
        """Seconds of fetching, decoding and recomputing, from sizes only."""
        decode = self.costs.decode.shared(self.settings.decode_batch, self.settings.decode_threads)
        prefill = self.costs.prefill
        fetched = [chunk for chunk in chunks if chunk.level is not None]
        last = [self.costs.decode.beyond(decode).seconds(chunk.tokens, chunk.bytes) for chunk in fetched[:1]]
        computed = sum(prefill.marginal(c.tokens, c.tokens * c.chunk) for c in chunks if c.level is None)
        fetch_s = sum(chunk.bytes for chunk in fetched) / self.bandwidth
        return [fetch_s, sum(last) + sum(decode.seconds(chunk.tokens, chunk.bytes) for chunk in fetched), computed]

    def _kl(self, chunks: Sequence[PlannedChunk], inputs: Sequence[ctl.DocumentPlanInput]) -> float | None:
        """Mean over tokens of the blobs' predictions; 0 for recomputed chunks."""
        known, total = self.details.level_kl, 0.0
        for chunk in chunks:
            sizes = inputs[chunk.document].fetch_bytes
            if not sizes or not sizes[chunk.chunk] or chunk.level is None:
                continue
            level = chunk.level
            if chunk.document >= len(known) or level >= len(known[chunk.document]):
                return None
            total += chunk.tokens * known[chunk.document][level]
        return total / sum(chunk.tokens for chunk in chunks)


def planned_chunks(forecast: Forecast, played: SimulatedLoad | None) -> list[PlannedChunk]:
    """Describe the treatment of every chunk."""
    decisions = played.outcome.decisions if played else ()
    ends = {(made.chunk.document, made.chunk.chunk): (made.level, made.reason) for made in decisions}
    planned = []
    for number, document in enumerate(played.inputs if played else forecast.inputs):
        for chunk, tokens in enumerate(document.tokens):
            at = forecast.levels.get((number, chunk), RECOMPUTE)
            first = None if at == RECOMPUTE else at
            level, reason = ends.get((number, chunk), (first, forecast.plan.reason))
            size = 0 if level is None else document.fetch_bytes[chunk][level]
            error = document.error(chunk, level)
            planned.append(PlannedChunk(number, chunk, tokens, level, first, reason, size, error))
    return planned


def _busy_s(outcome: Outcome, lane: str) -> float:
    """Seconds in which a resource worked; its spans may overlap."""
    busy, until = 0.0, -inf
    for began, ended in sorted((span.began, span.ended) for span in outcome.spans if span.lane == lane):
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return busy
