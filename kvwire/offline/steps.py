"""The steps of one document: read, tokenise, look up, compute, code, write. Each failure becomes a row."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kvwire.errors import ArgumentError, KvwireError, MismatchError, NotFoundError, StorageError
from kvwire.offline.manifest import LevelRow, Row
from kvwire.offline.refs import TextReader
from kvwire.runtime.coding import Document, Encoded
from kvwire.runtime.prefill import prefill_documents
from kvwire.runtime.text_files import problem_with, token_ids
from kvwire.store import check_new_name
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.codec import AnyProfile
    from kvwire.engines.base import Engine
    from kvwire.offline.manifest import Status
    from kvwire.offline.refs import DocumentRef
    from kvwire.runtime.coding import Computed
    from kvwire.runtime.corpus import Corpus
    from kvwire.types import BlobInfo, KVCache

MOST, MOST_TOKENS = 8, 2048
"""Limits of a batch: documents, and their total tokens. Longer documents fill a processor alone."""


class Batches:
    """Computes caches of documents of one length together.

    Shapes alone decide which kernels run and in which order they add. So each shape is compared once with every
    document alone; if a bit differs, documents of that shape run alone from then on.
    """

    def __init__(self, engine: Engine) -> None:
        """Start with no shape compared."""
        self._engine = engine
        self._is_equal: dict[tuple[int, int], bool] = {}

    def caches(self, documents: Sequence[Sequence[int]]) -> Sequence[KVCache | None]:
        """Compute documents of one length together; None for those to run alone."""
        shape = (len(documents), len(documents[0]) if documents else 0)
        if len(documents) < 2:  # noqa: PLR2004 - a batch
            return [None] * len(documents)
        if shape in self._is_equal:
            return prefill_documents(self._engine, documents) if self._is_equal[shape] else [None] * len(documents)
        alone = [prefill_documents(self._engine, [ids])[0] for ids in documents]
        together = prefill_documents(self._engine, documents)
        self._is_equal[shape] = all(map(_equal, alone, together))
        return alone


def _equal(one: KVCache, other: KVCache) -> bool:
    pairs = zip([*one.keys, *one.values], [*other.keys, *other.values], strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


_log = logging.getLogger("kvwire.offline")
_UNFORESEEN = "run again with less at a time if memory is short; else see the log for where it happened"
_MOST_STORE_FAILURES = 8
"""After so many in a row, the rest is not tried, so that the model does not run in vain."""
_ADVICE = (
    (StorageError, "look at the disk, the store and the network, then run again: finished documents are skipped"),
    (NotFoundError, "put it back, then run again"),
    (MismatchError, "encode with the model and settings that the store was made with, or name another tenant"),
    (ArgumentError, "correct the document, then run again"),
    (KvwireError, "kvwire store verify tells what is damaged; then run again"),
)


@dataclass(frozen=True)
class RunOptions:
    """Encoding options.

    Attributes:
        force: Encode and write again what exists.
        encode_after: Documents with fewer counted uses are stored as text; 0 encodes all.
        index: Schemes of the indexes to add the documents to.
        refit: Fit a new profile on these documents, and encode again those with another one.
        profile: Content of a profile file (``Profile.data``) to use without a fit; empty for none.
    """

    force: bool = False
    encode_after: int = 0
    index: tuple[str, ...] = ()
    refit: bool = False
    profile: bytes = b""


@dataclass
class Work:
    """State of one document between steps.

    Attributes:
        row: Its row; the status is valid once ``is_done``.
        is_done: Whether no step is left.
        encoded: The result, if this process encoded or found it.
        text: Its text, until it is tokenised.
        document: Its tokens.
        cache: Its cache, if computed with others.
        computed: Output of the model, until it is coded.
        coded: The blob, until it is written.
        digest: Digest of its tokens, while duplicates wait for it.
    """

    ref: DocumentRef
    row: Row
    is_done: bool = False
    encoded: Encoded | None = None
    text: str = ""
    cache: KVCache | None = None
    document: Document | None = None
    computed: Computed | None = None
    coded: tuple[bytes, BlobInfo] | None = None
    digest: str = field(default="", repr=False)


def failed_row(row: Row, error: Exception) -> Row:
    """A row for an error."""
    if not isinstance(error, KvwireError):
        _log.warning("%s could not be encoded", row.id, exc_info=error)
        return replace(row, status="failed", reason=f"{type(error).__name__}: {error}", advice=_UNFORESEEN)
    reason, separator, advice = str(error).rpartition("; ")
    if not separator:
        reason, advice = advice, next(words for kind, words in _ADVICE if isinstance(error, kind))
    return replace(row, status="failed", reason=reason, advice=advice)


class DocumentSteps:
    """The steps, in the order ``front``, ``compute``, ``code``, ``write``; each may run in a thread of its own.

    Duplicates of a text in progress wait for it, and are then found.
    """

    def __init__(
        self, corpus: Corpus, profile: AnyProfile | None, options: RunOptions, batches: Batches | None = None
    ) -> None:
        """Check engine and options before any document."""
        self._encoder, self._profile, self._options = corpus.encoder(), profile, options
        self._indexes = self._encoder.indexes(options.index)
        self._reader, self._engine = TextReader(), self._encoder.engine
        self._encoder.is_due("", options.encode_after)  # raises if uses are not counted
        if not self._engine.has_tokenizer:
            self._engine.tokenize("")  # raises an error that names what is missing
        self._neighbours: Any = None
        self._in_progress: set[str] = set()
        self._is_stopped = False
        self._in_progress_changed = threading.Condition()
        self._store_failures = 0
        self._batches = batches or Batches(self._engine)

    def measure_neighbours(self, refs: Sequence[DocumentRef]) -> None:
        """Read all documents if deviations are measured: each one's neighbours are all others."""
        documents = [document for ref in refs if (document := self.read_document(ref)) is not None]
        self._neighbours = self._encoder.neighbours(documents)

    def read_document(self, ref: DocumentRef) -> Document | None:
        """A document's tokens; None if reading fails."""
        work = self._through(self.begin(ref), self._read, self._tokenize)
        return None if work.is_done else work.document

    @staticmethod
    def begin(ref: DocumentRef) -> Work:
        """Start a document."""
        return Work(ref, Row(ref.document_id, ref.source))

    def front(self, work: Work) -> Work:
        """Read, tokenise and look up."""
        return self._through(work, self._read, self._tokenize, self._look_up)

    def groups(self, works: Iterable[Work]) -> Iterator[list[Work]]:
        """``front``, in groups of neighbours of one length, none of which duplicates another."""
        group: list[Work] = []
        for work in works:
            self._through(work, self._read, self._tokenize)
            if group and not self._belongs(work, group):
                yield group
                group = []
            group.append(self._through(work, self._look_up))
        if group:
            yield group

    def compute(self, work: Work) -> Work:
        """Run the model."""
        return self._through(work, self._compute)

    def compute_group(self, works: list[Work]) -> list[Work]:
        """Run the model over documents of one length, together if that changes no bit."""
        due, started = [work for work in works if not work.is_done], time.perf_counter()
        if self._encoder.coding.is_prefill:
            caches: Sequence[KVCache | None] = [None] * len(due)
            with suppress(KvwireError):  # run alone below, each reports its own error
                caches = self._batches.caches([_required(work.document).token_ids for work in due])
            share = (time.perf_counter() - started) / max(1, len(due))
            for work, cache in zip(due, caches, strict=True):
                work.cache, work.row = cache, replace(work.row, prefill_s=share if cache else 0.0)
        return [self.compute(work) for work in works]

    def code(self, work: Work) -> Work:
        """Run the codec."""
        return self._through(work, self._code)

    def write(self, work: Work) -> Work:
        """Write text, blob and entries."""
        return self._through(work, self._write)

    def stop(self) -> None:
        """Release all that wait for duplicates."""
        with self._in_progress_changed:
            self._is_stopped = True
            self._in_progress_changed.notify_all()

    def _through(self, work: Work, *steps: Callable[[Work], None]) -> Work:
        for step in steps:
            if work.is_done:
                break
            started = time.perf_counter()
            try:
                step(work)
            except Exception as error:  # noqa: BLE001 - one document's, out of memory for one: others go on
                work.is_done, work.row = True, failed_row(work.row, error)
                work.computed = work.coded = None
                self.leave(work)
            part = f"{_PARTS[step.__name__]}_s"
            spent = getattr(work.row, part) + time.perf_counter() - started
            work.row = replace(work.row, **{part: spent})
        return work

    def _belongs(self, work: Work, group: list[Work]) -> bool:
        if work.document is None or work.is_done or len(group) == MOST:
            return False
        if work.row.tokens != group[0].row.tokens or work.row.tokens * (len(group) + 1) > MOST_TOKENS:
            return False
        with self._in_progress_changed:
            return digest_tokens(work.document.token_ids) not in self._in_progress

    def leave(self, work: Work) -> None:
        """Release duplicates of a text that this process does not encode after all."""
        with self._in_progress_changed:
            self._in_progress.discard(work.digest)
            work.digest = ""
            self._in_progress_changed.notify_all()

    def _enter(self, digest: str) -> None:
        with self._in_progress_changed:
            self._in_progress_changed.wait_for(lambda: self._is_stopped or digest not in self._in_progress)
            self._in_progress.add(digest)

    def _read(self, work: Work) -> None:
        work.text = self._reader.read(work.ref)

    def _tokenize(self, work: Work) -> None:
        check_new_name(work.ref.document_id, "document")
        window = self._engine.window
        ids = token_ids(self._engine.tokenize, window, work.text)
        work.text = ""
        if problem := problem_with(ids, window):
            raise ArgumentError(problem)
        document = self._encoder.laid_out(Document(work.ref.document_id, tuple(ids)))
        if problem := problem_with(document.token_ids, window):
            msg = f"with the tokens that the layout {self._encoder.coding.layout.name} puts into its cache, {problem}"
            raise ArgumentError(msg)
        work.document = document
        work.row = replace(work.row, tokens=len(document.token_ids))

    def _look_up(self, work: Work) -> None:
        document = _required(work.document)
        if self._store_failures >= _MOST_STORE_FAILURES:
            msg = f"not tried: the store failed {self._store_failures} times in a row before; check it and run again"
            raise StorageError(msg)
        digest = digest_tokens(document.token_ids)
        self._enter(digest)
        work.digest = digest
        known = None if self._options.force else self._encoder.known(document, self._profile)
        if known is None and not self._encoder.is_due(document.document_id, self._options.encode_after):
            known = self._encoder.keep_text(document)
        if known is not None:
            self._finish(work, known)

    def _compute(self, work: Work) -> None:
        work.computed = self._encoder.compute(_required(work.document), self._profile, self._neighbours, work.cache)
        work.cache = None

    def _code(self, work: Work) -> None:
        work.coded = self._encoder.code(_required(work.computed), self._profile)
        work.computed = None

    def _write(self, work: Work) -> None:
        blob, info = _required(work.coded)
        try:
            entry = self._encoder.write(_required(work.document), blob, info, self._profile)
            row = work.row
            encoded = Encoded(entry, info, skipped=False, encode_s=row.prefill_s + row.encode_s)
            self._finish(work, encoded)
        except StorageError:
            self._store_failures += 1
            raise
        self._store_failures = 0

    def _finish(self, work: Work, encoded: Encoded) -> None:
        if not encoded.entry.is_text:
            for each in self._indexes:
                ids = _required(work.document).token_ids
                opening = self._encoder.opening(encoded)
                each.add(encoded.entry, ids, is_new=not encoded.skipped, opening=opening)
        work.is_done, work.encoded, work.coded = True, encoded, None
        work.row = stored_row(work.row, encoded)
        self.leave(work)


_PARTS = {
    "_read": "read", "_tokenize": "tokenize", "_look_up": "look_up", "_compute": "prefill", "_code": "encode",
    "_write": "upload",
}  # fmt: skip


def stored_row(row: Row, encoded: Encoded) -> Row:
    """A row for a stored document."""
    entry, info = encoded.entry, encoded.blob
    if info is None:
        return replace(row, status="kept as text", tokens=entry.tokens)
    levels = tuple(
        LevelRow(each.name, each.cumulative_bytes, each.bits_per_element, each.measured_error, each.predicted_kl)
        for each in info.levels
    )
    status: Status = "there already" if encoded.skipped else "encoded"
    return replace(
        row, status=status, tokens=entry.tokens, bytes=entry.size, blob=entry.sha256, profile=entry.profile_digest,
        levels=levels,
    )  # fmt: skip


def _required(value: Any) -> Any:  # noqa: ANN401 - what an earlier step left
    if value is None:
        raise ArgumentError("a step is missing before this one: run front, compute, code and write in this order")
    return value
