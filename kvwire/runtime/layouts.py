"""Loads of prompts that are laid out: system text, markers and link tokens are computed around the documents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvwire.controller.repair import UNMEASURED
from kvwire.errors import ArgumentError, MismatchError, StorageError
from kvwire.reuse import PLAIN, compute_links, selector_of, stored_tokens
from kvwire.reuse.link_repair import DROPS_ROWS
from kvwire.runtime.anchored import resolve_pruned_layout
from kvwire.runtime.executor import Executor
from kvwire.runtime.link_report import DEFAULT_SELECTOR
from kvwire.runtime.links import AUTO, UNREPAIRED
from kvwire.runtime.opening import opened
from kvwire.runtime.prompt_jobs import LOAD_CANCELLED

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Callable, Mapping, Sequence

    from kvwire.controller import Goal
    from kvwire.controller import events as ev
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkLayout, PromptLayout
    from kvwire.runtime.documents import DocumentHandle
    from kvwire.runtime.settings import LoadSettings

_FLOOR = "the floor is of links without a layout; ask for a share (--repair 0.15)"
_ANCHORS = "anchors stand for tokens that are not there any more; ask without a floor (--repair none)"


class LayoutExecutor(Executor):
    """A load of documents that stand where a layout has them.

    Link tokens behind a document are computed as soon as it and those before it stay as they are, where the link takes
    longer for the rest (``Repair``); the others behind the last chunk, in one pass.
    """

    def __init__(self, settings: LoadSettings, *parts: Any) -> None:  # noqa: ANN401 - an Executor's
        """Take the parts."""
        super().__init__(*parts)
        self._settings = settings
        self._layout, self._system = settings.layout or PLAIN, opened(self._engine, settings.system)
        self.opening = ()  # it begins the system text
        self.sees_documents = False  # link rows stand between documents, and come later than their text
        self._keeper = None  # what repairs kept is of prompts without a layout
        self._laid_out: PromptLayout | None = None
        self._linked = 0  # up to which position link tokens are computed

    async def run(self, query_tokens: int, goal: Goal) -> ev.Finish:
        """Lay out the prompt and fill it; see ``Executor.run``."""
        _check_tokens(self._engine, self._layout)
        asked = self.links  # what was measured of plain links is not measured of these: a share counts, and no more
        self.links = UNREPAIRED
        if asked.is_wanted and asked.option is not None:
            selector = asked.selector
            if "rows" in selector.needs:
                if self._settings.selector != AUTO:
                    raise MismatchError(DROPS_ROWS.format(selector.name))
                selector = selector_of(DEFAULT_SELECTOR)
            looks, least = "question" in selector.needs, asked.option.least
            option = replace(UNMEASURED, least=least, most=asked.option.most, looks=looks)
            # Chosen rows see link tokens, which see them; the first document's see what stands before it.
            self._length([document.tokens for document in self._found])
            option = replace(option, begins="closing", whole=bool(self.starts and self.starts[0]))
            self.links = replace(asked, option=option, selector=selector, report=None, refuses=False, shift="")
        elif asked.option is not None and asked.option.least and len(self._found) > 1:
            self.misses.append(f"links were not repaired: {_ANCHORS if self._layout.anchors else _FLOOR}")
        return await super().run(query_tokens, goal)

    def complete(self) -> None:
        """Compute what stands between documents and around them."""
        if self._laid_out is not None:
            self._compute_links(self._laid_out)

    @property
    def laid_out(self) -> PromptLayout | None:
        """Where everything stands."""
        return self._laid_out

    @property
    def link_tokens(self) -> tuple[int, ...]:
        """How many tokens are computed behind each document, those before the first one with it."""
        prompt = self._laid_out
        if prompt is None or not (self._settings.repair_in_order and self.front_tokens):
            return ()
        owners = torch.bucketize(prompt.front_rows()[0], torch.tensor(prompt.starts), right=True).sub(1).clamp(min=0)
        return tuple(torch.bincount(owners, minlength=len(prompt.starts)).tolist())

    def _repair_here(self, asked: ev.Repair) -> tuple[int, int, float]:
        """Compute link tokens of documents that stay as they are."""
        prompt, links = self._laid_out, self.link_tokens
        if self._is_gone or prompt is None:
            raise StorageError(LOAD_CANCELLED)
        rows, seconds = self._compute_links(prompt, prompt.starts[asked.documents])
        return rows, sum(links[asked.documents :]), seconds

    def _compute_links(self, prompt: PromptLayout, stop: int | None = None) -> tuple[int, float]:
        """How many link tokens before a position were computed, and the seconds."""
        began = self._driver.clock()
        rows = compute_links(self._engine, self.prompt, prompt, self._linked, stop)
        self._engine.synchronize()
        self._linked, seconds = prompt.question_start if stop is None else stop, self._driver.clock() - began
        self.front_s += seconds
        return rows, seconds

    def _length(self, tokens: Sequence[int]) -> int:
        own = [self._layout.own_length(count) for count in tokens]
        self._laid_out = prompt = self._layout.lay_out(own, system=self._system)
        self.starts, self.front_tokens = prompt.starts, len(prompt.front_rows()[0])
        return prompt.question_start

    def _settle_holes(self, document: DocumentHandle) -> None:
        if self._layout.anchors:
            resolve_pruned_layout(document, self._engine, self._layout)
        else:
            super()._settle_holes(document)

    async def _open(self, index: int, laid_out: Task[None]) -> None:
        await super()._open(index, laid_out)
        document = self._documents[index]
        ids = document.token_ids
        if ids is not None and stored_tokens(self._layout, ids, self._engine.vocabulary_size) != ids:
            msg = (
                f"{document.document_id!r} was encoded without the tokens that the layout {self._layout.name} has in "
                "caches; encode it with that layout"
            )
            raise MismatchError(msg)


def asked_in(
    settings: LoadSettings, engine: Engine, question: Sequence[int], texts: Mapping[str, Sequence[int]] | None
) -> tuple[Callable[..., Executor], Sequence[int], Mapping[str, Sequence[int]] | None]:
    """What a question becomes in a layout."""
    layout = settings.layout or PLAIN
    if layout == PLAIN:
        return Executor, question, texts
    known = {name: stored_tokens(layout, ids, engine.vocabulary_size) for name, ids in (texts or {}).items()}
    return partial(LayoutExecutor, settings), [*question, *layout.ending] if question else question, known


def _check_tokens(engine: Engine, layout: LinkLayout) -> None:
    """Refuse layouts with tokens that the model has not."""
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
