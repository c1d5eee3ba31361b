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
        ("ftp://host/x", "the schemes known are file, http"),
        ("http://", "http"),
        ("s3://", "does not name a bucket"),
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


def test_a_refused_address_is_not_repeated_with_its_secrets():
    with pytest.raises(ArgumentError) as caught:
        open_store("ftp://user:hush@host/x?token=hush")
    assert "hush" not in str(caught.value)
