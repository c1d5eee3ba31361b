"""Garbage collection takes what nobody needs, and nothing else, whoever writes meanwhile."""

import os
import threading
import time
from contextlib import closing, suppress
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvwire.codec import pack_text
from kvwire.errors import ArgumentError
from kvwire.store import Catalog, FolderStore, tenant_hash
from kvwire.store.catalog.announcements import GRACE_S, LEASE_S, MAX_NAMES, announce
from kvwire.store.upkeep import collect as collecting
from kvwire.store.upkeep.collect import Collected
from kvwire.types import digest_tokens

from ..store_wrappers import FaultyStore, StoreFault, StoreWrapper
from .conftest import CONFIG, DAY, AgedStore

IDS = (5, 6, 7)
collect = partial(collecting.collect, allow_empty_catalog=True)
"""In most of these tests nothing that is there is named; whether that passes for a lost catalog is tested by itself."""


def put(catalog, document_id="doc", blob=b"blob bytes", ids=IDS, **fields):
    digest = catalog.texts.put(CONFIG, ids)
    fields = {"header_bytes": 4, "tokens": len(ids), "token_digest": digest} | fields
    return catalog.put_blob(CONFIG, blob, document_id=document_id, **fields)


def garbage(store, count):
    """Old blobs that nobody names."""
    space = Catalog(store).keys(CONFIG)
    for number in range(count):
        store.put(space.blob(f"{number:064x}"), b"nobody's")
    store.age(2 * DAY)
    return space


def test_what_documents_name_stays_and_the_rest_goes(store, catalog):
    profiles = [catalog.profiles.put(CONFIG, data) for data in (b"current", b"of a document", b"of nobody")]
    catalog.profiles.set_current(CONFIG, profiles[0])
    kept = put(catalog, profile_digest=profiles[1])
    gone = put(catalog, "gone", b"longer blob bytes", (1, 2))
    text = catalog.add_text(CONFIG, "text", (9, 9))
    assert catalog.remove(CONFIG, "gone")
    store.age(2 * DAY)
    before, space = set(store.keys("")), catalog.keys(CONFIG)
    dry = collect(store, dry_run=True)
    assert (dry.blobs, dry.profiles, dry.texts) == (1, 1, 1)
    assert dry.bytes == len(b"longer blob bytes") + len(b"of nobody") + len(pack_text((1, 2)))
    assert set(store.keys("")) == before
    assert collect(store) == dry
    assert before - set(store.keys("")) == {
        gone.blob_key, space.profile(profiles[2]), space.text(gone.token_digest),
    }  # fmt: skip
    assert store.get(kept.blob_key) == b"blob bytes"
    assert catalog.texts.get(CONFIG, kept.token_digest) == IDS
    assert catalog.texts.get(CONFIG, text.token_digest) == (9, 9)
    assert catalog.profiles.get(CONFIG, profiles[0]) + catalog.profiles.get(CONFIG, profiles[1])
    assert catalog.by_tokens(CONFIG, kept.token_digest) == kept
    assert collect(store) == Collected()


def test_a_derived_entry_of_an_unknown_kind_stops_nothing_and_stays(store, catalog):
    put(catalog)
    space = catalog.keys(CONFIG)
    stray = f"{space.catalog}prefix/stray.json"
    store.put(stray, b"{}")
    store.put(space.blob("a" * 64), b"garbage")
    store.age(2 * DAY)
    assert collect(store).blobs == 1
    assert store.get(stray) == b"{}"


def test_what_is_young_or_of_unknown_age_stays(store, catalog):
    space = catalog.keys(CONFIG)
    for name in ("a", "b"):
        store.put(space.blob(name * 64), b"upload under way")
    store.age(GRACE_S - 60)
    store._objects[space.blob("b" * 64)].modified = 0.0
    assert collect(store) == Collected()
    store.age(120, but=[space.blob("b" * 64)])
    assert collect(store).blobs == 1
    assert list(store.keys("")) == [space.blob("b" * 64)]
    with pytest.raises(ArgumentError):
        collect(store, grace_s=-1)


def test_marks_are_kept_for_the_sweep_after_a_look_and_for_nobody_else(store, catalog, monkeypatch):
    put(catalog)
    garbage(store, 1)
    kept, sweep = [], collecting._sweep

    def watched(*given):
        done = sweep(*given)
        kept.append(len(given[-1].marks))
        return done

    monkeypatch.setattr(collecting, "_sweep", watched)
    for options, looks in (({"dry_run": True}, [0]), ({"max_fraction": 0.999}, [1, 0]), ({}, [0])):
        collect(store, **options)
        assert kept == looks
        kept.clear()


def test_an_entry_of_tokens_goes_when_no_document_has_them(store, catalog):
    put(catalog, "doc", b"first", (1, 2))
    put(catalog, "doc", b"second", (3, 4))  # replaces the document's entry, not that of the tokens
    store.age(2 * DAY)
    done = collect(store)
    assert (done.entries, done.blobs, done.texts) == (1, 1, 1)
    assert catalog.by_tokens(CONFIG, digest_tokens((1, 2))) is None
    assert catalog.by_tokens(CONFIG, digest_tokens((3, 4))).document_id == "doc"


def test_only_the_tenant_that_was_named_is_collected(store):
    for name in ("alice", "bob"):
        put(Catalog(store, name), name, b"blob of " + name.encode())
        Catalog(store, name).remove(CONFIG, name)
    store.age(2 * DAY)
    store.put("v1/somebody/else/ab/x.kvw", b"x")
    assert collect(store, tenant_hash=tenant_hash("bob")).blobs == 1
    assert collect(store).blobs == 1
    assert list(store.keys("")) == ["v1/somebody/else/ab/x.kvw"]
    with pytest.raises(ArgumentError):
        collect(store, tenant_hash="bob")


@pytest.mark.parametrize("damaged", ["entry", "pointer", "misplaced"])
def test_a_damaged_entry_stops_its_configuration_and_no_other(store, damaged):
    alice, bob = Catalog(store, "alice"), Catalog(store, "bob")
    for catalog in (alice, bob):
        put(catalog, "kept", b"kept")
        put(catalog, "gone", b"gone", (8,))
        catalog.remove(CONFIG, "gone")
    space = alice.keys(CONFIG)
    key = space.current_profile if damaged == "pointer" else space.document("kept")
    store.put(key, bob.by_document(CONFIG, "kept").to_json() if damaged == "misplaced" else b"{}")
    store.age(2 * DAY)
    before = set(store.keys(space.root))
    done = collect(store)
    assert len(done.failures) == 1
    assert space.root in done.failures[0]
    assert set(store.keys(space.root)) == before
    assert done.blobs == 1


def test_strange_objects_are_left_alone(store, catalog):
    space = catalog.keys(CONFIG)
    strange = [f"{space.root}notes/readme", f"{space.root}zz/{'a' * 64}.kvw", f"{space.root}profiles/x.kvp"]
    for key in strange:
        store.put(key, b"x")
    store.age(2 * DAY)
    done = collect(store)
    assert done == Collected()
    assert done.misplaced == 1
    assert set(store.keys("")) == set(strange)


def test_folders_lose_old_unfinished_files_too(tmp_path):
    with closing(FolderStore(tmp_path)) as store:
        catalog = Catalog(store)
        entry, lost = put(catalog), catalog.keys(CONFIG).blob("ab" * 32)
        store.put(lost, b"nobody's")
        (tmp_path / "v1" / ".tmp-1-old").write_bytes(b"12345")
        (tmp_path / "v1" / ".tmp-1-new").write_bytes(b"12345")
        long_ago = time.time() - 2 * DAY
        for path in (tmp_path / lost, tmp_path / entry.blob_key, tmp_path / "v1" / ".tmp-1-old"):
            os.utime(path, (long_ago, long_ago))
        assert collect(store, dry_run=True).leftovers == 0
        done = collect(store)
        assert (done.blobs, done.leftovers, done.bytes) == (1, 1, 13)
        assert not (tmp_path / "v1" / ".tmp-1-old").exists()
        assert collect(store, grace_s=0.0).leftovers == 0
        assert (tmp_path / "v1" / ".tmp-1-new").exists()  # somebody may be writing it
        assert store.get(entry.blob_key) == b"blob bytes"


def test_progress_counts_everything_that_was_looked_at(store, catalog):
    for number in range(5):
        put(catalog, str(number), b"blob %d" % number, (number,))
    told = []
    collect(store, on_progress=lambda what, count: told.append((what, count)))
    assert sum(count for what, count in told if what == "entries") == 5


def test_a_slow_collector_deletes_nothing(store, catalog, monkeypatch):
    garbage(store, 1)
    monkeypatch.setattr("kvwire.store.upkeep.collect.LEASE_S", -1.0)
    done = collect(store)
    assert done.blobs == 0
    assert "takes longer" in done.failures[0]
    assert sum(1 for _ in store.keys("")) == 1  # the announcement was taken back


class FarStore(StoreWrapper):
    """A store far away, on a clock of its own. announced, deleted: when it was done, in its seconds."""

    def __init__(self, inner, latency_s):
        super().__init__(inner)
        self.latency_s, self.now, self.lock = latency_s, 0.0, threading.Lock()
        self.announced, self.deleted = [], []

    def _do(self, request, call):
        with self.lock:
            if request.method == "put":
                self.announced.append(self.now)
            self.now += self.latency_s
            if request.method == "delete_many":
                self.deleted.append((self.now, len(self.announced)))
        return super()._do(request, call)


def test_what_takes_longer_than_a_lease_is_collected_under_several(store, catalog, monkeypatch):
    garbage(store, 1000)
    far = FarStore(store, 0.04)
    monkeypatch.setattr("kvwire.store.upkeep.collect.time", SimpleNamespace(time=time.time, monotonic=lambda: far.now))
    monkeypatch.setattr("kvwire.store.upkeep.collect.LEASE_S", 20.0)  # 500 round trips
    done = collect(far)
    assert (done.blobs, done.failures) == (1000, ())
    assert list(store.keys("")) == []
    assert len(far.announced) > 1
    assert all(at - far.announced[of - 1] < 20.0 + 1.0 for at, of in far.deleted)


class ListingStore(StoreWrapper):
    """Counts looks at all entries of documents. announced: how many announcements there were as blobs were deleted."""

    def __init__(self, inner, space):
        super().__init__(inner)
        self.space, self.listings, self.announced = space, 0, []

    def scan(self, prefix, after=""):
        self.listings += prefix == self.space.documents and not after
        return super().scan(prefix, after)

    def delete_many(self, keys):
        keys = list(keys)
        if any("/entries/" not in key for key in keys):
            self.announced.append(len(list(super().scan(self.space.announcements))))
        super().delete_many(keys)


def test_several_announcements_share_a_look_at_the_entries(monkeypatch):
    """What is deleted is what one announcement at a time deletes."""
    ends = []
    for batch in (5, 40):
        store = AgedStore()
        catalog = Catalog(store)
        for number in range(130):
            put(catalog, str(number), b"blob %d" % number, (number,))
            if number >= 30:
                catalog.remove(CONFIG, str(number))
        store.age(2 * DAY)
        monkeypatch.setattr(collecting, "MAX_NAMES", 5)
        monkeypatch.setattr(collecting, "_BATCH", batch)
        counting = ListingStore(store, catalog.keys(CONFIG))
        done = collect(counting)
        assert (done.blobs, done.texts, done.failures) == (100, 100, ())
        ends.append((done, sorted(store.keys("")), counting))
    (old, old_keys, alone), (new, new_keys, shared) = ends
    assert (new, new_keys) == (old, old_keys)
    assert (alone.listings, shared.listings) == (1 + 200 // 5, 1 + 200 // 40)
    assert set(alone.announced) == {1}
    assert shared.announced[:8] == list(range(8, 0, -1))  # each goes once its names are done with
    assert max(shared.announced) == 8


class MeetingStore(StoreWrapper):
    """Looks at objects wait until four threads are at it."""

    def __init__(self, inner):
        super().__init__(inner)
        self.met = threading.Barrier(4)

    def _do(self, request, call):
        if request.method == "stat":
            self.met.wait(10)
        return super()._do(request, call)


def test_objects_of_far_stores_are_looked_at_several_at_a_time(store, catalog):
    garbage(store, 32)
    assert collect(MeetingStore(store)).blobs == 32


@pytest.mark.parametrize("method", ["get", "stat", "put", "scan"])
def test_where_the_store_fails_the_other_tenants_are_collected_and_counted(store, method):
    for name in ("alice", "bob", "carol"):
        put(Catalog(store, name), "gone", b"gone")
        put(Catalog(store, name), "kept", b"kept", (8,))
        Catalog(store, name).remove(CONFIG, "gone")
    store.age(2 * DAY)
    failing = sorted(map(tenant_hash, ("alice", "bob", "carol")))[1]

    def plan(_number, called, key):
        return StoreFault.ERROR if called == method and key.startswith(f"v1/{failing}/") else None

    done = collect(FaultyStore(store, plan))
    (failure,) = done.failures
    assert failing in failure
    assert (done.blobs, done.texts) == (2, 2)


def test_what_was_deleted_before_the_store_failed_is_counted(store, catalog):
    space = garbage(store, 500)
    calls = []

    def plan(_number, called, _key):
        calls.append(called)
        return StoreFault.ERROR if called == "delete_many" and calls.count(called) > 1 else None

    done = collect(FaultyStore(store, plan))
    assert len(done.failures) == 1
    assert 0 < done.blobs < 500
    assert done.blobs == 500 - len(list(store.keys(f"{space.root}00/")))


def test_a_dead_collectors_announcement_is_neither_waited_for_nor_kept(store, catalog):
    entry = put(catalog)
    announce(store, catalog.keys(CONFIG), [entry.blob_key])
    store.age(2 * DAY + 2 * LEASE_S + 60)
    started = time.monotonic()
    put(catalog)
    assert time.monotonic() - started < LEASE_S / 2
    collect(store)
    assert list(store.keys(catalog.keys(CONFIG).announcements)) == []


class _Actor:
    def __init__(self, work):
        self.go, self.arrived = threading.Semaphore(0), threading.Semaphore(0)
        self.result, self.error, self.done = None, None, False
        self.thread = threading.Thread(target=self._run, args=(work,))

    def _run(self, work):
        self.go.acquire()
        try:
            self.result = work()
        except BaseException as error:  # noqa: BLE001 - told to the test
            self.error = error
        self.done = True
        self.arrived.release()


class Schedule:
    """Runs threads one step at a time, a step being one operation on the store, in the order that was drawn."""

    def __init__(self, turns):
        self._turns = list(turns)
        self._actors = {}

    def step(self, *_):
        actor = self._actors.get(threading.current_thread())
        if actor is not None:
            actor.arrived.release()
            actor.go.acquire()

    def run(self, *works):
        actors = [_Actor(work) for work in works]
        self._actors = {actor.thread: actor for actor in actors}
        for actor in actors:
            actor.thread.start()
        turn = 0
        while waiting := [actor for actor in actors if not actor.done]:
            chosen = waiting[(self._turns[turn] if turn < len(self._turns) else turn) % len(waiting)]
            turn += 1
            chosen.go.release()
            chosen.arrived.acquire()
        for actor in actors:
            actor.thread.join()
            if actor.error is not None:
                raise actor.error
        return [actor.result for actor in actors]


class SteppingStore(AgedStore):
    def __init__(self, schedule):
        super().__init__()
        self.schedule = schedule


def _stepping(method):
    def call(self, *arguments, **options):
        self.schedule.step()
        return getattr(AgedStore, method)(self, *arguments, **options)

    return call


for _method in ("get", "stat", "put", "delete", "scan"):
    setattr(SteppingStore, _method, _stepping(_method))


def _put_again(catalog, _):
    return put(catalog, "again")


def _alias(catalog, entry):
    added = catalog.alias(entry, "another name") or put(catalog, "another name")
    catalog.confirm(CONFIG, added, IDS)
    return added


def _text_alone(catalog, _):
    return catalog.add_text(CONFIG, "text", IDS)


def _put_and_confirm(catalog, _):
    profile = catalog.profiles.put(CONFIG, b"profile")
    entry = put(catalog, "with profile", profile_digest=profile)
    catalog.confirm(CONFIG, entry, IDS, SimpleNamespace(data=b"profile"))
    return entry


def _replaced(catalog, _):
    put(catalog, "again", b"another blob", (1,))
    entry = put(catalog, "again")
    catalog.confirm(CONFIG, entry, IDS)
    return entry


def _collected(store, **options):
    with suppress(ArgumentError):  # all of it is garbage
        return collect(store, **options)
    return Collected()


def _check_order(monkeypatch, writers, collectors, grace, age, in_catalog, turns, names, **how):
    schedule = Schedule(turns)
    monkeypatch.setattr(collecting, "MAX_NAMES", names)
    store = SteppingStore(schedule)
    monkeypatch.setattr("kvwire.store.catalog.announcements.time.sleep", schedule.step)
    catalog = Catalog(store)
    catalog.profiles.put(CONFIG, b"profile")
    entry = put(catalog, "removed")
    if not in_catalog:
        store.delete(catalog.keys(CONFIG).document("removed"))  # its entry of tokens stays: a hint to the blob
    store.age(age)
    works = [lambda writer=writer: writer(catalog, entry) for writer in writers]
    results = schedule.run(*works, *[lambda: _collected(store, grace_s=grace, **how)] * collectors)
    for entry, writer in zip(results, writers, strict=False):
        found = catalog.by_document(CONFIG, entry.document_id)
        if found.blob_key:
            assert store.get(found.blob_key) == b"blob bytes"
        if writer is not _put_again:  # which does not make sure of its text
            assert catalog.texts.get(CONFIG, found.token_digest) == IDS
        if found.profile_digest:
            assert catalog.profiles.get(CONFIG, found.profile_digest) == b"profile"
    assert list(store.keys(catalog.keys(CONFIG).announcements)) == []
    assert results[-1].failures == ()


WRITERS = [_put_again, _alias, _text_alone, _put_and_confirm, _replaced]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("age", [60.0, 2 * GRACE_S])
@pytest.mark.parametrize("names", [MAX_NAMES, 1])
def test_wherever_one_breaks_into_the_other_nothing_is_lost(monkeypatch, writer, age, names):
    """The collector stops after each of its steps for the whole writer, and the other way round."""
    for steps in range(45 + 10 * (names == 1)):
        for first, second in ((0, 1), (1, 0)):
            turns = [first] * steps + [second] * 120
            _check_order(monkeypatch, [writer], 1, 0.0, age, in_catalog=False, turns=turns, names=names)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    writers=st.lists(st.sampled_from(WRITERS), min_size=1, max_size=2),
    collectors=st.integers(1, 2),
    grace=st.sampled_from([0.0, 3600.0, GRACE_S]),
    age=st.sampled_from([60.0, 0.4 * GRACE_S, 0.6 * GRACE_S, 2 * GRACE_S, 3 * GRACE_S]),
    in_catalog=st.booleans(),
    runs=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), max_size=12),
    how=st.builds(
        lambda names, most: {"names": names, "max_fraction": most},
        st.sampled_from([1, 2, MAX_NAMES]),
        st.sampled_from([1.0, 0.999]),
    ),
)
def test_in_every_order_of_steps_nothing_is_lost_that_an_entry_names(
    monkeypatch, writers, collectors, grace, age, in_catalog, runs, how
):
    turns = [actor for actor, steps in runs for _ in range(steps)]
    _check_order(monkeypatch, writers, collectors, grace, age, in_catalog, turns, **how)


def test_real_threads_over_a_real_folder(tmp_path):
    with closing(FolderStore(tmp_path)) as store:
        catalog = Catalog(store)
        stop = threading.Event()
        failures = []

        def collecting():
            while not stop.is_set():
                collect(store, grace_s=0.0)

        def writing(number):
            try:
                for turn in range(15):
                    name = f"{number}-{turn % 3}"
                    entry = put(catalog, name, b"blob %d" % (turn % 4), (turn % 4,))
                    catalog.confirm(CONFIG, entry, (turn % 4,))
                    catalog.remove(CONFIG, f"{number}-{(turn + 1) % 3}")
            except Exception as error:  # noqa: BLE001 - told below
                failures.append(error)

        collector = threading.Thread(target=collecting)
        writers = [threading.Thread(target=writing, args=(number,)) for number in range(3)]
        for thread in (collector, *writers):
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        collector.join()
        assert failures == []
        entries = list(catalog.documents(CONFIG))
        assert entries
        for entry in entries:
            assert store.stat(entry.blob_key).size == entry.size
            assert digest_tokens(catalog.texts.get(CONFIG, entry.token_digest)) == entry.token_digest
