"""A prefix entry: which document holds the tokens that a chained hash of a prompt's chunks stands for."""

from __future__ import annotations

import hashlib
import hmac
import json
import re

from msgspec import Struct
from msgspec.structs import asdict

from kvwire._json import check_version, json_object, record
from kvwire.errors import ArgumentError
from kvwire.store.catalog_entry import MAX_ENTRY_BYTES
from kvwire.store.keys import MAX_NAME_CHARS

VERSION = 1
_WHAT = "a prefix entry"
_SCHEME = re.compile(r"[a-z][a-z0-9]{0,30}-[1-9][0-9]{0,6}")
_HASH = re.compile(r"(?:[0-9a-f]{2}){8,64}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MOST_TOKENS = 1 << 32


class PrefixEntry(Struct, frozen=True):
    """One chunk of one document, and so all tokens before it. JSON in a store; docs/format.md tells the fields.

    Attributes:
        scheme: What made the hash, with the tokens of its chunks: ``lmcache-256``.
        chunk_hash: Of the chunk and all before it, in hexadecimal.
        document_id: A document whose text begins with these chunks.
        token_digest: Of that document's whole text.
        start: First token of the chunk.
        stop: Behind its last token.
    """

    scheme: str
    chunk_hash: str
    document_id: str
    token_digest: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        """Refuse fields that contradict each other or are out of range."""
        size = self.stop - self.start
        if not (_SCHEME.fullmatch(self.scheme) and _HASH.fullmatch(self.chunk_hash)):
            msg = "a prefix entry names a scheme with the tokens of a chunk, and a hash of 8 to 64 bytes"
        elif not 0 < len(self.document_id) <= MAX_NAME_CHARS or not _DIGEST.fullmatch(self.token_digest):
            msg = "a prefix entry names a document and the SHA-256 of its token ids"
        elif not 0 <= self.start < self.stop < _MOST_TOKENS or self.start % size or not self._fits(size):
            msg = "a prefix entry's start and stop are those of a chunk of its scheme"
        else:
            return
        raise ArgumentError(msg)

    @property
    def chunk(self) -> int:
        """Number of the chunk in its document."""
        return self.start // (self.stop - self.start)

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same entry."""
        return json.dumps({"version": VERSION} | asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> PrefixEntry:
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
        return record(fields, cls, _WHAT, "index the document again (kvwire store index)")

    def _fits(self, size: int) -> bool:
        return int(self.scheme.rpartition("-")[2]) == size


def prefix_digest(scheme: str, chunk_hash: str, secret: bytes = b"") -> str:
    """What the key of a prefix entry carries.

    A chain of hashes can be guessed chunk by chunk, so that the names of whoever has a secret are keyed with it.
    """
    told = f"kvwire prefix entry\0{scheme}\0{chunk_hash}".encode()
    return hmac.new(secret, told, hashlib.sha256).hexdigest() if secret else hashlib.sha256(told).hexdigest()
