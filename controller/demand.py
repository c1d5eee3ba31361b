"""How much loads ask for at their quality floor, and what that leaves for quality."""

from __future__ import annotations

from math import exp2, inf, log

_HALF_LIVES_S = (0.2, 1.0)
"""The short one hears of a rush at once, the long one remembers it."""
_FEWEST = 1e-3  # loads a second


class Demand:
    """Loads that came in, as averages that fade; of loads to come it expects what those were."""

    def __init__(self) -> None:
        """Start without loads."""
        self._averages = [_Average(half_life_s) for half_life_s in _HALF_LIVES_S]

    def add(self, floor_s: float, now: float) -> None:
        """Take in a load.

        Args:
            floor_s: Seconds that it takes at its quality floor.
            now: The instant, in seconds of the controller's clock.
        """
        for average in self._averages:
            average.add(floor_s, now)

    def limit_s(self, floor_s: float, came: float, now: float, *, least_s: float, left_s: float) -> float:
        """Work out how long a load may take so that as many others as lately find their time.

        What floors take of the time, loads leave of theirs: the queue then stays short where it could not be worked
        off. And a queue grows by no more than what is spare for each load.

        Args:
            floor_s: What was taken in of the load itself, which does not compete with itself.
            came: When it was.
            now: The instant, in seconds of the controller's clock.
            least_s: Seconds that it takes at its floor, behind what goes first.
            left_s: Seconds until it is due.

        Returns:
            Seconds, at least ``least_s``; infinite where no other load came in lately.
        """
        others = [average.without(floor_s, came, now) for average in self._averages]
        loads, busy = max(rate for rate, _ in others), max(share for _, share in others)
        if loads <= _FEWEST:
            return inf
        spare = max(0.0, 1 - busy)
        return max(least_s, min(least_s + spare / loads, spare * left_s))


class _Average:
    def __init__(self, half_life_s: float) -> None:
        self._half_life_s, self._at = half_life_s, -inf
        self._loads = self._floors_s = 0.0

    def add(self, floor_s: float, now: float) -> None:
        fade = exp2((self._at - now) / self._half_life_s)
        self._loads, self._floors_s, self._at = fade * self._loads + 1, fade * self._floors_s + floor_s, now

    def without(self, floor_s: float, came: float, now: float) -> tuple[float, float]:
        """Loads a second and the share of the time that their floors take, one of them left out."""
        fade, own = exp2((self._at - now) / self._half_life_s), exp2((came - now) / self._half_life_s)
        per_s = log(2) / self._half_life_s
        return (fade * self._loads - own) * per_s, max(0.0, fade * self._floors_s - own * floor_s) * per_s
