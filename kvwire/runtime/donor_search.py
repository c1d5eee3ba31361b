"""Finds stored texts much like a prompt, where that may pay: by similarity, read over the session's link."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, FormatVersionError, NotFoundError
from kvwire.runtime.find import UNREADABLE
from kvwire.runtime.reports import edit_repair
from kvwire.runtime.similar import LEAST_REUSED, EditPlanner, EditTerms, beginning_pays, search_can_pay
from kvwire.store import Donor
from kvwire.store.prefix.index import opening_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.prompt_request import PromptRequest
    from kvwire.runtime.reports import EditRepair
    from kvwire.runtime.session import Session
    from kvwire.runtime.settings import LoadSettings
    from kvwire.runtime.similar import ReuseCosts, Search
    from kvwire.store import PrefixHit
    from kvwire.types import BlobInfo

FIRST_SEARCHES = 8
"""Before it is known whether they pay."""
TRIED_AGAIN = 16
"""Of how many searches that do not pay one is made: more would cost 2 % of prompts that take three times as long."""
_FORGOTTEN = 0.9
"""What a search counts, of the one after it."""
_DAMAGED = (CorruptError, FormatVersionError, NotFoundError)


class DonorSearch:
    """Searches of one loader; used on the session's loop."""

    def __init__(
        self, engine: Engine, view: Corpus, session: Session, settings: LoadSettings, costs: Callable[[], ReuseCosts]
    ) -> None:
        """Read nothing yet. view: the corpus, read over the session. costs: what link and engine take by now."""
        self._engine, self._view, self._session, self._settings = engine, view, session, settings
        self._costs, self._index, self._yield = costs, view.donors(settings.writer), SearchYield()
        self._repair: EditRepair | None = None
        self._max_kl = settings.max_kl if settings.quality_floor is None else None

    def beginning_pays(self, prompt: PromptRequest, hit: PrefixHit) -> bool:
        """Whether a prompt is sooner there with its stored beginning than without."""
        total = len(prompt.whole) - len(self._engine.opening_tokens)
        return beginning_pays(self._costs(), hit, total, prompt.goal, self._max_kl)

    async def is_allowed(self, prompt: PromptRequest) -> bool:
        """Whether donors are looked for; where nothing was said, only of models that edits were found safe for."""
        mode, goal, why = prompt.reusing.mode, prompt.goal, ""
        if mode == "exact":
            return False
        if self._settings.exact:
            why = "exact caches were asked for"
        elif not self._engine.can_repair:
            why = "this engine computes no rows inside a prompt"
        elif goal.on_late == "refuse" and goal.deadline_s is not None:
            why = "a load that may be refused is planned as a whole"
        if why and mode:
            prompt.misses.append(f"no similar prompt was looked for: {why}")
        return not why and (bool(mode) or (await self._edit_repair(prompt)).is_safe)

    async def search_if_due(self, prompt: PromptRequest, hit: PrefixHit | None) -> Search | None:
        """``search`` where that was asked for, or may pay by plan and by what searches have brought."""
        reusing, whole = prompt.reusing, len(prompt.whole)
        if whole - (hit.tokens if hit else 0) <= reusing.last + LEAST_REUSED:
            return None
        if reusing.mode == "donors" or reusing.donors:
            return await self.search(prompt, hit)
        share, total = (await self._edit_repair(prompt)).share, whole - len(self._engine.opening_tokens)
        can_pay = search_can_pay(self._costs(), total, reusing.last, share, self._yield.token_bytes)
        if not (can_pay and self._yield.is_due()):
            return None
        began = time.monotonic()
        found = await self.search(prompt, hit)
        self._yield.note(time.monotonic() - began, found)
        return found

    async def search(
        self, prompt: PromptRequest, hit: PrefixHit | None, costs: ReuseCosts | None = None
    ) -> Search | None:
        """Donors, and whether they pay; a store that fails or is late has none, which is told.

        hit: the document that begins as the prompt does. costs: plan by these, and all donors.
        """
        reusing, before = prompt.reusing, len(self._engine.opening_tokens)
        last = min(reusing.last, len(prompt.whole) - before - 1)
        room = self._engine.window - before
        repair = await self._edit_repair(prompt)
        terms = EditTerms(costs or self._costs(), repair, prompt.goal, last, room, self._max_kl)
        look = partial(self._look, prompt, hit, terms, tells_all=costs is not None)
        wait_s = prompt.timeouts.patience if reusing.donors else prompt.timeouts.soon
        try:
            return await self._session.look_up(look, wait_s)
        except UNREADABLE as error:
            if reusing.donors and isinstance(error, NotFoundError):
                raise
            prompt.misses.append(f"no similar prompt was used: {error}")
            return None

    async def _edit_repair(self, prompt: PromptRequest) -> EditRepair:
        """What is done about rows behind edits; what was measured of the model is read once."""
        if self._repair is None:
            asked = self._settings.repair, self._settings.selector, len(self._engine.meta.layers)
            try:
                report = await self._session.look_up(self._view.edit_report, prompt.timeouts.soon)
            except UNREADABLE as error:  # the next prompt tries again
                prompt.misses.append(f"the report on edits was not read, so this load goes without it: {error}")
                return edit_repair(None, *asked)
            self._repair = edit_repair(report, *asked)
        return self._repair

    def _look(self, prompt: PromptRequest, hit: PrefixHit | None, terms: EditTerms, *, tells_all: bool) -> Search:
        """Find donors and plan; blocks."""
        reusing, ids = prompt.reusing, prompt.whole[len(self._engine.opening_tokens) :]
        planner = EditPlanner(ids[: len(ids) - terms.last], terms, hit, self._check)
        named = [self._named(name) for name in reusing.donors]
        for donor in named or self._index.find(ids, prompt.misses.append):
            planner.consider(donor)
        return planner.search(is_forced=reusing.mode == "donors", tells_all=tells_all)

    def _named(self, name: str) -> Donor:
        entry = self._view.find(name)
        if entry.is_text:
            raise NotFoundError(f"{name!r} is kept as text, and has no rows to give; encode it first")
        try:
            return Donor(entry, self._view.text(entry))
        except NotFoundError as error:  # its text is lost: a fault of the store, unlike a name that it does not have
            raise CorruptError(str(error)) from error

    def _check(self, donor: Donor) -> BlobInfo | str:
        """A donor's header, or why it gives no rows."""
        try:
            info = self._index.check(donor)
        except _DAMAGED as error:
            return str(error)
        is_behind = opening_of(info) == self._engine.opening_tokens
        return info if is_behind else "it was encoded without the BOS that prompts begin with"


class SearchYield:
    """What searches take and bring: where prompts are like no other, most are soon left out.

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
