"""Copies of stores: no entry is written that needs what is damaged, or what is not there yet."""

import hashlib

import pytest

from kvwire.store import Catalog, MemoryStore, copy_store, kind_of
from kvwire.types import SEALED_MAGIC

CONFIG = "c" * 64
PROFILE = b"a profile"


class Whole(MemoryStore):
    """Takes no entry before what it needs is there."""

    def put(self, key, data):
        kind = kind_of(key)
        for named in kind.names(key, bytes(data)) if kind and kind.names and not data.startswith(SEALED_MAGIC) else ():
            assert named.key in self.keys("") or not named.is_needed
        super().put(key, data)


def put(store, blob, name="doc"):
    """Enter a document, with its profile."""
    catalog = Catalog(store)
    digest = catalog.profiles.put(CONFIG, PROFILE)
    catalog.profiles.set_current(CONFIG, digest)
    return catalog.put_blob(CONFIG, blob, document_id=name, header_bytes=1, tokens=3, profile_digest=digest)


@pytest.fixture
def target():
    """Holds a sound copy of an earlier version of the document."""
    target = Whole()
    put(target, b"the earlier blob")
    return target


def test_an_entry_of_a_damaged_blob_does_not_replace_a_sound_one(target):
    source, before = MemoryStore(), Catalog(target).by_document(CONFIG, "doc")
    entry, other = put(source, b"the later blob"), put(source, b"another blob", "other")
    source.put(entry.blob_key, b"the later blot")
    done = copy_store(source, target)
    assert (done.objects, done.entries, len(done.failures)) == (1, 1, 1)
    assert entry.blob_key in done.failures[0]
    assert Catalog(target).by_document(CONFIG, "doc") == before
    assert Catalog(target).by_document(CONFIG, "other") == other
    put(source, b"the later blob")
    source.put(entry.blob_key, b"the later blob")
    assert copy_store(source, target).failures == ()
    assert Catalog(target).by_document(CONFIG, "doc") == entry


def test_no_entry_is_copied_that_needs_a_damaged_profile():
    source, target = MemoryStore(), Whole()
    put(source, b"blob")
    source.put(Catalog(source).keys(CONFIG).profile(hashlib.sha256(PROFILE).hexdigest()), PROFILE[::-1])
    done = copy_store(source, target)
    assert (done.objects, done.entries, len(done.failures)) == (1, 0, 1)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_an_entry_that_is_damaged_or_whose_blob_is_gone_does_not_replace_a_sound_one(target, is_damaged):
    source, before = MemoryStore(), Catalog(target).by_document(CONFIG, "doc")
    key, entry = Catalog(target).keys(CONFIG).document("doc"), put(source, b"the later blob")
    if is_damaged:
        source.put(key, b"{")
    else:
        source.delete(entry.blob_key)
    done = copy_store(source, target)
    (failure,) = done.failures
    assert key in failure
    if not is_damaged:
        assert done.entries == 0
        told = "the blob that it needs is not there: it is left out, encode the document again"
        assert failure.split(": ", 1)[1] == told
    assert Catalog(target).by_document(CONFIG, "doc") == before


@pytest.mark.parametrize("is_local", [True, False])
def test_a_document_that_is_encoded_meanwhile_is_copied_as_a_whole(target, monkeypatch, is_local):
    """After content was listed, and before entries are."""

    class Busy(MemoryStore):
        def scan(self, prefix, after=""):
            if prefix.endswith("/catalog/"):
                put(self, b"a blob that came late", "late")
            return super().scan(prefix, after)

    monkeypatch.setattr(Whole, "is_local", is_local)
    source = Busy()
    put(source, b"the later blob")
    done = copy_store(source, target)
    assert done.failures == ()
    assert target.get(Catalog(target).by_document(CONFIG, "late").blob_key) == b"a blob that came late"


def test_a_document_that_is_replaced_while_its_entry_is_copied_is_no_failure(target):
    """Its blob was deleted after the entry was read: the next copy takes the new one."""

    class Busy(MemoryStore):
        def get(self, key, start=0, end=None):
            data = super().get(key, start, end)
            if key == space.document("doc") and self.later is None:
                self.later = put(self, b"the newest blob")
                self.delete(entry.blob_key)
            return data

    source = Busy()
    source.later = source
    entry, space = put(source, b"the later blob"), Catalog(source).keys(CONFIG)
    source.delete(entry.blob_key)
    source.later = None
    assert copy_store(source, target).failures == ()
    assert copy_store(source, target).failures == ()
    assert Catalog(target).by_document(CONFIG, "doc") == source.later


def test_sealed_entries_are_copied_as_they_are():
    """Nobody without the key knows what they need."""
    source, target = MemoryStore(), Whole()
    put(source, b"blob")
    key = Catalog(source).keys(CONFIG).document("doc")
    source.put(key, SEALED_MAGIC + b"sealed")
    assert copy_store(source, target).failures == ()
    assert target.get(key) == SEALED_MAGIC + b"sealed"
