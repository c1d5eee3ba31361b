"""Learning a model's link shift, and whether it helps."""

from __future__ import annotations

from math import sqrt
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from kvwire.errors import MismatchError
from kvwire.reuse import ShiftLearner
from kvwire.runtime.link_report import DEFAULT_SELECTOR, GAIN_SHARE
from kvwire.runtime.opening import prefill_documents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkShift

LEARNING_PROMPTS = 48
"""That a shift is learnt from, where there are as many."""
LEAST_PROMPTS = 8
"""Fewer teach nothing that lasts."""
_Z = 1.959964


def learn_shift(
    engine: Engine, prompts: Sequence[Sequence[Sequence[int]]], *, tell: Callable[[int], object] = lambda _: None
) -> LinkShift | None:
    """Learn what is added to linked documents: the mean of what they lack, over prompts."""
    usable = [prompt for prompt in prompts if len(prompt) > 1]
    if len(usable) < LEAST_PROMPTS:
        return None
    try:
        learner = ShiftLearner(engine.meta)
    except MismatchError:
        return None
    for number, documents in enumerate(usable):
        (whole,) = prefill_documents(engine, [[token for ids in documents for token in ids]])
        learner.add(prefill_documents(engine, documents), whole)
        tell(number + 1)
    return learner.finish()


def shift_figures(rows: Sequence[dict[object, float]], shift: LinkShift, selectors: Sequence[str]) -> dict[str, Any]:
    """What a report says of a shift.

    It is named, for loads to add, where it surely helps at ``GAIN_SHARE`` of the rows, and surely harms at no other.
    """
    shares = sorted({key[1] for key in rows[0] if isinstance(key, tuple) and key[0] == DEFAULT_SELECTOR})
    gains = {0.0: gain_of([row["linked"] - row["shifted"] for row in rows])}
    for share in shares:
        ours, plain = ("shifted", DEFAULT_SELECTOR, share), (DEFAULT_SELECTOR, share)
        gains[share] = gain_of([row[plain] - row[ours] for row in rows if plain in row])
    gain = gains[GAIN_SHARE if GAIN_SHARE in gains else 0.0]
    helps = gain[1] > 0 and all(high >= 0 for _, _, high in gains.values())
    return {
        "shift": shift.digest if helps else "", "shift_prompts": shift.prompts, "shift_gain": gain,
        "shifted": fmean(row["shifted"] for row in rows),
        "shifted_repaired": {
            name: tuple(_mean(rows, ("shifted", name, share)) for share in shares) for name in selectors
        },
    }  # fmt: skip


def _mean(rows: Sequence[dict[object, float]], key: object) -> float:
    """Over the prompts that have the figure."""
    return fmean(row[key] for row in rows if key in row)


def gain_of(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of paired differences, with its 95 % interval by Student's t."""
    mean, count = fmean(differences), len(differences)
    if count < 2:  # noqa: PLR2004
        return mean, -abs(mean), abs(mean)
    half = _t(count - 1) * stdev(differences) / sqrt(count)
    return mean, mean - half, mean + half


def _t(freedom: int) -> float:
    """The 97.5 % quantile of Student's t: exact for 1 and 2 degrees of freedom, else within 1.5 % (Cornish-Fisher)."""
    if freedom <= 2:  # noqa: PLR2004
        return (12.7062, 4.30265)[freedom - 1]
    z = _Z
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + (z**3 + z) / (4 * freedom) + second + third
