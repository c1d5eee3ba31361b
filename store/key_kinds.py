"""The kinds of objects that a store holds: one table, which server, collector, verifier, copier and tiers read.

A new kind of object is one row of ``KINDS`` and the functions that it names. A key that fits no row is of an unknown
kind: the server refuses it, and the collector deletes nothing of a model configuration whose catalog holds one, since
what it names is not known.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvwire.errors import ArgumentError, CorruptError
from kvwire.store.content_checks import (
    MAX_TEXT_BYTES,
    check_blob,
    check_part_text,
    check_profile,
    check_shift,
    check_text,
)
from kvwire.store.index_records import DonorEntry, LastUse, PrefixEntry, prefix_digest
from kvwire.store.kept_repair import KeptRepair
from kvwire.store.keys import KeySpace, check_key, is_catalog_key, space_of
from kvwire.store.records import (
    MAX_ENTRY_BYTES,
    Announcement,
    CatalogEntry,
    LinkReportShift,
    ModelRecord,
    ProfilePointer,
    parse_object,
)
from kvwire.types import SEALED_MAGIC, TEXT_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.store.base import Data, ObjectReader

    _Place = Callable[[KeySpace, str], str] | None
    _Accept = Callable[[str, Data], object]
    _Names = Callable[[str, bytes], "Sequence[ObjectRef]"]

GcRole: TypeAlias = Literal["root", "content", "alias", "derived", "lease"]
"""What a collector does. root: read what it names. content: delete it once it is old and nothing names it. alias: the
same, without telling writers, since losing it costs little. derived: delete it once it is old and no document has what
it names, which is then as cheap to lose. lease: delete it once its lease is over."""


@dataclass(frozen=True)
class ObjectRef:
    """An object that an entry names.

    Attributes:
        key: Where it lies.
        what: Its kind, in words.
        size: Its length in bytes; None where the entry does not tell.
        is_needed: Whether the entry leads nowhere without it.
    """

    key: str
    what: str
    size: int | None = None
    is_needed: bool = True


@dataclass(frozen=True)
class KeyKind:
    """One kind of object.

    Attributes:
        name: Of one, in words.
        pattern: Of whole keys; the group ``digest`` is what the key says of the content.
        digest: What that is the digest of: ``sha256`` of the bytes, so that the object is immutable and copies of it
            can be kept; ``tokens``, of token ids; ``name``, of anything else; empty where keys carry none.
        prefix: What the keys of a model configuration start with; of content, whatever is outside the catalog.
        place: Its one key, by its digest; None where there is no digest.
        gc_role: What a collector does with it.
        max_bytes: Longest that a server takes; None for its own limit of uploads.
        accept: Whether bytes that a server is sent belong under a key; raises CorruptError or ArgumentError. Not asked
            of sealed bytes, nor where ``digest`` says all.
        names: What the bytes of an entry name, the most important first; raises CorruptError or ArgumentError.
        verify: The deep check of content by its digest; returns whether it could be looked at.
        is_verified: Whether the entries of this kind, and that what they name is there, are part of a check.
        is_copied: Whether a copy of a store takes it: content first, the catalog afterwards.
        advice: How a damaged one is replaced.
    """

    name: str
    pattern: re.Pattern[str]
    digest: Literal["sha256", "tokens", "name", ""]
    prefix: Callable[[KeySpace], str]
    place: Callable[[KeySpace, str], str] | None
    gc_role: GcRole
    max_bytes: int | None = MAX_ENTRY_BYTES
    accept: _Accept | None = None
    names: _Names | None = None
    verify: Callable[[ObjectReader, str], bool] | None = None
    is_verified: bool = True
    is_copied: bool = True
    advice: str = "encode the document again"

    @property
    def is_catalog(self) -> bool:
        """Whether it says what belongs to what: small, many, replaced, and a row of a folder's database."""
        return self.pattern.pattern.startswith(_CATALOG)


def kind_of(key: str) -> KeyKind | None:
    """The kind of a key.

    Args:
        key: A key.

    Returns:
        The row; None for an unknown kind.
    """
    found = find_kind(key)
    return found[0] if found else None


def kinds(role: GcRole | None = None) -> list[KeyKind]:
    """The kinds that a collector treats alike; None: all."""
    return [kind for kind in KINDS if role in (None, kind.gc_role)]


def key_digest(key: str) -> str:
    """The digest that a key carries, whatever it is of."""
    found = find_kind(key)
    return found[1] if found else ""


def content_digest(key: str) -> str | None:
    """The digest of a content-addressed key (``.kvw``, ``.kvp``).

    Args:
        key: A key.

    Returns:
        SHA-256 of the object's bytes; None for any other key.
    """
    found = find_kind(key)
    return found[1] if found and found[0].digest == "sha256" else None


def is_intact(key: str, data: Data) -> bool:
    """Whether bytes are those that a content-addressed key names; of any other key, all are."""
    digest = content_digest(key)
    return digest is None or hashlib.sha256(data).hexdigest() == digest


def is_misplaced(key: str, space: KeySpace | None = None) -> bool:
    """Whether an object lies in a model configuration where none of its kind does, so that nothing leads to it."""
    found = find_kind(key)
    if found is None or found[0].place is None:
        return False
    if space is None and _IN_A_SPACE.match(key):
        space = space_of(key)
    return space is not None and found[0].place(space, found[1]) != key


def check_place(key: str) -> str:
    """Check a key that something is to be written under."""
    if is_misplaced(check_key(key)):
        msg = f"{key[:200]!r} is not where an object of its kind and digest lies: make the key with KeySpace"
        raise ArgumentError(msg)
    return key


def entity_tag(key: str, data: bytes) -> str:
    """Strong entity tag of an object."""
    return content_digest(key) or hashlib.sha256(data).hexdigest()


def mark(key: str) -> bytes:
    """What verifiers and surveys remember of a key: its digest where there is one, else the key itself."""
    return bytes.fromhex(key_digest(key)) or key.encode()


def max_bytes(key: str, content_bytes: int) -> int | None:
    """Longest object that a server takes under a key."""
    if is_misplaced(key):
        return None
    kind = kind_of(key)
    if kind is None:
        return MAX_ENTRY_BYTES if is_catalog_key(key) and key.endswith(".json") else None
    return content_bytes if kind.max_bytes is None else kind.max_bytes


def check_object(key: str, data: Data) -> None:
    """Whether bytes belong under a key, as far as a server that is sent them can tell. Sealed ones are opaque."""
    kind = kind_of(key)
    if kind is None:
        raise ArgumentError("the catalog has no entries of this name")
    if kind.accept is not None and bytes(data[: len(SEALED_MAGIC)]) != SEALED_MAGIC:
        kind.accept(key, data)


def find_kind(key: str) -> tuple[KeyKind, str] | None:
    """The kind of a key, and the digest that the key carries; None for an unknown kind."""
    in_catalog = is_catalog_key(key)
    for kind in KINDS:
        if kind.is_catalog == in_catalog and (match := kind.pattern.fullmatch(key)):
            return kind, match["digest"] if kind.digest else ""
    return None


# What rows name.


def _accept_text(key: str, data: Data) -> None:
    """Whether the tokens are those of the key is for readers to check, as they do."""
    del key
    if bytes(data[: len(TEXT_MAGIC)]) != TEXT_MAGIC:
        raise CorruptError("not a text of kvwire's")


def _accept_entry(key: str, data: Data) -> None:
    space, entry = space_of(key), CatalogEntry.from_json(bytes(data))
    keys = {space.document(entry.document_id)}
    if entry.token_digest:
        keys.add(space.token_entry(entry.token_digest))
    if key not in keys:
        raise CorruptError("the entry speaks of another document than its key")
    if entry.blob_key and not entry.blob_key.startswith(f"v1/{space.tenant}/"):
        raise CorruptError("the entry's blob lies in another namespace")


def read_entry(key: str, data: bytes, **wanted: str) -> CatalogEntry:
    """Parse an entry with the wanted values of these fields; refuse one that leads into another tenant's blobs."""
    entry = CatalogEntry.from_json(data)
    leads_away = not entry.is_text and entry.blob_key != space_of(key).blob(entry.sha256)
    if leads_away or (wanted and wanted != {name: getattr(entry, name) for name in wanted}):
        msg = f"the catalog entry {key} speaks of another document, tenant or model: write the document again"
        raise CorruptError(msg)
    return entry


def _entry_names(key: str, data: bytes) -> list[ObjectRef]:
    space, entry = space_of(key), read_entry(key, data)
    if entry.parts:
        blobs = [ObjectRef(space.blob(part.sha256), "blob", part.size) for part in entry.parts]
        digests = (entry.parts[0].token_digest, entry.token_digest)  # the second for what indexes the document
        keys = [*map(space.text, digests), *(space.part_text(part.sha256) for part in entry.parts[1:])]
        texts = [ObjectRef(key, "text", is_needed=False) for key in keys]
    else:
        blobs = [] if entry.is_text else [ObjectRef(entry.blob_key, "blob", entry.size)]
        texts = (
            [ObjectRef(space.text(entry.token_digest), "text", is_needed=entry.is_text)] if entry.token_digest else []
        )
    return [*blobs, *texts, *_profile(space, entry.profile_digest)]


def _profile(space: KeySpace, digest: str, *, is_needed: bool = True) -> list[ObjectRef]:
    return [ObjectRef(space.profile(digest), "profile", is_needed=is_needed)] if digest else []


def _at(read: Callable[[bytes], Any], key_of: Callable[[KeySpace, Any], str], problem: str) -> _Accept:
    """Whether a record lies where ``key_of`` says."""

    def accept(key: str, data: Data) -> None:
        if key_of(space_of(key), read(bytes(data))) != key:
            raise CorruptError(problem)

    return accept


def _text_of(read: Callable[[bytes], Any]) -> _Names:
    """The text that a record is about, and may outlive."""
    return lambda key, data: [ObjectRef(space_of(key).text(read(data).token_digest), "text", is_needed=False)]


def _donor_names(key: str, data: bytes) -> list[ObjectRef]:
    entry = DonorEntry.from_json(data)
    if not key.endswith(f"/{entry.token_digest}.json"):
        raise CorruptError("the entry is of another text than its key")
    return [ObjectRef(space_of(key).text(entry.token_digest), "text", is_needed=False)]


def _report_names(key: str, data: bytes) -> list[ObjectRef]:
    digest = LinkReportShift.from_json(data).shift
    return [ObjectRef(space_of(key).shift(digest), "link shift", is_needed=False)] if digest else []


def _edit_report(data: bytes) -> dict[str, Any]:
    return parse_object(data, "the report on edits", "run kvwire check-model --edits again")


def _kept_names(key: str, data: bytes) -> list[ObjectRef]:
    space, kept = space_of(key), KeptRepair.from_json(data)
    rows = [ObjectRef(space.kept_rows(part.sha256), "kept rows", part.size) for part in kept.parts if part.count]
    return [*rows, *_profile(space, kept.profile_digest)]


_accept_prefix = _at(
    PrefixEntry.from_json,
    lambda space, entry: space.prefix_entry(prefix_digest(entry.scheme, entry.chunk_hash)),
    "the entry is of another prefix than its key",
)
_accept_last_use = _at(
    LastUse.from_json,
    lambda space, mark: space.last_use(mark.document_id),
    "the mark is of another document than its key",
)
_accept_kept = _at(
    KeptRepair.from_json,
    lambda space, kept: space.kept_repair(kept.digest),
    "the kept repair is of other documents than its key",
)
_accept_model = _at(
    ModelRecord.from_json,
    lambda space, told: KeySpace.of(space.tenant, told.meta.config_digest()).model_record,
    "the record is of another configuration than its key",
)
_IN_A_SPACE = re.compile(r"v1/[0-9a-f]{32}/[0-9a-f]{16}/")
# Folders of two digits keep listings of file systems short.
_CATALOG = r"v1/[0-9a-f]{32}/[0-9a-f]{16}/catalog/"
_FOLDED = r"(?P<fold>[0-9a-f]{2})/(?P<digest>(?P=fold)[0-9a-f]{62})\.json"
_FEATURE = _FOLDED.replace(r"\.json", r"/[0-9a-f]{64}\.json")
_CONTENT = r"(?:.*/)?(?P<digest>[0-9a-f]{64})"


def _content(name: str, ending: str, prefix: Callable[[KeySpace], str], place: _Place, **more: Any) -> KeyKind:  # noqa: ANN401
    """Content of any length by the SHA-256 of its bytes, deleted once nothing names it, unless more says otherwise."""
    usual: dict[str, Any] = {"digest": "sha256", "gc_role": "content", "max_bytes": None}
    pattern = re.compile(rf"{_CONTENT}\.{ending}")
    return KeyKind(name, pattern, prefix=prefix, place=place, **usual | more)


def _entry(name: str, path: str, prefix: Callable[[KeySpace], str], place: _Place = None, **more: Any) -> KeyKind:  # noqa: ANN401
    """Small objects of the catalog, read for what they name, unless more says otherwise."""
    usual: dict[str, Any] = {"digest": "", "gc_role": "root"}
    return KeyKind(name, re.compile(_CATALOG + path), prefix=prefix, place=place, **usual | more)


_TEXT: dict[str, Any] = {"max_bytes": MAX_TEXT_BYTES, "accept": _accept_text}
_DOCUMENT: dict[str, Any] = {"accept": _accept_entry, "names": _entry_names}
_FIT: dict[str, Any] = {"advice": "fit or copy the profile again"}
_MEASURE: dict[str, Any] = {"advice": "run kvwire check-model again"}

# fmt: off
KINDS: tuple[KeyKind, ...] = (
    _content("blob", "kvw", lambda s: s.root, KeySpace.blob, verify=check_blob),
    _content("profile", "kvp", lambda s: s.profiles, KeySpace.profile, verify=check_profile, **_FIT),
    _content("text", "kvt", lambda s: s.texts, KeySpace.text, digest="tokens", verify=check_text, **_TEXT),
    _content("part's text", "kvtp", lambda s: s.texts, KeySpace.part_text,
             digest="name", verify=check_part_text, **_TEXT),
    _content("kept rows", "kvr", lambda s: s.all_kept_rows, KeySpace.kept_rows, verify=check_blob,
             advice="the next repair of these documents writes them again"),
    _content("link shift", "kvs", lambda s: s.shifts, KeySpace.shift, verify=check_shift, **_MEASURE),
    _entry("document entry", "doc/" + _FOLDED, lambda s: s.documents, digest="name", **_DOCUMENT),
    _entry("token entry", "tokens/" + _FOLDED, lambda s: s.token_entries, KeySpace.token_entry,
           digest="tokens", gc_role="alias", **_DOCUMENT),
    _entry("prefix entry", "prefix/" + _FOLDED, lambda s: s.prefix_entries, KeySpace.prefix_entry,
           digest="name", gc_role="derived", accept=_accept_prefix, names=_text_of(PrefixEntry.from_json),
           advice="index the document again (kvwire store index)"),
    _entry("last use", "used/" + _FOLDED, lambda s: s.last_uses,
           digest="name", gc_role="derived", accept=_accept_last_use, names=_text_of(LastUse.from_json),
           is_verified=False,  # without it, a document counts as used when it was written
           advice="the next use writes it again"),
    _entry("donor entry", "donors/" + _FEATURE, lambda s: s.donor_entries,
           digest="name", gc_role="derived", accept=lambda key, data: _donor_names(key, bytes(data)),
           names=_donor_names, advice="index the document again (kvwire store index --index donors)"),
    _entry("current profile", r"profile\.json", lambda s: s.current_profile,
           accept=lambda _, data: ProfilePointer.from_json(bytes(data)),
           names=lambda key, data: _profile(space_of(key), ProfilePointer.from_json(data).profile_digest),
           advice="kvwire store rebuild writes it again"),
    _entry("link report", r"links\.json", lambda s: s.link_report,
           accept=lambda key, data: _report_names(key, bytes(data)), names=_report_names,
           **_MEASURE),
    _entry("edit report", r"edits\.json", lambda s: s.edit_report,
           accept=lambda _, data: _edit_report(bytes(data)), names=lambda _, data: [*_edit_report(data)][:0],
           advice="run kvwire check-model --edits again"),
    _entry("kept repair", "kept/" + _FOLDED, lambda s: s.kept_repairs, KeySpace.kept_repair,
           digest="name", accept=_accept_kept, names=_kept_names,
           advice="the next repair of these documents writes it again"),
    _entry("model record", r"model\.json", lambda s: s.model_record,  # never deleted
           accept=_accept_model,
           names=lambda key, data: _profile(
               space_of(key), ModelRecord.from_json(data).profile_digest, is_needed=False),
           advice="encode any document again, which writes it anew"),
    _entry("announcement", r"collecting/[0-9a-f]{32}\.json", lambda s: s.announcements,
           gc_role="lease", accept=lambda _, data: Announcement.from_json(bytes(data)), is_copied=False),
)
# fmt: on
