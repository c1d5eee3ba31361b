"""Donors: sketches of texts, entries that are not trusted, and what is found of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, CorruptError, FormatVersionError
from kvwire.store import Catalog, DonorIndex, Keyring, collect, index_documents, verify_store
from kvwire.store.donors import _MIX, _MULTIPLIER, FEATURES, MOST_OF_FEATURE, SCHEME, SHINGLE, WINDOW, sketch
from kvwire.store.index_records import DonorEntry, feature_digest
from kvwire.types import digest_tokens

from ..store_wrappers import CountingStore
from .conftest import CONFIG, DAY
from .test_prefix_index import add


def sketch_naive(token_ids):
    words = [_mixed_naive(token) for token in token_ids]
    hashes = []
    for at in range(len(words) - SHINGLE + 1):
        value = 0
        for word in words[at : at + SHINGLE]:
            value = (value * _MULTIPLIER + word) % 2**64
        hashes.append(_mixed_naive(value))
    size = min(WINDOW, len(hashes))
    least = {min(hashes[at : at + size]) for at in range(len(hashes) - size + 1)} if hashes else set()
    return sorted(least)[:FEATURES]


def _mixed_naive(word):
    word = (word + _MULTIPLIER) % 2**64
    word = (word ^ (word >> 30)) * _MIX[0] % 2**64
    word = (word ^ (word >> 27)) * _MIX[1] % 2**64
    return word ^ (word >> 31)


def text(seed, tokens=400):
    return np.random.default_rng(seed).integers(0, 50_000, tokens).tolist()


def edited(ids, seed, share):
    """So large a share of the tokens replaced, in runs of three."""
    made, random = list(ids), np.random.default_rng(seed)
    for at in random.choice(len(ids) - 3, max(1, int(share * len(ids) / 3)), replace=False):
        made[at : at + 3] = random.integers(0, 50_000, 3).tolist()
    return made


def put(catalog, name, ids, writer="", **options):
    document = add(catalog, name, ids, **options)
    DonorIndex(catalog, CONFIG, writer).write(document, ids)
    return document


def names(catalog, ids, writer="", told=None):
    found = DonorIndex(catalog, CONFIG, writer).find(ids, (told if told is not None else []).append)
    return [each.document.document_id for each in found]


@given(st.lists(st.integers(0, 5), max_size=60))
def test_a_sketch_is_its_naive_twin(ids):
    assert sketch(ids) == sketch_naive(ids)


def test_texts_with_23_equal_tokens_share_a_winnowed_hash():
    run = text(0, 23)
    for seed in range(1, 40):
        assert set(sketch([*text(seed, 30), *run])) & set(sketch([*run, *text(-seed % 100 + 50, 30)]))


def test_what_is_like_a_prompt_is_found_best_first(catalog):
    ids = text(0)
    for name, share in (("near", 0.02), ("far", 0.2)):
        put(catalog, name, edited(ids, 1, share))
    put(catalog, "other", text(9))
    found = DonorIndex(catalog, CONFIG).find(ids)
    assert [each.document.document_id for each in found] == ["near", "far"]
    assert found[0].shared > found[1].shared
    assert found[0].token_ids == tuple(edited(ids, 1, 0.02))
    assert names(catalog, text(10)) == names(catalog, [1, 2, 3]) == []


def test_donors_of_half_the_prompt_are_found(catalog):
    """Against a search of all texts, at three lengths."""
    missed = 0
    for seed in range(40):
        ids = text(seed, (100, 400, 1500, 3000)[seed % 4])
        put(catalog, f"text {seed}", [*text(seed + 1000, len(ids) // 2), *ids[len(ids) // 2 :]])
        missed += names(catalog, ids)[:1] != [f"text {seed}"]
    assert missed <= 2


def test_the_same_text_is_written_once_and_others_say_which_they_are_of(catalog):
    ids = text(0)
    document = put(catalog, "a", ids)
    index = DonorIndex(catalog, CONFIG)
    assert index.add(document, ids, is_new=False) == 0
    assert index.add(document, ids) == len(sketch(ids))
    with pytest.raises(ArgumentError, match="not that of"):
        index.write(document, ids[1:])


def test_the_oldest_donor_of_a_feature_gives_way(store, catalog):
    ids = text(0, 60)
    for number in range(MOST_OF_FEATURE + 3):
        put(catalog, f"text {number}", [*ids, number])
    space = catalog.keys(CONFIG)
    feature = space.donor_entry(feature_digest(SCHEME, sketch(ids)[0]))
    assert len(list(store.scan(feature))) == MOST_OF_FEATURE


def test_a_search_takes_few_requests(catalog):
    counting = CountingStore(catalog.store)
    ids = text(0, 2000)
    for number in range(20):
        put(catalog, f"text {number}", edited(ids, number, 0.05))
    index = DonorIndex(catalog.over(counting), CONFIG)
    index.candidates(ids)
    assert (counting.tally("scan").requests, counting.tally().requests) == (8, 8)
    (first, *_) = index.find(ids)
    index.check(first)
    assert counting.tally().requests <= 8 + 24


def test_a_document_of_several_parts_is_found_by_its_name(store, catalog):
    ids = text(0)
    document = put(catalog, "grown", ids)
    store.delete(catalog.keys(CONFIG).token_entry(document.token_digest))  # as those have none
    assert names(catalog, edited(ids, 1, 0.02)) == ["grown"]


def test_namespaces_and_tenants_are_not_crossed(store, catalog):
    ids = text(0)
    put(catalog, "of all", ids)
    put(catalog, "planted", [*ids, 7], "mallory")
    put(Catalog(store, "elsewhere"), "of others", [*ids, 8])
    assert names(catalog, ids) == names(catalog, ids, "anna") == ["of all"]
    assert sorted(names(catalog, ids, "mallory")) == ["of all", "planted"]


def test_names_of_a_sealed_tenant_tell_no_text(store):
    keyring = Keyring([bytes(32)])
    sealed = Catalog(store, keyring=keyring)
    ids = text(0)
    put(sealed, "secret", ids)
    assert names(sealed, edited(ids, 1, 0.02)) == ["secret"]
    guessed = {feature_digest(SCHEME, feature) for feature in sketch(ids)}
    keys = list(store.keys(sealed.keys(CONFIG).donor_entries))
    assert len(keys) == len(sketch(ids))
    assert not any(feature in key for feature in guessed for key in keys)
    assert all(b"secret" not in store.get(key) for key in keys)
    assert names(Catalog(store, keyring=Keyring([b"\1" * 32])), ids) == []


def test_what_leads_nowhere_is_told_and_collected(store, catalog):
    ids, told = text(0), []
    put(catalog, "gone", ids)
    put(catalog, "here", [*ids, 7])
    catalog.remove(CONFIG, "gone")
    assert names(catalog, ids, told=told) == ["here"]
    assert "no document with the text" in told[0]
    space = catalog.keys(CONFIG)
    before = len(list(store.keys(space.donor_entries)))
    store.age(2 * DAY)
    assert collect(store, grace_s=DAY).entries >= len(sketch(ids))
    left = list(store.keys(space.donor_entries))
    assert len(left) == before - len(sketch(ids))
    assert not any(digest_tokens(ids) in key for key in left)


def test_rows_that_are_no_donors_are_refused(catalog):
    ids = text(0)
    put(catalog, "neutral", ids, neutral_prefix=[1, 2])
    put(catalog, "lossy", [*ids, 7], context_level=0)
    index = DonorIndex(catalog, CONFIG)
    for donor, why in zip(index.find(ids), ("behind a neutral prefix", "over lossy rows"), strict=True):
        with pytest.raises(CorruptError, match=why):
            index.check(donor)


def test_an_entry_of_another_text_leads_to_that_text_alone(store, catalog):
    ids, told = text(0), []
    document = put(catalog, "text", ids)
    space = catalog.keys(CONFIG)
    other = digest_tokens(text(5))
    for key in list(store.keys(space.donor_entries)):
        store.put(key.replace(document.token_digest, other), store.get(key))
        store.delete(key)
    assert names(catalog, ids, told=told) == []
    assert told
    assert verify_store(store, [catalog]).damaged


def test_all_documents_are_indexed_afterwards(catalog):
    ids = text(0)
    add(catalog, "text", ids)
    add(catalog, "neutral", text(1), neutral_prefix=[1])
    done = index_documents(catalog, catalog.keys(CONFIG), ("donors", "kvwire"))
    assert (done.documents, done.left_out, done.entries) == (1, 1, len(sketch(ids)) + len(ids) // 64)
    assert names(catalog, ids) == ["text"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"[]", CorruptError), (b'{"version":2}', FormatVersionError),
        (b'{"version":1,"scheme":"sketch-64"}', CorruptError),
        (b'{"version":1,"scheme":"Sketch","document_id":"a","token_digest":"' + b"0" * 64 + b'"}', CorruptError),
        (b'{"version":1,"scheme":"sketch-64","document_id":"","token_digest":"' + b"0" * 64 + b'"}', CorruptError),
        (b'{"version":1,"scheme":"sketch-64","document_id":"a","token_digest":"0"}', CorruptError),
    ],
)  # fmt: skip
def test_damaged_entries_are_refused(data, error):
    with pytest.raises(error):
        DonorEntry.from_json(data)


def test_entries_and_names_of_features_stay_as_they_were(store, catalog):
    ids = list(range(40))
    golden = Path(__file__).parent / "golden"
    stored = (golden / "donor-entry.json").read_bytes()
    entry = DonorEntry("sketch-64", "a/b", digest_tokens(ids))
    assert entry.to_json() == stored
    assert DonorEntry.from_json(stored) == entry
    lines = [line.split() for line in (golden / "donor-features.txt").read_text().splitlines()]
    features = sketch(ids)
    how = (("", b""), ("anna", b""), ("", bytes(range(32))))
    for (writer, secret), wanted in zip(how, zip(*lines, strict=True), strict=True):
        assert tuple(feature_digest("sketch-64", each, writer, secret) for each in features) == wanted
    put(catalog, "a/b", ids)
    root = catalog.keys(CONFIG).donor_entries
    names_of = [f"{root}{each[:2]}/{each}/{entry.token_digest}.json" for each, *_ in lines]
    assert sorted(store.keys(root)) == sorted(names_of)
    assert {store.get(key) for key in store.keys(root)} == {stored}
