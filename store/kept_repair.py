"""What a store says of rows that a repair computed, and of the documents in whose order they are valid."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING

from msgspec import Struct

from kvwire._json import record
from kvwire.errors import ArgumentError, CorruptError
from kvwire.store.records import VERSION, versioned

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_LEVEL = 255
"""In place of a level: all documents were computed from their texts."""
_WHAT, _ADVICE = "a kept repair", "the next repair of these documents writes it again"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DOCUMENT = re.compile(r"[0-9a-f]{64}(?::[0-9a-f]{64})?")
_MOST_BYTES = 1 << 40


class KeptRows(Struct, frozen=True):
    """The rows of one document.

    Attributes:
        sha256: Of the blob that holds them, as it is stored; empty where none were computed.
        size: Of that blob, in bytes.
        tokens: Which of the document's tokens they are: bit i % 8 of byte i // 8 stands for token i.
    """

    sha256: str = ""
    size: int = 0
    tokens: bytes = b""

    @property
    def count(self) -> int:
        """How many."""
        return int.from_bytes(self.tokens).bit_count()


class KeptRepair(Struct, frozen=True):
    """Repaired rows of the documents of a prompt, in its order. JSON in a store; docs/format.md tells the fields.

    Attributes:
        documents: Digest of each document's token ids, in the order of the prompt; behind it, after a colon, that of
            the neutral prefix that the document was computed behind, where there is one, and of the system text that
            the prompt begins with.
        level: The coarsest level that the documents stood at while rows were computed; ``TEXT_LEVEL`` without any.
        profile_digest: SHA-256 of the profile that the rows are coded with; empty where they carry their own.
        parts: Rows of each document.
    """

    documents: tuple[str, ...]
    level: int
    profile_digest: str
    parts: tuple[KeptRows, ...]

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        named = all(_DOCUMENT.fullmatch(each) for each in self.documents)
        sound = bool(self.documents) and named and (not self.profile_digest or _DIGEST.fullmatch(self.profile_digest))
        parts = all(
            (_DIGEST.fullmatch(part.sha256) and 0 < part.size < _MOST_BYTES) if part.count else part == KeptRows()
            for part in self.parts
        )
        if not (sound and parts and len(self.parts) == len(self.documents) and 0 <= self.level <= TEXT_LEVEL):
            raise ArgumentError("a kept repair names its documents in order, and the rows of each")

    @property
    def count(self) -> int:
        """How many rows, of all documents."""
        return sum(part.count for part in self.parts)

    @property
    def digest(self) -> str:
        """What its key has: of the order of the documents alone."""
        return order_digest(self.documents)

    def to_json(self) -> bytes:
        """The bytes to store; the same for the same rows."""
        parts = [[part.sha256, part.size, base64.b64encode(part.tokens).decode()] for part in self.parts]
        fields = {
            "version": VERSION,
            "documents": self.documents,
            "level": self.level,
            "profile_digest": self.profile_digest,
            "parts": parts,
        }
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> KeptRepair:
        """Read ``to_json``.

        Args:
            data: As stored.

        Returns:
            What is kept.

        Raises:
            CorruptError: ``to_json`` did not write this.
            FormatVersionError: A later version wrote it.
        """
        fields = versioned(data, _WHAT)
        rows = record(fields.get("parts"), list[tuple[str, int, str]], f"{_WHAT}'s parts", _ADVICE)
        try:
            parts = [KeptRows(sha256, size, base64.b64decode(tokens, validate=True)) for sha256, size, tokens in rows]
        except ValueError as error:
            raise CorruptError(f"{_WHAT} is damaged ({error}): {_ADVICE}") from error
        return record(fields | {"parts": parts}, cls, _WHAT, _ADVICE)


def base_of(token_digest: str, neutral_digest: str) -> str:
    """A document as a kept repair names it.

    Args:
        token_digest: Of its token ids.
        neutral_digest: Of its neutral prefix; empty where there is none.

    Returns:
        The name.
    """
    return f"{token_digest}:{neutral_digest}" if neutral_digest else token_digest


def order_digest(documents: Sequence[str]) -> str:
    """What repaired rows depend on beside the model: the documents, in their order."""
    return hashlib.sha256("\n".join(documents).encode()).hexdigest()
