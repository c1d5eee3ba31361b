"""What most tests of the codec decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvwire.codec import encode, fit_profile

from .synthetic import make_cache, make_statistics

if TYPE_CHECKING:
    from kvwire.codec import KVCache, Profile


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Fitted on two documents, with statistics."""
    fitted = fit_profile([make_cache(512, seed) for seed in (1, 2)], make_statistics())
    assert fitted is not None
    return fitted


@pytest.fixture(scope="session")
def cache() -> KVCache:
    """A document that the profile has not seen; its last chunk of 32 tokens is short."""
    return make_cache(76, 3)


@pytest.fixture(scope="session")
def blob(cache: KVCache, profile: Profile) -> bytes:
    """Three chunks, four levels, the profile outside."""
    return encode(cache, profile, chunk_tokens=32)


@pytest.fixture(scope="session")
def own_blob(cache: KVCache) -> bytes:
    """The same document with its profile inside."""
    return encode(cache, chunk_tokens=32)
