"""When saved prompts were used last, coarsely: the age of one small object each, which readers write now and then."""

from __future__ import annotations

import json
import re

from msgspec import Struct
from msgspec.structs import asdict

from kvwire._json import check_version, json_object, record
from kvwire.errors import ArgumentError
from kvwire.store.keys import MAX_NAME_CHARS

VERSION = 1
SAVED = ("prompts/", "saved/", "sessions/")
"""What names of documents begin with that were saved from prompts, and not encoded by name."""
_WHAT = "the mark of a last use"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_BYTES = 1 << 16


class LastUse(Struct, frozen=True):
    """Says that a document was used when this object was written. JSON in a store.

    Attributes:
        document_id: The document.
        token_digest: Of its text, by which a collector knows whether anything of it is left.
    """

    document_id: str
    token_digest: str

    def __post_init__(self) -> None:
        """Refuse what names no document."""
        if not 0 < len(self.document_id) <= MAX_NAME_CHARS or not _DIGEST.fullmatch(self.token_digest):
            raise ArgumentError("the mark of a last use names a document and the SHA-256 of its token ids")

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same document."""
        return json.dumps({"version": VERSION} | asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> LastUse:
        """Read ``to_json``; names that are not known are passed over."""
        fields = check_version(json_object(data, _WHAT, _MOST_BYTES), VERSION, _WHAT)
        return record(fields, cls, _WHAT, "the next use writes it again")
