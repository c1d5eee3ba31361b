"""What one load is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

from kvwire.controller import Goal, kl_floor
from kvwire.runtime.answer import floor_trouble
from kvwire.runtime.links import UNREPAIRED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.codec import Backend
    from kvwire.controller import DocumentPlanInput
    from kvwire.runtime.document import OpenDocument, Timeouts
    from kvwire.runtime.execute import PromptWorker
    from kvwire.runtime.kept import RepairKeeper
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.prompt import Layout
    from kvwire.transport import FetchSettings


@dataclass(frozen=True, kw_only=True)
class LoadRequest:
    """What is to be loaded, and how, as in ``LoadSettings``.

    Attributes:
        layout: Where documents stand.
        fetch: How blobs are fetched.
        backend: Which kernels decode.
        timeouts: Longest waits.
        goal: What the controller is to reach.
        query_tokens: Length of the question.
        links: What is done so that documents see each other.
        question: Token ids that the prompt may be looked at with while it is fetched; empty: it is not looked at.
        keeper: Finds what earlier repairs computed; None: they are not kept.
        room_tokens: To set memory aside for behind the prompt, as far as the model's window goes.
        exact: Lossless levels alone are of use.
        max_kl: The greatest KL divergence to expect of levels that are fetched; None: any.
        has_floor: The goal's floor was asked for, and holds in place of ``max_kl``.
        wanted: How many tokens of each document's beginning are of use; None: all.
        is_partial: At the deadline, or where it fails, the load ends with what is there.
        limit_s: Longest partial load without a deadline.
        worth_s: Longest partial load in any case: from then on, computing what is missing is sooner.
        grace_s: Seconds that a partial load goes on behind its deadline at most, asked again while it does.
    """

    layout: Layout
    fetch: FetchSettings
    backend: Backend
    timeouts: Timeouts
    goal: Goal = field(default_factory=Goal)
    query_tokens: int = 0
    links: LinkPlan = UNREPAIRED
    question: Sequence[int] = ()
    keeper: RepairKeeper | None = None
    room_tokens: int = 0
    exact: bool = False
    max_kl: float | None = None
    has_floor: bool = False
    wanted: int | None = None
    is_partial: bool = False
    limit_s: float = 30.0
    worth_s: float = inf
    grace_s: Callable[[PromptWorker], float] = field(default=lambda _: 0.0)

    def plan_input(self, document: OpenDocument, layers: int) -> DocumentPlanInput:
        """What planning is told of a document; a floor or a ceiling that was asked for goes before one by KL."""
        made = document.plan_input(layers)
        if self.max_kl is None or self.has_floor or self.goal.floor or not (document.info and made.has_blob):
            return made
        floor, ceiling = kl_floor(document.info, self.max_kl), self.goal.ceiling
        return replace(made, floor=floor if ceiling is None else min(floor, ceiling))

    def quality_trouble(self, document: OpenDocument, inputs: Sequence[DocumentPlanInput]) -> str:
        """Why no level of a document, or not any that may be fetched, is as good as is wanted; empty where one is."""
        if document.info is None or document.trouble:
            return ""
        if self.exact:
            has_any = any(each.has_blob for each in inputs)
            return "" if has_any else "it has no lossless level; encode it with --lossless"
        if not document.has_blob or self.max_kl is None:
            return ""
        floor = self.goal.floor if self.has_floor or self.goal.floor else None
        return floor_trouble(document.info, self.max_kl, floor, self.goal.ceiling)
