"""A new store is one module and one row of the table of schemes: nothing else asks for its class."""

import time
from contextlib import closing

import pytest

from kvwire.errors import NotFoundError
from kvwire.store import (
    Catalog,
    Listed,
    MemoryStore,
    ObjectStat,
    Store,
    clamp_range,
    collect,
    content_digest,
    copy_store,
    open_store,
    verify_store,
)
from kvwire.store.key_kinds import entity_tag
from kvwire.store.schemes import SCHEMES
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving

CONFIG = "c" * 64
DAY = 24 * 3600.0


class ToyStore(Store):
    """The least that a store has to do."""

    url = "toy:"

    def __init__(self):
        self.objects, self.left_over, self.batches = {}, [(0.0, 7)], 0

    def get(self, key, start=0, end=None):
        if key not in self.objects:
            raise NotFoundError(key)
        data = self.objects[key][0]
        return data[slice(*clamp_range(start, end, len(data)))]

    def stat(self, key):
        data = self.get(key)
        return ObjectStat(len(data), entity_tag(key, data), self.objects[key][1])

    def put(self, key, data):
        self.objects[key] = bytes(data), time.time()

    def delete(self, key):
        self.objects.pop(key, None)

    def scan(self, prefix, after=""):
        return iter(
            [Listed(k, len(d), m) for k, (d, m) in sorted(self.objects.items()) if k.startswith(prefix) and k > after]
        )

    def close(self):
        pass

    # What it can do besides.

    is_local = True

    def put_many(self, items):
        self.batches += 1
        super().put_many(items)

    def remove_leftovers(self, before):
        count, size = len(self.left_over), sum(size for when, size in self.left_over if when < before)
        self.left_over = []
        return count, size


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(SCHEMES, "toy", lambda _url, _token: ToyStore())
    return open_store("toy:")


def test_every_command_takes_a_new_store(toy):
    source = MemoryStore()
    entry = Catalog(source).put_blob(CONFIG, b"blob", document_id="doc", header_bytes=1, tokens=3)
    assert copy_store(source, toy).objects == 1
    assert toy.batches == 1
    assert toy.get(entry.blob_key) == b"blob"
    with serving(toy) as url, closing(HttpStore(url)) as store:
        assert store.get(entry.blob_key) == b"blob"
        assert store.stat(entry.blob_key).etag == content_digest(entry.blob_key)
    [damage] = verify_store(toy, [Catalog(toy)]).damaged  # these bytes are no blob of kvwire's
    assert damage.key == entry.blob_key
    assert Catalog(toy).remove(CONFIG, "doc")
    toy.objects = {key: (data, when - 2 * DAY) for key, (data, when) in toy.objects.items()}
    done = collect(toy, allow_empty_catalog=True)
    assert (done.blobs, done.leftovers, done.bytes) == (1, 1, 4 + 7)


def test_what_a_store_does_not_say_is_that_of_a_remote_one():
    class Plain(ToyStore):
        is_local = Store.is_local
        put_many, remove_leftovers = Store.put_many, Store.remove_leftovers

    store = Plain()
    assert (store.is_local, store.is_lasting, store.folder, store.exists()) == (False, True, None, True)
    assert not store.opens_at_once("a")
    assert store.remove_leftovers(0.0) == (0, 0)
    store.put_many([("a", b"1"), ("b", b"2")])
    assert list(store.keys("")) == ["a", "b"]
    assert (MemoryStore().is_local, MemoryStore().is_lasting) == (True, False)
