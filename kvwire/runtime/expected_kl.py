"""The KL divergence to expect of what was loaded, and what is wrong with the floor that bounds it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.controller import fetched_levels, kl_floor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.runtime.answer import Answer
    from kvwire.types import BlobInfo


def level_kl(info: BlobInfo, level: int | None) -> float | None:
    """Look up what a blob expects of a level."""
    if level is None or info.levels[level].lossless:
        return 0.0
    return info.levels[level].predicted_kl


def floor_trouble(info: BlobInfo, max_kl: float, floor: int | None = None, ceiling: int | None = None) -> str:
    """Say in words where levels may be fetched of which a greater KL divergence is expected than is wanted."""
    lossy = len(fetched_levels(info))
    own = kl_floor(info, max_kl)
    if floor is not None:
        level, what = min(floor, lossy - 1), "the floor that was asked for"
    elif ceiling is not None and ceiling < own:
        level, what = ceiling, "the ceiling that was asked for"
    else:
        level, what = own, ""
    kl = level_kl(info, level)
    if kl is None or kl <= max_kl:
        return ""
    if what:
        return f"level {level}, {what}, has an expected KL of {kl:.2g}, above {max_kl:g}"
    return (
        f"no level is predicted within KL {max_kl:g}, the finest, {level}, has {kl:.2g}; encode with finer levels or "
        "raise max_kl"
    )


def with_expected_kl(answer: Answer, infos: Sequence[BlobInfo | None]) -> Answer:
    """Add to an answer which KL divergence is expected of the levels that its documents came at."""
    tokens, sums = [0] * len(infos), [0.0] * len(infos)
    unknown: set[int] = set()
    for decision in answer.decisions:
        at, info = decision.chunk.document, infos[decision.chunk.document]
        if info is None:
            continue
        start, stop = info.chunk_span(decision.chunk.chunk)
        kl = level_kl(info, decision.level)
        tokens[at] += stop - start
        if kl is None:
            unknown.add(at)
        else:
            sums[at] += (stop - start) * kl
    each = tuple(
        None if at in unknown else total / max(1, count)
        for at, (total, count) in enumerate(zip(sums, tokens, strict=True))
    )
    lengths = answer.prompt.tokens
    weighed = [kl * length for kl, length in zip(each, lengths, strict=True) if kl is not None]
    whole = None if unknown else sum(weighed) / max(1, sum(lengths))
    return replace(answer, document_kl=each, expected_kl=whole)
