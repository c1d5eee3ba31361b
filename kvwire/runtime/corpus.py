"""A corpus: documents of one model in a store; encoded, looked up and decoded."""

from __future__ import annotations

import time
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire._lazy import lazy
from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.runtime.corpus_reader import CorpusReader
from kvwire.store import Catalog, check_new_name
from kvwire.types import KVCache, digest_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Coding, Document, Encoded
    from kvwire.runtime.encode import Encoder
    from kvwire.store import Keyring, ModelRecord, Store, UseCounts
    from kvwire.types import Chat


__all__ = ["Coding", "Corpus", "Document", "Encoded"]

__getattr__ = lazy(__name__, {"kvwire.runtime.coding": ("Coding", "Document", "Encoded")})
_ALL_LEVELS = 1 << 30


class Corpus(CorpusReader):
    """Documents of one model and one tenant in a store."""

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
            coding: How documents are encoded; None for the defaults.
            uses: Where loads are counted, if they are.
        """
        super().__init__(engine, Catalog(store, tenant, salt, keyring=keyring), uses)
        self._engine: Engine | None = engine
        self._coding = coding

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
        """Open a corpus from what its store says of the model: it looks documents up, decodes and cannot encode.

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
        catalog = Catalog(store, tenant, salt, keyring=keyring)
        corpus = cls.__new__(cls)
        CorpusReader.__init__(corpus, find_model(catalog, model), catalog, uses)
        corpus._engine = corpus._coding = None  # noqa: SLF001 - of this class
        return corpus

    def computed_by(self, engine: Engine) -> Corpus:
        """The same corpus, with an engine whose caches it encodes.

        Args:
            engine: Runs the corpus's model, or stands in for one that runs elsewhere.

        Returns:
            Another corpus; both share their profiles.
        """
        other = copy(self)
        other._engine = engine  # noqa: SLF001 - of this class
        return other

    def encoder(self) -> Encoder:
        """The steps of encoding, with this corpus's engine and coding; not imported by who only reads."""
        from kvwire.runtime.coding import Coding
        from kvwire.runtime.encode import Encoder

        return Encoder(self, self._engine, self._coding or Coding())

    def calibrate(self, documents: Sequence[Document], tokens: int | None = None) -> AnyProfile | None:
        """Fit a profile on the first documents and use it from now on.

        Args:
            documents: Calibration text, the first ones first.
            tokens: Fit on up to that many tokens; the last document is cut there. None: half of all, or as many as
                ``Coding.calibration`` allows, 16,384 by default. Errors are measured on the documents that come next,
                or else on some that are kept out of the fit.

        Returns:
            The profile. None where the documents have fewer than 64 tokens, and then nothing changes.
        """
        return self.encoder().calibrate(documents, tokens)

    def encode(
        self, documents: Sequence[Document], *, force: bool = False, encode_after: int = 0, index: Sequence[str] = ()
    ) -> Iterator[Encoded]:
        """Encode what the catalog lacks, document by document; the first ones calibrate where there is no profile yet.

        A blob and its text are in the store before the entry is, so that an interrupted run loses only what was not
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
        for document in documents:
            check_new_name(document.document_id, "document")
        steps = self.encoder()
        indexes = steps.indexes(index)
        documents = [steps.laid_out(document) for document in documents]
        due = [document for document in documents if steps.is_due(document.document_id, encode_after)]
        profile, encoded = steps.prepare(lambda: due, force=force), {document.document_id for document in due}
        around = steps.neighbours(documents)
        for document in documents:
            found = None if force else steps.known(document, profile)
            if found is None and document.document_id not in encoded:
                yield steps.keep_text(document)
                continue
            if found is None:
                started = time.perf_counter()
                found = steps.put(document, steps.compute(document, profile, around), profile, started)
            steps.add_to(indexes, found, document)
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
        indexes = self.indexes(index)
        steps = self.encoder()
        found = steps.save(document, cache)
        steps.add_to(indexes, found, document)
        return found

    def put_chat_head(self, chat: Chat) -> int:
        """Keep the rows of what the model's chat template puts before documents, for ``kvwire.vllm.chat_body``.

        Args:
            chat: The system text, earlier turns and the user's words before the documents.

        Returns:
            How many tokens these are.

        Raises:
            ArgumentError: The corpus was opened without an engine, or the template refuses the chat.
            NotFoundError: The model has no chat template.
        """
        from kvwire.runtime.coding import Document

        steps = self.encoder()
        head = steps.engine.render_chat(chat, "?").head
        if head:
            steps.put_exact(Document(f"head-{digest_tokens(head)[:32]}", head))
        return len(head)

    def append(
        self,
        document_id: str,
        token_ids: Sequence[int],
        *,
        after: int | None = None,
        cache: KVCache | None = None,
        fork: str = "",
    ) -> Encoded:
        """Append tokens to a document; what was encoded of it is not written again.

        What is written is a blob of the new tokens alone, and the entry that names all parts. A document that carries
        its own profile, or has as many parts as it can have, is encoded anew. A writer that is killed leaves the
        document as it was, and at most a blob for ``collect``.

        Args:
            document_id: The document.
            token_ids: What follows its last token.
            after: Append only where the document has exactly so many tokens, which makes the call safe to repeat: where
                these tokens stand behind them already and no more do, nothing is written. None: whatever it has, and
                a repeated call appends twice.
            cache: Of the whole document, or of these tokens alone at their positions, where an engine computed it
                already; None: computed here, from the whole text.
            fork: Leave the document as it is, and give what it would be to a new one of this name; both share the
                parts.

        Returns:
            The document's entry, and what the blob that was written says of itself; skipped where ``after`` is given
            and the tokens were there already. ``entry.tokens`` is the next ``after``.

        Raises:
            NotFoundError: There is no such document of this model, or a part of it is gone.
            ArgumentError: There is nothing to append, an id is no integer, it goes beyond the model's window, the
                document is kept as text, the name of the fork is not free, or the cache is not of these tokens.
            ConflictError: Another writer changed the document meanwhile; what that one wrote stands, and the caller may
                append again. Or it has another length than ``after``; the message tells which.
            MismatchError: The cache or the document is of another model, or of another dtype where it is lossless.
            CorruptError: The document's header or profile is damaged.
        """
        from kvwire.runtime.grow import Grower

        return Grower(self, self.encoder()).append(document_id, token_ids, after=after, cache=cache, fork=fork)

    def compact(self, document_id: str) -> Encoded:
        """Encode a document of several parts anew as one blob; its parts are left to ``collect``.

        Raises:
            NotFoundError: There is no such document of this model.
            ConflictError: Another writer changed the document meanwhile; it is as that one left it.
        """
        from kvwire.runtime.grow import Grower

        return Grower(self, self.encoder()).compact(document_id)

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
        from kvwire.runtime.coding import Document

        due = []
        for document_id in self.uses.reached(self.scope, uses) if self.uses else ():
            with suppress(ArgumentError, CorruptError, NotFoundError):
                entry = self.catalog.by_document(self.config, check_new_name(document_id, "document"))
                if entry is not None and entry.is_text:
                    due.append(Document(document_id, self.text(entry)))
        yield from self.encode(due, index=index)


_LEAST = 6  # digits of a digest that name a model
_MOST_NAMED = 8


def find_model(catalog: Catalog, model: str = "") -> ModelRecord:
    """Look a model up among the records of a tenant."""
    records, damage = _records(catalog)
    found = [record for record in records if not model or _fits(record, model)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.meta.model_id} ({each.meta.config_digest()[:16]})" for each in found[:_MOST_NAMED])
        msg = f"several models fit {model!r}: {names}; name one by its digits"
        raise ArgumentError(msg)
    if damage is not None:
        raise damage
    known = ", ".join(record.meta.model_id for record in records[:_MOST_NAMED]) or "none"
    msg = (
        f"{catalog.store.url} has no record of {f'model {model!r}' if model else 'a model'} for this tenant (it has: "
        f"{known}); encode any document with it (kvwire encode), even one that is there, which writes the record, or "
        "give an engine: Corpus(engine, store)"
    )
    raise NotFoundError(msg)


def _records(catalog: Catalog) -> tuple[list[ModelRecord], CorruptError | None]:
    """All records that can be read, and what was wrong with the first of the others."""
    records: list[ModelRecord] = []
    damage: CorruptError | None = None
    for space in catalog.configurations():
        try:
            record = catalog.models.get(space)
        except CorruptError as error:
            damage = damage or error
            continue
        if record is not None:
            records.append(record)
    return records, damage


def _fits(record: ModelRecord, model: str) -> bool:
    digests = (record.meta.model_revision, record.meta.config_digest())
    return model == record.meta.model_id or (len(model) >= _LEAST and any(each.startswith(model) for each in digests))
