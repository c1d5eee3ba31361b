"""Input of one load."""

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
    """A load's documents and options, as in ``LoadSettings``.

    Attributes:
        layout: Layout of the prompt.
        fetch: How blobs are fetched.
        backend: Kernels that decode.
        timeouts: Longest waits.
        goal: The controller's goal.
        query_tokens: Length of the question.
        links: Settings for links.
        question: Token ids for a look at the prompt during fetches; empty: no look.
        keeper: Finds kept repairs; None: there are none.
        room_tokens: Memory to reserve after the prompt, in tokens, within the model's window.
        exact: Use only lossless levels.
        max_kl: Greatest expected KL divergence of fetched levels; None: any.
        has_floor: Whether the goal's floor was given, and replaces ``max_kl``.
        wanted: How many of each document's first tokens are needed; None: all.
        cuts: Whether the prompt has only these, as if documents ended there; else it has room for whole documents.
        is_partial: Whether the load ends at the deadline, or on failure, with what is loaded.
        limit_s: Longest partial load without a deadline.
        worth_s: Longest partial load in any case: after that, recomputing the missing part is faster.
        grace_s: Seconds to extend a partial load after its deadline; called repeatedly.
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
    cuts: bool = False
    is_partial: bool = False
    limit_s: float = 30.0
    worth_s: float = inf
    grace_s: Callable[[PromptWorker], float] = field(default=lambda _: 0.0)

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
        if self.exact:
            has_any = any(each.has_blob for each in inputs)
            return "" if has_any else "it has no lossless level; encode it with --lossless"
        if not document.has_blob or self.max_kl is None:
            return ""
        floor = self.goal.floor if self.has_floor or self.goal.floor else None
        return floor_trouble(document.info, self.max_kl, floor, self.goal.ceiling)
