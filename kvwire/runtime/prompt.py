"""Where a load's prompt has its documents, and what is computed around and between them.

A load is given one of three layouts, which have the same methods: documents one after the other, documents with link
tokens and markers, modules of a schema.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from kvwire.runtime.opening import opened

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkedPrompt, PromptLayout
    from kvwire.runtime.document import OpenDocument
    from kvwire.runtime.links import LinkPlan


@dataclass(frozen=True)
class Placement:
    """Where documents of known lengths stand.

    Attributes:
        length: Positions before the question.
        starts: Position of each document; None: one after the other.
        laid_out: Where everything stands, where more than documents does.
        link_tokens: How many tokens are computed behind each document, as soon as it stays as it is; those before the
            first document are computed with it. Empty: all of them are computed behind the last chunk.
    """

    length: int
    starts: tuple[int, ...] | None = None
    laid_out: PromptLayout | None = None
    link_tokens: tuple[int, ...] = ()

    @property
    def front_tokens(self) -> int:
        """How many tokens are computed before the question, beside documents."""
        return len(self.laid_out.front_rows()[0]) if self.laid_out else 0


class Layout(Protocol):
    """How a prompt is laid out.

    Attributes:
        opening: Tokens at the prompt's head, before all else: BOS, or the system text that begins with it.
        head: The system text; empty: there is none, or the layout has it.
        sees_documents: Whether text that is computed may see what stands before its document.
        keeps_repairs: Whether rows that earlier loads computed anew fit.
    """

    opening: tuple[int, ...]
    head: tuple[int, ...]
    sees_documents: bool
    keeps_repairs: bool

    def place(self, tokens: Sequence[int]) -> Placement:
        """Place documents of these lengths."""

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:
        """What is done about links here; what cannot be is added to misses, or refused."""

    def check(self, document: OpenDocument) -> OpenDocument:
        """Refuse a document that was not encoded for the layout; find out how its holes are computed."""

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Compute what is not a document's, from one position to another; returns how many tokens that were."""


class PlainLayout:
    """Documents one after the other, behind the opening tokens or a system text."""

    sees_documents = keeps_repairs = True

    def __init__(self, engine: Engine, system: tuple[int, ...] = ()) -> None:
        """Take the system text's tokens; empty: there is none."""
        self._engine, self.head = engine, system
        self.opening = opened(engine, system) if system else engine.opening_tokens

    def place(self, tokens: Sequence[int]) -> Placement:
        """One after the other."""
        return Placement(len(self.opening) + sum(tokens))

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:  # noqa: ARG002 - as others
        """As planned; a system text was not seen by the first document, either."""
        if not (self.head and plan.option):
            return plan
        return replace(plan, option=replace(plan.option, whole=True, begins="closing"))

    def check(self, document: OpenDocument) -> OpenDocument:
        """Any document fits."""
        is_whole = document.decoder is not None and document.decoder.kept is None
        return document if is_whole else document.with_anchors(self._engine, None)

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Nothing is left to compute."""
        del prompt, place, done, stop
        return 0
