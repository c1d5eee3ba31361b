"""What a decode has to move and to multiply, and how long the device would need for just that."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gpu_parts.shapes import BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvwire import Profile
    from kvwire.types import BlobInfo

_VALUE_BYTES = 2
"""Quantised values lie between the two halves of a decode as int16."""


@dataclass(frozen=True)
class Work:
    """One decode, counted from the blob's index and the profile's shapes.

    symbols: decoded by the entropy coder, all levels up to the one asked for. coded: coefficients of the result.
    flop: of coefficients times rows, and of token features times predictors for each token. entropy_bytes: segments
    read, values written. place_bytes: values, rows, predictors and features read, the cache written; each once.
    """

    symbols: int
    coded: int
    flop: float
    entropy_bytes: int
    place_bytes: int


def work_of(info: BlobInfo, level: int, profile: Profile) -> Work:
    """Count a decode of a blob at a level. Coded columns are taken to be spread evenly over the groups."""
    width = sum(group.width for group in profile.groups)
    mean_width = width / len(profile.groups)
    rows = [row[: level + 1] for row in info.segments]
    symbols = sum(segment.raw for row in rows for segment in row)
    coded = sum(row[-1].raw for row in rows)
    stored = sum(segment.stored for row in rows for segment in row)
    values = _VALUE_BYTES * coded
    matrices = BYTES * (coded / info.tokens * mean_width + profile.token_features * width)
    return Work(
        symbols=symbols,
        coded=coded,
        flop=2.0 * coded * mean_width + 2.0 * info.tokens * profile.token_features * width,
        entropy_bytes=stored + values,
        place_bytes=round(values + matrices + info.tokens * profile.token_features + BYTES * info.tokens * width),
    )


def judged(work: Work, entropy_ms: float, place_ms: float, limits: Mapping[str, Any]) -> dict[str, Any]:
    """The floors of both halves in milliseconds, the shares that were reached, and what bounds the decode.

    ``entropy``: the entropy coder, whose lanes are walked symbol by symbol, takes longer than its bytes and than all
    that follows. ``memory`` and ``matrix products``: whichever floor of the second half is higher.
    """
    memory = limits["copy"]["gb_s"] * 1e6
    moved = work.place_bytes / memory
    multiplied = work.flop / (limits["matmul"]["tflop_s"] * 1e9)
    floor = max(moved, multiplied)
    second = "matrix products" if multiplied > moved else "memory"
    return {
        **asdict(work),
        "entropy_memory_floor_ms": work.entropy_bytes / memory,
        "place_memory_floor_ms": moved,
        "place_matmul_floor_ms": multiplied,
        "place_share_of_floor": floor / place_ms,
        "bound_by": "entropy" if entropy_ms >= place_ms else second,
    }
