"""Uses are counted for each tenant and model, by several processes at once where there is a file."""

import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from kvwire.errors import CorruptError, NotFoundError, StorageError
from kvwire.store.catalog import uses as uses_module
from kvwire.store.catalog.uses import UseCounts, UseFile


@pytest.fixture(params=["memory", "file"])
def uses(request, tmp_path):
    with closing(UseCounts() if request.param == "memory" else UseFile(tmp_path / "uses.sqlite", busy_s=30)) as counts:
        yield counts


def test_what_was_used_often_is_told_first_and_no_use_is_lost_between_threads(uses):
    assert uses.count("a/", "x") == 0
    assert uses.reached("a/", 1) == []
    for name, times in (("x", 1), ("any text: ü\n", 3), ("b", 2), ("a", 2)):
        for _ in range(times):
            uses.add("a/", name)
    uses.add("b/", "x")
    assert uses.count("a/", "any text: ü\n") == 3
    assert uses.count("b/", "x") == 1
    assert uses.reached("a/", 2) == ["any text: ü\n", "a", "b"]
    assert uses.reached("a/", 4) == []
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: uses.add("a/", "x"), range(99)))
    assert uses.count("a/", "x") == 100


def test_memory_forgets_the_least_used_and_the_oldest_of_them(monkeypatch):
    monkeypatch.setattr(uses_module, "MOST_COUNTED", 10)
    uses = UseCounts()
    for name in ("often", "a", "often", *map(str, range(1000))):
        uses.add("a/", name)
        assert uses.count("a/", name)
        assert len(uses.reached("a/", 1)) <= 10
    assert uses.count("a/", "often") == 2
    assert not uses.count("a/", "a")


def test_a_file_is_shared_by_processes_and_outlives_them(tmp_path):
    code = (
        "import sys; from kvwire.store.catalog.uses import UseFile; u = UseFile(sys.argv[1], busy_s=30)\n"
        "for _ in range(30): u.add('a/', 'x')"
    )
    others = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "uses")]) for _ in range(2)]
    assert [other.wait(60) for other in others] == [0, 0]
    with closing(UseFile(tmp_path / "uses")) as uses:
        assert uses.count("a/", "x") == 60


def test_bad_files_are_refused(tmp_path):
    with pytest.raises(NotFoundError):
        UseFile(tmp_path / "absent" / "uses")
    (tmp_path / "uses").write_bytes(b"not a database, " * 100)
    with closing(UseFile(tmp_path / "uses")) as uses, pytest.raises(CorruptError, match="starts anew"):
        uses.add("a/", "x")


def test_a_file_that_is_held_costs_a_use_and_little_time(tmp_path):
    path = tmp_path / "uses"
    with closing(UseFile(path)) as uses:
        uses.add("a/", "x")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            started = time.monotonic()
            with pytest.raises(StorageError, match=r"more than 0\.2 s"):
                uses.add("a/", "x")
            assert time.monotonic() - started < 10  # a database otherwise waits 30 s
            assert uses.count("a/", "x") == 1
        uses.add("a/", "x")
        assert uses.count("a/", "x") == 2


def test_counts_of_other_types_are_damage(tmp_path):
    path = tmp_path / "uses"
    with closing(UseFile(path)) as uses:
        uses.add("space", "doc")
        uses.add("space", "other")
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE uses SET count = 'many' WHERE document = 'doc'")
        database.execute("INSERT INTO uses VALUES ('space', x'ff', 9)")
    with closing(UseFile(path)) as uses:
        with pytest.raises(CorruptError, match="starts anew"):
            uses.count("space", "doc")
        with pytest.raises(CorruptError, match="starts anew"):
            uses.reached("space", 1)
        assert uses.count("space", "other") == 1
