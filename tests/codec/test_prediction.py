"""What the text says of a cache: the fast way against the naive one, what it needs and what it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvwire.codec import BlobDecoder, KVCache, Profile, decode, encode, fit_profile, inspect
from kvwire.codec.fitting.fit import identity_profile
from kvwire.codec.fitting.moments import Features, MomentSums
from kvwire.codec.prediction import text as text_module
from kvwire.codec.prediction.text import TextPredictor, expect, expect_all
from kvwire.codec.profile import profile as profile_module
from kvwire.codec.profile.group import Expectations
from kvwire.codec.transform.analysis import gather_planes
from kvwire.codec.transform.levels import Ladder
from kvwire.errors import ArgumentError, CacheValueError, CorruptError, MismatchError

from . import surgery as cut
from .naive import expected_naive
from .synthetic import GQA, VOCABULARY, make_cache, make_hidden, make_statistics
from .write_golden import with_hidden


def expected(text, group, start, stop):
    rows, of_token = text.expected(group, start, stop)
    return rows[torch.from_numpy(of_token.astype(np.int64))].float()


def assert_expected(text, start, stop):
    """Within a rounding to bfloat16, and exactly such a number where only tokens predict."""
    for group in range(len(text.profile.groups)):
        fast, naive = expected(text, group, start, stop), expected_naive(text, group, start, stop)
        torch.testing.assert_close(fast, naive, rtol=2.0**-8, atol=1e-4)
        if text.hidden is None and text.token_ids is not None:
            assert torch.equal(fast, fast.bfloat16().float())


@pytest.fixture(scope="module")
def split_profile():
    """In several groups, one without much room."""
    return fit_profile([make_cache(300, 1)], make_statistics(words=True), group_width=40)


@pytest.mark.parametrize("room", [64 << 20, 20_000, 8_000, 1_000, 0])
def test_expectations_are_those_of_the_naive_twin_whatever_the_room(monkeypatch, split_profile, room):
    """Rows that are kept, rows that no longer fit, and no room for any."""
    monkeypatch.setattr(profile_module, "ROWS_BYTES", room)
    profile = replace(split_profile)  # no rows kept yet
    for seed in range(3):
        cache = make_cache(90, seed)
        text = TextPredictor(profile, 90, cache.token_ids)
        for start, stop in ((0, 40), (40, 90), (10, 11), (0, 90)):
            assert_expected(text, start, stop)
    kept = sum(each._cached_rows.nbytes + each._slots.nbytes for each in profile.expectations)
    assert kept <= room


def tokens_with_rows(profile):
    return [sorted(np.flatnonzero(each._slots >= 0).tolist()) for each in profile.expectations]


def test_a_text_is_expected_once(split_profile):
    profile, ids = replace(split_profile), make_cache(300, 1).token_ids
    steps = list(expect(profile, ids))
    assert len(steps) > len(profile.groups)  # some at a time
    assert tokens_with_rows(profile) == [sorted(set(ids))] * len(profile.groups)
    assert not list(expect(profile, ids))
    found, wanted = TextPredictor(profile, 300, ids), TextPredictor(replace(split_profile), 300, ids)
    for group in range(len(profile.groups)):
        assert torch.equal(expected(found, group, 0, 300), expected(wanted, group, 0, 300))


def test_what_stands_first_is_expected_first(split_profile):
    profile, ids = replace(split_profile), [*range(VOCABULARY - 1, -1, -1)]
    steps = expect(profile, ids)
    for _ in profile.groups:
        next(steps)
    assert tokens_with_rows(profile) == [list(range(VOCABULARY - 32, VOCABULARY))] * len(profile.groups)


def test_no_more_is_expected_than_there_is_room_for(monkeypatch, split_profile):
    monkeypatch.setattr(profile_module, "ROWS_BYTES", 20_000)
    profile = replace(split_profile)
    list(expect(profile, range(VOCABULARY)))
    assert any(0 < len(each) < VOCABULARY for each in tokens_with_rows(profile))
    assert all(each._used == len(each._cached_rows) or not len(each._slots) for each in profile.expectations)
    assert not list(expect(profile, range(VOCABULARY)))
    assert not list(expect(profile, [-1, VOCABULARY]))


def test_a_whole_vocabulary_is_expected_where_there_is_room(monkeypatch, split_profile):
    profile = replace(split_profile)
    list(expect_all(profile))
    assert tokens_with_rows(profile) == [list(range(VOCABULARY))] * len(profile.groups)
    monkeypatch.setattr(text_module, "ROWS_BYTES", 20_000)
    assert not list(expect_all(replace(split_profile)))
    assert not list(expect_all(replace(split_profile, table=None)))


@settings(max_examples=20)
@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=60), st.data())
def test_any_text_is_expected_as_the_naive_twin_says(split_profile, ids, data):
    start = data.draw(st.integers(0, len(ids) - 1))
    assert_expected(
        TextPredictor(split_profile, len(ids), tuple(ids)), start, data.draw(st.integers(start + 1, len(ids)))
    )


def test_threads_compute_at_the_same_time(monkeypatch, split_profile):
    """Each waits within the computation until the other is there as well."""
    both = threading.Barrier(2, timeout=10)
    compute = Expectations._compute

    def meet(self, token_ids):
        both.wait()
        return compute(self, token_ids)

    ids = [np.arange(0, 40), np.arange(20, 60)]
    alone = [replace(split_profile).expectations[0].rows(each) for each in ids]
    monkeypatch.setattr(Expectations, "_compute", meet)
    shared = replace(split_profile).expectations[0]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(shared.rows, ids))
    monkeypatch.undo()
    assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))
    assert_slots(shared, 60)
    assert torch.equal(shared.rows(ids[1]), alone[1])


def test_kept_rows_are_those_that_would_be_copied_together(split_profile):
    ids = np.array([7, 3, 7, 50, 3])
    expectations = replace(split_profile).expectations[0]
    rows, of_token = expectations.cached(ids)
    assert rows.data_ptr() == expectations.cached(ids[:1])[0].data_ptr()
    assert torch.equal(rows[torch.from_numpy(of_token.astype(np.int64))].float(), expectations.rows(ids))


def test_rows_without_a_place_are_not_shown(split_profile):
    group, table = split_profile.groups[0], split_profile.table
    one = Expectations(group, table, 4 * len(table) + 2 * group.width)
    assert one.cached(np.array([7, 3])) is None
    (first,) = (token for token in (7, 3) if one.cached(np.array([token])) is not None)
    rows, of_token = one.cached(np.array([first, first]))
    assert torch.equal(
        rows[torch.from_numpy(of_token.astype(np.int64))].float(), one.rows(np.array([first])).repeat(2, 1)
    )
    assert Expectations(group, table, 0).cached(np.array([7])) is None


def assert_slots(expectations, most):
    """Every kept row has one token, every token one row at most, and that row is the token's."""
    tokens = np.flatnonzero(expectations._slots >= 0)
    assert sorted(expectations._slots[tokens]) == list(range(expectations._used))
    assert len(tokens) == expectations._used <= min(most, len(expectations._cached_rows))
    rows = expectations._cached_rows[torch.from_numpy(expectations._slots[tokens])]
    assert torch.equal(rows, expectations._compute(tokens))


@settings(max_examples=20)
@given(
    st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), min_size=2, max_size=6),
    st.sampled_from([64 << 20, 4 * VOCABULARY + 8_000, 4 * VOCABULARY + 1]),
)
def test_texts_expected_by_threads_are_those_of_the_naive_twin(split_profile, texts, room):
    profile = replace(split_profile)
    group, table = profile.groups[1], profile.table
    profile.__dict__["expectations"] = tuple(Expectations(group, table, room) for group in profile.groups)
    predictors = [TextPredictor(profile, len(ids), tuple(ids)) for ids in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: expected(text, 1, 0, len(text.token_ids)), predictors))
    for text, rows in zip(predictors, found, strict=True):
        naive = expected_naive(text, 1, 0, len(text.token_ids))
        torch.testing.assert_close(rows, naive, rtol=2.0**-8, atol=1e-4)
        assert rows.shape == (len(text.token_ids), group.width)
    assert_slots(profile.expectations[1], VOCABULARY)


def test_hidden_states_add_to_what_the_tokens_say(profile, head_profile):
    cache = make_cache(50, 3)
    hidden = make_hidden(cache)
    for used in (head_profile, with_hidden(profile, hidden.shape[1])):
        text = TextPredictor(used, 50, cache.token_ids, hidden)
        for group in range(len(used.groups)):
            torch.testing.assert_close(
                expected(text, group, 7, 50), expected_naive(text, group, 7, 50), rtol=2.0**-8, atol=0.02
            )


def test_without_predictor_the_mean_is_expected(plain_profile):
    text = TextPredictor(plain_profile, 9, None)
    rows, of_token = text.expected(0, 2, 9)
    assert rows.shape == (1, plain_profile.groups[0].width)
    assert not of_token.any()
    assert torch.equal(expected_naive(text, 0, 2, 9), rows.repeat(7, 1))


def test_coding_with_both_kinds_of_features(profile):
    cache = make_cache(70, 3)
    hidden = make_hidden(cache)
    both = Profile.from_bytes(with_hidden(profile, hidden.shape[1]).data)
    blob = encode(cache, both, hidden=hidden)
    assert inspect(blob).prefix_layers == 1
    assert inspect(blob).levels[0].predicted_kl == pytest.approx(0.25 * inspect(blob).levels[0].measured_error ** 1.5)
    decoded = decode(blob, None, both, hidden=hidden)
    assert max(float((a - b).abs().max()) for a, b in zip(cache.keys, decoded.keys, strict=True)) < 0.5


# What it needs


def test_a_profile_that_predicts_needs_the_text(profile):
    for cache in (make_cache(30, ids=False), replace(make_cache(30), token_ids=(1, 2))):
        with pytest.raises(ArgumentError, match="pass a cache with token_ids"):
            encode(cache, profile)
    assert fit_profile([make_cache(64, ids=False)], make_statistics(words=True)).table is None
    assert fit_profile([make_cache(64), make_cache(64, ids=False)], make_statistics(words=True)).table is None
    assert fit_profile([make_cache(300)], make_statistics(words=True), text=False).table is None
    assert fit_profile([make_cache(300)], make_statistics()).table is None
    assert fit_profile([make_cache(300)], make_statistics(words=True)).table is not None


def test_tokens_beyond_the_table_are_of_another_model(profile, plain_profile):
    cache = make_cache(30)
    stranger = replace(cache, token_ids=(VOCABULARY, *cache.token_ids[1:]))
    with pytest.raises(MismatchError, match=f"token id {VOCABULARY} is not in"):
        encode(stranger, profile)
    with pytest.raises(ArgumentError, match="beyond the 400"):
        fit_profile([stranger], make_statistics(words=True))
    blob = encode(stranger, plain_profile)  # whose header shall name the predicting profile
    other = cut.with_metadata(blob, cut.metadata(blob) | {"profile": profile.digest})
    with pytest.raises(MismatchError, match="is not in the profile's vocabulary"):
        decode(other, None, profile)


def test_text_that_explains_nothing_is_left_out():
    """Words whose features are of another document's tokens."""
    cache = make_cache(512, 1)
    ids = np.random.default_rng(1).permutation(cache.token_ids).tolist()
    noise = KVCache.from_tensors(cache.keys, cache.values, cache.meta, ids)
    assert fit_profile([noise], make_statistics(words=True)).table is None


def test_hidden_states_are_checked(head_profile):
    cache = make_cache(40, 3)
    hidden = make_hidden(cache)
    blob = encode(cache, head_profile, hidden=hidden)
    assert inspect(blob).prefix_layers == 2
    assert decode(blob, None, head_profile, hidden=hidden.double()).tokens == 40
    for wrong in (None, hidden[:-1], hidden[:, :-1], hidden[None]):
        with pytest.raises(ArgumentError, match=r"hidden=engine\.prefix_states"):
            encode(cache, head_profile, hidden=wrong)
        for read in (decode, BlobDecoder):
            with pytest.raises(ArgumentError, match=r"hidden=engine\.prefix_states"):
                read(blob, profile=head_profile, hidden=wrong)
    other = cut.with_metadata(blob, cut.metadata(blob) | {"head_start": 3})
    with pytest.raises(CorruptError, match="other prefix layers"):
        decode(other, None, head_profile, hidden=hidden)
    hidden = hidden.clone()
    hidden[3, 1] = torch.nan
    with pytest.raises(CacheValueError, match="NaN or infinity"):
        encode(cache, head_profile, hidden=hidden)


def test_fitting_checks_hidden_states():
    cache = make_cache(64)
    hidden = make_hidden(cache)
    for wrong in ({"prefix_layers": 1}, {"hidden": [hidden]}):
        with pytest.raises(ArgumentError, match="both or neither"):
            fit_profile([cache], **wrong)
    for wrong in ([hidden[:-1]], [hidden, hidden], []):
        with pytest.raises(ArgumentError, match="one"):
            fit_profile([cache], prefix_layers=1, hidden=wrong)


# Moments


@pytest.mark.parametrize("interrupted", [None, 0, 1, 2])
@pytest.mark.parametrize("hidden", [False, True])
def test_moments_gathered_in_parts_are_those_of_everything(monkeypatch, hidden, interrupted):
    """But for first tokens of texts, which may be attention sinks."""
    from kvwire.codec.fitting import moments

    monkeypatch.setattr(moments, "_CHUNK", 37)
    caches = [make_cache(tokens, seed, scale=3.0) for tokens, seed in ((100, 1), (1, 2), (74, 3))]
    states = [make_hidden(cache) for cache in caches] if hidden else None
    features = Features(caches, make_statistics(words=True).token_features, states)
    planes = (("key", 1), ("value", 2))
    sums = MomentSums([planes], features, moments.trials_of_a_part([cache.tokens for cache in caches]))
    for number, cache in enumerate(caches):
        if number == interrupted:  # what was summed goes on elsewhere
            kept, sums = sums.arrays(), MomentSums([planes], features, moments.trials_of_a_part([100, 1, 74]))
            sums.resume(kept)
        sums.add(cache)
    seen, (got,) = sums.finish()
    spans = [(cache, min(1, cache.tokens - 1), cache.tokens) for cache in caches]
    x = torch.cat([gather_planes(cache, planes, *span) for cache, *span in spans]).double()
    f = torch.cat([features.at(cache, n, *span) for n, (cache, *span) in enumerate(spans)]).double()
    apart = torch.cat([features.held_out(cache, *span) for cache, *span in spans])
    near = {"rtol": 1e-5, "atol": 1e-5}
    f0, x0 = f - f.mean(0), x - x.mean(0)
    torch.testing.assert_close(seen.mean, f.mean(0), **near)
    torch.testing.assert_close(seen.covariance, f0.T @ f0 / 173, **near)
    torch.testing.assert_close(seen.apart, f0[apart].T @ f0[apart], rtol=1e-4, atol=1e-4)
    assert seen.tokens == 173
    assert 0 < len(seen.trials) == len(got.trials) <= int(apart.sum())
    assert all((f0[apart].float() - row).abs().amax(1).min() < 1e-4 for row in seen.trials)
    assert all((x0[apart].float() - row).abs().amax(1).min() < 1e-3 for row in got.trials)
    torch.testing.assert_close(got.mean, x.mean(0), **near)
    torch.testing.assert_close(got.covariance, x0.T @ x0 / 173, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.cross, f0.T @ x0 / 173, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.apart, f0[apart].T @ x0[apart], rtol=1e-4, atol=1e-3)


def test_the_identity_expects_means():
    cache = make_cache(30, layers=GQA[:1])
    inside = identity_profile(cache, Ladder())
    assert inside.table is None
    assert torch.equal(
        expected(TextPredictor(inside, 30, None), 1, 0, 30), torch.from_numpy(inside.groups[1].mean).repeat(30, 1)
    )
