"""A lost catalog is made anew from blobs and texts, and nothing is deleted where a catalog may be lost."""

import hashlib
from types import SimpleNamespace

import pytest
from msgspec import structs

from kvwire.codec import encode, pack_text
from kvwire.errors import ArgumentError
from kvwire.store import Catalog, Keyring, collect, rebuild, verify_store
from kvwire.types import digest_tokens

from ..codec.synthetic import make_cache
from .conftest import DAY

RING = Keyring([bytes(range(32))])


def add(catalog, name, seed=0, *, ids=True, named=True, chunk_tokens=64):
    """Encode a document as a corpus does; gives its entry and its cache."""
    cache = make_cache(70, seed, ids=ids)
    config, blob = cache.meta.config_digest(), catalog.blobs.seal(encode(cache, levels=2, chunk_tokens=chunk_tokens))
    info = catalog.blobs.reader().read_header(blob)
    catalog.texts.put(config, cache.token_ids, document_id=name if named else "", overwrite=True)
    entry = catalog.put_blob(
        config, blob, document_id=name, header_bytes=info.header_bytes, tokens=70, token_digest=info.meta.token_digest,
        levels=[(level.name, level.cumulative_bytes) for level in info.levels],
    )  # fmt: skip
    return SimpleNamespace(entry=entry, cache=cache, config=config)


def lose_catalog(store, *, but=()):
    """Delete all entries, as a copy without dot files does; gives them."""
    lost = {key: store.get(key) for key in store.keys("") if "/catalog/" in key and key not in but}
    store.delete_many(lost)
    return lost


@pytest.mark.parametrize("keyring", [None, RING], ids=["plain", "sealed"])
def test_the_same_entries_are_written_again(store, keyring):
    catalog = Catalog(store, "alice", keyring=keyring)
    first = add(catalog, "first")
    add(catalog, "second", 1)
    catalog.texts.put(first.config, first.cache.token_ids, document_id="another name")
    catalog.alias(first.entry, "another name")
    catalog.add_text(first.config, "text alone", (5, 6, 7))
    before = {entry.document_id: entry for entry in catalog.documents(first.config)}
    content = {key: store.get(key) for key in store.keys("") if "/catalog/" not in key}
    lose_catalog(store)
    done = rebuild(store, keyring=keyring)
    assert (done.documents, done.texts, done.unnamed, done.kept, done.failures) == (3, 1, 0, 0, ())
    assert {entry.document_id: entry for entry in catalog.documents(first.config)} == before
    assert catalog.by_tokens(first.config, first.entry.token_digest) is not None
    assert {key: store.get(key) for key in content} == content or keyring  # sealed texts are written again, sealed anew
    assert rebuild(store, keyring=keyring).kept == 4


def test_sealed_content_is_left_alone_without_its_key(store):
    catalog = Catalog(store, "alice", keyring=RING)
    add(catalog, "first")
    lose_catalog(store)
    before = set(store.keys(""))
    done = rebuild(store)
    assert done.failures
    assert (done.documents, done.texts) == (0, 0)
    assert set(store.keys("")) == before


def test_what_is_there_stays_and_what_leads_nowhere_is_replaced(store, catalog):
    first, second = add(catalog, "first"), add(catalog, "second", 1)
    newer = add(catalog, "first", chunk_tokens=32)
    assert newer.entry.blob_key != first.entry.blob_key
    store.put(catalog.keys(first.config).document("second"), b"{}")
    catalog.add(first.entry)  # the older blob is the one that the catalog names
    done = rebuild(store)
    assert (done.documents, done.kept) == (1, 1)
    assert catalog.by_document(first.config, "first") == first.entry
    assert catalog.by_document(first.config, "second") == second.entry
    store.delete(first.entry.blob_key)
    assert rebuild(store).documents == 1
    assert catalog.by_document(first.config, "first") == newer.entry


def test_of_several_texts_and_blobs_the_latest_counts(store, catalog):
    add(catalog, "doc")
    store.age(60)
    add(catalog, "doc", 1)
    store.age(60)
    latest = add(catalog, "doc", 1, chunk_tokens=32)
    lose_catalog(store)
    assert rebuild(store).documents == 1
    assert catalog.by_document(latest.config, "doc") == latest.entry


def test_without_a_name_a_document_is_called_by_its_digest_and_found_by_its_text(store, catalog):
    one = add(catalog, "doc", named=False)
    space = catalog.keys(one.config)
    store.put(space.text(digest_tokens((8, 9))), pack_text((8, 9)))
    lose_catalog(store)
    done = rebuild(store)
    assert (done.documents, done.texts, done.unnamed) == (1, 1, 2)
    names = {entry.document_id for entry in catalog.documents(one.config)}
    assert names == {f"recovered-{digest[:16]}" for digest in (one.entry.token_digest, digest_tokens((8, 9)))}
    assert catalog.by_tokens(one.config, one.entry.token_digest).blob_key == one.entry.blob_key
    store.age(2 * DAY)
    assert collect(store).bytes == 0
    assert rebuild(store).kept == 2


def test_a_document_whose_blob_is_lost_is_kept_as_text_and_a_dry_run_writes_nothing(store, catalog):
    one = add(catalog, "doc")
    lose_catalog(store)
    store.delete(one.entry.blob_key)
    before = set(store.keys(""))
    assert rebuild(store, dry_run=True).texts == 1
    assert set(store.keys("")) == before
    assert rebuild(store).texts == 1
    assert catalog.by_document(one.config, "doc").is_text
    assert catalog.texts.get(one.config, one.entry.token_digest) == one.cache.token_ids


def test_damage_and_strangers_are_told_of_and_left_alone(store, catalog):
    one = add(catalog, "doc")
    space = catalog.keys(one.config)
    other = encode(make_cache(20, revision="r2"), levels=1)
    strangers = {
        space.blob("a" * 64): b"no blob",
        f"{space.root}zz/{'b' * 64}.kvw": b"misplaced",
        f"{space.root}notes/readme": b"x",
        space.blob(hashlib.sha256(other).hexdigest()): other,  # of another model
    }
    store.put_many(strangers.items())
    lose_catalog(store)
    done = rebuild(store)
    assert done.documents == 1
    assert sorted(failure.partition(":")[0] for failure in done.failures) == sorted(strangers)
    assert {key: store.get(key) for key in strangers} == strangers


def test_a_profile_is_in_use_again(store, catalog):
    one = add(catalog, "doc")
    profile = catalog.profiles.put(one.config, b"a profile")
    catalog.add(_with_profile(one.entry, profile))
    assert rebuild(store).profiles == 0  # no blob names it in its header
    catalog.profiles.set_current(one.config, profile)
    assert rebuild(store).profiles == 0


def _with_profile(entry, digest):
    return structs.replace(entry, profile_digest=digest)


def test_a_catalog_that_names_nothing_that_is_there_stops_the_collector(store, catalog):
    one = add(catalog, "doc")
    lose_catalog(store)
    assert collect(store).failures == ()  # all is young
    store.age(2 * DAY)
    before = set(store.keys(""))
    for options in ({}, {"dry_run": True}, {"grace_s": 0.0}):
        done = collect(store, **options)
        assert "store rebuild" in done.failures[0]
        assert done.bytes == 0
    catalog.add_text(one.config, "of now", (1, 2))  # a catalog that begins anew names some of it
    with pytest.raises(ArgumentError, match="rebuild"):
        collect(store, max_fraction=0.5)
    assert before < set(store.keys(""))
    rebuild(store)
    assert collect(store, max_fraction=0.5).bytes == 0
    assert set(store.keys("")) >= before
    assert not verify_store(store, [catalog]).damaged


def test_an_empty_catalog_is_collected_where_that_is_allowed(store, catalog):
    one = add(catalog, "doc")
    catalog.remove(one.config, "doc")
    store.age(2 * DAY)
    assert collect(store).failures
    assert collect(store, allow_empty_catalog=True).blobs == 1
    assert not list(store.keys(""))
