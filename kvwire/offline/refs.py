"""References to documents: where a text is, what is wrong with it, and how to read it, from files and from rows.

Rows of Parquet files and of Hugging Face datasets on disk; pyarrow and datasets are extras.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from kvwire._lazy import require
from kvwire.errors import ArgumentError, NotFoundError, StorageError
from kvwire.runtime.text_files import MOST_BYTES, decoded_text, read_part

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.offline.bucket import Bucket

_DATASET_FILES = ("state.json", "dataset_dict.json")


def is_dataset(folder: Path) -> bool:
    """Whether ``save_to_disk`` of ``datasets`` made a folder."""
    return any((folder / name).is_file() for name in _DATASET_FILES)


def parquet_rows(path: str, column: str, id_column: str) -> list[tuple[str, int]]:
    """List the rows of a Parquet file with their texts' sizes."""
    file = _parquet(path)
    names = file.schema_arrow.names
    _check_column(column, names, path)
    columns = [column, id_column] if id_column in names else [column]
    rows: list[tuple[str, int]] = []
    for batch in file.iter_batches(columns=columns):
        rows += _listed(batch, column, id_column)
    return rows


def parquet_text(path: str, column: str, row: int) -> Any:  # noqa: ANN401 - whatever the file holds
    """Read the text of one row; caches the last row group."""
    file, group, first = _parquet(path), 0, 0
    while group < file.num_row_groups and row >= first + file.metadata.row_group(group).num_rows:
        first += file.metadata.row_group(group).num_rows
        group += 1
    if group == file.num_row_groups:
        raise NotFoundError(f"{path} has no row {row} any more; run again, so that the file is listed again")
    return _row_group(path, column, group)[row - first].as_py()


def dataset_rows(folder: str, split: str, column: str, id_column: str) -> list[tuple[str, int]]:
    """List the rows of a dataset on disk."""
    data = _dataset(folder, split)
    _check_column(column, data.column_names, folder)
    columns = [column, id_column] if id_column in data.column_names else [column]
    return _listed(data.select_columns(columns).with_format("arrow")[:], column, id_column)


def dataset_text(name: str, column: str, row: int) -> Any:  # noqa: ANN401 - whatever the dataset holds
    """Read the text of one row."""
    folder, _, split = name.partition("#")
    try:
        return _dataset(folder, split)[row][column]
    except IndexError as error:
        raise NotFoundError(f"{folder} has no row {row} any more; run again, so that it is listed again") from error


def splits(folder: str) -> list[str]:
    """Names of a dataset's splits; one empty name if it has none."""
    data = _loaded(folder)
    return sorted(data) if isinstance(data, dict) else [""]


def _check_column(column: str, names: list[str], where: str) -> None:
    if column not in names:
        msg = f"{where} has no column {column!r}; it has {', '.join(names)[:200]}: name one with --text-column"
        raise ArgumentError(msg)


def _listed(table: Any, column: str, id_column: str) -> list[tuple[str, int]]:  # noqa: ANN401 - pyarrow has no types
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = table.column(column)
    is_text = pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type)
    if not is_text and len(texts):
        raise ArgumentError(f"the column {column!r} holds {texts.type}, no text; name another one with --text-column")
    sizes = [size or 0 for size in pc.binary_length(texts).to_pylist()]
    has_ids = id_column in table.schema.names
    ids = (
        ["" if each is None else str(each) for each in table.column(id_column).to_pylist()]
        if has_ids
        else [""] * len(sizes)
    )
    return list(zip(ids, sizes, strict=True))


@lru_cache(maxsize=8)
def _parquet(path: str) -> Any:  # noqa: ANN401 - pyarrow has no types
    require("pyarrow", "parquet", "reading Parquet")
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read as Parquet ({type(error).__name__}); check the file") from error


@lru_cache(maxsize=2)
def _row_group(path: str, column: str, group: int) -> Any:  # noqa: ANN401 - pyarrow has no types
    import pyarrow as pa

    try:
        return _parquet(path).read_row_group(group, columns=[column]).column(column)
    except (OSError, pa.ArrowException) as error:
        raise StorageError(f"{path} cannot be read as Parquet ({type(error).__name__}); check the file") from error


def _dataset(folder: str, split: str) -> Any:  # noqa: ANN401 - datasets is optional
    data = _loaded(folder)
    return data[split] if split else data


@lru_cache(maxsize=8)
def _loaded(folder: str) -> Any:  # noqa: ANN401 - datasets is optional
    require("datasets", "datasets", "reading a dataset of Hugging Face")
    import datasets

    try:
        return datasets.load_from_disk(folder)
    except (OSError, ValueError) as error:
        msg = f"{folder} cannot be read as a dataset ({type(error).__name__}); save it with save_to_disk"
        raise StorageError(msg) from error


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

        text = (parquet_text if ref.kind == "parquet" else dataset_text)(ref.name, ref.column, ref.at)
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
