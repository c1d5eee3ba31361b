"""A corpus: documents of one model in a store, to encode, look up and decode."""

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

__getattr__ = lazy(__name__)


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
        """Keep the parts; nothing is read or written.

        Args:
            engine: The model whose caches are encoded.
            store: The store.
            tenant: Owner of the documents; see ``Catalog``.
            salt: See ``Catalog``.
            keyring: See ``Catalog``.
            coding: Encoding options; None for the defaults.
            uses: Counts loads; None: not counted.
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
        """Open a corpus by the store's record of the model: it can look up and decode documents, but not encode.

        Args:
            store: The store.
            model: Model name, or first digits of its revision or configuration digest; may be empty if the tenant has
                documents of one model only.
            tenant: Owner of the documents; see ``Catalog``.
            salt: See ``Catalog``.
            keyring: See ``Catalog``.
            uses: Counts loads; None: not counted.

        Returns:
            The corpus.

        Raises:
            NotFoundError: The store has no record of such a model; the message says how to make one.
            ArgumentError: Several models match.
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
        """Encoding steps with this corpus's engine and options; imported only when needed."""
        from kvwire.runtime.coding import Coding
        from kvwire.runtime.encode import Encoder

        return Encoder(self, self._engine, self._coding or Coding())

    def calibrate(self, documents: Sequence[Document], tokens: int | None = None) -> AnyProfile | None:
        """Fit a profile on the first documents and use it from now on.

        Args:
            documents: Calibration texts in order.
            tokens: Most tokens to fit on; the last document is cut there. None: half of all, or as many as
                ``Coding.calibration`` allows, 16,384 by default. Errors are measured on the next documents, or else on
                some held out of the fit.

        Returns:
            The profile; None, without any change, if the documents have fewer than 64 tokens.
        """
        return self.encoder().calibrate(documents, tokens)

    def encode(
        self, documents: Sequence[Document], *, force: bool = False, encode_after: int = 0, index: Sequence[str] = ()
    ) -> Iterator[Encoded]:
        """Encode what the catalog lacks, one document at a time; if there is no profile yet, the first ones calibrate.

        Blob and text are stored before the entry, so an interrupted run loses only what was not yielded. Documents are
        prefilled one by one: in a batch their last bits would depend on their neighbours, and the same text must give
        the same blob.

        Args:
            documents: The documents to store.
            force: Encode and write again what exists, and fit a new profile if the one in use is damaged.
            encode_after: Documents with fewer counted uses are stored as text, which readers compute; ``promote``
                encodes them later. 0 encodes all.
            index: Schemes, as for ``index``, of the indexes to add the documents to; those stored as text are not
                added.

        Yields:
            The result for each document, in the order given.

        Raises:
            ArgumentError: A name is invalid (``kvwire.store.check_new_name``), ``encode_after`` is given but uses are
                not counted, there is too little text to fit a needed profile, or there is no such index, or none for
                documents with a neutral prefix.
            CorruptError: The profile in use is damaged and ``force`` is not given.
            MismatchError: The profile in use is of another method or has other prefix layers.
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
        """Make a cache of the corpus's model from tensors computed elsewhere.

        Args:
            keys: Of each layer, ``[kv_heads, tokens, key_dim]``, positions on and from 0.
            values: Of each layer, ``[kv_heads, tokens, value_dim]``.
            token_ids: Their tokens.

        Returns:
            The cache, which holds these tensors.

        Raises:
            ArgumentError: The shapes are not the model's.
        """
        dtype = str(keys[0].dtype).removeprefix("torch.") if keys else self.meta.dtype
        return KVCache.from_tensors(keys, values, replace(self.meta, dtype=dtype), token_ids)

    def save(
        self, document: Document, cache: KVCache, *, index: Sequence[str] = (), opening: Sequence[int] = ()
    ) -> Encoded:
        """Encode a cache computed elsewhere and store it as a document, without an engine.

        Args:
            document: Its name and text.
            cache: Of the whole text, computed without loss, positions on and from 0, or from behind ``opening``.
            index: As for ``encode``.
            opening: BOS, where it stood before the text when the cache was computed, as it should for a tokenizer that
                has one; the cache has no rows of it.

        Returns:
            The result; skipped if the catalog has it already.

        Raises:
            ArgumentError: The name is invalid, the cache does not match the text, or there is no such index.
            MismatchError: The cache is of another model, or the profile in use needs prefix layers' states, which are
                not known here.
            CorruptError: The profile in use is damaged.
        """
        check_new_name(document.document_id, "document")
        indexes = self.indexes(index)
        steps = self.encoder()
        found = steps.save(document, cache, tuple(opening))
        steps.add_to(indexes, found, document)
        return found

    def put_chat_head(self, chat: Chat) -> int:
        """Store the rows of the chat template's text before documents, for ``kvwire.vllm.chat_body``.

        Args:
            chat: The system text, earlier turns and the user's text before the documents.

        Returns:
            Number of these tokens.

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
        """Append tokens to a document without writing its earlier parts again.

        A blob with only the new tokens is written, then an entry that names all parts. A document with a profile of its
        own, or with the most parts allowed, is encoded again as a whole. A killed writer leaves the document as it was,
        and at most a blob for ``collect``.

        Args:
            document_id: The document.
            token_ids: Tokens after its last one.
            after: Append only if the document has exactly so many tokens, which makes retries safe: if it already ends
                with these tokens after them, nothing is written. None: append to any length; a retry appends twice.
            cache: Of the whole document, or of these tokens at their positions, computed elsewhere; None: computed
                here, from the whole text.
            fork: Name of a new document with the result, which shares the parts; the old one stays as it is.

        Returns:
            The document's entry, and the header of the written blob; skipped if ``after`` is given and the tokens were
            there already. ``entry.tokens`` is the next ``after``.

        Raises:
            NotFoundError: There is no such document of this model, or a part of it is gone.
            ArgumentError: There is nothing to append, an id is no integer, the result exceeds the model's window, the
                document is stored as text, the fork's name is taken, or the cache is not of these tokens.
            ConflictError: Another writer changed the document meanwhile, and its version stands; append again. Or its
                length is not ``after``; the message tells it.
            MismatchError: The cache or the document is of another model, or of another dtype if it is lossless.
            CorruptError: The document's header or profile is damaged.
        """
        from kvwire.runtime.grow import Grower

        return Grower(self, self.encoder()).append(document_id, token_ids, after=after, cache=cache, fork=fork)

    def compact(self, document_id: str) -> Encoded:
        """Encode a document of several parts again as one blob; ``collect`` deletes the parts.

        Raises:
            NotFoundError: There is no such document of this model.
            ConflictError: Another writer changed the document meanwhile; its version stands.
        """
        from kvwire.runtime.grow import Grower

        return Grower(self, self.encoder()).compact(document_id)

    def promote(self, uses: int, *, index: Sequence[str] = ()) -> Iterator[Encoded]:
        """Encode documents stored as text that were used often enough, most used first.

        Lost or damaged texts are skipped (encoding the document again heals them), and so are invalid names.

        Args:
            uses: Least counted uses of a document.
            index: As for ``encode``.

        Yields:
            The result for each of them; nothing if uses are not counted.
        """
        from kvwire.runtime.coding import Document

        due = []
        for document_id in self.uses.reached(self.scope, uses) if self.uses else ():
            with suppress(ArgumentError, CorruptError, NotFoundError):
                entry = self.catalog.by_document(self.config, check_new_name(document_id, "document"))
                if entry is not None and entry.is_text:
                    due.append(Document(document_id, self.text(entry)))
        yield from self.encode(due, index=index)


_LEAST = 6  # digits of a digest that identify a model
_MOST_NAMED = 8


def find_model(catalog: Catalog, model: str = "") -> ModelRecord:
    """Find a model in a tenant's records."""
    records, damage = _records(catalog)
    found = [record for record in records if not model or _fits(record, model)]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(f"{each.meta.model_id} ({each.meta.config_digest()[:16]})" for each in found[:_MOST_NAMED])
        which = f"fit {model!r}" if model else "are in the store"
        raise ArgumentError(f"several models {which}: {names}; name one by its digits (model, --model)")
    if damage is not None:
        raise damage
    known = ", ".join(record.meta.model_id for record in records[:_MOST_NAMED]) or "none"
    raise NotFoundError(
        f"{catalog.store.url} has no record of {f'model {model!r}' if model else 'a model'} for this tenant (it has: "
        f"{known}); encode any document with it (kvwire encode), even one that is there, which writes the record, or "
        "give an engine: Corpus(engine, store)"
    )


def _records(catalog: Catalog) -> tuple[list[ModelRecord], CorruptError | None]:
    """All readable records, and the first error of the others."""
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
