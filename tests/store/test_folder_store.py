"""A folder store meets crashes, full disks, read-only folders and strange files."""

import contextlib
import errno
import hashlib
import os
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from kvwire.errors import ConflictError, NotFoundError, StorageError
from kvwire.store import FolderStore, open_store
from kvwire.store.files.files import put_in_place
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "s")


def files_below(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


ENTRY = "v1/" + "ab" * 16 + "/" + "cd" * 8 + "/catalog/doc/aa/" + "aa" * 32 + ".json"


def test_a_catalog_of_files_lies_there_for_any_web_server(tmp_path):
    store = open_store((tmp_path / "s").as_uri() + "?catalog=files")
    store.put(ENTRY, b"{}")
    assert files_below(tmp_path / "s") == [".catalog.sqlite-reserve", ENTRY]
    assert store.url.endswith("?catalog=files")


def test_an_entry_moves_between_rows_and_files_with_its_writer(tmp_path):
    rows, files = FolderStore(tmp_path), FolderStore(tmp_path, catalog="files")
    rows.put(ENTRY, b"one")
    assert files.get(ENTRY) == b"one"
    files.put(ENTRY, b"two")
    assert rows.get(ENTRY) == files.get(ENTRY) == b"two"
    rows.put(ENTRY, b"three")
    assert rows.get(ENTRY) == files.get(ENTRY) == b"three"
    assert list(rows.keys("")) == list(files.keys("")) == [ENTRY]
    files.delete(ENTRY)
    assert list(rows.keys("")) == []


def failing(code):
    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("target", "name"), [(os, "fsync"), (os, "fdopen"), (os, "replace")], ids=["fsync", "write", "rename"]
)
@pytest.mark.parametrize(
    ("code", "advice"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "permission"), (errno.EIO, "health")],
)
def test_a_failed_write_leaves_the_old_object_and_no_litter(store, monkeypatch, target, name, code, advice):
    store.put("a/k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(target, name, failing(code))
        with pytest.raises(StorageError, match=advice):
            store.put("a/k", b"new")
        with pytest.raises(StorageError, match=advice):
            store.put("a/other", b"new")
    assert store.get("a/k") == b"old"
    assert files_below(store.root) == ["a/k"]
    store.put("a/k", b"new")
    assert store.get("a/k") == b"new"


def test_an_interrupted_write_leaves_no_litter(store, monkeypatch):
    def interrupt(*_args):
        raise KeyboardInterrupt

    store.put("k", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.put("k", b"new")
    assert files_below(store.root) == ["k"]
    assert store.get("k") == b"old"


def test_file_and_folder_are_flushed_around_the_rename(store, monkeypatch):
    store.put("a/first", b"x")
    events = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("sync", name.name[:5]))
        real_sync(descriptor)

    def replace(source, target, **folders):
        events.append(("rename", target))
        real_replace(source, target, **folders)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    store.put("a/k", b"x")
    assert events == [("sync", ".tmp-"), ("rename", "k"), ("sync", "a")]


def test_files_that_others_wrote_are_flushed_around_the_rename(tmp_path, monkeypatch):
    """A manifest, or the state of a training, after a power cut: the old one or the new one."""
    events, real_sync = [], os.fsync

    def sync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append((name.name, (tmp_path / "whole").read_text()))
        real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    (tmp_path / "whole").write_text("old")
    (tmp_path / "part").write_text("new")
    put_in_place(tmp_path / "part", tmp_path / "whole")
    assert events == [("part", "old"), (tmp_path.name, "new")]
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_a_file_system_that_cannot_flush_folders_is_accepted(store, monkeypatch):
    real = os.fsync

    def sync(descriptor):
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(errno.EINVAL, "no")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    store.put("k", b"x")
    assert store.get("k") == b"x"


def test_leftovers_and_strange_files_are_neither_listed_nor_served(store):
    store.put("a/k", b"x")
    folder = store.root / "a"
    (folder / ".tmp-1-00").write_bytes(b"half")
    (folder / "has space").write_bytes(b"x")
    (folder / "link").symlink_to("/etc/hostname")
    os.mkfifo(folder / "fifo")
    (folder / ".dir").mkdir()
    assert list(store.keys("")) == ["a/k"]
    for key in ("a/link", "a/fifo"):
        with pytest.raises(NotFoundError):
            store.get(key)


@pytest.fixture
def linked(store, tmp_path):
    """A store with a folder that leads outside, where a secret lies, and a link to the secret itself."""
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "secret").write_bytes(b"secret")
    (outside / "deep" / "secret").write_bytes(b"secret")
    store.put("v1/own", b"x")
    (store.root / "v1" / "out").symlink_to(outside)
    (store.root / "v1" / "file").symlink_to(outside / "secret")
    return outside


@pytest.mark.parametrize("key", ["v1/out/secret", "v1/out/deep/secret", "v1/file"])
def test_nothing_outside_is_read_or_deleted_through_a_link_inside(store, linked, key):
    for action in (store.get, store.stat, store.snapshot):
        with pytest.raises(NotFoundError, match=r"is a link, and none is followed .* mount it there"):
            action(key)
    store.delete(key)
    assert files_below(linked) == ["deep/secret", "secret"]


def test_a_server_gives_nothing_from_outside_through_a_link_inside(store, linked):
    with serving(store) as url, contextlib.closing(HttpStore(url)) as client:
        for key in ("v1/out/secret", "v1/out/deep/secret", "v1/file"):
            with pytest.raises(NotFoundError):
                client.get(key)
            client.delete(key)
        assert list(client.keys("v1/out/")) == []
    assert files_below(linked) == ["deep/secret", "secret"]


def test_nothing_outside_is_listed_or_written_through_a_link_inside(store, linked):
    (linked / "deep" / ".tmp-1-00").write_bytes(b"of another program")
    for prefix in ("", "v1/", "v1/out/", "v1/out/d", "v1/out/deep/", "v1/file"):
        assert set(store.keys(prefix)) <= {"v1/own"}
    for key in ("v1/out/new", "v1/out/deep/new", "v1/out/made/new"):
        with pytest.raises(StorageError, match=r"is a link, and none is followed"):
            store.put(key, b"x")
    assert store.remove_leftovers(time.time() + 60) == (0, 0)
    assert files_below(linked) == ["deep/.tmp-1-00", "deep/secret", "secret"]
    assert list(store.keys("")) == ["v1/own"]
    store.put("v1/file", b"x")  # takes the link's place
    assert (linked / "secret").read_bytes() == b"secret"


def test_a_store_may_be_reached_through_a_link(store, tmp_path):
    store.put("a/k", b"x")
    (store.root / ".tmp-1-00").write_bytes(b"half")
    (tmp_path / "alias").symlink_to(store.root)
    alias = FolderStore(tmp_path / "alias")
    assert alias.get("a/k") == b"x"
    alias.put("a/l", b"y")
    alias.delete("a/k")
    assert alias.remove_leftovers(time.time() + 60) == (1, 4)
    assert list(alias.keys("")) == list(store.keys("a/")) == ["a/l"]


def test_a_folder_that_turns_into_a_link_meanwhile_leads_nowhere(store, tmp_path):
    """The threads race: whatever a step finds, it is a folder of the store or an error."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "k").write_bytes(b"secret")
    store.put("a/k", b"own")
    folder, aside, link = store.root / "a", store.root / ".aside", store.root / ".link"
    link.symlink_to(outside)
    ended = threading.Event()

    def swap():
        while not ended.is_set():
            folder.rename(aside)
            link.rename(folder)
            folder.rename(link)
            aside.rename(folder)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(500):
            with contextlib.suppress(NotFoundError):
                assert store.get("a/k") == b"own"
            assert {one.size for one in store.scan("a/")} <= {3}
    finally:
        ended.set()
        thread.join()
    assert (outside / "k").read_bytes() == b"secret"


def test_an_abandoned_listing_holds_nothing_open(store):
    store.put_many((f"a/{n}/b/{m}", b"x") for n in range(3) for m in range(3))
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        assert next(iter(store.scan(""))).key == "a/0/b/0"
        assert len(list(store.keys("a/"))) == 9
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_an_object_in_a_folders_place_and_a_file_in_a_stores(store):
    store.put("a", b"x")
    for key in ("a/b", "a/b/c"):
        with pytest.raises(ConflictError, match="the object a lies there: choose another key"):
            store.put(key, b"y")
    store.put("d/e", b"x")
    with pytest.raises(ConflictError, match="objects lie below that name"):
        store.put("d", b"y")
    assert files_below(store.root) == ["a", "d/e"]
    with pytest.raises(StorageError, match="open a store elsewhere") as raised:
        FolderStore(store.root / "a").put("a/b", b"x")
    assert not isinstance(raised.value, ConflictError)  # of keys


def test_a_server_answers_an_object_in_the_way_with_409_that_no_client_repeats(store):
    names = [f"{hashlib.sha256(data).hexdigest()}.kvw" for data in (b"one", b"two")]
    store.put(names[0], b"one")
    store.put(f"{names[1]}/below", b"x")
    below = f"{names[0]}/{names[1]}"
    with serving(store) as url, contextlib.closing(HttpStore(url)) as client:
        for key in (below, names[1]):
            with pytest.raises(ConflictError, match="409: another object lies where this one has to go"):
                client.put(key, b"two")
        page = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert 'kvwire_uploads_refused_total{reason="conflict"} 2.0' in page  # sent once each
    assert "kvwire_store_errors_total 0.0" in page
    assert files_below(store.root) == sorted([names[0], f"{names[1]}/below"])


def test_permission_errors_on_reading_say_what_to_do(store, monkeypatch):
    store.put("k", b"x")
    monkeypatch.setattr(os, "open", failing(errno.EACCES))
    with pytest.raises(StorageError, match="give this user the right"):
        store.get("k")


def test_tags_of_replaced_files_are_not_remembered(store):
    for n in range(40):
        store.put("k", b"%03d" % n)
        first = store.stat("k")
        assert store.stat("k") == first
        store.put("other", b"%03d" % n)
        assert store.stat("other").etag == first.etag
