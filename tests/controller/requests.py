"""Plan requests of every kind, for property tests."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import strategies as st

from kvwire.controller import CostModel, DecodeCost, Goal, PrefillCost
from kvwire.controller.snapshot import Columns, CommittedWork, PlanRequest, UpgradeCandidates

LEVELS = 4


def columns(documents):
    """Columns of documents, each a list of ``(tokens, top, can_text)`` and a head start in seconds."""
    rows = []
    for number, (chunks, prefix_s) in enumerate(documents):
        context = 0
        for index, (tokens, top, can_text, number_of) in enumerate(chunks):
            sizes = [tokens * 10 * 3 ** min(level, max(top, 0)) for level in range(LEVELS)]
            errors = [0.1 ** (1 + min(level, max(top, 0))) * (1 + number_of / 10) for level in range(LEVELS)]
            text = can_text or top < 0
            finest = max(row[1] for row in chunks)
            rows.append((number, index, tokens, context, sizes, errors, top, finest, text, prefix_s))
            context += tokens
    data = list(zip(*rows, strict=True))
    finest = np.array(data[7])
    return Columns(
        document=np.array(data[0]),
        chunk=np.array(data[1]),
        tokens=np.array(data[2]),
        context=np.array(data[3]),
        sizes=np.array(data[4]).T,
        errors=np.array(data[5]).T,
        top=np.array(data[6]),
        finest=finest,
        exact_error=np.where(finest >= 0, 0.1 ** (1.0 + finest), 0.0),
        can_text=np.array(data[8], dtype=bool),
        prefix_s=np.array(data[9], dtype=float),
    )


CHUNK = st.tuples(
    st.integers(1, 512),
    st.sampled_from([3, 3, 3, 2, 0, -1]),
    st.sampled_from([True, True, True, False]),
    st.integers(0, 9),
)
DOCUMENT = st.tuples(st.lists(CHUNK, min_size=1, max_size=6), st.sampled_from([0.0, 0.0, 0.05]))
SECONDS = st.floats(0, 0.5)


@st.composite
def refinables(draw):
    """Chunks under way at any level below their finest."""
    rows = draw(st.lists(st.tuples(st.integers(1, 512), st.integers(0, 2), st.booleans()), min_size=1, max_size=5))
    tokens = np.array([row[0] for row in rows])
    steps = np.arange(LEVELS)[:, None]
    return UpgradeCandidates(
        level=np.array([row[1] for row in rows]),
        top=np.full(len(rows), LEVELS - 1),
        sizes=tokens * 10 * 3**steps,
        errors=np.ones(len(rows)) * 0.1 ** (1.0 + steps),
        tokens=tokens,
        ready=np.array([row[2] for row in rows]),
    )


@st.composite
def plan_requests(draw):
    """Any request, small enough to be played through."""
    fetches = draw(st.lists(st.tuples(st.floats(0, 1e6), SECONDS), max_size=3))
    chunks = columns(draw(st.lists(DOCUMENT, min_size=1, max_size=4)))
    costs = CostModel(
        PrefillCost(draw(st.floats(0, 0.05)), draw(st.floats(1e-6, 1e-3)), draw(st.floats(0, 1e-6))),
        DecodeCost(draw(st.floats(0, 0.01)), draw(st.floats(0, 1e-4)), draw(st.floats(0, 1e-7))),
        1e-6,
        16,
    )
    bandwidth = draw(st.floats(1e3, 1e9))
    deadline = draw(st.one_of(st.none(), st.floats(0.01, 5)))
    objective = "earliest" if deadline is None else draw(st.sampled_from(["earliest", "quality", "cheapest"]))
    return PlanRequest(
        chunks=chunks,
        costs=costs,
        goal=Goal(objective=objective, deadline_s=deadline, floor=draw(st.integers(0, 2))),
        bandwidth=bandwidth,
        bandwidth_low=bandwidth * draw(st.floats(0.3, 1)),
        prompt_tokens=int(chunks.tokens.sum()),
        committed=CommittedWork(
            np.array([left for left, _ in fetches]), np.array([work for _, work in fetches]), draw(SECONDS),
            draw(SECONDS), draw(st.floats(0, 1e6)),
        ),
        left_s=deadline,
        refinable=draw(st.one_of(st.none(), refinables())),
        lead_s=draw(SECONDS),
        ttfb_s=draw(st.floats(0, 0.1)),
        workers=draw(st.sampled_from([1, 2])),
        pass_chunks=draw(st.sampled_from([inf, inf, 1.0, 2.0, 3.0])),
    )  # fmt: skip
