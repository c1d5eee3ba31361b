"""Recorded links: deadlines that the coarsest level could meet with margin are met, and finer levels are delivered."""

from __future__ import annotations

import statistics

import pytest

from .fake_executor import MB, SLOW, FakeExecutor, document, new_session

RESCALE = 20  # Mbit/s of a phone or a home, brought to those of a data centre's edge


def recorded(path):
    rows = [line.split() for line in path.read_text().splitlines() if line.strip()]
    return [(float(second) / 2, float(mbit) * RESCALE / 8 * MB) for second, mbit in rows]


def run(documents, trace, prior, deadline_s=None):
    executor = FakeExecutor(new_session(documents, prior=prior, costs=SLOW), documents, trace, SLOW, step_s=0.004)
    executor.run(deadline_s)
    return executor


def test_recorded_links(shared_dir):
    paths = sorted((shared_dir / "traces").glob("*/*.txt"))
    if not paths:
        pytest.skip("needs the recorded traces")
    documents = [document(20), document(20)]
    in_time, means = [], []
    for path in paths:
        trace = recorded(path)
        prior = statistics.median(rate for _, rate in trace)
        coarsest = run(documents, trace, prior).first_token_s
        executor = run(documents, trace, prior, 2 * coarsest)
        in_time.append(executor.first_token_s <= 2 * coarsest)
        chosen = [decision.level for decision in executor.end.decisions if decision.action == "fetch"]
        means.append(statistics.mean(chosen))
    assert sum(in_time) >= 0.9 * len(paths)
    assert statistics.mean(means) > 0.5
