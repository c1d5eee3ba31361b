"""Choose the unit of a profile's coefficients so that the default levels reach their target quality on the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.codec.entropy.tables import GRID_PER_LEVEL, scale_of
from kvwire.codec.profile.group import Factor, QuantisedMatrix
from kvwire.codec.profile.profile import ERROR_NOTE
from kvwire.codec.transform.levels import RATIO, Ladder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.codec.profile.group import Group, RoundedMatrices
    from kvwire.codec.profile.profile import Profile

COARSEST_KL, FINEST_KL = 0.05, 2e-4
"""Largest KL divergence in nats of the coarsest level (still an answer) and of the finest (as good as exact). Each
level has about a sixth of the one below."""
MARGIN = 9
"""A fit keeps coefficients this many times narrower than the final profile: the unit may become two levels finer."""
_FINER, _COARSER = 2 * GRID_PER_LEVEL, 6 * GRID_PER_LEVEL
"""Most classes that the unit moves: beyond two levels finer, the fit has no rows."""
_LEAST_ERROR = 1e-30


def errors_of(profile: Profile) -> list[float]:
    """Return the errors of the default levels in the profile's notes; empty where one is missing."""
    noted = [profile.notes.get(ERROR_NOTE + name) for name in Ladder().names]
    return [float(each) for each in noted if each is not None] if None not in noted else []


def with_unit(profile: Profile, errors: Sequence[float], rank_cut: float) -> Profile:
    """Change the unit of a profile's coefficients so that the default levels reach their KL divergences.

    The unit moves by whole classes of the entropy coder's tables, which stay unchanged.
    """
    if profile.error_to_kl is None or not errors:
        return moved_by(profile, 0, rank_cut)
    level, slope = profile.error_to_kl
    steps = np.log(Ladder().steps[: len(errors)])
    kls = math.log(level) + slope * np.log(np.maximum(errors, _LEAST_ERROR))
    ends = ((steps[0], COARSEST_KL), (steps[-1], FINEST_KL))
    finer = max(step - _at(kls[::-1], steps[::-1], math.log(kl)) for step, kl in ends)
    moved = max(-_COARSER, min(_FINER, round(GRID_PER_LEVEL * finer / math.log(RATIO))))
    return moved_by(profile, moved, rank_cut)


def _at(x: np.ndarray, y: np.ndarray, where: float) -> float:
    """Interpolate linearly between points of ascending x, and extrapolate beyond both ends."""
    if len(x) == 1:
        return float(y[0] + (where - x[0]) / 2)  # errors grow with the step's square
    index = int(np.clip(np.searchsorted(x, where), 1, len(x) - 1))
    rise = (y[index] - y[index - 1]) / max(x[index] - x[index - 1], 1e-9)
    return float(y[index - 1] + rise * (where - x[index - 1]))


def moved_by(profile: Profile, classes: int, rank_cut: float) -> Profile:
    """Scale coefficients up by some classes, which makes every level finer."""
    factor = RATIO ** (classes / GRID_PER_LEVEL)
    seen = profile.notes.get("tokens")
    narrowest = rank_cut * Ladder().steps[-1]
    groups = tuple(
        _moved(group, classes, factor, narrowest if isinstance(seen, int) and seen >= group.width else 0.0)
        for group in profile.groups
    )
    known = errors_of(profile)
    notes = dict(profile.notes)
    for level, name in enumerate(Ladder().names) if known else ():
        at = _at(np.arange(len(known)), np.log(np.maximum(known, _LEAST_ERROR)), level + classes / GRID_PER_LEVEL)
        notes[ERROR_NOTE + name] = factor**2 * math.exp(at)
    old = profile.error_to_kl
    curve = None if old is None else (old[0] / factor ** (2 * old[1]), old[1])
    return replace(profile, groups=groups, error_to_kl=curve, notes=notes)


def _moved(group: Group, classes: int, factor: float, narrowest: float) -> Group:
    rounded = group.rounded
    if rounded is None or group.rows is None:
        return group
    spread = np.clip(group.spread.astype(np.int64) + classes, -1000, 1000).astype(np.int16)
    wide = np.flatnonzero(scale_of(spread.astype(np.int64)) >= narrowest)
    rank = int(wide[-1]) + 1 if len(wide) else 1  # ``narrowest`` is 0 for fits on few tokens, which keep all directions
    made = _scaled(rounded, rank, factor)
    scale = np.float32(factor) ** 2
    pairs = zip(made.factors, group.metric, strict=True)
    metric = tuple(block * scale if known is None else known.metric for known, block in pairs)
    return replace(
        group, spread=spread[:rank], rows=made.rows.values(), metric=metric, rounded=made,
        cuts=_cuts(group.cuts, classes, rank), solved={}, sink_steps=group.sink_steps / np.float32(factor),
    )  # fmt: skip


def _scaled(rounded: RoundedMatrices, rank: int, factor: float) -> RoundedMatrices:
    rows, scale = rounded.rows, np.float32(factor)
    factors = tuple(None if one is None else Factor(one.entries, one.steps * scale) for one in rounded.factors)
    made = QuantisedMatrix(rows.entries[:rank], rows.row_steps[:rank] / scale, rows.column_steps)
    return replace(rounded, rows=made, factors=factors)


def _cuts(cuts: tuple[int, ...], classes: int, rank: int) -> tuple[int, ...]:
    """Interpolate the rows that each level needs in the new unit from those of the levels."""
    if not cuts:
        return cuts
    known = np.arange(len(cuts), dtype=np.float64)
    found = [_at(known, np.asarray(cuts, np.float64), level + classes / GRID_PER_LEVEL) for level in range(len(cuts))]
    return tuple(int(np.clip(math.ceil(each), 0, rank)) for each in found)
