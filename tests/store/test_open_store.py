"""Addresses of stores."""

import pytest

from kvwire.errors import ArgumentError
from kvwire.store import FolderStore, MemoryStore, open_store


def test_memory_is_fresh_each_time():
    first, second = open_store("memory:"), open_store("memory:")
    first.put("k", b"x")
    assert isinstance(first, MemoryStore)
    assert list(second.keys("")) == []


def test_file_addresses_and_back(tmp_path):
    folder = tmp_path / "with space"
    store = open_store(folder.as_uri())
    assert isinstance(store, FolderStore)
    assert store.root == folder
    assert open_store(store.url).url == store.url
    store.put("k", b"x")
    assert (folder / "k").read_bytes() == b"x"


def test_opening_a_folder_makes_nothing(tmp_path):
    store = open_store((tmp_path / "none").as_uri())
    assert list(store.keys("")) == []
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "memory: and file"),
        ("/plain/path", "memory: and file"),
        ("ftp://host/x", "memory: and file"),
        ("http://host", "memory: and file"),
        ("s3://bucket/prefix", "not available in this version"),
        ("memory:shared", "no names"),
        ("file://host/path", "file:///absolute"),
        ("file:relative", "file:///absolute"),
        ("file:", "file:///absolute"),
        ("file:///x?y", "file:///absolute"),
        ("file:///x%00", "zero"),
    ],
)
def test_other_addresses_are_refused_with_a_hint(url, words):
    with pytest.raises(ArgumentError, match=words):
        open_store(url)
