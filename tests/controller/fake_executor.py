"""Drives a real session with a modelled link and modelled compute under a fake clock, and checks its every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvwire.controller import (
    BandwidthEstimator,
    Cancel,
    ChunkArrived,
    ChunkFailed,
    CostModel,
    Decode,
    DecodeCost,
    DecodeDone,
    DecodeFailed,
    DocumentPlanInput,
    Event,
    Fail,
    Fetch,
    Finish,
    FirstByte,
    Instruction,
    LoadSession,
    PrefillCost,
    Recompute,
    RecomputeDone,
    SessionSettings,
    Started,
    Tick,
    TransferProgress,
    TtfbEstimator,
)
from kvwire.types import ChunkId

COSTS = CostModel(PrefillCost(0.005, 2e-4, 1e-9), DecodeCost(0.002, 1e-6, 1e-9), link_s_per_token=1e-6, query_tokens=16)
SLOW = CostModel(PrefillCost(0.02, 4e-3, 1e-9), COSTS.decode, COSTS.link_s_per_token, COSTS.query_tokens)  # 1 s a chunk
SIZES = (100_000, 200_000, 400_000)  # bytes of levels 0..k of a chunk of 256 tokens
MB = 1e6


def document(chunks: int = 8, *, text: bool = True, blob: bool = True, tokens: int = 256) -> DocumentPlanInput:
    """A document of equal chunks."""
    return DocumentPlanInput((tokens,) * chunks, (SIZES,) * chunks if blob else (), text)


def new_session(
    documents: list[DocumentPlanInput], *, prior: float = 10 * MB, costs: CostModel = COSTS, **settings: float
) -> LoadSession:
    """A session with estimators of its own."""
    chosen = SessionSettings(**{"quality_floor": 0, **settings})
    return LoadSession(documents, costs, chosen, bandwidth=BandwidthEstimator(prior), ttfb=TtfbEstimator(0.02))


@dataclass
class Flow:
    fetch: Fetch
    asked: float
    left: float
    begun: bool = False
    unreported: float = 0.0
    reported_at: float = 0.0


@dataclass
class Job:
    instruction: Decode | Recompute
    began: float
    ends: float


@dataclass
class FakeExecutor:
    """One load.

    trace: ``(from second, bytes per second)``, in order. costs: what compute really costs. bad_fetches and bad_decodes
    fail once their bytes are here.
    """

    session: LoadSession
    documents: list[DocumentPlanInput]
    trace: list[tuple[float, float]]
    costs: CostModel = COSTS
    rtt_s: float = 0.02
    bad_fetches: frozenset[ChunkId] = frozenset()
    bad_decodes: frozenset[ChunkId] = frozenset()
    max_in_flight: int = 4
    workers: int = 1
    step_s: float = 0.002
    now: float = 0.0
    flows: dict[ChunkId, Flow] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)
    ready: set[ChunkId] = field(default_factory=set)
    fetched: dict[ChunkId, int] = field(default_factory=dict)
    cancelled: list[ChunkId] = field(default_factory=list)
    end: Finish | Fail | None = None

    def run(self, deadline_s: float | None = None, limit_s: float = 120.0) -> Finish | Fail:
        """Run to the end; fails where none comes within ``limit_s`` seconds."""
        self.tell(Started(deadline_s))
        next_tick = 0.05
        while self.end is None:
            assert self.now < limit_s, "no end in sight"
            self.now += self.step_s
            self._move_link()
            self._move_compute()
            if self.now >= next_tick and self.end is None:
                self.tell(Tick())
                next_tick += 0.05
        return self.end

    @property
    def first_token_s(self) -> float:
        """When the first token comes, after the end."""
        return self.now + self.costs.closing_s(sum(sum(doc.tokens) for doc in self.documents))

    def tell(self, event: Event) -> None:
        for instruction in self.session.handle(event, self.now):
            assert self.end is None, f"{instruction} after the end"
            self._obey(instruction)

    def _obey(self, instruction: Instruction) -> None:
        match instruction:
            case Fetch(chunk, level, size):
                assert chunk not in self.fetched, "fetched twice"
                self.fetched[chunk] = level
                self.flows[chunk] = Flow(instruction, self.now, size)
                assert len(self.flows) <= self.max_in_flight
            case Decode(chunk, level):
                assert self.fetched[chunk] == level
                size = self.documents[chunk.document].fetch_bytes[chunk.chunk][level]
                self._start(instruction, self.costs.decode.seconds(self._tokens(chunk), size))
            case Recompute(first, last):
                before = {ChunkId(first.document, number) for number in range(first.chunk)}
                assert before <= self.ready, "recomputed without its context"
                tokens = self.documents[first.document].tokens
                whole = sum(tokens[first.chunk : last.chunk + 1])
                self._start(instruction, self.costs.prefill.seconds(whole, sum(tokens[: first.chunk])))
            case Cancel(chunk):
                del self.flows[chunk]
                self.cancelled.append(chunk)
            case Finish() | Fail():
                self.end = instruction

    def _tokens(self, chunk: ChunkId) -> int:
        return self.documents[chunk.document].tokens[chunk.chunk]

    def _start(self, instruction: Decode | Recompute, seconds: float) -> None:
        kinds = [type(job.instruction) for job in self.jobs]
        assert len(kinds) < self.workers
        assert type(instruction) not in kinds
        self.jobs.append(Job(instruction, self.now, self.now + seconds))

    def _rate(self) -> float:
        return next((rate for since, rate in reversed(self.trace) if since <= self.now), self.trace[0][1])

    def _move_link(self) -> None:
        began = self.now - self.step_s
        for flow in self.flows.values():
            if not flow.begun and self.now - flow.asked >= self.rtt_s and self._rate() > 0:
                flow.begun, flow.reported_at = True, began
                self.tell(FirstByte(began - flow.asked))
        sharing = [flow for flow in self.flows.values() if flow.begun]
        budget = self._rate() * self.step_s
        for number, flow in enumerate(sorted(sharing, key=lambda flow: flow.left)):
            moved = min(flow.left, budget / (len(sharing) - number))  # what a short flow leaves, the others get
            budget -= moved
            flow.left -= moved
            flow.unreported += moved
        for flow in sharing:
            if self.end is None and flow.fetch.chunk in self.flows:
                self._report(flow)

    def _report(self, flow: Flow) -> None:
        done = flow.left <= 1e-6
        if flow.unreported >= 1 and (done or self.now - flow.reported_at >= 0.02):
            size = round(flow.unreported)
            self.tell(TransferProgress(size, flow.reported_at, self.now, flow.fetch.chunk))
            flow.unreported, flow.reported_at = flow.unreported - size, self.now
        if done:
            chunk = flow.fetch.chunk
            del self.flows[chunk]
            bad = chunk in self.bad_fetches
            self.tell(ChunkFailed(chunk, "checksum") if bad else ChunkArrived(chunk, flow.fetch.level))

    def _move_compute(self) -> None:
        for job in [job for job in self.jobs if job.ends <= self.now]:
            self.jobs.remove(job)
            seconds = job.ends - job.began
            match job.instruction:
                case Decode(chunk) if chunk in self.bad_decodes:
                    self.tell(DecodeFailed(chunk, "corrupt"))
                case Decode(chunk):
                    self.ready.add(chunk)
                    self.tell(DecodeDone(chunk, seconds))
                case Recompute(first, last):
                    chunks = tuple(ChunkId(first.document, n) for n in range(first.chunk, last.chunk + 1))
                    self.ready.update(chunks)
                    self.tell(RecomputeDone(chunks, seconds))
