"""States of chunks, and the one table of moves between them."""

from __future__ import annotations

from itertools import product

import pytest

from kvwire.controller import DocumentPlanInput
from kvwire.controller.chunk_table import MOVES, ChunkState
from kvwire.controller.document_state import DocumentState
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

S = ChunkState


def doc(*tops, text=True, **more):
    """A document with a chunk of 10 tokens and 100, 200, ... bytes for each finest level; -1: no segment."""
    rows = tuple(tuple(100 * (level + 1) for level in range(top + 1)) for top in tops)
    return DocumentState(0, 0, (DocumentPlanInput((10,) * len(tops), rows, text, **more),))


@pytest.mark.parametrize(("before", "after"), [*product(S, S)], ids=lambda state: state.name)
def test_the_table_is_the_whole_truth(before, after):
    made = doc(1)
    made.state[0] = before
    if after in MOVES[before]:
        made.move(0, after)
        assert made.state[0] == after
    else:
        with pytest.raises(ArgumentError, match=f"is {before.name.lower()}: it cannot become {after.name.lower()}"):
            made.move(0, after)
        assert made.state[0] == before


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(MOVES) == set(S)
    reached, fresh = set(), {S.PLANNED}
    while fresh:
        reached |= fresh
        fresh = {after for before in fresh for after in MOVES[before]} - reached
    assert reached == set(S)


def test_a_lost_fetch_leaves_the_text():
    made = doc(1, 1)
    made.move(0, S.FETCHING)
    made.lose(0, "missing", fetch=True)
    assert made.state.tolist() == [S.PLANNED, S.PLANNED]
    assert made.top.tolist() == [-1, 1]
    made.move(0, S.RECOMPUTING)
    made.lose(0, "memory", fetch=False)
    assert made.state[0] == S.FAILED
    assert made.troubles[0] == "missing; memory"


def test_a_lost_recomputation_leaves_the_segments():
    made = doc(1)
    made.move(0, S.RECOMPUTING)
    made.lose(0, "memory", fetch=False)
    assert (made.state[0], made.top[0], bool(made.can_text[0])) == (S.PLANNED, 1, False)


def test_a_chunk_without_any_way_fails_at_once():
    assert doc(1, -1, text=False).state.tolist() == [S.PLANNED, S.FAILED]


def test_a_blob_is_given_up_where_text_stands_in():
    made = doc(1, 1, 1)
    made.move(1, S.FETCHING)
    made.give_up_blob("the store is gone")
    assert made.top.tolist() == [-1, 1, -1]
    assert made.state.tolist() == [S.PLANNED, S.FETCHING, S.PLANNED]


def test_a_blob_is_not_given_up_where_nothing_stands_in_for_it():
    made = doc(1, 1, text=False)
    made.give_up_blob("three failed")
    assert made.top.tolist() == [1, 1]


def test_a_blob_of_no_use_fails_chunks_without_text():
    made = doc(1, 1, text=False)
    made.give_up_blob("no head start", all_of_it=True)
    assert made.state.tolist() == [S.FAILED, S.FAILED]


def test_what_was_given_up_comes_back_where_the_text_fails():
    made = doc(1, 0)
    made.give_up_blob("three failed")
    made.move(0, S.RECOMPUTING)
    made.lose(0, "memory", fetch=False)
    assert (made.state[0], made.top[0]) == (S.PLANNED, 1)
    assert made.top[1] == -1


def test_what_is_of_no_use_does_not_come_back():
    made = doc(1)
    made.give_up_blob("three failed")
    made.give_up_blob("no head start", all_of_it=True)
    made.move(0, S.RECOMPUTING)
    made.lose(0, "memory", fetch=False)
    assert made.state[0] == S.FAILED


def test_variants_can_be_tried_one_after_another():
    tokens = (10, 10)
    variants = (
        DocumentPlanInput(tokens, ((5,), ()), has_text=False),
        DocumentPlanInput(tokens, ((5, 9), (5, 9)), has_text=False),
    )
    made = DocumentState(0, 0, variants)
    assert made.state[1] == S.FAILED
    for _ in range(2):
        made.choose(1)
        assert made.state.tolist() == [S.PLANNED, S.PLANNED]
        assert not made.troubles
        made.choose(0)
        assert made.state[1] == S.FAILED


def test_text_of_any_variant_is_text_of_all():
    made = DocumentState(0, 0, (DocumentPlanInput((10,), ((5,),), has_text=False), DocumentPlanInput((10,))))
    assert made.can_text.all()


def test_variants_of_different_tokens_are_refused():
    with pytest.raises(ArgumentError, match="chunks of the same tokens"):
        DocumentState(0, 0, (DocumentPlanInput((10,)), DocumentPlanInput((5, 5))))


def test_a_pass_counts_the_tokens_before_it():
    made = doc(1, 1, 1)
    assert made.prefill_span(1, 2) == (20, 10)
    assert made.ready_before() == 0
    made.state[:2] = S.READY
    assert made.ready_before() == 2


def test_a_decision_tells_what_is_in_the_prompt_and_why():
    made = doc(1)
    made.reasons[0] = "soonest"
    made.note(0, "decode failed")
    made.valid_level[0] = 1
    first = next(made.decisions())
    assert str(first.reason) == "soonest (decode failed)"
    assert (first.chunk, first.action, first.level) == (ChunkId(0, 0), "fetch", 1)
