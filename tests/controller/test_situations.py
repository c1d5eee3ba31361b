"""The five situations of docs/controller.md: eight chunks, 26 ms each by text, 12.8 to 102.4 kB by link."""

from __future__ import annotations

import pytest

from kvwire.controller import Goal
from kvwire.controller import events as ev
from kvwire.types.rates import RateTrace

from .playing import MB, one, quality

TOKENS = 256


def played(goal, rate):
    """The outcome, chunks that were fetched at first and recomputed, in this order, and how many fetches refined."""
    outcome, load = one(goal, rate, workers=2)
    fetched = [fetch.chunk.chunk for _, fetch in load.instructions(ev.Fetch) if not fetch.first]
    passes = [each for _, each in load.instructions(ev.Recompute)]
    recomputed = [chunk for each in passes for chunk in range(each.first.chunk, each.last.chunk + 1)]
    return outcome, fetched, recomputed, len(load.refinements()), load


def test_a_slow_link_without_a_deadline_meets_compute_in_the_middle():
    outcome, fetched, recomputed, refined, _ = played(Goal(), 0.3 * MB)
    assert (recomputed, fetched) == ([0, 1, 2, 3], [7, 6, 5, 4])
    assert outcome.levels[0] == 4 * TOKENS
    assert not refined
    assert outcome.ttft_s == pytest.approx(0.20, abs=0.01)


def test_a_fast_link_brings_everything_at_the_finest_level():
    outcome, fetched, recomputed, _, _ = played(quality(0.5), 200 * MB)
    assert (recomputed, fetched) == ([], [7, 6, 5, 4, 3, 2, 1, 0])
    assert outcome.levels[3] == 8 * TOKENS
    assert outcome.ttft_s < 0.05


def test_a_deadline_is_filled_with_finer_levels():
    outcome, fetched, recomputed, refined, _ = played(quality(0.15), 2 * MB)
    assert (recomputed, fetched) == ([0, 1, 2], [7, 6, 5, 4, 3])
    assert refined == 5
    assert not outcome.levels[0]
    assert outcome.in_time


def test_a_link_that_dies_is_given_up_for_text():
    outcome, fetched, recomputed, _, load = played(Goal(), RateTrace((0.0, 0.02, 5.0), (3 * MB, 0.0, 3 * MB)))
    assert sorted(recomputed) == [*range(8)]
    assert len(load.instructions(ev.Cancel)) == len(fetched) == 4
    assert outcome.ttft_s < 0.02 + 0.25 + 8 * 0.031 + 0.05


def test_a_deadline_that_nothing_keeps_is_as_if_there_were_none():
    outcome, fetched, recomputed, refined, _ = played(quality(0.05), 0.3 * MB)
    assert (recomputed, fetched) == ([0, 1, 2, 3], [7, 6, 5, 4])
    assert not refined
    assert not outcome.in_time
    assert outcome.ttft_s == pytest.approx(0.20, abs=0.01)
