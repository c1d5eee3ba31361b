"""Documents in rows of Parquet files and Hugging Face datasets on disk. pyarrow and datasets are extras."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from kvwire._lazy import require
from kvwire.errors import ArgumentError, NotFoundError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

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
