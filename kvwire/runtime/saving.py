"""What a load computed of a prompt and its answer is put into the store, as a document that later prompts find.

A document that the prompt begins with is not written again: what is new becomes a further part behind the parts that
both share. Rows that were computed over a lossy prefix say so (``BlobInfo.context_level``).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from kvwire.codec import encode
from kvwire.errors import ArgumentError, ConflictError, CorruptError, MismatchError, NotFoundError
from kvwire.runtime.coding import Computed, Document
from kvwire.runtime.grow import Grower, Grown, takes_parts
from kvwire.store.catalog.grown import leading
from kvwire.types import KVCache, digest_tokens

if TYPE_CHECKING:
    from kvwire.engines.base import Engine
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.load import Load
    from kvwire.runtime.prompt_request import Begun, Keep
    from kvwire.store import CatalogEntry, PrefixIndex

PROMPTS = "prompts/"
"""What names of prompts that are kept begin with; a digest of their tokens follows."""
_DIGEST_CHARS = 32
_LEAST_HEAD = 64
"""Tokens of a system text that is kept by itself, for other sessions to share: the index finds none that is shorter."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a document that are to be kept."""

    token_ids: tuple[int, ...]  # the whole document, without the opening tokens
    cache: KVCache  # of them, positions on, behind the opening tokens
    opening: tuple[int, ...]  # token ids that it was computed behind, BOS
    level: int | None  # the coarsest level that any of these rows was loaded at or computed over; None: none was lossy
    base: CatalogEntry | None = None  # a stored document that begins as this one does
    shared: int = 0  # how many tokens the two share
    loaded: int = 0  # how many first tokens of the document were found in the store, by the index


class Saver:
    """Keeps prompts and answers for one corpus; blocks."""

    def __init__(self, corpus: Corpus, index: PrefixIndex | None = None) -> None:
        """Write nothing yet."""
        self._corpus, self._catalog, self._config = corpus, corpus.catalog, corpus.config
        self._steps, self._index = corpus.encoder(), corpus.index() if index is None else index

    @property
    def runs_layers(self) -> bool:
        """Whether coding runs the model's first layers, and so belongs into the engine's thread."""
        profile = self._corpus.profile()
        return profile is not None and profile.prefix_layers > 0

    @property
    def lacks_opening(self) -> bool:
        """Whether the rows of the opening tokens are still to be put into the store, which other engines need."""
        ids = self._steps.engine.opening_tokens
        return bool(ids) and self._catalog.by_tokens(self._config, digest_tokens(ids)) is None

    def put_opening(self) -> None:
        """Put them there; in the engine's thread."""
        self._steps.put_opening()

    def save(self, rows: Rows, name: str = "", etag: str | None = None) -> CatalogEntry:
        """Keep rows as a document, named by its content where no name is given.

        etag: of the entry that is replaced, empty for none; None: whatever is there, which has the same content.
        """
        name = name or f"{PROMPTS}{digest_tokens(rows.token_ids)[:_DIGEST_CHARS]}"
        entry = self._there(name, rows.token_ids) or self._written(rows, name, etag)
        self._corpus.changes += 1
        self._index.write(entry, rows.token_ids, rows.opening, after=self._indexed(rows, entry))
        return entry

    def _indexed(self, rows: Rows, entry: CatalogEntry) -> int:
        """Up to which token the index leads elsewhere, to rows that are as good or better.

        The last chunk of what was found leads here from now on where it is of a shared part: prompts may go on as this
        one does, for less than a chunk.
        """
        if not entry.parts:
            return 0
        ends = {len(rows.opening) + end for end in accumulate(part.tokens for part in entry.parts)}
        return rows.loaded - self._index.scheme.chunk_tokens if rows.loaded in ends else rows.loaded

    def _written(self, rows: Rows, name: str, etag: str | None) -> CatalogEntry:
        if etag is None:
            etag = self._catalog.grown.version(self._config, name).etag
        try:
            return self._behind(rows, name, etag) or self._anew(rows, name, etag)
        except ConflictError:
            entry = self._there(name, rows.token_ids)  # perhaps of another request that was the same
            if entry is None:
                raise
            return entry

    def _there(self, name: str, token_ids: tuple[int, ...]) -> CatalogEntry | None:
        """The document where it is there already, whole."""
        try:
            entry = self._catalog.by_document(self._config, name)
            if entry is None or entry.is_text or entry.token_digest != digest_tokens(token_ids):
                return None
            blobs = self._catalog.blobs.of(entry).items()
            return entry if all(self._catalog.store.stat(key).size == size for key, size in blobs) else None
        except (CorruptError, NotFoundError):
            return None

    def _behind(self, rows: Rows, name: str, etag: str) -> CatalogEntry | None:
        """As a further part of what the document shares with its base; None where that cannot be."""
        base = None if rows.base is None or rows.base.is_text else leading(rows.base, rows.shared, rows.token_ids)
        if base is None or base.tokens == len(rows.token_ids):
            return None
        try:
            info = self._corpus.read_header(base)
            self._corpus.check_blob(info, base)
        except (CorruptError, NotFoundError):
            return None  # a part was lost: all is written anew
        base = structs.replace(base, levels=tuple((level.name, level.cumulative_bytes) for level in info.levels))
        ids = rows.token_ids
        grown = Grown(base, etag, info, name, ids[: base.tokens], ids[base.tokens :], rows.level)
        if info.soft_tokens or info.neutral_prefix != rows.opening or not takes_parts(grown):
            return None
        if any(level.lossless for level in info.levels) and info.meta.dtype != rows.cache.meta.dtype:
            return None
        part = rows.cache.slice(base.tokens, rows.cache.tokens)
        try:
            return Grower(self._corpus, self._steps).write(grown, part, time.perf_counter()).entry
        except MismatchError:
            return None  # its parts are coded in a way that this engine does not give

    def _anew(self, rows: Rows, name: str, etag: str) -> CatalogEntry:
        """As one blob; without a profile bit for bit, since a profile of its own could not be shared by parts."""
        document, cache = Document(name, rows.token_ids), rows.cache
        profile = self._corpus.profile()
        if profile is None:
            steps = self._steps
            lossless = encode(
                cache, None, 0, lossless=True, chunk_tokens=steps.coding.chunk_tokens, neutral_prefix=rows.opening,
                opening=len(rows.opening), context_level=rows.level,
            )  # fmt: skip
            blob = self._catalog.blobs.seal(lossless)
            info = self._catalog.blobs.reader().read_header(blob)
        else:
            _ = profile.data  # encoders need all of it
            computed = Computed(cache, rows.opening, opening=len(rows.opening))
            if profile.prefix_layers:
                computed = replace(self._steps.compute(document, profile, cache=cache, neutral_tokens=0), cache=cache)
            blob, info = self._steps.code(computed, profile, rows.level)
        self._steps.publish(profile)
        return self._steps.write(document, blob, info, profile, etag=etag)


class AnswerSaver:
    """Keeps prompts and answers of one loader, the model's rows at hand; used on the session's loop."""

    def __init__(self, engine: Engine, corpus: Corpus, writer: str) -> None:
        """Read nothing yet. writer: see ``DonorIndex``."""
        self._engine, self._corpus, self._writer = engine, corpus, writer
        self._saver: Saver | None = None

    async def save(self, begun: Begun, keep: Keep, answer: Answer, load: Load, past: Any) -> str:  # noqa: ANN401
        """Keep prompt and answer; returns under which name."""
        engine, (document,), prompt, compute = self._engine, load.documents, load.work.prompt, load.driver.compute
        info, opening = document.info, load.work.prompt.opening
        if prompt.cache.kept is not None or document.token_ids is None:
            raise ArgumentError("the stored document that it begins with is pruned, or its text is not known")
        if info is not None and (info.neutral_prefix != opening or info.soft_tokens):
            msg = f"{document.document_id!r} was not computed as a prompt's beginning: encode it with --index kvwire"
            raise ArgumentError(msg)
        ends = begun.stop | engine.end_tokens
        behind = (*begun.rest, *(answer.tokens[:-1] if answer.tokens[-1] in ends else answer.tokens))
        ids = (*document.token_ids[: begun.wanted], *behind)
        ran = len(begun.rest) + len(answer.tokens) - 1
        cache = await compute(partial(self._rows, prompt.cache, past, len(opening), ids, behind, ran))
        levels = [each.level for each in answer.decisions if each.level is not None]
        lossy = list[int]()
        if info is not None and levels:
            lossy = [level for level in levels if not info.levels[level].lossless]
            lossy += [] if info.context_level is None else [info.context_level]
        base, shared = begun.found.entry, begun.wanted if begun.found.entry else 0
        rows = Rows(
            ids, cache, opening, min(lossy, default=None), base, shared, shared and shared + len(opening)
        )  # fmt: skip
        if self._saver is None:
            made, lacks_opening = await asyncio.to_thread(self._opened)
            if lacks_opening:
                await compute(made.put_opening)
            self._saver = made
        write = partial(self._write, self._saver, rows, keep)
        runs_layers = await asyncio.to_thread(lambda saver: saver.runs_layers, self._saver)
        entry = await (compute(write) if runs_layers else asyncio.to_thread(write))
        if begun.keeps_donors and rows.level is None:
            await asyncio.to_thread(self._corpus.donors(self._writer).write, entry, ids)
        return entry.document_id

    def _opened(self) -> tuple[Saver, bool]:
        """What writes, and whether it is to put the opening tokens into the store first; blocks."""
        saver = Saver(self._corpus)
        return saver, saver.lacks_opening

    @staticmethod
    def _write(saver: Saver, rows: Rows, keep: Keep) -> CatalogEntry:
        """Keep a session's head by itself first, where it is not yet: other sessions share it."""
        head = keep.head - len(rows.opening)
        if head >= _LEAST_HEAD and rows.shared < head:
            first = replace(rows, token_ids=rows.token_ids[:head], cache=rows.cache.slice(0, head))
            rows = replace(rows, base=saver.save(first), shared=head)
        return saver.save(rows, keep.name, keep.etag)

    def _rows(
        self, loaded: KVCache, past: Any, start: int, ids: tuple[int, ...], behind: tuple[int, ...], ran: int  # noqa: ANN401
    ) -> KVCache:  # fmt: skip
        """Rows of the whole document, in the engine's thread; the last word of an answer that was cut was not run."""
        engine = self._engine
        if len(behind) > ran:
            engine.forward(past, behind[ran:], start + len(ids) - len(behind) + ran, logits=1)
        rows = engine.rows_of(past, ids, start)
        if rows is not None:
            return rows
        more = engine.extend(loaded, behind)
        first = loaded.slice(start, loaded.tokens)
        keys, values = (
            [torch.cat(pair, 1) if pair[0].numel() else pair[0] for pair in zip(*sides, strict=True)]
            for sides in ((first.keys, more.keys), (first.values, more.values))
        )
        return KVCache.from_tensors(keys, values, replace(first.meta, token_digest=""), ids)
