"""Writes that are acknowledged once they are safe on the local disk: order, durability, limits."""

import errno
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

from kvwire.errors import DeadlineError, NotFoundError, StorageError
from kvwire.store import (
    Catalog,
    FolderStore,
    KeySpace,
    MemoryStore,
    TierSettings,
    collect,
    content_digest,
    open_tiers,
    tenant_hash,
)
from kvwire.store.cache import pending, write_back
from kvwire.store.catalog.announcements import announce
from kvwire.store.testing import samples

from ..store_wrappers import CountingStore, FaultyStore, StoreFault, StoreWrapper
from .conftest import until

MIB = 1 << 20
QUICK = {"backoff_s": 0.001, "max_backoff_s": 0.01}
ENTRY = "v1/t/c/catalog/doc/ab/one.json"


class Journal(StoreWrapper):
    """Remembers writes in order, may hold them up, and may be down."""

    def __init__(self, inner):
        super().__init__(inner)
        self.written = []
        self.gate = threading.Event()
        self.gate.set()
        self.is_down = False
        self.tried = threading.Event()

    def _do(self, request, call):
        if request.method in {"put", "create"}:
            self.tried.set()
            assert self.gate.wait(30)
        if self.is_down:
            raise StorageError("the remote is down")
        result = call(request.data)
        if request.method in {"put", "create"}:
            self.written.append(request.key)
        return result


def writing_back(remote, folder, **options):
    quick = TierSettings(**{**QUICK, "close_s": 5.0, **options.pop("settings", {})})
    return open_tiers(remote, folder=folder, folder_bytes=MIB, write_back=True, settings=quick, **options)


@pytest.fixture
def remote():
    return Journal(MemoryStore())


def test_a_put_returns_before_the_remote_has_it_and_reads_see_it(remote, tmp_path):
    (key, data), entry = samples.blob(1), b"{}"
    remote.gate.clear()
    with closing(writing_back(remote, tmp_path)) as tiers:
        tiers.put(key, data)
        tiers.put(ENTRY, entry)
        assert not remote.written
        assert tiers.get(key, 10, 20) == data[10:20]
        assert tiers.get(ENTRY) == entry
        assert (tiers.stat(key).size, tiers.stat(ENTRY).size) == (1000, 2)
        assert list(tiers.keys("")) == sorted([key, ENTRY])
        assert (tiers.counters().uploads.pending, tiers.counters().uploads.pending_bytes) == (2, 1002)
        with pytest.raises(DeadlineError):
            tiers.flush(0.01)
        remote.gate.set()
        tiers.flush(30)
        assert remote.written == [key, ENTRY]
        assert (tiers.counters().uploads.pending, tiers.counters().uploads.uploaded) == (0, 2)
        assert not list(tmp_path.rglob("*.put"))
        assert (tiers.get(key), tiers.get(ENTRY)) == (data, entry)


def test_no_entry_is_on_the_remote_before_what_was_written_before_it(tmp_path):
    memory = MemoryStore()
    faulty = FaultyStore(memory, rates={StoreFault.ERROR: 0.3, StoreFault.LOST_ANSWER: 0.1}, seed=5)
    seen = []

    class Watch(StoreWrapper):
        def put(self, key, data):
            if content_digest(key) is None:
                (blob,) = [one for one, entry in pairs if entry == key]
                seen.append(blob in memory._objects)
            self.inner.put(key, data)

    pairs = []
    with closing(writing_back(Watch(faulty), tmp_path, settings={"upload_threads": 4})) as tiers:
        for number in range(40):
            key, data = samples.blob(number)
            pairs.append((key, f"v1/t/c/catalog/doc/{number:02}.json"))
            tiers.put(key, data)
            tiers.put(pairs[-1][1], b"names it")
        tiers.flush(60)
        assert len(seen) >= 40
        assert all(seen)
        assert tiers.counters().uploads.failures > 0
        assert set(memory._objects) == {key for pair in pairs for key in pair}


def test_the_last_write_of_a_key_wins(remote, tmp_path):
    with closing(writing_back(remote, tmp_path)) as tiers:
        for number in range(50):
            tiers.put(ENTRY, b"%d" % number)
        assert tiers.get(ENTRY) == b"49"
        tiers.flush(30)
        assert remote.inner.get(ENTRY) == b"49"


def test_a_remote_that_is_down_is_tried_until_it_is_up(remote, tmp_path):
    remote.is_down = True
    key, data = samples.blob(1)
    with closing(writing_back(remote, tmp_path)) as tiers:
        assert tiers.create(key, data)
        with pytest.raises(DeadlineError, match="down"):
            tiers.flush(0.2)
        assert tiers.counters().uploads.failures > 1
        remote.is_down = False
        tiers.flush(30)
        assert remote.inner.get(key) == data


def test_puts_wait_for_room_and_then_give_up(remote, tmp_path):
    remote.gate.clear()
    blobs = [samples.blob(number) for number in range(3)]
    with closing(writing_back(remote, tmp_path, pending_bytes=2500, settings={"put_s": 0.05})) as tiers:
        tiers.put(*blobs[0])
        tiers.put(*blobs[1])
        with pytest.raises(DeadlineError):
            tiers.put(*blobs[2])
        assert tiers.counters().uploads.pending_bytes == 2000
        remote.gate.set()
        tiers.flush(30)
        tiers.put(*blobs[2])


def test_an_entry_is_acknowledged_where_the_remote_fails_once_it_has_the_blob(remote, tmp_path):
    key, data = samples.blob(1)
    with closing(writing_back(remote, tmp_path, settings={"backoff_s": 0.01, "max_backoff_s": 0.01})) as tiers:
        catalog = Catalog(tiers)
        tiers.put(key, data)
        tiers.flush(30)
        remote.is_down = True
        catalog.objects.confirm(catalog.keys("c" * 64), {key: data})
        assert tiers.counters().uploads.pending == 1
        remote.is_down = False
        tiers.flush(30)
    assert remote.written[0] == key


def test_what_is_too_large_to_wait_goes_to_the_remote_at_once_and_in_order(remote, tmp_path):
    (key, data), large = samples.blob(1, 500), b"x" * 2000
    with closing(writing_back(remote, tmp_path, pending_bytes=1000)) as tiers:
        tiers.put(key, data)
        tiers.put(ENTRY, large)
        assert remote.written == [key, ENTRY]
        assert tiers.counters().uploads.direct == 1


def test_content_that_is_not_what_its_key_says_is_never_queued(remote, tmp_path):
    key, _ = samples.blob(1)
    remote.is_down = True
    with closing(writing_back(remote, tmp_path)) as tiers:
        with pytest.raises(StorageError):
            tiers.put(key, b"other bytes")
        assert tiers.counters().uploads.pending == 0


def test_deleting_calls_off_what_is_pending(remote, tmp_path):
    (key, data), (other, _) = samples.blob(1), samples.blob(2)
    remote.is_down = True
    with closing(writing_back(remote, tmp_path, settings={"backoff_s": 30.0, "max_backoff_s": 30.0})) as tiers:
        tiers.put(key, data)
        tiers.put(ENTRY, b"{}")
        remote.tried.wait(30)
        with suppress(StorageError):
            tiers.delete(ENTRY)
        with suppress(StorageError):
            tiers.delete_many([key, other])
        assert tiers.counters().uploads.pending == 0
        assert not list(tmp_path.rglob("*.put"))
        remote.is_down = False
        with pytest.raises(NotFoundError):
            tiers.get(key)


def test_what_processes_left_pending_is_uploaded_by_the_next(remote, tmp_path):
    remote.is_down = True
    remote.inner.close = lambda: None
    pairs = [samples.blob(number) for number in range(3)]
    with ExitStack() as stack:
        one = stack.enter_context(closing(writing_back(remote, tmp_path, settings={"close_s": 0.01})))
        two = stack.enter_context(closing(writing_back(remote, tmp_path, settings={"close_s": 0.01})))
        for tiers, (key, data) in zip((one, two, two), pairs, strict=True):
            tiers.put(key, data)
        two.put(ENTRY, b"{}")
    assert not remote.written
    remote.is_down = False
    with closing(writing_back(remote, tmp_path)) as tiers:
        assert tiers.get(ENTRY) == b"{}"
        tiers.flush(30)
    assert remote.written[-1] == ENTRY
    assert {key: remote.inner.get(key) for key in remote.written[:-1]} == dict(pairs)


@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_pending_blob_takes_the_entries_behind_it_along(remote, tmp_path, restart):
    remote.is_down = True
    remote.inner.close = lambda: None
    pairs = [samples.blob(number) for number in range(3)]
    slow = {"backoff_s": 0.2, "max_backoff_s": 0.2, "close_s": 0.01}
    with ExitStack() as stack:
        tiers = stack.enter_context(closing(writing_back(remote, tmp_path, memory_bytes=0, settings=slow)))
        tiers.put("v1/t/c/catalog/before.json", b"{}")
        for key, data in pairs:
            tiers.put(key, data)
        tiers.put(ENTRY, b"{}")
        if restart:
            stack.close()
            for thread in threading.enumerate():  # one may hold what it read before
                if thread.name == "kvwire-upload":
                    thread.join(30)
        path = sorted(tmp_path.rglob("*.put"))[2]
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        if restart:
            tiers = stack.enter_context(closing(writing_back(remote, tmp_path, memory_bytes=0, settings=slow)))
        until(lambda: tiers.counters().uploads.damaged == 2)
        remote.is_down = False
        tiers.flush(30)
        assert set(remote.written) == {"v1/t/c/catalog/before.json", pairs[0][0], pairs[2][0]}


def test_a_pending_file_whose_header_is_damaged_is_given_up(remote, tmp_path):
    place = tmp_path / "slot-0" / "pending"
    place.mkdir(parents=True)
    for number, content in enumerate([b"", b"short", b"kvwput1\n" + b"\xff" * 600]):
        (place / f"{number:016}.put").write_bytes(content)
    (place / "0000000000000009.tmp").write_bytes(b"half")
    with closing(writing_back(remote, tmp_path)) as tiers:
        tiers.flush(30)
        assert tiers.counters().uploads.damaged == 3
        assert tiers.counters().uploads.pending_bytes == 0
        assert not list(place.iterdir())


@pytest.mark.parametrize("is_late", [True, False])
def test_where_the_folder_fails_writes_go_to_the_remote_at_once(remote, tmp_path, is_late):
    key, data = samples.blob(1)
    (tmp_path / "file").write_bytes(b"")
    with closing(writing_back(remote, tmp_path / ("cache" if is_late else "file/cache"))) as tiers:
        if is_late:
            place = tmp_path / "cache" / "slot-0" / "pending"
            place.rmdir()
            place.write_bytes(b"in the way")
        tiers.put(key, data)
        tiers.put(ENTRY, b"{}")
        assert remote.written == [key, ENTRY]
        assert tiers.counters().uploads.direct == 2 * is_late


def test_the_bytes_are_flushed_before_they_have_their_name_and_the_name_before_the_put_returns(
    remote, tmp_path, monkeypatch
):
    remote.gate.clear()
    key, data = samples.blob(1)
    with closing(writing_back(remote, tmp_path)) as tiers:
        flushed = []

        def fsync(descriptor):
            flushed.append((Path(f"/proc/self/fd/{descriptor}").readlink(), list(tmp_path.rglob("*.put"))))
            real(descriptor)

        real = os.fsync
        monkeypatch.setattr(os, "fsync", fsync)
        tiers.put(key, data)
        monkeypatch.undo()
        (file, before), (folder, after) = flushed
        assert file.suffix == ".tmp"
        assert folder.name == "pending"
        assert (len(before), len(after)) == (0, 1)
        remote.gate.set()


def test_a_store_that_breaks_its_promise_does_not_stop_the_uploads(tmp_path):
    class Broken(StoreWrapper):
        def put(self, key, data):
            if not hasattr(self, "broke"):
                self.broke = True
                raise ZeroDivisionError("not a kvwire error")
            self.inner.put(key, data)

    memory = MemoryStore()
    key, data = samples.blob(1)
    with closing(writing_back(Broken(memory), tmp_path)) as tiers:
        tiers.put(key, data)
        tiers.flush(30)
        assert memory.get(key) == data


def test_readers_meet_a_write_at_every_moment_of_its_upload(tmp_path):
    memory = MemoryStore()
    remote = CountingStore(memory)
    with closing(writing_back(remote, tmp_path, memory_bytes=0, settings={"upload_threads": 4})) as tiers:
        for number in range(60):
            key, data = samples.blob(number, 3000)
            tiers.put(key, data)
            while tiers.counters().uploads.pending:
                assert tiers.get(key, 5, 2000) == data[5:2000]
            assert tiers.get(key) == data


CONFIG = "ab" * 32


class NoEntries(Journal):
    """Takes no catalog entries while ``is_closed``."""

    is_closed = True

    def _do(self, request, call):
        if self.is_closed and request.method == "put" and "/catalog/" in request.key:
            raise StorageError("no entries now")
        return super()._do(request, call)


def put_document(tiers, remote):
    """Put a document, of which the remote then has the blob but not the entries; returns the entry."""
    blob = samples.noise(1000)
    entry = Catalog(tiers).put_blob(CONFIG, blob, document_id="doc", header_bytes=1, tokens=1, token_digest="cd" * 32)
    until(lambda: entry.blob_key in remote.written)
    return entry


def test_an_entry_whose_content_was_deleted_meanwhile_is_given_up(tmp_path):
    remote = NoEntries(MemoryStore())
    with closing(writing_back(remote, tmp_path)) as tiers:
        entry = put_document(tiers, remote)
        remote.inner.delete(entry.blob_key)
        remote.is_closed = False
        tiers.flush(30)
        assert tiers.counters().uploads.damaged == 2
        assert not list(remote.inner.keys(""))
        assert Catalog(tiers).by_document(CONFIG, "doc") is None


def test_content_that_grew_old_while_its_entry_was_pending_is_written_again(tmp_path):
    remote = NoEntries(MemoryStore())
    slow = {"backoff_s": 0.3, "max_backoff_s": 0.3}
    with closing(writing_back(remote, tmp_path, settings=slow)) as tiers:
        entry = put_document(tiers, remote)
        remote.inner._objects[entry.blob_key].modified -= 2 * 86400
        remote.is_closed = False
        tiers.flush(30)
        assert remote.inner.stat(entry.blob_key).modified > time.time() - 3600
        assert Catalog(remote.inner).by_document(CONFIG, "doc") == entry
        collect(remote.inner)
        assert remote.inner.stat(entry.blob_key).size == 1000


def test_an_entry_is_taken_back_where_a_collector_was_about_to_delete_its_content(tmp_path):
    remote = NoEntries(MemoryStore())
    with closing(writing_back(remote, tmp_path)) as tiers:
        entry = put_document(tiers, remote)
        space = Catalog(tiers).keys(CONFIG)
        at = announce(remote.inner, space, [entry.blob_key])
        remote.is_closed = False
        until(lambda: space.token_entry("cd" * 32) in remote.written)
        with pytest.raises(DeadlineError):
            tiers.flush(0.1)
        remote.inner.delete(entry.blob_key)
        remote.inner.delete(at)
        tiers.flush(30)
        assert not list(remote.inner.keys(""))
        assert tiers.counters().uploads.damaged == 2


@pytest.mark.parametrize("data", [b"{}", b"sealed, or anything else", b'{"profile_digest": "no digest"}'])
def test_what_cannot_be_read_is_uploaded_as_it_is(remote, tmp_path, data):
    space = KeySpace.of(tenant_hash("t"), CONFIG)
    keys = [space.document("a"), space.token_entry("cd" * 32), space.current_profile, f"{space.catalog}else.json"]
    with closing(writing_back(remote, tmp_path)) as tiers:
        for key in keys:
            tiers.put(key, data)
        tiers.flush(30)
        assert remote.written == keys


def test_a_pointer_that_waited_for_long_needs_what_it_names(remote, tmp_path, monkeypatch):
    space = KeySpace.of(tenant_hash("default"), CONFIG)
    profile = json.dumps({"profile_digest": "ef" * 32}).encode()
    with closing(writing_back(remote, tmp_path)) as tiers:
        Catalog(tiers).add_text(CONFIG, "doc", [1, 2, 3])
        tiers.put(space.current_profile, profile)
        tiers.flush(30)
        assert len(remote.written) == 3  # nobody knows that the profile ever was there
        monkeypatch.setattr(write_back, "GRACE_S", -60.0)
        tiers.put(space.current_profile, profile)
        tiers.flush(30)
        assert len(remote.written) == 3
        remote.inner.put(space.profile("ef" * 32), b"its bytes do not matter")
        tiers.put(space.current_profile, profile)
        tiers.flush(30)
        assert remote.written[2:] == [space.current_profile] * 2


def test_a_document_is_found_while_the_remote_is_down_and_put_there_later(remote, tmp_path):
    remote.is_down = True
    with closing(writing_back(remote, tmp_path)) as tiers:
        blob = samples.noise(1000)
        entry = Catalog(tiers).put_blob(CONFIG, blob, document_id="doc", header_bytes=1, tokens=1)
        text = Catalog(tiers).add_text(CONFIG, "other", [1, 2, 3])
        assert Catalog(tiers).by_document(CONFIG, "doc") == entry
        assert tiers.get(entry.blob_key) == blob
        remote.is_down = False
        tiers.flush(30)
        assert content_digest(remote.written[0]) == entry.sha256
        assert Catalog(remote.inner).by_document(CONFIG, "doc") == entry
        assert Catalog(remote.inner).by_document(CONFIG, "other") == text
        assert Catalog(remote.inner).texts.get(CONFIG, text.token_digest) == (1, 2, 3)
        assert remote.inner.get(entry.blob_key) == blob


def test_an_announcement_is_on_the_remote_before_anything_is_deleted(remote, tmp_path):
    remote.is_down = True
    space = KeySpace.of(tenant_hash("t"), CONFIG)
    with closing(writing_back(remote, tmp_path)) as tiers:
        with pytest.raises(StorageError):
            announce(tiers, space, ["a"])
        remote.is_down = False
        at = announce(tiers, space, ["a"])
        assert remote.inner.get(at)
        assert list(tiers.keys(space.announcements)) == [at]
        tiers.delete(at)
        assert not list(tiers.keys(space.announcements))


def test_pending_content_is_checked_once_and_then_read_in_ranges(remote, tmp_path, monkeypatch):
    remote.gate.clear()
    (key, data), checks = samples.blob(1, 10_000), []

    def check(*arguments):
        checks.append(len(arguments[0]))
        return real(*arguments)

    real = pending.crc32
    with closing(writing_back(remote, tmp_path, memory_bytes=0)) as tiers:
        tiers.put(key, data)
        assert remote.tried.wait(30)
        monkeypatch.setattr(pending, "crc32", check)
        assert tiers.stat(key).size == 10_000
        below = tiers.origin(key)
        for start in range(0, 11_000, 500):
            assert below.get(key, start, start + 700) == data[start : start + 700]
        assert below.get(key) == data
        assert not checks
        remote.gate.set()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO])
def test_a_pending_write_that_cannot_be_read_now_is_not_taken_for_absent(remote, tmp_path, monkeypatch, number):
    remote.gate.clear()
    key, data = samples.blob(1)
    real = Path.open

    def fail(path, *arguments, **options):
        if path.suffix == ".put":
            raise OSError(number, "not now")
        return real(path, *arguments, **options)

    with closing(writing_back(remote, tmp_path, memory_bytes=0)) as tiers:
        tiers.put(key, data)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", fail)
            with pytest.raises(StorageError, match="not now"):
                tiers.origin(key).get(key)
        assert tiers.get(key) == data
        remote.gate.set()
        tiers.flush(30)
        assert remote.inner.get(key) == data


def test_choosing_what_to_upload_looks_at_few_writes_however_many_wait(tmp_path, monkeypatch):
    looked = [0]

    class Counting(OrderedDict):
        def values(self):
            for one in super().values():
                looked[0] += 1
                yield one

    monkeypatch.setattr(write_back, "OrderedDict", Counting)
    folder = pending.PendingFolder(tmp_path)
    folder.load()
    store = write_back.WriteBackStore(MemoryStore(), folder, MIB, TierSettings())
    store._closed = True  # no threads
    for number in range(200):
        store.put(f"v1/t/c/catalog/doc/{number}.json", b"{}")
    for number in range(200):
        store.put(*samples.blob(number, 10))
    looked[0] = 0
    chosen = []
    for _ in range(201):
        one, _ = store._choose()
        one.is_running = True
        chosen.append(one)
    assert looked[0] <= 2 * len(chosen)
    assert [one.is_content for one in chosen] == [False] + 200 * [True]
    assert store._choose() == (None, None)
    chosen[5].is_running = False
    store._retry_later(chosen[5], StorageError("down"))
    one, pause_s = store._choose()
    assert one is None
    assert 0 < pause_s <= 0.5


def test_new_folders_are_flushed_and_file_systems_that_cannot_are_borne_with(remote, tmp_path, monkeypatch):
    flushed = set()

    def fsync(descriptor):
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            flushed.add(path)
            raise OSError(errno.EINVAL, "not for folders")
        real(descriptor)

    real = os.fsync
    monkeypatch.setattr(os, "fsync", fsync)
    key, data = samples.blob(1)
    folder = tmp_path / "a" / "b"
    with closing(writing_back(remote, folder)) as tiers:
        tiers.put(key, data)
        tiers.flush(30)
        assert tiers.counters().uploads.direct == 0
    assert {tmp_path, tmp_path / "a", folder, folder / "slot-0", folder / "slot-0" / "pending"} <= flushed


ROOT = Path(__file__).resolve().parents[2]
VICTIM = """
import sys
from kvwire.errors import StorageError
from kvwire.store import FolderStore, TierSettings, open_tiers
from kvwire.store.testing import samples
from tests.store_wrappers import FaultyStore, StoreFault

remote, folder, first = FolderStore(sys.argv[1]), sys.argv[2], int(sys.argv[3])
faulty = FaultyStore(remote, rates={StoreFault.ERROR: 0.5}, seed=first)
quick = TierSettings(backoff_s=0.001, max_backoff_s=0.004)
tiers = open_tiers(faulty, folder=folder, folder_bytes=1 << 22, write_back=True, settings=quick)
print("running", flush=True)
for number in range(first, first + 1000):
    key, data = samples.blob(number, 5000)
    tiers.put(key, data)
    tiers.put(f"v1/t/c/catalog/doc/{number:06}.json", key.encode())
    print(number, flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_what_was_acknowledged_survives_a_kill_and_entries_never_lead_nowhere(tmp_path, kills):
    remote = FolderStore(tmp_path / "remote")
    rng = random.Random(11)
    acknowledged = []
    with ExitStack() as stack:
        for turn in range(kills):
            victim = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", VICTIM, remote.root, tmp_path / "cache", str(1000 * turn)],
                    stdout=subprocess.PIPE,
                    cwd=ROOT,
                )
            )
            stack.callback(victim.kill)
            assert victim.stdout.readline() == b"running\n"
            out = b"".join(victim.stdout.readline() for _ in range(rng.randint(1, 8)))
            threading.Event().wait(rng.uniform(0, 0.01))  # a random moment is the point
            victim.kill()
            out += victim.communicate()[0]
            acknowledged += [int(line) for line in out.splitlines(keepends=True) if line.endswith(b"\n")]
            assert_entries_lead_somewhere(remote)
    assert len(acknowledged) > kills
    with closing(open_tiers(remote, folder=tmp_path / "cache", folder_bytes=MIB, write_back=True)) as tiers:
        tiers.flush(300)
        assert tiers.counters().uploads.damaged == 0
    for number in acknowledged:
        key, data = samples.blob(number, 5000)
        assert remote.get(key) == data
        assert remote.get(f"v1/t/c/catalog/doc/{number:06}.json") == key.encode()
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.suffix in {".put", ".tmp"}]


def assert_entries_lead_somewhere(remote):
    for entry in remote.keys("v1/t/"):
        remote.stat(remote.get(entry).decode())
