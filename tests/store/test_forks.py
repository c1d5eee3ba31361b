"""Stores in processes that were forked from one that used them: nothing hangs, and nothing is shared with it."""

import hashlib
import os
import subprocess
import sys
import threading
import warnings
from contextlib import closing

import pytest

from kvwire._forks import in_child, lock_of_process, reentrant_lock_of_process
from kvwire.store import FolderStore, MemoryStore, S3Store, open_tiers
from kvwire.store.testing.samples import blob
from kvwire.transport.testing import serving

BOTH_READ = """
import hashlib, os, sys
from kvwire.store import open_store
from kvwire.store.key_kinds import content_digest

store, keys = open_store(sys.argv[1]), sys.argv[2:]

def read(times):
    return all(
        hashlib.sha256(store.get(key)).hexdigest() == content_digest(key) for _ in range(times) for key in keys
    )

assert read(1)
child = os.fork()
sound = read(60)
if not child:
    store.close()
    os._exit(0 if sound else 3)
assert os.waitpid(child, 0)[1] == 0, "the child read something else"
assert sound and read(1), "the parent read something else"
"""


def both_read(url, keys):
    done = subprocess.run(
        [sys.executable, "-c", BOTH_READ, url, *keys], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def filled():
    store = MemoryStore()
    for seed in range(4):
        store.put(*blob(seed, 3000))
    return store


def test_parent_and_child_read_over_connections_of_their_own(filled):
    with serving(filled) as url:
        both_read(url, filled.keys(""))


def test_parent_and_child_ask_s3_over_connections_of_their_own(filled, ministack_server, monkeypatch):
    ministack_server.set_environment(monkeypatch)
    address = ministack_server.address("forks")
    with closing(S3Store(address)) as store:
        for key in filled.keys(""):
            store.put(key, filled.get(key))
    both_read(address, filled.keys(""))


def in_a_child(work):
    """What comes of work in a forked child, as text."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python from 3.12 on: this process has threads
        child = os.fork()
    if not child:
        try:
            told = str(work())
        except BaseException as error:  # noqa: BLE001 - the parent looks at it
            told = f"{type(error).__name__}: {error}"
        os.write(writing, told.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        told = file.read()
    assert os.waitpid(child, 0) == (child, 0)
    return told


def test_tiers_stay_with_their_process(filled, tmp_path):
    key = next(filled.keys(""))
    with closing(open_tiers(filled, folder=tmp_path, folder_bytes=1 << 20, write_back=True)) as tiers:
        data = tiers.get(key)
        told = in_a_child(lambda: tiers.get(key))
        assert told.startswith("ArgumentError: stores behind tiers of process")
        assert "open another one in this process" in told
        assert in_a_child(tiers.close) == "None"
        assert tiers.get(key) == data
        tiers.put(*blob(9, 100))  # the parent's writes go on


def test_the_folder_of_tiers_is_free_once_their_process_ends(tmp_path):
    """Children that live longer hold no lock of it."""
    code = (
        "import os, sys, time; from kvwire.store import MemoryStore, open_tiers\n"
        "tiers = open_tiers(MemoryStore(), folder=sys.argv[1], folder_bytes=1 << 20)\n"
        "if not os.fork():\n"
        "    print('forked', flush=True); sys.stdin.read(); os._exit(0)\n"
        "os._exit(0)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout.readline() == b"forked\n"
        assert process.wait(60) == 0  # the child lives on, until its stdin ends
        with closing(open_tiers(MemoryStore(), folder=tmp_path, folder_bytes=1 << 20)):
            assert sorted(path.name for path in tmp_path.iterdir()) == ["slot-0"]
        process.stdin.close()


@pytest.mark.parametrize("make", [lock_of_process, reentrant_lock_of_process])
def test_a_lock_that_another_thread_holds_is_free_in_the_child(make):
    lock, held, done = make(), threading.Event(), threading.Event()

    def hold():
        with lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(60)
    try:
        assert in_a_child(lambda: lock.acquire(blocking=False)) == "True"
        assert not lock.acquire(blocking=False)
    finally:
        done.set()
        thread.join()


def test_owners_are_renewed_in_the_child_alone():
    class Owner:
        renewed = False

    owner = in_child(Owner(), lambda one: setattr(one, "renewed", True))
    assert in_a_child(lambda: owner.renewed) == "True"
    assert not owner.renewed


def test_a_store_in_memory_is_the_childs_own(tmp_path):
    store, folder = MemoryStore(), FolderStore(tmp_path)
    key, data = blob(1, 100)
    assert in_a_child(lambda: (store.put(key, data), len(store.get(key)))[1]) == "100"
    assert in_a_child(lambda: (folder.put(key, data), len(folder.get(key)))[1]) == "100"
    assert not list(store.keys(""))
    assert hashlib.sha256(folder.get(key)).digest() == hashlib.sha256(data).digest()
    folder.close()
