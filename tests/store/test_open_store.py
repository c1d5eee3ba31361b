"""Addresses of stores."""

import pytest

from kvwire.errors import ArgumentError
from kvwire.store import FolderStore, MemoryStore, open_store


def test_memory_is_fresh_each_time():
    first, second = open_store("memory:"), open_store("memory:")
    first.put("k", b"x")
    assert isinstance(first, MemoryStore)
    assert list(second.keys("")) == []


def test_file_addresses_and_back_and_opening_makes_nothing(tmp_path):
    folder = tmp_path / "with space"
    store = open_store(folder.as_uri())
    assert isinstance(store, FolderStore)
    assert store.root == folder
    assert open_store(store.url).url == store.url
    assert list(store.keys("")) == []
    assert not folder.exists()
    store.put("k", b"x")
    assert (folder / "k").read_bytes() == b"x"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("ftp://host/x", "the schemes known are file, http"),
        *((url, "address is empty") for url in ("", " ")),
        ("http://", "http"),
        ("s3://", "does not name a bucket"),
        *(("memory:shared", "no names"), ("file://host/path", "file:///absolute"), ("file:relative", "file:///abs")),
        ("file:", "file:///absolute"),
        ("file:///x?y", "file:///absolute"),
        *(("file:///x%00", "zero"), ("ftp://user:hush@host/x?token=hush", "the schemes known")),
    ],
)
def test_other_addresses_are_refused_with_a_hint_and_without_their_secrets(url, words):
    with pytest.raises(ArgumentError, match=words) as caught:
        open_store(url)
    assert "hush" not in str(caught.value)
