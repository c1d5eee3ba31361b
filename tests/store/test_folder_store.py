"""A folder store meets crashes, full disks, read-only folders and strange files."""

import errno
import os
import subprocess
from pathlib import Path

import pytest

from kvwire.errors import NotFoundError, StorageError
from kvwire.store import FolderStore, open_store


@pytest.fixture
def store(tmp_path):
    return FolderStore(tmp_path / "s")


def files_below(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


ENTRY = "v1/" + "ab" * 16 + "/" + "cd" * 8 + "/catalog/doc/aa/" + "aa" * 32 + ".json"


def test_a_catalog_of_files_lies_there_for_any_web_server(tmp_path):
    store = open_store((tmp_path / "s").as_uri() + "?catalog=files")
    store.put(ENTRY, b"{}")
    assert files_below(tmp_path / "s") == [ENTRY]
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
    ("target", "name"), [(os, "fsync"), (os, "write"), (Path, "replace")], ids=["fsync", "write", "rename"]
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


def test_short_writes_are_continued(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    store.put("k", b"0123456789")
    assert store.get("k") == b"0123456789"


def test_a_write_that_takes_nothing_does_not_loop(store, monkeypatch):
    monkeypatch.setattr(os, "write", lambda *_args: 0)
    with pytest.raises(StorageError, match="free space"):
        store.put("k", b"x")


def test_file_and_folder_are_flushed_around_the_rename(store, monkeypatch):
    store.put("a/first", b"x")
    events = []
    real_sync, real_replace = os.fsync, Path.replace

    def sync(descriptor):
        name = Path(f"/proc/self/fd/{descriptor}").readlink()
        events.append(("sync", name.name[:5]))
        real_sync(descriptor)

    def replace(self, target):
        events.append(("rename", Path(target).name))
        return real_replace(self, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    store.put("a/k", b"x")
    assert events == [("sync", ".tmp-"), ("rename", "k"), ("sync", "a")]


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


def test_an_object_in_a_folders_place(store):
    store.put("a", b"x")
    with pytest.raises(StorageError, match="object lies where a folder"):
        store.put("a/b", b"y")
    store.put("d/e", b"x")
    with pytest.raises(StorageError):
        store.put("d", b"y")
    assert files_below(store.root) == ["a", "d/e"]


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


@pytest.fixture
def tiny_disk(tmp_path):
    """A real file system of one MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let root mount")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_really_full_disk(tiny_disk):
    store = FolderStore(tiny_disk)
    store.put("small", b"x" * 1000)
    with pytest.raises(StorageError, match="disk is full"):
        store.put("big", bytes(2 << 20))
    assert files_below(tiny_disk) == ["small"]
    assert store.get("small") == b"x" * 1000


def test_a_really_read_only_disk(tiny_disk):
    store = FolderStore(tiny_disk)
    store.put("a/k", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    for action in (lambda: store.put("a/k", b"y"), lambda: store.put("b/k", b"y"), lambda: store.delete("a/k")):
        with pytest.raises(StorageError, match="read-only"):
            action()
    assert store.get("a/k") == b"x"
