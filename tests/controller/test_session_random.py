"""Any order of outcomes leads to one end; nothing is asked for twice and nothing is left open."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.controller import (
    Cancel,
    ChunkArrived,
    ChunkFailed,
    Decode,
    DecodeDone,
    DecodeFailed,
    DocumentPlanInput,
    Fail,
    Fetch,
    Finish,
    FirstByte,
    Recompute,
    RecomputeDone,
    RecomputeFailed,
    Started,
    Tick,
    TransferProgress,
)
from kvwire.types import ChunkId

from .fake_executor import new_session


@st.composite
def document_lists(draw):
    documents = []
    for _ in range(draw(st.integers(1, 3))):
        count, levels = draw(st.integers(1, 5)), draw(st.integers(1, 3))
        steps = [draw(st.lists(st.integers(0, 400_000), min_size=levels, max_size=levels)) for _ in range(count)]
        sizes = tuple(tuple(sum(row[: k + 1]) for k in range(draw(st.integers(0, levels)))) for row in steps)
        text = draw(st.booleans()) or not all(sizes)
        tokens = tuple(draw(st.integers(1, 300)) for _ in range(count))
        documents.append(DocumentPlanInput(tokens, sizes if draw(st.booleans()) or not text else (), text))
    return documents


class RandomWorld:
    """Reports outcomes of what is open in an order that hypothesis draws."""

    def __init__(self, session, documents, draw):
        self.session, self.draw = session, draw
        self.chunks = [ChunkId(d, c) for d, document in enumerate(documents) for c in range(len(document.tokens))]
        self.fetches, self.asked, self.cancelled, self.jobs, self.ends = {}, set(), [], [], []
        self.ready, self.now = set(), 0.0

    def tell(self, event):
        self.now += self.draw(st.sampled_from([0.0, 0.01, 0.05, 1.0]))
        for made in self.session.handle(event, self.now):
            assert self.ends == []
            self.obey(made)

    def obey(self, made):
        match made:
            case Fetch(chunk, level):
                assert chunk not in self.asked
                self.asked.add(chunk)
                self.fetches[chunk] = level
                assert len(self.fetches) <= 2
            case Cancel(chunk):
                self.cancelled.append((chunk, self.fetches.pop(chunk)))
            case Decode() | Recompute():
                assert self.jobs == []
                self.jobs.append(made)
                if isinstance(made, Recompute):
                    before = {ChunkId(made.first.document, number) for number in range(made.first.chunk)}
                    assert before <= self.ready, "recomputed without its context"
            case Finish() | Fail():
                self.ends.append(made)

    def step(self):
        events = [("job", job) for job in self.jobs] + [("fetch", item) for item in self.fetches.items()]
        events += [("late", item) for item in self.cancelled]
        kind, what = self.draw(st.sampled_from([*events, ("tick", None)]))
        fine = self.draw(st.integers(0, 5)) > 0
        if kind == "tick":
            self.tell(Tick())
        elif kind == "job":
            self.jobs.clear()
            self.tell(self.outcome(what, fine))
        else:
            self.fetches.pop(what[0], None)
            self.cancelled = [item for item in self.cancelled if item != what]
            if self.draw(st.booleans()):
                self.tell(FirstByte(0.01))
                self.tell(TransferProgress(self.draw(st.integers(0, 10**6)), self.now, self.now + 0.01, what[0]))
            self.tell(ChunkArrived(*what) if fine else ChunkFailed(what[0], "torn"))

    def outcome(self, job, fine):
        if isinstance(job, Decode):
            self.ready |= {job.chunk} if fine else set()
            return DecodeDone(job.chunk, 0.01) if fine else DecodeFailed(job.chunk, "corrupt")
        numbers = range(job.first.chunk, job.last.chunk + 1)
        chunks = tuple(ChunkId(job.first.document, number) for number in numbers)
        if fine:
            self.ready.update(chunks)
            return RecomputeDone(chunks, 0.05)
        return RecomputeFailed(self.draw(st.sampled_from(chunks)), "out of memory")


@settings(max_examples=300)
@given(document_lists(), st.sampled_from([0.0, 1e5, 1e7]), st.none() | st.floats(0, 5), st.data())
def test_any_order_of_outcomes_ends_once(documents, prior, deadline, data):
    session = new_session(documents, prior=prior, max_in_flight=2, merge_chunks=2, quality_floor=1)
    world = RandomWorld(session, documents, data.draw)
    world.tell(Started(deadline))
    steps = 0
    while not world.ends:
        assert world.jobs or world.fetches, "nothing is open and there is no end: deadlock"
        world.step()
        steps += 1
        assert steps < 1000
    assert len(world.ends) == 1
    assert session.is_over
    if isinstance(world.ends[0], Finish):
        assert [decision.chunk for decision in world.ends[0].decisions] == world.chunks
        assert world.jobs == []
    assert world.fetches == {}
    for item in world.cancelled:
        assert session.handle(ChunkArrived(*item), world.now) == []
