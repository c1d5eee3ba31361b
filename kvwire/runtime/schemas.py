"""Prompt Cache schemas over documents of a corpus; see ``kvwire.reuse.schema``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError
from kvwire.reuse import fill_parameters
from kvwire.runtime.executor import Executor
from kvwire.runtime.links import UNREPAIRED

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.controller import Goal
    from kvwire.controller import events as ev
    from kvwire.reuse import Module, Parameter, Schema, SchemaPrompt
    from kvwire.runtime.corpus import Corpus


class SchemaExecutor(Executor):
    """A load of modules that stand where their schema has them."""

    def __init__(self, modules: SchemaPrompt, *parts: Any) -> None:  # noqa: ANN401 - an Executor's
        """Take the parts."""
        super().__init__(*parts)
        self._modules = modules
        self.starts = tuple(len(self.opening) + start for start in modules.starts)

    async def run(self, query_tokens: int, goal: Goal) -> ev.Finish:
        """Lay out the prompt and fill it; see ``Executor.run``."""
        if self.links.is_wanted:
            msg = "modules of a schema stay as they were encoded: load them with repair none or auto"
            raise ArgumentError(msg)
        self.links = replace(UNREPAIRED, report=self.links.report, refuses=self.links.refuses)
        return await super().run(query_tokens, goal)

    def complete(self) -> None:
        """Compute the arguments in their slots."""
        self.recompute_s += self._timed(lambda: fill_parameters(self._engine, self.prompt, self._modules.fills))[1]

    def _length(self, tokens: Sequence[int]) -> int:
        self._modules.check_documents(tokens)
        return len(self.opening) + self._modules.tokens


def sized(schema: Schema, corpus: Corpus, detokenize: Callable[[Sequence[int]], str] | None = None) -> Schema:
    """Ask a corpus for what a schema leaves open: lengths of modules, and slots that are named by their text."""
    return schema.with_modules({module.name: _sized(module, corpus, detokenize) for module in schema.modules})


def _sized(module: Module, corpus: Corpus, detokenize: Callable[[Sequence[int]], str] | None) -> Module:
    missing = [slot for slot in module.parameters if slot.at is None]
    if module.tokens and not missing:
        return module
    entry = corpus.find(module.document_id)
    found = module.parameters
    if missing:
        if detokenize is None:
            msg = f"slots of module {module.name!r} are named by text: give detokenize, or their tokens by number"
            raise ArgumentError(msg)
        ids = corpus.text(entry)
        found = tuple(_located(slot, module, ids, detokenize) if slot in missing else slot for slot in found)
    return replace(module, tokens=module.tokens or entry.tokens, parameters=found)


def _located(
    slot: Parameter, module: Module, ids: Sequence[int], detokenize: Callable[[Sequence[int]], str]
) -> Parameter:
    """The slot's tokens: the fewest whose text holds that of the slot."""
    whole = detokenize(ids)
    if whole.count(slot.text) != 1:
        msg = f"the text of slot {module.name}.{slot.name} is {whole.count(slot.text)} times in its document; not once"
        raise ArgumentError(msg)
    before = whole.index(slot.text)
    counts = range(len(ids) + 1)
    first = bisect_right(counts, before, key=lambda count: len(detokenize(ids[:count]))) - 1
    last = bisect_left(counts, before + len(slot.text), key=lambda count: len(detokenize(ids[:count])))
    return replace(slot, at=first, tokens=last - first)
