"""What the commands read alike, above all heads of blob files, of which nothing else is read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import kvwire
from kvwire.cli.inputs import read_file, read_file_header, read_link, read_machine, read_shape, read_tokens
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, NotFoundError, TruncatedError
from kvwire.store import MemoryStore
from kvwire.store.schemes import SCHEMES


@pytest.fixture(scope="module")
def blob(small):
    cache = small.engine.prefill([next(iter(small.tokens.values()))])[0]
    return kvwire.encode(cache, profile=small.profile)


def test_of_a_large_file_the_head_alone_is_read(blob, tmp_path):
    info = kvwire.inspect(blob)
    path = tmp_path / "large.kvw"
    with path.open("wb") as file:
        file.write(blob[: info.header_bytes])
        file.truncate(1 << 37)  # sparse, and more than fits into memory
    assert read_file_header(path).header_bytes == info.header_bytes


def test_a_head_longer_than_the_first_read_is_completed(blob, tmp_path, monkeypatch):
    monkeypatch.setattr("kvwire.cli.inputs._PREFIX_BYTES", 100)
    path = tmp_path / "one.kvw"
    path.write_bytes(blob)
    assert read_file_header(path).tokens == kvwire.inspect(blob).tokens


def test_errors_of_heads_name_the_file(blob, tmp_path):
    head = kvwire.inspect(blob).header_bytes
    newer = bytearray(blob)
    newer[8:10] = b"\xff\xff"
    cases = [
        (blob[:50], TruncatedError),
        (blob[: head - 1], TruncatedError),
        (b"text", CorruptError),
        (b"", CorruptError),
    ]
    for content, kind in [*cases, (bytes(newer), (FormatVersionError, CorruptError))]:
        path = tmp_path / "bad.kvw"
        path.write_bytes(content)
        with pytest.raises(kind, match=r"bad\.kvw: "):
            read_file_header(path)
    with pytest.raises(NotFoundError, match=r"none\.kvw"):
        read_file_header(tmp_path / "none.kvw")


def test_pipes_are_read_and_folders_are_not(tmp_path):
    reading, writing = os.pipe()
    os.write(writing, b"[1, 2]")
    os.close(writing)
    assert read_file(Path(f"/dev/fd/{reading}"), "write it") == b"[1, 2]"
    os.close(reading)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotFoundError, match="is not a file; write it"):
            read_file(path, "write it")


def test_lengths_are_counted_in_tokens_or_1024_of_them():
    assert (read_tokens("4000", 1 << 20), read_tokens(" 32K ", 1 << 20)) == (4000, 32768)
    for text in ("", "0", "0k", "-1", "1.5k", "2048k", "k", "٣"):
        with pytest.raises(ArgumentError, match="at most 1024k"):
            read_tokens(text, 1 << 20)


def test_names_and_links_are_refused_in_plain_words():
    for text in ("0mbit", "fast", "1gbit,"):
        with pytest.raises(ArgumentError, match="bandwidth above 0") as caught:
            read_link(text)
        assert "Settings" not in str(caught.value)
    with pytest.raises(NotFoundError, match="h100, "):
        read_machine("toaster")
    with pytest.raises(NotFoundError, match="llama"):
        read_shape("gpt-9")


@pytest.mark.parametrize("tiers", [(), ("--cache", "cache"), ("--memory-size", "1MB")])
def test_a_store_that_is_not_there_is_told_before_and_behind_tiers(run, tmp_path, monkeypatch, tiers):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("store", "ls", "--store", "missing", *tiers)
    assert code != 0
    assert not out
    assert "is not a folder" in err
    code, _, err = run("store", "ls", "--store", "memory:", *tiers)
    assert code != 0
    assert "a memory store ends with this command" in err


class Absent(MemoryStore):
    """A new store that is not there yet."""

    url = "absent://host/a"
    is_lasting = True

    def exists(self):
        return False


def test_a_new_store_tells_itself_whether_it_is_there_and_lasts(run, monkeypatch):
    monkeypatch.setitem(SCHEMES, "absent", lambda _url, _token: Absent())
    code, out, err = run("store", "ls", "--store", "absent://secret@host/a")
    assert (code, out) == (3, "")
    assert "there is no store at absent://host/a; check the address" in err
    monkeypatch.setattr(Absent, "is_lasting", False)
    code, _, err = run("store", "ls", "--store", "absent://host/a")
    assert code == 2
    assert "ends with this command" in err


def test_a_size_of_a_cache_needs_its_folder(run, tmp_path, monkeypatch):
    words = ("store", "ls", "--store", f"file://{tmp_path}")
    code, _, err = run(*words, "--cache-size", "1GB")
    assert code == 2
    assert "name the folder with --cache, too" in err
    code, _, err = run(*words, "--cache-size", "1GB", "--cache", tmp_path / "cache")
    assert "--cache-size" not in err
    monkeypatch.setenv("KVWIRE_CACHE_SIZE", "1GB")  # of a machine where other commands have a cache
    assert "--cache-size" not in run(*words)[2]
