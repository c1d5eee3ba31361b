"""A corpus: documents in, blobs in a store, and the way back to them."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from copy import copy
from dataclasses import InitVar, dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from kvwire.codec import (
    CHUNK_TOKENS,
    DEFAULT_METHOD,
    BlobDecoder,
    Ladder,
    encode,
    kind_of_method,
    level_index,
    read_profile,
)
from kvwire.errors import ArgumentError, CorruptError, KvwireError, MismatchError, NotFoundError
from kvwire.runtime.link_report import LinkReport
from kvwire.runtime.quality import calibrate_error
from kvwire.store import Catalog, CatalogEntry, check_new_name
from kvwire.types import KVCache, digest_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch
    from torch import Tensor

    from kvwire.codec import AnyProfile, Backend, LevelKind, Profile, Statistics
    from kvwire.engines.base import Engine
    from kvwire.runtime.neighbours import Neighbours
    from kvwire.store import Keyring, ModelRecord, PrefixIndex, Store, UseCounts
    from kvwire.types import BlobInfo, BlockDeviation, CacheMeta

CALIBRATION_TOKENS = 16384
"""Tokens that a profile is fitted on: the basis hardly moves beyond. Their caches wait on disk."""
HELD_OUT, HELD_TOKENS, EACH_OUT = 24, 1280, 6
"""Texts at most to measure errors on, and tokens of all of them at least; without, of how many texts one is kept out of
the fit for that."""
LEAST_TOKENS = 64
"""Less text says nothing about a model: such documents carry a plain profile of their own."""
ENOUGH_TOKENS = 4096
"""A profile fitted on less gives way once twice as much text comes: a short first document must not rule for ever."""


@dataclass(frozen=True)
class Document:
    """A document to encode.

    Attributes:
        document_id: Its name in the catalog.
        token_ids: Its token ids.
    """

    document_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Encoded:
    """What became of a document.

    Attributes:
        entry: The document's entry in the catalog.
        blob: What the blob's header says; None where only the text is kept, or where an older blob was left as it is.
        skipped: The catalog had the document already, as it was wanted.
        encode_s: Seconds of prefilling, encoding and writing; 0 where nothing was encoded.
    """

    entry: CatalogEntry
    blob: BlobInfo | None
    skipped: bool
    encode_s: float

    @property
    def info(self) -> BlobInfo:
        """What the blob's header says.

        Raises:
            ArgumentError: There is no blob.
        """
        if self.blob is None:
            msg = f"of {self.entry.document_id!r} no blob was made: look at ``blob`` first"
            raise ArgumentError(msg)
        return self.blob


@dataclass(frozen=True)
class Coding:
    """How a corpus is encoded.

    Attributes:
        method: Of the lossy levels, one of ``codec.methods()``.
        prefix_layers: Layers that readers will compute anew, which makes blobs smaller.
        lossless: Add a level that holds every number bit for bit.
        ladder: The quality levels of kvwire's own method, None for the default.
        chunk_tokens: Tokens of a chunk.
        backend: Which kernels encode; blobs are alike.
        deviation: Measure how far tokens move behind neighbours, documents of the same call, and store that. The same
            text then gives the same blob only beside the same neighbours.
        neutral_prefix: Compute documents behind so many of their own last tokens, which are then dropped.
        head_start: Old name of ``prefix_layers``, for one more version.
    """

    method: str = DEFAULT_METHOD
    prefix_layers: int = 0
    lossless: bool = False
    ladder: Ladder | None = None
    chunk_tokens: int = CHUNK_TOKENS
    backend: Backend = "auto"
    deviation: bool = False
    neutral_prefix: int = 0
    head_start: InitVar[int] = 0

    def __post_init__(self, head_start: int) -> None:
        """Refuse what does not go together."""
        if head_start:
            object.__setattr__(self, "prefix_layers", head_start)
        if self.prefix_layers < 0:
            msg = f"a head start takes layers, {self.prefix_layers} are none; 0 goes without"
            raise ArgumentError(msg)
        if self.neutral_prefix < 0 or (self.neutral_prefix and self.prefix_layers):
            msg = "a neutral prefix takes tokens, 0 for none, and does not go together with prefix layers"
            raise ArgumentError(msg)
        self.kind.check_settings(self)

    @property
    def kind(self) -> LevelKind:
        """What codes the lossy levels."""
        return kind_of_method(self.method)


class _Texts:
    """Calibration texts, as the level kinds' ``fit`` asks for them."""

    def __init__(
        self, engine: Engine, chosen: Sequence[Sequence[int]], others: Sequence[Sequence[int]], neutral: int
    ) -> None:
        self._engine, self._chosen, self._others, self._neutral = engine, chosen, others, neutral

    def caches(self) -> list[KVCache]:
        from kvwire.runtime.spilled import spilled

        return spilled((_computed(self._engine, ids, self._neutral)[0] for ids in self._chosen), len(self._chosen))

    def statistics(self, *, tokens: bool) -> Statistics | None:
        return self._engine.statistics(self._chosen, tokens=tokens)

    def prefix_states(self, layers: int) -> list[Tensor]:
        return [self._engine.prefix_states(ids, layers) for ids in self._chosen]

    def calibrate_error(self, profile: Profile, ladder: Ladder | None) -> Profile:
        profile = calibrate_error(self._engine, profile, self._others or self._chosen, ladder)
        held_out = int(bool(self._others) and profile.error_to_kl is not None)
        return replace(profile, notes=profile.notes | {"kl_held_out": held_out})


def _computed(engine: Engine, ids: Sequence[int], neutral: int) -> tuple[KVCache, tuple[int, ...]]:
    """A document's cache, and the neutral prefix that it was computed behind."""
    if not neutral:
        return engine.prefill([ids])[0], ()
    from kvwire.runtime.neutral import compute_behind, neutral_tokens

    prefix = neutral_tokens(ids, neutral, engine.window)
    return compute_behind(engine, prefix, ids), prefix


def _calibration_texts(
    documents: Sequence[Document], tokens: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Texts to fit on, up to that many tokens, and others to measure errors on: seen text flatters a profile.

    The others are what comes next, the rest of a text that was cut included; where that is less than ``HELD_TOKENS``,
    every sixth text is kept out of the fit, if there are that many. Else there are none.
    """
    chosen: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for document in documents:
        room = max(0, tokens - sum(map(len, chosen)))
        if room:
            chosen.append(document.token_ids[:room])
        if len(rest := document.token_ids[room:]) >= LEAST_TOKENS and len(others) < HELD_OUT:
            others.append(rest)
    if sum(map(len, others)) >= HELD_TOKENS:
        return chosen, others
    kept = [ids for number, ids in enumerate(chosen) if (number + 1) % EACH_OUT]
    out = chosen[EACH_OUT - 1 :: EACH_OUT]
    usable = min(map(len, out), default=0) >= LEAST_TOKENS and sum(map(len, kept)) >= LEAST_TOKENS
    return (kept, out) if usable else (chosen, [])


class Corpus:
    """Documents of one model and one tenant in a store.

    Attributes:
        catalog: Where entries, texts and profiles are found.
        changes: How often this object wrote anything, so that whoever keeps entries knows when to ask anew.
    """

    def __init__(
        self,
        engine: Engine,
        store: Store,
        *,
        tenant: str = "default",
        salt: bytes = b"",
        keyring: Keyring | None = None,
        coding: Coding | None = None,
        uses: UseCounts | None = None,
    ) -> None:
        """Keep the parts; nothing is read or written yet.

        Args:
            engine: The model whose caches are encoded.
            store: Where everything lies.
            tenant: Whose documents these are; see ``Catalog``.
            salt: See ``Catalog``.
            keyring: See ``Catalog``.
            coding: How documents are encoded; matters only to who encodes. None for the defaults.
            uses: Where loads are counted, if they are.
        """
        self._start(engine, engine, Catalog(store, tenant, salt, keyring=keyring), uses, coding)

    @classmethod
    def open(
        cls,
        store: Store,
        *,
        model: str = "",
        tenant: str = "default",
        salt: bytes = b"",
        keyring: Keyring | None = None,
        uses: UseCounts | None = None,
    ) -> Corpus:
        """Open a corpus from what its store says of the model; no weights are needed.

        Such a corpus looks documents up and decodes them; it cannot encode.

        Args:
            store: Where everything lies.
            model: Name of the model, or first digits of its revision or configuration digest; may be empty where the
                tenant has documents of one model only.
            tenant: Whose documents these are; see ``Catalog``.
            salt: See ``Catalog``.
            keyring: See ``Catalog``.
            uses: Where loads are counted, if they are.

        Returns:
            The corpus.

        Raises:
            NotFoundError: The store has no record of such a model; the message says how to make one.
            ArgumentError: Several models fit.
            CorruptError: The record is damaged.
        """
        from kvwire.runtime.models import find_model

        catalog = Catalog(store, tenant, salt, keyring=keyring)
        corpus = cls.__new__(cls)
        corpus._start(find_model(catalog, model), None, catalog, uses, None)  # noqa: SLF001 - of this class
        return corpus

    def _start(
        self, model: Engine | ModelRecord, engine: Engine | None, catalog: Catalog, uses: UseCounts | None,
        coding: Coding | None,
    ) -> None:  # fmt: skip
        self._model = model
        self._engine = engine
        self._coding = coding or Coding()
        self.catalog = catalog
        self._config = model.meta.config_digest()
        self._uses = uses
        self._scope = self.catalog.keys(self._config).root
        self._profiles: dict[str, AnyProfile] = {}
        self._reading: dict[str, threading.Lock] = {}
        self.changes = 0

    def over(self, store: Store) -> Corpus:
        """The same corpus, read and written through another store object.

        Args:
            store: The other store object.

        Returns:
            A corpus that shares its profiles with this one.
        """
        other = copy(self)
        other.catalog = self.catalog.over(store)
        return other

    @property
    def meta(self) -> CacheMeta:
        """The model's cache layout."""
        return self._model.meta

    @property
    def window(self) -> int:
        """Most tokens that a prompt of the model may hold."""
        return self._model.window

    @property
    def model_config_digest(self) -> str:
        """SHA-256 of the model's own configuration file; empty where it is not known."""
        return self._model.model_config_digest

    def _needed_engine(self) -> Engine:
        if self._engine is None:
            msg = "this corpus was opened without an engine and cannot encode: make it with one, Corpus(engine, store)"
            raise ArgumentError(msg)
        return self._engine

    def _publish(self, profile: AnyProfile | None) -> None:
        """Write the model's record, from which ``open`` reads, where it is not there yet."""
        from kvwire.store import ModelRecord

        engine = self._needed_engine()
        digest = profile.digest if profile else ""
        self.catalog.put_model(ModelRecord(engine.meta, engine.window, engine.model_config_digest, digest))

    def decode(
        self,
        document_id: str,
        level: int | str | None = None,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype | None = None,
        offset: int | None = 0,
    ) -> KVCache:
        """Read a document's blob whole and decode it; no engine is needed.

        Args:
            document_id: The document's name in the catalog.
            level: Index (negative counts from the last), name, or None for the finest that is not lossless.
            device: Where the output lies.
            dtype: Of the output; None: the one that the cache was encoded from.
            offset: Position of the first token; None leaves positions off.

        Returns:
            The cache.

        Raises:
            NotFoundError: There is no such document, or only its text is kept.
            CorruptError: The blob is damaged.
            MismatchError: It needs the first layers of the model, which only an engine can run.
        """
        entry = self.find(document_id)
        if entry.is_text:
            msg = f"{document_id!r} is kept as text: it has no blob to decode; encode it"
            raise NotFoundError(msg)
        reader, stored = self.catalog.blob_reader(), self.catalog.store.get(entry.blob_key)
        info = reader.read_header(stored)
        self.check_blob(info, entry)
        index = level_index(info, level)
        if info.prefix_layers and not info.levels[index].lossless:
            msg = f"{document_id!r} is coded for readers that run the model's first layers: ask a Loader with an engine"
            raise MismatchError(msg)
        profile = self.profile(entry.profile_digest) if entry.profile_digest else None
        decoder = BlobDecoder(reader.head, profile, device=device, dtype=dtype, offset=offset, level=index)
        for chunk in range(info.chunks):
            reads = [(each, stored[each.offset : each.end]) for each in info.reads(chunk, index)]
            segments = [reader.check(*read) if reader.check else read[1] for read in reads]
            decoder.decode_chunk(chunk, segments, index)
        return decoder.cache

    def profile(self, digest: str | None = None) -> AnyProfile | None:
        """Look up a profile; what was read is kept.

        Args:
            digest: Of a stored profile; None for the one in use.

        Returns:
            The profile; None where the corpus has none in use yet.

        Raises:
            NotFoundError: The profile is lost.
            CorruptError: The profile is damaged.
        """
        digest = digest if digest is not None else self.catalog.current_profile(self._config)
        if not digest:
            return None
        if (known := self._profiles.get(digest)) is not None:
            return known
        with self._reading.setdefault(digest, threading.Lock()):  # documents looked up at the same time share a reading
            if (known := self._profiles.get(digest)) is None:
                known = self._profiles[digest] = read_profile(self.catalog.get_profile(self._config, digest))
            return known

    def set_profile(self, profile: AnyProfile) -> None:
        """Store a profile and use it for what is encoded from now on.

        Args:
            profile: One that fits the engine's cache layout.
        """
        profile.check_fits(self.meta)
        self.changes += 1
        digest = self.catalog.put_profile(self._config, profile.data)
        self.catalog.set_current_profile(self._config, digest)
        self._profiles[digest] = profile

    def link_report(self) -> LinkReport | None:
        """What ``kvwire check-model`` measured of this model's links.

        Returns:
            The report; None where nobody measured.

        Raises:
            CorruptError: It is damaged.
        """
        data = self.catalog.link_report(self._config)
        return None if data is None else LinkReport.of_json(data)

    def set_link_report(self, report: LinkReport) -> None:
        """Keep what was measured of this model's links, for all who load.

        Args:
            report: Of the corpus's model.
        """
        self.catalog.put_link_report(self._config, report.to_json())
        self.changes += 1

    def calibrate(self, documents: Sequence[Document], tokens: int = CALIBRATION_TOKENS) -> AnyProfile | None:
        """Fit a profile on the first documents and use it from now on.

        Args:
            documents: Calibration text, the first ones first.
            tokens: Fit on up to that many tokens; the last document is cut there. Errors are measured on the documents
                that come next, or else on some that are kept out of the fit.

        Returns:
            The profile. None where the documents have fewer than LEAST_TOKENS tokens, and then nothing changes.
        """
        chosen, others = _calibration_texts(documents, tokens)
        if sum(map(len, chosen)) < LEAST_TOKENS:
            return None
        neutral = self._coding.neutral_prefix
        profile = self._coding.kind.fit(_Texts(self._needed_engine(), chosen, others, neutral), self._coding)
        if profile is not None and neutral:
            profile = cast(
                "AnyProfile", replace(cast("Any", profile), notes=profile.notes | {"neutral_prefix": neutral})
            )
        if profile is not None:
            self.set_profile(profile)
        return profile

    def index(self, scheme: str = "kvwire") -> PrefixIndex:
        """The index by which prompts find the documents that they begin with.

        Args:
            scheme: How prompts are hashed: ``kvwire``, ``lmcache`` or ``sglang``, with the tokens of a chunk behind a
                colon where they are not the usual ones.

        Returns:
            The index, which keeps the texts that it read of late: to be made once.

        Raises:
            ArgumentError: There is no such scheme.
        """
        from kvwire.store import PrefixIndex  # most need none

        return PrefixIndex(self.catalog, self._config, scheme)

    def encode(
        self, documents: Sequence[Document], *, force: bool = False, encode_after: int = 0, index: Sequence[str] = ()
    ) -> Iterator[Encoded]:
        """Encode what the catalog lacks, document by document; the first ones calibrate where there is no profile yet.

        A blob and its text are in the store before the entry is; whoever stops in the middle loses only what was not
        yielded. Documents are prefilled one by one: in a batch their last bits would depend on their neighbours, and
        the same text must give the same blob.

        Args:
            documents: What the catalog is to hold.
            force: Encode and write again even what seems to be there, and fit a new profile where the one in use is
                damaged.
            encode_after: Documents with fewer counted uses are kept as text, from which readers compute them;
                ``promote`` encodes them later. 0 encodes all.
            index: Schemes, as ``index`` takes them, by which prompts that begin with one of the documents are to find
                it; what is kept as text is not found.

        Yields:
            What became of each document, in the order given.

        Raises:
            ArgumentError: A document's name is not taken (``kvwire.store.check_new_name``), ``encode_after`` is given
                and uses are not counted, the method needs a profile and there is too little text to fit one, or there
                is no such index or none of what is computed behind a neutral prefix.
            CorruptError: The profile in use is damaged and ``force`` is not given.
            MismatchError: The profile in use is of another method or head start.
        """
        self._needed_engine()
        for document in documents:
            check_new_name(document.document_id, "document")
        indexes = [self.index(scheme) for scheme in index]
        if indexes and self._coding.neutral_prefix:
            msg = "documents behind a neutral prefix begin no prompt: encode without it, or without an index"
            raise ArgumentError(msg)
        self.changes += 1
        due = [document for document in documents if self._is_due(document.document_id, encode_after)]
        profile, encoded = self._profile_for(due, force=force), {document.document_id for document in due}
        self._publish(profile)
        around = self._neighbours(documents)
        for document in documents:
            found = None if force else self._known(document, profile)
            if found is None and document.document_id not in encoded:
                yield self._keep_text(document)
                continue
            if found is None:
                started = time.perf_counter()
                found = self._store(document, (profile, around), started)
            for each in indexes:
                each.add(found.entry, document.token_ids, is_new=not found.skipped)
            yield found

    def cache_of(self, keys: Sequence[Tensor], values: Sequence[Tensor], token_ids: Sequence[int]) -> KVCache:
        """A cache of the corpus's model, from tensors that an engine elsewhere computed.

        Args:
            keys: Of each layer, ``[kv_heads, tokens, key_dim]``, positions on and from 0.
            values: Of each layer, ``[kv_heads, tokens, value_dim]``.
            token_ids: What they were computed from.

        Returns:
            The cache, which holds these tensors.

        Raises:
            ArgumentError: The shapes are not those of the model.
        """
        dtype = str(keys[0].dtype).removeprefix("torch.") if keys else self.meta.dtype
        return KVCache.from_tensors(keys, values, replace(self.meta, dtype=dtype), token_ids)

    def save(self, document: Document, cache: KVCache, *, index: Sequence[str] = ()) -> Encoded:
        """Encode a cache that was computed elsewhere, and keep it as a document; no engine is needed.

        Args:
            document: Its name and text.
            cache: Of the whole text, computed without loss, positions on and from 0.
            index: As for ``encode``.

        Returns:
            What became of it; skipped where the catalog has it already.

        Raises:
            ArgumentError: The name is not taken, the cache is not of the text, or there is no such index.
            MismatchError: The cache is of another model, or the profile in use is for readers that run the model's
                first layers, whose states are not known here.
            CorruptError: The profile in use is damaged.
        """
        check_new_name(document.document_id, "document")
        indexes = [self.index(scheme) for scheme in index]
        if cache.token_ids != tuple(document.token_ids) or (cache.meta.offset, cache.meta.positions) != (0, "on"):
            msg = f"the cache is not that of {document.document_id!r}: give all of its tokens, at positions from 0"
            raise ArgumentError(msg)
        if cache.meta.config_digest() != self._config:
            msg = (
                f"the cache is of model {cache.meta.model_id!r}, the corpus of {self.meta.model_id!r}: name its corpus"
            )
            raise MismatchError(msg)
        started, profile = time.perf_counter(), self.profile()
        if profile is not None and profile.prefix_layers:
            msg = "the profile in use is for readers that run the model's first layers: encode with Corpus.encode"
            raise MismatchError(msg)
        found = self._known(document, profile) or self._put(document, (cache, ()), (profile, None), started)
        for each in indexes:
            each.add(found.entry, document.token_ids, is_new=not found.skipped)
        return found

    def promote(self, uses: int, *, index: Sequence[str] = ()) -> Iterator[Encoded]:
        """Encode the documents that are kept as text and were used often enough, the most used first.

        Texts that are lost or damaged are left out, which encoding the document again heals, and so are documents
        whose names are not taken any more.

        Args:
            uses: Counted uses from which on a document is encoded.
            index: As for ``encode``.

        Yields:
            What became of each of them; nothing where uses are not counted.
        """
        due = []
        for document_id in self._uses.reached(self._scope, uses) if self._uses else ():
            with suppress(ArgumentError, CorruptError, NotFoundError):
                entry = self.catalog.by_document(self._config, check_new_name(document_id, "document"))
                if entry is not None and entry.is_text:
                    due.append(Document(document_id, self.text(entry)))
        yield from self.encode(due, index=index)

    def count_use(self, document_id: str) -> None:
        """Count one use of a document, where uses are counted. A file that fails costs a count, not an answer.

        Args:
            document_id: The document's name in the catalog.
        """
        if self._uses is not None:
            with suppress(KvwireError):
                self._uses.add(self._scope, document_id)

    def text(self, entry: CatalogEntry) -> tuple[int, ...]:
        """Token ids of a document, from beside its blob.

        Args:
            entry: The document's entry.

        Returns:
            The token ids.

        Raises:
            NotFoundError: The text is lost.
            CorruptError: The text is damaged.
        """
        if not entry.token_digest:
            msg = f"the text of {entry.document_id!r} is not known: encode the document again"
            raise NotFoundError(msg)
        return self.catalog.get_text(self._config, entry.token_digest)

    def _neighbours(self, documents: Sequence[Document]) -> Neighbours | None:
        """What measures deviations, where they are wanted."""
        if not self._coding.deviation:
            return None
        from kvwire.runtime.neighbours import Neighbours  # nothing else needs it

        return Neighbours(self._needed_engine(), [each.token_ids for each in documents])

    def _is_due(self, document_id: str, encode_after: int) -> bool:
        if encode_after <= 0:
            return True
        if self._uses is None:
            msg = "documents are encoded after some uses only where uses are counted: pass uses to the corpus"
            raise ArgumentError(msg)
        return self._uses.count(self._scope, document_id) >= encode_after

    def _keep_text(self, document: Document) -> Encoded:
        """The text alone; a document that has it, or a blob of an older profile, is left as it is."""
        try:
            entry = self.catalog.by_document(self._config, document.document_id)
        except CorruptError:
            entry = None
        if entry is None or entry.token_digest != digest_tokens(document.token_ids):
            entry = self.catalog.add_text(self._config, document.document_id, document.token_ids)
            self.changes += 1
            return Encoded(entry, None, skipped=False, encode_s=0.0)
        self.catalog.put_text(self._config, document.token_ids, document_id=document.document_id)
        self.changes += 1
        return Encoded(entry, None, skipped=True, encode_s=0.0)

    def _profile_for(self, documents: Sequence[Document], *, force: bool) -> AnyProfile | None:
        """The profile in use; a new one where there is none, where it is lost, or where it was fitted on too little.

        One that cannot be read intact gives way only to ``force``: it may be whole for everybody else.
        """
        try:
            profile = self.profile()
        except NotFoundError:
            profile = None
        except CorruptError:
            if not force:
                raise
            profile = None
        coding = self._coding
        is_behind = profile is None or profile.notes.get("neutral_prefix", 0) == coding.neutral_prefix
        if profile is not None and not (is_behind and coding.kind.is_wanted(profile, coding)):
            msg = (
                "the profile in use here is of another method or head start, or of another neutral prefix; encode with "
                "that one, name another tenant or store, or call Corpus.calibrate to replace it"
            )
            raise MismatchError(msg)
        noted = 0 if profile is None else profile.notes.get("tokens")
        seen = noted if type(noted) is int else ENOUGH_TOKENS
        tokens = sum(len(document.token_ids) for document in documents)
        if profile is None or (seen < ENOUGH_TOKENS and tokens >= 2 * seen):
            profile = self.calibrate(documents) or profile
        kind = self._coding.kind
        if profile is None and kind.needs_profile and documents:
            needs = f"needs a profile, and that {LEAST_TOKENS} tokens at least; encode more text first"
            msg = f"{kind.title}'s method {needs}"
            raise ArgumentError(msg)
        return profile

    def _store(self, document: Document, known: tuple[AnyProfile | None, Neighbours | None], started: float) -> Encoded:
        profile, around = known
        computed = _computed(self._needed_engine(), document.token_ids, self._coding.neutral_prefix)
        deviation = around.measure(computed[0], document.token_ids) if around else None
        return self._put(document, computed, (profile, deviation), started)

    def _put(
        self, document: Document, computed: tuple[KVCache, tuple[int, ...]],
        known: tuple[AnyProfile | None, BlockDeviation | None], started: float,
    ) -> Encoded:  # fmt: skip
        """Encode and write a cache that was computed, behind a neutral prefix or none."""
        (cache, neutral), (profile, deviation) = computed, known
        layers = 0 if profile is None else profile.prefix_layers
        hidden = self._needed_engine().prefix_states(document.token_ids, layers) if layers else None
        coding = self._coding
        plain = encode(
            cache,
            profile,
            coding.ladder,
            chunk_tokens=coding.chunk_tokens,
            lossless=coding.lossless,
            hidden=hidden,
            backend=coding.backend,
            deviation=deviation,
            neutral_prefix=neutral,
        )
        blob = self.catalog.seal(plain)
        info = self.catalog.blob_reader().read_header(blob)
        self.catalog.put_text(self._config, document.token_ids, document_id=document.document_id, overwrite=True)
        entry = self.catalog.put_blob(
            self._config,
            blob,
            document_id=document.document_id,
            header_bytes=info.header_bytes,
            tokens=info.tokens,
            token_digest=info.meta.token_digest,
            profile_digest=info.profile_digest,
            levels=[(level.name, level.cumulative_bytes) for level in info.levels],
            overwrite=True,  # whatever lies there was not good enough
        )
        self.catalog.confirm(self._config, entry, document.token_ids, profile.data if profile else b"")
        self.changes += 1
        return Encoded(entry, info, skipped=False, encode_s=time.perf_counter() - started)

    def _known(self, document: Document, profile: AnyProfile | None) -> Encoded | None:
        """The document as the catalog has it, where that is still what encoding would give.

        The same text under another name counts: only an entry is added then. So does the entry of its tokens under its
        own name, which is written first: a writer that was killed in between left it.
        """
        digest = digest_tokens(document.token_ids)
        wanted = (digest, profile.digest if profile else "", False)
        try:
            entry = own = self.catalog.by_document(self._config, document.document_id)
            if entry is None or (entry.token_digest, entry.profile_digest, entry.is_text) != wanted:
                entry, own = self.catalog.by_tokens(self._config, digest), None
            if entry is None or (entry.token_digest, entry.profile_digest, entry.is_text) != wanted:
                return None
            if self.catalog.store.stat(entry.blob_key).size != entry.size:
                return None
            info = self.read_header(entry)
        except (CorruptError, NotFoundError):
            return None  # a damaged entry or a blob that is gone is written again
        if not self._is_coded_so(info):
            return None
        self.catalog.put_text(self._config, document.token_ids, document_id=document.document_id)
        if own is None:
            added = self.catalog.alias(entry, document.document_id)
            if added is None:
                return None
            self.catalog.confirm(self._config, added, document.token_ids, profile.data if profile else b"")
            entry = added
        self.changes += 1
        return Encoded(entry, info, skipped=True, encode_s=0.0)

    def _is_coded_so(self, info: BlobInfo) -> bool:
        """Whether a blob has the levels and chunks that encoding would give."""
        coding = self._coding
        if len(info.neutral_prefix) != min(coding.neutral_prefix, info.tokens, self.window - info.tokens):
            return False
        if coding.lossless and not any(level.lossless for level in info.levels):
            return False
        if coding.deviation and info.deviation is None:
            return False
        return coding.kind.has_levels(info, coding) and info.chunk_tokens == coding.chunk_tokens

    def read_header(self, entry: CatalogEntry) -> BlobInfo:
        """What the blob of an entry says of itself.

        Args:
            entry: The document's entry.

        Returns:
            What the blob's header says.

        Raises:
            NotFoundError: Only the text is kept.
        """
        if entry.is_text:
            msg = f"{entry.document_id!r} is kept as text: it has no blob; kvwire store stat shows its entry"
            raise NotFoundError(msg)
        return self.catalog.blob_reader().read_header(self.catalog.store.get(entry.blob_key, 0, entry.header_bytes))

    def find(self, document_id: str) -> CatalogEntry:
        """A document's entry.

        Args:
            document_id: The document's name in the catalog.

        Returns:
            The entry.

        Raises:
            NotFoundError: The catalog has no such document; the message says how to encode it.
        """
        entry = self.catalog.by_document(self._config, document_id)
        if entry is None:
            msg = (
                f"document {document_id!r} is not in {self.catalog.store.url} for model {self.meta.model_id!r} "
                f"({self.meta.model_revision[:12] or 'unnamed'}); "
                "encode it first (kvwire encode), with this very model, and check the tenant"
            )
            raise NotFoundError(msg)
        return entry

    def check_blob(self, info: BlobInfo, entry: CatalogEntry) -> None:
        """Refuse a blob that is not the one to use, or that claims more tokens than the model takes.

        Args:
            info: What the blob's header says.
            entry: The entry that names the blob.

        Raises:
            MismatchError: The blob is of another model.
            CorruptError: The blob is not what its entry names, or no cache of the model.
        """
        names = (entry.token_digest, entry.tokens, entry.size, entry.profile_digest)
        if names != (info.meta.token_digest, info.tokens, info.file_bytes, info.profile_digest):
            msg = f"the blob of {entry.document_id!r} is not the one that the catalog names; encode the document again"
            raise CorruptError(msg)
        theirs, ours = info.meta, self.meta
        if theirs.config_digest() != ours.config_digest():
            msg = (
                f"the blob was encoded by model {theirs.model_id!r} ({theirs.model_revision[:12] or 'unnamed'}), "
                f"this is {ours.model_id!r} ({ours.model_revision[:12] or 'unnamed'}); "
                "encode the document with this model"
            )
            raise MismatchError(msg)
        if info.tokens > self.window:
            msg = (
                f"the blob of {entry.document_id!r} claims {info.tokens} tokens, the model's window is "
                f"{self.window}; split the document and encode it again"
            )
            raise CorruptError(msg)
