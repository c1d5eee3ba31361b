"""What a catalog says of kept repairs: read strictly, found by the order of documents alone."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, KvwireError
from kvwire.store import TEXT_LEVEL, Catalog, KeptRepair, KeptRows, MemoryStore
from kvwire.store.key_kinds import check_object

CONFIG = "c" * 64
DOCUMENTS = tuple(f"{n:x}" * 64 for n in range(10, 14))
NO_ROWS = KeptRows("", 0, b"")
ROWS = KeptRows("9" * 64, 100, bytes([5, 1]))
KEPT = KeptRepair(DOCUMENTS[:2], 4, "8" * 64, (NO_ROWS, ROWS))


def put(catalog, documents=DOCUMENTS, level=4, bits=b"\x05", **options):
    """Rows of all but the first document; the catalog does not look into blobs."""
    rows = [(b"", b""), *((bits, b"rows of " + name.encode()) for name in documents[1:])]
    return catalog.kept.put(CONFIG, documents, level, "", rows, **options)


def test_an_entry_comes_back():
    assert KeptRepair.from_json(KEPT.to_json()) == KEPT
    assert (KEPT.count, ROWS.count) == (3, 3)


@given(st.lists(st.sampled_from(DOCUMENTS), min_size=1, max_size=5), st.lists(st.sampled_from(DOCUMENTS), min_size=1))
def test_the_digest_tells_orders_apart(ours, theirs):
    made = [KeptRepair(tuple(each), 1, "", (NO_ROWS,) * len(each)).digest for each in (ours, theirs)]
    assert (made[0] == made[1]) == (ours == theirs)


@pytest.mark.parametrize(
    "changed",
    [
        {"documents": []}, {"documents": ["x"] * 2}, {"documents": [DOCUMENTS[0] + ":"] * 2},
        {"documents": list(DOCUMENTS)}, {"level": -1}, {"level": "4"},
        {"level": TEXT_LEVEL + 1}, {"parts": 3}, {"parts": [[], []]}, {"parts": [["", 0, ""], ["9" * 64, 0, "BQE="]]},
        {"parts": [["", 0, ""], ["", 5, "BQE="]]}, {"parts": [["", 0, ""], ["9" * 64, 5, "?"]]},
        {"parts": [["", 0, ""], ["9" * 64, True, "BQE="]]}, {"profile_digest": "8"},
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_damaged(changed):
    with pytest.raises(CorruptError):
        KeptRepair.from_json(json.dumps(json.loads(KEPT.to_json()) | changed).encode())
    with pytest.raises(FormatVersionError):
        KeptRepair.from_json(KEPT.to_json().replace(b'"version":1', b'"version":2'))


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_bytes_are_read_or_refused(noise, at):
    data = KEPT.to_json()
    with suppress(KvwireError):
        KeptRepair.from_json(data[:at] + noise + data[at + len(noise) :])


def test_the_longest_beginning_is_found():
    catalog = Catalog(MemoryStore())
    assert catalog.kept.find(CONFIG, DOCUMENTS) is None
    assert [len(made.documents) for made in put(catalog, DOCUMENTS[:3])] == [2, 3]
    for asked, found in ((4, 3), (3, 3), (2, 2), (1, None)):
        kept = catalog.kept.find(CONFIG, DOCUMENTS[:asked])
        assert (kept and len(kept.documents)) == found
    assert catalog.kept.find(CONFIG, DOCUMENTS[::-1]) is None
    assert Catalog(catalog.store, "other").kept.find(CONFIG, DOCUMENTS) is None
    rows = catalog.kept.find(CONFIG, DOCUMENTS[:2]).parts[1]
    assert catalog.kept.rows(CONFIG, rows) == b"rows of " + DOCUMENTS[1].encode()


def test_finer_documents_and_far_more_rows_take_the_place():
    catalog = Catalog(MemoryStore())
    assert put(catalog)
    assert not put(catalog)
    assert not put(catalog, level=3, bits=b"\xff")
    assert put(catalog, level=5)
    assert put(catalog, level=5, bits=b"\x07")
    assert not put(catalog, level=5, bits=b"\x0f")
    assert put(catalog, level=5, bits=b"\x01", overwrite=True)


def test_only_the_entry_of_a_key_belongs_under_it():
    catalog = Catalog(MemoryStore())
    space, made = catalog.keys(CONFIG), put(catalog)
    check_object(space.kept_repair(KEPT.digest), KEPT.to_json())
    with pytest.raises(CorruptError, match="other documents than its key"):
        check_object(space.kept_repair("7" * 64), KEPT.to_json())
    with pytest.raises(ArgumentError):
        space.kept_repair("7")
    catalog.store.put(space.kept_repair(made[0].digest), made[1].to_json())
    with pytest.raises(CorruptError, match="of other documents"):
        catalog.kept.find(CONFIG, DOCUMENTS[:2])
