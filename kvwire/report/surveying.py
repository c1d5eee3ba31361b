"""What a store holds, as its catalogs and listings say it; of blobs, a sample of headers is read and nothing else."""

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
"""Of what is wrong, so many are named; the rest is counted."""
_DAY_S = 86400.0
_BLOB, _UNKNOWN = "blob", "of no known kind"
_TELL_EVERY = 256


@dataclass
class LevelTotal:
    """One level over all documents that have it.

    Attributes:
        documents: How many have it.
        tokens: Of these.
        bytes: To fetch for it, coarser levels included.
    """

    documents: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass
class Wrong:
    """Something that is not as it should be.

    Attributes:
        count: How often.
        bytes: Of these objects, where that is known.
        named: The first few.
    """

    count: int = 0
    bytes: int = 0
    named: list[str] = field(default_factory=list)

    def add(self, name: str, size: int = 0) -> None:
        """Count one more."""
        self.count += 1
        self.bytes += size
        if len(self.named) < MOST_NAMED:
            self.named.append(name)


@dataclass
class ConfigSurvey:
    """What a tenant has of one model configuration.

    Attributes:
        tenant: The tenant's salted hash.
        config: The configuration's digest.
        model_id: Of the model; empty where no record says so.
        window: Tokens that a prompt of the model may hold; 0: not known.
        documents: In the catalog.
        texts_only: Documents of which the text alone is kept.
        tokens: Of all documents.
        lengths: Documents by length, in powers of two: key ``n`` counts those of ``2**n`` to ``2**(n+1) - 1`` tokens.
        levels: By name, in the order of the first document that has them.
        objects: Number and bytes of content by kind, ``blob`` first.
        ages: Blobs by age in whole days, -1 where the store does not tell.
        profiles: Documents by the digest of their profile.
        damaged: Catalog entries that cannot be read.
        missing: Documents whose blob is not there.
        unnamed: Blobs that no document names; none where an entry cannot be read.
        unknown: Objects that lie where none of a known kind does.
        sample: Headers of some documents, by document id.
        unread: Of the sample, headers that cannot be read.
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
        """Of all content."""
        return sum(total.bytes for total in self.objects.values())

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found that readers would miss."""
        return not (self.damaged.count or self.missing.count or self.unread.count or self.unknown.count)


@dataclass(frozen=True)
class Survey:
    """What was found in a store.

    Attributes:
        store: Its address.
        at: When, in Unix seconds.
        configs: By tenant and model configuration, the largest first.
        seconds: That it took.
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
    """Look through a store's catalogs and listings.

    Args:
        store: The store.
        tenant_hash: One tenant only.
        keyring: To read what is sealed; of a tenant whose key is missing no more is told than its listing.
        sample: Documents of each configuration whose header is read: those with the least digests, so that the same
            store gives the same sample.
        on_progress: Called with how many more objects were looked at.

    Returns:
        What was found.

    Raises:
        ArgumentError: ``sample`` is negative.
        StorageError: The store failed.
    """
    if sample < 0:
        msg = f"a sample has 0 documents or more, got {sample}"
        raise ArgumentError(msg)
    began, at = time.monotonic(), time.time()
    found = []
    for tenant in [tenant_hash] if tenant_hash else list(tenants(store)):
        catalog = Catalog.of_hash(store, tenant, keyring=keyring)
        for space in catalog.configurations():
            one = _Surveyor(catalog, space, at, on_progress)
            try:
                one.run(sample)
            except AuthError as error:  # sealed, and there is no key for it: what was listed is told
                one.found.damaged.add(f"the catalog: {error}")
            found.append(one.found)
    found.sort(key=lambda each: (-each.bytes, each.tenant, each.config))
    return Survey(store.url, at, tuple(found), time.monotonic() - began)


class _Surveyor:
    """Goes through one configuration."""

    def __init__(self, catalog: Catalog, space: KeySpace, at: float, on_progress: Callable[[int], None] | None) -> None:
        self._catalog, self._space, self._at = catalog, space, at
        self._tell = on_progress or (lambda _: None)
        self.found = ConfigSurvey(catalog.tenant, space.config)
        self._blobs: dict[bytes, int] = {}  # by digest: the size, so that a million take some hundred megabytes

    def run(self, sample: int) -> None:
        """Listing first: a blob that is written meanwhile is then asked for when its entry is read."""
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
        """Count documents; returns those whose headers are to be read, in order of length."""
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
        """Whether a blob that was not listed is there by now: it may have been written since."""
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
    """A heap of the greatest negated digests: what comes out at its top is the greatest digest that was kept."""
    if len(heap) < most:
        heapq.heappush(heap, item)
    elif most and item[:2] > heap[0][:2]:
        heapq.heapreplace(heap, item)
