"""What stands where in a linked prompt, and who sees what: the object that training and loads share."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from kvwire.errors import ArgumentError
from kvwire.reuse import (
    PLAIN,
    Anchors,
    LinkLayout,
    PromptLayout,
    anchors,
    block_attention,
    block_mask,
    kvlink,
    read_layout,
    soft_links,
    soft_token,
    turborag,
    wrappers,
)

LAYOUTS = [
    PLAIN,
    *(kvlink(count) for count in (0, 1, 5)),
    kvlink(5, chat="training"),
    kvlink(5, chat="evaluation"),
    soft_links(2),
    wrappers(3, 2),
    wrappers(0, 4),
    turborag([7], [8]),
    block_attention([5, 6]),
    anchors(4, 2),
    LinkLayout("all", (1,), (2, 3), (4,), ((5,), (6,), (7,), (8,)), (9,), (10,), Anchors(3, (-1,))),
]


def laid_out(layout: LinkLayout, seed: int) -> PromptLayout:
    """A prompt of random lengths, some of its texts empty."""
    chance = random.Random(seed)
    documents = [[20] * chance.randint(1, 11) for _ in range(chance.randint(1, 4))]
    return layout.lay_out(documents, [21] * chance.randint(1, 4), [22] * chance.randint(0, 3), [23] * (seed % 2))


def sees(prompt: PromptLayout, row: int, column: int) -> bool:
    """The rule in words: the naive twin of ``visible``."""
    if column > row:
        return False
    (mine,) = (each for each in prompt.segments if each.start <= row < each.stop)
    (theirs,) = (each for each in prompt.segments if each.start <= column < each.stop)
    if mine.is_cached and mine is not theirs:
        return False
    if prompt.layout.anchors is None or not theirs.is_cached:
        return True
    kinds, chunks = [], []
    layout, rule = prompt.layout, prompt.layout.anchors
    own = theirs.tokens - len(layout.before) - len(layout.after)
    left = next(count for count in range(own + 1) if rule.length(count) == own)
    kinds += ["before"] * len(layout.before)
    chunks += [-1] * len(layout.before)
    number = 0
    while left > 0:
        taken = min(left, rule.chunk)
        kinds += ["own"] * taken + ["anchor"] * len(rule.tokens)
        chunks += [number] * (taken + len(rule.tokens))
        left, number = left - taken, number + 1
    kinds += ["after"] * len(layout.after)
    chunks += [-2] * len(layout.after)
    at = column - theirs.start
    same_chunk = mine is theirs and chunks[row - theirs.start] == chunks[at]
    return kinds[at] != "own" or same_chunk


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", range(4))
def test_what_a_row_sees_is_the_rule_in_words(layout: LinkLayout, seed: int) -> None:
    prompt = laid_out(layout, seed)
    every = range(prompt.tokens)
    assert prompt.visible().tolist() == [[sees(prompt, row, column) for column in every] for row in every]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", range(4))
def test_every_position_is_of_one_segment(layout: LinkLayout, seed: int) -> None:
    prompt = laid_out(layout, seed)
    at = 0
    for each in prompt.segments:
        assert (each.start, each.tokens) == (at, len(each.token_ids or ()))
        at = each.stop
    assert at == prompt.tokens == len(prompt.token_ids)
    rows, tokens = prompt.front_rows()
    assert tuple(prompt.token_ids[row] for row in rows.tolist()) == tokens
    behind = torch.arange(prompt.question_start, prompt.tokens)
    cached = torch.cat([torch.arange(each.start, each.stop) for each in prompt.documents])
    assert sorted(torch.cat([rows, behind, cached]).tolist()) == list(range(prompt.tokens))
    assert torch.equal(prompt.positions(), torch.cat([rows, behind]))


def test_plain_is_todays_linking() -> None:
    prompt = PLAIN.lay_out([[1] * 3, [2] * 5], [3] * 2)
    assert torch.equal(prompt.visible(), block_mask([3, 5], 2))
    assert prompt.starts == (0, 3)
    assert PLAIN.is_plain
    assert not any(each.is_plain for each in LAYOUTS[1:])


@pytest.mark.parametrize("count", [0, 1, 5])
def test_kvlink_has_the_ids_of_its_checkpoints(count: int) -> None:
    prompt = kvlink(count).lay_out([[1, 2], [3]], [4, 5], [6])
    links = [tuple(128011 + count * index + j for j in range(count)) for index in range(2)]
    assert prompt.token_ids == (6, 128254, 1, 2, *links[0], 3, *links[1], 128255, 4, 5)
    assert prompt.starts == (2, 4 + count)
    assert max(kvlink(count).computed_tokens) < 128256


def test_kvlinks_turns_differ_between_training_and_evaluation() -> None:
    user, ending = (128006, 882, 128007, 271), (128009, 128006, 78191, 128007, 271)
    training = kvlink(1, chat="training").lay_out([[1]], [4], [6], [9])
    evaluation = kvlink(1, chat="evaluation").lay_out([[1]], [4], [6])
    assert training.token_ids == (6, 128254, 1, 128011, 128255, *user, 4, *ending, 9)
    assert evaluation.token_ids == (6, *user, 128254, 1, 128011, 128255, 4, *ending)
    assert training.positions("answer").tolist() == [training.tokens - 1]


def test_ids_of_one_document_may_lie_further_apart() -> None:
    assert kvlink(1, stride=5).links[2] == (128021,)
    with pytest.raises(ArgumentError, match="0 to 6 link tokens"):
        kvlink(7)


def test_wrappers_stand_inside_caches() -> None:
    prompt = wrappers(2, 1).lay_out([[5, 6], [7]], [8])
    assert prompt.token_ids == (-1, -2, 5, 6, -3, -1, -2, 7, -3, 8)
    assert (prompt.starts, prompt.lengths) == ((0, 5), (5, 4))
    assert wrappers(2, 1).soft_tokens == 3
    assert soft_links(2, 3).soft_tokens == 6
    assert kvlink().soft_tokens == 0


def test_lengths_alone_lay_a_prompt_out() -> None:
    layout = LAYOUTS[-1]
    known = layout.lay_out([[1] * 7, [2] * 4], [3], [4])
    sized = layout.lay_out([7, 4], [3], [4])
    assert (sized.starts, sized.lengths, sized.tokens) == (known.starts, known.lengths, known.tokens)
    assert torch.equal(sized.visible(), known.visible())
    assert [layout.own_length(length) for length in known.lengths] == [7, 4]
    assert sized.front_rows()[1] == known.front_rows()[1]
    with pytest.raises(ArgumentError, match="tokens of a document are not known"):
        _ = sized.token_ids


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda each: each.name)
def test_lengths_of_caches_tell_those_of_documents(layout: LinkLayout) -> None:
    found = {layout.cache_length(own): own for own in range(1, 30)}
    for length in range(-1, 30):
        if length in found:
            assert layout.own_length(length) == found[length]
        else:
            with pytest.raises(ArgumentError, match="encode the document with that layout"):
                layout.own_length(length)


def test_what_was_pruned_is_seen_by_its_own_document_alone() -> None:
    prompt = kvlink(1).lay_out([[1] * 4, [2] * 2], [3])
    kept = torch.tensor([True, False, True, False])
    whole, pruned = prompt.visible(), prompt.visible([kept, None])
    assert torch.equal(whole[1:5], pruned[1:5])
    assert pruned[5, 1:5].tolist() == [True, False, True, False]
    assert pruned[-1, 1:5].tolist() == [True, False, True, False]


def test_a_layout_is_immutable_and_a_key() -> None:
    layout = kvlink(5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.name = "another"  # type: ignore[misc]
    assert {layout: 1}[kvlink(5)] == 1
    assert layout != kvlink(1)


@pytest.mark.parametrize(
    "name", ["plain", "kvlink:0", "kvlink:5", "kvlink:5:evaluation", "links:3", "wrappers:8+8", "anchors:100/25"]
)
def test_names_read_back(name: str) -> None:
    assert read_layout(name).name == name
    assert read_layout("turborag:1,2/3") == turborag([1, 2], [3])
    assert read_layout("block-attention:4,5") == block_attention([4, 5])
    assert read_layout("kvlink") == kvlink(5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kvlinks:5", "there is no layout 'kvlinks:5'; there are plain"),
        ("kvlink:five", "not of the form kvlink:K"),
        ("kvlink:5:chat", "training or evaluation"),
        ("kvlink:-1", "0 to 6 link tokens"),
        ("wrappers:8", "not of the form wrappers:HEADER"),
        ("wrappers:0+0", "at least one token"),
        ("links:0", "at least one token"),
        ("anchors:100/0", "chunks of at least one token"),
        ("anchors:0/2", "chunks of at least one token"),
        ("", "there is no layout ''"),
        ("links:200000", "at most 4096 soft tokens, got 8000000; take fewer"),
        ("links:2/3000", "at most 4096 soft tokens, got 6000"),
        ("wrappers:4096+1", "at most 4096 soft tokens, got 4097"),
        ("anchors:100/5000", "at most 4096 soft tokens, got 5000"),
    ],
)
def test_names_of_nothing_are_refused(name: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        read_layout(name)


def test_prompts_of_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one token each"):
        PLAIN.lay_out([], [1])
    with pytest.raises(ArgumentError, match="at least one token each"):
        PLAIN.lay_out([[1], []], [1])
    with pytest.raises(ArgumentError, match="link tokens for 40 documents, the prompt has 41"):
        kvlink(1).lay_out([[1]] * 41, [1])
    assert kvlink(0).lay_out([[1]] * 41, [1]).tokens == 44
    with pytest.raises(ArgumentError, match="count from 0"):
        soft_token(-1)
