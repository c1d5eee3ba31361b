"""Training data: what lines become samples, what is refused, how files are mixed."""

import json
import random

import pytest

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.reuse import PLAIN, soft_links
from kvwire.training import Mixture, Sample, Samples, Text, TextCut, Turn, read_source

CUT = TextCut((2, 3), 5, 4)


def letters(text, trust="document"):
    return [ord(each) - 32 for each in text]


def written(tmp_path, *lines, name="data.jsonl"):
    path = tmp_path / name
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def only(tmp_path, line):
    source = read_source(written(tmp_path, line), letters, CUT)
    assert isinstance(source, Samples)
    (sample,) = source.samples
    return sample


def ids(text):
    return tuple(letters(text))


def test_kinds_of_lines(tmp_path):
    asked = only(tmp_path, {"passages": ["ab", "c"], "question": "q", "answer": "an", "system": "s"})
    assert (asked.passages, asked.turns, asked.system) == (
        (ids("ab"), ids("c")),
        (Turn(ids("q"), ids("an")),),
        ids("s"),
    )
    turns = only(tmp_path, {"passages": [[1, 2]], "turns": [{"question": "q", "answer": "a"}, {"answer": [7]}]})
    assert turns.passages == ((1, 2),)
    assert turns.turns == (Turn(ids("q"), ids("a")), Turn((), (7,)))
    assert turns.rest == (*ids("qa"), 7)
    assert turns.is_learnt == (False, True, True)
    roles = [("system", "s"), ("user", "u"), ("user", "v"), ("assistant", "a"), ("user", "w"), ("assistant", "b")]
    said = only(tmp_path, {"messages": [{"role": role, "content": text} for role, text in roles]})
    assert (said.system, said.turns) == (ids("s"), (Turn(ids("uv"), ids("a")), Turn(ids("w"), ids("b"))))


@pytest.mark.parametrize("line", [{"text": "abc"}, {"passages": ["d"], "summary": "abc"}])
def test_without_a_question_the_first_token_is_given(tmp_path, line):
    assert only(tmp_path, line).turns == (Turn(ids("a"), ids("bc")),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"passages": ["a"], "question": "q"}, "no answer to learn"),
        ({"passages": ["a"], "question": "q", "answer": ""}, "no answer to learn"),
        ({"messages": [{"role": "user", "content": "u"}]}, "no answer to learn"),
        ({"text": "a"}, "no answer to learn"),
        ({"passages": ["a"], "answer": "a", "summary": "s"}, "not several"),
        ({"passages": "a", "question": "q", "answer": "a"}, "list of texts"),
        ({"passages": ["a", ""], "question": "q", "answer": "a"}, "passage is empty"),
        ({"passages": ["a"], "question": 5, "answer": "a"}, "question must be a text"),
        ({"passages": [[1.5]], "question": "q", "answer": "a"}, "a passage must be a text"),
        ({"turns": "a"}, "lists of objects"),
        ({"messages": [{"role": "judge", "content": "u"}]}, "messages are of the system"),
        ({"text": "abc", "ordered": 1}, "ordered is true or false"),
        ({"words": "abc"}, "a sample is an object"),
        (["abc"], "a sample is an object"),
    ],
)
def test_a_bad_line_is_told_with_its_place(tmp_path, line, words):
    path = written(tmp_path, {"text": "fine"}, line)
    with pytest.raises(ArgumentError, match=words) as caught:
        read_source(path, letters, CUT)
    assert str(caught.value).startswith(f"{path}, line 2: ")


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(NotFoundError, match="no samples"):
        read_source(written(tmp_path), letters, CUT)
    with pytest.raises(NotFoundError, match="neither a file nor a folder"):
        read_source(tmp_path / "missing", letters, CUT)
    with pytest.raises(NotFoundError, match=r"no \.txt"):
        read_source(tmp_path, letters, CUT)
    with pytest.raises(ArgumentError, match=r"is no \.jsonl"):
        read_source(written(tmp_path, name="data.csv"), letters, CUT)
    (tmp_path / "broken.jsonl").write_text("{")
    with pytest.raises(ArgumentError, match=r"broken.jsonl, line 1 is not valid JSON"):
        read_source(tmp_path / "broken.jsonl", letters, CUT)
    (tmp_path / "short.txt").write_text("too short a text")
    with pytest.raises(ArgumentError, match="has 16 tokens and a prompt takes 19"):
        read_source(tmp_path / "short.txt", letters, CUT)


def test_text_is_cut_into_neighbours(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    text = read_source(tmp_path, letters, TextCut((2, 3), 5, 4, given=2))
    assert isinstance(text, Text)
    seen = set()
    for turn in range(40):
        sample = text.draw(turn, "seed")
        (rest,) = sample.turns
        whole = [token for passage in sample.passages for token in passage] + list(sample.rest)
        assert whole == list(range(whole[0], whole[0] + len(whole)))
        assert (len(rest.question), len(rest.answer)) == (2, 2)
        seen.add(len(sample.passages))
    assert seen == {2, 3}
    with pytest.raises(ArgumentError, match="can be given"):
        TextCut((2, 3), 5, 4, given=4)


def test_drawing_shuffles_passages_and_changes_nothing_that_samples_share(tmp_path):
    """Each draw stands on its own: no prompt grows with the samples before it, and no labels are lost."""
    prefix = "the same words before every sample"
    lines = [{"system": prefix, "passages": ["a", "b", "c"], "question": "q", "answer": "xyz"} for _ in range(3)]
    source = read_source(written(tmp_path, *lines), letters, CUT)
    mixture = Mixture({"one": source}, {"one": 1.0}, 0)
    orders = set()
    for _ in range(200):
        sample = mixture.draw()
        assert sample.system == ids(prefix)
        assert sum(sample.is_learnt) == 3
        assert sorted(sample.passages) == [ids("a"), ids("b"), ids("c")]
        orders.add(sample.passages)
    assert len(orders) == 6
    assert all(sample.passages == (ids("a"), ids("b"), ids("c")) for sample in source.samples)


def test_ordered_passages_stay(tmp_path):
    line = {"passages": ["a", "b", "c"], "question": "q", "answer": "x", "ordered": True}
    sample = only(tmp_path, line)
    assert all(sample.shuffled(random.Random(seed)) == sample for seed in range(9))


def some(count, token):
    return Samples([Sample(((token, number + 1),), (Turn((1,), (2,)),)) for number in range(count)])


def test_a_mixture_draws_by_weights_and_each_sample_once_a_round():
    mixture = Mixture({"a": some(7, 1), "b": some(5, 2)}, {"a": 3.0, "b": 1.0}, 4)
    drawn = [mixture.draw() for _ in range(2000)]
    counts = mixture.counts
    assert sum(counts.values()) == 2000
    assert 0.7 < counts["a"] / 2000 < 0.8
    of_a = [sample.passages[0][1] for sample in drawn if sample.passages[0][0] == 1]
    rounds = [of_a[at : at + 7] for at in range(0, 70, 7)]
    assert all(sorted(each) == list(range(1, 8)) for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def test_a_mixture_goes_on_from_its_counts():
    parts, weights = {"a": some(7, 1), "b": some(5, 2)}, {"a": 3.0, "b": 1.0}
    whole = Mixture(parts, weights, 4)
    drawn = [whole.draw() for _ in range(50)]
    first = Mixture(parts, weights, 4)
    half = [first.draw() for _ in range(20)]
    second = Mixture(parts, weights, 4)
    second.counts = dict(first.counts)
    assert [*half, *(second.draw() for _ in range(30))] == drawn
    assert Mixture(parts, weights, 5).digest != whole.digest == second.digest
    with pytest.raises(ArgumentError, match="weights above 0"):
        Mixture(parts, {"a": 1.0, "b": 0.0}, 4)


def test_samples_that_do_not_fit(tmp_path):
    long = {"passages": ["abcd", "efgh"], "question": "q", "answer": "x"}
    path = written(tmp_path, {"passages": ["ab"], "question": "q", "answer": "x"}, long)
    source = read_source(path, letters, CUT)
    with pytest.raises(ArgumentError, match=r"line 2: 10 tokens, laid out, are more than 9"):
        source.fitting(PLAIN, 9, 96)
    assert len(source.fitting(PLAIN, 9, 96, skip_long=True).samples) == 1
    with pytest.raises(ArgumentError, match=r"line 2: .* link tokens for 1 documents, the prompt has 2"):
        source.fitting(soft_links(2, 1), 90, 96)
    with pytest.raises(ArgumentError, match="line 1: token ids reach 88, the model's vocabulary has 80"):
        source.fitting(PLAIN, 90, 80)
    with pytest.raises(ArgumentError, match="no sample fits"):
        source.fitting(PLAIN, 2, 96, skip_long=True)
    (tmp_path / "a.txt").write_text("abcdefghijklmnopqrstuvwxyz")
    with pytest.raises(ArgumentError, match="19 tokens, laid out, are more than 12"):
        read_source(tmp_path / "a.txt", letters, CUT).fitting(PLAIN, 12, 96)
