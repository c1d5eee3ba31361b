"""Edit scripts and edited caches: exact end points for every family, and naive twins under hypothesis."""

import copy
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import LinkedPrompt
from kvwire.reuse.edits.place import compute_holes, place_spans
from kvwire.reuse.edits.script import MAX_SPANS, MAX_TOKENS, EditScript, Span, align

from ..engines.families import FAMILIES, cache_error, engine_of, tokens
from .test_repair import cloned, part, same_bits, tensors

IDS = st.lists(st.integers(0, 3), max_size=40)
DONOR = tokens(30, 1)
EDITED = [*DONOR[:8], 7, 7, *DONOR[9:20], 5, *DONOR[20:]]
"""One token replaced by two, one put in."""


def apply_naive(script, donors, ids):
    """The prompt's tokens, token by token: of donors in spans, its own in holes."""
    made = [-1] * script.tokens
    for span in script.spans:
        for step in range(span.tokens):
            made[span.start + step] = donors[span.donor][span.at + step]
    for start, stop in script.holes:
        made[start:stop] = ids[start:stop]
    return made


@settings(max_examples=300)
@given(st.lists(IDS, max_size=3), IDS.filter(bool), st.integers(1, 5))
def test_a_script_makes_the_prompt_and_reuses_equal_tokens_alone(donors, ids, least):
    script = align(donors, ids, least)
    assert apply_naive(script, donors, ids) == ids
    script.check(donors, ids)
    assert all(span.tokens >= least for span in script.spans)
    covered = [at for span in script.spans for at in range(span.start, span.stop)]
    holes = [at for start, stop in script.holes for at in range(start, stop)]
    assert sorted(covered + holes) == list(range(len(ids)))
    assert (script.reused, script.computed) == (len(covered), len(holes))


@settings(max_examples=200)
@given(IDS, IDS.filter(bool))
def test_against_one_donor_as_much_is_reused_as_can_be_in_order(donor, ids):
    table = np.zeros((len(donor) + 1, len(ids) + 1), int)
    for row, theirs in enumerate(donor):
        for column, ours in enumerate(ids):
            same = table[row, column] + 1 if theirs == ours else 0
            table[row + 1, column + 1] = max(same, table[row, column + 1], table[row + 1, column])
    assert align([donor], ids, 1).reused == table[-1, -1]


def test_several_donors_give_their_longest_runs():
    first, second = tokens(40, 2), tokens(40, 3)
    prompt = [*first[:30], *second[5:40], *first[36:]]
    script = align([first, second], prompt)
    assert script.spans == (Span(0, 0, 30, 0), Span(30, 5, 35, 1), Span(65, 36, 4, 0))
    assert (script.donors, script.exact, script.ranges(0)) == ((0, 1), 30, ((0, 30), (36, 40)))
    twice = align([first[:20], first], first)
    assert twice.spans == (Span(0, 0, 40, 1),)


@settings(max_examples=200)
@given(IDS, IDS.filter(bool), st.integers(0, 40), st.integers(0, 40))
def test_lost_tokens_become_holes(donor, ids, first, stop):
    script = align([donor], ids, 1)
    left = script.without([(0, first, stop)])
    pairs = {(span.at + step, span.start + step) for span in script.spans for step in range(span.tokens)}
    kept = {(span.at + step, span.start + step) for span in left.spans for step in range(span.tokens)}
    assert kept == {pair for pair in pairs if not first <= pair[0] < stop}


def test_of_too_many_spans_the_longest_stay():
    script = EditScript(MAX_TOKENS, tuple(Span(8 * at, 8 * at, 5 + (at < 3)) for at in range(MAX_SPANS)))
    made = script.without([(0, 8 * at + 2, 8 * at + 3) for at in range(3)])
    assert len(made.spans) == MAX_SPANS
    assert script.reused - made.reused == 3 * 3
    assert sorted(made.spans) == list(made.spans)


@pytest.mark.parametrize(
    ("length", "spans"),
    [
        (0, ()), (MAX_TOKENS + 1, ()),
        (9, (Span(5, 0, 5),)), (9, (Span(0, 0, 5), Span(4, 9, 2))), (9, (Span(0, 0, 0),)),
        (9, (Span(0, -1, 3),)), (9, (Span(0, 0, 3, -1),)), (9, tuple(Span(0, 0, 1) for _ in range(5000))),
    ],
)  # fmt: skip
def test_impossible_scripts_are_refused(length, spans):
    with pytest.raises(ArgumentError):
        EditScript(length, spans)


def test_a_script_of_other_tokens_is_refused():
    script = align([DONOR], EDITED)
    for donors, ids in (([DONOR[1:]], EDITED), ([], EDITED), ([DONOR], EDITED[:-1]), ([DONOR], [*EDITED[:-1], 99])):
        with pytest.raises(ArgumentError, match=re.compile("prompt")):
            script.check(donors, ids)


def test_texts_that_are_too_long_to_compare_share_their_ends(monkeypatch):
    monkeypatch.setattr("kvwire.reuse.edits.script._MAX_PAIRS", 3)
    script = align([DONOR], EDITED)
    assert script.spans == (Span(0, 0, 8), Span(22, 20, 10))


def room_for(engine, script):
    return LinkedPrompt([script.tokens], engine.meta, dtype=engine.dtype)


def edited(engine, donors, ids, script=None):
    """The prompt's cache, as an edit makes it."""
    script = script or align(donors, ids)
    prompt = room_for(engine, script)
    caches = engine.prefill(donors)
    before = [cloned(cache) for cache in caches]
    holes = place_spans(prompt, caches, script)
    assert len(holes) == script.computed
    compute_holes(engine, prompt, ids, holes)
    assert all(map(same_bits, caches, before))
    return prompt.cache


@pytest.mark.parametrize("family", FAMILIES)
def test_no_edit_is_the_donor_and_all_holes_are_a_prefill(family):
    engine = engine_of(family)
    (whole,) = engine.prefill([DONOR])
    assert same_bits(edited(engine, [DONOR], DONOR), whole)
    assert cache_error(edited(engine, [DONOR], DONOR, EditScript(len(DONOR))), whole) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_at_the_end_extends_the_donor(family):
    engine, more = engine_of(family), [*DONOR, 7, 5, 7]
    (donor,) = engine.prefill([DONOR])
    made = edited(engine, [DONOR], more)
    assert same_bits(made.slice(0, len(DONOR)), donor)
    assert cache_error(made.slice(len(DONOR), len(more)), engine.extend(donor, [7, 5, 7])) < 1e-5


def token_by_token(engine, cache, ids, rows):
    """The naive twin: each hole by itself on top of what stands before it."""
    for row in rows.tolist():
        fresh = engine.extend(cache.slice(0, row) if row else None, ids[row : row + 1])
        for ours, theirs in zip(tensors(cache), tensors(fresh), strict=True):
            ours[:, row : row + 1] = theirs
    return cache


@pytest.mark.parametrize("family", FAMILIES)
def test_holes_in_blocks_equal_token_by_token(family, monkeypatch):
    engine, other = engine_of(family), tokens(20, 4)
    ids = [*EDITED[:22], *other[3:15], *EDITED[28:], 9, 8]
    script = align([DONOR, other], ids)
    assert (script.donors, len(script.holes)) == ((0, 1), 3)
    prompt = room_for(engine, script)
    rows = place_spans(prompt, engine.prefill([DONOR, other]), script)
    wanted = token_by_token(engine, cloned(prompt.cache), ids, rows)
    spans = torch.tensor([row for row in range(len(ids)) if row not in rows.tolist()])
    before = cloned(prompt.cache)
    for block in (1024, 2):
        monkeypatch.setattr("kvwire.reuse.edits.place.BLOCK_ROWS", block)
        compute_holes(engine, prompt, ids, rows)
        assert cache_error(prompt.cache, wanted) < 1e-5
        assert same_bits(part(prompt.cache, spans), part(before, spans))
    later = [*ids[:-1], 7]
    again = edited(engine, [DONOR, other], later, script)
    assert (
        cache_error(part(again, rows[:-1]), part(prompt.cache, rows[:-1])) < 1e-5
    )  # a later token changes no earlier row


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(DONOR[:12]), min_size=1, max_size=12), st.data())
def test_any_edit_equals_token_by_token(ids, data):
    engine, donors = engine_of("llama"), [DONOR, DONOR[6:15]]
    script = align(donors, ids, data.draw(st.integers(1, 3)))
    prompt = room_for(engine, script)
    rows = place_spans(prompt, engine.prefill(donors), script)
    wanted = token_by_token(engine, cloned(prompt.cache), ids, rows)
    compute_holes(engine, prompt, ids, rows)
    assert cache_error(prompt.cache, wanted) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_double_precision_is_exact(family):
    single = engine_of(family)
    model = copy.deepcopy(single.model).double()
    model.config._experts_implementation = "eager"  # grouped products of experts have no float64
    engine = type(single)(model, model_id=family)
    (whole,) = engine.prefill([EDITED])
    assert cache_error(edited(engine, [DONOR], EDITED, EditScript(len(EDITED))), whole) < 1e-10


def test_an_edit_is_far_nearer_than_the_donor():
    engine = engine_of("llama")
    (whole,) = engine.prefill([EDITED])
    stale = LinkedPrompt([len(EDITED)], engine.meta, dtype=engine.dtype)
    holes = place_spans(stale, engine.prefill([DONOR]), align([DONOR], EDITED))
    made = edited(engine, [DONOR], EDITED)
    wanted = part(whole, holes)
    assert cache_error(part(made, holes), wanted) < 0.5 * cache_error(part(stale.cache, holes), wanted)
    assert cache_error(made.slice(0, 8), whole.slice(0, 8)) < 1e-5


def test_what_does_not_fit_is_refused():
    engine, script = engine_of("llama"), align([DONOR], EDITED)
    (donor,) = engine.prefill([DONOR])
    with pytest.raises(ArgumentError, match="one document of as many"):
        place_spans(LinkedPrompt([9], engine.meta), [donor], script)
    kept = tuple(torch.ones(spec.kv_heads, donor.tokens, dtype=torch.bool) for spec in engine.meta.layers)
    with pytest.raises(ArgumentError, match="pruned"):
        place_spans(room_for(engine, script), [replace(donor, kept=kept)], script)
    with pytest.raises(MismatchError):
        place_spans(room_for(engine, script), engine_of("qwen3").prefill([DONOR]), script)
    assert tensors(donor)
