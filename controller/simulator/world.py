"""Drives a real controller through a modelled link and modelled compute, from event to event.

The link is a fluid: the first packets of answers come one after another, in the order of the requests, and share its
rate equally with answers that are past theirs. Lanes take what the true costs say, times noise. Everything that the
controller learns, it learns through its events, as in a real load. Steering takes its time, too: events wait for each
other, and instructions for the decision. What no real driver could do, such as decoding bytes that are not here, is
refused.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from itertools import count
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

from .. import events as ev
from ..costs import busiest
from .flows import DONE_BYTES, Flow, served
from .loads import Lane, Outcome, Run, Span, Trouble
from .steering import FREE, Inbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.types.rates import RateTrace

    from ..core import Controller
    from ..costs import CostModel
    from .loads import LoadArrival
    from .steering import Steering

_REPORT_S = 0.005
_SELDOM_S = 0.1  # well within what counts as a stall
_REPORTS = 0.01  # of a load's age, so that long loads do not drown in reports
_GRAIN_S = 1e-12
_STOP_SHARE = 1 / 16  # of a pass: engines stop between layers, and a GPU has been given two of some 32 already


LaneWork: TypeAlias = ev.Decode | ev.Recompute | ev.RecomputeTogether | ev.ComputePrefix | ev.Look | ev.Repair


@dataclass(eq=False)
class _Job:
    instruction: LaneWork
    began: float
    ends: float
    stopped: bool = False


class World:
    """One link and one engine, with a controller that steers the loads which come in."""

    def __init__(  # noqa: PLR0913 - a world has as many sides
        self,
        controller: Controller,
        rate: RateTrace,
        costs: CostModel,
        *,
        rtt_s: float = 0.0,
        trouble: Trouble | None = None,
        lane_s: float = 0.0,
        steering: Steering | None = None,
        workers: int = 2,
        decode_threads: int = 1,
        seed: int = 0,
        limit_s: float = 3600.0,
    ) -> None:
        """Start at instant 0.

        Args:
            controller: That steers the loads.
            rate: What the link truly carries from instant 0 on.
            costs: What computing truly costs.
            rtt_s: Seconds of a round trip.
            trouble: What goes wrong, by chance.
            lane_s: Seconds for which a lane stands idle around each job, because its driver has to hear of the end and
                to begin the next one; no job's own seconds hold them.
            steering: What the driver's thread takes for events; None: nothing.
            workers: 2: a lane each for forward passes and for decoding, closings take turns with the former; 1: one
                thing at a time.
            decode_threads: See ``ControllerSettings``.
            seed: Of troubles, which depend on chunk and level alone, so that they are the same under every policy.
            limit_s: Simulated seconds after which something must be wrong.
        """
        self._controller, self._rate, self._costs, self._rtt_s = controller, rate, costs, rtt_s
        self._trouble = trouble or Trouble()
        self._seed, self._workers, self._decode_threads = seed, workers, decode_threads
        self._noise = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(0,)))
        self._lane_s, self._limit_s = lane_s, limit_s
        self._now = 0.0
        self._queue: list[tuple[float, int, object]] = []
        self._ids = count()
        self._runs: dict[int, Run] = {}
        self._flows: dict[ChunkId, Flow] = {}
        self._moved = 0.0  # bytes since the last report
        self._reported_at = 0.0
        self._jobs: dict[Lane, _Job] = {}
        self._closing: tuple[Lane, ...] = ("prefill",) if workers > 1 else ("prefill", "decode")
        self._closed_at = 0.0  # when all closings so far are over
        self._steering, self._inbox = steering or FREE, Inbox()

    def run(self, arrivals: Sequence[LoadArrival]) -> list[Outcome]:
        """Let loads come in and play everything to its end; outcomes in the order of ``arrivals``."""
        for number, arrival in enumerate(arrivals):
            chunks = sum(len(variants[0].tokens) for variants in arrival.documents)
            self._runs[number] = Run(arrival, number, chunks)
            self._at(arrival.at, ("ask", number))
        while any(run.outcome is None for run in self._runs.values()):
            self._step()
        return [run.outcome for run in self._runs.values() if run.outcome]

    def _at(self, moment: float, what: object) -> None:
        heapq.heappush(self._queue, (moment, next(self._ids), what))

    def _step(self) -> None:
        """Go to the next instant at which anything happens, and let it happen."""
        planned = self._queue[0][0] if self._queue else inf
        heard_at = self._inbox.free_at if self._inbox else max(self._controller.wake_at, self._inbox.free_at)
        moment = max(
            self._now,
            min(planned, self._link_moment(), heard_at, min((job.ends for job in self._jobs.values()), default=inf)),
        )
        if moment > self._limit_s:
            open_loads = [run.number for run in self._runs.values() if run.outcome is None]
            raise ArgumentError(f"loads {open_loads} are not over after {self._limit_s} simulated seconds")
        self._flow(moment)
        self._now = moment
        while self._queue and self._queue[0][0] <= moment:
            self._happen(heapq.heappop(self._queue)[2])
        self._serve()
        self._begin_flows()
        ticks = self._ticks
        self._report(ticks=ticks)
        self._end_flows()
        self._end_jobs()
        if ticks or self._ticks:
            self._tell(ev.Tick())

    @property
    def _ticks(self) -> bool:
        """Whether a tick is due, and can be heard of."""
        return not self._inbox and max(self._controller.wake_at, self._inbox.free_at) <= self._now

    def _happen(self, what: object) -> None:
        match what:
            case ("ask", int(number)):
                arrival = self._runs[number].arrival
                count, links = len(arrival.documents), arrival.links
                computed, looks = arrival.query_tokens + sum(links), bool(arrival.attention)
                self._tell(ev.LoadRequested(number, count, computed, arrival.goal, arrival.repair, looks, links))
                self._at(self._now + arrival.leaves_s, ("leave", number))
                index_s = self._rtt_s if arrival.index_s is None else arrival.index_s
                for document in range(len(arrival.documents)):
                    self._at(self._now + index_s, ("index", number, document))
            case ("index", int(number), int(document)):
                self._tell(ev.IndexKnown(number, document, self._runs[number].arrival.documents[document]))
            case ("closed", ev.PromptAssembled() as assembled):
                self._tell(assembled)
            case ("leave", int(number)) if self._runs[number].outcome is None:
                self._tell(ev.LoadAbandoned(number))
                self._finish(self._runs[number], ev.Finish(number, (), "nobody waits for it any more"))
            case ("obey", instruction):
                self._obey(cast("ev.Instruction", instruction))

    def _tell(self, event: ev.Event, flow: Flow | None = None) -> None:
        """Let the driver hear of an event, and of the end of an answer where it is one."""
        self._inbox.put(event, self._now, flow)
        self._serve()

    def _serve(self) -> None:
        """Have the controller handle what the driver can hear of by now; instructions come when it has decided."""
        while taken := self._inbox.take(self._now, self._steering.header_s):
            event, flow = taken
            if isinstance(event, ev.ChunkArrived) and flow:
                run = self._runs[event.chunk.load]
                run.here[event.chunk] = event.level
                run.corrupt.update([event.chunk] if flow.corrupt else ())
            instructions = self._controller.handle(event, self._now)
            delays = self._steering.delays(event, instructions)
            self._inbox.free_at = self._now + delays[-1]
            for instruction, delay_s in zip(instructions, delays[1:], strict=True):
                if delay_s:
                    self._at(self._now + delay_s, ("obey", instruction))
                else:
                    self._obey(instruction)

    def _obey(self, instruction: ev.Instruction) -> None:  # noqa: C901, PLR0912 - a case for each instruction
        match instruction:
            case ev.Fetch():
                self._open(instruction)
            case ev.Decode(chunks, levels):
                run = self._runs[chunks[0].load]
                for chunk, level in zip(chunks, levels, strict=True):
                    _require(run.here.get(chunk, -1) >= level, f"level {level} of {chunk} to decode is not all here")
                _require(
                    all(chunk.document >= run.repaired for chunk in chunks),
                    f"{chunks[0]} is to be decoded: it is repaired",
                )
                run.valid.difference_update(chunks)
                work = [run.size(chunk, level) for chunk, level in zip(chunks, levels, strict=True)]
                seconds = self._costs.decode.seconds(*busiest(work, self._decode_threads))
                self._start("decode", instruction, seconds)
            case ev.Recompute():
                self._start("prefill", instruction, self._costs.prefill.seconds(*self._work(instruction)))
            case ev.Interrupt(first):
                self._interrupt(first)
            case ev.RecomputeTogether(passes):
                loads = {each.first.load for each in passes}
                _require(len(loads) == len(passes) > 1, f"{passes} are to be joined: they are not of several loads")
                _require(self._costs.joined is not None, f"{passes} are to be joined: this engine cannot")
                self._start("prefill", instruction, self._costs.joined_s([self._work(each) for each in passes]))
            case ev.ComputePrefix(load, document, variant):
                run = self._runs[load]
                run.variants[document] = variant
                chosen = run.given(document)
                seconds = chosen.prefix_share * self._costs.prefill.seconds(sum(chosen.tokens))
                self._start("prefill", instruction, seconds)
            case ev.Look(load):
                run = self._runs[load]
                _require(len(run.valid) == run.chunks, f"load {load} is to be looked at: it is not complete")
                query = replace(self._costs, query_tokens=run.arrival.query_tokens)
                self._start("prefill", instruction, query.look_s(run.prompt_tokens))
            case ev.Repair(load):
                run = self._runs[load]
                _require(run.are_valid(instruction.documents), f"load {load} is to be repaired: it is not so far")
                self._start("prefill", instruction, run.begin_repair(self._costs, instruction))
            case ev.Cancel(chunk):
                flow = self._flows.pop(chunk, None)
                if flow:
                    self._span(flow, "cancelled")
                self._inbox.drop(chunk)
            case ev.Release(chunk):
                self._runs[chunk.load].here.pop(chunk, None)
            case ev.Finish(load):
                self._finish(self._runs[load], instruction)
            case ev.Fail(load, reason):
                self._finish(self._runs[load], ev.Finish(load, (), reason))
            case ev.Refuse(load, late_s):
                self._runs[load].refused = True
                reason = f"refused: it would be late by {late_s:.3f} s"
                self._finish(self._runs[load], ev.Finish(load, (), reason))

    def _work(self, asked: ev.Recompute) -> tuple[int, int]:
        """New tokens of a pass, and tokens before them, all of which are in the prompt."""
        first, run = asked.first, self._runs[asked.first.load]
        seen = run.seen(first, behind=asked.behind)
        _require(run.valid.issuperset(seen), f"{first} is to be recomputed: something before it is not in the prompt")
        new = sum(run.given(first.document).tokens[first.chunk : asked.last.chunk + 1])
        return new, sum(run.given(each.document).tokens[each.chunk] for each in seen)

    # The link.

    def _open(self, fetch: ev.Fetch) -> None:
        chunk, trouble = fetch.chunk, self._trouble
        lacking = self._runs[chunk.load].here.get(chunk, -1) + 1
        _require(chunk not in self._flows, f"{chunk} is to be fetched: it is being fetched already")
        _require(fetch.first == lacking, f"{chunk} is to be fetched from {fetch.first} on: {lacking} comes next")
        self._runs[chunk.load].variants[chunk.document] = fetch.variant
        key = (1, chunk.load, chunk.document, chunk.chunk, fetch.first)
        chance = np.random.default_rng(np.random.SeedSequence(self._seed, spawn_key=key)).random(4)
        stall_s = trouble.stall_s if chance[1] < trouble.stall else 0.0
        fails_at = float(fetch.bytes * chance[3]) if chance[0] < trouble.fail else -1.0
        begins = self._now + self._rtt_s + stall_s
        corrupt = bool(chance[2] < trouble.corrupt)
        self._flows[chunk] = Flow(fetch, self._now, begins, float(fetch.bytes), fails_at, corrupt)

    def _begun(self) -> list[Flow]:
        return [flow for flow in self._flows.values() if flow.begun]

    def _link_moment(self) -> float:
        """When the next request begins, ends or is given up, or when a report is due."""
        moment = min(
            (min(flow.begins, flow.fetch.until) for flow in self._flows.values() if not flow.begun), default=inf
        )
        carried = served(self._flows.values())
        if carried:
            least = min(flow.stretch for flow in carried)
            ends = self._rate.time_to(max(0.0, least) * len(carried), self._now)
            given_up = min(flow.fetch.until for flow in self._begun())
            pause_s = self._pause_s()
            report = self._reported_at + pause_s
            moment = min(moment, ends + _GRAIN_S, given_up, report if report > self._now else self._now + pause_s)
        return moment

    def _flow(self, moment: float) -> None:
        """Move bytes until an instant."""
        carried = served(self._flows.values())
        if not carried:
            return
        each = self._rate.bytes_between(self._now, moment) / len(carried)
        for flow in carried:
            moved = min(each, flow.left)
            flow.left -= moved
            self._moved += moved
            self._runs[flow.fetch.chunk.load].received += moved

    def _begin_flows(self) -> None:
        for flow in [flow for flow in self._flows.values() if not flow.begun and flow.begins <= self._now]:
            if not self._begun():
                self._reported_at, self._moved = self._now, 0.0
            flow.begun = True
        for flow in served(self._flows.values()):
            if not flow.is_heard:
                flow.is_heard = True
                self._tell(ev.FirstByte(self._now - flow.asked))

    def _report(self, *, ticks: bool) -> None:
        """Tell of bytes that came, now and then, when an answer is here, and before a tick."""
        ended = any(flow.left <= DONE_BYTES for flow in self._begun())
        due = self._now - self._reported_at >= self._pause_s() - _GRAIN_S
        if self._moved >= 1 and self._now > self._reported_at and (ended or due or ticks):
            whole = int(self._moved)
            self._moved -= whole
            started, self._reported_at = self._reported_at, self._now
            self._tell(ev.TransferProgress(whole, started, self._now))

    def _pause_s(self) -> float:
        """Seconds between reports: short for loads that are young."""
        asked = (run.arrival.at for run in self._runs.values() if run.outcome is None)
        since = max((at for at in asked if at <= self._now), default=0.0)
        return min(max(_REPORT_S, _REPORTS * (self._reported_at - since)), _SELDOM_S)

    def _end_flows(self) -> None:
        for chunk, flow in list(self._flows.items()):
            if self._flows.get(chunk) is not flow:
                continue  # cancelled by what another's end brought about
            late = self._now >= flow.fetch.until
            if flow.begun and flow.left <= DONE_BYTES and not late:
                self._end_flow(flow, "fetch")
                self._tell(ev.ChunkArrived(chunk, flow.fetch.level), flow)
            elif late or (flow.begun and flow.left <= flow.fails_at + DONE_BYTES):
                self._end_flow(flow, "failed")
                self._tell(ev.ChunkFailed(chunk, "not in time" if late else "connection reset"), flow)

    def _end_flow(self, flow: Flow, what: Literal["fetch", "failed"]) -> None:
        del self._flows[flow.fetch.chunk]
        self._span(flow, what)

    def _span(self, flow: Flow, what: str) -> None:
        chunk, level = flow.fetch.chunk, flow.fetch.level
        span = Span("link", flow.asked, self._now, chunk.document, chunk.chunk, chunk.chunk, what, level)
        self._runs[chunk.load].spans.append(span)

    # The lanes.

    def _start(self, lane: Lane, instruction: LaneWork, seconds: float) -> None:
        busy = self._jobs if self._workers == 1 else {lane} & set(self._jobs)
        _require(not busy, f"{instruction} is to begin: its lane is busy")
        seconds *= float(np.exp(self._trouble.noise * self._noise.standard_normal()))
        began = max(self._now, self._closed_at) if lane in self._closing else self._now
        self._jobs[lane] = _Job(instruction, began, began + seconds + self._lane_s)

    def _interrupt(self, first: ChunkId) -> None:
        """Have the pass that began with a chunk end early, unless it is over."""
        job = self._jobs.get("prefill")
        if job is None or not isinstance(job.instruction, ev.Recompute) or job.instruction.first != first:
            return
        ends = self._now + _STOP_SHARE * (job.ends - job.began)
        if ends < job.ends:
            job.ends, job.stopped = max(ends, job.began), True

    def _end_jobs(self) -> None:
        for lane, job in list(self._jobs.items()):
            if job.ends > self._now:
                continue
            del self._jobs[lane]
            self._end_job(lane, job)

    def _end_job(self, lane: Lane, job: _Job) -> None:
        seconds = max(0.0, job.ends - job.began - self._lane_s)
        match job.instruction:
            case ev.Decode(chunks, levels):
                for chunk, level in zip(chunks, levels, strict=True):
                    self._note(lane, job, chunk, chunk.chunk, "decode", level)
                run = self._runs[chunks[0].load]
                bad = tuple(chunk for chunk in chunks if chunk in run.corrupt)
                run.corrupt.difference_update(bad)
                run.valid.update(set(chunks).difference(bad))
                self._tell(ev.DecodeFailed(chunks, bad, "checksum") if bad else ev.DecodeDone(chunks, seconds))
            case ev.Recompute() as asked if job.stopped:
                self._note(lane, job, asked.first, asked.last.chunk, "interrupted")
                done = range(asked.first.chunk, asked.last.chunk + 1)
                chunks = tuple(replace(asked.first, chunk=chunk) for chunk in done)
                self._tell(ev.RecomputeInterrupted(chunks, seconds))
            case ev.Recompute() as asked:
                self._tell(ev.RecomputeDone(self._recomputed(lane, job, asked), seconds))
            case ev.RecomputeTogether(passes):
                for asked in passes:
                    self._recomputed(lane, job, asked)
                self._tell(ev.RecomputedTogether(passes, seconds))
            case ev.Look(load):
                run = self._runs[load]
                run.looked = bool(run.arrival.attention)
                self._note(lane, job, ChunkId(0, 0, load), 0, "look")
                self._tell(ev.Looked(load, run.arrival.attention, seconds))
            case ev.Repair(load, documents):
                self._note(lane, job, ChunkId(documents - 1, 0, load), 0, "repair")
                rows, left = self._runs[load].end_repair()
                self._tell(ev.RepairDone(load, documents, rows, left, seconds))
            case ev.ComputePrefix(load, document):
                self._note(lane, job, ChunkId(document, 0, load), 0, "head start")
                self._tell(ev.PrefixComputed(load, document, seconds))

    def _recomputed(self, lane: Lane, job: _Job, asked: ev.Recompute) -> tuple[ChunkId, ...]:
        first, last = asked.first, asked.last.chunk
        self._note(lane, job, first, last, "recompute")
        done = tuple(replace(first, chunk=chunk) for chunk in range(first.chunk, last + 1))
        self._runs[first.load].valid.update(done)
        return done

    def _note(self, lane: Lane, job: _Job, first: ChunkId, last: int, what: str, level: int | None = None) -> None:
        spans = self._runs[first.load].spans
        spans.append(Span(lane, job.began, job.ends, first.document, first.chunk, last, what, level))

    # The end.

    def _finish(self, run: Run, last: ev.Finish) -> None:
        """Close a load, or end it without decisions."""
        if run.outcome:
            return  # whoever asked has left while it was decided
        arrival, reason = run.arrival, last.reason
        prompt_tokens, costs = run.prompt_tokens, run.closing_costs(self._costs, last)
        closing_s = costs.closing_s(prompt_tokens)
        ready_s, deadline_s = self._now - arrival.at, arrival.goal.deadline_s
        ttft_s = ready_s + closing_s
        if last.decisions:
            busy = (job.ends - self._lane_s for lane, job in self._jobs.items() if lane in self._closing)
            self._closed_at = max(self._now, self._closed_at, *busy) + closing_s
            repair_s = costs.repair_s(prompt_tokens)
            linking_s = closing_s - repair_s - self._costs.prefill.seconds(costs.query_tokens, prompt_tokens)
            self._at(self._closed_at, ("closed", ev.PromptAssembled(run.number, prompt_tokens, linking_s, repair_s)))
            ttft_s = self._closed_at - arrival.at
            reason = arrival.goal.verdict(ttft_s)
        run.outcome = Outcome.of(
            run.inputs, last.decisions, reason=reason, ready_s=ready_s, ttft_s=ttft_s,
            deadline_s=deadline_s, received=round(run.received), asked_at=arrival.at,
            spans=tuple(run.spans), refused=run.refused, repair=last.repair,
            link_error=run.link_error(last), attention=arrival.attention,
        )  # fmt: skip


def _require(holds: bool, trouble: str) -> None:  # noqa: FBT001 - a condition
    """Raises ArgumentError with what no driver could do, unless a condition holds."""
    if not holds:
        raise ArgumentError(f"{trouble}; the controller must not ask for that")
