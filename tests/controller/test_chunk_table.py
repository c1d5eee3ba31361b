"""The columns of a load's chunks against a plain list of chunks."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from kvwire.controller import DocumentPlanInput
from kvwire.controller.chunk_table import MOVES, VALID, ChunkState, ChunkTable

S = ChunkState


class Naive:
    """A chunk as an object: what the table must say of it."""

    def __init__(self, number, chunk, document):
        self.number, self.chunk = number, chunk
        self.state, self.level, self.held = S.PLANNED, -1, 0
        self.tokens, self.context = document.tokens[chunk], sum(document.tokens[:chunk])
        self.sizes = document.fetch_bytes[chunk] if document.fetch_bytes else ()
        self.errors = document.errors[chunk] if document.errors else [0.1 ** (1 + k) for k in range(len(self.sizes))]
        self.layered, self.finest = document.layered, document.finest
        self.top = len(self.sizes) - 1

    def at(self, row, level):
        return (row[min(level, len(row) - 1)] if row else 0) if level >= 0 else 0


def document(random):
    tokens = tuple(random.randint(1, 300) for _ in range(random.randint(1, 5)))
    if random.random() < 0.2:
        return DocumentPlanInput(tokens)
    levels = random.randint(1, 5)
    lengths = [random.choice([levels, levels, random.randint(0, levels)]) for _ in tokens]
    rows = [tuple(sorted(random.randint(0, 999) for _ in range(length))) for length in lengths]
    measured = tuple(tuple(random.random() for _ in row) for row in rows)
    return DocumentPlanInput(tokens, tuple(rows), errors=random.choice([(), measured]), layered=random.random() < 0.7)


def played(seed):
    """A table and the same as objects after random steps, in the order in which documents became known."""
    random, table, naive, starts = Random(seed), ChunkTable(), [], []
    numbers = random.sample(range(20), random.randint(1, 8))
    for number in sorted(numbers) if random.random() < 0.5 else numbers:
        chosen = document(random)
        starts.append(table.add(number, chosen.tokens))
        table.place(starts[-1], chosen, has_text=chosen.has_text)
        naive += [Naive(number, chunk, chosen) for chunk in range(len(chosen.tokens))]
        for _ in range(random.randint(0, 12)):
            at, state = random.randrange(len(naive)), random.choice(list(S))
            assert table.move(at, state) == (state in MOVES[naive[at].state])
            if state in MOVES[naive[at].state]:
                naive[at].state = state
            naive[at].level = table.level[at] = random.randint(-1, naive[at].top)
            naive[at].held = random.choice([0, random.randint(0, 99)])
            table.hold(at, naive[at].held)
    return random, table, naive


@pytest.mark.parametrize("seed", range(60))
def test_columns_say_what_single_chunks_say(seed):
    random, table, naive = played(seed)
    in_order = sorted(range(len(naive)), key=lambda at: (naive[at].number, naive[at].chunk))
    assert table.counts == [sum(each.state == state for each in naive) for state in S]
    assert table.held_total == sum(each.held for each in naive)
    assert table.valid == sum(each.state in VALID for each in naive)
    for states in ((S.PLANNED,), (S.ARRIVED,), (S.FETCHING, S.REFINING), (S.READY,)):
        assert list(table.having(*states)) == [at for at in in_order if naive[at].state in states]
    waiting = [each for each in naive if each.state in (S.ARRIVED, S.REFINED)]
    size = sum(each.at(each.sizes, each.level) for each in waiting)
    assert table.arrived() == (len(waiting), sum(each.tokens for each in waiting), size)
    columns, places = table.open({naive[0].number: 0.25})
    chunks = [naive[at] for at in in_order if naive[at].state == S.PLANNED]
    assert places.tolist() == [at for at in in_order if naive[at].state == S.PLANNED]
    for name in ("number", "chunk", "tokens", "context", "top", "finest"):
        column = getattr(columns, "document" if name == "number" else name)
        assert column.tolist() == [getattr(each, name) for each in chunks], name
    assert columns.prefix_s.tolist() == [0.25 * (each.number == naive[0].number) for each in chunks]
    for level in range(columns.levels):
        assert columns.sizes[level].tolist() == [each.at(each.sizes, level) for each in chunks]
        assert columns.errors[level].tolist() == pytest.approx([each.at(each.errors, level) for each in chunks])
    assert columns.exact_error.tolist() == pytest.approx([each.errors[-1] if each.errors else 0.0 for each in chunks])
    ceiling = random.choice([None, 0, 2])
    refinable, where = table.refinable(ceiling)
    able = [at for at in in_order if can_be_refined(naive[at], ceiling)]
    assert where.tolist() == able
    assert refinable.level.tolist() == [naive[at].level for at in able]
    assert refinable.ready.tolist() == [naive[at].state == S.READY for at in able]


def can_be_refined(each, ceiling):
    most = each.top if ceiling is None else min(each.top, ceiling)
    return (
        each.layered and each.held > 0 and each.level < most and each.state not in (S.PLANNED, S.RECOMPUTING, S.FAILED)
    )


def test_a_column_that_was_looked_at_can_grow_again():
    table = ChunkTable()
    table.place(table.add(0, (10,)), DocumentPlanInput((10,), ((5, 9),)), has_text=True)
    assert np.array_equal(table.look("tokens"), [10])
    table.place(table.add(1, (20,)), DocumentPlanInput((20,), ((1, 2, 3),)), has_text=True)
    assert table.look("tokens").tolist() == [10, 20]
    assert [column.tolist() for column in table.sizes] == [[5, 1], [9, 2], [9, 3]]
