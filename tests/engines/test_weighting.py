"""Which weighting of errors a fit follows: what is measured for it, and what the Fisher information is."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.codec import StatisticsBuilder, fit_profile, planes_of, positions_off
from kvwire.engines import weighting
from kvwire.engines.weighting import choose_weighting

from .families import engine_of, tokens

LEVELS = np.log([[0.1, 1e-2], [0.3, 1e-3], [0.9, 1e-4], [2.7, 1e-5]])
"""Bits and divergence of a curve, by level."""


@pytest.fixture(scope="module")
def gathered():
    """An engine, texts, and their statistics before anything is chosen."""
    engine, documents = engine_of("llama"), [tokens(140, seed) for seed in range(12)]
    return engine, documents, engine.statistics(documents[:4])


def test_fisher_is_the_mean_of_squares(gathered):
    engine = gathered[0]
    builder, expected = StatisticsBuilder(engine.meta), {}
    for seed in range(2):
        ids = tokens(40, seed)
        gradients = engine.cache_gradients(engine.prefill([ids[:30]])[0], ids[30:])
        builder.add_gradients(gradients)
        off = positions_off(gradients)
        for side, layer in planes_of(engine.meta.layers):
            rows = (off.keys if side == "key" else off.values)[layer].double()
            squares = torch.einsum("htd,hte->hde", rows, rows) / 30
            expected[side, layer] = expected.get((side, layer), 0) + squares / 2
    fisher = builder.build().fisher
    assert set(fisher) == set(expected)
    assert all(torch.allclose(fisher[plane].double(), wanted, rtol=1e-5) for plane, wanted in expected.items())


def test_fisher_counts_between_planes_and_in_any_unit(gathered):
    engine, documents, statistics = gathered
    caches = engine.prefill(documents[:4])
    chosen = replace(statistics, weighting="fisher")
    profile = fit_profile(caches, chosen)
    assert profile.notes["weighting"] == "fisher"
    scaled = {plane: 2.0**20 * found for plane, found in chosen.fisher.items()}
    assert fit_profile(caches, replace(chosen, fisher=scaled)).digest == profile.digest
    louder = {plane: found * (64.0 if plane == ("key", 1) else 1.0) for plane, found in chosen.fisher.items()}

    def weight(fitted):
        """Of the key plane of layer 1, against that of layer 0."""
        heads = [torch.from_numpy(block) for group in fitted.groups for block in group.metric]
        planes = [plane for group in fitted.groups for plane in group.planes]
        energy = {plane: float(block.abs().sum()) for plane, block in zip(planes, heads, strict=True)}
        return energy["key", 1] / energy["key", 0]

    assert weight(fit_profile(caches, replace(chosen, fisher=louder))) > 32 * weight(profile)


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """The model's window has no room for longer ones."""
    monkeypatch.setattr(weighting, "_LEAST", 100)


def test_too_little_text_or_no_gradients_stay_with_the_usual(gathered):
    engine, documents, statistics = gathered
    assert choose_weighting(engine, documents[:11], statistics) == "mixed"
    assert choose_weighting(engine, documents, replace(statistics, fisher={})) == "mixed"


def test_both_are_fitted_and_measured(gathered, monkeypatch, caplog):
    """With nothing asked for, the one that measures better wins."""
    engine, documents, statistics = gathered
    with caplog.at_level(logging.INFO, "kvwire.engines"):
        assert choose_weighting(engine, documents, statistics) == "mixed"
    told = {line.split("'")[1]: float(line.split(": ")[1].split()[0]) for line in caplog.messages}
    assert told["mixed"] == 1
    assert 0.2 < told["fisher"] < 5
    seen = {}
    monkeypatch.setattr(weighting, "_best", lambda curves: seen.update(curves) or "fisher")
    assert choose_weighting(engine, documents, statistics) == "fisher"
    assert {kind: [curve.shape for curve in curves] for kind, curves in seen.items()} == {
        kind: [(4, 4), (4, 4)] for kind in ("mixed", "fisher")
    }


@pytest.mark.parametrize(
    ("in_use", "in_random_order", "best"),
    [(0.7, 0.9, "fisher"), (0.8, 0.9, "mixed"), (0.7, 1.1, "mixed"), (1.5, 0.5, "mixed")],
)
def test_only_what_is_clearly_better_and_nowhere_worse_is_chosen(in_use, in_random_order, best):
    def shifted(factor):
        return np.add(LEVELS, [math.log(factor), 0.0])

    curves = {"mixed": [LEVELS, LEVELS], "fisher": [shifted(in_use), shifted(in_random_order)]}
    assert weighting._best(curves) == best


def test_one_use_that_gets_worse_is_enough_to_stay():
    usual = np.concatenate([LEVELS, LEVELS[:, 1:]], 1)
    fewer, worse = usual - [math.log(4), 0, 0], usual - [math.log(4), 0, -math.log(100)]
    assert weighting._best({"mixed": [usual, usual], "fisher": [fewer, fewer]}) == "fisher"
    assert weighting._best({"mixed": [usual, usual], "fisher": [worse, fewer]}) == "mixed"


def test_bits_are_read_between_levels():
    finer = LEVELS - [0.0, math.log(10)]
    assert weighting._bits(finer, LEVELS, 1) == pytest.approx(1 / 3)
    halfway = LEVELS - [0.0, math.log(10) / 2]
    assert weighting._bits(halfway, LEVELS, 1) == pytest.approx(3**-0.5)
