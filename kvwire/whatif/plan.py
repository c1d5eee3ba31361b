"""What a load would do and why, without doing it: the controller's own plan, what would come of it, and of others.

The plan is asked of the policy through a real controller that knows all documents and has begun nothing. What comes of
it, and of the alternatives, is played on the simulator's link and lanes by real controllers, each with its own policy.
Where a bandwidth turns a plan into another is found by asking again, by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf, log10
from typing import TYPE_CHECKING

from kvwire import controller as ctl
from kvwire.controller import events as ev
from kvwire.controller.policies import RECOMPUTE, Adaptive, CacheGen, Fixed, Raw, TextOnly
from kvwire.controller.simulator import LoadArrival, World, constant
from kvwire.errors import ArgumentError
from kvwire.whatif.break_even import BreakEven, find_break_evens, find_unchanged
from kvwire.whatif.inquiry import Inquiry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.controller.policies import Plan, Policy
    from kvwire.controller.simulator import Outcome

    Variants = tuple[ctl.DocumentPlanInput, ...]

_MOST_PLAYED_S = 30.0  # a longer load takes the simulator too long; what its policy expects must do
_MOST_PLAYED_DOCUMENTS = 64  # likewise
MOST_DOCUMENTS = 128
"""Of one plan: the time that planning takes grows with their square."""


@dataclass(frozen=True, kw_only=True)
class Details:
    """What planning itself need not know of the documents.

    level_names: for tables. level_kl: of each document, the KL divergence in nats that its blob predicts for each
    level; empty where nobody knows. header_bytes: of all heads, which are read before anything is decided.
    raw_token_bytes: of one token's uncompressed cache, 0 where that is not to be compared; raw_decode: what decoding
    it costs.
    """

    level_names: tuple[str, ...] = ()
    level_kl: tuple[tuple[float, ...], ...] = ()
    header_bytes: int = 0
    raw_token_bytes: int = 0
    raw_decode: ctl.DecodeCost = field(default_factory=lambda: ctl.DecodeCost(0.0, 0.0))


@dataclass(frozen=True)
class PlannedChunk:
    """What becomes of one chunk.

    first_level: by the first plan; level: in the end; None: recomputed. bytes: to fetch for it.
    """

    document: int
    chunk: int
    tokens: int
    level: int | None
    first_level: int | None
    reason: str
    bytes: int
    error: float


@dataclass(frozen=True)
class Prediction:
    """What would come of a policy, in seconds from the asking; the parts overlap.

    ttft_s: to the first token. heads_s: until all heads are read. link_s: while chunks are being fetched. decode_s,
    prefill_s: compute for chunks. closing_s: from the last chunk to the first token. bytes: of chunks over the link,
    in vain or not. error: mean over tokens. kl: likewise, in nats; None where blobs do not tell. levels: tokens at each
    level; recomputed: the others. played: in the simulator; a load too long for that is as the policy expects.
    """

    name: str
    ttft_s: float
    heads_s: float
    link_s: float
    decode_s: float
    prefill_s: float
    closing_s: float
    bytes: int
    error: float
    kl: float | None
    levels: tuple[int, ...]
    recomputed: int
    in_time: bool
    played: bool

    @property
    def quality_db(self) -> float:
        """Error in decibels, higher is better; infinite for none."""
        return -10 * log10(self.error) if self.error > 0 else inf


@dataclass(frozen=True)
class LoadPlan:
    """A load as it would be.

    chunks: in prompt order. prediction: of this plan. expected_s: what the policy itself expects, to the first token,
    when all heads are read. alternatives: the same prompt in other ways. break_evens: see there. unchanged: the
    bandwidths next below and above at which the first plan is another, None where there is none within bounds.
    """

    goal: ctl.Goal
    bandwidth: float
    ttfb_s: float
    query_tokens: int
    chunks: tuple[PlannedChunk, ...]
    prediction: Prediction
    expected_s: float
    alternatives: tuple[Prediction, ...]
    break_evens: tuple[BreakEven, ...]
    unchanged: tuple[float | None, float | None]
    level_names: tuple[str, ...]


def plan_load(
    documents: Sequence[ctl.DocumentPlanInput | Variants],
    estimates: ctl.Estimates,
    goal: ctl.Goal | None = None,
    *,
    settings: ctl.ControllerSettings | None = None,
    query_tokens: int = 32,
    details: Details | None = None,
    compare: bool = True,
) -> LoadPlan:
    """Plan a load of these documents, each one input or several variants of one.

    estimates: of link and engine; see ``known_link`` for a link that is known. They stay as they are. goal: by default
    the soonest first token. compare: also work out alternatives and break-even points.
    Raises ArgumentError for too many documents, and where a chunk has neither text nor a segment to fetch.
    """
    if not 1 <= len(documents) <= MOST_DOCUMENTS:
        msg = f"a plan needs at least one document and takes up to {MOST_DOCUMENTS}, got {len(documents)}; plan fewer"
        raise ArgumentError(msg)
    variants = tuple(each if isinstance(each, tuple) else (each,) for each in documents)
    situation = Situation(
        variants,
        estimates,
        goal or ctl.Goal(),
        settings or ctl.ControllerSettings(),
        query_tokens,
        details or Details(),
    )
    return situation.load_plan(compare=compare)


def known_link(costs: ctl.CostModel | ctl.Estimates, bandwidth: float, ttfb_s: float) -> ctl.Estimates:
    """Estimates of a link whose bytes per second and round trip are known, with an engine's costs."""
    if not (0 < bandwidth < inf and 0 <= ttfb_s < inf):
        msg = f"a link needs a bandwidth above 0 and a round trip of 0 or more, got {bandwidth} B/s and {ttfb_s} s"
        raise ArgumentError(msg)
    made = costs.copy() if isinstance(costs, ctl.Estimates) else ctl.Estimates(costs, bandwidth, ttfb_s)
    made.bandwidth = ctl.BandwidthEstimator(bandwidth, prior_error=0.0)
    made.ttfb = ctl.TtfbEstimator(ttfb_s, 0.0)
    return made


@dataclass(frozen=True, eq=False)
class Forecast:
    """A policy's first plan. levels: by document and chunk, RECOMPUTE (-1) where it is recomputed. inputs: variants."""

    plan: Plan
    heads_s: float
    closing_s: float
    levels: dict[tuple[int, int], int]
    inputs: tuple[ctl.DocumentPlanInput, ...]

    @property
    def ttft_s(self) -> float:
        """Seconds from the asking to the first token."""
        return self.heads_s + self.plan.finish_s


@dataclass(frozen=True, eq=False)
class Played:
    """What came of a policy in the simulator, and the variants that were taken."""

    outcome: Outcome
    inputs: tuple[ctl.DocumentPlanInput, ...]


@dataclass(frozen=True, eq=False)
class Situation:
    """One prompt, link and engine, to be asked about."""

    documents: tuple[Variants, ...]
    estimates: ctl.Estimates
    goal: ctl.Goal
    settings: ctl.ControllerSettings
    query_tokens: int
    details: Details

    @property
    def bandwidth(self) -> float:
        """Expected bytes per second."""
        return self.estimates.bandwidth.value

    @property
    def heads_s(self) -> float:
        """Seconds until all heads are read."""
        return self._heads_s(self.bandwidth)

    @property
    def costs(self) -> ctl.CostModel:
        """What computing costs."""
        return self.estimates.costs(self.query_tokens)

    def load_plan(self, *, compare: bool) -> LoadPlan:
        """Everything about it."""
        forecast = self.forecast()
        played = self.play(Adaptive(), forecast)
        return LoadPlan(
            goal=self.goal, bandwidth=self.bandwidth, ttfb_s=self.estimates.ttfb.value,
            query_tokens=self.query_tokens, chunks=tuple(_chunks(forecast, played)),
            prediction=self._prediction("kvwire", forecast, played), expected_s=forecast.ttft_s,
            alternatives=tuple(self._alternatives()) if compare else (),
            break_evens=tuple(find_break_evens(self)) if compare else (),
            unchanged=find_unchanged(self, forecast) if compare else (None, None),
            level_names=self.details.level_names,
        )  # fmt: skip

    # One policy.

    def forecast(self, policy: Policy | None = None, bandwidth: float | None = None) -> Forecast:
        """What a policy plans when all heads are read and nothing has begun.

        bandwidth: of another link, whose estimate errs as much.
        """
        estimator = self.estimates.bandwidth
        if bandwidth is not None:
            estimator = ctl.BandwidthEstimator(bandwidth, prior_error=estimator.error)
        heads_s = self._heads_s(estimator.value)
        answered = self._inquiry.ask(policy or Adaptive(), estimator, heads_s)
        chunks, plan = answered.asked.chunks, answered.plan
        places = zip(chunks.document.tolist(), chunks.chunk.tolist(), strict=True)
        levels = dict(zip(places, plan.levels.tolist(), strict=True))
        closing_s = self.costs.closing_s(answered.asked.prompt_tokens)
        return Forecast(plan, heads_s, closing_s, levels, answered.inputs)

    @cached_property
    def _inquiry(self) -> Inquiry:
        return Inquiry(self.documents, self.estimates, self.goal, self.settings, self.query_tokens)

    def _heads_s(self, bandwidth: float) -> float:
        return self.estimates.ttfb.value + self.details.header_bytes / bandwidth

    def play(self, policy: Policy, forecast: Forecast) -> Played | None:
        """What comes of it on a link that keeps its bandwidth; None where that would take too long to find out."""
        if forecast.ttft_s > _MOST_PLAYED_S or len(self.documents) > _MOST_PLAYED_DOCUMENTS:
            return None
        log: list[ctl.LogEntry] = []
        controller = ctl.Controller(self.estimates.copy(), self.settings, policy, record=log.append)
        world = World(
            controller, constant(self.bandwidth), self.costs, rtt_s=self.estimates.ttfb.value,
            workers=self.settings.workers, decode_threads=self.settings.decode_threads,
        )  # fmt: skip
        (outcome,) = world.run([LoadArrival(0.0, self.documents, self.goal, self.query_tokens, self.heads_s)])
        fetches = [each for entry in log for each in entry.instructions if isinstance(each, ev.Fetch)]
        variants = {fetch.chunk.document: fetch.variant for fetch in fetches}
        inputs = tuple(each[variants.get(number, 0)] for number, each in enumerate(self.documents))
        return Played(outcome, inputs)

    def predict(self, name: str, policy: Policy) -> Prediction:
        """A policy's plan, played where it can be."""
        forecast = self.forecast(policy)
        return self._prediction(name, forecast, self.play(policy, forecast))

    def _prediction(self, name: str, forecast: Forecast, played: Played | None) -> Prediction:
        chunks = _chunks(forecast, played)
        tokens = sum(chunk.tokens for chunk in chunks)
        levels = [0] * (1 + max((chunk.level for chunk in chunks if chunk.level is not None), default=-1))
        for chunk in chunks:
            if chunk.level is not None:
                levels[chunk.level] += chunk.tokens
        due = inf if self.goal.deadline_s is None else self.goal.deadline_s
        ttft_s = played.outcome.ttft_s if played else forecast.ttft_s
        lanes = _played_lanes(played.outcome) if played else self._planned_lanes(chunks)
        return Prediction(
            name=name, ttft_s=ttft_s, heads_s=self.heads_s, link_s=lanes[0], decode_s=lanes[1], prefill_s=lanes[2],
            closing_s=forecast.closing_s, bytes=played.outcome.received if played else forecast.plan.bytes,
            error=sum(chunk.tokens * chunk.error for chunk in chunks) / tokens, levels=tuple(levels),
            kl=self._kl(chunks, played.inputs if played else forecast.inputs),
            recomputed=sum(chunk.tokens for chunk in chunks if chunk.level is None), in_time=ttft_s <= due,
            played=played is not None,
        )  # fmt: skip

    def _planned_lanes(self, chunks: Sequence[PlannedChunk]) -> tuple[float, float, float]:
        """Seconds of link, decoding and recomputing by sizes alone."""
        decode = self.costs.decode.shared(self.settings.decode_batch, self.settings.decode_threads)
        prefill = self.costs.prefill
        fetched = [chunk for chunk in chunks if chunk.level is not None]
        computed = sum(prefill.marginal(c.tokens, c.tokens * c.chunk) for c in chunks if c.level is None)
        link_s = sum(chunk.bytes for chunk in fetched) / self.bandwidth
        return link_s, sum(decode.seconds(chunk.tokens, chunk.bytes) for chunk in fetched), computed

    def _kl(self, chunks: Sequence[PlannedChunk], inputs: Sequence[ctl.DocumentPlanInput]) -> float | None:
        """Mean over tokens of what blobs predict; like errors, a recomputed chunk counts with its finest level's."""
        known, total = self.details.level_kl, 0.0
        for chunk in chunks:
            sizes = inputs[chunk.document].fetch_bytes
            if not sizes or not sizes[chunk.chunk]:
                continue
            level = len(sizes[chunk.chunk]) - 1 if chunk.level is None else chunk.level
            if chunk.document >= len(known) or level >= len(known[chunk.document]):
                return None
            total += chunk.tokens * known[chunk.document][level]
        return total / sum(chunk.tokens for chunk in chunks)

    # Others.

    @property
    def finest(self) -> int:
        """The finest level of any document."""
        return max(variant.finest for variants in self.documents for variant in variants)

    def _alternatives(self) -> list[Prediction]:
        names = self.details.level_names
        found = [self.predict("text only", TextOnly())]
        for level in range(self.finest + 1):
            name = f"level {level}" + (f" ({names[level]})" if level < len(names) else "")
            found.append(self.predict(name, Fixed(level)))
        if self.details.raw_token_bytes:
            found.append(self._raw().predict("raw cache", Raw()))
        found.append(self.predict("CacheGen's rule", CacheGen()))
        if self.goal.deadline_s is not None:
            objectives: tuple[ctl.Objective, ...] = ("earliest", "quality", "cheapest")
            for objective in objectives:
                if objective != self.goal.objective:
                    other = replace(self, goal=replace(self.goal, objective=objective))
                    found.append(other.predict(f"objective {objective}", Adaptive()))
        return found

    def _raw(self) -> Situation:
        """The same documents as uncompressed caches, which count with the same error as recomputed ones."""
        details, documents = self.details, [variants[0] for variants in self.documents]
        sizes = [tuple((tokens * details.raw_token_bytes,) for tokens in each.tokens) for each in documents]
        errors = [tuple((each.error(chunk, None),) for chunk in range(len(each.tokens))) for each in documents]
        raw = tuple(
            (ctl.DocumentPlanInput(each.tokens, size, each.has_text, error),)
            for each, size, error in zip(documents, sizes, errors, strict=True)
        )
        costs = replace(self.estimates.costs(), decode=details.raw_decode)
        estimates = known_link(costs, self.bandwidth, self.estimates.ttfb.value)
        goal = replace(self.goal, floor=0, ceiling=None)
        only = Details(level_kl=tuple(each[-1:] for each in details.level_kl))
        return replace(self, documents=raw, estimates=estimates, goal=goal, details=only)


def _chunks(forecast: Forecast, played: Played | None) -> list[PlannedChunk]:
    """Every chunk; where nothing was played, as first planned."""
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


def _played_lanes(outcome: Outcome) -> tuple[float, float, float]:
    """Seconds in which something was being fetched, decoded and recomputed; spans of one lane may overlap."""
    link, decode, prefill = (_busy_s(outcome, lane) for lane in ("link", "decode", "prefill"))
    return link, decode, prefill


def _busy_s(outcome: Outcome, lane: str) -> float:
    busy, until = 0.0, -inf
    for began, ended in sorted((span.began, span.ended) for span in outcome.spans if span.lane == lane):
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return busy
