"""What most tests of the codec decode."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kvwire.codec import Ladder, encode, fit_profile

from ..interpreter import quicken
from .synthetic import make_cache, make_hidden, make_statistics, stored_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.codec import KVCache, Profile

quicken()
LADDER = Ladder(3.6, ("coarse", "standard", "fine", "finest"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Matrices are tiny here: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def profile() -> Profile:
    """Fitted on two documents, with statistics and the vocabulary: it predicts from the text. Stored plainly."""
    fitted = fit_profile([make_cache(512, seed) for seed in (1, 2)], make_statistics(words=True))
    assert fitted is not None
    return stored_plainly(fitted)


@pytest.fixture(scope="session")
def packed_profile() -> Profile:
    """One of two groups as it is stored when it was just fitted: whole numbers and steps."""
    fitted = fit_profile([make_cache(512, seed) for seed in (1, 2)], make_statistics(words=True), group_width=64)
    assert fitted is not None
    return fitted


@pytest.fixture(scope="session")
def plain_profile() -> Profile:
    """The same without the vocabulary: what it expects is the mean."""
    fitted = fit_profile([make_cache(512, seed) for seed in (1, 2)], make_statistics())
    assert fitted is not None
    return fitted


@pytest.fixture(scope="session")
def head_profile() -> Profile:
    """It predicts from hidden states after two layers."""
    caches = [make_cache(512, seed) for seed in (1, 2)]
    fitted = fit_profile(caches, make_statistics(), prefix_layers=2, hidden=[make_hidden(cache) for cache in caches])
    assert fitted is not None
    return fitted


@pytest.fixture(scope="session")
def cache() -> KVCache:
    """A document that the profile has not seen; its last chunk of 32 tokens is short."""
    return make_cache(76, 3)


@pytest.fixture(scope="session")
def blob(cache: KVCache, profile: Profile) -> bytes:
    """Three chunks, four levels, the profile outside."""
    return encode(cache, profile, LADDER, chunk_tokens=32)


@pytest.fixture(scope="session")
def own_blob(cache: KVCache) -> bytes:
    """The same document with its profile inside."""
    return encode(cache, None, LADDER, chunk_tokens=32)
