"""What the attacks share: a sound blob to abuse, and how a reader must take it."""

from __future__ import annotations

import tracemalloc

import pytest

from kvwire.codec import decode, inspect
from kvwire.errors import CorruptError

MOST_BYTES = 8 << 20
"""That a reader of a small abused file may take, traced; sound blobs of the tests take less than one MiB."""


def refused(data, profile=None, error=CorruptError, match=None, level=None):
    """Reading is refused with that error, in little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match):
            decode(data, level, profile, threads=1)
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()


def refused_by_head(data, error=CorruptError, match=None):
    """The head alone shows it."""
    with pytest.raises(error, match=match):
        inspect(data)
