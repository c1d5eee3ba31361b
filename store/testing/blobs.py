"""What every store does with blobs and catalog entries, one that takes nothing else included."""

from __future__ import annotations

import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.store import Addressed, HttpAddress, Store, open_object
from kvwire.store.testing.samples import BAD_KEYS, BAD_PREFIXES, SPACE, Hooks, blob, catalog_entry, digest, noise

if TYPE_CHECKING:
    from collections.abc import Callable


class BlobConformance(Hooks):
    """Tests of content-addressed objects and catalog entries, for stores that check what is written to them.

    A server refuses keys of other kinds, and bytes that do not belong to their key. A store without such limits
    inherits ``StoreConformance``, which holds these tests and more; the docstring there says how to inherit.
    """

    def test_what_is_put_is_got(self, store: Store) -> None:
        for size in (0, 1, 200_000):
            key, data = blob(size, size)
            store.put(key, data)
            assert store.get(key) == data
            assert store.stat(key).size == size

    def test_the_tag_is_the_digest_of_the_bytes(self, store: Store) -> None:
        key, data = blob(1)
        store.put(key, data)
        tag = store.stat(key).etag
        assert tag
        assert '"' not in tag
        if self.tag_is_the_digest:
            assert tag == digest(data)

    def test_a_large_object_in_ranges(self, store: Store) -> None:
        size = self.large_bytes
        key, data = blob(2, size)
        store.put(key, data)
        assert store.stat(key).size == size
        assert digest(store.get(key)) == digest(data)
        for start, end in (
            (0, 1),
            (size // 2 - 7, size // 2 + 7),
            (size - 5, None),
            (size - 5, size + 5),
            (1, size - 1),
        ):
            assert store.get(key, start, end) == data[start:end]

    @pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview], ids=["bytes", "bytearray", "memoryview"])
    def test_any_kind_of_buffer_is_written(self, store: Store, wrap: Callable[[bytes], bytes]) -> None:
        key, data = blob(3, 70_000)
        store.put(key, wrap(data))
        assert store.get(key) == data
        key, data = blob(4, 70_000)
        assert store.create(key, wrap(data))
        assert store.get(key) == data

    def test_what_is_not_there_is_not_found(self, store: Store) -> None:
        store.put(*blob(5))
        missing, _ = blob(6)
        for action in (store.get, store.stat, lambda key: open_object(store, key)):
            with pytest.raises(NotFoundError):
                action(missing)

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused_everywhere(self, store: Store, key: str) -> None:
        calls: tuple[Callable[[str], object], ...] = (
            store.get,
            store.stat,
            store.delete,
            lambda bad: store.put(bad, b"x"),
            lambda bad: store.create(bad, b"x"),
            lambda bad: store.delete_many([bad]),
        )
        for call in calls:
            with pytest.raises(ArgumentError):
                call(key)

    @pytest.mark.parametrize("prefix", BAD_PREFIXES)
    def test_bad_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(ArgumentError):
            list(store.keys(prefix))
        with pytest.raises(ArgumentError):
            list(store.scan(prefix))

    @pytest.mark.parametrize("after", ["/", "a/", "..", "a b"])
    def test_a_listing_goes_on_after_a_key_and_nothing_else(self, store: Store, after: str) -> None:
        with pytest.raises(ArgumentError):
            list(store.scan("", after))

    @pytest.mark.parametrize(("start", "end"), [(-1, None), (-5, 3), (4, 3)])
    def test_backward_ranges_are_refused(self, store: Store, start: int, end: int | None) -> None:
        key, data = blob(7)
        store.put(key, data)
        with pytest.raises(ArgumentError):
            store.get(key, start, end)

    def test_create_tells_whether_it_wrote(self, store: Store) -> None:
        key, data = blob(8)
        assert store.create(key, data) is True
        assert store.create(key, data) is False
        assert store.get(key) == data
        store.delete(key)
        assert store.create(key, data) is True
        assert store.get(key) == data

    def test_delete_is_idempotent(self, store: Store) -> None:
        (key, data), (other, others) = blob(9), blob(10)
        store.put(key, data)
        store.put(other, others)
        store.delete(key)
        store.delete(key)
        with pytest.raises(NotFoundError):
            store.get(key)
        with pytest.raises(NotFoundError):
            store.stat(key)
        assert store.get(other) == others

    def test_many_are_deleted_at_once(self, store: Store) -> None:
        blobs = dict(blob(seed, 10) for seed in range(8))
        for key, data in blobs.items():
            store.put(key, data)
        kept, *gone = blobs
        absent, _ = blob(99, 10)
        store.delete_many(key for key in [*gone, absent, gone[0]])
        store.delete_many([])
        assert list(store.keys("")) == [kept]

    def test_catalog_entries_are_replaced_and_listed(self, store: Store) -> None:
        for levels in (1, 3, 2):
            key, data = catalog_entry("one", levels=levels)
            store.put(key, data)
            assert store.get(key) == data
            assert store.stat(key).size == len(data)
        other, data = catalog_entry("two")
        store.put(other, data)
        assert list(store.keys(SPACE.documents)) == sorted([key, other])
        store.delete(key)
        assert list(store.keys(SPACE.documents)) == [other]
        with pytest.raises(NotFoundError):
            store.get(key)

    def test_a_listing_tells_sizes_in_order_and_goes_on_where_told(self, store: Store) -> None:
        blobs = dict(blob(seed, 10 + seed) for seed in range(7))
        entry, body = catalog_entry("listed")
        objects = blobs | {entry: body}
        for key, data in objects.items():
            store.put(key, data)
        ordered = sorted(objects)
        assert [(one.key, one.size) for one in store.scan("")] == [(key, len(objects[key])) for key in ordered]
        for position, after in enumerate(ordered):
            assert list(store.keys("", after)) == ordered[position + 1 :]
        first_two = ordered[0][: len(SPACE.root) + 2]
        assert list(store.keys(first_two)) == [key for key in ordered if key.startswith(first_two)]
        assert list(store.keys("v2/")) == []

    def test_an_empty_store_lists_nothing(self, store: Store) -> None:
        assert list(store.keys("")) == []
        assert list(store.scan("v1/")) == []

    def test_threads_write_and_read_beside_each_other(self, store: Store) -> None:
        def work(worker: int) -> None:
            for turn in range(self.rounds):
                key, data = blob(worker * 1000 + turn, 3000)
                store.put(key, data)
                assert store.get(key, 5, 2000) == data[5:2000]
                assert store.stat(key).size == len(data)
                if turn % 2:
                    store.delete(key)

        with ThreadPoolExecutor(4) as pool:
            for future in [pool.submit(work, worker) for worker in range(4)]:
                future.result()
        left = {blob(worker * 1000 + turn, 3000)[0] for worker in range(4) for turn in range(0, self.rounds, 2)}
        assert list(store.keys("")) == sorted(left)

    def test_an_object_is_read_through_an_open_reader(self, store: Store) -> None:
        key, data = blob(11, 5000)
        store.put(key, data)
        with closing(open_object(store, key)) as reader:
            assert reader.size == len(data)
            assert reader.etag == store.stat(key).etag
            assert reader.read(10, 4000) == data[10:4000]
            assert reader.read(4990, 9999) == data[4990:]
            assert reader.read(5000, 9999) == b""

    def test_an_http_address_leads_to_the_bytes(self, store: Store) -> None:
        if not isinstance(store, Addressed):
            pytest.skip("this store offers no addresses")
        key, data = blob(12, 5000)
        store.put(key, data)
        for renew in (False, True):
            address = store.http_address(key, renew=renew)
            assert _read(address) == data
            assert _read(address, "bytes=10-19") == data[10:20]
            assert _read(address, "bytes=4990-9999") == data[4990:]
            query = address.url.partition("?")[2]
            assert not query or query not in repr(address)

    def test_closing_twice_is_no_error(self, store: Store) -> None:
        store.put(*blob(13))
        store.close()
        store.close()

    def test_zeros_and_noise_come_back_alike(self, store: Store) -> None:
        for data in (bytes(100_000), b"\r\n\0\xff" * 1000, noise(65_537, 14)):
            key = SPACE.blob(digest(data))
            store.put(key, data)
            assert store.get(key) == data


def _read(address: HttpAddress, byte_range: str | None = None) -> bytes:
    headers = dict(address.headers) | ({"Range": byte_range} if byte_range else {})
    request = urllib.request.Request(address.url, headers=headers)  # noqa: S310 - the store's own address
    with urllib.request.urlopen(request, timeout=30, context=address.tls) as answer:  # noqa: S310
        body: bytes = answer.read()
        return body
