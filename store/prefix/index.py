"""The index itself: entries of documents' chunks are written, and the longest cached prefix of a prompt is found.

Each entry is an object of its own whose key is made of the hash, so that a look-up is one read and writers need no
lock: a second entry of a prefix is as good as the first. Hashes are not trusted: a document
counts only where the tokens of its own text are those that were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, NotFoundError
from kvwire.store.index_records import PrefixEntry, prefix_digest
from kvwire.store.prefix.schemes import hash_scheme
from kvwire.store.recent import Recent
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.catalog.objects import Config
    from kvwire.store.prefix.schemes import HashScheme
    from kvwire.store.records import CatalogEntry
    from kvwire.types import BlobInfo

    OnMiss: TypeAlias = Callable[[str], None]
    _Find: TypeAlias = Callable[[str, str], CatalogEntry | None]
    Probe: TypeAlias = Callable[[Sequence[int]], "Sequence[PrefixHit | None]"]

PROBES = 16
"""Entries that are read at the same time while a prefix is looked for."""
MOST_TOKENS, MOST_INFOS = 1 << 20, 64
"""Of texts and headers of late, which an index keeps."""
_DAMAGED = (CorruptError, FormatVersionError, NotFoundError)


@dataclass(frozen=True)
class PrefixHit:
    """A document that begins as a prompt does.

    Attributes:
        document: Its entry in the catalog; it has a blob.
        info: What the blob's header says.
        token_ids: Its whole text, as a prompt begins with it.
        start: First token of the chunk whose hash led here.
        stop: Behind the chunk's last token.
        tokens: How many of the prompt's first tokens are also the document's; of a look-up by hash alone, ``stop``.
        opening: How many first tokens of ``token_ids`` are a BOS that the document was computed behind: the blob has no
            rows of them, and they count in ``start``, ``stop`` and ``tokens``.
    """

    document: CatalogEntry
    info: BlobInfo
    token_ids: tuple[int, ...]
    start: int
    stop: int
    tokens: int
    opening: int = 0


class PrefixIndex:
    """One tenant's documents of one model, by the chained hashes of one scheme. Any number of threads may use it.

    Attributes:
        scheme: How prompts are hashed.
    """

    def __init__(self, catalog: Catalog, config: Config, scheme: HashScheme | str = "kvwire") -> None:
        """Read nothing yet."""
        self._catalog, self._space = catalog, catalog.keys(config)
        self.scheme = hash_scheme(scheme, self._space.config) if isinstance(scheme, str) else scheme
        self._secret = catalog.objects.naming_secret
        self._texts: Recent[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], list[bytes]]] = Recent(
            MOST_TOKENS, lambda found: len(found[0])
        )
        self._infos: Recent[tuple[str, str], BlobInfo] = Recent(MOST_INFOS)

    def write(
        self, document: CatalogEntry, token_ids: Sequence[int], opening: Sequence[int] = (), *, after: int = 0
    ) -> int:
        """Write the entries of a document's chunks; what leads to another document of the same prefix gives way.

        Args:
            document: The document's entry, which is in the catalog already.
            token_ids: Its text.
            opening: What it was computed behind, and stands behind in prompts: BOS (``opening_of``).
            after: Only of chunks that end behind so many tokens, the opening's included: those before lead elsewhere.

        Returns:
            How many were written.

        Raises:
            ArgumentError: The text is not the entry's.
        """
        if digest_tokens(token_ids) != document.token_digest:
            raise ArgumentError(f"the text is not that of {document.document_id!r}: index it with its own token ids")
        hashes = self.scheme.hashes([*opening, *token_ids])
        entries = list(self._entries(document, hashes))[max(0, after) // self.scheme.chunk_tokens :]
        self._catalog.objects.write_many(entries)
        return len(entries)

    def add(
        self, document: CatalogEntry, token_ids: Sequence[int], *, is_new: bool = True, opening: Sequence[int] = ()
    ) -> int:
        """``write`` what is not there yet; of a document that is not new, one look at its last chunk tells.

        Args:
            document: The document's entry.
            token_ids: Its text.
            is_new: Write in any case.
            opening: As for ``write``.

        Returns:
            How many entries were written.
        """
        last = [] if is_new else self.scheme.hashes([*opening, *token_ids])[-1:]
        found = self._read(last)
        if found and isinstance(found[0], PrefixEntry) and found[0].token_digest == document.token_digest:
            return 0
        return self.write(document, token_ids, opening)

    def look_up(self, hashes: Sequence[bytes], on_miss: OnMiss | None = None) -> list[PrefixHit | None]:
        """Find what holds the chunks of these hashes, each on its own.

        Args:
            hashes: As the scheme gives them.
            on_miss: Called, in words, where there is an entry but it leads to no document with these tokens.

        Returns:
            For each hash a document whose own text has it; None where there is none.

        Raises:
            StorageError: The store fails.
            AuthError: Credentials were refused, or entries are sealed with a key that is not at hand.
        """
        tell, documents = on_miss or (lambda _: None), cache(self._document)
        return [self._hit(each, found, documents, tell) for each, found in zip(hashes, self._read(hashes), strict=True)]

    def longest(self, token_ids: Sequence[int], on_miss: OnMiss | None = None) -> PrefixHit | None:
        """Find the longest prefix of a prompt that a document begins with.

        Some entries are read at a time, each time between the last that led somewhere and the next that did not. Where
        entries in the middle are missing, a shorter prefix may be found than there is.

        Args:
            token_ids: The prompt.
            on_miss: As for ``look_up``.

        Returns:
            The document, and how many tokens agree, which may end within a chunk; None where not even the first chunk
            is found.

        Raises:
            StorageError: The store fails.
            AuthError: As for ``look_up``.
        """
        told: set[str] = set()

        def tell(trouble: str) -> None:
            if on_miss and trouble not in told:
                told.add(trouble)
                on_miss(trouble)

        documents = cache(self._document)

        def probe(chunks: Sequence[int]) -> list[PrefixHit | None]:
            """What is before the last that leads somewhere is not followed: that document begins with it, too."""
            wanted = [hashes[chunk] for chunk in chunks]
            found, hits = self._read(wanted), [None] * len(wanted)
            for at in reversed(range(len(wanted))):
                hit = self._hit(wanted[at], found[at], documents, tell)
                if hit is not None:
                    return [*hits[:at], hit, *hits[at + 1 :]]
            return [*hits]

        hashes = self.scheme.hashes(token_ids)
        hit = search(len(hashes), probe)
        if hit is None:
            hashes = self.scheme.hashes(token_ids[1:])[:1]
            if hashes and probe([0])[0] is not None:
                tell(after_opening(token_ids[0]))
        return _agreed(hit, token_ids)

    def _key(self, chunk_hash: str) -> str:
        return self._space.prefix_entry(prefix_digest(self.scheme.name, chunk_hash, self._secret))

    def _entries(self, document: CatalogEntry, hashes: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
        size = self.scheme.chunk_tokens
        for chunk, each in enumerate(hashes):
            named = (self.scheme.name, each.hex(), document.document_id, document.token_digest)
            yield self._key(each.hex()), PrefixEntry(*named, chunk * size, (chunk + 1) * size).to_json()

    def _read(self, hashes: Sequence[bytes]) -> list[PrefixEntry | str | None]:
        """The entry of each hash; what is wrong with it, in words; or None."""
        found: list[PrefixEntry | str | None] = []
        keys = [self._key(each.hex()) for each in hashes]
        for each, (_, read) in zip(hashes, self._catalog.objects.read_each(keys), strict=True):
            try:
                data = read()
                entry = None if data is None else PrefixEntry.from_json(data)
            except _DAMAGED as error:
                found.append(str(error))
                continue
            is_other = entry and (entry.scheme, entry.chunk_hash) != (self.scheme.name, each.hex())
            found.append("it is of another hash than its key says" if is_other else entry)
        return found

    def _hit(
        self, chunk_hash: bytes, found: PrefixEntry | str | None, documents: _Find, tell: OnMiss
    ) -> PrefixHit | None:
        if found is None:
            return None
        trouble = found if isinstance(found, str) else ""
        try:
            if isinstance(found, PrefixEntry):
                document = documents(found.document_id, found.token_digest)
                if document is None:
                    raise NotFoundError(f"no document with the text of {found.document_id!r} has a blob any more")
                info = self._info(document)
                token_ids, hashes = self._text(document, opening_of(info))
                if hashes[found.chunk : found.chunk + 1] == [chunk_hash]:
                    return PrefixHit(
                        document, info, token_ids, found.start, found.stop, found.stop, opening=info.opening
                    )
                trouble = f"the tokens of {document.document_id!r} are others"
        except _DAMAGED as error:
            trouble = str(error)
        tell(f"the prefix entry of {chunk_hash.hex()[:16]} leads nowhere ({trouble}): it counts as a miss")
        return None

    def _document(self, document_id: str, token_digest: str) -> CatalogEntry | None:
        """The document of a name, or another one with the same text; None where neither has a blob."""
        for ask, name in ((self._catalog.by_document, document_id), (self._catalog.by_tokens, token_digest)):
            try:
                found = ask(self._space, name)
            except CorruptError:
                continue
            if found is None or found.is_text:
                continue
            if found.token_digest == token_digest or found.parts:  # of what grew since, hashes tell what it begins with
                return found
        return None

    def _info(self, document: CatalogEntry) -> BlobInfo:
        """The header of a document's blob; those of late are kept. Raises CorruptError where it is no prefix's."""
        key = document.sha256, document.token_digest
        return self._infos.get(key) or self._infos.put(key, prefix_info(self._catalog, document))

    def _text(self, document: CatalogEntry, opening: tuple[int, ...]) -> tuple[tuple[int, ...], list[bytes]]:
        """A document's text and its hashes; those of late are kept."""
        key = document.token_digest, opening
        if (kept := self._texts.get(key)) is not None:
            return kept
        ids = (*opening, *self._catalog.texts.of(self._space, document))
        return self._texts.put(key, (ids, self.scheme.hashes(ids)))


def prefix_info(catalog: Catalog, document: CatalogEntry) -> BlobInfo:
    """Read a blob's header, and refuse rows that are not those of a prompt's beginning."""
    info = catalog.blobs.header(document)
    if info.meta.token_digest != document.token_digest:
        raise CorruptError(f"the blob of {document.document_id!r} is of another text; encode the document again")
    if len(info.neutral_prefix) > info.opening or info.soft_tokens:
        what = "with soft tokens" if info.soft_tokens else "behind a neutral prefix"
        raise CorruptError(f"{document.document_id!r} was computed {what}: its rows begin no prompt")
    return info


def opening_of(info: BlobInfo) -> tuple[int, ...]:
    """The BOS that a document was computed behind, and stands behind in prompts."""
    return info.neutral_prefix[: info.opening]


def search(chunks: int, probe: Probe) -> PrefixHit | None:
    """Find the last chunk that is there, where all before it are there too; else some that is, or none."""
    low, high = -1, chunks
    best: PrefixHit | None = None
    while high - low > 1:
        wanted = sorted({low + 1 + (high - low - 2) * at // (PROBES - 1) for at in range(PROBES)})
        found = probe(wanted)
        last = max((at for at, hit in enumerate(found) if hit is not None), default=-1)
        if last >= 0:
            low, best = wanted[last], found[last]
        if last + 1 < len(wanted):
            high = wanted[last + 1]
    return best


def _agreed(hit: PrefixHit | None, token_ids: Sequence[int]) -> PrefixHit | None:
    """A hit with the tokens that agree; None where they do not even reach to its chunk's end."""
    if hit is None:
        return None
    import numpy as np

    most = min(len(token_ids), len(hit.token_ids))
    differ = np.asarray(token_ids[:most], dtype=np.int64) != np.asarray(hit.token_ids[:most], dtype=np.int64)
    tokens = int(differ.argmax()) if differ.any() else most
    return replace(hit, tokens=tokens) if tokens >= hit.stop else None


def after_opening(token_id: int) -> str:
    """Tell of a prompt that begins with a document but for one token in front, which engines add to whole texts."""
    return (
        f"a document follows behind the prompt's first token, {token_id}: a BOS that the tokenizer added, which it was "
        "encoded without; encode it again with kvwire encode --index, or send token ids without BOS"
    )
