"""How chunks that are valid, or will be, become better in the time that is left."""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .forecast import decode_s, unfetched_s, wire_s
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from .snapshot import Floats, Ints, PlanRequest, UpgradeCandidates


class Refining:
    """What chunks that are valid or under way could become, and when that would be done; levels are arrays ``[m]``.

    Refinements are asked for up to the level that is wanted in one go, and decoded once, behind all other decoding. The
    link delivers them one after another while earlier ones are decoded.

    Attributes:
        ready_s: Seconds from now to the first token without refinements.
    """

    def __init__(self, request: PlanRequest, some: UpgradeCandidates) -> None:
        """Work out what must be done anyway."""
        self._request, self._some = request, some
        committed = request.committed
        self.ready_s = unfetched_s(request, request.bandwidth_low)
        self._closing_s = request.costs.closing_s(request.prompt_tokens)
        decoding_s = committed.decode_s + float(committed.work_s.sum())
        # With one worker refinements wait for all other work, with two for all other decoding.
        self._lane_s = decoding_s
        if request.workers == 1:
            self._lane_s = self.ready_s - self._closing_s
        first = float(committed.wire.sum()) + committed.ahead_bytes  # what others ask for comes before
        self._link_s = request.lead_s + first / max(request.bandwidth_low, SLOWEST)

    def best_within(self, left_s: float) -> Ints:
        """Levels that remove most error for their bytes, as far as the time goes: of all steps the best ones first.

        A chunk's step counts no more than the one before it, so that none is taken without that.
        """
        some = self._some
        steps, gains = [], []
        before, best, all_ = some.level, np.full(len(some.level), np.inf), np.arange(len(some.level))
        for _ in range(int((some.top - some.level).max(initial=0))):
            after = np.minimum(before + 1, some.top)
            best = np.minimum(best, -self._by_gain(all_, before, after))
            able = np.flatnonzero(before < some.top)
            steps.append(able)
            gains.append(best[able])
            before = after
        if not steps:
            return some.level
        order = np.concatenate(steps)[np.argsort(-np.concatenate(gains), kind="stable")]

        def after_first(count: int) -> Ints:
            return np.asarray(some.level + np.bincount(order[:count], minlength=len(some.level)))

        return after_first(
            bisect_right(range(1, len(order) + 1), left_s, key=lambda count: self.end_s(after_first(count)))
        )

    def order(self, levels: Ints) -> Ints:
        """Candidates that these levels make better, most error removed per byte first."""
        able = np.flatnonzero(levels > self._some.level)
        return able[self._by_gain(able, self._some.level[able], levels[able]).argsort(kind="stable")]

    def _by_gain(self, which: Ints, before: Ints, after: Ints) -> Floats:
        """Error removed per byte, of some candidates, negative so that the largest sorts first ``[which]``."""
        some = self._some
        more = some.sizes[after, which] - some.sizes[before, which]
        gain = some.tokens[which] * (some.errors[before, which] - some.errors[after, which])
        return np.asarray(-gain / np.maximum(more, 1))

    @cached_property
    def _each_s(self) -> tuple[Floats, Floats]:
        """What raising each candidate to each level takes of the link and of the decode lane ``[L, m]``."""
        some, request = self._some, self._request
        more = some.sizes - some.sizes[some.level, np.arange(len(some.level))]
        wire = wire_s(more, request.bandwidth_low)
        return wire, decode_s(request, some.tokens, some.sizes)

    def end_s(self, levels: Ints) -> float:
        """Expect the first token where candidates are raised to some levels."""
        some = self._some
        (raised,) = (levels > some.level).nonzero()
        if not len(raised):
            return self.ready_s
        to, (wires, works) = levels[raised], self._each_s
        wire, work = wires[to, raised].cumsum(), works[to, raised]
        done = work.cumsum()
        end = max(self._lane_s, self._link_s + float((wire - done + work).max())) + float(done[-1])
        return max(self.ready_s, end + self._closing_s)
