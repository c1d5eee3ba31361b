"""Kept repairs: repaired rows, stored for later loads of the same documents in the same order.

A repaired row depends on the model, on the documents up to it in their order, on their levels, and on which of their
rows were repaired. So rows are stored under a digest of the order, by tenant, for a whole prompt's beginning, with the
coarsest level they were computed on. They depend on no question: a later load writes them into its prompt if that is at
the same level or a coarser one, and repairs the rows of its own selector on top.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from kvwire.codec import BlobDecoder, Profile, encode, level_index, rows_off, rows_on
from kvwire.errors import CorruptError, KvwireError
from kvwire.runtime.corpus_reader import pieces_of
from kvwire.store import TEXT_LEVEL, base_of
from kvwire.types import KVCache, digest_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile
    from kvwire.controller import events as ev
    from kvwire.reuse import LinkedPrompt, Repaired
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.document import OpenDocument
    from kvwire.store import KeptRepair, KeptRows, Store
    from kvwire.types import BlobInfo, Decision

_log = logging.getLogger("kvwire.runtime")


class KeptLookup(NamedTuple):
    """Stored rows for an order of documents; trouble: why they cannot be used, in words."""

    kept: KeptPrompt | None = None
    trouble: str = ""


@dataclass(frozen=True, eq=False)
class KeptPrompt:
    """Stored rows of a prompt's first documents."""

    entry: KeptRepair  # their entry in the store
    rows: Tensor  # int64, positions in the prompt, ascending
    cache: KVCache  # the rows' keys and values, positions off
    # digests of the rows' token ids, by document, for comparison with blobs; empty if a document has none
    digests: tuple[str, ...]
    opening: tuple[int, ...] = ()  # the engine's opening tokens, such as BOS
    head: tuple[int, ...] = ()  # token ids before all documents: opening tokens, or a system text

    def suits(self, documents: Sequence[OpenDocument], decisions: Sequence[Decision]) -> bool:
        """Whether the rows are of this prompt's texts, computed on levels at least as fine as the prompt's."""
        count = len(self.entry.documents)
        bases = _bases_of(documents[:count], self.opening, self.head)
        if self.entry.documents != bases or self.entry.level < coarsest(decisions, count):
            return False
        start = len(self.head)
        for document, digest in zip(documents, self.digests, strict=False):
            text, stop = document.token_ids or (), start + document.tokens
            mine = self.rows[(self.rows >= start) & (self.rows < stop)] - start
            if len(mine) and digest_tokens([text[token] for token in mine.tolist() if token < len(text)]) != digest:
                return False
            start = stop
        return True

    def write(self, prompt: LinkedPrompt, front: int = 0) -> Tensor:
        """Write the rows into a prompt."""
        is_plain = self.head == self.opening and front <= prompt.lengths[0]
        written = self.rows >= (0 if is_plain else front)  # in plain prompts, the first document was decoded
        rows = self.rows[written]
        if not len(rows):
            return rows
        placed = rows_on(_taken(self.cache, written), rows)
        theirs, ours = (*placed.keys, *placed.values), (*prompt.cache.keys, *prompt.cache.values)
        for new, out in zip(theirs, ours, strict=True):
            if out.numel():
                out.index_copy_(1, rows.to(out.device), new.to(out.device, out.dtype))
        return rows


@dataclass(frozen=True, eq=False)
class Gathered:
    """Rows of a repaired prompt to store."""

    bases: tuple[str, ...]  # each document's digest in ``KeptRepair``
    texts: tuple[tuple[int, ...], ...]  # token ids of each document
    level: int  # see ``KeptRepair``
    rows: Tensor  # int64, positions in the prompt, ascending
    cache: KVCache  # the rows' keys and values on the processor, positions on
    heals: bool = False  # whether the stored rows of these documents are damaged
    opening: int = 0  # number of tokens before all documents, such as BOS


def coarsest(decisions: Sequence[Decision], documents: int) -> int:
    """The coarsest level of a prompt's first documents."""
    levels = (each.level for each in decisions if each.chunk.document < documents)
    return min((level for level in levels if level is not None), default=TEXT_LEVEL)


def bases(
    documents: Iterable[tuple[str, BlobInfo | None]], opening: Sequence[int], head: Sequence[int]
) -> tuple[str, ...]:
    """Documents' digests for ``KeptRepair``, from token digests and blob headers."""
    return tuple(base_of(digest, _behind(info, opening, head)) for digest, info in documents)


def _bases_of(documents: Sequence[OpenDocument], opening: Sequence[int], head: Sequence[int]) -> tuple[str, ...]:
    return bases(((each.token_digest, each.info) for each in documents), opening, head)


def _behind(info: BlobInfo | None, opening: Sequence[int], head: Sequence[int]) -> str:
    """Digest of what a document was computed behind, or of soft tokens inside it, and of another head than the opening.

    Empty for nothing.
    """
    if info and info.neutral_prefix:
        digest = digest_tokens(info.neutral_prefix)
    elif info and info.soft_tokens:
        digest = info.soft_tokens.digest
    else:
        digest = digest_tokens((*opening, 0)) if opening else ""
    if tuple(head) != tuple(opening):
        digest = sha256(f"behind {digest_tokens(head)}:{digest}".encode()).hexdigest()
    return digest


def gathered(
    prompt: LinkedPrompt, documents: Sequence[OpenDocument], repaired: Repaired, found: KeptLookup | None,
    finish: ev.Finish, opening: Sequence[int] = (),
) -> Gathered | None:  # fmt: skip
    """Copy the rows of a repaired prompt that are worth storing; None without any."""
    known = tuple(each.token_ids for each in documents if each.token_ids is not None)
    if not len(repaired.rows) or not repaired.is_plain or len(known) < len(documents) or prompt.cache.kept is not None:
        return None
    seeing = torch.zeros(prompt.cache.tokens, dtype=torch.bool)
    first = prompt.lengths[0] if prompt.opening == tuple(opening) else len(prompt.opening)
    seeing[first : finish.front] = True
    seeing[repaired.rows] = True
    if repaired.kept and found and found.kept:
        seeing[found.kept.rows] = True
    rows = seeing.nonzero()[:, 0]
    cache = _taken(prompt.cache, rows)
    keys, values = ([tensor.cpu() for tensor in side] for side in (cache.keys, cache.values))
    level = coarsest(finish.decisions, len(known))
    copied, heals = KVCache(keys, values, prompt.cache.meta), bool(found and found.trouble)
    bases = _bases_of(documents, opening, prompt.opening)
    return Gathered(bases, known, level, rows, copied, heals, len(prompt.opening))


class RepairKeeper:
    """Finds and stores repaired rows in a corpus's store. Thread-safe."""

    def __init__(self, corpus: Corpus, view: Store, most_bytes: int, opening: Sequence[int] = ()) -> None:
        """Take the parts."""
        self.opening = tuple(opening)
        self._corpus, self._view, self._most_bytes = corpus, corpus.over(view), most_bytes
        self._config = corpus.meta.config_digest()

    def find(self, documents: Sequence[OpenDocument], head: Sequence[int]) -> KeptLookup:
        """Look for rows; blocks."""
        try:
            bases, least = _bases_of(documents, self.opening, head), 2 if tuple(head) == self.opening else 1
            entry = self._view.catalog.kept.find(self._config, bases, least)
            return KeptLookup(self.read(entry, [each.tokens for each in documents], head)) if entry else KeptLookup()
        except KvwireError as error:
            return self.unread(error)

    @staticmethod
    def unread(error: KvwireError) -> KeptLookup:
        """Result of a look-up that failed."""
        return KeptLookup(None, f"a kept repair was not used, and rows computed anew: {error}")

    def read(self, entry: KeptRepair, lengths: Sequence[int], head: Sequence[int] | None = None) -> KeptPrompt:
        """Read the rows of an entry; blocks."""
        profile = self._view.profile(entry.profile_digest) if entry.profile_digest else None
        head = self.opening if head is None else tuple(head)
        rows, caches, start = [], [], len(head)
        for part, length in zip(entry.parts, lengths, strict=False):
            if part.count:
                tokens = _tokens_of(part, length)
                rows.append(tokens + start)
                caches.append(self._decoded(part, profile, len(tokens)))
            start += length
        if not caches:
            raise CorruptError("it holds no rows")
        sides = ([cache.keys for cache in caches], [cache.values for cache in caches])
        keys, values = (
            [torch.cat(layer, 1) if layer[0].numel() else layer[0] for layer in zip(*side, strict=True)]
            for side in sides
        )
        digests = iter(cache.meta.token_digest for cache in caches)
        named = tuple(next(digests) if part.count else "" for part in entry.parts)
        cache = KVCache(keys, values, caches[0].meta)
        return KeptPrompt(entry, torch.cat(rows), cache, named, self.opening, head)

    def _decoded(self, part: KeptRows, profile: AnyProfile | None, count: int) -> KVCache:
        catalog = self._view.catalog
        reader, stored = catalog.blobs.reader(), catalog.kept.rows(self._config, part)
        info = reader.read_header(stored)
        if info.meta.config_digest() != self._config or info.tokens != count or info.prefix_layers:
            raise CorruptError(f"kept rows {part.sha256[:12]} are not those of their entry")
        level = level_index(info, None)
        decoder = BlobDecoder(reader.parsed or b"", profile, offset=None, level=level, max_tokens=count)
        for chunk in range(info.chunks):
            decoder.decode_chunk(chunk, pieces_of(reader, info.reads(chunk, level), stored), level)
        return replace(decoder.cache, meta=info.meta)

    def keep(self, made: Gathered) -> int:
        """Store rows, and drop the oldest beyond the limit; blocks. Failures are only logged."""
        try:
            return self._keep(made)
        except KvwireError as error:
            _log.warning("repaired rows were not kept: %s", error)
            return 0

    def _keep(self, made: Gathered) -> int:
        profile = self._corpus.profile()
        if isinstance(profile, Profile) and profile.prefix_layers:
            profile = None  # it predicts only from the first layers over a document alone
        off = rows_off(made.cache, made.rows)
        parts: list[tuple[bytes, bytes]] = []
        start = made.opening
        for text in made.texts:
            mine = (made.rows >= start) & (made.rows < start + len(text))
            tokens = made.rows[mine] - start
            blob = _encoded(off, mine, [text[token] for token in tokens.tolist()], profile)
            parts.append((_bits_of(tokens), blob))
            start += len(text)
        size = sum(len(blob) for _, blob in parts)
        if size > self._most_bytes:
            _log.warning("repaired rows of %d bytes were not kept: the bound is %d", size, self._most_bytes)
            return 0
        known = (made.bases, made.level, profile.digest if profile else "")
        least = 2 if made.opening == len(self.opening) else 1
        written = self._corpus.catalog.kept.put(self._config, *known, parts, overwrite=made.heals, least=least)
        if written:
            self._corpus.catalog.kept.bound(self._config, self._most_bytes)
        return len(written)


def _taken(cache: KVCache, rows: Tensor) -> KVCache:
    """Some rows of a cache, by index or mask."""
    keys, values = (
        [tensor[:, rows.to(tensor.device)] if tensor.numel() else tensor for tensor in side]
        for side in (cache.keys, cache.values)
    )
    return KVCache(keys, values, cache.meta)


def _encoded(off: KVCache, mine: Tensor, ids: Sequence[int], profile: AnyProfile | None) -> bytes:
    """A document's rows as a blob of their own; empty without rows."""
    if not ids:
        return b""
    rows = _taken(off, mine)
    return encode(KVCache.from_tensors(rows.keys, rows.values, rows.meta, ids), profile)


def _tokens_of(part: KeptRows, length: int) -> Tensor:
    """Which of a document's tokens a part holds."""
    bits = np.unpackbits(np.frombuffer(part.tokens, dtype=np.uint8), bitorder="little")
    tokens = torch.from_numpy(np.flatnonzero(bits))
    if int(tokens[-1]) >= length:
        raise CorruptError(f"kept rows {part.sha256[:12]} lie behind their document's end")
    return tokens


def _bits_of(tokens: Tensor) -> bytes:
    if not len(tokens):
        return b""
    bits = np.zeros(int(tokens[-1]) + 1, dtype=np.uint8)
    bits[tokens.numpy()] = 1
    return np.packbits(bits, bitorder="little").tobytes()
