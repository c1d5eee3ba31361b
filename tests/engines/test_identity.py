from __future__ import annotations

import hashlib
import json
import os

import pytest

from kvwire.engines.transformers import identity
from kvwire.engines.transformers.identity import model_revision
from kvwire.engines.transformers.revisions import RevisionsFile

LONG_AGO = 10**18  # nanoseconds
ZEROS = (1 << 30) + (1 << 20)
SHA256_OF_ZEROS = "0e5784b2441347f7c1cbfe2ee03dd421ff87c3086fdf0ce280cf26cbcf114462"
"""Of so many zero bytes, which are above the real limit."""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A folder whose weights count as large: one file above the limit, one below."""
    monkeypatch.setattr(identity, "_WHOLE", 1 << 20)
    monkeypatch.setattr(identity, "_REMEMBERED", 1 << 20)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model-2.safetensors").write_bytes(b"small")
    with (folder / "model-1.safetensors").open("wb") as file:
        file.truncate(9 << 20)  # sparse
    for path in folder.iterdir():
        os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return folder


@pytest.fixture
def revisions(tmp_path):
    return RevisionsFile(tmp_path / "caches" / "revisions.json")


@pytest.fixture
def read(monkeypatch):
    """Names of the files that are read."""
    names = []
    blocks = identity._blocks

    def recorded(path, tell):
        names.append(path.name)
        return blocks(path, tell)

    monkeypatch.setattr(identity, "_blocks", recorded)
    return names


def flip(path, at):
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\x01")
    os.utime(path, ns=(LONG_AGO, LONG_AGO))


def test_every_byte_of_a_large_file_counts(model):
    before = model_revision(model, RevisionsFile(None))
    flip(model / "model-1.safetensors", (5 << 20) + 70_001)
    assert model_revision(model, RevisionsFile(None)) != before


def test_a_sparse_file_above_the_real_limit_counts_to_its_middle(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(ZEROS)
    unflipped = f"config.json:2:{{}}model.safetensors:{ZEROS}:sha256:".encode() + bytes.fromhex(SHA256_OF_ZEROS)
    flip(tmp_path / "model.safetensors", (1 << 29) + 70_001)
    assert model_revision(tmp_path, RevisionsFile(None)) != hashlib.sha256(unflipped).hexdigest()


def test_revisions_of_small_files_are_digests_of_names_sizes_and_contents(tmp_path):
    (tmp_path / "config.json").write_bytes(b"{}")
    weights = os.urandom(200_000)
    (tmp_path / "model.safetensors").write_bytes(weights)
    wanted = hashlib.sha256(b"config.json:2:{}" + b"model.safetensors:200000:" + weights)
    assert model_revision(tmp_path) == wanted.hexdigest()


def test_a_second_opening_reads_nothing(model, revisions, read):
    first = model_revision(model, revisions)
    assert sorted(read) == ["config.json", "model-1.safetensors", "model-2.safetensors"]
    read.clear()
    assert model_revision(model, revisions) == first
    assert read == []


def test_a_change_of_a_file_or_its_time_hashes_anew(model, revisions, read):
    first = model_revision(model, revisions)
    read.clear()
    os.utime(model / "model-1.safetensors", ns=(LONG_AGO, LONG_AGO + 1))
    assert model_revision(model, revisions) == first
    assert "model-1.safetensors" in read
    flip(model / "model-1.safetensors", 1 << 22)  # which puts the time back
    assert model_revision(model, revisions) != first


def test_another_file_in_its_place_hashes_anew(model, revisions):
    first = model_revision(model, revisions)
    other = model / "other"
    other.write_bytes(bytes((9 << 20) - 1) + b"\x01")
    other.replace(model / "model-1.safetensors")
    os.utime(model / "model-1.safetensors", ns=(LONG_AGO, LONG_AGO))
    assert model_revision(model, revisions) != first


def test_files_that_have_just_changed_are_not_remembered(model, revisions, read):
    os.utime(model / "model-1.safetensors")
    model_revision(model, revisions)
    read.clear()
    model_revision(model, revisions)
    assert read


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"[]", b"{", b"[" * 100_000, b'{"version": 2}', b'{"version": 1, "revisions": {"a": "b"}}',
     b'{"version": 1, "revisions": []}', b" " * (1 << 19)],
    ids=["empty", "bytes", "list", "cut", "deep", "newer", "digests", "entries", "large"],
)  # fmt: skip
def test_bad_content_is_ignored_and_written_anew(model, revisions, read, content):
    first = model_revision(model, revisions)
    revisions._path.write_bytes(content)
    read.clear()
    assert model_revision(model, revisions) == first
    assert read
    assert list(json.loads(revisions._path.read_bytes())["revisions"].values()) == [first]


def test_entries_are_bounded_and_the_oldest_go(revisions):
    for number in range(300):
        revisions.remember(hashlib.sha256(str(number).encode()).hexdigest(), f"{number:064x}")
    kept = json.loads(revisions._path.read_bytes())["revisions"]
    assert list(kept.values()) == [f"{number:064x}" for number in range(44, 300)]
    assert [path.name for path in revisions._path.parent.iterdir()] == ["revisions.json"]


def test_a_place_that_cannot_be_written_is_no_error(model, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "below.json", tmp_path, None):
        assert model_revision(model, RevisionsFile(path))
    assert (tmp_path / "file").read_text() == ""


def test_the_environment_names_the_file_or_switches_it_off(model, monkeypatch, tmp_path, read):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    model_revision(model)
    assert (tmp_path / "xdg" / "kvwire" / "revisions.json").is_file()
    monkeypatch.setenv("KVWIRE_REVISIONS", str(tmp_path / "named.json"))
    model_revision(model)
    assert (tmp_path / "named.json").is_file()
    monkeypatch.setenv("KVWIRE_REVISIONS", "off")
    read.clear()
    model_revision(model)
    assert read


def test_a_usual_file_that_others_may_write_is_not_trusted(monkeypatch, tmp_path):
    """Who forges a revision has another model's caches taken for this one's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVWIRE_REVISIONS", raising=False)
    usual, key = RevisionsFile.of_environment(), "1" * 64
    usual.remember(key, "a" * 64)
    assert usual.recall(key) == "a" * 64
    path = tmp_path / "kvwire" / "revisions.json"
    path.chmod(0o666)
    assert usual.recall(key) is None
    monkeypatch.setenv("KVWIRE_REVISIONS", str(path))
    assert RevisionsFile.of_environment().recall(key) == "a" * 64
    usual.remember(key, "b" * 64)  # written anew, by this user alone
    assert usual.recall(key) == "b" * 64


def test_a_file_that_vanishes_while_others_are_hashed_is_told(model, monkeypatch):
    def gone(path, tell):
        raise FileNotFoundError(path)

    monkeypatch.setattr(identity, "_hashed", gone)
    with pytest.raises(OSError, match="model-1"):
        model_revision(model, RevisionsFile(None))
