"""A document of a load: its catalog entry, and its open blob."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from kvwire import controller as ctl
from kvwire.codec import CHUNK_TOKENS, BlobDecoder, Profile
from kvwire.errors import KvwireError, MismatchError
from kvwire.runtime.prefill import TWICE, WITHOUT, begins_with, lacks_opening
from kvwire.store.crypto.sealing import PlainBlob
from kvwire.transport import SegmentError
from kvwire.types import PagedKVCache, digest_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile, Backend
    from kvwire.codec.format.header import Kept
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkLayout
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import CatalogEntry
    from kvwire.store.crypto.sealing import BlobReader
    from kvwire.transport import BlobFetcher
    from kvwire.types import BlobInfo, KVCache, SegmentInfo, SoftTokensName

_OPEN_SHARE = 0.25
"""Share of a deadline for a header if the document's text is known: recomputing needs the rest."""
_OPEN_LEAST_S = 0.1
_PROFILE_SHARE = 0.5
"""The same for a profile."""
LEAST_PATIENCE_S = 2.0
"""Seconds to wait for what only the store has, even past the deadline: a connection over a slow link takes a second,
and a late answer is better than none."""
CHANGED = "its text has changed since it was encoded; encode it again"


@dataclass(frozen=True, eq=False)
class FoundDocument:
    """What the catalog says of a document."""

    corpus: Corpus  # corpus in which it was looked up
    document_id: str  # its name there
    entry: CatalogEntry | None  # its entry; None if only its text is known or stored
    # profile of its blob; None if the blob carries its own, or it could not be read (see ``trouble``)
    profile: AnyProfile | None
    text: tuple[int, ...] | None  # token ids, if known without its blob
    trouble: str = ""  # why the blob cannot be used
    entry_is_kept: bool = False  # whether the entry is from an earlier load, and may be out of date
    variants: tuple[FoundDocument, ...] = ()  # the same text in other corpora
    # token ranges that the load needs, each with its end excluded; empty: the whole document. Chunks outside them are
    # skipped, and no chunk is recomputed from the text.
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def token_digest(self) -> str:
        """Digest of the document's text; empty if not known."""
        if self.text is not None:
            return digest_tokens(self.text)
        return self.entry.token_digest if self.entry else ""

    @property
    def tokens(self) -> int:
        """Length of the document."""
        if self.entry and self.text is None:
            return self.entry.tokens
        return len(self.text or ())


@dataclass(frozen=True, eq=False)
class OpenDocument:
    """A document with an open blob, or with its text instead."""

    found: FoundDocument  # what the catalog says
    token_ids: tuple[int, ...] | None  # token ids; None if not known
    info: BlobInfo | None = None  # the header; None if the text replaces the blob
    reader: BlobReader = field(default_factory=PlainBlob)  # reads the stored blob, sealed or plain
    fetcher: BlobFetcher | None = None  # fetches the blob's ranges; None if the blob cannot be used
    trouble: str = ""  # why it cannot
    decoder: BlobDecoder | None = None  # decodes chunks into the prompt; None before ``decode_into``
    prefix_layers: int = 0  # layers to compute before decoding; 0 without a blob
    wanted_tokens: int | None = None  # how many of its first tokens the load needs; None: all
    is_cut: bool = False  # whether the prompt has no room for the others
    layout: LinkLayout | None = None  # layout of the anchors in its cache; None: no anchors
    has_unknown_holes: bool = False  # whether its cache is pruned in a way that its text does not tell
    exact: bool = False  # whether only its lossless level may be used

    @property
    def document_id(self) -> str:
        """Its name in the catalog."""
        return self.found.document_id

    @property
    def token_digest(self) -> str:
        """Digest of the document's text; empty if not known."""
        return self.found.token_digest

    @property
    def tokens(self) -> int:
        """Length of the document."""
        return self.found.tokens

    @property
    def has_blob(self) -> bool:
        """Whether chunks can be fetched and decoded, perhaps after computing prefix layers."""
        return self.decoder is not None or self.prefix_layers > 0

    def with_header(self, info: BlobInfo, token_ids: tuple[int, ...] | None) -> OpenDocument:
        """A copy with header and text."""
        profile = self.found.profile
        is_predicted = token_ids is not None and isinstance(profile, Profile) and profile.hidden_size
        return replace(self, info=info, token_ids=token_ids, prefix_layers=info.prefix_layers if is_predicted else 0)

    def without_blob(self, trouble: str) -> OpenDocument:
        """A copy with the text instead of an unusable blob."""
        return replace(self, trouble=trouble, fetcher=None)

    def as_fine_as(self, floor: int) -> OpenDocument:
        """A copy with the text instead of a blob whose rows were computed on a level below the floor."""
        level = self.info.context_level if self.info else None
        if level is None or level >= floor or self.token_ids is None:
            return self
        trouble = f"rows of it were computed over level {level}, which is coarser than what was asked for"
        return replace(self, prefix_layers=0).without_blob(trouble)

    def as_exact_as(self, dtype: str) -> OpenDocument:
        """A copy with the text, if known, instead of a blob whose numbers cannot be those that an engine computes."""
        trouble = dtype_trouble(self.info.meta.dtype, dtype) if self.info else ""
        if not trouble:
            return self
        if self.token_ids is None:
            return replace(self, trouble=trouble)
        return replace(self, prefix_layers=0).without_blob(trouble)

    def decode_into(
        self, out: KVCache, offset: int, hidden: Tensor | None, backend: Backend, *, rounded: bool
    ) -> OpenDocument:
        """A copy with a decoder into its place in a prompt; see ``BlobDecoder`` for ``rounded``."""
        place: KVCache | PagedKVCache = out
        if self.is_cut and self.info:
            place = _cut_off(out, offset, self.wanted_tokens or self.tokens, self.info.tokens)
        decoder = BlobDecoder(
            self.reader.parsed or b"",
            self.found.profile,
            out=place,
            offset=offset,
            hidden=hidden,
            backend=backend,
            begins=offset == 0,
            rounded=rounded,
        )
        return replace(self, decoder=decoder)

    def with_soft_tokens(self, used: SoftTokensName | None) -> OpenDocument:
        """Compare the document's soft tokens with the engine's; without these, nothing can be computed."""
        named = self.info.soft_tokens if self.info else None
        if named is None or used == named:
            return self
        if used is None:
            return replace(self, token_ids=None)
        ours, theirs = (f"{each.digest[:12]} ({each.count} from id {each.first})" for each in (used, named))
        raise MismatchError(
            f"{self.document_id!r} was encoded with the soft tokens {theirs}, in use are {ours}; "
            "name their file, or encode the document again"
        )

    def with_anchors(self, engine: Engine, asked: LinkLayout | None) -> OpenDocument:
        """A copy with the layout of the anchors in its cache, if it has any."""
        from kvwire.reuse import stored_tokens  # few documents need it

        ids, kept = self.token_ids, self.decoder.kept if self.decoder else None
        soft = engine.soft_tokens
        named = [asked, soft.link_layout if soft else None]
        layout = next((each for each in named if each is not None and each.anchors), None)
        if layout is not None and ids is not None:
            is_of_layout = stored_tokens(layout, ids, engine.vocabulary_size) == ids
            if is_of_layout and (self.decoder is None or _is_stored(layout, kept, self.tokens)):
                return replace(self, layout=layout)
        if asked is not None and asked.anchors and self.decoder is not None and ids is not None:
            raise MismatchError(
                f"the blob of {self.document_id!r} does not hold the anchors of the layout {asked.name} and nothing "
                "else; encode it with that layout"
            )
        return replace(self, has_unknown_holes=kept is not None)

    @property
    def advice(self) -> str:
        """What to do if a lost chunk cannot be recomputed because the text is not enough; empty if it is enough."""
        if self.info and self.info.soft_tokens and self.token_ids is None:
            name = repr(self.document_id)
            return f"name the soft tokens that {name} was encoded with (--soft-tokens), or encode it again"
        if self.has_unknown_holes:
            return f"{self.document_id!r} is pruned in a way that its text does not tell: encode it again"
        return ""

    def adopt_text(self, first: OpenDocument) -> OpenDocument | None:
        """A copy with another document's text, if that has the same chunks; else None."""
        info, ids = self.info, first.token_ids
        if info is None or self.token_digest != first.token_digest or info.tokens != first.tokens:
            return None
        is_cut_alike = [info.chunk_span(chunk) for chunk in range(info.chunks)] == first.spans
        return self.with_header(info, ids) if is_cut_alike and (ids is None or info.token_ids in (None, ids)) else None

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The blob's numbers of the chunks that the load needs."""
        chunks = self.info.chunks if self.info else -(-self.tokens // CHUNK_TOKENS)
        every, ranges = range(chunks), self.found.ranges
        if not ranges:
            return tuple(every)
        spans = [(chunk, *self._own_span(chunk)) for chunk in every]
        return tuple(chunk for chunk, a, b in spans if any(a < stop and start < b for start, stop in ranges))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """``span`` of all its chunks."""
        return [self._own_span(number) for number in self.numbers]

    def span(self, chunk: int) -> tuple[int, int]:
        """First token of one of the load's chunks, and one after its last."""
        start, stop = self._own_span(self.numbers[chunk])
        return start, min(stop, self.wanted_tokens or stop) if self.is_cut else stop

    def reads(self, chunk: int, level: int) -> tuple[SegmentInfo, ...]:
        """Segments of one of the load's chunks, up to a level; none without a blob."""
        return self.info.reads(self.numbers[chunk], level) if self.info else ()

    def _own_span(self, number: int) -> tuple[int, int]:
        if self.info:
            return self.info.chunk_span(number)
        return number * CHUNK_TOKENS, min((number + 1) * CHUNK_TOKENS, self.tokens)

    async def fetch(self, reads: Sequence[SegmentInfo], until: float, parts: dict[int, bytes]) -> str:
        """Fetch a chunk's segments until no further one is useful: those above a lost one are not."""
        if self.fetcher is None:
            return "its blob is not open"
        trouble, useful = "", len(reads)
        try:
            async with aclosing(self.fetcher.fetch(reads, deadline=until)) as arrivals:
                async for arrival in arrivals:
                    if isinstance(arrival, SegmentError):
                        trouble = trouble or in_words(arrival)
                        useful = min(useful, reads.index(arrival.segment))
                    else:
                        parts[arrival.segment.level] = arrival.data
                    if all(each.level in parts for each in reads[:useful]):
                        break
        except Exception as error:  # noqa: BLE001 - whatever it is, the chunk can be recomputed
            return in_words(error)
        return trouble

    def fault(self, chunk: int) -> str:
        """What the last attempt at one of the load's chunks met that is still being fetched; empty if nothing."""
        if self.fetcher is None or self.info is None:
            return ""
        faults, reads = self.fetcher.faults, self.reads(chunk, len(self.info.levels) - 1)
        return next((faults[each.offset] for each in reads if each.offset in faults), "")

    def plan_input(self, layers: int) -> ctl.DocumentPlanInput:
        """Facts for planning."""
        has_text = self.token_ids is not None and not self.has_unknown_holes and not self.found.ranges
        if self.info and self.has_blob:
            share = min(1.0, self.prefix_layers / layers)
            made = ctl.DocumentPlanInput.from_blob(self.info, has_text=has_text, prefix_share=share, exact=self.exact)
        else:
            made = ctl.DocumentPlanInput(tuple(stop - start for start, stop in self.spans), (), has_text)
        if self.found.ranges and self.info and self.has_blob:
            numbers = self.numbers
            tokens, sizes = tuple(made.tokens[at] for at in numbers), tuple(made.fetch_bytes[at] for at in numbers)
            errors = tuple(made.errors[at] for at in numbers) if made.errors else ()
            return replace(made, tokens=tokens, fetch_bytes=sizes, errors=errors)
        if self.wanted_tokens is None:
            return made
        end = max(1, self.wanted_chunks)
        tokens = tuple(stop - start for start, stop in map(self.span, range(end)))
        return replace(made, tokens=tokens, fetch_bytes=made.fetch_bytes[:end], errors=made.errors[:end])

    @property
    def wanted_chunks(self) -> int:
        """Number of chunks with tokens that the load needs."""
        tokens = self.tokens if self.wanted_tokens is None else min(self.tokens, self.wanted_tokens)
        return sum(start < tokens for start, _ in self.spans)


def _cut_off(room: KVCache, offset: int, wanted: int, tokens: int) -> PagedKVCache:
    """A document's place in a prompt without room for its last tokens: these go to the room's last row, one by one."""
    keys, values = ([each.transpose(0, 1).unsqueeze(1) for each in side] for side in (room.keys, room.values))
    device = next(tensor.device for tensor in room.keys if tensor.numel())
    rows = torch.full((tokens,), room.tokens - 1, dtype=torch.int32, device=device)
    rows[:wanted] = torch.arange(offset, offset + wanted, device=device)
    return PagedKVCache(keys, values, rows, tokens, room.meta)


def _is_stored(layout: LinkLayout, kept: Kept | None, tokens: int) -> bool:
    """Whether a cache stores exactly what a layout stores."""
    stored = layout.cache_stored(tokens)
    masks = [mask.cpu() for mask in kept or () if mask is not None and mask.numel()]
    return bool(masks) and stored is not None and all(bool((mask == stored).all()) for mask in masks)


def opening_troubles(engine: Engine, document: OpenDocument, opening: Sequence[int]) -> list[str]:
    """Why a document fits the prompt's BOS less exactly than it could. opening: the prompt's opening tokens."""
    told, info, ids = [], document.info, document.token_ids
    if info and document.layout is None and lacks_opening(engine, info, ids):
        told.append(f"{document.document_id!r} was {WITHOUT}")
    if ids and opening and begins_with(ids, engine.opening_tokens):
        told.append(f"{document.document_id!r} {TWICE}")
    return told


def dtype_trouble(held: str, dtype: str) -> str:
    """Say why numbers of one dtype cannot be those that an engine of another computes; empty where it is the same."""
    if held == dtype:
        return ""
    return f"its numbers are {held}, this engine computes {dtype}: encode it with --dtype {dtype} --lossless"


def in_words(error: Exception) -> str:
    """An error in words, with its type unless it is kvwire's."""
    return str(error) if isinstance(error, KvwireError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class Timeouts:
    """Seconds to wait for the catalog, a header or a text."""

    soon: float  # if the document's text is known, or for a header if it may be stored
    patience: float  # for anything else
    extra: float  # further wait for variants, see ``gather_optional``
    profile: float  # for a profile; the read goes on for later loads, and the document's text replaces it here

    @classmethod
    def of(cls, open_s: float, patience_s: float, deadline_s: float | None, extra: float) -> Timeouts:
        """Waits of a load with these settings, counted from its beginning."""
        if deadline_s is None:
            return cls(open_s, patience_s, extra, patience_s)
        soon, profile = (max(share * deadline_s, _OPEN_LEAST_S) for share in (_OPEN_SHARE, _PROFILE_SHARE))
        patience = min(patience_s, max(deadline_s, LEAST_PATIENCE_S))
        return cls(min(open_s, soon), patience, extra, min(patience, profile))
