"""Sketches of texts: few numbers, of which texts that share long runs of tokens share many.

Hashes of all runs of 8 tokens (shingles), of each 16 in a row the least (winnowing, Schleimer et al., SIGMOD 2003), of
these the 64 least (a bottom-k sketch). Any 23 equal tokens share a winnowed hash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

SHINGLE = 8
WINDOW = 16
FEATURES = 64
SCHEME = f"sketch-{FEATURES}"
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token is lost
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64


def sketch(token_ids: Sequence[int]) -> list[int]:
    """At most 64 features of 64 bits, ascending; none where the text has fewer than 8 tokens."""
    words = _mixed(np.asarray(token_ids, np.int64).astype(np.uint64))
    count = len(words) - SHINGLE + 1
    if count < 1:
        return []
    hashes = np.zeros(count, np.uint64)
    for step in range(SHINGLE):
        hashes = hashes * np.uint64(_MULTIPLIER) + words[step : step + count]
    hashes = _mixed(hashes)
    windows = np.lib.stride_tricks.sliding_window_view(hashes, min(WINDOW, count))
    return [int(each) for each in np.unique(windows.min(1))[:FEATURES]]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit depends on every bit: the finalizer of splitmix64."""
    words = words + np.uint64(_MULTIPLIER)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX[1])
    return words ^ (words >> np.uint64(31))
