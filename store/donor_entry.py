"""A donor entry: which document's text has a feature of a sketch."""

from __future__ import annotations

import hashlib
import hmac
import json
import re

from msgspec import Struct
from msgspec.structs import asdict

from kvwire._json import check_version, json_object, record
from kvwire.errors import ArgumentError
from kvwire.store.keys import MAX_NAME_CHARS
from kvwire.store.records import MAX_ENTRY_BYTES

VERSION = 1
_WHAT = "a donor entry"
_SCHEME = re.compile(r"[a-z][a-z0-9]{0,30}-[1-9][0-9]{0,6}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class DonorEntry(Struct, frozen=True):
    """One document that has a feature. JSON in a store; docs/format.md tells the fields.

    Attributes:
        scheme: What made the feature: ``sketch-64``.
        document_id: A document with this text.
        token_digest: Of the document's whole text.
    """

    scheme: str
    document_id: str
    token_digest: str

    def __post_init__(self) -> None:
        """Refuse fields that are out of range."""
        is_named = 0 < len(self.document_id) <= MAX_NAME_CHARS and _DIGEST.fullmatch(self.token_digest)
        if not (is_named and _SCHEME.fullmatch(self.scheme)):
            raise ArgumentError("a donor entry names a scheme, a document and the SHA-256 of its token ids")

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same entry."""
        return json.dumps({"version": VERSION} | asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> DonorEntry:
        """Read ``to_json``; names that are not known are passed over.

        Args:
            data: As stored.

        Returns:
            The entry.

        Raises:
            CorruptError: A field is missing or impossible.
            FormatVersionError: A later version wrote it.
        """
        fields = check_version(json_object(data, _WHAT, MAX_ENTRY_BYTES), VERSION, _WHAT)
        return record(fields, cls, _WHAT, "index the document again (kvwire store index --index donors)")


def feature_digest(scheme: str, feature: int, writer: str = "", secret: bytes = b"") -> str:
    """What keys carry of a feature.

    Features of guessed texts can be computed, so that the names of whoever has a secret are keyed with it.

    Args:
        scheme: What made it.
        feature: Of 64 bits.
        writer: Namespace inside the tenant; empty: that of all.
        secret: The tenant's.
    """
    told = f"kvwire donor\0{scheme}\0{writer}\0{feature:016x}".encode()
    return hmac.new(secret, told, hashlib.sha256).hexdigest() if secret else hashlib.sha256(told).hexdigest()
