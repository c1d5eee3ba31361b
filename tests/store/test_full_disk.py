"""A folder store on a disk that is really full: what is there is read, and kvwire itself can free space."""

import errno
import os
import resource
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvwire.errors import StorageError
from kvwire.store import FolderStore
from kvwire.store.backends.folder import rows
from kvwire.store.backends.folder.rows import FILE_NAME

from ..small_disk import on_small_disk

GOLDEN = Path(__file__).parents[1] / "codec" / "golden"
RESERVE = f"{FILE_NAME}-reserve"
ROOT = "v1/" + "ab" * 16 + "/" + "cd" * 8 + "/"
ENTRY = f"{ROOT}catalog/doc/aa/{'aa' * 32}.json"
ANNOUNCEMENT = f"{ROOT}catalog/collecting/{'0' * 32}.json"


def test_on_a_full_disk_documents_are_read_removed_and_collected_and_writes_refused_with_words(tmp_path):
    told = on_small_disk(
        """
import io, json, random
from contextlib import closing, redirect_stdout
from kvwire.store import Catalog, FolderStore
from kvwire.errors import KvwireError, StorageError

CONFIG = "c" * 64
RESERVE = os.path.join(disk, ".catalog.sqlite-reserve")

def kvwire(*words):
    from kvwire.cli.app import main
    sys.argv = ["kvwire", "store", *words, "--store", disk, "--json"]
    told = io.StringIO()
    with redirect_stdout(told):
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, (words, told.getvalue())
    return json.loads(told.getvalue())

def ids(number):
    return random.Random(number).choices(range(50_000), k=3000)

with closing(FolderStore(disk)) as store:
    catalog = Catalog(store)
    for number in range(120):
        catalog.add_text(CONFIG, f"text {number}", ids(number))
    with open(sys.argv[2], "rb") as file:
        catalog.put_blob(CONFIG, file.read(), document_id="blob", header_bytes=100, tokens=5)
fill()
assert os.path.exists(RESERVE)
with closing(FolderStore(disk)) as store:
    catalog = Catalog(store)
    assert len(list(catalog.documents(CONFIG))) == 121
    assert list(catalog.texts.get(CONFIG, catalog.by_document(CONFIG, "text 3").token_digest)) == ids(3)
    for key, data in (("v1/a/b/ab/x", b"x" * 5000), ("v1/a/b/catalog/x.json", b"{}")):
        try:
            store.put(key, data)
        except StorageError as error:
            print(error.errno, "the disk is full" in str(error))
assert os.path.exists(RESERVE)
assert kvwire("rm", *[f"text {n}" for n in range(50)])["absent"] == []
spent = free()
done = kvwire("gc", "--grace", "0s")
assert (done["texts"], done["failures"]) == (50, []), done
assert free() - spent >= done["bytes"] > 50 * 3000, (free(), spent, done)
found = kvwire("verify")
assert (found["objects"], found["entries"], found["damaged"]) == (71, 71, []), found
with closing(FolderStore(disk)) as store:
    catalog = Catalog(store)
    for number in range(50, 120):
        entry = catalog.by_document(CONFIG, f"text {number}")
        assert list(catalog.texts.get(CONFIG, entry.token_digest)) == ids(number)
    catalog.add_text(CONFIG, "text 0", ids(0))
os.unlink(os.path.join(disk, ".filler"))
with closing(FolderStore(disk)) as store:
    Catalog(store).add_text(CONFIG, "text 1", ids(1))
assert os.stat(RESERVE).st_blocks * 512 >= os.stat(RESERVE).st_size > 0
print("done")
""",
        tmp_path,
        GOLDEN / "v1.0-inside.kvw",
    )
    assert told == f"{errno.ENOSPC} True\n" * 2 + "done\n"


def test_what_a_killed_writer_left_unmerged_is_read_and_deleted_on_a_full_disk(tmp_path):
    told = on_small_disk(
        """
from kvwire.store import FolderStore
names = [f"v1/t/c/catalog/doc/{n:05d}.json" for n in range(3000)]
if not os.fork():
    store = FolderStore(disk)
    store.put_many((name, os.urandom(700)) for name in names)
    os._exit(0)
os.wait()
assert os.stat(os.path.join(disk, ".catalog.sqlite-wal")).st_size > 1 << 20
os.unlink(os.path.join(disk, ".catalog.sqlite-shm"))  # reading makes it anew, which takes space
fill()
store = FolderStore(disk)
assert list(store.keys("")) == names
store.delete_many(names[::2])
assert list(store.keys("")) == names[1::2]
store.close()
print(sorted(name for name in os.listdir(disk) if name.startswith(".cat")))
""",
        tmp_path,
    )
    assert told == f"['{FILE_NAME}', '{RESERVE}']\n"  # what was spent is taken back in the end


def test_deleting_thousands_of_entries_takes_no_more_than_the_reserve(tmp_path):
    told = on_small_disk(
        """
from kvwire.store import FolderStore
names = [f"v1/t/c/catalog/doc/{n * 7919 % 60000:05d}.json" for n in range(12000)]
store = FolderStore(disk)
store.put_many((name, os.urandom(500)) for name in names)
store.close()
fill()
store = FolderStore(disk)
store.delete_many(names[:2000])
assert sorted(store.keys("")) == sorted(names[2000:])
print("done")
""",
        tmp_path,
        size="64m",
    )
    assert told == "done\n"


@pytest.fixture
def store(tmp_path):
    with closing(FolderStore(tmp_path / "s")) as opened:
        yield opened


def failing_once(monkeypatch, owner, name, code=errno.ENOSPC):
    """The first call finds the disk full while the reserve is there."""
    real = getattr(owner, name)

    def call(*words, **named):
        if reserves:
            assert reserves[0].exists()
            reserves.clear()
            raise OSError(code, os.strerror(code))
        return real(*words, **named)

    reserves: list[Path] = []
    monkeypatch.setattr(owner, name, call)
    return reserves


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_removing_a_file_may_take_space_too(store, monkeypatch, code):
    store.put(ENTRY, b"{}")
    store.put("a/k", b"x")
    failing_once(monkeypatch, os, "unlink", code).append(store.root / RESERVE)
    store.delete("a/k")
    assert list(store.keys("a/")) == []


def test_a_collector_announces_what_it_deletes_in_a_catalog_of_files_too(tmp_path, monkeypatch):
    with closing(FolderStore(tmp_path / "s", catalog="files")) as store:
        store.put(ENTRY, b"{}")
        failing_once(monkeypatch, os, "fsync").append(store.root / RESERVE)
        store.put(ANNOUNCEMENT, b"{}")
        reserves = failing_once(monkeypatch, os, "fsync")
        reserves.append(store.root / RESERVE)
        with pytest.raises(StorageError, match="the disk is full"):  # whatever frees nothing
            store.put(ENTRY, b"{}")


def test_the_reserve_is_really_allocated_grows_with_the_database_and_is_no_object(store):
    store.put(ENTRY, b"{}")
    path = store.root / RESERVE
    first = path.stat()
    assert first.st_size <= first.st_blocks * 512
    assert list(store.keys("")) == [ENTRY]
    store.put_many((f"{ROOT}catalog/doc/{number:05d}.json", bytes(900)) for number in range(1000))
    store.put(ENTRY, b"{}")
    assert first.st_size < path.stat().st_size <= rows.RESERVE_BYTES


def test_no_reserve_is_made_where_little_space_is_left(store, monkeypatch):
    monkeypatch.setattr(rows, "_free_bytes", lambda _folder: rows.RESERVE_BYTES)
    store.put(ENTRY, b"{}")
    assert not (store.root / RESERVE).exists()


def test_a_reserve_that_cannot_be_made_harms_nothing(store, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", lambda *_words: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    store.put(ENTRY, b"{}")
    assert sorted(path.name for path in store.root.iterdir() if not path.name.endswith(("-wal", "-shm"))) == [FILE_NAME]


def test_a_database_that_may_not_grow_is_told_as_a_full_disk(store):
    """``max_page_count`` is a full disk to SQLite."""
    store.put(ENTRY, b"{}")

    def grow(connection: sqlite3.Connection):
        connection.execute("PRAGMA max_page_count=1")
        connection.execute("INSERT INTO objects VALUES ('v1/x', 1.0, zeroblob(1000000))")

    with pytest.raises(StorageError, match="the disk is full") as raised:
        store._rows._database.write(grow)
    assert raised.value.errno == errno.ENOSPC


def test_a_limit_on_files_is_told(store):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        with pytest.raises(StorageError, match=r"files may not be so large here: raise the limit \(ulimit -f\)"):
            store.put("a/k", bytes(40_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(store.keys("a/")) == []
