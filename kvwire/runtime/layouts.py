"""Layouts of a load's prompt: positions of documents, and the tokens computed around them.

There are three, with the same methods: documents one after the other, documents with link tokens and markers, modules
of a schema.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvwire.controller.repair import UNMEASURED
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import selector_of
from kvwire.runtime.links import UNREPAIRED
from kvwire.runtime.prefill import opened
from kvwire.runtime.reports import DEFAULT_SELECTOR
from kvwire.runtime.settings import AUTO

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkedPrompt, LinkLayout, PromptLayout, SchemaPrompt
    from kvwire.runtime.answer import Asked
    from kvwire.runtime.document import OpenDocument
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.settings import LoadSettings


@dataclass(frozen=True)
class Placement:
    """Positions of documents of known lengths."""

    length: int  # tokens before the question
    starts: tuple[int, ...] | None = None  # position of each document; None: one after the other
    laid_out: PromptLayout | None = None  # the prompt's layout, if it has more than documents
    # number of tokens computed after each document, once that is final; those before the first document count with it.
    # Empty: all are computed after the last chunk.
    link_tokens: tuple[int, ...] = ()

    @property
    def front_tokens(self) -> int:
        """Number of tokens to compute before the question, besides documents."""
        return len(self.laid_out.front_rows()[0]) if self.laid_out else 0


class PlainLayout:
    """Documents one after the other, after the opening tokens or a system text.

    With ``linked=False`` they have nothing to do with each other: donors, from whose rows a prompt is made afterwards.

    Attributes:
        opening: Tokens at the prompt's head: BOS, or the system text that begins with it.
        head: The system text; empty without one, or if the layout has it.
        sees_documents: Whether recomputed text may see what precedes its document.
        keeps_repairs: Whether kept repairs can be used.
    """

    def __init__(self, engine: Engine, system: tuple[int, ...] = (), *, linked: bool = True) -> None:
        """Take the system text's tokens; empty without one."""
        self._engine, self.head = engine, system
        self.sees_documents = self.keeps_repairs = linked
        self.opening = opened(engine, system) if system else engine.opening_tokens

    def place(self, tokens: Sequence[int]) -> Placement:
        """Place documents of these lengths one after the other."""
        return Placement(len(self.opening) + sum(tokens))

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:  # noqa: ARG002 - as others
        """Adapt the plan for links: what cannot be done is added to misses, or refused.

        As planned; the first document has not seen a system text, either.
        """
        if not self.sees_documents:
            return UNREPAIRED
        if not (self.head and plan.option):
            return plan
        return replace(plan, option=replace(plan.option, whole=True, begins="closing"))

    def check(self, document: OpenDocument) -> OpenDocument:
        """Refuse a document that was not encoded for the layout, and find the layout of its anchors: any fits."""
        is_whole = document.decoder is not None and document.decoder.kept is None
        return document if is_whole else document.with_anchors(self._engine, None)

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Compute tokens outside documents between two positions, and tell how many: there are none."""
        del prompt, place, done, stop
        return 0


_FLOOR = "the floor is of links without a layout; ask for a share (--repair 0.15)"
_ANCHORS = "anchors stand for tokens that are not there any more; ask without a floor (--repair none)"


class SchemaLayout:
    """Modules at their schema's positions; arguments are computed in their slots, and nothing is repaired."""

    sees_documents = keeps_repairs = True
    head: tuple[int, ...] = ()

    def __init__(self, engine: Engine, modules: SchemaPrompt) -> None:
        """Take the modules."""
        self._engine, self._modules, self.opening = engine, modules, engine.opening_tokens
        self._plain = PlainLayout(engine)

    def place(self, tokens: Sequence[int]) -> Placement:
        """Positions from the schema."""
        self._modules.check_documents(tokens)
        head = len(self.opening)
        return Placement(head + self._modules.tokens, tuple(head + start for start in self._modules.starts))

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:  # noqa: ARG002 - as others
        """Modules stay as they are."""
        if plan.is_wanted:
            raise ArgumentError("modules of a schema stay as they were encoded: load them with repair none or auto")
        return replace(UNREPAIRED, report=plan.report, refuses=plan.refuses)

    def check(self, document: OpenDocument) -> OpenDocument:
        """Refuse a document in which a slot that was located by its text is not where it was."""
        ids = document.token_ids
        for fill in self._modules.fills:
            is_its = bool(fill.held) and self._modules.documents[fill.document] == document.document_id
            if is_its and ids is not None and tuple(ids[fill.at : fill.at + fill.tokens]) != fill.held:
                raise ArgumentError(
                    f"{document.document_id!r} is another text than the one in which {fill.name} was located; "
                    "locate the schema's slots again (sized)"
                )
        return self._plain.check(document)

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Compute the arguments in their slots."""
        from kvwire.reuse import fill_parameters  # few loads need it

        del place, done, stop
        fill_parameters(self._engine, prompt, self._modules.fills)
        return 0


class LinksLayout:
    """Documents in a trained layout: system text, markers and link tokens are computed around them."""

    sees_documents = False
    """Link rows between documents are computed later than these."""
    keeps_repairs = False
    """Kept repairs are of prompts without a layout."""
    opening: tuple[int, ...] = ()
    head: tuple[int, ...] = ()

    def __init__(self, engine: Engine, layout: LinkLayout, settings: LoadSettings) -> None:
        """Refuse layouts with tokens outside the vocabulary."""
        self._engine, self._layout, self._settings = engine, layout, settings
        self._system = opened(engine, settings.system)
        _check_tokens(engine, layout)

    def place(self, tokens: Sequence[int]) -> Placement:
        """Positions from the layout."""
        own = [self._layout.own_length(count) for count in tokens]
        prompt = self._layout.lay_out(own, system=self._system)
        rows = prompt.front_rows()[0]
        links: tuple[int, ...] = ()
        if self._settings.repair_in_order and len(rows):
            owners = torch.bucketize(rows, torch.tensor(prompt.starts), right=True).sub(1).clamp(min=0)
            links = tuple(torch.bincount(owners, minlength=len(prompt.starts)).tolist())
        return Placement(prompt.question_start, prompt.starts, prompt, links)

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:
        """Allow only an explicit share of rows: measurements of plain links do not apply."""
        if plan.is_wanted and plan.option is not None:
            selector = plan.selector
            if "rows" in selector.needs:
                from kvwire.reuse.link_repair import DROPS_ROWS  # few loads need it

                if self._settings.selector != AUTO:
                    raise MismatchError(DROPS_ROWS.format(selector.name))
                selector = selector_of(DEFAULT_SELECTOR)
            looks, asked = "question" in selector.needs, plan.option
            # Chosen rows see link tokens, which see them; the first document's see what precedes it.
            whole = bool(place.starts and place.starts[0])
            option = replace(UNMEASURED, least=asked.least, most=asked.most, looks=looks, begins="closing", whole=whole)
            return replace(plan, option=option, selector=selector, report=None, refuses=False, shift="")
        if plan.option is not None and plan.option.least and len(place.starts or ()) > 1:
            misses.append(f"links were not repaired: {_ANCHORS if self._layout.anchors else _FLOOR}")
        return UNREPAIRED

    def check(self, document: OpenDocument) -> OpenDocument:
        """Check that the document's cache holds the layout's tokens."""
        from kvwire.reuse import stored_tokens  # few loads need it

        if self._layout.anchors:
            document = document.with_anchors(self._engine, self._layout)
        else:
            document = PlainLayout(self._engine).check(document)
        ids = document.token_ids
        if ids is not None and stored_tokens(self._layout, ids, self._engine.vocabulary_size) != ids:
            raise MismatchError(
                f"{document.document_id!r} was encoded without the tokens that the layout {self._layout.name} has in "
                "caches; encode it with that layout"
            )
        return document

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Compute link tokens and markers, and the system text with them."""
        from kvwire.reuse import compute_links  # few loads need it

        return compute_links(self._engine, prompt, place.laid_out, done, stop) if place.laid_out else 0


def _check_tokens(engine: Engine, layout: LinkLayout) -> None:
    computed = layout.computed_tokens
    if max(computed, default=0) >= engine.vocabulary_size:
        raise ArgumentError(
            f"the layout {layout.name} has the token {max(computed)}, the model's vocabulary ends before "
            f"{engine.vocabulary_size}; use a checkpoint that was trained for it"
        )
    soft = engine.soft_tokens
    if soft is not None:
        soft.check_layout(layout)
    elif min(computed, default=0) < 0:
        raise ArgumentError(f"the layout {layout.name} computes soft tokens: give the file of them (--soft-tokens)")


Layout: TypeAlias = PlainLayout | SchemaLayout | LinksLayout
"""A prompt's layout: all three have the same methods, which ``PlainLayout`` describes."""


def laid_out(
    engine: Engine,
    settings: LoadSettings,
    asked: Asked,
    texts: Mapping[str, Sequence[int]] | None,
    schema: SchemaPrompt | None,
) -> tuple[Layout, Sequence[int], Mapping[str, Sequence[int]] | None]:  # fmt: skip
    """The prompt's layout, with the question and the texts in its tokens."""
    layout = settings.layout
    if schema is not None:
        if settings.first_tokens or settings.layout or settings.system:
            msg = "modules of a schema are loaded whole, where it has them: leave out first_tokens, layout and system"
            raise ArgumentError(msg)
        return SchemaLayout(engine, schema), asked.question, texts
    if layout is not None:
        from kvwire.reuse import PLAIN, stored_tokens  # few loads need these

        if layout != PLAIN:
            size = engine.vocabulary_size
            known = {name: stored_tokens(layout, ids, size) for name, ids in (texts or {}).items()}
            question = [*asked.question, *layout.ending] if asked.question else asked.question
            return LinksLayout(engine, layout, settings), question, known
    return PlainLayout(engine, asked.system), asked.question, texts
