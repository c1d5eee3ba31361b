"""Parts of a store: together they are the whole, and each is what a walk over everything would keep."""

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError
from kvwire.store import Catalog, Collected, MemoryStore, Part, collect, index_documents, verify_store
from kvwire.store.key_kinds import kinds
from kvwire.store.listing import WHOLE, content
from kvwire.store.upkeep.marks import Marks
from kvwire.types import digest_tokens

from ..store_wrappers import StoreWrapper

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
            CONFIG, blob, document_id=f"document {number}", header_bytes=4, tokens=3, token_digest=digest_tokens(tokens)
        )
        catalog.texts.put(CONFIG, tokens)
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
    entries = [kind.prefix(space) for which in ("root", "derived", "alias") for kind in kinds(which)]
    assert entries
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


def copied(catalog):
    store = MemoryStore()
    for key in catalog.store.keys(""):
        store.put(key, catalog.store.get(key))
    return store


def test_checking_by_parts_finds_what_checking_the_whole_does(catalog):
    store = copied(catalog)
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


def collected(store, count, **options):
    """Collect parts in any order."""
    parts = [Part(number + 1, count) for number in range(count)]
    random.Random(count).shuffle(parts)
    return sum((collect(store, part=part, **options) for part in parts), Collected())


def littered(catalog):
    """A copy with prefixes' entries of which every third document is gone, two days later."""
    store = copied(catalog)
    copy = Catalog(store)
    index_documents(copy, copy.keys(CONFIG), ["kvwire:1"])
    for number in range(0, 120, 3):
        assert copy.remove(CONFIG, f"document {number}")
    for one in store._objects.values():
        one.modified -= 2 * 24 * 3600.0
    return store


@pytest.mark.parametrize("count", [1, 3, 64])
def test_collecting_parts_deletes_what_collecting_the_whole_does(catalog, count):
    whole, in_parts = littered(catalog), littered(catalog)
    dry = collected(in_parts, count, dry_run=True)
    expected = [collect(whole), collect(whole)]
    found = [collected(in_parts, count), collected(in_parts, count)]
    assert expected[0].failures == found[0].failures == found[1].failures == ()
    assert (found[0].blobs, found[0].texts, found[0].bytes) == (expected[0].blobs, expected[0].texts, expected[0].bytes)
    assert (dry.blobs, dry.texts, dry.bytes) == (found[0].blobs, found[0].texts, found[0].bytes)
    assert found[0].misplaced == expected[0].misplaced
    assert found[0].entries + found[1].entries == expected[0].entries
    assert set(in_parts.keys("")) == set(whole.keys(""))
    assert found[0].blobs == 40


@pytest.mark.parametrize("count", [2, 64])
def test_a_lost_catalog_stops_every_part(catalog, count):
    store = littered(catalog)
    store.delete_many(list(store.keys(Catalog(store).keys(CONFIG).catalog)))
    before = set(store.keys(""))
    failures = collected(store, count).failures
    assert set(store.keys("")) == before
    assert "rebuild" in failures[0]


class Reading(StoreWrapper):
    """Counts reads of documents' entries: while something is about to be deleted, and else."""

    def __init__(self, inner):
        super().__init__(inner)
        self.within, self.reads, self.late_reads = set(), 0, 0

    def _do(self, request, call):
        if "/collecting/" in request.key:
            (self.within.add if request.method == "put" else self.within.discard)(request.key)
        if request.method == "get" and "/catalog/doc" in request.key:
            self.reads += not self.within
            self.late_reads += bool(self.within)
        return call(request.data)


@pytest.mark.parametrize("options", [{"dry_run": True}, {"max_fraction": 0.99}, {}])
def test_entries_are_read_once_with_a_look_before(catalog, options):
    store = Reading(littered(catalog))
    done = collect(store, **options)
    assert (done.failures, done.blobs) == ((), 40)
    assert (store.reads, store.late_reads) == (80, 0)


class Meanwhile(StoreWrapper):
    """Does something once, as soon as an announcement was written that names a key."""

    def __init__(self, inner, work, name):
        super().__init__(inner)
        self.work, self.name, self.done = work, name.rpartition("/")[2], False

    def _do(self, request, call):
        result = call(request.data)
        if request.method == "put" and "/collecting/" in request.key and self.name in bytes(request.data).decode():
            if not self.done:
                self.work()
            self.done = True
        return result


@pytest.mark.parametrize("max_fraction", [1.0, 0.99])
def test_what_an_entry_names_meanwhile_stays_however_old(catalog, max_fraction):
    store, entry = littered(catalog), catalog.by_document(CONFIG, "document 3")
    key = catalog.keys(CONFIG).document(entry.document_id)
    late = Meanwhile(store, lambda: store.put(key, catalog.store.get(key)), entry.blob_key)
    done = collect(late, max_fraction=max_fraction)
    assert late.done
    assert (done.failures, done.blobs) == ((), 39)
    assert store.get(entry.blob_key)


DIGESTS = st.integers(0, 50).map(lambda number: hashlib.sha256(bytes([number])).hexdigest())
NAMED = st.one_of(
    DIGESTS.map(lambda digest: f"v1/t/c/{digest[:2]}/{digest}.kvw"), st.sampled_from(["v1/t/a", "v1/t/b"])
)


@given(st.lists(st.tuples(st.lists(NAMED), st.booleans()), max_size=6), st.integers(1, 3))
def test_marks_are_what_a_set_of_keys_says(steps, count):
    part = Part(1, count)
    marks, plain, every = Marks(part), set(), []
    for number, (keys, packs) in enumerate(steps, 1):
        marks.add_all(keys, float(number))
        plain |= {key for key in keys if part.has(key)}
        every += keys
        if packs:
            marks.pack()
        assert marks.at == number
    for key in {*every, "v1/t/c", "v1/t/d"}:
        assert (key in marks) == (key in plain)
    assert marks.sample == every[:64]


def test_marks_are_packed_as_they_come(monkeypatch):
    monkeypatch.setattr("kvwire.store.upkeep.marks._MOST_RECENT", 10)
    keys = [f"v1/t/c/ab/{hashlib.sha256(bytes([n])).hexdigest()}.kvw" for n in range(200)]
    marks = Marks(WHOLE)
    marks.add_all(keys[:100], 1.0)
    assert len(marks._recent) < 10
    assert [key in marks for key in keys] == [True] * 100 + [False] * 100


def test_two_keys_that_share_their_first_bytes_both_stay():
    one, other = (f"v1/t/c/00/{'0' * 16}{digit * 48}.kvw" for digit in "ab")
    marks = Marks(WHOLE)
    marks.add_all([one], 1.0)
    assert other in marks
