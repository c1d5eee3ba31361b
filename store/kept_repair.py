"""What a store says of rows that a repair computed, and of the documents in whose order they are valid."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, Struct

from kvwire._json import Sha256OrEmpty  # noqa: TC001 - msgspec evaluates annotations
from kvwire.errors import ArgumentError
from kvwire.store.records import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT_LEVEL = 255
"""In place of a level: all documents were computed from their texts."""
_Document = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(?::[0-9a-f]{64})?\Z")]


class KeptRows(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The rows of one document.

    Attributes:
        sha256: Of the blob that holds them, as it is stored; empty where none were computed.
        size: Of that blob, in bytes.
        tokens: Which of the document's tokens they are: bit i % 8 of byte i // 8 stands for token i.
    """

    sha256: Sha256OrEmpty
    size: Annotated[int, Meta(ge=0, lt=1 << 40)]
    tokens: bytes

    @property
    def count(self) -> int:
        """How many."""
        return int.from_bytes(self.tokens).bit_count()


class KeptRepair(Record, frozen=True):
    """Repaired rows of the documents of a prompt, in its order. JSON in a store; docs/format.md tells the fields.

    Attributes:
        documents: Digest of each document's token ids, in the order of the prompt; behind it, after a colon, that of
            the neutral prefix that the document was computed behind, where there is one, and of the system text that
            the prompt begins with.
        level: The coarsest level that the documents stood at while rows were computed; ``TEXT_LEVEL`` without any.
        profile_digest: SHA-256 of the profile that the rows are coded with; empty where they carry their own.
        parts: Rows of each document.
    """

    what: ClassVar[str] = "a kept repair"
    advice: ClassVar[str] = "the next repair of these documents writes it again"

    documents: Annotated[tuple[_Document, ...], Meta(min_length=1)]
    level: Annotated[int, Meta(ge=0, le=TEXT_LEVEL)]
    profile_digest: Sha256OrEmpty
    parts: tuple[KeptRows, ...]

    def __post_init__(self) -> None:
        """Refuse what contradicts itself."""
        sound = all((part.sha256 and part.size) or not (part.count or part.sha256 or part.size) for part in self.parts)
        if not sound or len(self.parts) != len(self.documents):
            raise ArgumentError("a kept repair names its documents in order, and the rows of each")

    @property
    def count(self) -> int:
        """How many rows, of all documents."""
        return sum(part.count for part in self.parts)

    @property
    def digest(self) -> str:
        """What its key has: of the order of the documents alone."""
        return order_digest(self.documents)


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
