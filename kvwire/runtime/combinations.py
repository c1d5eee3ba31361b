"""Documents that are linked again and again are repaired once, for all: one prefill computes their rows, for keeps.

What linked them, a proxy before vLLM, counts combinations; a worker with the model's weights beside it repairs those
that were asked for often. Later requests find their rows as those of any other repair.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from msgspec import Meta

from kvwire._json import stored_record
from kvwire.errors import ArgumentError, CorruptError, KvwireError
from kvwire.runtime.kept import Gathered, RepairKeeper, bases
from kvwire.store import TEXT_LEVEL
from kvwire.store.prefix.index import opening_of
from kvwire.types import KVCache

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.engines.base import Engine
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry, UseCounts

_MOST_DOCUMENTS, _MOST_HEAD = 4096, 1 << 20


@dataclass(frozen=True)
class Combination:
    """Documents of a prompt, in its order."""

    documents: Annotated[tuple[str, ...], Meta(min_length=2, max_length=_MOST_DOCUMENTS)]  # their ids
    # token ids before them: a chat's, a BOS, or none
    head: Annotated[tuple[int, ...], Meta(max_length=_MOST_HEAD)] = ()

    def to_json(self) -> str:
        """As it is counted; ``of_json`` reads it."""
        return json.dumps({"documents": self.documents, "head": self.head}, separators=(",", ":"))

    @classmethod
    def of_json(cls, text: str) -> Combination:
        """Read what ``to_json`` wrote."""
        return stored_record(text, cls, "a counted combination", "delete the file of counts")


@dataclass(frozen=True)
class RepairedCombination:
    """What became of a combination."""

    documents: tuple[str, ...]  # their ids
    rows: int = 0  # how many were kept; 0: none
    trouble: str = ""  # why not, in words


class CombinationRepairer:
    """Computes and keeps the rows of combinations, each once."""

    def __init__(self, corpus: Corpus, engine: Engine, most_bytes: int) -> None:
        """Compute nothing yet."""
        self._corpus, self._engine = corpus, engine
        self._keeper = RepairKeeper(corpus, corpus.catalog.store, most_bytes, engine.opening_tokens)
        self._failed: set[str] = set()

    def repair_due(self, counts: UseCounts, after: int) -> Iterator[RepairedCombination]:
        """Repair what was asked for often enough and is not kept yet, the most asked for first."""
        for text in counts.reached(self._corpus.scope, after):
            if text in self._failed:
                continue
            names: tuple[str, ...] = ()
            try:
                combination = Combination.of_json(text)
                names = combination.documents
                rows = self.repair(combination)
            except KvwireError as error:
                self._failed.add(text)
                yield RepairedCombination(names, trouble=str(error))
                continue
            if rows is not None:
                self._failed |= set() if rows else {text}
                yield RepairedCombination(names, rows, "" if rows else "its rows were not kept")

    def repair(self, combination: Combination) -> int | None:
        """Compute all rows of a combination in one prefill, and keep them."""
        corpus, head = self._corpus, combination.head
        entries = [corpus.find(name) for name in combination.documents]
        known = [(entry.token_digest, None if entry.is_text else corpus.read_header(entry)) for entry in entries]
        opening = next((opening_of(info) for _, info in known if info is not None), ())
        head = head or opening
        named = bases(known, opening, head)
        if self._has(named, is_plain=head == opening):
            return None
        return self._compute(entries, named, head, is_plain=head == opening)

    def _has(self, named: tuple[str, ...], *, is_plain: bool) -> bool:
        try:
            found = self._corpus.catalog.kept.find(self._corpus.config, named, 2 if is_plain else 1)
        except CorruptError:
            return False
        return found is not None and found.documents == named and found.level == TEXT_LEVEL

    def _compute(
        self, entries: list[CatalogEntry], named: tuple[str, ...], head: tuple[int, ...], *, is_plain: bool
    ) -> int:
        texts = [tuple(self._corpus.text(entry)) for entry in entries]
        ids = [*head, *(token for text in texts for token in text)]
        if len(ids) >= self._engine.window:
            msg = f"the combination has {len(ids)} tokens, the model's window {self._engine.window}: it is not repaired"
            raise ArgumentError(msg)
        (cache,) = self._engine.prefill([ids])
        first = len(head) + (len(texts[0]) if is_plain else 0)  # a plain prompt's first document is right as it is
        rows = torch.arange(first, len(ids))
        keys, values = ([side[:, rows].cpu() for side in sides] for sides in (cache.keys, cache.values))
        taken = KVCache(keys, values, cache.meta)
        written = self._keeper.keep(Gathered(named, tuple(texts), TEXT_LEVEL, rows, taken, opening=len(head)))
        return len(rows) if written else 0
