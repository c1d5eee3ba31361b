"""References to documents: where a text is, what is wrong with it, and how to read it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvwire.errors import ArgumentError, NotFoundError
from kvwire.runtime.text_files import MOST_BYTES, decoded_text, read_part

if TYPE_CHECKING:
    from kvwire.offline.bucket import Bucket

Kind: TypeAlias = Literal["text", "lines", "parquet", "dataset"]


@dataclass(frozen=True)
class DocumentRef:
    """One document of a source, read when it is encoded.

    Attributes:
        document_id: Its name in the catalog.
        source: The file, object or dataset, for messages.
        kind: A text file, a line of JSON, a row of Parquet or of a dataset.
        name: Path of the file or folder, or the object's key.
        base: Address of the bucket that holds the object; empty for files.
        column: The text's field; empty for text files.
        at: First byte of a line, or a row's number.
        size: Bytes of the file, the line or the text.
        problem: Why it cannot be read, and what to do, if listing found out.
    """

    document_id: str
    source: str
    kind: Kind
    name: str
    base: str = ""
    column: str = ""
    at: int = 0
    size: int = 0
    problem: str = ""

    def to_json(self) -> str:
        """One line of ASCII; other characters are escaped."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> DocumentRef:
        """Parse ``to_json``.

        Args:
            line: Its output.

        Returns:
            The same reference.
        """
        return cls(**json.loads(line))


class TextReader:
    """Reads documents' texts; files of rows stay open in between."""

    def read(self, ref: DocumentRef) -> str:
        """Read one text."""
        if ref.problem:
            raise ArgumentError(ref.problem)
        if ref.kind in ("text", "lines"):
            end = ref.at + ref.size if ref.kind == "lines" else MOST_BYTES + 1
            data = _open_bucket(ref.base).read(ref.name, ref.at, end) if ref.base else read_part(ref.name, ref.at, end)
            return decoded_text(data, ref.source) if ref.kind == "text" else text_of_line(data, ref.column)
        from kvwire.offline import tables

        text = (tables.parquet_text if ref.kind == "parquet" else tables.dataset_text)(ref.name, ref.column, ref.at)
        if not isinstance(text, str):
            raise ArgumentError(f"row {ref.at} has no text in {ref.column!r}; fill it in or leave the row out")
        return text


@lru_cache(maxsize=8)
def _open_bucket(address: str) -> Bucket:
    from kvwire.offline.bucket import Bucket  # boto3 is slow to import

    return Bucket(address)


def object_of_line(line: bytes) -> dict[str, Any]:
    """Parse a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"the line is no JSON ({type(error).__name__}); correct it or leave it out") from None
    if not isinstance(value, dict):
        raise ArgumentError("the line is no JSON object; write one object a line")
    return value


def text_of_line(line: bytes, column: str) -> str:
    """The text field of a JSON line."""
    if not line:
        raise NotFoundError("the line is gone; run again, so that the file is listed again")
    text = object_of_line(line).get(column)
    if not isinstance(text, str):
        raise ArgumentError(f"the line has no text in {column!r}; name the field with --text-column")
    return text
