"""Blobs of each method, to be abused."""

from __future__ import annotations

import pytest
import torch

from kvwire.codec import decode, encode, fit_cachegen_profile

from ..conftest import LADDER
from ..synthetic import make_cache


@pytest.fixture(scope="session")
def exact_blob():
    """A lossless level alone, two chunks."""
    return encode(make_cache(40, 3, dtype=torch.bfloat16), levels=0, lossless=True, chunk_tokens=32)


@pytest.fixture(scope="session")
def cachegen_profile():
    return fit_cachegen_profile([make_cache(200, 1)])


@pytest.fixture(scope="session")
def cachegen_blob(cachegen_profile):
    return encode(make_cache(76, 3), cachegen_profile, chunk_tokens=32)


@pytest.fixture(scope="session")
def other_blob(profile):
    """Another document of the same shape as ``blob``."""
    return encode(make_cache(76, 8), profile, LADDER, chunk_tokens=32)


@pytest.fixture(scope="session", autouse=True)
def _compiled(blob, own_blob, profile, exact_blob, cachegen_blob, cachegen_profile):
    """Every kernel has run once, so that its compiler's memory is not taken for a reader's."""
    for data, used in ((blob, profile), (own_blob, None), (exact_blob, None), (cachegen_blob, cachegen_profile)):
        decode(data, None, used)
