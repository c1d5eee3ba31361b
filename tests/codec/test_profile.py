"""Profiles: fitting, what it gains, storage, and which caches one fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.codec import Ladder, Profile, decode, encode, fit_profile, inspect, positions_off
from kvwire.codec.fit import identity_profile
from kvwire.codec.segment import ChunkState
from kvwire.errors import ArgumentError, CacheValueError, CorruptError, MismatchError

from .synthetic import GQA, MIXED, MIXED_ROPES, make_cache, make_statistics


def weighted_error(cache, decoded, statistics):
    """Mean over layers and sides of the weighted squared error over the weighted energy."""
    shares = []
    before, after = positions_off(cache), positions_off(decoded)
    for layer in range(len(GQA)):
        metrics = (torch.diag_embed(statistics.query_energy[layer]), statistics.value_metric[layer])
        sides = ((before.keys, after.keys), (before.values, after.values))
        for metric, (was, now) in zip(metrics, sides, strict=True):
            error = was[layer] - now[layer]
            centred = was[layer] - was[layer].mean(1, keepdim=True)
            shares.append(
                float(torch.einsum("htd,hde,hte->", error, metric, error))
                / float(torch.einsum("htd,hde,hte->", centred, metric, centred))
            )
    return sum(shares) / len(shares)


def bits_at(cache, profile, statistics, target):
    """Bits per element at a weighted error, between the levels around it."""
    ladder = Ladder(3.0, tuple("abcde"))
    blob = encode(cache, profile, ladder)
    bits = [8 * (level.cumulative_bytes - inspect(blob).head_bytes) for level in inspect(blob).levels]
    decoded = [decode(blob, level, profile) for level in range(5)]
    errors = [weighted_error(cache, each, statistics) for each in decoded]
    assert errors == sorted(errors, reverse=True)
    return float(np.interp(-np.log(target), -np.log(errors), bits))


def test_each_thing_known_of_a_model_saves_bits(profile):
    cache, statistics = make_cache(600, 5), make_statistics()
    unweighted = fit_profile([make_cache(512, seed) for seed in (1, 2)])
    known = bits_at(cache, profile, statistics, 0.01)
    assert known < 0.99 * bits_at(cache, unweighted, statistics, 0.01)
    assert bits_at(cache, unweighted, statistics, 0.01) < 0.5 * bits_at(cache, None, statistics, 0.01)


def test_a_profile_survives_storage(profile):
    again = Profile.from_bytes(profile.data)
    assert again.data == profile.data
    assert again.digest == profile.digest
    assert (again.layers, again.notes, again.rank) == (profile.layers, profile.notes, profile.rank)
    for ours, theirs in zip(profile.groups, again.groups, strict=True):
        assert torch.equal(ours.synthesis, theirs.synthesis)
        assert torch.equal(ours.analysis, theirs.analysis)
        assert np.array_equal(ours.mean, theirs.mean)
    rebuilt = Profile(again.model_id, again.model_revision, again.layers, again.groups, again.tables, again.notes)
    assert rebuilt.digest == profile.digest


def test_fitting_twice_gives_the_same_profile():
    caches = [make_cache(128, 1)]
    assert fit_profile(caches, make_statistics()).digest == fit_profile(caches, make_statistics()).digest


def test_analysis_undoes_synthesis(profile):
    for group in profile.groups:
        assert torch.allclose(group.synthesis @ group.analysis, torch.eye(group.rank), atol=1e-3)


def test_directions_that_attention_ignores_stay_bounded_at_fine_steps(profile):
    cache = make_cache(76, 3)
    fine = decode(encode(cache, profile, Ladder(0.004, ("x",))), None, profile)
    assert max(float((a - b).abs().max()) for a, b in zip(cache.values, fine.values, strict=True)) < 0.3


def test_a_dependent_basis_is_refused_by_the_encoder(profile):
    group = profile.groups[0]
    rows = group.rows.copy()
    rows[1] = 0
    broken = replace(profile, groups=(replace(group, rows=rows), *profile.groups[1:]))
    with pytest.raises(CorruptError, match="not independent"):
        encode(make_cache(8), broken)


def test_without_caches_there_is_nothing_to_learn():
    assert fit_profile() is None
    assert fit_profile([], make_statistics()) is None


def test_impossible_settings_are_refused():
    for wrong in ({"group_width": 0}, {"rank_cut": 1.0}, {"rank_cut": -0.1}):
        with pytest.raises(ArgumentError):
            fit_profile([make_cache(16)], **wrong)


def test_caches_of_two_models_are_refused():
    with pytest.raises(MismatchError, match="one model"):
        fit_profile([make_cache(16), make_cache(16, revision="r2")])


@pytest.mark.parametrize("width", [1, 16, 10_000])
def test_groups_span_as_many_layers_as_fit(width):
    fitted = fit_profile([make_cache(64)], group_width=width, rank_cut=0)
    assert len(fitted.groups) == {1: 8, 16: 8, 10_000: 2}[width]
    assert fitted.rank == 128
    assert inspect(encode(make_cache(20, 1), fitted)).levels[-1].measured_error < 0.01


def test_statistics_may_lack_layers():
    whole = make_statistics()
    energies = (None, *whole.query_energy[1:])
    metrics = (*whole.value_metric[:-1], None)
    partial = replace(whole, query_energy=energies, value_metric=metrics)
    fitted = fit_profile([make_cache(256, 1)], partial)
    assert inspect(encode(make_cache(64, 3), fitted)).levels[-1].measured_error < 0.01


def test_statistics_of_another_shape_are_refused():
    whole = make_statistics()
    for broken in (
        replace(whole, query_energy=whole.query_energy[:-1]),
        replace(whole, query_energy=(torch.ones(2, 9), *whole.query_energy[1:])),
        replace(whole, value_metric=(torch.full((2, 8, 8), torch.nan), *whole.value_metric[1:])),
    ):
        with pytest.raises(ArgumentError):
            fit_profile([make_cache(16)], broken)


def test_models_with_odd_layers_are_fitted():
    caches = [make_cache(200, seed, layers=MIXED, ropes=MIXED_ROPES) for seed in (1, 2)]
    fitted = Profile.from_bytes(fit_profile(caches, make_statistics(MIXED)).data)
    cache = make_cache(70, 4, layers=MIXED, ropes=MIXED_ROPES)
    decoded = decode(encode(cache, fitted), None, fitted)
    for layer, spec in enumerate(MIXED):
        if spec.kind != "none":
            torch.testing.assert_close(decoded.keys[layer], cache.keys[layer], atol=0.5, rtol=0.1)


def test_a_constant_corpus_still_gives_a_profile_that_codes_anything():
    constant = make_cache(64)
    for tensor in (*constant.keys, *constant.values):
        tensor[:] = tensor[:, :1]
    constant = replace(constant, meta=replace(constant.meta, positions="off"))
    fitted = fit_profile([constant])
    info = inspect(encode(constant, fitted))
    assert info.levels[-1].bytes < 2000
    assert torch.allclose(decode(encode(constant, fitted), profile=fitted, offset=None).keys[0], constant.keys[0])


def test_caches_too_large_for_float32_are_refused():
    huge = make_cache(16, scale=1e25)
    with pytest.raises(CacheValueError, match="too large"):
        fit_profile([huge])


def test_a_profile_of_another_model_or_layout_is_refused(profile):
    with pytest.raises(MismatchError, match="belongs to model"):
        encode(make_cache(8, revision="r2"), profile)
    with pytest.raises(MismatchError, match="layout"):
        encode(make_cache(8, layers=MIXED, ropes=MIXED_ROPES), profile)
    encode(make_cache(8, revision=""), profile)


def test_the_profile_inside_a_blob_stays_small():
    cache = make_cache(256)
    inside = identity_profile(cache, Ladder())
    assert len(inside.data) < 6000
    assert all(np.array_equal(group.mean, group.mean.astype(np.float16)) for group in inside.groups)


def test_means_beyond_float16_keep_float32():
    inside = identity_profile(make_cache(64, scale=1e6), Ladder())
    again = Profile.from_bytes(inside.data)
    for ours, theirs in zip(inside.groups, again.groups, strict=True):
        assert np.array_equal(ours.mean, theirs.mean)
        assert np.abs(ours.mean).max() > 65504


def test_columns_start_closed(profile):
    state = ChunkState(3, profile.spread, profile.tables)
    assert state.columns.size == 0
    assert state.contexts().shape == (3, 0)
