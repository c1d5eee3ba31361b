"""States of chunks, and the one table of moves between them."""

from __future__ import annotations

import pytest

from kvwire.controller import DocumentPlanInput
from kvwire.controller.chunk_table import MOVES, ChunkState, ChunkTable
from kvwire.controller.document_state import DocumentState
from kvwire.errors import ArgumentError
from kvwire.types import ChunkId

S = ChunkState


def doc(*tops, text=True, **more):
    """A document with a chunk of 10 tokens and 100, 200, ... bytes for each finest level; -1: no segment."""
    rows = tuple(tuple(100 * (level + 1) for level in range(top + 1)) for top in tops)
    return DocumentState(0, 0, (DocumentPlanInput((10,) * len(tops), rows, text, **more),), ChunkTable())


def states(made):
    return [S(state) for state in made.table.state]


def test_the_table_is_the_whole_truth():
    for before in S:
        for after in S:
            made = doc(1)
            made.table.state[0] = before
            if after in MOVES[before]:
                made.move(0, after)
            else:
                with pytest.raises(ArgumentError, match=f"it cannot become {after.name.lower()}"):
                    made.move(0, after)
            assert states(made) == [after if after in MOVES[before] else before]


def test_every_state_is_in_the_table_and_can_be_reached():
    assert set(MOVES) == set(S)
    reached, fresh = set(), {S.PLANNED}
    while fresh:
        reached |= fresh
        fresh = {after for before in fresh for after in MOVES[before]} - reached
    assert reached == set(S)


def test_a_blob_of_no_use_fails_chunks_without_text():
    made = doc(1, 1, text=False)
    made.give_up_blob("no head start", all_of_it=True)
    assert states(made) == [S.FAILED, S.FAILED]


def test_what_is_of_no_use_does_not_come_back():
    made = doc(1)
    made.give_up_blob("three failed")
    made.give_up_blob("no head start", all_of_it=True)
    made.move(0, S.RECOMPUTING)
    made.lose(0, "memory", fetch=False)
    assert states(made)[0] == S.FAILED


def test_variants_can_be_tried_one_after_another():
    tokens = (10, 10)
    variants = (
        DocumentPlanInput(tokens, ((5,), ()), has_text=False),
        DocumentPlanInput(tokens, ((5, 9), (5, 9)), has_text=False),
    )
    made = DocumentState(0, 0, variants, ChunkTable())
    assert states(made)[1] == S.FAILED
    for _ in range(2):
        made.choose(1)
        assert states(made) == [S.PLANNED, S.PLANNED]
        assert not made.troubles
        made.choose(0)
        assert states(made)[1] == S.FAILED


def test_variants_of_different_tokens_are_refused():
    with pytest.raises(ArgumentError, match="chunks of the same tokens"):
        DocumentState(0, 0, (DocumentPlanInput((10,)), DocumentPlanInput((5, 5))), ChunkTable())


def test_a_decision_tells_what_is_in_the_prompt_and_why():
    made = doc(1)
    made.reasons[0] = "soonest"
    made.note(0, "decode failed")
    made.table.valid_level[0] = 1
    first = next(made.decisions())
    assert str(first.reason) == "soonest (decode failed)"
    assert (first.chunk, first.action, first.level) == (ChunkId(0, 0), "fetch", 1)
