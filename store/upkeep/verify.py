"""Whether everything in a store is what was written, and whether what the catalog names is there."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvwire.errors import AuthError, CorruptError, FormatVersionError, NotFoundError, NotSealedError
from kvwire.store.base import is_there, open_object
from kvwire.store.key_kinds import key_digest, kind_of, kinds, mark
from kvwire.store.listing import WHOLE, ahead
from kvwire.store.records import parse_object
from kvwire.store.upkeep.walk import objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.errors import KvwireError
    from kvwire.store.base import Listed, Store
    from kvwire.store.catalog.catalog import Catalog
    from kvwire.store.key_kinds import KeyKind, ObjectRef
    from kvwire.store.keys import KeySpace
    from kvwire.store.listing import Part

    OnProgress = Callable[[int], None]


@dataclass(frozen=True)
class Damage:
    """An object that is not what was written, or an entry whose content is not there.

    Attributes:
        key: The object, or the entry.
        problem: What is wrong, in words.
        deleted: Whether it was deleted.
    """

    key: str
    problem: str
    deleted: bool


@dataclass(frozen=True)
class Verified:
    """What was looked at.

    Attributes:
        objects: Of content.
        bytes: Of content.
        entries: Of the catalog, which name other objects.
        sealed: Objects of which only the hash, or nothing, could be checked, since what they hold is encrypted.
    """

    objects: int
    bytes: int
    entries: int
    sealed: int
    damaged: tuple[Damage, ...]


def verify_store(
    store: Store,
    catalogs: Iterable[Catalog],
    *,
    jobs: int = 4,
    delete_damaged: bool = False,
    part: Part = WHOLE,
    on_progress: OnProgress | None = None,
) -> Verified:
    """Read every blob, profile and text of these catalogs' tenants, and their document entries.

    Blobs are checked against the hash in their key and, segment by segment, against their own checksums, a piece at a
    time. Of a configuration's content, what is sound is remembered until its entries were read: some 120 bytes for each
    object.

    Args:
        store: The store.
        catalogs: Of the tenants to look at.
        jobs: Objects read at once.
        delete_damaged: Delete content and entries that are damaged, so that documents are computed from their text or
            encoded again. Entries are kept where only their content is missing, and so is whatever a second look does
            not find damaged too, or finds written meanwhile.
        part: Objects and entries to look at; what an entry of it names in other parts is asked for, and not read.
        on_progress: Called with the bytes of each object that was read.

    Returns:
        What was looked at, and the damage.

    Raises:
        StorageError: The store fails.
    """
    verifier = _Verifier(store, jobs, part, delete_damaged=delete_damaged, on_progress=on_progress)
    for catalog in catalogs:
        for space in catalog.configurations():
            verifier.check(catalog, space)
    return verifier.result()


class _Verifier:
    def __init__(
        self, store: Store, jobs: int, part: Part, *, delete_damaged: bool, on_progress: OnProgress | None
    ) -> None:
        self._store = store
        self._jobs = jobs
        self._part = part
        self._delete = delete_damaged
        self._tell = on_progress or (lambda _: None)
        self._objects = self._bytes = self._entries = self._sealed = 0
        self._damaged: list[Damage] = []

    def result(self) -> Verified:
        return Verified(self._objects, self._bytes, self._entries, self._sealed, tuple(self._damaged))

    def check(self, catalog: Catalog, space: KeySpace) -> None:
        sound: set[bytes] = set()
        for listed, checked in ahead(self._placed(space), lambda listed: self._check_object(listed.key), self._jobs):
            try:
                self._sealed += not checked()
                sound.add(_sized(listed.key, listed.size))
            except NotFoundError:  # deleted since it was listed
                continue
            except (CorruptError, FormatVersionError) as error:
                self._report(listed.key, error, self._check_object)
            self._objects += 1
            self._bytes += listed.size
            self._tell(listed.size)
        try:
            for kind in (one for one in (*kinds("root"), *kinds("derived")) if one.is_verified):
                self._check_entries(catalog, space, kind, sound)
        except AuthError:  # sealed with a key that is not at hand: nothing can be said of them
            self._sealed += 1

    def _placed(self, space: KeySpace) -> Iterator[Listed]:
        """Objects that lie where their kind does; others are reported, and left where they are."""
        for found in objects(self._store, space, self._part):
            if found.is_misplaced:
                problem = "nothing leads to it, as it does not lie where its kind does: remove it by hand"
                self._damaged.append(Damage(found.listed.key, problem, deleted=False))
            elif found.kind and found.kind.verify:
                yield found.listed

    def _check_object(self, key: str) -> bool:
        """Whether what it holds could be checked; raises what is wrong."""
        kind = kind_of(key)
        if kind is None or kind.verify is None:
            return False
        with closing(open_object(self._store, key)) as reader:
            return kind.verify(reader, key_digest(key))

    def _check_entries(self, catalog: Catalog, space: KeySpace, kind: KeyKind, sound: set[bytes]) -> None:
        is_sealed = bool(catalog.objects.secrets)
        keys = (listed.key for listed in self._part.scan(self._store, kind.prefix(space)))

        def named_by(key: str, data: bytes) -> Sequence[ObjectRef]:
            return _named(kind, key, data, is_sealed=is_sealed)

        for key, read in catalog.objects.read_each(keys):
            try:
                if (data := read()) is None:
                    continue
                named = named_by(key, data)
            except CorruptError as error:
                self._report(key, error, lambda key: named_by(key, catalog.objects.read(key) or b""))
                continue
            self._entries += 1
            for one in named:
                if one.is_needed and not self._is_there(one, sound):
                    problem = f"the {one.what} of {_subject(kind, data)} is not there: {kind.advice}"
                    self._damaged.append(Damage(key, problem, deleted=False))

    def _is_there(self, named: ObjectRef, sound: set[bytes]) -> bool:
        if named.size is not None and _sized(named.key, named.size) in sound:
            return True
        return is_there(self._store, named.key, named.size)

    def _report(self, key: str, error: KvwireError, look: Callable[[str], object]) -> None:
        """Note what is wrong. What this reader merely cannot read is not deleted."""
        deleted = self._delete and _is_damage(error) and self._delete_damaged(key, look)
        self._damaged.append(Damage(key, str(error), deleted=deleted))

    def _delete_damaged(self, key: str, look: Callable[[str], object]) -> bool:
        """Delete what is damaged at a second look too, and was not written meanwhile; tells whether it was."""
        self._store.distrust(key)
        try:
            before = self._store.stat(key)
            try:
                look(key)
            except (CorruptError, FormatVersionError) as error:
                if _is_damage(error) and self._store.stat(key) == before:
                    self._store.delete(key)
                    return True
        except NotFoundError:  # deleted meanwhile
            pass
        return False


def _is_damage(error: KvwireError) -> bool:
    return not isinstance(error, NotSealedError | FormatVersionError)


def _named(kind: KeyKind, key: str, data: bytes, *, is_sealed: bool) -> Sequence[ObjectRef]:
    """What an entry names; raises CorruptError where it is damaged or of another key.

    A sealed entry opens under its own key alone, which only its tenant's secret may be able to make.
    """
    if kind.accept is not None and not is_sealed:
        kind.accept(key, data)
    return kind.names(key, data) if kind.names is not None else ()


def _subject(kind: KeyKind, data: bytes) -> str:
    document = parse_object(data).get("document_id")
    return f"document {document!r}" if document is not None else f"the {kind.name}"


def _sized(key: str, size: int) -> bytes:
    return mark(key) + size.to_bytes(8, "little")
