"""Prompt Cache schemas over documents of a corpus; see ``kvwire.reuse.schema``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.reuse import Module, Parameter, Schema
    from kvwire.runtime.corpus import Corpus


def sized(schema: Schema, corpus: Corpus, detokenize: Callable[[Sequence[int]], str] | None = None) -> Schema:
    """Fill in what a schema leaves open: lengths of modules, and slots given by their text."""
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
    """Find the slot's tokens: the fewest whose text holds the slot's."""
    whole = detokenize(ids)
    if whole.count(slot.text) != 1:
        msg = f"the text of slot {module.name}.{slot.name} is {whole.count(slot.text)} times in its document; not once"
        raise ArgumentError(msg)
    before = whole.index(slot.text)
    counts = range(len(ids) + 1)
    first = bisect_right(counts, before, key=lambda count: len(detokenize(ids[:count]))) - 1
    last = bisect_left(counts, before + len(slot.text), key=lambda count: len(detokenize(ids[:count])))
    return replace(slot, at=first, tokens=last - first)
