"""Loads of prompts that are laid out: system text, markers and link tokens are computed around the documents."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire.controller.repair import UNMEASURED
from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import PLAIN, compute_links, stored_tokens
from kvwire.runtime.anchored import settle_holes
from kvwire.runtime.executor import Executor
from kvwire.runtime.links import UNREPAIRED

if TYPE_CHECKING:
    from asyncio import Task
    from collections.abc import Callable, Mapping, Sequence

    from kvwire.controller import Goal
    from kvwire.controller import events as ev
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkLayout, PromptLayout
    from kvwire.runtime.documents import DocumentHandle
    from kvwire.runtime.settings import LoadSettings


class LayoutExecutor(Executor):
    """A load of documents that stand where a layout has them.

    Link tokens are computed behind the last chunk, all in one pass: the later of two documents may still become finer
    when the earlier one is final, and small passes cost more than they hide.
    """

    def __init__(self, layout: LinkLayout, system: Sequence[int], *parts: Any) -> None:  # noqa: ANN401 - an Executor's
        """Take the parts.

        Args:
            layout: What stands around documents and in their caches.
            system: Token ids of the system text.
            parts: As an ``Executor`` takes them.
        """
        super().__init__(*parts)
        self._layout, self._system = layout, system
        self.sees_documents = False  # link rows between documents are computed behind the last chunk
        self._keeper = None  # what repairs kept is of prompts without a layout
        self._laid_out: PromptLayout | None = None

    async def run(self, query_tokens: int, goal: Goal) -> ev.Finish:
        """Lay out the prompt and fill it; see ``Executor.run``.

        Args:
            query_tokens: Length of the question, in tokens.
            goal: What the load is to reach.

        Returns:
            The controller's last instruction.

        Raises:
            ArgumentError: The layout has tokens that the model has not, there are more documents than it has link
                tokens for, or as ``Executor.run`` says.
        """
        _check_tokens(self._engine, self._layout)
        asked = self.links  # what was measured of plain links is not measured of these: a share counts, and no more
        self.links = UNREPAIRED
        if asked.is_wanted and asked.option is not None:
            option = replace(UNMEASURED, least=asked.option.least, most=asked.option.most, looks=asked.option.looks)
            self.links = replace(asked, option=option, report=None, refuses=False, shift="")
        return await super().run(query_tokens, goal)

    def complete(self) -> None:
        """Compute what stands between documents and around them."""
        if self._laid_out is not None:
            self.front_s = self._timed(partial(compute_links, self._engine, self.prompt, self._laid_out))[1]

    @property
    def laid_out(self) -> PromptLayout | None:
        """Where everything stands."""
        return self._laid_out

    def _length(self, tokens: Sequence[int]) -> int:
        own = [self._layout.own_length(count) for count in tokens]
        self._laid_out = prompt = self._layout.lay_out(own, system=self._system)
        self.starts, self.front_tokens = prompt.starts, len(prompt.front_rows()[0])
        return prompt.question_start

    def _settle_holes(self, document: DocumentHandle) -> None:
        if self._layout.anchors:
            settle_holes(document, self._engine, self._layout)
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
    """What a question becomes in a layout.

    Args:
        settings: The loader's.
        engine: Runs the model.
        question: Token ids.
        texts: Token ids of documents that the caller knows.

    Returns:
        What makes the load, the question with what ends it, and the texts with what stands in their caches.
    """
    layout, system = settings.layout or PLAIN, settings.system
    if layout == PLAIN and not system:
        return Executor, question, texts
    known = {name: stored_tokens(layout, ids, engine.vocabulary_size) for name, ids in (texts or {}).items()}
    return partial(LayoutExecutor, layout, system), [*question, *layout.ending] if question else question, known


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
