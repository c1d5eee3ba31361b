"""The task model: its prompts by a solver of their own, its passes, and that what is kept does what is promised."""

import importlib
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import kvwire

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
COUNT = 40
SEPARATING = ("repeat", "chain", "legend")


class Parts:
    """The benchmark's modules."""

    def __init__(self):
        self.main = importlib.import_module("task_model")
        for name in ("evaluation", "families", "model", "prose", "training"):
            setattr(self, name, importlib.import_module(f"task_parts.{name}"))


@pytest.fixture(scope="module")
def parts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield Parts()


@pytest.fixture(scope="module")
def model(parts):
    return parts.model.load()


def facts(ids):
    """Pairs that begin with a name or a sign, read from the tokens alone; no fact begins with the end of another."""
    found, at = [], 0
    while at < len(ids) - 1:
        told = 32 <= ids[at] < 112
        found += [(ids[at], ids[at + 1])] * told
        at += 1 + told
    return found


def solve_repeat(documents, _):
    items = Counter(name for ids in documents for name, mark in facts(ids) if mark == 3)
    (twice,) = [name for name, count in items.items() if count == 2]
    return twice


def way(documents, asked):
    """Tokens from the asked name on, each told by a fact of some document, the colour last."""
    known = dict(fact for ids in documents for fact in facts(ids))
    found = [asked]
    while found[-1] in known:
        found.append(known[found[-1]])
    return found


def follow(documents, asked):
    return way(documents, asked)[-1]


def solve_prose(prose):
    """The topic by likelihood, then its most frequent successor."""

    def likelihood(table, documents):
        pairs = [pair for ids in documents for pair in pairwise(ids[1:])]
        return sum(b in table[a - 112] for a, b in pairs)

    def solve(documents, asked):
        table = max(prose.SUCCESSORS, key=lambda table: likelihood(table, documents))
        return table[asked - 112][0]

    return solve


@pytest.mark.parametrize("family", ["repeat", "chain", "legend", "needle", "prose"])
@pytest.mark.parametrize("tokens", [(28,) * 5, (13, 21, 9), (40,) * 7])
def test_a_solver_of_its_own_finds_the_answers(parts, family, tokens):
    solvers = {
        "repeat": solve_repeat,
        "chain": follow,
        "legend": follow,
        "needle": follow,
        "prose": solve_prose(parts.prose),
    }
    short = min(tokens) < 10
    size = parts.families.Size(tokens, hops=3, chains=2 if short else 4, facts=3 if short else 4)
    draw = random.Random(3)
    for _ in range(COUNT):
        prompt = parts.families.make(family, draw, size)
        assert tuple(map(len, prompt.documents)) == tokens
        for question in prompt.questions:
            assert solvers[family](prompt.documents, question.ids[-1]) == question.answer


def test_the_same_seed_draws_the_same_prompts(parts):
    first, again = (parts.main.held_out("chain", 5) for _ in range(2))
    assert first == again
    assert first != parts.main.held_out("chain", 5, seed=2)


@pytest.mark.parametrize("family", SEPARATING)
def test_dependent_rows_need_a_row_of_an_earlier_document(parts, family):
    for prompt in parts.main.held_out(family, COUNT):
        owner = [number for number, ids in enumerate(prompt.documents) for _ in ids]
        assert prompt.labels
        assert prompt.labels.keys() == prompt.sources.keys()
        for row, source in prompt.sources.items():
            assert owner[source] < owner[row]
        for question in prompt.questions:
            assert set(question.rows) <= set(prompt.labels)


def test_rows_of_a_chain_are_its_links_behind_the_first(parts):
    for prompt in parts.main.held_out("chain", COUNT):
        ids = parts.evaluation.flat(prompt)
        question = prompt.questions[0]
        name, *others, colour = way(prompt.documents, question.ids[-1])
        assert [ids[row] for row in reversed(question.rows)] == others
        assert (name, colour) == (ids[question.rows[-1] - 1], question.answer)
        assert len(others) == 2


def test_nothing_of_needles_and_prose_depends_on_other_documents(parts):
    for family in ("needle", "prose"):
        for prompt in parts.main.held_out(family, COUNT):
            assert not prompt.labels
            assert not prompt.questions[0].rows


def test_chance_is_the_best_guess_that_does_not_look(parts):
    (repeat,) = parts.main.held_out("repeat", 1)
    assert parts.families.chance(repeat) == pytest.approx(1 / 19)
    (chain,) = parts.main.held_out("chain", 1)
    assert parts.families.chance(chain) == pytest.approx(1 / 3)


def logits(model, view):
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor([view.ids]),
            position_ids=torch.tensor([view.positions]),
            attention_mask=view.visible[None, None],
            use_cache=False,
        )
    return out.logits[0, -2:]


def test_repair_of_all_rows_is_full_prefill_and_of_none_is_blind(parts, model):
    (prompt,) = parts.main.held_out("chain", 1)
    look = parts.evaluation
    everything = look.repaired(prompt, range(sum(map(len, prompt.documents))))
    assert torch.allclose(logits(model, everything), logits(model, look.full(prompt)), atol=1e-3)
    assert torch.allclose(logits(model, look.repaired(prompt, ())), logits(model, look.blind(prompt)), atol=1e-3)
    assert not torch.allclose(logits(model, look.full(prompt)), logits(model, look.blind(prompt)), atol=1e-1)


def test_repair_leaves_the_rows_of_documents_as_they_were_alone(parts, model):
    """Two passes with caches, rows written one by one: what ``repaired`` does in one pass."""
    (prompt,) = parts.main.held_out("legend", 1)
    rows = sorted(prompt.labels)[:3]
    engine = kvwire.open_engine(parts.model.FOLDER, dtype=torch.float32)
    linked = kvwire.link(engine.prefill(prompt.documents))
    documents, ids = linked.tokens, parts.evaluation.flat(prompt)
    past = engine.past_key_values(linked)
    for row in rows:
        fresh = engine.past_key_values(linked.slice(0, row))
        for layer, kept in zip(fresh.layers, past.layers, strict=True):
            layer.keys, layer.values = kept.keys[:, :, :row].clone(), kept.values[:, :, :row].clone()
        run(engine.model, fresh, [ids[row]], [row])
        for layer, kept in zip(fresh.layers, past.layers, strict=True):
            kept.keys[:, :, row], kept.values[:, :, row] = layer.keys[:, :, row], layer.values[:, :, row]
    wanted = run(engine.model, past, ids[documents:], list(range(documents, len(ids))))
    found = logits(engine.model, parts.evaluation.repaired(prompt, rows))
    assert torch.allclose(found, wanted, atol=1e-3)


def run(model, past, ids, positions):
    with torch.no_grad():
        return model(
            input_ids=torch.tensor([ids]), position_ids=torch.tensor([positions]), past_key_values=past
        ).logits[0]


def test_the_engine_answers_as_the_benchmark_does(parts, model):
    engine = kvwire.open_engine(parts.model.FOLDER, dtype=torch.float32)
    for prompt in parts.main.held_out("needle", 3):
        view = parts.evaluation.blind(prompt)
        found = engine.masked_forward(view.ids, view.visible)[-1].argmax()
        assert [int(found)] == parts.evaluation.answers(model, [view])


def hits(parts, model, family, look):
    prompts = parts.main.held_out(family, COUNT)
    return sum(parts.evaluation.correct(model, prompts, look)) / COUNT


@pytest.mark.parametrize("family", SEPARATING)
def test_blind_linking_fails_where_full_prefill_succeeds(parts, model, family):
    assert hits(parts, model, family, parts.evaluation.full) >= 0.9
    assert hits(parts, model, family, parts.evaluation.blind) <= 0.6
    assert hits(parts, model, family, lambda prompt: parts.evaluation.repaired(prompt, prompt.labels)) >= 0.85


@pytest.mark.parametrize("family", ["needle", "prose"])
def test_blind_linking_costs_nothing_where_documents_stand_alone(parts, model, family):
    full, blind = (hits(parts, model, family, look) for look in (parts.evaluation.full, parts.evaluation.blind))
    assert full >= 0.9
    assert blind >= full - 0.05


def test_training_is_deterministic_and_what_is_saved_is_what_is_loaded(parts, tmp_path):
    first, again = (parts.training.train(5, steps=2).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    trained = parts.training.train(5, steps=2)
    parts.model.save(trained, tmp_path)
    loaded = parts.model.load(tmp_path).state_dict()
    assert all(torch.equal(first[name].half().float(), loaded[name]) for name in first)


def test_missing_weights_are_told_how_to_make(parts, tmp_path):
    assert not parts.model.is_kept(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"task_model.py makes them"):
        parts.model.load(tmp_path)


def test_an_interval_is_wilsons(parts):
    found = parts.evaluation.share([True] * 8 + [False] * 2)
    assert found["least"] == pytest.approx(0.4902, abs=1e-4)
    assert found["greatest"] == pytest.approx(0.9433, abs=1e-4)
    assert parts.evaluation.share([True] * 5)["greatest"] == 1.0
