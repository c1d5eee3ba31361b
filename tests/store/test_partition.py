"""Parts of a store: together they are the whole, and each is what a walk over everything would keep."""

import hashlib
import random

import pytest

from kvwire.errors import ArgumentError
from kvwire.store import Catalog, Collected, MemoryStore, Part, collect, index_documents, verify_store
from kvwire.store.key_kinds import kinds
from kvwire.store.listing import content
from kvwire.store.testing import StoreWrapper
from kvwire.types import digest_tokens

COUNTS = [1, 2, 3, 7, 16, 255, 256, 257]
CONFIG = hashlib.sha256(b"a model").hexdigest()


@pytest.fixture(scope="module")
def catalog():
    """A few hundred documents with texts, and things that lie where nothing leads to them."""
    catalog = Catalog(MemoryStore())
    space = catalog.keys(CONFIG)
    for number in range(120):
        blob, tokens = b"KVW1" + number.to_bytes(4, "big"), (number, 1, 2)
        catalog.put_blob(
            CONFIG,
            blob,
            document_id=f"document {number}",
            header_bytes=4,
            tokens=3,
            token_digest=digest_tokens(tokens),
            levels=[],
        )
        catalog.put_text(CONFIG, tokens)
        catalog.store.put(space.profile(hashlib.sha256(blob).hexdigest()), blob)
    catalog.store.put(f"{space.root}catalog.bak", b"kept by hand")
    catalog.store.put(f"{space.root}zz/other", b"kept by hand")
    return catalog


def _keys(listed):
    return [one.key for one in listed]


@pytest.mark.parametrize("count", COUNTS)
def test_each_part_is_what_a_walk_over_everything_would_keep(catalog, count):
    space, store = catalog.keys(CONFIG), catalog.store
    whole = _keys(content(store, space))
    entries = [kind.prefix(space) for which in ("marks", "index", "hint") for kind in kinds(which)]
    parts = [Part(number + 1, count) for number in range(count)]
    found = [_keys(part.content(store, space)) for part in parts]
    assert [sorted(keys) for keys in found] == [[key for key in whole if part.has(key)] for part in parts]
    assert sorted(key for keys in found for key in keys) == whole
    for prefix in entries:
        assert [_keys(part.scan(store, prefix)) for part in parts] == [
            [key for key in store.keys(prefix) if part.has(key)] for part in parts
        ]


def test_parts_are_about_equal(catalog):
    space = catalog.keys(CONFIG)
    sizes = [len(_keys(Part(number, 4).content(catalog.store, space))) for number in range(1, 5)]
    assert max(sizes) < 1.5 * min(sizes)


def test_checking_by_parts_finds_what_checking_the_whole_does(catalog):
    store = MemoryStore()
    for key in catalog.store.keys(""):
        store.put(key, catalog.store.get(key))
    space = catalog.keys(CONFIG)
    blob = catalog.by_document(CONFIG, "document 7").blob_key
    store.put(blob, b"KVW1 and something else")
    store.delete(catalog.by_document(CONFIG, "document 8").blob_key)
    store.delete(space.text(digest_tokens((9, 1, 2))))
    whole = verify_store(store, [Catalog(store)])
    parts = [verify_store(store, [Catalog(store)], part=Part(number, 5)) for number in range(1, 6)]
    assert sum(part.objects for part in parts) == whole.objects
    assert sum(part.bytes for part in parts) == whole.bytes
    assert sum(part.entries for part in parts) == whole.entries
    assert {damage for part in parts for damage in part.damaged} == set(whole.damaged)
    assert any("document 8" in damage.problem for damage in whole.damaged)


@pytest.mark.parametrize("text", ["", "3", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/65537", "1/4/2"])
def test_there_is_no_such_part(text):
    with pytest.raises(ArgumentError, match="a part is K/N"):
        Part.parse(text)


def test_a_part_as_a_command_takes_it():
    assert Part.parse("3/16") == Part(3, 16)


def collected_by(store, parts, **options):
    done = [collect(store, part=part, **options) for part in parts]
    return sum(done, Collected())


def littered(catalog):
    """A copy with prefixes' entries of which every third document is gone, two days later."""
    store = MemoryStore()
    for key in catalog.store.keys(""):
        store.put(key, catalog.store.get(key))
    copy = Catalog(store)
    index_documents(copy, copy.keys(CONFIG), ["kvwire:1"])
    for number in range(0, 120, 3):
        assert copy.remove(CONFIG, f"document {number}")
    for one in store._objects.values():
        one.modified -= 2 * 24 * 3600.0
    return store


@pytest.mark.parametrize("count", [1, 3, 64])
def test_collecting_by_parts_in_any_order_deletes_what_collecting_the_whole_does(catalog, count):
    parts = [Part(number + 1, count) for number in range(count)]
    random.Random(count).shuffle(parts)
    whole, by_parts = littered(catalog), littered(catalog)
    dry = collected_by(by_parts, parts, dry_run=True)
    expected = [collect(whole), collect(whole)]
    found = [collected_by(by_parts, parts), collected_by(by_parts, parts)]
    assert expected[0].failures == found[0].failures == found[1].failures == ()
    assert (found[0].blobs, found[0].texts, found[0].bytes) == (expected[0].blobs, expected[0].texts, expected[0].bytes)
    assert (dry.blobs, dry.texts, dry.bytes) == (found[0].blobs, found[0].texts, found[0].bytes)
    assert found[0].entries + found[1].entries == expected[0].entries
    assert found[0].misplaced == expected[0].misplaced
    assert set(by_parts.keys("")) == set(whole.keys(""))
    assert found[0].blobs == 40


@pytest.mark.parametrize("count", [2, 64])
def test_a_lost_catalog_stops_every_part(catalog, count):
    store = littered(catalog)
    space = Catalog(store).keys(CONFIG)
    for key in list(store.keys(space.catalog)):
        store.delete(key)
    before = set(store.keys(""))
    done = collected_by(store, [Part(number + 1, count) for number in range(count)])
    assert set(store.keys("")) == before
    assert "rebuild" in done.failures[0]


@pytest.mark.parametrize("count", [2, 3, 64, 1000])
def test_collecting_as_parts_deletes_what_collecting_the_whole_does(catalog, count):
    whole, as_parts = littered(catalog), littered(catalog)
    dry = collect(as_parts, parts=count, dry_run=True)
    expected = [collect(whole), collect(whole)]
    found = [collect(as_parts, parts=count), collect(as_parts, parts=count)]
    assert expected[0].failures == found[0].failures == found[1].failures == ()
    assert (found[0].blobs, found[0].texts, found[0].bytes) == (expected[0].blobs, expected[0].texts, expected[0].bytes)
    assert (dry.blobs, dry.texts, dry.bytes) == (found[0].blobs, found[0].texts, found[0].bytes)
    assert found[0].looked_at == expected[0].looked_at
    assert set(as_parts.keys("")) == set(whole.keys(""))


def test_entries_are_read_once_for_all_parts(catalog):
    class Reading(StoreWrapper):
        reads = 0

        def _do(self, request, call):
            self.reads += request.method == "get" and "/catalog/doc" in request.key
            return call(request.data)

    counts = {}
    for how in ({}, {"parts": 16}):
        store = Reading(littered(catalog))
        assert not collect(store, dry_run=True, **how).failures
        counts[len(how)] = store.reads
    assert counts[0] == counts[1] == 80


def test_as_parts_what_is_written_meanwhile_stays_and_no_files_are_left(catalog, tmp_path, monkeypatch):
    """A document that comes back between two parts, under the entry of a name that there was."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    store, blob = littered(catalog), b"KVW1" + (3).to_bytes(4, "big")
    again = Catalog(store)

    class Late(StoreWrapper):
        done = False

        def _do(self, request, call):
            if request.method == "put" and "/collecting/" in request.key and not self.done:
                self.done = True
                again.put_blob(
                    CONFIG, blob, document_id="document 3", header_bytes=4, tokens=3,
                    token_digest=digest_tokens((3, 1, 2)), levels=[],
                )  # fmt: skip
            return call(request.data)

    late = Late(store)
    assert not collect(late, parts=8).failures
    assert late.done
    entry = again.by_document(CONFIG, "document 3")
    assert store.get(entry.blob_key) == blob
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [2, 64])
def test_a_lost_catalog_stops_all_parts(catalog, count):
    store = littered(catalog)
    space = Catalog(store).keys(CONFIG)
    for key in list(store.keys(space.catalog)):
        store.delete(key)
    before = set(store.keys(""))
    assert "rebuild" in collect(store, parts=count).failures[0]
    assert set(store.keys("")) == before


def test_one_part_and_several_are_not_asked_for_at_once(catalog):
    with pytest.raises(ArgumentError, match="not both"):
        collect(catalog.store, part=Part(1, 2), parts=3)
