"""A catalog with keys: nothing readable is stored, and nothing that was not sealed is believed."""

from pathlib import Path

import pytest

from kvwire.codec import read_header
from kvwire.errors import AuthError, CorruptError
from kvwire.store import Catalog, FolderStore, Keyring, MemoryStore, collect, content_digest, verify_store

CONFIG = "ab" * 32
TOKENS = tuple(range(1000, 1100))
BLOB = (Path(__file__).parents[1] / "codec" / "golden" / "v1.0-small.kvw").read_bytes()
RING = Keyring([bytes(range(32))])


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path)


def filled(store, keyring=RING, tenant="alice"):
    catalog = Catalog(store, tenant, b"salt", keyring=keyring)
    digest = catalog.texts.put(CONFIG, TOKENS)
    sealed = catalog.blobs.seal(BLOB)
    info = catalog.blobs.reader().read_header(sealed)
    entry = catalog.put_blob(
        CONFIG, sealed, document_id="secret plans", header_bytes=info.header_bytes, tokens=100, token_digest=digest
    )
    return catalog, entry


def test_what_is_written_is_read_and_nothing_readable_lies_in_the_store(store):
    catalog, entry = filled(store)
    assert catalog.by_document(CONFIG, "secret plans") == entry
    assert catalog.by_tokens(CONFIG, entry.token_digest) == entry
    assert list(catalog.documents(CONFIG)) == [entry]
    assert catalog.texts.get(CONFIG, entry.token_digest) == TOKENS
    reader = catalog.blobs.reader()
    stored = store.get(entry.blob_key)
    reader.read_header(stored)
    assert reader.parsed.info == read_header(BLOB)
    assert RING.tenant(catalog.tenant).unseal_blob(stored) == BLOB
    assert content_digest(entry.blob_key) == entry.sha256
    assert store.stat(entry.blob_key).size == entry.size > len(BLOB)
    keys = list(store.keys(""))
    assert len(keys) == 4
    for key in keys:
        data = store.get(key)
        assert data.startswith(b"\x89KVE\r\n\x1a\n")
        assert b"secret" not in data
        assert BLOB[64:96] not in data


def test_without_the_key_nothing_is_readable(store):
    _, entry = filled(store)
    for ring in (None, Keyring([bytes(32)])):
        catalog = Catalog(store, "alice", b"salt", keyring=ring)
        with pytest.raises((AuthError, CorruptError), match="--keys" if ring is None else None):
            catalog.by_document(CONFIG, "secret plans")
        with pytest.raises((AuthError, CorruptError)):
            catalog.texts.get(CONFIG, entry.token_digest)
    bob = Catalog(store, "bob", b"salt", keyring=RING)
    with pytest.raises(AuthError):  # another tenant's objects do not open
        bob.blobs.reader().read_header(store.get(entry.blob_key))


def test_entries_that_were_not_sealed_are_not_believed(store):
    plain, entry = filled(store, keyring=None)
    sealed = Catalog(store, "alice", b"salt", keyring=RING)
    with pytest.raises(CorruptError, match="not sealed"):
        sealed.by_document(CONFIG, "secret plans")
    assert plain.by_document(CONFIG, "secret plans") == entry


def test_entries_and_pointers_under_anothers_key_are_not_believed(store):
    catalog, _ = filled(store)
    space, other = catalog.keys(CONFIG), "cd" * 32
    store.put(space.document("other"), store.get(space.document("secret plans")))
    with pytest.raises(CorruptError):
        catalog.by_document(CONFIG, "other")
    digest = catalog.profiles.put(CONFIG, b"a profile")
    catalog.profiles.set_current(CONFIG, digest)
    assert catalog.profiles.get(CONFIG, digest) == b"a profile"
    assert catalog.profiles.current(CONFIG) == digest
    store.put(catalog.keys(other).current_profile, store.get(space.current_profile))
    with pytest.raises(CorruptError):
        catalog.profiles.current(other)


def test_verifying_deletes_nothing_that_it_cannot_read(store):
    alice, _ = filled(store)
    plain, _ = filled(store, keyring=None, tenant="dave")
    before = sorted(store.keys(""))
    for ring in (None, RING, Keyring([bytes(32)])):
        catalogs = [Catalog.of_hash(store, tenant, keyring=ring) for tenant in (alice.tenant, plain.tenant)]
        verify_store(store, catalogs, delete_damaged=True)
        assert sorted(store.keys("")) == before


def test_a_damaged_or_unsealed_entry_can_be_removed(store):
    catalog, entry = filled(store)
    key = catalog.keys(CONFIG).document("secret plans")
    for damaged in (b"{}", store.get(key)[:-1] + b"?"):
        store.put(key, damaged)
        assert catalog.remove(CONFIG, "secret plans")
        assert not catalog.remove(CONFIG, "secret plans")
    assert store.stat(entry.blob_key).size == entry.size


def test_garbage_of_sealed_tenants_is_collected_with_the_key_alone(store):
    catalog, entry = filled(store)
    catalog.remove(CONFIG, "secret plans")
    kept, _ = filled(store, tenant="carol")
    blind = collect(store, grace_s=0, dry_run=True)
    assert blind.failures
    collect(store, keyring=RING, grace_s=0, allow_empty_catalog=True)
    assert kept.by_document(CONFIG, "secret plans") is not None
    assert not any(key == entry.blob_key for key in store.keys(""))
    assert any(key.endswith(".kvw") for key in store.keys(f"v1/{kept.tenant}/"))
