"""The disk tier where disks fail, files rot, processes are killed and others share the folder."""

import errno
import os
import random
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from kvwire.errors import CorruptError
from kvwire.store import FolderStore, MemoryStore, TierSettings, open_tiers
from kvwire.store.cache import disk_tier
from kvwire.store.cache.disk_tier import HEADER_BYTES
from kvwire.store.testing import samples
from kvwire.store.testing.conformance import together

from ..store_wrappers import CountingStore

MIB = 1 << 20


def filled(blobs=4, size=1000):
    """A remote that outlives the tiers before it, and what is in it."""
    remote = CountingStore(MemoryStore())
    remote.inner.close = lambda: None
    pairs = [samples.blob(number, size) for number in range(blobs)]
    for key, data in pairs:
        remote.put(key, data)
    return remote, pairs


def on_disk(remote, folder, **options):
    return closing(open_tiers(remote, memory_bytes=0, folder=folder, **({"folder_bytes": MIB} | options)))


def files(folder):
    return sorted(folder.rglob("*.ext"))


def disk_bytes(folder):
    return sum(path.stat().st_size for path in files(folder))


def test_a_new_process_finds_what_the_last_one_read(tmp_path):
    remote, pairs = filled()
    with on_disk(remote, tmp_path) as tiers:
        for key, data in pairs:
            assert tiers.get(key, 100, 900) == data[100:900]
        assert tiers.settle(30)
        assert tiers.counters().disk.held_bytes == disk_bytes(tmp_path)
    with on_disk(remote, tmp_path) as tiers:
        assert tiers.counters().disk.held_bytes == disk_bytes(tmp_path)
        assert tiers.counters().disk.objects == 4
        remote.reset()
        for key, data in pairs:
            assert tiers.get(key, 100, 900) == data[100:900]
        assert remote.tally("get").requests == 0
        for key, data in pairs:
            assert tiers.get(key) == data
        assert remote.tally("get").bytes == 4 * 200


def test_what_a_file_says_of_the_objects_size_is_believed_where_the_remote_cannot_tell(tmp_path):
    remote, [(key, data)] = filled(1)
    with on_disk(remote, tmp_path) as tiers:
        tiers.get(key)
    remote.reset()
    remote.inner.delete(key)
    with on_disk(remote, tmp_path) as tiers:
        with pytest.raises(Exception, match="not in this memory store"):
            tiers.stat(key)
        assert tiers.get(key) == data
        assert remote.tally("get").bytes == 0
        asked = remote.tally("get").requests
        assert tiers.get(key) == data
        assert remote.tally("get").requests == asked


def link_instead(path):
    target = path.with_name("elsewhere")
    path.rename(target)
    path.symlink_to(target)


DAMAGE = {
    "flipped": lambda path: path.write_bytes((data := path.read_bytes())[:-1] + bytes([data[-1] ^ 16])),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "zeroes": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "removed": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a link": link_instead,
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("restart", [False, True])
def test_a_file_that_is_not_what_was_written_is_dropped_and_read_again(tmp_path, damage, restart):
    remote, [(key, data)] = filled(1)
    with ExitStack() as stack:
        tiers = stack.enter_context(on_disk(remote, tmp_path))
        assert tiers.get(key) == data
        assert tiers.settle(30)
        if restart:
            stack.close()
        DAMAGE[damage](files(tmp_path)[0])
        if restart:
            tiers = stack.enter_context(on_disk(remote, tmp_path))
        remote.reset()
        assert tiers.get(key) == data
        assert remote.tally("get").requests >= 1
        assert tiers.settle(30)
        if not restart:
            assert tiers.counters().disk.corrupt == 1
        if damage != "a folder":
            remote.reset()
            assert tiers.get(key) == data
            assert remote.tally("get").requests == 0
            assert tiers.counters().disk.held_bytes == disk_bytes(tmp_path)


def test_every_flipped_byte_is_found(tmp_path):
    remote, [(key, data)] = filled(1, 100)
    with on_disk(remote, tmp_path) as tiers:
        tiers.get(key)
        for number in range(HEADER_BYTES + 100):
            assert tiers.settle(30)
            (path,) = files(tmp_path)
            good = path.read_bytes()
            path.write_bytes(good[:number] + bytes([good[number] ^ 1]) + good[number + 1 :])
            assert tiers.get(key) == data
        assert tiers.counters().disk.corrupt == HEADER_BYTES + 100


def test_swapped_files_are_not_served(tmp_path):
    remote, pairs = filled(2)
    with on_disk(remote, tmp_path) as tiers:
        for key, _ in pairs:
            tiers.get(key)
        assert tiers.settle(30)
        one, other = files(tmp_path)
        content = one.read_bytes(), other.read_bytes()
        one.write_bytes(content[1])
        other.write_bytes(content[0])
        for key, data in pairs:
            assert tiers.get(key) == data
        assert tiers.counters().disk.corrupt == 2


def test_copies_of_one_remote_are_not_served_for_another(tmp_path):
    one, other = FolderStore(tmp_path / "one"), FolderStore(tmp_path / "other")
    key, data = samples.blob(1)
    one.put(key, data)
    other.put(key, b"theirs")
    with on_disk(one, tmp_path / "cache") as tiers:
        assert tiers.get(key) == data
    with on_disk(other, tmp_path / "cache") as tiers:
        assert tiers.get(key) == b"theirs"


def test_processes_share_a_folder_without_touching_each_others_files(tmp_path):
    remote, pairs = filled(6)
    with on_disk(remote, tmp_path, folder_bytes=3300) as one, on_disk(remote, tmp_path, folder_bytes=3300) as other:
        for tiers in (one, other, one, other):
            for key, data in pairs:
                assert tiers.get(key) == data
        for number, tiers in enumerate((one, other)):
            assert tiers.settle(30)
            held = tiers.counters().disk
            assert held.held_bytes == disk_bytes(tmp_path / f"slot-{number}") <= 3300
            assert held.corrupt == 0
    with on_disk(remote, tmp_path, folder_bytes=3300) as tiers:
        assert tiers.counters().disk.held_bytes == disk_bytes(tmp_path / "slot-0")


def test_a_smaller_budget_holds_from_the_start(tmp_path):
    remote, pairs = filled(6)
    with on_disk(remote, tmp_path) as tiers:
        for key, _ in pairs:
            tiers.get(key)
    with on_disk(remote, tmp_path, folder_bytes=2500) as tiers:
        assert tiers.settle(30)
        assert tiers.counters().disk.held_bytes == disk_bytes(tmp_path) <= 2500


def test_what_does_not_belong_to_the_cache_is_left_alone(tmp_path):
    remote, _ = filled()
    (tmp_path / "slot-0" / "ab").mkdir(parents=True)
    mine = [tmp_path / "slot-0" / "ab" / "thesis.txt", tmp_path / "holiday.jpg", tmp_path / "slot-0" / "note"]
    for path in mine:
        path.write_bytes(b"mine")
    with on_disk(remote, tmp_path, folder_bytes=200):
        pass
    assert all(path.read_bytes() == b"mine" for path in mine)


def test_files_are_readable_by_their_owner_alone(tmp_path):
    remote, [(key, _)] = filled(1)
    with on_disk(remote, tmp_path / "cache") as tiers:
        tiers.get(key)
    assert (tmp_path / "cache").stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "cache").rglob("*"))


def test_many_files_are_taken_over_by_their_names_and_lengths(tmp_path):
    folder = tmp_path / "slot-0" / "ab"
    folder.mkdir(parents=True)
    name = "ab" * 32
    for number in range(2_000):
        path = folder / f"{name}-{number * 10:x}-{number * 10 + 10:x}.ext"
        path.write_bytes(bytes(HEADER_BYTES + (10 if number % 4 else 9)))
    with on_disk(MemoryStore(), tmp_path) as tiers:
        assert tiers.counters().disk.extents == 1_500
        assert tiers.settle(30)
        assert tiers.counters().disk.held_bytes == disk_bytes(tmp_path) == 1_500 * (HEADER_BYTES + 10)


# Disks that fail. A subprocess has its own limits and rights.


def run(script, *arguments, before=()):
    command = [*before, sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stderr


FAILING_DISK = """
import logging, os, resource, sys
from pathlib import Path
from kvwire.store import MemoryStore, TierSettings, open_tiers
from kvwire.store.testing import samples

logging.basicConfig()
folder, how = Path(sys.argv[1]), sys.argv[2]
remote = MemoryStore()
pairs = [samples.blob(number, 100_000) for number in range(6)]
for key, data in pairs:
    remote.put(key, data)

def check(tiers, writes):
    for key, data in pairs * 2:
        assert tiers.get(key, 0, 60_000) == data[:60_000]
        assert tiers.get(key) == data
        assert tiers.settle(30)
    disk = tiers.counters().disk
    assert (disk.write_errors == 0) == writes, disk
    assert disk.corrupt == 0, disk
    assert disk.held_bytes == sum(path.stat().st_size for path in folder.rglob("*.ext"))
    assert not list(folder.rglob("*.tmp"))

tiers = open_tiers(remote, memory_bytes=0, folder=folder, folder_bytes=10**9, settings=TierSettings(retry_s=0.05))
if how == "size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
if how != "full":
    check(tiers, writes=False)
    errors = tiers.counters().disk.write_errors
if how == "size":  # and when the disk is well again, it is used again
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    import time
    while not tiers.counters().disk.extents:
        time.sleep(0.01)
        assert tiers.get(pairs[0][0]) == pairs[0][1]
    assert tiers.counters().disk.write_errors == errors
if how == "full":
    check(tiers, writes=False)
tiers.close()
"""


def test_a_disk_that_takes_no_more_is_left_alone_and_used_again_later(tmp_path):
    assert run(FAILING_DISK, tmp_path, "size").count("takes nothing in") == 1


def test_a_full_disk_costs_nothing_but_hits(tmp_path):
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    probe = subprocess.run([*mount, 'mount -t tmpfs none "$0"', tmp_path], capture_output=True, check=False, timeout=60)
    if probe.returncode:
        pytest.skip("this machine lets nobody mount a small file system")
    before = [*mount, 'mount -t tmpfs -o size=256k none "$0" && exec "$@"', tmp_path]
    assert run(FAILING_DISK, tmp_path, "full", before=before).count("takes nothing in") >= 1


READ_ONLY = """
import os, sys
from pathlib import Path
from kvwire.store import MemoryStore, open_tiers
from kvwire.store.testing import samples

folder = Path(sys.argv[1])
if os.getuid() == 0:
    os.setuid(65534)  # root may write everywhere
remote = MemoryStore()
key, data = samples.blob(1)
remote.put(key, data)
tiers = open_tiers(remote, memory_bytes=0, folder=folder, folder_bytes=10**6)
for _ in range(2):
    assert tiers.get(key) == data
assert tiers.counters().disk.write_errors == 1
assert tiers.counters().disk.refused >= 1
tiers.close()
"""


def test_a_folder_that_nobody_may_write_to_is_done_without(tmp_path):
    tmp_path.chmod(0o555)
    for folder in (tmp_path, *list(tmp_path.parents)[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    try:
        run(READ_ONLY, tmp_path)
    finally:
        tmp_path.chmod(0o755)


def test_a_folder_below_a_file_is_done_without_until_it_can_be_made(tmp_path):
    (tmp_path / "file").write_bytes(b"in the way")
    remote, [(key, data)] = filled(1)
    with on_disk(remote, tmp_path / "file" / "cache", settings=TierSettings(retry_s=0.0)) as tiers:
        assert tiers.get(key) == data
        assert tiers.counters().disk.write_errors >= 1
        (tmp_path / "file").unlink()
        assert tiers.get(key) == data  # this tries to open it
        assert tiers.settle(30)
        assert tiers.get(key) == data  # this fills it
        assert tiers.settle(30)
        assert tiers.counters().disk.extents == 1


def test_a_slow_disk_is_not_waited_for(tmp_path):
    remote, pairs = filled(20, 10_000)
    with on_disk(remote, tmp_path, settings=TierSettings(dirty_bytes=25_000)) as tiers:
        busy, free = threading.Event(), threading.Event()
        tiers.cache._disk._worker.submit(lambda: (busy.set(), free.wait(30)))
        assert busy.wait(30)
        for key, data in pairs:
            assert tiers.get(key) == data
        disk = tiers.counters().disk
        assert (disk.extents, disk.refused) == (2, 18)
        free.set()
        assert tiers.settle(30)
        assert disk_bytes(tmp_path) == tiers.counters().disk.held_bytes


def test_where_the_disk_hangs_the_remote_is_asked_and_the_disk_left_alone(tmp_path, monkeypatch):
    remote, pairs = filled()
    free, others = threading.Event(), set(threading.enumerate())  # of tests before this one, on their way out

    def hang(*arguments):
        assert free.wait(30)
        return real(*arguments)

    real = disk_tier.read_extent
    monkeypatch.setattr(disk_tier, "read_extent", hang)
    with on_disk(remote, tmp_path, settings=TierSettings(stall_s=0.05, retry_s=60.0)) as tiers:
        for key, _ in pairs:
            tiers.get(key)
        assert tiers.settle(30)
        remote.reset()
        for key, data in pairs * 2:
            assert tiers.get(key) == data
        assert remote.tally("get").bytes == 8000
        assert len([one for one in set(threading.enumerate()) - others if one.name == "kvwire-disk-load"]) == 1
        free.set()
        assert tiers.counters().disk.corrupt == 0


def test_readers_of_one_file_share_one_load(tmp_path, monkeypatch):
    remote, [(key, data)] = filled(1)
    loads = []
    asked = threading.Barrier(9)

    def slow(*arguments):
        loads.append(arguments)
        asked.wait(30)
        return real(*arguments)

    real = disk_tier.read_extent
    with on_disk(remote, tmp_path) as tiers:
        tiers.get(key)
        assert tiers.settle(30)
        step = tiers.cache.step(tiers.name(key), 0, 1000, "reader")
        monkeypatch.setattr(disk_tier, "read_extent", slow)
        results = []

        def read():
            future = tiers.cache.loading(tiers.name(key), step.extent)
            asked.wait(30)
            assert not future.cancel()
            results.append(future.result(30))

        together(*[read] * 8)
        assert results == [data] * 8
        assert len(loads) == 1


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENOMEM, errno.EIO])
def test_an_error_of_the_moment_costs_a_hit_and_not_the_file(tmp_path, monkeypatch, number):
    remote, [(key, data)] = filled(1)

    def fail(*_):
        raise OSError(number, "not now")

    with on_disk(remote, tmp_path, settings=TierSettings(retry_s=0.2)) as tiers:
        tiers.get(key)
        assert tiers.settle(30)
        with monkeypatch.context() as patch:
            patch.setattr(disk_tier, "read_extent", fail)
            assert tiers.get(key) == data
        assert tiers.settle(30)
        assert len(files(tmp_path)) == 1
        assert tiers.counters().disk.corrupt == 0
        remote.reset()
        while not tiers.counters().disk.hits:
            assert tiers.get(key) == data


def test_opening_a_slow_folder_takes_one_slot_however_often_it_is_tried(tmp_path, monkeypatch):
    (tmp_path / "cache").write_bytes(b"in the way")
    remote, pairs = filled(8)
    free = threading.Event()

    def slow(root):
        assert free.wait(30)
        return real(root)

    real = disk_tier.lock_folder
    with on_disk(remote, tmp_path / "cache", settings=TierSettings(retry_s=0.0)) as tiers:
        (tmp_path / "cache").unlink()
        monkeypatch.setattr(disk_tier, "lock_folder", slow)
        for key, data in pairs:
            assert tiers.get(key) == data
        for _ in range(3):
            tiers.cache._disk._worker.submit(tiers.cache._disk.open)
        free.set()
        assert tiers.settle(30)
        assert [one.name for one in (tmp_path / "cache").iterdir()] == ["slot-0"]


VICTIM = """
import random, sys
from pathlib import Path
from kvwire.store import FolderStore, open_tiers

remote, folder, seed = FolderStore(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
tiers = open_tiers(remote, memory_bytes=300_000, folder=folder, folder_bytes=1_500_000)
keys = list(remote.keys(""))
rng = random.Random(seed)
print("running", flush=True)
while True:
    key, start = rng.choice(keys), rng.randrange(90_000)
    tiers.get(key, start, start + rng.randrange(1, 60_000))
    if rng.random() < 0.02:
        tiers.distrust(key)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_whatever_a_killed_process_leaves_is_right_or_not_served(tmp_path, kills):
    remote = FolderStore(tmp_path / "remote")
    _, pairs = filled(40, 100_000)
    for key, data in pairs:
        remote.put(key, data)
    cache = tmp_path / "cache"
    rng = random.Random(7)
    kept = 0
    with ExitStack() as stack:
        for turn in range(kills):
            victim = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", VICTIM, remote.root, cache, str(turn)], stdout=subprocess.PIPE)
            )
            assert victim.stdout.readline() == b"running\n"
            stack.callback(victim.kill)
            threading.Event().wait(rng.uniform(0, 0.12))  # a random moment is the point
            victim.kill()
            victim.wait()
            with closing(open_tiers(remote, memory_bytes=0, folder=cache, folder_bytes=1_500_000)) as tiers:
                assert tiers.settle(30)
                disk = tiers.counters().disk
                assert disk.held_bytes == disk_bytes(cache) <= 1_500_000
                assert not list(cache.rglob("*.tmp"))
                kept += disk.extents
                for key, data in rng.sample(pairs, 8):
                    assert tiers.get(key) == data
                assert tiers.counters().disk.corrupt == 0  # a kill tears no file that has its name
        assert kept > 5 * kills
    assert [path.name for path in cache.iterdir()] == ["slot-0"]


def test_a_temporary_file_of_a_killed_process_is_removed(tmp_path):
    (tmp_path / "slot-0").mkdir()
    (tmp_path / "slot-0" / "new.tmp").write_bytes(b"half")
    with on_disk(MemoryStore(), tmp_path):
        assert not list(tmp_path.rglob("*.tmp"))


def test_a_link_in_place_of_a_folder_is_neither_counted_nor_followed_to_remove_anything(tmp_path):
    remote, [(key, data)] = filled(1)
    with on_disk(remote, tmp_path / "tier") as tiers:
        assert tiers.get(key) == data
        assert tiers.settle(30)
    [path] = files(tmp_path / "tier")
    outside = tmp_path / "outside"
    path.parent.rename(outside)
    path.parent.symlink_to(outside)
    torn = outside / path.name
    torn.write_bytes(b"x")
    with on_disk(remote, tmp_path / "tier") as tiers:
        assert tiers.settle(30)
        assert tiers.counters().disk.held_bytes == 0
    assert torn.read_bytes() == b"x"


@pytest.mark.parametrize("is_pipe", [False, True])
def test_what_is_no_file_is_torn_and_leaks_nothing(tmp_path, is_pipe):
    extent = disk_tier.ExtentName(bytes(32), 0, 10)
    path = tmp_path / extent.file_name
    with ExitStack() as stack:
        if is_pipe:
            os.mkfifo(path)
            for flags in (os.O_RDONLY, os.O_WRONLY):  # a pipe with a writer has nothing yet; one without is at its end
                stack.callback(os.close, os.open(path, flags | os.O_NONBLOCK))
        else:
            path.mkdir()
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with pytest.raises(CorruptError if is_pipe else IsADirectoryError):
                disk_tier.read_extent(path, extent)
        assert len(list(Path("/proc/self/fd").iterdir())) == before
