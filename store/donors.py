"""Texts much like a prompt: an index from features of texts to documents whose rows may serve it.

Each entry is an object of its own, below its feature: a look-up lists features, and writers need no lock. Entries are
not trusted: the texts that they lead to are compared with the prompt, token by token, before use.

A text's features are its sketch: hashes of all runs of 8 tokens (shingles), of each 16 in a row the least (winnowing,
Schleimer et al., SIGMOD 2003), of these the 64 least (a bottom-k sketch). Any 23 equal tokens share a winnowed hash.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, NotFoundError
from kvwire.store.index_records import DonorEntry, feature_digest
from kvwire.store.listing import read_ahead
from kvwire.store.prefix.index import MOST_INFOS, MOST_TOKENS, prefix_info
from kvwire.store.recent import Recent
from kvwire.types import digest_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvwire.store.base import Listed
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.catalog.objects import Config
    from kvwire.store.records import CatalogEntry
    from kvwire.types import BlobInfo

DONORS = "donors"
"""The index's name, where names of hash schemes stand, too."""
MOST_OF_FEATURE = 64
"""Donors of one feature; the one that was written first gives way."""
FEATURES_READ, _AT_A_TIME = 16, 8
MOST_CANDIDATES, _MOST_OF_MANY = 6, 4
"""Texts that are read, after 8 and after 16 features: 24 requests at most, an entry and a text for each."""
_LEAST_SHARED = 2  # features; one may be a common phrase, but short texts have few
SHINGLE = 8
WINDOW = 16
FEATURES = 64
SCHEME = f"sketch-{FEATURES}"
_MULTIPLIER = 0x9E3779B97F4A7C15  # odd, so that no token is lost
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of splitmix64
_DAMAGED = (CorruptError, FormatVersionError, NotFoundError)


@dataclass(frozen=True)
class Donor:
    """A document whose text is like a prompt's.

    Attributes:
        document: Its entry in the catalog; it has a blob.
        token_ids: Its text, without a BOS.
        shared: How many of the prompt's features it has.
    """

    document: CatalogEntry
    token_ids: tuple[int, ...]
    shared: int = 0


class Candidate(NamedTuple):
    """A text that may be like a prompt's, how many of the features that were read it has, and one of its entries."""

    token_digest: str
    shared: int
    key: str


class DonorIndex:
    """One tenant's documents of one model, by their sketches. Any number of threads may use it.

    Attributes:
        writer: Namespace that entries are written in; prompts of a writer find its own entries and those of all.
    """

    def __init__(self, catalog: Catalog, config: Config, writer: str = "") -> None:
        """Read nothing yet."""
        self._catalog, self._space, self.writer = catalog, catalog.keys(config), writer
        self._secret = catalog.objects.naming_secret
        self._texts: Recent[str, tuple[int, ...]] = Recent(MOST_TOKENS, len)
        self._infos: Recent[tuple[str, str], BlobInfo] = Recent(MOST_INFOS)

    def write(
        self, document: CatalogEntry, token_ids: Sequence[int], opening: Sequence[int] = (), *, after: int = 0
    ) -> int:
        """Write the entries of a document; of features that too many have, the oldest give way.

        Args:
            document: The document's entry, which is in the catalog already.
            token_ids: Its text.
            opening: What it stands behind in prompts, which counts for nothing here.
            after: Counts for nothing here.

        Returns:
            How many were written.

        Raises:
            ArgumentError: The text is not the entry's.
        """
        del opening, after
        if digest_tokens(token_ids) != document.token_digest:
            raise ArgumentError(f"the text is not that of {document.document_id!r}: index it with its own token ids")
        data = DonorEntry(SCHEME, document.document_id, document.token_digest).to_json()
        features = self._features(token_ids, self.writer)
        self._make_room(features, document.token_digest)
        keys = [self._space.donor_entry(feature, document.token_digest) for feature in features]
        self._catalog.objects.write_many([(key, data) for key in keys])
        return len(keys)

    def add(
        self, document: CatalogEntry, token_ids: Sequence[int], *, is_new: bool = True, opening: Sequence[int] = ()
    ) -> int:
        """``write`` what is not there yet; of a document that is not new, one look tells.

        Args:
            document: The document's entry.
            token_ids: Its text.
            is_new: Write in any case.
            opening: As for ``write``.

        Returns:
            How many entries were written.
        """
        last = [] if is_new else self._features(token_ids, self.writer)[-1:]
        if last and self._catalog.objects.read(self._space.donor_entry(last[0], document.token_digest)):
            return 0
        return self.write(document, token_ids, opening)

    def candidates(self, token_ids: Sequence[int], most: int = MOST_CANDIDATES) -> list[Candidate]:
        """Find texts that share features with a prompt.

        Args:
            token_ids: The prompt.
            most: How many are wanted.

        Returns:
            Those with the most features first.

        Raises:
            StorageError: The store fails.
        """
        counts: Counter[str] = Counter()
        keys: dict[str, str] = {}
        names = [self._features(token_ids, writer) for writer in dict.fromkeys(("", self.writer))]
        for start in range(0, FEATURES_READ, _AT_A_TIME):
            most = min(most, _MOST_OF_MANY) if start else most
            features = [each for of_writer in names for each in of_writer[start : start + _AT_A_TIME]]
            for listed in self._listed(features):
                of_feature = {one.key.rpartition("/")[2].removesuffix(".json"): one.key for one in listed}
                counts.update(of_feature.keys())
                keys |= of_feature
            good = [digest for digest, count in counts.items() if count >= _AT_A_TIME // 2]
            if len(good) >= most:
                break
        least = _LEAST_SHARED if len(names[0]) > _AT_A_TIME else 1
        found = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
        return [Candidate(digest, count, keys[digest]) for digest, count in found if count >= least][:most]

    def donor(self, candidate: Candidate) -> Donor:
        """Read the text that a candidate leads to; texts of late are kept.

        Args:
            candidate: From ``candidates``.

        Returns:
            The donor.

        Raises:
            NotFoundError: No document has the text any more.
            CorruptError: An entry or the text is damaged.
            StorageError: The store fails.
        """
        digest = candidate.token_digest
        entry = self._catalog.by_tokens(self._space, digest) or self._grown(candidate)
        if entry is None or entry.is_text or entry.token_digest != digest:
            raise NotFoundError(f"no document with the text {digest[:12]} has a blob any more")
        ids = self._texts.get(digest) or self._texts.put(digest, self._catalog.texts.of(self._space, entry))
        return Donor(entry, ids, candidate.shared)

    def _grown(self, candidate: Candidate) -> CatalogEntry | None:
        """A document of several parts, which no entry of tokens leads to."""
        data = self._catalog.objects.read(candidate.key)
        return None if data is None else self._catalog.by_document(self._space, DonorEntry.from_json(data).document_id)

    def check(self, donor: Donor) -> BlobInfo:
        """Read a donor's header; those of late are kept.

        Args:
            donor: From ``find``.

        Returns:
            What it says: the rows were computed behind nothing but a BOS, and over no lossy rows.

        Raises:
            NotFoundError: The blob is gone.
            CorruptError: The rows are others, or damaged.
            StorageError: The store fails.
        """
        document = donor.document
        key = document.sha256, document.token_digest
        info = self._infos.get(key) or prefix_info(self._catalog, document)
        if info.context_level is not None:
            raise CorruptError(f"{document.document_id!r} was computed over lossy rows: it gives none to other prompts")
        return self._infos.put(key, info)

    def find(
        self, token_ids: Sequence[int], on_miss: Callable[[str], None] = lambda _: None, most: int = MOST_CANDIDATES
    ) -> list[Donor]:
        """``donor`` of all candidates.

        Args:
            token_ids: The prompt.
            on_miss: Called, in words, with why a candidate is none.
            most: How many are wanted.

        Returns:
            Those whose texts are there, in their order.

        Raises:
            StorageError: The store fails.
        """
        found, known = [], {each.token_digest: each for each in self.candidates(token_ids, most)}
        for digest, opened in read_ahead(self._catalog.store, known, lambda digest: self.donor(known[digest])):
            try:
                found.append(opened())
            except _DAMAGED as error:
                on_miss(f"the donor {digest[:12]} cannot be used: {error}")
        return found

    def _features(self, token_ids: Sequence[int], writer: str) -> list[str]:
        return [feature_digest(SCHEME, feature, writer, self._secret) for feature in sketch(token_ids)]

    def _listed(self, features: Sequence[str]) -> list[list[Listed]]:
        store, prefixes = self._catalog.store, [self._space.donor_entry(feature) for feature in features]
        read = read_ahead(store, prefixes, lambda prefix: list(islice(store.scan(prefix), 2 * MOST_OF_FEATURE)))
        return [listed() for _, listed in read]

    def _make_room(self, features: Sequence[str], token_digest: str) -> None:
        doomed: list[str] = []
        for listed in self._listed(features):
            others = [one for one in listed if token_digest not in one.key]
            oldest = sorted(others, key=lambda one: (one.modified, one.key))
            doomed += [one.key for one in oldest[: max(0, len(others) + 1 - MOST_OF_FEATURE)]]
        if doomed:
            self._catalog.store.delete_many(doomed)


def sketch(token_ids: Sequence[int]) -> list[int]:
    """At most 64 features of 64 bits, ascending; none where the text has fewer than 8 tokens."""
    words = _mixed(np.asarray(token_ids, np.int64).astype(np.uint64))
    count = len(words) - SHINGLE + 1
    if count < 1:
        return []
    hashes = np.zeros(count, np.uint64)
    for step in range(SHINGLE):
        hashes = hashes * np.uint64(_MULTIPLIER) + words[step : step + count]
    hashes = _mixed(hashes)
    windows = np.lib.stride_tricks.sliding_window_view(hashes, min(WINDOW, count))
    return [int(each) for each in np.unique(windows.min(1))[:FEATURES]]


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit depends on every bit: the finalizer of splitmix64."""
    words = words + np.uint64(_MULTIPLIER)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX[0])
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX[1])
    return words ^ (words >> np.uint64(31))
