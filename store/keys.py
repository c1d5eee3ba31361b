"""Names of objects: which strings are keys, and where each object lies; ``key_kinds`` tells what kinds there are.

Layout: ``v1/<tenant hash>/<model configuration>/...``. Tenants are told apart by a keyed hash, so a reader who knows a
tenant's name but not the salt can neither list nor guess its keys.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from kvwire._printable import name_problem
from kvwire.errors import ArgumentError

MAX_KEY_CHARS = 512
MAX_PART_CHARS = 200  # a file name may have 255 bytes; temporary files need a few more than the key
MAX_NAME_CHARS = 4096  # document ids and tenant names: hashed, never part of a path
TENANT_DIGITS = 32
CONFIG_DIGITS = 16

# A part never begins with a dot: that rules out "." and "..", and leaves dot files to stores for their own use.
_PART = r"[A-Za-z0-9_=+@~-][A-Za-z0-9_=+@~.-]*"
_KEY = re.compile(rf"{_PART}(?:/{_PART})*")
_PREFIX = re.compile(rf"(?:{_PART}/)*(?:{_PART})?")
_HEX64 = re.compile(r"[0-9a-f]{64}")
_HEX32 = re.compile(r"[0-9a-f]{32}")
_CATALOG = re.compile(r"v1/[^/]+/[^/]+/catalog/.+")
_ANNOUNCEMENT = re.compile(r"v1/[^/]+/[^/]+/catalog/collecting/")


def check_key(key: str) -> str:
    """Check a key.

    Args:
        key: What may be a key.

    Returns:
        ``key``, unchanged.

    Raises:
        ArgumentError: It could name something outside the store.
    """
    parts_fit = all(len(part) <= MAX_PART_CHARS for part in key.split("/"))
    if len(key) > MAX_KEY_CHARS or not parts_fit or not _KEY.fullmatch(key):
        raise ArgumentError(
            f"{key[:80]!r} is not a key: use letters, digits and _ = + @ ~ . - in parts joined by single slashes, "
            f"no part starting with a dot, at most {MAX_KEY_CHARS} characters"
        )
    return key


def is_key(name: str) -> bool:
    """Whether a name is a key, among other things that lie beside objects."""
    with suppress(ArgumentError):
        return bool(check_key(name))
    return False


def check_after(prefix: str, after: str) -> tuple[str, str]:
    """Check where a listing starts.

    Args:
        prefix: What the keys start with.
        after: A key, or empty.

    Returns:
        Both, unchanged.

    Raises:
        ArgumentError: No key could start with ``prefix``, or ``after`` is no key.
    """
    if len(prefix) > MAX_KEY_CHARS or not _PREFIX.fullmatch(prefix):
        raise ArgumentError(f"{prefix[:80]!r} is not the beginning of a key")
    if after:
        check_key(after)
    return prefix, after


def is_catalog_key(key: str) -> bool:
    """Whether a key is of an object that says what belongs to what: small, many, and replaced.

    Args:
        key: A key.

    Returns:
        True for whatever lies in a configuration's catalog, of a known kind or not.
    """
    return _CATALOG.fullmatch(key) is not None


def is_announcement(key: str) -> bool:
    """Whether a key, or all that start with it, are announcements of a collector, who deletes something next."""
    return _ANNOUNCEMENT.match(key) is not None


def check_digest(digest: str, what: str) -> str:
    """Check a SHA-256."""
    if not _HEX64.fullmatch(digest):
        raise ArgumentError(f"{what} must be 64 lower-case hexadecimal digits, got {digest[:80]!r}")
    return digest


def tenant_hash(name: str, salt: bytes = b"") -> str:
    """Keyed hash that stands for a tenant in keys: HMAC-SHA-256 under the deployment's secret salt.

    Args:
        name: The tenant's name, 1 to 4096 characters.
        salt: The deployment's secret.

    Returns:
        The hash's first 32 hexadecimal digits.

    Raises:
        ArgumentError: The name is empty, too long or no proper text.
    """
    return hmac.new(salt, b"tenant:" + _named(name, "tenant"), hashlib.sha256).hexdigest()[:TENANT_DIGITS]


def check_tenant(digest: str) -> str:
    """Check a tenant's hash."""
    if not _HEX32.fullmatch(digest):
        raise ArgumentError(f"a tenant's hash is {TENANT_DIGITS} lower-case hexadecimal digits, got {digest[:80]!r}")
    return digest


def is_tenant(name: str) -> bool:
    """Whether a part of a key can be a tenant's hash."""
    return _HEX32.fullmatch(name) is not None


def check_new_name(name: str, what: str) -> str:
    """Give a name of something new back; what has a name refused here already stays readable.

    Raises:
        ArgumentError: It would deceive a reader of a list or a log: it holds a control character, half of a surrogate
            pair, a line separator, or a mark that turns the direction of writing.
    """
    problem = name_problem(name)
    if problem:
        raise ArgumentError(f"the {what}'s name {name[:80]!r} holds {problem}: name it otherwise")
    return name


def _named(name: str, what: str) -> bytes:
    if not name or len(name) > MAX_NAME_CHARS:
        raise ArgumentError(f"a {what} needs a name of 1 to {MAX_NAME_CHARS} characters, got {len(name)}")
    try:
        return name.encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"the {what}'s name holds half a surrogate pair: pass proper text") from error


def _below(path: str) -> Any:  # noqa: ANN401 - a property, which types of attributes do not say
    return property(lambda space: space.root + path)


@dataclass(frozen=True)
class KeySpace:
    """The keys of one tenant and one model configuration.

    Methods give the key of one object by the digest that names it (ArgumentError where that is no SHA-256), all else
    is what the keys of a kind start with, or the one key that there is.

    Attributes:
        tenant: The tenant's hash.
        config: The first 16 hexadecimal digits of the configuration's digest.
    """

    tenant: str
    config: str

    shifts: ClassVar[str] = _below("shifts/")
    """Prefix of the link shifts."""
    texts: ClassVar[str] = _below("texts/")
    """Prefix of the texts."""
    profiles: ClassVar[str] = _below("profiles/")
    """Prefix of the profiles."""
    catalog: ClassVar[str] = _below("catalog/")
    """Prefix of everything that says what belongs to what."""
    documents: ClassVar[str] = _below("catalog/doc/")
    """Prefix of the catalog entries by document."""
    token_entries: ClassVar[str] = _below("catalog/tokens/")
    """Prefix of the catalog entries by token sequence."""
    prefix_entries: ClassVar[str] = _below("catalog/prefix/")
    """Prefix of the catalog entries by chained hash of a prompt's chunks."""
    last_uses: ClassVar[str] = _below("catalog/used/")
    """Prefix of the marks of last uses."""
    donor_entries: ClassVar[str] = _below("catalog/donors/")
    """Prefix of the catalog entries by features of texts."""
    current_profile: ClassVar[str] = _below("catalog/profile.json")
    """Key of the pointer to the profile in use."""
    link_report: ClassVar[str] = _below("catalog/links.json")
    """Where what was measured of linked documents lies."""
    edit_report: ClassVar[str] = _below("catalog/edits.json")
    """Where what was measured of edited caches lies."""
    all_kept_rows: ClassVar[str] = _below("kept/")
    """Prefix of rows that repairs computed."""
    kept_repairs: ClassVar[str] = _below("catalog/kept/")
    """Prefix of what is kept of orders of documents."""
    model_record: ClassVar[str] = _below("catalog/model.json")
    """Key of the model's record."""
    announcements: ClassVar[str] = _below("catalog/collecting/")
    """Prefix of what collectors are about to delete."""

    @classmethod
    def of(cls, tenant: str, config_digest: str) -> KeySpace:
        """Build from whole digests.

        Args:
            tenant: The tenant's hash.
            config_digest: The full SHA-256 of ``CacheMeta.config_digest``.

        Returns:
            The key space.

        Raises:
            ArgumentError: ``config_digest`` is no SHA-256.
        """
        return cls(tenant, check_digest(config_digest, "a configuration digest")[:CONFIG_DIGITS])

    @property
    def root(self) -> str:
        """What all keys of this space start with, trailing slash included."""
        return f"v1/{self.tenant}/{self.config}/"

    def blob(self, sha256: str) -> str:
        """Key of a blob, by its content."""
        return f"{self.root}{check_digest(sha256, 'the SHA-256 of a blob')[:2]}/{sha256}.kvw"

    def profile(self, sha256: str) -> str:
        """Key of a profile, by its content."""
        return f"{self.profiles}{check_digest(sha256, 'a profile digest')}.kvp"

    def text(self, token_digest: str) -> str:
        """Key of a text, by its token ids."""
        return f"{self.texts}{check_digest(token_digest, 'a token digest')[:2]}/{token_digest}.kvt"

    def part_text(self, sha256: str) -> str:
        """Key of the text of a document's part, by the part's blob: entries then name both by one digest."""
        return f"{self.texts}{check_digest(sha256, 'the SHA-256 of a blob')[:2]}/{sha256}.kvtp"

    def shift(self, sha256: str) -> str:
        """Key of a link shift, by its content."""
        return f"{self.shifts}{check_digest(sha256, 'the digest of a link shift')[:2]}/{sha256}.kvs"

    def document(self, document_id: str) -> str:
        """Key of the catalog entry of a document."""
        digest = hashlib.sha256(_named(document_id, "document")).hexdigest()
        return f"{self.documents}{digest[:2]}/{digest}.json"

    def token_entry(self, token_digest: str) -> str:
        """Key of the catalog entry of a token sequence."""
        return f"{self.token_entries}{check_digest(token_digest, 'a token digest')[:2]}/{token_digest}.json"

    def prefix_entry(self, digest: str) -> str:
        """Key of the entry of a prompt's prefix."""
        return f"{self.prefix_entries}{check_digest(digest, 'the digest of a prefix')[:2]}/{digest}.json"

    def last_use(self, document_id: str) -> str:
        """Key of the mark of a document's last use, by the digest of its entry's key."""
        digest = hashlib.sha256(_named(document_id, "document")).hexdigest()
        return f"{self.last_uses}{digest[:2]}/{digest}.json"

    def donor_entry(self, feature: str, token_digest: str = "") -> str:
        """Key of the entry of a text below one of its features; without a text, what all of the feature start with."""
        folder = f"{self.donor_entries}{check_digest(feature, 'the digest of a feature')[:2]}/{feature}/"
        return f"{folder}{check_digest(token_digest, 'a token digest')}.json" if token_digest else folder

    def kept_rows(self, sha256: str) -> str:
        """Key of rows that a repair computed, by their content."""
        return f"{self.all_kept_rows}{check_digest(sha256, 'the SHA-256 of kept rows')[:2]}/{sha256}.kvr"

    def kept_repair(self, order_digest: str) -> str:
        """Key of what is kept of an order of documents."""
        check_digest(order_digest, "the digest of an order of documents")
        return f"{self.kept_repairs}{order_digest[:2]}/{order_digest}.json"

    def announcement(self, name: str) -> str:
        """Key of one collector's announcement."""
        return f"{self.announcements}{name}.json"


_space = lru_cache(64)(KeySpace)  # a listing's keys are of one


def space_of(key: str) -> KeySpace:
    """The tenant and model configuration that a key of theirs tells."""
    return _space(*key.split("/", 3)[1:3])
