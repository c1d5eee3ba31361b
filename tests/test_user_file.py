"""Small files among the user's caches."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvwire._user_file import read_at_most, replace_unflushed, user_file, writable_place


@pytest.mark.parametrize("word", ["off", "OFF"])
def test_a_variable_switches_a_file_off(word):
    assert user_file({"A": word}, "A", "a.json") is None


def test_a_user_without_a_home_has_no_file(monkeypatch):
    def homeless(path):
        raise RuntimeError

    monkeypatch.setattr(Path, "expanduser", homeless)
    monkeypatch.setattr(Path, "home", lambda: homeless(None))
    assert user_file({}, "A", "a.json") is None
    assert user_file({"A": "~/a.json"}, "A", "a.json") is None
    assert user_file({"XDG_CACHE_HOME": "/caches"}, "A", "a.json") == Path("/caches/kvwire/a.json")


def test_only_so_much_of_a_regular_file_is_read(tmp_path):
    (tmp_path / "file").write_bytes(b"abcdef")
    assert read_at_most(tmp_path / "file", 6) == b"abcdef"
    assert read_at_most(tmp_path / "file", 4) == b"abcde"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        read_at_most(tmp_path / "pipe", 4)


def test_what_is_written_is_the_users_alone(tmp_path):
    place = writable_place(tmp_path / "a" / "b.json")
    replace_unflushed(place, b"1")
    replace_unflushed(place, b"2")
    assert place.read_bytes() == b"2"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (place.parent, place)] == [0o700, 0o600]
    assert list(place.parent.iterdir()) == [place]
