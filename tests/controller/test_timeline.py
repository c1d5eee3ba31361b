"""The vectorised timeline against playing every candidate through."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.controller.forecast import Timeline, unfetched_s
from kvwire.controller.snapshot import RECOMPUTE

from .naive_timeline import fetch_order, finish_naive, splits
from .requests import LEVELS, plan_requests


def raised_error(some, target):
    """Error of chunks under way once they are raised, summed over tokens."""
    if some is None:
        return 0.0
    to = [max(level, min(target, top)) for level, top in zip(some.level, some.top, strict=True)]
    return sum(some.tokens[at] * some.errors[level, at] for at, level in enumerate(to))


TARGETS = np.arange(LEVELS)


@given(plan_requests())
def test_every_candidate_ends_when_playing_it_through_ends(request):
    timeline = Timeline(request, TARGETS, request.bandwidth)
    for row, levels in enumerate(timeline.levels):
        usable = list(splits(request, levels))
        for split in usable:
            expected = finish_naive(request, row, levels, split, request.bandwidth)
            assert timeline.finish_s[row, split] == pytest.approx(expected, rel=1e-9, abs=1e-9)
        others = np.delete(timeline.finish_s[row], usable)
        assert np.isinf(others).all()


def passes(chunks, most):
    """Passes over all chunks, one after the other: of neighbours in one document, ``most`` of them at most."""
    out = []
    for at in range(chunks.count):
        neighbours = (
            out and chunks.document[at - 1] == chunks.document[at] and chunks.chunk[at - 1] + 1 == chunks.chunk[at]
        )
        if neighbours and len(out[-1]) < most:
            out[-1].append(at)
        else:
            out.append([at])
    return out


@given(plan_requests(), st.data())
def test_chunks_together_take_what_their_passes_take(request, data):
    kept = np.array(data.draw(st.lists(st.booleans(), min_size=request.chunks.count, max_size=request.chunks.count)))
    chunks = request.chunks
    parts = {
        name: getattr(chunks, name)[..., kept]
        for name in chunks.__dataclass_fields__
        if getattr(chunks, name) is not None
    }
    request = replace(request, chunks=replace(chunks, **parts))
    expected = [
        request.costs.prefill.seconds(int(request.chunks.tokens[run].sum()), int(request.chunks.context[run[0]]))
        for run in passes(request.chunks, request.pass_chunks)
    ]
    assert request.prefill_s.sum() == pytest.approx(sum(expected), rel=1e-9, abs=1e-12)


def without_forced(request):
    """The same request where all levels and the text of every chunk are there."""
    chunks = request.chunks
    finest, text = np.full(chunks.count, LEVELS - 1), np.ones(chunks.count, np.bool_)
    return replace(request, chunks=replace(chunks, top=finest, finest=finest, can_text=text))


@given(plan_requests(), st.booleans(), st.booleans())
def test_the_short_cut_gives_what_the_long_way_gives(request, insured, alike):
    request = without_forced(request) if alike else request
    coarse = np.ones(request.chunks.count, np.bool_) if insured else None
    quick = Timeline(request, TARGETS, request.bandwidth, coarse=coarse)
    slow = Timeline(request, TARGETS, request.bandwidth, coarse=coarse, plain=False)
    for name in ("levels", "sizes", "order", "counts", "least", "bytes"):
        np.testing.assert_array_equal(getattr(quick, name), getattr(slow, name))
    for row, split in np.ndindex(slow.bytes.shape):
        assert quick.fetched_bytes(row, split) == slow.bytes[row, split]
    np.testing.assert_allclose(quick.finish_s, slow.finish_s, rtol=1e-12)
    np.testing.assert_allclose(quick.error, slow.error, rtol=1e-12)


@given(plan_requests(), st.booleans())
def test_fetching_nothing_more_ends_as_in_the_timeline(request, alike):
    request = without_forced(request) if alike else request
    whole = Timeline(replace(request, refinable=None), np.array([request.goal.floor]), request.bandwidth)
    assert unfetched_s(request, request.bandwidth) == pytest.approx(float(whole.finish_s[0, 0]), rel=1e-9)


@given(plan_requests())
def test_totals_are_those_of_the_chunks_that_are_fetched(request):
    timeline = Timeline(request, TARGETS, request.bandwidth)
    chunks = request.chunks
    for row, levels in enumerate(timeline.levels):
        for split in splits(request, levels):
            tail = fetch_order(request, levels)[:split]
            assert list(timeline.order[row, :split]) == tail
            chosen = np.full(chunks.count, RECOMPUTE)
            chosen[tail] = levels[tail]
            assert timeline.bytes[row, split] == chunks.bytes_at(chosen).sum()
            error = (chunks.tokens * chunks.errors_at(chosen)).sum() + raised_error(request.refinable, row)
            assert timeline.error[row, split] == pytest.approx(error)
