"""The training loop: what learns, the same bits again, interrupted or not, and what is refused."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from kvwire.engines.transformers import TransformersEngine
from kvwire.errors import ArgumentError, CorruptError, MismatchError, StorageError
from kvwire.reuse import PLAIN, anchors, kvlink, soft_links, wrappers
from kvwire.training import (
    RECIPES,
    Mixture,
    Recipe,
    Sample,
    Samples,
    TrainableModel,
    Training,
    Turn,
    answer_loss,
    batch_of,
    divergence_loss,
    linked,
    train,
)

from ..engines.families import config_of, make_model

RECIPE = Recipe(steps=6, batch=3, learning_rate=1e-2, warm_up=2, micro_batch=2, most_tokens=64)
LINKS = Training("links", soft_links(2, 3), RECIPE, seed=3, keep_every=2)
ANCHORS = Training("anchors", anchors(2, 1), RECIPE, seed=3, keep_every=2)
WRAPPERS = Training("wrappers", wrappers(2, 1), RECIPE, is_frozen=True, seed=3)
RUNS = (LINKS, replace(LINKS, is_frozen=True), WRAPPERS, ANCHORS, replace(ANCHORS, is_frozen=True))


def fresh():
    return TransformersEngine(make_model(config_of("llama"), 5), model_id="tiny")


def mixture(seed=1, samples=9):
    made = [
        Sample(((5, 6 + each, 7), (8, 9)), (Turn((10, each), (11, 12)), Turn((13,), (14 + each,))))
        for each in range(samples)
    ]
    return Mixture({"made": Samples(made)}, {"made": 1.0}, seed)


def numbers(engine, trained):
    return {
        **{name: each.detach().clone() for name, each in engine.model.named_parameters()},
        "soft": trained.model.soft,
    }


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(each, theirs[name]) for name, each in ours.items())


@pytest.mark.parametrize("what", RUNS, ids=["all", "frozen", "wrappers", "anchors", "frozen anchors"])
def test_the_same_seed_gives_the_same_bits_interrupted_or_not(tmp_path, what):
    ends = []
    for _ in range(2):
        engine = fresh()
        trained = train(engine, mixture(), what)
        ends.append((trained.losses, numbers(engine, trained)))
    assert ends[0][0] == ends[1][0]
    assert same(ends[0][1], ends[1][1])

    class StoppedError(Exception):
        pass

    def interrupt(step, _):
        if step == 5:
            raise StoppedError

    state = tmp_path / "state.pt"
    kept = replace(what, keep_every=2)
    with pytest.raises(StoppedError):
        train(fresh(), mixture(), kept, state=state, tell=interrupt)
    engine = fresh()
    torch.manual_seed(99)
    trained = train(engine, mixture(), kept, state=state, resume=True)
    assert trained.losses == ends[0][0]
    assert same(numbers(engine, trained), ends[0][1])
    assert [path.name for path in tmp_path.iterdir()] == ["state.pt"]


@pytest.mark.parametrize("what", RUNS, ids=["all", "frozen", "wrappers", "anchors", "frozen anchors"])
def test_gradients_reach_the_embeddings_alone_where_the_model_is_frozen(what):
    engine = fresh()
    before = {name: each.detach().clone() for name, each in engine.model.named_parameters()}
    with closing(TrainableModel(engine, what.layout, is_frozen=what.is_frozen)) as model:
        first = model.soft.detach().clone()
        loss_of = answer_loss if what.method == "links" else divergence_loss
        loss_of(model, [mixture().draw()], what.layout).backward()
        used = len([token for token in set(linked(mixture().draw(), what.layout).token_ids) if token < 0])
        assert int(model.soft.grad.abs().sum(1).count_nonzero()) == used > 0
        reached = {name for name, each in engine.model.named_parameters() if each.grad is not None}
        assert reached == (set() if what.is_frozen else set(before))
    engine = fresh()
    trained = train(engine, mixture(), what)
    changed = {name for name, each in engine.model.named_parameters() if not torch.equal(each, before[name])}
    assert changed == (set() if what.is_frozen else set(before))
    assert not torch.equal(trained.model.soft, first)


def test_answers_are_learnt():
    recipe = replace(RECIPE, steps=60)
    assert train(fresh(), mixture(), replace(LINKS, recipe=recipe)).losses[-1] < 0.5


def test_wrappers_come_near_full_attention():
    recipe = replace(RECIPE, steps=60, learning_rate=3e-2)
    losses = train(fresh(), mixture(), replace(WRAPPERS, recipe=recipe)).losses
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])


def test_the_divergence_of_full_prefill_from_itself_is_none():
    engine = fresh()
    with closing(TrainableModel(engine, PLAIN, is_frozen=False)) as model:
        alone = Sample(((5, 6, 7),), (Turn((8,), (9, 10)),))
        assert float(divergence_loss(model, [alone], PLAIN).detach()) == pytest.approx(0, abs=1e-5)
        assert float(divergence_loss(model, [mixture().draw()], PLAIN).detach()) > 1e-3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_prompts_side_by_side_are_told_as_alone(attention):
    engine = fresh()
    engine.model.set_attn_implementation(attention)
    layout = soft_links(2, 3)
    samples = [mixture().draw(), Sample(((5,), (6,), (7,)), (Turn((8,), (9,)),), (1, 2))]
    with closing(TrainableModel(engine, layout, is_frozen=True)) as model, torch.no_grad():
        batch = batch_of([linked(sample, layout) for sample in samples])
        together = model.logits(batch, batch.targets >= 0)
        alone = [batch_of([linked(sample, layout)]) for sample in samples]
        apart = torch.cat([model.logits(each, each.targets >= 0) for each in alone])
    assert float((together - apart).abs().max()) < 1e-5


def test_what_cannot_be_trained():
    with pytest.raises(ArgumentError, match="stays frozen"):
        replace(WRAPPERS, is_frozen=False)
    with pytest.raises(ArgumentError, match="has no soft tokens"):
        TrainableModel(fresh(), PLAIN, is_frozen=True)
    with pytest.raises(MismatchError, match="needs token id 128255, the model's vocabulary has 96"):
        TrainableModel(fresh(), kvlink(1), is_frozen=False)
    with pytest.raises(ArgumentError, match="at least 1"):
        Recipe(steps=0)


def test_a_state_of_something_else(tmp_path):
    state = tmp_path / "state.pt"
    train(fresh(), mixture(), LINKS, state=state)
    for other, data, named in (
        (replace(LINKS, seed=4), mixture(), "seed"),
        (replace(LINKS, recipe=replace(RECIPE, steps=9)), mixture(), "recipe"),
        (replace(LINKS, layout=soft_links(1, 3)), mixture(), "layout"),
        (LINKS, mixture(samples=8), "data"),
    ):
        with pytest.raises(ArgumentError, match=f"other {named}"):
            train(fresh(), data, other, state=state, resume=True)
    state.write_bytes(state.read_bytes()[:-200])
    with pytest.raises(CorruptError, match="damaged"):
        train(fresh(), mixture(), LINKS, state=state, resume=True)
    torch.save({"other": 1}, state)
    with pytest.raises(CorruptError, match="holds no training"):
        train(fresh(), mixture(), LINKS, state=state, resume=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        train(fresh(), mixture(), LINKS, state=tmp_path / "file" / "state.pt")


def test_rates():
    paper = RECIPES["kvlink"]
    assert (paper.learning_rate, paper.betas, paper.weight_decay, paper.clip) == (5e-6, (0.9, 0.999), 0.0, 1.0)
    assert (paper.steps, paper.warm_up, paper.batch, paper.most_tokens) == (6000, 600, 64, 4096)
    rates = [paper.rate(step) for step in range(paper.steps)]
    assert max(rates) == rates[600] == 5e-6
    assert rates[:600] == sorted(rates[:600])
    assert rates[600:] == sorted(rates[600:], reverse=True)
    assert rates[-1] < 1e-10
    assert RECIPES["kv-packet"].rate(0) == 5e-4
