"""What searches for similar prompts take and bring: where prompts are like no other, most are soon left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwire.runtime.similar import Search

FIRST_SEARCHES = 8
"""Before it is known whether they pay."""
TRIED_AGAIN = 16
"""Of how many searches that do not pay one is made: more would cost 2 % of prompts that take three times as long."""
_FORGOTTEN = 0.9
"""What a search counts, of the one after it."""


class SearchYield:
    """Of one loader; used on its loop.

    Attributes:
        token_bytes: The least that a donor's token took to fetch; 0: not known.
    """

    def __init__(self) -> None:
        """Nothing is known yet."""
        self.token_bytes = 0.0
        self._spent_s = self._saved_s = 0.0
        self._searches = self._left_out = 0

    def is_due(self) -> bool:
        """Whether to search: always at first, then if searches have paid lately, and now and then to see it."""
        if self._searches < FIRST_SEARCHES or self._saved_s >= self._spent_s:
            return True
        self._left_out = (self._left_out + 1) % TRIED_AGAIN
        return not self._left_out

    def note(self, seconds: float, search: Search | None) -> None:
        """A search took so long, and found this."""
        plan, best = (search.plan, search.best) if search else (None, None)
        saved_s = max(0.0, plan.rival_s - plan.seconds) if plan else 0.0
        self._spent_s = self._spent_s * _FORGOTTEN + seconds
        self._saved_s = self._saved_s * _FORGOTTEN + saved_s
        self._searches += 1
        if best and best.script.reused:
            size = best.size / best.script.reused
            self.token_bytes = min(self.token_bytes or size, size)
