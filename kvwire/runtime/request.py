"""Input of one load."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, TypeVar

from kvwire.controller import Goal, kl_floor
from kvwire.errors import KvwireError
from kvwire.runtime.answer import floor_trouble, unreached_floor
from kvwire.runtime.document import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping, Sequence

    from kvwire.controller import DocumentPlanInput
    from kvwire.runtime.document import FoundDocument, OpenDocument, Timeouts
    from kvwire.runtime.kept import RepairKeeper
    from kvwire.runtime.layouts import Layout
    from kvwire.runtime.passes import PromptWorker
    from kvwire.runtime.settings import LoadSettings

T = TypeVar("T")
_GRACE_STEP_S = 0.05
"""Interval at which a late load checks whether waiting still costs less than recomputing."""


@dataclass(frozen=True)
class PartialLoad:
    """A load that ends at the deadline, or on failure, with what is loaded by then."""

    limit_s: float = 30.0  # longest load without a deadline
    worth_s: float = inf  # longest load in any case: after that, recomputing the missing part is faster
    # seconds to extend it after its deadline; called repeatedly
    grace_s: Callable[[PromptWorker], float] = field(default=lambda _: 0.0)

    async def wait(
        self, load: Coroutine[None, None, T], deadline_s: float | None, clock: Callable[[], float], work: PromptWorker
    ) -> T | str:
        """The load's result; in words why there is none."""
        began, limit_s = clock(), min(self.limit_s if deadline_s is None else max(0.0, deadline_s), self.worth_s)
        running = asyncio.ensure_future(load)
        try:
            await asyncio.wait({running}, timeout=limit_s)
            while not running.done() and clock() - began < limit_s + self.grace_s(work):
                await asyncio.wait({running}, timeout=_GRACE_STEP_S)
            if running.done():
                return running.result()
            return f"ended after {clock() - began:.3g} s"
        except KvwireError as error:
            return in_words(error)
        finally:
            running.cancel()


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What one load is asked for, beside its loader's settings."""

    documents: Sequence[str | FoundDocument]  # names, or documents that were found already, in the order of the prompt
    layout: Layout  # layout of the prompt
    settings: LoadSettings  # the loader's
    timeouts: Timeouts  # longest waits, from ``started``
    goal: Goal = field(default_factory=Goal)  # the controller's goal; its deadline counts from ``started``
    started: float  # when it was asked for, on ``time.monotonic``
    texts: Mapping[str, Sequence[int]] | None = None  # token ids of documents whose blob is lost
    question: Sequence[int] = ()  # token ids that run on the filled prompt
    query_tokens: int = 0  # how many tokens are computed for it
    looks: bool = False  # whether the question may look at the prompt during fetches
    keeper: RepairKeeper | None = None  # finds kept repairs; None: there are none
    room_tokens: int = 0  # memory to reserve after the prompt, in tokens, within the model's window
    wanted: int | None = None  # how many of each document's first tokens are needed; None: all
    # whether the prompt has only these, as if documents ended there; else it has room for whole documents
    cuts: bool = False
    partial: PartialLoad | None = None  # of a load that may end with less than all; None: it may not

    @property
    def max_kl(self) -> float | None:
        """Greatest expected KL divergence of fetched levels; None: any."""
        return None if self.settings.exact else self.settings.max_kl

    @property
    def has_floor(self) -> bool:
        """Whether the goal's floor was given, and replaces ``max_kl``."""
        return self.settings.quality_floor is not None

    def plan_input(self, document: OpenDocument, layers: int) -> DocumentPlanInput:
        """A document's input for planning; a given floor or ceiling precedes one by KL."""
        made = document.plan_input(layers)
        if self.max_kl is None or self.has_floor or self.goal.floor or not (document.info and made.has_blob):
            return made
        floor, ceiling = kl_floor(document.info, self.max_kl), self.goal.ceiling
        return replace(made, floor=floor if ceiling is None else min(floor, ceiling))

    def quality_trouble(self, document: OpenDocument, inputs: Sequence[DocumentPlanInput]) -> str:
        """Why no allowed level of a document is good enough; empty if one is."""
        if document.info is None or document.trouble:
            return ""
        if self.settings.exact:
            has_any = any(each.has_blob for each in inputs)
            return "" if has_any else "it has no lossless level; encode it with --lossless"
        if not document.has_blob:
            return ""
        floor = self.goal.floor if self.has_floor or self.goal.floor else None
        if floor is not None and (trouble := unreached_floor(document.info, floor, self.goal.ceiling)):
            return trouble
        if self.max_kl is None:
            return ""
        return floor_trouble(document.info, self.max_kl, floor, self.goal.ceiling)
