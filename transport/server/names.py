"""Names that uploads bring with them: none is taken that would deceive whoever sees it in a list or a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire._printable import name_problem
from kvwire.store import CatalogEntry
from kvwire.store.key_kinds import kind_of
from kvwire.transport.server.http_errors import RefusedError
from kvwire.types import SEALED_MAGIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.store import Data

_MOST_BYTES = 2 << 20
"""More than an entry, or a blob's metadata, may have."""
_ENTRIES = ("document entry", "token entry")


def check_names(key: str, data: Data) -> None:
    """Refuse an entry or a blob with a name that no new document, level or model may have. Sealed ones are opaque."""
    head = bytes(data[:_MOST_BYTES])
    for name in () if head.startswith(SEALED_MAGIC) else _names(key, head):
        problem = name_problem(name)
        if problem:
            words = f"a name in it holds {problem}: name the document, level or model otherwise and encode it again"
            raise RefusedError(422, words, reason="name")


def _names(key: str, head: bytes) -> Iterator[str]:
    kind = kind_of(key)
    name = kind.name if kind else ""
    if name == "blob":
        from kvwire.codec.format.naming import header_names

        yield from header_names(head)
    elif name in _ENTRIES:
        entry = CatalogEntry.from_json(head)
        yield entry.document_id
        yield from (level for level, _ in entry.levels)
