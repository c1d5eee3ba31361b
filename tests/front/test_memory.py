from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvwire.controller import CostModel, DecodeCost, Estimates, PrefillCost
from kvwire.runtime.estimates_file import EstimatesFile, Remembered, engine_key, link_key

MB = 1_000_000
COSTS = CostModel(PrefillCost(0.01, 5e-5, 2e-9), DecodeCost(0.002, 1e-6, 3e-9), 1e-6)
SECRETS = ("s3cret", "t0ken", "alice", "query")


def estimates(rate=40 * MB, *, link=True, engine=True):
    made = Estimates(COSTS, MB, 0.02)
    for i in range(100 if link else 0):
        made.bandwidth.add(int(rate * 0.01), 0.01 * i, 0.01 * (i + 1))
    for _ in range(3 if engine else 0):
        made.prefill.add(256, 0, 1.0)
    return made


@pytest.fixture
def path(tmp_path):
    return tmp_path / "caches" / "estimates.json"


def bandwidth(remembered: Remembered) -> float:
    return Estimates.of_state(remembered.state, COSTS, MB, 0.02).bandwidth.value


def test_another_process_starts_where_this_one_ended(path):
    EstimatesFile(path, lambda: 1000.0).remember("link", "engine", estimates())
    found = EstimatesFile(path, lambda: 1600.0).recall("link", "engine")
    assert found.has_engine
    assert found.age_s == 600
    assert bandwidth(found) == pytest.approx(40 * MB)
    assert Estimates.of_state(found.state, None, MB, 0.02).costs() == estimates().costs()
    assert path.stat().st_mode & 0o077 == 0


def test_links_and_engines_are_known_apart(path):
    file = EstimatesFile(path)
    file.remember("a", "x", estimates())
    file.remember("b", "y", estimates(20 * MB))
    assert bandwidth(file.recall("b", "x")) == pytest.approx(20 * MB)
    assert file.recall("b", "x").has_engine
    assert file.recall("c", "z") == Remembered({"version": 1}, 0.0)


def test_what_was_not_measured_keeps_what_was_known(path):
    file = EstimatesFile(path)
    file.remember("link", None, estimates(link=False))
    assert not path.exists()
    file.remember("link", None, estimates())
    assert not file.recall("link", "engine").has_engine
    file.remember("link", "engine", estimates())
    file.remember("link", "engine", estimates(link=False, engine=False))
    known = file.recall("link", "engine")
    assert bandwidth(known) == pytest.approx(40 * MB)
    assert Estimates.of_state(known.state, None, MB, 0.02).costs() == estimates().costs()


def test_costs_that_were_measured_beforehand_are_kept_though_no_load_measured_any(path):
    EstimatesFile(path).remember("link", "engine", estimates(link=False, engine=False))
    known = EstimatesFile(path).recall("link", "engine")
    assert set(known.state) == {"version", "engine"}
    assert Estimates.of_state(known.state, None, MB, 0.02).costs() == COSTS


def test_the_oldest_entries_go(path, monkeypatch):
    monkeypatch.setattr("kvwire.runtime.estimates_file._MOST_ENTRIES", 8)
    now = [0.0]
    file = EstimatesFile(path, lambda: now[0])
    for index in range(20):
        now[0] += 1
        file.remember(f"link-{index}", f"engine-{index}", estimates(engine=False))
    kept = json.loads(path.read_text())["link"]
    assert len(kept) == 8
    assert "link-11" not in kept
    assert "link-12" in kept


def test_an_entry_from_the_future_does_not_stay_forever(path):
    EstimatesFile(path, lambda: 1e9).remember("future", "engine", estimates())
    now = EstimatesFile(path, lambda: 1000.0)
    assert now.recall("future", "engine").age_s == 0
    now.remember("link", "engine", estimates())
    assert json.loads(path.read_text())["link"]["future"]["saved"] == 1000


WRITER = """
import sys
from pathlib import Path
from kvwire.controller import CostModel, DecodeCost, Estimates, PrefillCost
from kvwire.runtime.estimates_file import EstimatesFile

estimates = Estimates(CostModel(PrefillCost(0.01, 5e-5), DecodeCost(0.002, 1e-6)), 1e6, 0.02)
estimates.bandwidth.add(1_000_000, 0.0, 1.0)
estimates.prefill.add(256, 0, 1.0)
file = EstimatesFile(Path(sys.argv[1]))
sys.stdin.readline()
for index in range(20):
    file.remember(f"link-{sys.argv[2]}-{index}", f"engine-{sys.argv[2]}-{index}", estimates)
"""


def test_processes_that_write_at_once_lose_nothing(path):
    command = [sys.executable, "-c", WRITER, str(path)]
    workers = [subprocess.Popen([*command, str(worker)], stdin=subprocess.PIPE) for worker in range(3)]
    for worker in workers:
        worker.stdin.write(b"go\n")
        worker.stdin.close()
    assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    whole = json.loads(path.read_text())
    names = {f"{worker}-{index}" for worker in range(3) for index in range(20)}
    assert set(whole["link"]) == {f"link-{name}" for name in names}
    assert set(whole["engine"]) == {f"engine-{name}" for name in names}
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def sound() -> dict[str, object]:
    state = estimates().to_state()
    return {"version": 1, **{part: {part: {"saved": 1.0, "state": state[part]}} for part in ("link", "engine")}}


OTHERS = [
    b"{",
    b"\xff\xfe",
    b"null",
    b"[" * 100_000,
    b"1" * 10_000,
    b'{"version": 1}',
    b" " * 2_000_000,
    b"API_KEY=abc\n",
    b'{"version": 1, "link": "https://example.org", "engine": "v8"}',
    json.dumps({**sound(), "version": 2}).encode(),
    json.dumps({**sound(), "more": {}}).encode(),
]
DAMAGED = [
    json.dumps(sound()).replace("1.0,", "NaN,", 1).encode(),
    json.dumps(sound()).replace("1.0,", "1e999,", 1).encode(),
    json.dumps(sound()).replace("1.0,", "true,", 1).encode(),
    json.dumps({**sound(), "link": {"link": {"saved": 1.0}}}).encode(),
    json.dumps({**sound(), "link": {"x" * 1000: {"saved": 1.0, "state": {}}}}).encode(),
    json.dumps({**sound(), "link": {f"{i}": {"saved": 1.0, "state": {}} for i in range(200)}}).encode(),
]


@pytest.mark.parametrize("content", DAMAGED, ids=[str(index) for index in range(len(DAMAGED))])
def test_a_damaged_file_is_told_once_and_written_anew(path, content, caplog):
    path.parent.mkdir()
    path.write_bytes(content)
    file = EstimatesFile(path)
    with caplog.at_level(logging.WARNING):
        assert file.recall("link", "engine").state == {"version": 1}
        assert file.recall("link", "engine").state == {"version": 1}
    assert [record.name for record in caplog.records] == ["kvwire.runtime.estimates_file"]
    file.remember("link", "engine", estimates())
    assert file.recall("link", "engine").has_engine


@pytest.mark.parametrize("content", OTHERS, ids=[str(index) for index in range(len(OTHERS))])
def test_a_file_of_something_else_is_told_once_and_left_alone(path, content, caplog):
    path.parent.mkdir()
    path.write_bytes(content)
    file = EstimatesFile(path)
    with caplog.at_level(logging.WARNING):
        assert file.recall("link", "engine").state == {"version": 1}
        file.remember("link", "engine", estimates())
    (record,) = caplog.records
    assert "left as it is" in record.message
    assert ("newer version" in record.message) == (b'"version": 2' in content)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_an_empty_file_is_filled(path, caplog):
    path.parent.mkdir()
    path.touch()
    EstimatesFile(path).remember("link", "engine", estimates())
    assert EstimatesFile(path).recall("link", "engine").has_engine
    assert not caplog.records


def test_a_symbolic_link_stays_and_its_target_is_written(path, tmp_path):
    path.parent.mkdir()
    target = tmp_path / "elsewhere" / "kept.json"
    path.symlink_to(target)
    for key in ("a", "b"):
        EstimatesFile(path).remember(key, "engine", estimates())
    assert path.is_symlink()
    assert set(json.loads(target.read_text())["link"]) == {"a", "b"}


def test_an_undamaged_file_is_read(path):
    path.parent.mkdir()
    path.write_text(json.dumps(sound()))
    assert set(EstimatesFile(path).recall("link", "engine").state) == {"version", "link", "engine"}


def test_a_damaged_entry_costs_only_itself(path, caplog):
    whole = sound()
    whole["link"]["link"]["state"]["bandwidth"] = -1
    path.parent.mkdir()
    path.write_text(json.dumps(whole))
    file = EstimatesFile(path)
    with caplog.at_level(logging.WARNING):
        assert set(file.recall("link", "engine").state) == {"version", "engine"}
    assert len(caplog.records) == 1
    file.remember("other", "other", estimates())
    assert set(json.loads(path.read_text())["link"]) == {"other"}


def test_a_place_that_cannot_be_used_is_told_once_and_costs_nothing(tmp_path, caplog):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    within = [tmp_path / name for name in ("file/estimates.json", "folder", "pipe", "loop", "a\0b")]
    places = [*within, Path("/proc/estimates"), Path("/dev/null")]
    for place in places:
        caplog.clear()
        file = EstimatesFile(place)
        with caplog.at_level(logging.WARNING):
            file.recall("link", "engine")
            file.remember("link", "engine", estimates())
            file.remember("link", "engine", estimates())
        assert len(caplog.records) == 1
    assert (tmp_path / "pipe").is_fifo()
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "folder", "pipe", "loop"}


@pytest.fixture
def usual(tmp_path):
    """Where estimates are kept that nobody named, with some in it; and the file of the environment."""
    environment = {"XDG_CACHE_HOME": str(tmp_path)}
    EstimatesFile.of_environment(environment).remember("link", "engine", estimates())
    return tmp_path / "kvwire" / "estimates.json", lambda: EstimatesFile.of_environment(environment)


def is_refused(usual, caplog):
    """Whether a file is neither read nor written, which is told once; and whether it is, where the user names it."""
    path, opened = usual
    before, caplog.records[:] = path.read_bytes(), []
    file = opened()
    for _ in range(2):
        assert file.recall("link", "engine").state == {"version": 1}
        file.remember("other", "engine", estimates())
    assert path.read_bytes() == before
    (told,) = caplog.records
    assert "not trusted (make it yours alone, or name it in KVWIRE_ESTIMATES)" in told.getMessage()
    named = EstimatesFile.of_environment({"KVWIRE_ESTIMATES": str(path)})
    assert named.recall("link", "engine").has_engine
    return told.getMessage()


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_trusted_unless_it_is_named(usual, caplog, mode):
    usual[0].chmod(mode)
    assert "others may write it" in is_refused(usual, caplog)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_trusted_unless_it_is_named(usual, caplog, tmp_path):
    os.chown(usual[0], 12345, -1)
    assert "belongs to another user" in is_refused(usual, caplog)
    moved = usual[0].rename(tmp_path / "theirs.json")
    usual[0].symlink_to(moved)  # a link of one's own to it makes it no better
    assert "belongs to another user" in is_refused(usual, caplog)


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o400])
def test_a_file_of_ones_own_is_used(usual, caplog, mode):
    path, opened = usual
    path.chmod(mode)
    assert opened().recall("link", "engine").has_engine
    path.rename(path.with_name("moved.json"))
    path.symlink_to("moved.json")
    opened().remember("other", "engine", estimates())
    assert path.is_symlink()
    assert opened().recall("other", "engine").state.keys() == {"version", "link", "engine"}
    assert not caplog.records


def test_a_huge_file_is_not_read_and_left_alone(path, caplog):
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(1 << 36)  # 64 GiB, of which the disk holds none
    opened = EstimatesFile(path)
    assert opened.recall("link", "engine").state == {"version": 1}
    opened.remember("link", "engine", estimates())
    assert path.stat().st_size == 1 << 36
    assert "is no file of estimates" in caplog.text


def test_a_lock_that_leads_elsewhere_is_not_followed(path, tmp_path, caplog):
    path.parent.mkdir()
    path.with_name(f"{path.name}.lock").symlink_to(tmp_path / "elsewhere")
    EstimatesFile(path).remember("link", "engine", estimates())
    assert not (tmp_path / "elsewhere").exists()
    assert not path.exists()
    assert "estimates are not remembered" in caplog.text


def test_a_full_disk_leaves_the_old_file_and_nothing_else(path, monkeypatch, caplog):
    file = EstimatesFile(path)
    file.remember("link", "engine", estimates())

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with caplog.at_level(logging.WARNING):
        file.remember("other", "other", estimates())
    assert "No space left" in caplog.text
    assert file.recall("link", "engine").has_engine
    assert {entry.name for entry in path.parent.iterdir()} == {path.name, f"{path.name}.lock"}


def test_a_lock_that_is_never_let_go_is_given_up(path, monkeypatch, caplog):
    import fcntl

    monkeypatch.setattr("kvwire.runtime.estimates_file._LOCK_PATIENCE_S", 0.02)
    path.parent.mkdir()
    with path.with_name(f"{path.name}.lock").open("w") as held, caplog.at_level(logging.WARNING):
        fcntl.flock(held, fcntl.LOCK_EX)
        EstimatesFile(path).remember("link", "engine", estimates())
    assert not path.exists()
    assert len(caplog.records) == 1


def test_the_environment_says_where(tmp_path):
    home = {"HOME": str(tmp_path)}
    assert EstimatesFile.of_environment({**home, "KVWIRE_ESTIMATES": "/x/y.json"})._path == Path("/x/y.json")
    named = EstimatesFile.of_environment({**home, "XDG_CACHE_HOME": "/caches"})
    assert named._path == Path("/caches/kvwire/estimates.json")
    for ignored in ({}, {"XDG_CACHE_HOME": "relative"}, {"XDG_CACHE_HOME": "", "KVWIRE_ESTIMATES": ""}):
        assert EstimatesFile.of_environment(ignored)._path == Path.home() / ".cache/kvwire/estimates.json"
    off = EstimatesFile.of_environment({"KVWIRE_ESTIMATES": "off"})
    off.remember("link", "engine", estimates())
    assert off.recall("link", "engine") == Remembered({"version": 1}, 0.0)


URLS = [
    ("http://Example.org/a/t0ken?x=query", "http://example.org:80"),
    ("https://alice:s3cret@example.org:8443/a?t0ken#query", "https://example.org:8443"),
    ("https://example.org", "https://example.org:443"),
    ("s3://bucket/alice?endpoint=http://alice:s3cret@host:9000/t0ken&region=eu-1", "s3://bucket at host:9000"),
    ("s3://alice:s3cret@bucket/x?region=eu-1&profile=alice", "s3://bucket at eu-1"),
    ("s3://bucket", "s3://bucket at default"),
    ("memory:", "memory"),
    ("ftp://alice:s3cret@Example.org/t0ken?query", "ftp://example.org"),
    ("ftp://example.org:2121/a", "ftp://example.org:2121"),
    ("ftp://host:99999999/", "unknown"),
    ("ftp://", "ftp"),
    ("http://[bad/alice", "unknown"),
    ("http://host:99999999/", "unknown"),
]


@pytest.mark.parametrize(("url", "name"), URLS)
def test_a_links_name_tells_the_place_and_no_secret(url, name):
    assert link_key(url) == name
    assert not any(secret in link_key(url, "50mbit,20ms") for secret in SECRETS)


def test_folders_and_emulated_links_have_names_of_their_own(tmp_path):
    folder = link_key(str(tmp_path / "alice"))
    assert folder == link_key((tmp_path / "alice").as_uri()) != link_key(str(tmp_path / "bob"))
    assert "alice" not in folder
    names = {link_key("http://host"), link_key("http://host", "50mbit"), link_key("http://host", "60mbit")}
    assert len(names) == 3


def test_stores_of_registered_schemes_have_names_of_their_own():
    stores = (
        "zip:///alice/a.zip",
        "zip:///alice/b.zip",
        "zip:alice",
        "zip://alice:s3cret@/c.zip",
        "tar:///alice/a.zip",
    )
    names = [link_key(url) for url in (*stores, "ftp://alice|1/x", "ftp://alice|2/x", f"ftp://{'a' * 5000}/x")]
    assert len(set(names)) == len(names)
    assert max(map(len, names)) < 40
    assert not any(secret in name for secret in SECRETS for name in names)
    assert link_key("zip:///a.zip?key=s3cret#t0ken") == link_key("zip:///a.zip")


def test_an_engines_name_tells_what_its_speed_depends_on():
    known = ("org/model", "main", "NVIDIA H200", "bfloat16", "8")
    assert engine_key(*known) == "org/model | main | NVIDIA H200 | bfloat16 | 8"
    others = [("org/b", *known[1:]), (*known[:2], "cpu", *known[3:]), (*known[:4], "4"), (*known, "triton")]
    others += [
        (*known, "", "torch 2.8.0+cpu kvwire 0.1.0"),
        (*known, "2 decoded at a time"),
        (*known, "4 decoded at a time"),
    ]
    assert len({engine_key(*other) for other in others} | {engine_key(*known)}) == 8
    assert "alice" not in engine_key("/home/alice/model", "t0ken=s3cret?", "cpu", "float32", "2")
    assert engine_key("https://alice:s3cret@host/m", *known[1:]).startswith("#")


def test_no_name_is_too_long_for_the_file(path):
    link, engine = link_key(f"http://{'a' * 5000}/"), engine_key(*["x" * 5000] * 4, "9" * 10)
    file = EstimatesFile(path)
    file.remember(link, engine, estimates())
    assert file.recall(link, engine).has_engine
