"""The unit of a profile's coefficients, moved so that default levels are as good as they should be."""

from dataclasses import replace

import numpy as np
import pytest

from kvwire.codec import ERROR_NOTE, Profile, decode, encode, fit_profile, inspect
from kvwire.codec.fitting.fit import RANK_CUT
from kvwire.codec.fitting.ladder import COARSEST_KL, FINEST_KL, errors_of, moved_by, with_unit

from .synthetic import DEEP, make_cache, make_statistics, with_sinks


@pytest.fixture(scope="module")
def profile():
    made = fit_profile([make_cache(300, seed) for seed in range(3)], make_statistics(words=True))
    levels = inspect(encode(make_cache(200, 9), made)).levels
    notes = {ERROR_NOTE + level.name: level.measured_error for level in levels}
    return replace(made, error_to_kl=(0.02, 1.1), notes=made.notes | notes)


def errors(profile):
    return [level.measured_error for level in inspect(encode(make_cache(200, 9), profile)).levels]


@pytest.mark.parametrize("levels", [1, -1])
def test_six_classes_are_one_level(profile, levels):
    moved = moved_by(profile, 6 * levels, RANK_CUT)
    cache = make_cache(200, 9)
    own, other = (0, 1) if levels > 0 else (1, 0)
    blobs = encode(cache, moved), encode(cache, profile)
    near = [decode(blob, level, made) for blob, level, made in zip(blobs, (own, other), (moved, profile), strict=True)]
    for ours, theirs in zip((*near[0].keys, *near[0].values), (*near[1].keys, *near[1].values), strict=True):
        assert (ours - theirs).square().mean() < 2e-3 * theirs.square().mean()  # ties, and rounded rows
    assert errors(moved)[own] == pytest.approx(9.0**levels * errors(profile)[other], rel=0.05)


@pytest.mark.parametrize("kl", [0.03, 0.05, 0.3, 3.0])
def test_the_coarsest_level_is_still_an_answer(profile, kl):
    """Whatever errors mean on the model: predictions and noted errors are those of the new unit."""
    known = errors_of(profile)
    made = with_unit(replace(profile, error_to_kl=(kl / known[0] ** 1.5, 1.5)), known, RANK_CUT)
    levels = inspect(encode(make_cache(200, 9), made)).levels
    assert levels[0].predicted_kl == pytest.approx(COARSEST_KL, rel=0.35)
    assert levels[-1].predicted_kl < FINEST_KL
    assert errors_of(made)[0] == pytest.approx(levels[0].measured_error, rel=0.35)


def test_the_finest_level_is_as_good_as_exact(profile):
    """Where the text alone nearly suffices, the coarsest level is better than it has to be."""
    known = errors_of(profile)
    made = with_unit(replace(profile, error_to_kl=(0.004 / known[0] ** 0.4, 0.4)), known, RANK_CUT)
    levels = inspect(encode(make_cache(200, 9), made)).levels
    assert levels[0].predicted_kl < COARSEST_KL / 2
    assert levels[-1].predicted_kl == pytest.approx(FINEST_KL, rel=0.35)


def test_coarser_levels_need_fewer_rows(profile):
    moved = moved_by(profile, -9, RANK_CUT)
    assert moved.rank < profile.rank
    assert all(cut <= group.rank for group in moved.groups for cut in group.cuts)
    assert len(moved.data) < len(profile.data)
    read = Profile.from_bytes(moved.data)
    cache = make_cache(200, 9)
    assert encode(cache, read) == encode(cache, moved)


def test_nothing_moves_where_nothing_was_measured(profile):
    unmeasured = replace(profile, notes={})
    assert errors_of(unmeasured) == []
    for made in (with_unit(unmeasured, [], RANK_CUT), with_unit(replace(profile, error_to_kl=None), [1.0], RANK_CUT)):
        for ours, theirs in zip(made.groups, profile.groups, strict=True):
            assert np.array_equal(ours.spread, theirs.spread[: ours.rank])
            assert np.array_equal(ours.rows.float().numpy(), theirs.rows[: ours.rank].float().numpy())


def test_sinks_move_with_the_unit():
    """They stay finer than the finest level, whatever that is."""
    caches = [with_sinks(make_cache(300, seed, layers=DEEP), seed=seed) for seed in range(3)]
    made = fit_profile(caches, make_statistics(DEEP, words=True), group_width=64)
    assert made.has_sinks
    for classes in (-6, 9):
        moved = moved_by(made, classes, RANK_CUT)
        for ours, theirs in zip(moved.groups, made.groups, strict=True):
            np.testing.assert_allclose(ours.sink_steps, theirs.sink_steps / 3 ** (classes / 6), rtol=1e-5)
            assert np.array_equal(ours.sink, theirs.sink)


def test_a_unit_is_no_finer_than_there_are_rows_for(profile):
    made = with_unit(replace(profile, error_to_kl=(1e6, 1.0)), errors_of(profile), RANK_CUT)
    moved = [int(new.spread[0]) - int(old.spread[0]) for new, old in zip(made.groups, profile.groups, strict=True)]
    assert set(moved) == {12}
