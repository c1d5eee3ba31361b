"""What a load computed of a prompt and its answer is put into the store, as a document that later prompts find.

A document that the prompt begins with is not written again: what is new becomes a further part behind the parts that
both share. Rows that were computed over a lossy prefix say so (``BlobInfo.context_level``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from kvwire.codec import encode
from kvwire.errors import ArgumentError, ConflictError, CorruptError, MismatchError, NotFoundError
from kvwire.reuse import LinkedPrompt
from kvwire.reuse.edits.place import BLOCK_ROWS
from kvwire.runtime.coding import Computed, Document, read_whole
from kvwire.runtime.document import in_words
from kvwire.runtime.grow import Grower, Grown, takes_parts
from kvwire.store.catalog.grown import leading
from kvwire.types import KVCache, digest_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from kvwire.engines.base import Engine
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.load import Load
    from kvwire.runtime.prompt_request import Begun, Keep
    from kvwire.store import CatalogEntry, PrefixIndex

_log = logging.getLogger("kvwire.runtime")
PROMPTS = "prompts/"
"""What names of prompts that are kept begin with; a digest of their tokens follows."""
_DIGEST_CHARS = 32
_LEAST_HEAD = 64
"""Tokens of a system text that is kept by itself, for other sessions to share: the index finds none that is shorter."""
_MOST_WAITING = 16
"""Edited prompts that wait to be computed and kept; more are left out, and told."""
_CLOSING_S = 60.0
"""Longest wait for them when a loader closes."""


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
        name = name or name_of(rows.token_ids)
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
        profile = read_whole(self._corpus.profile())
        if profile is None:
            steps = self._steps
            lossless = encode(
                cache, None, 0, lossless=True, chunk_tokens=steps.coding.chunk_tokens, neutral_prefix=rows.opening,
                opening=len(rows.opening), context_level=rows.level,
            )  # fmt: skip
            blob = self._catalog.blobs.seal(lossless)
            info = self._catalog.blobs.reader().read_header(blob)
        else:
            computed = Computed(cache, rows.opening, opening=len(rows.opening))
            if profile.prefix_layers:
                computed = replace(self._steps.compute(document, profile, cache=cache, neutral_tokens=0), cache=cache)
            blob, info = self._steps.code(computed, profile, rows.level)
        self._steps.publish(profile)
        return self._steps.write(document, blob, info, profile, etag=etag)


def name_of(token_ids: Sequence[int]) -> str:
    """Name of a kept prompt, by its content."""
    return f"{PROMPTS}{digest_tokens(token_ids)[:_DIGEST_CHARS]}"


class AnswerSaver:
    """Keeps prompts and answers of one loader; used on the session's loop.

    Attributes:
        unsaved: How many edited prompts could not be kept in the background.
    """

    def __init__(self, engine: Engine, corpus: Corpus, writer: str) -> None:
        """Read nothing yet. writer: see ``DonorIndex``."""
        self._engine, self._corpus, self._writer = engine, corpus, writer
        self._saver: Saver | None = None
        self.unsaved = 0
        self._waiting: set[Future[None]] = set()
        self._turn = asyncio.Lock()

    async def save(self, begun: Begun, keep: Keep, answer: Answer, load: Load, past: Any) -> str:  # noqa: ANN401
        """Keep prompt and answer; returns under which name."""
        (document,), prompt, compute = load.documents, load.work.prompt, load.driver.compute
        info, opening = document.info, load.work.prompt.opening
        if prompt.cache.kept is not None or document.token_ids is None:
            raise ArgumentError("the stored document that it begins with is pruned, or its text is not known")
        if info is not None and (info.neutral_prefix != opening or info.soft_tokens):
            msg = f"{document.document_id!r} was not computed as a prompt's beginning: encode it with --index kvwire"
            raise ArgumentError(msg)
        behind = (*begun.rest, *self._said(begun, answer))
        ids = (*document.token_ids[: begun.wanted], *behind)
        ran = len(begun.rest) + len(answer.tokens) - 1
        cache = await compute(partial(self._rows, prompt.cache, past, len(opening), ids, behind, ran))
        levels = [each.level for each in answer.decisions if each.level is not None]
        lossy = list[int]()
        if info is not None and levels:
            lossy = [level for level in levels if not info.levels[level].lossless]
            lossy += [] if info.context_level is None else [info.context_level]
        rows = self._rows_of(begun, ids, cache, begun.found.entry, min(lossy, default=None))
        return await self._put(begun, keep, rows, load.driver)

    def save_edited(self, begun: Begun, keep: Keep, answer: Answer, driver: ControllerDriver) -> str:
        """Keep an edited prompt and its answer in the background; returns under which name, empty if too many wait.

        All rows are computed anew, as a prefill does: what is kept has seen none of the donors' words, so that errors
        of edits never add up.
        """
        if len(self._waiting) >= _MOST_WAITING:
            return ""
        ids, base = (*begun.text, *self._said(begun, answer)), begun.found.entry
        donors = dict(answer.reused.donors) if answer.reused else {}
        if base is not None and base.document_id not in donors:
            base = None  # its rows may be pruned, or computed over lossy ones
        saving = self._save_whole(begun, keep, ids, base, driver)
        future = asyncio.run_coroutine_threadsafe(saving, asyncio.get_running_loop())
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return name_of(ids)

    def wait(self) -> None:
        """Wait for what is kept in the background; in any thread but the loop's."""
        wait(tuple(self._waiting), _CLOSING_S)

    async def _save_whole(
        self, begun: Begun, keep: Keep, ids: tuple[int, ...], base: CatalogEntry | None, driver: ControllerDriver
    ) -> None:
        try:
            async with self._turn:
                cache = await self._computed(ids, driver)
                await self._put(begun, keep, self._rows_of(begun, ids, cache, base), driver)
        except asyncio.CancelledError:
            self.unsaved += 1
            _log.warning("a prompt was not saved: its loader ended before it was computed; ask with reuse exact")
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer was given
            self.unsaved += 1
            _log.warning("a prompt was not saved: %s", in_words(error))

    async def _computed(self, ids: tuple[int, ...], driver: ControllerDriver) -> KVCache:
        """Rows of a prompt without its opening, computed in blocks, so that loads get turns in between."""
        engine, opening = self._engine, self._engine.opening_tokens
        room = await driver.compute(partial(engine.allocate, len(opening) + len(ids)))
        prompt = LinkedPrompt([len(ids)], engine.meta, cache=room, opening=opening)

        def compute(start: int) -> None:
            if opening and not start:
                prompt.write_opening(engine.prefill([opening])[0])
            before = room.slice(0, len(opening) + start) if opening or start else None
            prompt.write(0, start, engine.extend(before, ids[start : start + BLOCK_ROWS]))

        for start in range(0, len(ids), BLOCK_ROWS):
            await driver.compute(partial(compute, start))
        rows = prompt.document(0)
        return KVCache.from_tensors(rows.keys, rows.values, replace(rows.meta, token_digest=""), ids)

    def _said(self, begun: Begun, answer: Answer) -> tuple[int, ...]:
        """The answer without the token that ended it."""
        ends = begun.stop | self._engine.end_tokens
        return answer.tokens[:-1] if answer.tokens[-1] in ends else answer.tokens

    def _rows_of(
        self, begun: Begun, ids: tuple[int, ...], cache: KVCache, base: CatalogEntry | None, level: int | None = None
    ) -> Rows:
        opening, shared = self._engine.opening_tokens, begun.wanted if base else 0
        return Rows(ids, cache, opening, level, base, shared, shared and shared + len(opening))

    async def _put(self, begun: Begun, keep: Keep, rows: Rows, driver: ControllerDriver) -> str:
        """Write rows, and the entries of an index of donors; returns the document's name."""
        if self._saver is None:
            made, lacks_opening = await asyncio.to_thread(self._opened)
            if lacks_opening:
                await driver.compute(made.put_opening)
            self._saver = made
        write = partial(self._write, self._saver, rows, keep)
        runs_layers = await asyncio.to_thread(lambda saver: saver.runs_layers, self._saver)
        entry = await (driver.compute(write) if runs_layers else asyncio.to_thread(write))
        if begun.keeps_donors and rows.level is None:
            await asyncio.to_thread(self._corpus.donors(self._writer).write, entry, rows.token_ids)
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
