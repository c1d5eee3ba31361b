"""Prompt Cache schemas over documents of a corpus; see ``kvwire.reuse.schema``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvwire.reuse import Module, Parameter, Schema
    from kvwire.runtime.corpus import Corpus


def sized(
    schema: Schema,
    corpus: Corpus,
    detokenize: Callable[[Sequence[int]], str] | None = None,
    texts: Mapping[str, Sequence[int]] | None = None,
) -> Schema:
    """Fill in what a schema leaves open: lengths of modules, and slots given by their text.

    Args:
        schema: As ``kvwire.reuse.read_schema`` reads it.
        corpus: Tells the lengths of documents, and has their texts.
        detokenize: The tokenizer's; needed for slots that are given by their text.
        texts: Token ids of documents, as given to ``Loader.ask_schema``; the corpus is not asked for them.

    Returns:
        The schema with every length and slot in tokens.

    Raises:
        ArgumentError: A slot's text is not in its document exactly once, or ``detokenize`` is missing.
        NotFoundError: A document is neither stored nor given.
    """
    return schema.with_modules(
        {
            module.name: _sized(module, corpus, detokenize, (texts or {}).get(module.document_id))
            for module in schema.modules
        }
    )


def _sized(
    module: Module, corpus: Corpus, detokenize: Callable[[Sequence[int]], str] | None, ids: Sequence[int] | None
) -> Module:
    missing = [slot for slot in module.parameters if slot.at is None]
    if module.tokens and not missing:
        return module
    entry = corpus.find(module.document_id) if ids is None else None
    found = module.parameters
    if missing:
        if detokenize is None:
            msg = f"slots of module {module.name!r} are named by text: give detokenize, or their tokens by number"
            raise ArgumentError(msg)
        text = corpus.text(entry) if entry else ids or ()
        found = tuple(_located(slot, module, text, detokenize) if slot in missing else slot for slot in found)
    return replace(module, tokens=module.tokens or (entry.tokens if entry else len(ids or ())), parameters=found)


def _located(
    slot: Parameter, module: Module, ids: Sequence[int], detokenize: Callable[[Sequence[int]], str]
) -> Parameter:
    """Find the slot's tokens: the fewest whole characters whose text holds the slot's."""
    whole = detokenize(ids)
    times = sum(whole.startswith(slot.text, at) for at in range(len(whole)))
    if times != 1:
        raise ArgumentError(f"the text of slot {module.name}.{slot.name} is {times} times in its document; not once")

    def completed(count: int) -> int:
        """As many tokens, and those that complete a character: its first ones give replacement characters."""
        while not whole.startswith(detokenize(ids[:count])):
            count += 1
        return count

    def characters(count: int) -> int:
        return len(detokenize(ids[: completed(count)]))

    before, counts = whole.index(slot.text), range(len(ids) + 1)
    first = bisect_right(counts, before, key=characters) - 1
    last = completed(bisect_left(counts, before + len(slot.text), key=characters))
    return replace(slot, at=first, tokens=last - first, held=tuple(ids[first:last]))
