"""Layouts of prompts in which more than documents stands: link tokens and markers, or a schema's arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from kvwire.controller.repair import UNMEASURED
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import compute_links, fill_parameters, selector_of, stored_tokens
from kvwire.reuse.link_repair import DROPS_ROWS
from kvwire.runtime.link_report import DEFAULT_SELECTOR
from kvwire.runtime.links import AUTO, UNREPAIRED
from kvwire.runtime.opening import opened
from kvwire.runtime.prompt import Placement, PlainLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkedPrompt, LinkLayout, SchemaPrompt
    from kvwire.runtime.document import OpenDocument
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.settings import LoadSettings

_FLOOR = "the floor is of links without a layout; ask for a share (--repair 0.15)"
_ANCHORS = "anchors stand for tokens that are not there any more; ask without a floor (--repair none)"


class SchemaLayout:
    """Modules where their schema has them; arguments are computed in their slots, and nothing is repaired."""

    sees_documents = keeps_repairs = True
    head: tuple[int, ...] = ()

    def __init__(self, engine: Engine, modules: SchemaPrompt) -> None:
        """Take the modules."""
        self._engine, self._modules, self.opening = engine, modules, engine.opening_tokens
        self._plain = PlainLayout(engine)

    def place(self, tokens: Sequence[int]) -> Placement:
        """As the schema says."""
        self._modules.check_documents(tokens)
        head = len(self.opening)
        return Placement(head + self._modules.tokens, tuple(head + start for start in self._modules.starts))

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:  # noqa: ARG002 - as others
        """Modules stay as they are."""
        if plan.is_wanted:
            msg = "modules of a schema stay as they were encoded: load them with repair none or auto"
            raise ArgumentError(msg)
        return replace(UNREPAIRED, report=plan.report, refuses=plan.refuses)

    def check(self, document: OpenDocument) -> OpenDocument:
        """Any document fits."""
        return self._plain.check(document)

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Compute the arguments in their slots."""
        del place, done, stop
        fill_parameters(self._engine, prompt, self._modules.fills)
        return 0


class LinksLayout:
    """Documents where a layout has them: system text, markers and link tokens are computed around them."""

    sees_documents = False
    """Link rows stand between documents, and come later than their text."""
    keeps_repairs = False
    """What is kept is of prompts without a layout."""
    opening: tuple[int, ...] = ()
    head: tuple[int, ...] = ()

    def __init__(self, engine: Engine, layout: LinkLayout, settings: LoadSettings) -> None:
        """Refuse layouts with tokens that the model has not."""
        self._engine, self._layout, self._settings = engine, layout, settings
        self._system = opened(engine, settings.system)
        _check_tokens(engine, layout)

    def place(self, tokens: Sequence[int]) -> Placement:
        """As the layout says."""
        own = [self._layout.own_length(count) for count in tokens]
        prompt = self._layout.lay_out(own, system=self._system)
        rows = prompt.front_rows()[0]
        links: tuple[int, ...] = ()
        if self._settings.repair_in_order and len(rows):
            owners = torch.bucketize(rows, torch.tensor(prompt.starts), right=True).sub(1).clamp(min=0)
            links = tuple(torch.bincount(owners, minlength=len(prompt.starts)).tolist())
        return Placement(prompt.question_start, prompt.starts, prompt, links)

    def plan_links(self, plan: LinkPlan, place: Placement, misses: list[str]) -> LinkPlan:
        """A share of rows counts, and no more: what was measured of plain links is not measured of these."""
        if plan.is_wanted and plan.option is not None:
            selector = plan.selector
            if "rows" in selector.needs:
                if self._settings.selector != AUTO:
                    raise MismatchError(DROPS_ROWS.format(selector.name))
                selector = selector_of(DEFAULT_SELECTOR)
            looks, asked = "question" in selector.needs, plan.option
            # Chosen rows see link tokens, which see them; the first document's see what stands before it.
            whole = bool(place.starts and place.starts[0])
            option = replace(UNMEASURED, least=asked.least, most=asked.most, looks=looks, begins="closing", whole=whole)
            return replace(plan, option=option, selector=selector, report=None, refuses=False, shift="")
        if plan.option is not None and plan.option.least and len(place.starts or ()) > 1:
            misses.append(f"links were not repaired: {_ANCHORS if self._layout.anchors else _FLOOR}")
        return UNREPAIRED

    def check(self, document: OpenDocument) -> OpenDocument:
        """Its cache holds the layout's tokens."""
        if self._layout.anchors:
            document = document.with_anchors(self._engine, self._layout)
        else:
            document = PlainLayout(self._engine).check(document)
        ids = document.token_ids
        if ids is not None and stored_tokens(self._layout, ids, self._engine.vocabulary_size) != ids:
            msg = (
                f"{document.document_id!r} was encoded without the tokens that the layout {self._layout.name} has in "
                "caches; encode it with that layout"
            )
            raise MismatchError(msg)
        return document

    def compute(self, prompt: LinkedPrompt, place: Placement, done: int, stop: int | None = None) -> int:
        """Compute link tokens and markers, and the system text with them."""
        return compute_links(self._engine, prompt, place.laid_out, done, stop) if place.laid_out else 0


def _check_tokens(engine: Engine, layout: LinkLayout) -> None:
    computed = layout.computed_tokens
    if max(computed, default=0) >= engine.vocabulary_size:
        msg = (
            f"the layout {layout.name} has the token {max(computed)}, the model's vocabulary ends before "
            f"{engine.vocabulary_size}; use a checkpoint that was trained for it"
        )
        raise ArgumentError(msg)
    soft = engine.soft_tokens
    if soft is not None:
        soft.check_layout(layout)
    elif min(computed, default=0) < 0:
        msg = f"the layout {layout.name} computes soft tokens: give the file of them (--soft-tokens)"
        raise ArgumentError(msg)
