"""What chunks that are valid or under way could become, and when that would be done.

Refinements are asked for up to the level that is wanted in one go, and decoded once, behind all other decoding. The
link delivers them one after another while earlier ones are decoded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.policies.base import SLOWEST
from kvwire.controller.policies.timeline import Timeline, decode_s, wire_s

if TYPE_CHECKING:
    from kvwire.controller.policies.base import Ints, PlanRequest, UpgradeCandidates


class Refining:
    """Candidates of one request; levels are arrays ``[m]``, one for each candidate.

    Attributes:
        ready_s: Seconds from now to the first token without refinements.
    """

    def __init__(self, request: PlanRequest, some: UpgradeCandidates) -> None:
        """Work out what must be done anyway.

        Args:
            request: What the plan depends on; what it still fetches is not counted.
            some: The candidates.
        """
        self._request, self._some = request, some
        self._column = np.arange(len(some.level))
        committed = request.committed
        timeline = Timeline(replace(request, refinable=None), np.array([request.goal.floor]), request.bandwidth_low)
        self.ready_s = float(timeline.finish_s[0, 0])
        self._closing_s = request.costs.closing_s(request.prompt_tokens)
        decoding_s = committed.decode_s + float(committed.work_s.sum())
        # With one worker refinements wait for all other work, with two for all other decoding.
        self._lane_s = self.ready_s - self._closing_s if request.workers == 1 else decoding_s
        self._link_s = request.lead_s + float(committed.wire.sum()) / max(request.bandwidth_low, SLOWEST)

    def raised_to(self, level: int) -> Ints:
        """Levels where all that are below one are raised to it, as far as they go.

        Args:
            level: The level.

        Returns:
            Levels ``[m]``.
        """
        return np.maximum(self._some.level, np.minimum(level, self._some.top))

    def upgraded(self, levels: Ints, chosen: Ints) -> Ints:
        """Levels with some of them one higher.

        Args:
            levels: Levels before ``[m]``.
            chosen: Which ones.

        Returns:
            Levels ``[m]``.
        """
        out = levels.copy()
        out[chosen] += 1
        return out

    def steps(self, levels: Ints) -> Ints:
        """Candidates that can go one level higher still, most error removed per byte first.

        Args:
            levels: Levels before ``[m]``.

        Returns:
            Which ones.
        """
        able = np.flatnonzero(levels < self._some.top)
        return able[self._by_gain(levels, np.minimum(levels + 1, self._some.top))[able].argsort(kind="stable")]

    def order(self, levels: Ints) -> Ints:
        """Candidates that these levels make better, most error removed per byte first.

        Args:
            levels: Levels in the end ``[m]``.

        Returns:
            Which ones.
        """
        able = np.flatnonzero(levels > self._some.level)
        return able[self._by_gain(self._some.level, levels)[able].argsort(kind="stable")]

    def _by_gain(self, before: Ints, after: Ints) -> Ints:
        """Error removed per byte, negative so that the largest sorts first ``[m]``."""
        some, column = self._some, self._column
        more = some.sizes[after, column] - some.sizes[before, column]
        gain = some.tokens * (some.errors[before, column] - some.errors[after, column])
        return np.asarray(-gain / np.maximum(more, 1))

    def end_s(self, levels: Ints) -> float:
        """Expect the first token where candidates are raised to some levels.

        Args:
            levels: Levels in the end ``[m]``.

        Returns:
            Seconds from now.
        """
        some, request = self._some, self._request
        more = some.sizes[levels, self._column] - some.sizes[some.level, self._column]
        raised = levels > some.level
        if not raised.any():
            return self.ready_s
        wire = np.cumsum(wire_s(request, more, request.bandwidth_low)[raised])
        sizes = some.sizes[levels, self._column]
        work = decode_s(request, some.tokens, sizes)[raised]
        done = np.cumsum(work)
        begin = max(self._lane_s, self._link_s + float((wire - done + work).max()))
        return max(self.ready_s, begin + float(done[-1]) + self._closing_s)
