"""How planes compare in a fit."""

from __future__ import annotations

import pytest
import torch

from kvwire.codec.backend import plane_width, planes_of
from kvwire.codec.fitting.metric import plane_weights
from kvwire.codec.fitting.moments import Moments
from kvwire.codec.fitting.statistics import Statistics
from kvwire.errors import ArgumentError

from .synthetic import GQA

PLANES = planes_of(GQA)


def weights(fisher):
    """Of elements that all scatter by 1, each plane by itself."""
    empty = torch.empty(0)
    moments = [
        Moments(torch.zeros(width, dtype=torch.float64), torch.eye(width, dtype=torch.float64), *[empty] * 3)
        for width in (plane_width(GQA, plane) for plane in PLANES)
    ]
    none = (None,) * len(GQA)
    return plane_weights(GQA, Statistics(none, none, fisher=fisher), [(plane,) for plane in PLANES], moments)


def fisher_of(energies):
    """Information that gives each element of a plane that energy."""
    found = {}
    for (side, layer), energy in energies.items():
        spec = GQA[layer]
        dim = spec.key_dim if side == "key" else spec.value_dim
        found[side, layer] = energy * torch.eye(dim).repeat(spec.kv_heads, 1, 1)
    return found


def test_all_planes_weigh_alike_without_gradients():
    assert weights({}) == {}
    assert plane_weights(GQA, None, [], []) == {}
    assert weights(fisher_of(dict.fromkeys(PLANES, 3.0))) == pytest.approx(dict.fromkeys(PLANES, 1.0))


def test_what_was_never_needed_counts_a_little_and_what_is_not_known_as_average():
    fisher = fisher_of(dict.fromkeys(PLANES, 1.0) | {PLANES[1]: 1e-12, PLANES[2]: 0.0})
    del fisher[PLANES[3]]
    found = weights(fisher)
    assert found[PLANES[1]] == 1e-3
    assert set(PLANES) - set(found) == {PLANES[2], PLANES[3]}


def test_information_that_does_not_fit_is_refused():
    fisher = fisher_of(dict.fromkeys(PLANES, 1.0))
    for wrong in (torch.ones(1, 2, 2), fisher[PLANES[0]] * torch.nan):
        with pytest.raises(ArgumentError, match="measure them again"):
            weights(fisher | {PLANES[0]: wrong})
