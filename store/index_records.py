"""Small records of the catalog by which documents are found or forgotten: prefixes, features of texts, last uses.

JSON in a store; docs/format.md tells the fields. Names that are not known are passed over.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import Annotated, ClassVar

from msgspec import Meta

from kvwire._json import Sha256  # noqa: TC001 - msgspec evaluates annotations
from kvwire.errors import ArgumentError
from kvwire.store.records import MOST_TOKENS, Name, Record

_SAVED = re.compile(r"(?:prompts|saved|sessions)/.*|head-[0-9a-f]{32}", re.DOTALL)
_SCHEME = r"^[a-z][a-z0-9]{0,30}-[1-9][0-9]{0,6}\Z"
_HASH = r"^(?:[0-9a-f]{2}){8,64}\Z"


class PrefixEntry(Record, frozen=True):
    """One chunk of one document, and so all tokens before it.

    Attributes:
        scheme: What made the hash, with the tokens of its chunks: ``lmcache-256``.
        chunk_hash: Of the chunk and all before it, in hexadecimal.
        document_id: A document whose text begins with these chunks.
        token_digest: Of that document's whole text.
        start: First token of the chunk.
        stop: Behind its last token.
    """

    what: ClassVar[str] = "a prefix entry"
    advice: ClassVar[str] = "index the document again (kvwire store index)"

    scheme: str
    chunk_hash: str
    document_id: Name
    token_digest: Sha256
    start: Annotated[int, Meta(ge=0)]
    stop: Annotated[int, Meta(lt=MOST_TOKENS)]

    def __post_init__(self) -> None:
        """Refuse what is no chunk of the scheme, and what a scheme of one's own may give."""
        if not (re.search(_SCHEME, self.scheme) and re.search(_HASH, self.chunk_hash)):
            raise ArgumentError("a prefix entry names a scheme with the tokens of a chunk, and a hash of 8 to 64 bytes")
        size = self.stop - self.start
        if size < 1 or self.start % size or self.scheme.rpartition("-")[2] != str(size):
            raise ArgumentError("a prefix entry's start and stop are those of a chunk of its scheme")

    @property
    def chunk(self) -> int:
        """Number of the chunk in its document."""
        return self.start // (self.stop - self.start)


class DonorEntry(Record, frozen=True):
    """One document that has a feature of a sketch, such as ``sketch-64``; ``token_digest`` is of its whole text."""

    what: ClassVar[str] = "a donor entry"
    advice: ClassVar[str] = "index the document again (kvwire store index --index donors)"

    scheme: Annotated[str, Meta(pattern=_SCHEME)]
    document_id: Name
    token_digest: Sha256


class LastUse(Record, frozen=True):
    """Says that a document was used when this object was written; by the digest a collector sees what is left of it."""

    what: ClassVar[str] = "the mark of a last use"
    advice: ClassVar[str] = "the next use writes it again"

    document_id: Name
    token_digest: Sha256


def is_saved(document_id: str) -> bool:
    """Whether a document was saved from a prompt, or is the head of one, and was not encoded by name."""
    return _SAVED.fullmatch(document_id) is not None


def prefix_digest(scheme: str, chunk_hash: str, secret: bytes = b"") -> str:
    """What the key of a prefix entry carries."""
    return _named(f"kvwire prefix entry\0{scheme}\0{chunk_hash}", secret)


def feature_digest(scheme: str, feature: int, writer: str = "", secret: bytes = b"") -> str:
    """What keys carry of a feature of 64 bits; writer: namespace inside the tenant, empty for that of all."""
    return _named(f"kvwire donor\0{scheme}\0{writer}\0{feature:016x}", secret)


def _named(told: str, secret: bytes) -> str:
    """A digest; keyed where there is a secret, since hashes and features of short texts can be guessed."""
    data = told.encode()
    return (hmac.new(secret, data, hashlib.sha256) if secret else hashlib.sha256(data)).hexdigest()
