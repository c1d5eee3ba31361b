"""Survey of a store from its catalogs and listings; of blobs, only sampled headers are read."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvwire.errors import ArgumentError, AuthError, KvwireError, NotFoundError
from kvwire.store import Catalog, tenants
from kvwire.store.key_kinds import KINDS, kind_of, mark
from kvwire.store.listing import content

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvwire.store import CatalogEntry, Keyring, KeySpace, Store
    from kvwire.types import BlobInfo

T = TypeVar("T")
MOST_NAMED = 20
"""Problems listed by name; the rest is counted."""
_DAY_S = 86400.0
_BLOB, _UNKNOWN = "blob", "of no known kind"
_TELL_EVERY = 256


@dataclass
class LevelTotal:
    """One level, summed over all documents that have it.

    Attributes:
        documents: Number of documents.
        tokens: Their tokens.
        bytes: Bytes to fetch, coarser levels included.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class Wrong:
    """One kind of problem.

    Attributes:
        count: Number of cases.
        bytes: Size of these objects, if known.
        named: Names of the first few.
    """

    count: int = 0
    bytes: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, name: str, size: int = 0) -> None:
        """Count one case."""
        self.count += 1
        self.bytes += size
        if len(self.named) < MOST_NAMED:
            self.named.append(name)


@dataclass
class ConfigSurvey:
    """Content of a tenant for one model configuration.

    Attributes:
        tenant: The tenant's salted hash.
        config: The configuration's digest.
        model_id: The model's name; empty without a record.
        window: Longest prompt of the model in tokens; 0: not known.
        documents: Number of catalog entries.
        texts_only: Documents stored as text only.
        tokens: Length of all documents.
        lengths: Documents by length, in powers of two: key ``n`` counts those of ``2**n`` to ``2**(n+1) - 1`` tokens.
        levels: By name, in the order of the first document that has them.
        objects: Number and bytes of content by kind, ``blob`` first.
        ages: Blobs by age in whole days, -1 if the store does not say.
        profiles: Documents by the digest of their profile.
        damaged: Catalog entries that cannot be read.
        missing: Documents whose blob is gone.
        unnamed: Blobs that no document names; none if an entry cannot be read.
        unknown: Objects of no known kind.
        sample: Headers of some documents, by document id.
        unread: Sampled headers that cannot be read.
    """

    tenant: str
    config: str
    model_id: str = ""
    window: int = 0
    documents: int = 0
    texts_only: int = 0
    tokens: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    levels: dict[str, LevelTotal] = field(default_factory=dict)
    objects: dict[str, LevelTotal] = field(default_factory=dict)
    ages: Counter[int] = field(default_factory=Counter)
    profiles: Counter[str] = field(default_factory=Counter)
    damaged: Wrong = field(default_factory=Wrong)
    missing: Wrong = field(default_factory=Wrong)
    unnamed: Wrong = field(default_factory=Wrong)
    unknown: Wrong = field(default_factory=Wrong)
    sample: dict[str, BlobInfo] = field(default_factory=dict)
    unread: Wrong = field(default_factory=Wrong)

    @property
    def bytes(self) -> int:
        """Bytes of all content."""
        return sum(total.bytes for total in self.objects.values())

    @property
    def is_sound(self) -> bool:
        """Whether no problem affects readers."""
        return not (self.damaged.count or self.missing.count or self.unread.count or self.unknown.count)


@dataclass(frozen=True)
class Survey:
    """Content of a store.

    Attributes:
        store: Its address.
        at: Unix time of the survey.
        configs: By tenant and model configuration, largest first.
        seconds: Its duration.
    """

    store: str
    at: float
    configs: tuple[ConfigSurvey, ...]
    seconds: float


def survey(
    store: Store,
    *,
    tenant_hash: str | None = None,
    keyring: Keyring | None = None,
    sample: int = 16,
    on_progress: Callable[[int], None] | None = None,
) -> Survey:
    """Survey a store's catalogs and listings.

    Args:
        store: The store.
        tenant_hash: One tenant only.
        keyring: Keys of sealed objects; tenants without a key are surveyed by listing only.
        sample: How many headers to read per configuration: those with the least digests, so that a store always gives
            the same sample.
        on_progress: Called with the number of further objects read.

    Returns:
        The survey.

    Raises:
        ArgumentError: ``sample`` is negative.
        StorageError: The store failed.
    """
    if sample < 0:
        raise ArgumentError(f"a sample has 0 documents or more, got {sample}")
    began, at = time.monotonic(), time.time()
    found = []
    for tenant in [tenant_hash] if tenant_hash else list(tenants(store)):
        catalog = Catalog.of_hash(store, tenant, keyring=keyring)
        for space in catalog.configurations():
            one = _Surveyor(catalog, space, at, on_progress)
            try:
                one.run(sample)
            except AuthError as error:  # sealed without a key: report the listing
                one.found.damaged.add(f"the catalog: {error}")
            found.append(one.found)
    found.sort(key=lambda each: (-each.bytes, each.tenant, each.config))
    return Survey(store.url, at, tuple(found), time.monotonic() - began)


class _Surveyor:
    """Surveys one configuration."""

    def __init__(self, catalog: Catalog, space: KeySpace, at: float, on_progress: Callable[[int], None] | None) -> None:
        self._catalog, self._space, self._at = catalog, space, at
        self._tell = on_progress or (lambda _: None)
        self.found = ConfigSurvey(catalog.tenant, space.config)
        self._blobs: dict[bytes, int] = {}  # size by digest, to hold a million in some hundred megabytes

    def run(self, sample: int) -> None:
        """Survey: listing first, so that a blob written meanwhile is looked up when its entry is read."""
        self._read_model()
        self._list()
        chosen = self._read_entries(sample)
        for digest, size in self._blobs.items():
            self.found.unnamed.add(digest.hex(), size)
        self._read_headers(chosen)

    def _read_model(self) -> None:
        try:
            record = self._catalog.models.get(self._space)
        except KvwireError as error:
            self.found.damaged.add(f"the model's record: {error}")
            return
        if record is not None:
            self.found.model_id, self.found.window = record.meta.model_id, record.window

    def _list(self) -> None:
        found = self.found
        found.objects = {kind.name: LevelTotal() for kind in KINDS if not kind.is_catalog}
        for listed in self._counted(content(self._catalog.store, self._space)):
            kind = kind_of(listed.key)
            name = kind.name if kind else _UNKNOWN
            total = found.objects.setdefault(name, LevelTotal())
            total.documents += 1
            total.bytes += listed.size
            if kind is None:
                found.unknown.add(listed.key, listed.size)
            if name == _BLOB:
                self._blobs[mark(listed.key)] = listed.size
                found.ages[int((self._at - listed.modified) // _DAY_S) if listed.modified else -1] += 1
        found.objects = {name: total for name, total in found.objects.items() if total.documents}

    def _read_entries(self, sample: int) -> list[CatalogEntry]:
        """Count documents; returns a sample of them in order of length."""
        found = self.found
        chosen: list[tuple[int, str, CatalogEntry]] = []
        named: set[bytes] = set()

        def failed(key: str, error: KvwireError) -> None:
            found.damaged.add(f"{key}: {error}")

        for entry in self._counted(self._catalog.documents(self._space, on_error=failed)):
            found.documents += 1
            found.tokens += entry.tokens
            found.lengths[max(1, entry.tokens).bit_length() - 1] += 1
            if entry.is_text:
                found.texts_only += 1
                continue
            digests = {mark(key): key for key in self._catalog.blobs.of(entry)}
            if not all(each in self._blobs or each in named or self._is_there(key) for each, key in digests.items()):
                found.missing.add(entry.document_id)
                continue
            named.update(digests)
            self._count(entry)
            _keep_least(chosen, (-int(entry.sha256[:16], 16), entry.document_id, entry), sample)
        for digest in named:
            self._blobs.pop(digest, None)
        if found.damaged.count:  # their blobs are unknown
            self._blobs.clear()
        return sorted((entry for *_, entry in chosen), key=lambda entry: (entry.tokens, entry.document_id))

    def _is_there(self, key: str) -> bool:
        """Whether an unlisted blob exists by now: it may have been written since."""
        try:
            self._catalog.store.stat(key)
        except NotFoundError:
            return False
        return True

    def _count(self, entry: CatalogEntry) -> None:
        self.found.profiles[entry.profile_digest] += 1
        for name, size in entry.levels:
            total = self.found.levels.setdefault(name, LevelTotal())
            total.documents += 1
            total.tokens += entry.tokens
            total.bytes += size

    def _read_headers(self, chosen: Iterable[CatalogEntry]) -> None:
        for entry in chosen:
            try:
                self.found.sample[entry.document_id] = self._catalog.blobs.header(entry)
            except KvwireError as error:
                self.found.unread.add(f"{entry.document_id}: {error}")
            self._tell(1)

    def _counted(self, items: Iterable[T]) -> Iterable[T]:
        count = 0
        for count, item in enumerate(items, 1):
            if not count % _TELL_EVERY:
                self._tell(_TELL_EVERY)
            yield item
        self._tell(count % _TELL_EVERY)


def _keep_least(heap: list[tuple[int, str, CatalogEntry]], item: tuple[int, str, CatalogEntry], most: int) -> None:
    """Keep the ``most`` least digests, in a heap of negated ones: its top is the greatest digest kept."""
    if len(heap) < most:
        heapq.heappush(heap, item)
    elif most and item[:2] > heap[0][:2]:
        heapq.heapreplace(heap, item)
