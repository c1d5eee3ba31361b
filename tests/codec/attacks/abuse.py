"""What the attacks share: a sound blob to abuse, and how a reader must take it."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from kvwire.codec import decode, inspect
from kvwire.codec.format.metadata_json import elements_per_token
from kvwire.codec.kinds.outputs import DTYPES
from kvwire.errors import CorruptError, KvwireError

MOST_BYTES = 8 << 20
"""That a reader of a small abused file may take, traced; sound blobs of the tests take less than one MiB."""


def claimed_bytes(data):
    """Of the cache that a head claims: they are traced, but no page of them is touched before a segment holds."""
    try:
        info = inspect(data)
    except KvwireError:
        return 0
    return info.tokens * elements_per_token(info.meta.layers) * DTYPES.get(info.meta.dtype, torch.float32).itemsize


def refused(data, profile=None, error=CorruptError, match=None, level=None):
    """Reading is refused with that error, in little memory."""
    most = MOST_BYTES + claimed_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(error, match=match):
            decode(data, level, profile, threads=1)
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def refused_by_head(data, error=CorruptError, match=None):
    """The header alone shows it."""
    with pytest.raises(error, match=match):
        inspect(data)
