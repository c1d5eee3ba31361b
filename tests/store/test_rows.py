"""The catalog of a folder store: rows of one database, safe between threads, processes, crashes and strange files."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.errors import CorruptError, FormatVersionError, NotFoundError, StorageError
from kvwire.store import FolderStore, MemoryStore
from kvwire.store.backends.folder.rows import FILE_NAME
from kvwire.store.files.sqlite import Database

ROOT = "v1/tenant/config/"
ENTRY = f"{ROOT}catalog/doc/aa/entry.json"


@pytest.fixture
def store(tmp_path):
    with closing(FolderStore(tmp_path / "s")) as opened:
        yield opened


def key(name):
    return f"{ROOT}catalog/doc/{name}.json"


def as_file(store, name, data):
    """An entry as older versions wrote it."""
    path = store.root.joinpath(*name.split("/"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_entries_are_rows_and_content_is_files(store):
    store.put(ENTRY, b"entry")
    store.put(f"{ROOT}ab/blob.kvw", b"blob")
    files = sorted(
        path.name for path in store.root.rglob("*") if path.is_file() and not path.name.startswith(FILE_NAME)
    )
    assert files == ["blob.kvw"]
    assert store.get(ENTRY, 1, 3) == b"nt"
    assert store.stat(ENTRY).modified == pytest.approx(time.time(), abs=60)
    assert [(one.key, one.size) for one in store.scan("")] == [(f"{ROOT}ab/blob.kvw", 4), (ENTRY, 5)]


def test_asking_an_empty_folder_makes_nothing(store):
    with pytest.raises(NotFoundError):
        store.get(ENTRY)
    store.delete(ENTRY)
    assert list(store.scan("")) == []
    assert not store.root.exists()


def test_entries_of_older_folders_are_found_listed_moved_and_deleted(store):
    paths = [as_file(store, key(name), b"old " + name.encode()) for name in ("a", "b", "c")]
    assert store.get(key("a")) == b"old a"
    store.put(key("b"), b"new")
    store.put(key("d"), b"new too")
    assert [path.exists() for path in paths] == [True, False, True]
    assert [(one.key, one.size) for one in store.scan(ROOT)] == [
        (key("a"), 5), (key("b"), 3), (key("c"), 5), (key("d"), 7),
    ]  # fmt: skip
    store.delete_many([key("a"), key("b")])
    assert list(store.keys("")) == [key("c"), key("d")]
    as_file(store, key("d"), b"a file, come back from a backup")
    assert store.get(key("d")) == b"new too"
    assert [(one.key, one.size) for one in store.scan("")] == [(key("c"), 5), (key("d"), 7)]


_NAMES = st.from_regex(r"v1/[ab]{1,2}/c/(catalog/)?[a-c]{1,2}(/[a-c.~-]{1,2})?[a-c]", fullmatch=True).filter(
    lambda name: "/." not in name
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    names=st.sets(_NAMES, max_size=8).filter(
        lambda names: not any(other.startswith(name + "/") for name in names for other in names)
    ),
    old=st.sets(st.integers(0, 7)),
    prefix=st.sampled_from(["", "v1/", "v1/a", "v1/a/", "v1/a/c/catalog/", "v1/a/c/catalog/a", "v1/b/c/a"]),
    data=st.data(),
)
def test_rows_and_files_are_listed_like_one_dictionary(tmp_path_factory, names, old, prefix, data):
    model = MemoryStore()
    with closing(FolderStore(tmp_path_factory.mktemp("merged"))) as store:
        for index, name in enumerate(sorted(names)):
            model.put(name, name.encode())
            if index in old:
                as_file(store, name, name.encode())
            else:
                store.put(name, name.encode())
        after = data.draw(st.sampled_from(["", *sorted(names)]))
        assert list(store.keys(prefix, after)) == list(model.keys(prefix, after))


def test_listing_goes_on_over_many_pages_while_rows_come_and_go(store):
    names = [key(f"{number:05d}") for number in range(2500)]
    store.put_many((name, b"x") for name in names)
    found = []
    for listed in store.scan(ROOT):
        found.append(listed.key)
        if len(found) == 5:
            store.delete(names[-1])
            store.put(key("00003-late"), b"x")
    assert found == names[:-1]
    assert list(store.keys(ROOT, names[2400])) == names[2401:-1]


def test_threads_and_processes_write_at_once(store):
    code = (
        "import sys; from kvwire.store import FolderStore; s = FolderStore(sys.argv[1])\n"
        "for n in range(40): s.put(f'v1/tenant/config/catalog/doc/p{sys.argv[2]}-{n}.json', b'x' * 50)"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, str(store.root), str(n)]) for n in range(2)]

    def work(number):
        for n in range(40):
            store.put(key(f"t{number}-{n}"), b"x" * 50)
            assert store.get(key(f"t{number}-{n}")) == b"x" * 50

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert [other.wait(60) for other in others] == [0, 0]
    assert sum(1 for _ in store.keys("")) == 6 * 40


def test_racing_first_writers_make_one_database(tmp_path):
    stores = [FolderStore(tmp_path / "s") for _ in range(6)]
    barrier = threading.Barrier(6)

    def work(number):
        barrier.wait()
        stores[number].put(key(str(number)), b"x")

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert sum(1 for _ in stores[0].keys("")) == 6
    for one in stores:
        one.close()
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [FILE_NAME, f"{FILE_NAME}-reserve"]


def test_a_killed_writer_leaves_whole_entries(store):
    code = (
        "import itertools, sys; from kvwire.store import FolderStore; s = FolderStore(sys.argv[1])\n"
        "for n in itertools.count():\n"
        "    s.put_many((f'v1/tenant/config/catalog/doc/{n:06d}-{m}.json', b'%06d' % n * 500) for m in range(5))\n"
        "    print(n, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(store.root)], stdout=subprocess.PIPE, text=True)
    told = [int(writer.stdout.readline()) for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    told += [int(line) for line in writer.stdout.read().split("\n")[:-1] if line]
    writer.stdout.close()
    writer.wait()
    numbers = [int(name.rpartition("/")[2][:6]) for name in store.keys("")]
    assert set(told) <= set(numbers)
    assert all(numbers.count(number) == 5 for number in set(numbers))  # transactions are whole
    for name in store.keys(""):
        assert store.get(name) == name.rpartition("/")[2][:6].encode() * 500
    store.put(ENTRY, b"and it can be written to")
    assert store.get(ENTRY) == b"and it can be written to"


def test_a_forked_process_reads_and_writes_with_connections_of_its_own(store):
    store.put(ENTRY, b"before")
    code = (
        "import os, sys; from kvwire.store import FolderStore; s = FolderStore(sys.argv[1]); k = sys.argv[2]\n"
        "s.put(k, b'parent')\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    ok = s.get(k) == b'parent'; s.put(k + 'c', b'child'); s.close(); os._exit(0 if ok else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert s.get(k + 'c') == b'child'; s.put(k, b'parent again')"
    )
    subprocess.run([sys.executable, "-c", code, str(store.root), ENTRY], check=True)
    assert store.get(ENTRY) == b"parent again"


def test_a_replaced_database_is_noticed(store, tmp_path):
    store.put(ENTRY, b"of now")
    with closing(FolderStore(tmp_path / "copy")) as copy:
        copy.put(ENTRY, b"of the backup")
    store.close()
    assert store.get(ENTRY) == b"of now"
    (tmp_path / "copy" / FILE_NAME).replace(store.root / FILE_NAME)
    assert store.get(ENTRY) == b"of the backup"


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_connections_lent_while_the_database_is_replaced_are_closed(tmp_path):
    path, moved = tmp_path / "rows.sqlite", tmp_path / "old.sqlite"
    known = {"version": 1, "durable": False, "advice": "try again"}
    with closing(Database(path, "CREATE TABLE t (a INT) STRICT", **known)) as database:
        database.write(lambda _: None)

        def replaced(connection):
            database.read(lambda inner: inner.execute("SELECT 1").fetchall(), None)
            path.rename(moved)
            database.write(lambda _: None)
            return connection.execute("SELECT 1").fetchall()

        database.read(replaced, None)
        database.read(lambda _: None, None)
        assert not [file for file in Path("/proc/self/fd").iterdir() if os.path.realpath(file).startswith(str(moved))]


@pytest.mark.parametrize(
    ("content", "told"), [(b"", "it is empty"), (b"not a database at all, " * 100, "not a database")],
    ids=["empty", "text"],
)  # fmt: skip
def test_a_damaged_database_is_corrupt_and_says_what_to_do(store, content, told):
    store.root.mkdir()
    (store.root / FILE_NAME).write_bytes(content)
    for action in (lambda: store.get(ENTRY), lambda: store.put(ENTRY, b"x"), lambda: list(store.keys(""))):
        with pytest.raises(CorruptError, match=f"damaged.*{told}.*or move it .*away and run kvwire store rebuild"):
            action()


def test_damage_in_the_middle_is_corrupt(store):
    store.put_many((key(str(number)), bytes(900)) for number in range(500))
    store.close()
    path = store.root / FILE_NAME
    data = bytearray(path.read_bytes())
    data[4096:200_000] = os.urandom(200_000 - 4096)
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="restore"):
        list(map(store.get, [key(str(number)) for number in range(500)]))


def test_a_database_of_a_later_version_is_refused(store):
    damaged_by(store, "PRAGMA user_version=2")
    with pytest.raises(FormatVersionError, match="version 2"):
        store.get(ENTRY)


def damaged_by(store, *statements):
    """A database that had an entry, after somebody's SQL."""
    store.put(ENTRY, b"x")
    store.close()
    with closing(sqlite3.connect(store.root / FILE_NAME, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


_RECURSIVE = (
    "CREATE VIEW objects AS WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more) "
    "SELECT 'v1/' || n AS key, 1.0 AS modified, x'00' AS data FROM more"
)
_SAME = "key TEXT NOT NULL PRIMARY KEY, modified REAL NOT NULL, data BLOB NOT NULL"


@pytest.mark.parametrize(
    ("statements", "told"),
    [
        (["DROP TABLE objects", _RECURSIVE], "the view 'objects'"),
        (["CREATE TRIGGER t AFTER INSERT ON objects BEGIN DELETE FROM objects; END"], "the trigger 't'"),
        (["CREATE INDEX i ON objects (length(data))"], "the index 'i'"),
        (["CREATE TABLE more (a)"], "the table 'more'"),
        (["ALTER TABLE objects ADD COLUMN more TEXT"], "the table 'objects'"),
        (["DROP TABLE objects"], "its table is not there"),
        (["DROP TABLE objects", f"CREATE TABLE objects ({_SAME}, CHECK (modified > 0)) WITHOUT ROWID"], "'objects'"),
    ],
)
def test_a_database_that_declares_anything_else_is_not_asked(store, statements, told):
    damaged_by(store, *statements)
    before = (store.root / FILE_NAME).read_bytes()
    actions = (
        lambda: store.get(ENTRY), lambda: store.put(ENTRY, b"y"), lambda: list(store.keys("")),
        lambda: store.delete(ENTRY),
    )  # fmt: skip
    for action in actions:
        with pytest.raises(CorruptError, match=f"not as kvwire made it.*{told}.*kvwire store rebuild"):
            action()
    assert (store.root / FILE_NAME).read_bytes() == before


@pytest.mark.parametrize(
    "change",
    [
        *("modified = 'soon'", "modified = x'00'", "modified = 9e999", "modified = -1"),
        *("data = 'text'", "data = 7", "data = zeroblob(100000000)"),
    ],
)
def test_rows_with_strange_values_are_corrupt(store, change):
    damaged_by(store, f"UPDATE objects SET {change}")  # noqa: S608
    with pytest.raises(CorruptError, match="types.*kvwire store rebuild" if "7" in change else "kvwire store rebuild"):
        store.get(ENTRY)
    if "zeroblob" not in change:  # of which a listing tells the size
        with pytest.raises(CorruptError, match="kvwire store rebuild"):
            list(store.keys(""))


@pytest.mark.parametrize("name", [b"v1/a\x80", b"v1/../x", b"v1/" + b"a" * 2_000_000], ids=["bytes", "path", "long"])
def test_rows_under_strange_keys_are_corrupt(store, name):
    damaged_by(store, f"INSERT INTO objects SELECT CAST(x'{name.hex()}' AS TEXT), modified, data FROM objects")  # noqa: S608
    with pytest.raises(CorruptError, match="kvwire store rebuild"):
        list(store.keys("v1/"))
    assert store.get(ENTRY) == b"x"


def test_a_question_that_takes_too_long_is_broken_off(store, monkeypatch):
    store.put_many((key(f"{number:05d}"), bytes(50)) for number in range(3000))
    monkeypatch.setattr("kvwire.store.files.sqlite.QUERY_S", 0.0)
    with pytest.raises(StorageError, match=r"one question takes longer than 0 s"):
        store._rows._database.read(lambda connection: connection.execute("SELECT sum(length(data)) FROM objects"), None)
    monkeypatch.undo()
    assert len(list(store.keys(""))) == 3000


def killed_with_a_log(folder):
    """A process that writes an entry and ends before its log is merged."""
    code = (
        "import os, sys; from kvwire.store import FolderStore\n"
        "s = FolderStore(sys.argv[1]); s.put(sys.argv[2], b'unmerged'); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder), ENTRY], check=True)


def test_an_unmerged_log_without_its_database_is_never_put_into_a_new_one(store):
    killed_with_a_log(store.root)
    path, log = store.root / FILE_NAME, store.root / f"{FILE_NAME}-wal"
    path.rename(store.root / ".aside")
    for action in (lambda: store.get(ENTRY), lambda: store.put(ENTRY, b"x"), lambda: list(store.keys(""))):
        with pytest.raises(CorruptError, match=r"of a database that is gone: put .* back beside it, or remove"):
            action()
    (store.root / ".aside").rename(path)
    assert store.get(ENTRY) == b"unmerged"
    store.close()
    assert not log.exists()


def test_a_process_that_ends_while_a_thread_holds_the_store_merges_its_log(store):
    code = (
        "import sys, threading; from kvwire.store import FolderStore\n"
        "def work():\n"
        " s = FolderStore(sys.argv[1]); s.put(sys.argv[2], b'entry'); written.set(); threading.Event().wait()\n"
        "written = threading.Event(); threading.Thread(target=work, daemon=True).start(); written.wait()"
    )
    subprocess.run([sys.executable, "-c", code, str(store.root), ENTRY], check=True)
    assert not (store.root / f"{FILE_NAME}-wal").exists()
    assert store.get(ENTRY) == b"entry"


@pytest.mark.parametrize("table", [f"({_SAME})", f"({_SAME}) WITHOUT ROWID"])
def test_databases_of_this_version_open_whichever_way_their_table_was_declared(store, table):
    store.root.mkdir()
    with closing(sqlite3.connect(store.root / FILE_NAME, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"CREATE TABLE objects {table}")
        connection.execute("PRAGMA user_version=1")
        connection.execute("INSERT INTO objects VALUES (?, 1.0, x'01')", (ENTRY,))
    assert store.get(ENTRY) == b"\x01"
    store.put(ENTRY, b"new")
    store.put(key("other"), b"other")
    assert [(one.key, one.size) for one in store.scan("")] == [(ENTRY, 3), (key("other"), 5)]
    store.delete_many([ENTRY, key("other")])
    assert list(store.keys("")) == []


def test_a_file_system_without_shared_memory_is_refused(store, monkeypatch):
    real = sqlite3.connect

    def connect(path, **named):
        return real(f"file:{path}?vfs=unix-dotfile", uri=True, **named)  # locks files, but cannot share memory

    monkeypatch.setattr(sqlite3, "connect", connect)
    with pytest.raises(StorageError, match="local disk"):
        store.put(ENTRY, b"x")
    assert list(store.root.iterdir()) == []


def test_a_writer_that_never_ends_is_waited_for_and_then_named(store, monkeypatch):
    monkeypatch.setattr("kvwire.store.files.sqlite.BUSY_S", 0.05)
    store.put(ENTRY, b"x")
    store.close()
    with closing(sqlite3.connect(store.root / FILE_NAME, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(StorageError, match="another process"):
            store.put(ENTRY, b"y")
        assert store.get(ENTRY) == b"x"
        connection.execute("ROLLBACK")
    store.put(ENTRY, b"y")
    assert store.get(ENTRY) == b"y"


def remount(folder, how):
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def test_a_read_only_folder_can_be_read(disk):
    with closing(FolderStore(disk)) as store:
        store.put_many([(ENTRY, b"entry"), ("a/k", b"x")])
    remount(disk, "ro")
    with closing(FolderStore(disk)) as store:
        assert store.get(ENTRY) == b"entry"
        assert store.get("a/k") == b"x"
        assert list(store.keys("")) == ["a/k", ENTRY]
        with pytest.raises(NotFoundError):
            store.get(key("other"))
        for action in (lambda name: store.put(name, b"new"), store.delete):
            for name in (ENTRY, "a/k"):
                with pytest.raises(StorageError, match="read-only"):
                    action(name)
        with pytest.raises(StorageError, match="read-only"):
            store.put("b/k", b"y")


def test_what_a_killed_writer_left_unmerged_is_never_hidden_from_a_read_only_reader(disk):
    killed_with_a_log(disk)
    assert (disk / f"{FILE_NAME}-wal").stat().st_size
    for _ in range(2):
        remount(disk, "ro")
        with closing(FolderStore(disk)) as store:
            try:
                found = store.get(ENTRY).decode()
            except StorageError as error:
                found = str(error)
        assert found == "unmerged" or "not yet merged" in found
        remount(disk, "rw")
        (disk / f"{FILE_NAME}-shm").unlink(missing_ok=True)


def test_a_file_that_cannot_be_opened_as_it_is_is_not_read_past_unmerged_changes(disk, monkeypatch):
    """Reading as if nothing could change is the last resort, and never with changes beside the file."""
    with closing(FolderStore(disk)) as store:
        store.put(ENTRY, b"entry")
        monkeypatch.setattr("kvwire.store.files.sqlite.Database._connect_to_read", lambda _: None)
        store._rows.close()
        (disk / f"{FILE_NAME}-wal").write_bytes(b"x")
        with pytest.raises(StorageError, match="not yet merged"):
            store.get(ENTRY)
        (disk / f"{FILE_NAME}-wal").unlink()
        assert store.get(ENTRY) == b"entry"


def test_a_full_disk_keeps_the_old_entries_and_files(disk):
    with closing(FolderStore(disk)) as store:
        store.put("small", b"x" * 1000)
        with pytest.raises(StorageError, match="disk is full"):
            store.put("big", bytes(3 << 20))
        store.put(ENTRY, b"old")
        with pytest.raises(StorageError, match=r"full|free space"):
            store.put_many((key(str(number)), os.urandom(4000)) for number in range(1000))
        assert store.get(ENTRY) == b"old"
        assert store.get("small") == b"x" * 1000
        assert list(store.keys("")) == ["small", ENTRY]


FORGOTTEN = """
import os, signal, sys
from kvwire.store import FolderStore

def stop(*_):
    if not sent:
        sent.append(1)
        os.kill(os.getpid(), signal.SIGTERM)

sent = []
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
store = FolderStore(sys.argv[1])
store.put(sys.argv[2], b"{}")
assert store.get(sys.argv[2])
sys.setprofile(stop)
del store
sys.setprofile(None)
stop()
"""


def test_an_exit_is_not_lost_while_a_store_is_forgotten(tmp_path):
    """SIGTERM comes while Python forgets an open store: what its handler raises there must end the process."""
    command = [sys.executable, "-c", FORGOTTEN, str(tmp_path), ENTRY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (5, "")
