"""What all loads share: the link, the lanes, and the bytes that are held; every job and fetch starts here."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from . import events as ev
from .chunk_table import READY, RECOMPUTING, ChunkState
from .costs import DecodeCost, busiest
from .inflight import InflightFetch, Link
from .lanes import ComputeLanes, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .costs import CostModel
    from .document_state import DocumentState
    from .estimates import Estimates
    from .load import Load, Place
    from .settings import ControllerSettings
    from .snapshot import Policy


class Resources:
    """One link, two lanes and a bound on bytes.

    Attributes:
        now: Of the event that is taken in.
        held: Bytes asked for, arrived or kept.
        turns: Things begun so far.
        backlog_s: Seconds of decoding for what has arrived, and seconds beyond that where nothing else comes; None
            where that has to be counted.
        last_decode: What decoding a chunk alone costs beyond ``costs_among_many``, which brings it up to date.
    """

    def __init__(
        self, estimates: Estimates, settings: ControllerSettings, policy: Policy, loads: dict[int, Load]
    ) -> None:
        """Start idle."""
        self.estimates, self.settings, self.policy, self.loads = estimates, settings, policy, loads
        self.link = Link(estimates, settings.stall_s)
        self.lanes = ComputeLanes(settings.workers)
        self._alone: CostModel | None = None
        self._among_many = estimates.costs()
        self._shared_cost = self.last_decode = DecodeCost(0.0, 0.0)
        self._decode_cost: DecodeCost | None = None  # of which these are
        self.now = -inf
        self.held = 0
        self.turns = 0
        self.backlog_s: tuple[float, float] | None = None
        self.known_costs: dict[int, CostModel] = {}  # by tokens of the question, until an event is taken in

    def turn(self) -> int:
        """Count another thing begun; returns its number."""
        self.turns += 1
        return self.turns

    def hold(self, doc: DocumentState, chunk: int, size: int) -> None:
        """Note how many bytes are held for a chunk from now on."""
        self.held += doc.table.hold(doc.start + chunk, size)

    def release(self, doc: DocumentState, chunk: int, out: list[ev.Instruction]) -> None:
        """Forget a chunk's bytes."""
        table, at = doc.table, doc.start + chunk
        if table.held[at]:
            self.held += table.hold(at, 0)
            out.append(ev.Release(doc.id(chunk)))

    def keep_or_release(self, load: Load, doc: DocumentState, chunk: int, out: list[ev.Instruction]) -> None:
        """Forget a decoded chunk's bytes unless a refinement may build on them."""
        goal, table, at = load.goal, doc.table, doc.start + chunk
        if goal.objective == "quality" and table.layered[at]:
            finest = table.top[at] if goal.ceiling is None else min(table.top[at], goal.ceiling)
            if table.valid_level[at] < finest:
                return
        self.release(doc, chunk, out)

    def settle(self, doc: DocumentState, chunk: int) -> None:
        """A chunk that was to become better stays as it is."""
        doc.move(chunk, READY)
        table, at = doc.table, doc.start + chunk
        table.level[at] = table.top[at] = level = table.valid_level[at]
        self.hold(doc, chunk, doc.size(chunk, level))

    def make_room(self, load: Load, size: int, out: list[ev.Instruction]) -> bool:
        """Forget what is only kept for refinements, as far as that is needed."""
        if self.held + size <= self.settings.memory_bytes:
            return True
        others = [each for each in self.loads.values() if each is not load]
        for each in (*sorted(others, key=lambda other: -other.due), load):
            for doc, chunk in each.having(READY):
                if self.held + size <= self.settings.memory_bytes:
                    return True
                self.release(doc, chunk, out)
        return self.held + size <= self.settings.memory_bytes

    def costs_of(self, load: Load) -> CostModel:
        """What computing costs for a load, by what is known now."""
        tokens = load.query_tokens
        base = self.known_costs.get(tokens)
        if base is None:
            base = self.known_costs[tokens] = self.estimates.costs(tokens)
        return load.costs(base) if load.repair_share else base

    def costs_among_many(self, load: Load) -> CostModel:
        """``costs_of`` with what decoding costs for a chunk of many, which share batches and threads."""
        costs, shared = self.costs_of(load), self.shared_decode()
        if self._alone is not costs:
            self._alone, self._among_many = costs, replace(costs, decode=shared)
        return self._among_many

    def shared_decode(self) -> DecodeCost:
        """What decoding a chunk of many costs; brings ``last_decode`` up to date."""
        cost, settings = self.estimates.decode.cost, self.settings
        if self._decode_cost is not cost:
            self._decode_cost, self._shared_cost = cost, cost.shared(settings.decode_batch, settings.decode_threads)
            self.last_decode = cost.beyond(self._shared_cost)
        return self._shared_cost

    def ask(
        self, load: Load, place: Place, first: int, level: int, until: float, now: float, out: list[ev.Instruction]
    ) -> None:
        """Open a fetch of levels first..level of a chunk."""
        doc, chunk = place
        table, at, name = doc.table, doc.start + chunk, doc.id(chunk)
        whole, tokens = table.sizes[level][at], table.tokens[at]
        size = whole - table.sizes[first - 1][at] if first else whole
        table.level[at] = level
        self.held += table.hold(at, whole)
        work_s = self.shared_decode().seconds(tokens, whole)
        self.link.ask(InflightFetch(name, size, size, now, until, work_s, self.last_decode.seconds(tokens, whole)))
        load.began = self.turn()
        out.append(ev.Fetch(name, first, level, size, doc.variant, until))

    def give_up(self, load: Load, doc: DocumentState, run: list[int], now: float, out: list[ev.Instruction]) -> None:
        """Cancel the fetches of neighbouring chunks, and recompute these at once."""
        trouble = "the link is silent" if self.link.stalled else "the link became slow"
        for chunk in run:
            self.link.drop(doc.id(chunk), now)
            doc.lose(chunk, trouble, fetch=True)
            self.hold(doc, chunk, 0)
            load.fallbacks += 1
            out.append(ev.Cancel(doc.id(chunk), trouble))
        self.start_pass(load, doc, run, now, out)
        for chunk in run:
            doc.reasons[chunk] = "sooner than its fetch"

    def start_pass(self, load: Load, doc: DocumentState, run: list[int], now: float, out: list[ev.Instruction]) -> None:
        """Begin a forward pass over neighbouring chunks of a document."""
        job = self.pass_job(load, doc, run, now)
        self.lanes.start("prefill", job)
        out.append(ev.Recompute(job.chunks[0], job.chunks[-1], job.behind))

    def pass_job(self, load: Load, doc: DocumentState, run: list[int], now: float) -> Job:
        """Note that neighbouring chunks of a document are being recomputed."""
        for chunk in run:
            doc.reasons[chunk] = load.reason(doc.start + chunk)
            doc.move(chunk, RECOMPUTING)
            doc.table.level[doc.start + chunk] = -1
        tokens, context = doc.prefill_span(run[0], run[-1])
        behind = load.can_see_before(doc)
        context -= 0 if behind else doc.before
        seconds = self.costs_of(load).prefill.seconds(tokens, context)
        ids = tuple(doc.id(chunk) for chunk in run)
        load.compute_s = max(0.0, load.compute_s - seconds)
        load.began = self.turn()
        return Job(
            "recompute", load.number, doc.number, ids, now, seconds, tokens=tokens, context=context, behind=behind
        )

    def start_decode(
        self, load: Load, places: list[Place], then: ChunkState, now: float, out: list[ev.Instruction],
        to: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        """Begin to decode a batch, if there is any."""
        if not places:
            return
        table = load.table
        ats = [doc.start + chunk for doc, chunk in places]
        for at in ats:
            table.move(at, then)
        levels = tuple(to or (table.level[at] for at in ats))
        chunks = [(table.tokens[at], table.sizes[level][at]) for at, level in zip(ats, levels, strict=True)]
        tokens, size = busiest(chunks, self.settings.decode_threads)
        seconds = self.costs_of(load).decode.seconds(tokens, size)
        ids = tuple(doc.id(chunk) for doc, chunk in places)
        job = Job("decode", load.number, ids[0].document, ids, now, seconds, tokens=tokens, size=size, levels=levels)
        self.lanes.start("decode", job)
        load.began, self.backlog_s = self.turn(), None
        out.append(ev.Decode(ids, levels))

    def decode_backlog_s(self, costs: CostModel) -> tuple[float, float]:
        """Seconds of decoding for what has arrived, over all loads, and beyond that for batches that are not full.

        Worked out once until that changes.
        """
        if self.backlog_s is not None:
            return self.backlog_s
        seconds, beyond_s, cost, settings = 0.0, 0.0, costs.decode, self.settings
        for load in self.loads.values():
            count, tokens, size = load.table.arrived()
            seconds += cost.apart(count, tokens, size)
            last = count % settings.decode_batch
            if last:
                rounds = -(-last // settings.decode_threads)
                batch_s = self.costs_of(load).decode.seconds(tokens * rounds // count, size * rounds // count)
                beyond_s += max(0.0, batch_s - last * cost.seconds(tokens // count, size // count))
        self.backlog_s = seconds, beyond_s
        return self.backlog_s
