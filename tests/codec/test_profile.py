"""Profiles: fitting, what it gains, storage, and which caches one fits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvwire.codec import KVCache, Ladder, Profile, decode, encode, fit_profile, inspect, positions_off, trial_blob
from kvwire.codec.backend import planes_of
from kvwire.codec.fitting.fit import group_planes, identity_profile
from kvwire.codec.fitting.moments import Features, MomentSums
from kvwire.errors import ArgumentError, CacheValueError, CorruptError, MismatchError
from kvwire.types import LayerSpec

from . import surgery as cut
from .synthetic import GQA, MIXED, MIXED_ROPES, in_8_bits, make_cache, make_hidden, make_statistics


def weighted_error(cache, decoded, statistics):
    """Mean over layers and sides of the weighted squared error over the weighted energy."""
    shares = []
    before, after = positions_off(cache), positions_off(decoded)
    for layer in range(len(GQA)):
        metrics = (statistics.query_metric[layer], statistics.value_metric[layer])
        sides = ((before.keys, after.keys), (before.values, after.values))
        for metric, (was, now) in zip(metrics, sides, strict=True):
            error = was[layer] - now[layer]
            centred = was[layer] - was[layer].mean(1, keepdim=True)
            shares.append(
                float(torch.einsum("htd,hde,hte->", error, metric, error))
                / float(torch.einsum("htd,hde,hte->", centred, metric, centred))
            )
    return sum(shares) / len(shares)


def bits_at(cache, profile, statistics, target, hidden=None):
    """Bits per element at a weighted error, between the levels around it."""
    ladder = Ladder(3.0, tuple("abcde"))
    blob = encode(cache, profile, ladder, hidden=hidden)
    bits = [8 * (level.cumulative_bytes - inspect(blob).header_bytes) for level in inspect(blob).levels]
    decoded = [decode(blob, level, profile, hidden=hidden) for level in range(5)]
    errors = [weighted_error(cache, each, statistics) for each in decoded]
    assert errors == sorted(errors, reverse=True)
    return float(np.interp(-np.log(target), -np.log(errors), bits))


def test_each_thing_known_of_a_model_saves_bits(plain_profile, profile, head_profile):
    """On text that no profile has seen: metrics, then what the tokens say, then what two layers make of them."""
    cache, statistics = make_cache(600, 5), make_statistics()
    unweighted = fit_profile([make_cache(512, seed) for seed in (1, 2)])
    nothing, caches, metrics, text = (
        bits_at(cache, used, statistics, 0.01) for used in (None, unweighted, plain_profile, profile)
    )
    assert caches < 0.5 * nothing
    assert metrics < 0.99 * caches
    assert text < 0.85 * metrics
    assert bits_at(cache, head_profile, statistics, 0.01, make_hidden(cache)) < 0.7 * metrics


def test_a_profile_survives_storage(profile, head_profile, plain_profile):
    few = fit_profile([make_cache(128)], make_statistics(words=True))
    calibrated = replace(profile, error_to_kl=(0.5, 1.25))
    for made in (profile, head_profile, plain_profile, few, calibrated, identity_profile(make_cache(20), Ladder())):
        again = Profile.from_bytes(made.data)
        assert again.data == made.data
        assert again.digest == made.digest
        for name in ("layers", "notes", "rank", "prefix_layers", "hidden_size", "error_to_kl", "token_features"):
            assert getattr(again, name) == getattr(made, name)
        assert (made.table is None) == (again.table is None)
        assert made.table is None or np.array_equal(made.table, again.table)
        for ours, theirs in zip(made.groups, again.groups, strict=True):
            assert ours.planes == theirs.planes
            for name in ("rows", "predictor", "synthesis", "analysis"):
                mine, other = getattr(ours, name), getattr(theirs, name)
                assert (mine is None and other is None) or torch.equal(mine, other)
                assert mine is None or mine.stride() == other.stride()  # products of other layouts are slow
            assert np.array_equal(ours.mean, theirs.mean)
            assert np.array_equal(ours.spread, theirs.spread)
        assert replace(again).digest == made.digest  # stored anew, not as read


@pytest.mark.parametrize("heads_differ", [False, True])
def test_what_was_pruned_teaches_nothing(heads_differ):
    """Naive: moments of a cache that holds what is left and nothing else, positions off."""
    whole, statistics = make_cache(200, 3), make_statistics(words=True)
    kept = torch.rand(200, generator=torch.Generator().manual_seed(1)) < 0.3
    masks = [kept.expand(spec.kv_heads, -1).clone() for spec in whole.meta.layers]
    if heads_differ:
        masks[0][0, kept.nonzero()[0]] = False  # still there in other heads
    pruned = KVCache.from_tensors(whole.keys, whole.values, whole.meta, whole.token_ids, kept=masks)
    plain = positions_off(pruned)
    ids = [token for token, is_left in zip(whole.token_ids, kept.tolist(), strict=True) if is_left]
    keys, values = ([each[:, kept] for each in side] for side in (plain.keys, plain.values))
    left = KVCache.from_tensors(keys, values, replace(plain.meta, offset=1), ids)  # whose first token is no text's
    planes = group_planes(whole.meta.layers, 64)
    table = statistics.token_features
    found, wanted = (MomentSums(planes, Features([each], table, None), 64) for each in (pruned, left))
    found.add(pruned)
    wanted.add(left)
    ours, theirs = found.arrays(), wanted.arrays()
    assert ours.keys() == theirs.keys()
    assert ours["tokens"] == int(kept.sum())
    for name, array in ours.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-4, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("left", [0, 1, 20])
def test_a_cache_that_is_its_own_profile_knows_no_zeros_of_what_was_pruned(left):
    """Naive: a cache that holds what is left and nothing else, positions off."""
    whole, kept = make_cache(76, 3), torch.arange(76) >= 76 - left
    masks = [kept.expand(spec.kv_heads, -1) for spec in whole.meta.layers]
    keys, values = ([each * kept[:, None] for each in side] for side in (whole.keys, whole.values))
    pruned = KVCache.from_tensors(keys, values, whole.meta, whole.token_ids, kept=masks)
    plain, some = positions_off(pruned), kept if left else ~kept
    keys, values = ([each[:, some] for each in side] for side in (plain.keys, plain.values))
    naive = identity_profile(KVCache.from_tensors(keys, values, plain.meta), Ladder())
    for ours, theirs in zip(identity_profile(pruned, Ladder()).groups, naive.groups, strict=True):
        np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(ours.scales, theirs.scales, rtol=1e-5)
        assert np.array_equal(ours.spread, theirs.spread)
    decoded = decode(encode(pruned, None, Ladder()))
    assert all(not tensor[:, ~kept].any() for tensor in (*decoded.keys, *decoded.values))


@pytest.mark.parametrize("left", [0, 1, 2])
def test_one_token_that_is_left_of_many_says_nothing(left):
    whole = make_cache(80, 3)
    masks = [(torch.arange(80) < left).expand(spec.kv_heads, -1) for spec in whole.meta.layers]
    pruned = KVCache.from_tensors(whole.keys, whole.values, whole.meta, whole.token_ids, kept=masks)
    assert (fit_profile([pruned], make_statistics(words=True)) is None) == (left < 2)


def test_fitting_twice_gives_the_same_profile():
    caches, statistics = [make_cache(128, 1)], make_statistics(words=True)
    assert fit_profile(caches, statistics).digest == fit_profile(caches, statistics).digest


def test_directions_that_attention_ignores_stay_bounded_and_a_dependent_basis_is_refused(profile):
    cache = make_cache(76, 3)
    fine = decode(encode(cache, profile, Ladder(0.004, ("x",))), None, profile)
    assert max(float((a - b).abs().max()) for a, b in zip(cache.values, fine.values, strict=True)) < 0.3
    rows = profile.groups[0].rows.clone()
    rows[1] = 0
    broken = replace(profile, groups=(replace(profile.groups[0], rows=rows), *profile.groups[1:]))
    with pytest.raises(CorruptError, match="not independent"):
        encode(cache, broken)


def test_what_nothing_is_fitted_on():
    assert fit_profile() is None
    assert fit_profile([], make_statistics()) is None
    for wrong in ({"group_width": 0}, {"rank_cut": 1.0}, {"rank_cut": -0.1}):
        with pytest.raises(ArgumentError):
            fit_profile([make_cache(16)], **wrong)
    with pytest.raises(MismatchError, match="one model"):
        fit_profile([make_cache(16), make_cache(16, revision="r2")])
    with pytest.raises(CacheValueError, match="too large"):
        fit_profile([make_cache(16, scale=1e25)])


@pytest.mark.parametrize(("width", "groups"), [(1, 8), (31, 8), (32, 4), (70, 2), (96, 2), (10_000, 1)])
def test_groups_span_as_many_layers_as_fit(width, groups):
    fitted = fit_profile([make_cache(64)], group_width=width, rank_cut=0)
    assert len(fitted.groups) == groups
    assert sorted(plane for group in fitted.groups for plane in group.planes) == planes_of(GQA)
    assert all(list(group.planes) == sorted(group.planes) for group in fitted.groups)
    assert fitted.rank == 128
    assert inspect(encode(make_cache(20, 1), fitted)).levels[-1].measured_error < 0.01


def test_wide_layers_have_their_keys_and_values_apart():
    layers = (LayerSpec(1, 4, 4), LayerSpec(1, 60, 50), LayerSpec(1, 4, 4), LayerSpec(0, 0, 0, "none"))
    layers += (LayerSpec(1, 2, 2),)
    assert group_planes(layers, 64) == [
        (("key", 0), ("value", 0)),
        (("key", 1),),
        (("key", 2), ("key", 4), ("value", 1), ("value", 2), ("value", 4)),
    ]


def test_statistics_may_lack_layers_and_are_refused_in_another_shape():
    whole = make_statistics()
    queries, metrics = whole.query_metric, whole.value_metric
    partial = replace(whole, query_metric=(None, *queries[1:]), value_metric=(*metrics[:-1], None))
    fitted = fit_profile([make_cache(256, 1)], partial)
    assert inspect(encode(make_cache(64, 3), fitted)).levels[-1].measured_error < 0.01
    for broken in (
        {"query_metric": queries[:-1]},
        {"query_metric": (torch.ones(2, 9, 9), *queries[1:])},
        {"query_metric": (torch.ones(2, 8), *queries[1:])},
        {"value_metric": (torch.full((2, 8, 8), torch.nan), *metrics[1:])},
    ):
        with pytest.raises(ArgumentError):
            fit_profile([make_cache(16)], replace(whole, **broken))


def test_models_with_odd_layers_are_fitted():
    caches = [make_cache(200, seed, layers=MIXED, ropes=MIXED_ROPES) for seed in (1, 2)]
    fitted = Profile.from_bytes(fit_profile(caches, make_statistics(MIXED, MIXED_ROPES, words=True)).data)
    assert fitted.table is not None
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


def test_a_profile_of_another_model_or_layout_is_refused(profile):
    with pytest.raises(MismatchError, match="belongs to model"):
        encode(make_cache(8, revision="r2"), profile)
    with pytest.raises(MismatchError, match="layout"):
        encode(make_cache(8, layers=MIXED, ropes=MIXED_ROPES), profile)
    encode(make_cache(8, revision=""), profile)


@pytest.mark.parametrize(("scale", "is_narrow"), [(1.0, True), (1e6, False)])
def test_means_of_a_profile_inside_are_float16_where_that_holds_them(scale, is_narrow):
    inside = identity_profile(make_cache(256, scale=scale), Ladder())
    assert len(inside.data) < 6000
    for ours, theirs in zip(inside.groups, Profile.from_bytes(inside.data).groups, strict=True):
        assert np.array_equal(ours.mean, theirs.mean)
        assert (np.abs(ours.mean).max() < 65504) == is_narrow
        assert not is_narrow or np.array_equal(ours.mean, ours.mean.astype(np.float16))


def test_rows_of_8_bits_are_stored_as_such_and_exactly():
    fitted = in_8_bits(fit_profile([make_cache(128)]))
    (group,) = fitted.groups
    stored = cut.profile_metadata(fitted.data)["arrays"]
    assert ["g0.rows", "|i1", [group.rank, group.width]] in [row[:3] for row in stored]
    assert ["g0.row_exponent", "<i2", [group.rank]] in [row[:3] for row in stored]
    assert torch.equal(Profile.from_bytes(fitted.data).groups[0].rows, group.rows)
    largest = group.rows.float().abs().amax(1)
    step = torch.ldexp(torch.ones(group.rank), torch.frexp(largest)[1] - 7)
    whole = group.rows.float() / step[:, None]
    assert torch.equal(whole, whole.round())
    assert int(whole.abs().max()) <= 127


def test_rows_that_are_nearly_orthonormal_are_solved_in_float32_as_well_as_in_float64(packed_profile, monkeypatch):
    from kvwire.codec.profile import group as groups

    for group in packed_profile.groups:
        metric = tuple(map(torch.from_numpy, group.metric))
        quick = groups.solve(group.synthesis, metric)
        exact = groups.solve_precisely(group.synthesis, metric)
        assert float((quick - exact).norm() / exact.norm()) < 1e-5
    dependent = group.synthesis.clone()
    dependent[-1] = dependent[0] * (1 + 1e-4) + dependent[-1] * 1e-3
    called = []
    monkeypatch.setattr(groups, "solve_precisely", lambda *given: called.append(given) or quick)
    groups.solve(dependent, metric)
    assert called, "rows that are nearly dependent take float64"


@pytest.mark.parametrize("share", [1e-3, 1e-4, 3e-5])
def test_rows_that_are_all_but_dependent_are_solved(packed_profile, share):
    """A fit on fewer tokens than directions rounds most rows so coarsely that some nearly depend on others."""
    from kvwire.codec.profile import group as groups

    group = packed_profile.groups[0]
    metric = tuple(map(torch.from_numpy, group.metric))
    synthesis = group.synthesis.clone()
    synthesis[-1] = synthesis[0] + share * synthesis[-1]
    analysis = groups.solve(synthesis, metric)
    unit = synthesis.double() @ analysis.double()
    assert float((unit - torch.eye(len(unit))).abs().max()) < 1e-2


def test_a_trial_blob_decodes_and_is_as_large_as_real_ones(packed_profile):
    cache = make_cache(256, 7)
    real, trial = inspect(encode(cache, packed_profile)), inspect(trial_blob(cache, packed_profile))
    assert (trial.tokens, trial.chunks, trial.profile_digest) == (256, 1, packed_profile.digest)
    for ours, theirs in zip(trial.levels, real.levels, strict=True):
        assert 0.5 < ours.cumulative_bytes / theirs.cumulative_bytes < 2
    assert decode(trial_blob(cache, packed_profile), 4, packed_profile).tokens == 256
    assert inspect(trial_blob(cache)).profile_digest == ""
