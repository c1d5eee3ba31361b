"""Lists documents of sources: folders, globs, files of lines or rows, buckets, datasets. Texts are read later."""

from __future__ import annotations

import glob
import os
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from kvwire._printable import name_problem
from kvwire.errors import ArgumentError, KvwireError, NotFoundError
from kvwire.offline.refs import (
    DocumentRef,
    dataset_rows,
    is_dataset,
    object_of_line,
    parquet_rows,
    splits,
    text_of_line,
)  # fmt: skip
from kvwire.runtime.text_files import MOST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TEXTS = (".txt", ".md")
_LINES = (".jsonl", ".ndjson")
_ROWS = ".parquet"


def find_documents(sources: Sequence[str], *, text_column: str = "text", id_column: str = "id") -> list[DocumentRef]:
    """List the documents of sources.

    A folder gives its .txt and .md files, at any depth; a glob all files it matches; .jsonl and .parquet files a
    document per line or row; ``s3://bucket/prefix?endpoint=...`` its .txt, .md and .jsonl objects; a folder saved by
    ``datasets`` its rows. A document's id is its path below the folder, without its ending; for a line or row the field
    ``id_column``, else the file's name and the row's number.

    Args:
        sources: The sources.
        text_column: The text's field in lines and rows.
        id_column: The id's.

    Returns:
        The documents, in the order of the sources and of names in each. Invalid names and duplicate ids are noted in
        ``problem``.

    Raises:
        NotFoundError: A source does not exist, or there are no documents.
        ArgumentError: A source has no name, an extra is not installed, or a file of rows has no such column.
        StorageError: A file of rows or a bucket cannot be read.
    """
    refs: list[DocumentRef] = []
    for source in sources:
        refs += _of_source(source, text_column, id_column)
    if not refs:
        raise NotFoundError(
            f"no documents in {', '.join(sources)}: name .txt, .md, .jsonl or .parquet files, or folders of text files"
        )
    return list(_checked(refs))


def _checked(refs: Iterable[DocumentRef]) -> Iterator[DocumentRef]:
    """Drop repetitions, and note invalid names and duplicate ids."""
    by_id: dict[str, DocumentRef] = {}
    for ref in refs:
        other = by_id.setdefault(ref.document_id, ref)
        if other is not ref:
            if (other.base, other.name, other.at) == (ref.base, ref.name, ref.at):
                continue
            where = f"{ref.source} and {other.source} would both be document {ref.document_id!r}"
            yield replace(ref, problem=f"{where}; rename one or encode them apart")
        elif not ref.problem and (wrong := name_problem(ref.document_id)):
            yield replace(ref, problem=f"its name holds {wrong}; rename the file")
        else:
            yield ref


def _of_source(source: str, text_column: str, id_column: str) -> Iterator[DocumentRef]:
    if source.startswith("s3://"):
        yield from _of_bucket(source, text_column, id_column)
        return
    if not source.strip():  # of an unset variable; as a path it would be the working directory
        raise ArgumentError("a source has no name: name text files, folders of them, or an s3:// prefix")
    path = Path(source).expanduser()
    if path.is_dir() and is_dataset(path):
        yield from _of_dataset(path, text_column, id_column)
    elif path.is_dir():
        yield from _of_folder(path, text_column, id_column)
    elif path.is_file():
        yield from _of_file(path, path.parent, text_column, id_column)
    elif glob.has_magic(source):
        fixed = next(at for at, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:fixed])
        matched = sorted(file for file in root.glob(str(Path(*path.parts[fixed:]))) if _is_file(file))
        if not matched:
            raise NotFoundError(f"{source} matches no file")
        for file in matched:
            yield from _of_file(file, root, text_column, id_column)
    else:
        raise NotFoundError(f"{path} is neither a file nor a folder")


def _is_file(path: Path) -> bool:
    """Whether a path is a file, or might be one: a link to what is gone, or what this user may not look at."""
    try:
        return path.is_file() or (path.is_symlink() and not path.exists())
    except OSError:
        return True


def _of_folder(folder: Path, text_column: str, id_column: str) -> Iterator[DocumentRef]:
    """The texts below a folder; a folder that cannot be listed is one document with the problem."""
    unlisted: list[OSError] = []
    below = (Path(at, name) for at, _, names in os.walk(folder, onerror=unlisted.append) for name in names)
    for file in sorted(file for file in below if file.suffix in _TEXTS and _is_file(file)):
        yield from _of_file(file, folder, text_column, id_column)
    for error in unlisted:
        why = f"{error.filename} cannot be listed ({error.strerror}); check its permissions"
        name = Path(error.filename).relative_to(folder).as_posix()
        yield DocumentRef(name, str(error.filename), "text", str(error.filename), problem=why)


def _of_file(file: Path, root: Path, text_column: str, id_column: str) -> Iterator[DocumentRef]:
    """The documents of a file; if listing fails, one document with the problem."""
    try:
        yield from _listed(file, root, text_column, id_column)
    except OSError as error:  # includes StorageError
        why = str(error) if isinstance(error, KvwireError) else f"{file} cannot be read ({error.strerror}); check it"
        name = file.relative_to(root).with_suffix("").as_posix()
        yield DocumentRef(name, str(file), "text", str(file), problem=why)


def _listed(file: Path, root: Path, text_column: str, id_column: str) -> Iterator[DocumentRef]:
    name = file.relative_to(root).with_suffix("").as_posix()
    if file.suffix in _LINES:
        with file.open("rb") as lines:
            yield from _of_lines(DocumentRef(name, str(file), "lines", str(file), column=text_column), lines, id_column)
    elif file.suffix == _ROWS:
        rows = parquet_rows(str(file), text_column, id_column)
        yield from _of_rows(DocumentRef(name, str(file), "parquet", str(file), column=text_column), rows)
    else:
        yield DocumentRef(name, str(file), "text", str(file), size=file.stat().st_size)


def _of_lines(first: DocumentRef, lines: Iterable[bytes], id_column: str) -> Iterator[DocumentRef]:
    """A document per line that is not blank."""
    offset = 0
    for number, line in enumerate(lines):
        if line.strip():
            named, problem = f"{first.document_id}/{number}", ""
            try:
                own_id = object_of_line(line).get(id_column)
                named = named if own_id is None or own_id == "" else str(own_id)
                text_of_line(line, first.column)
                if len(line) > MOST_BYTES:
                    problem = f"the line is larger than {MOST_BYTES >> 20} MiB, more than a document can be; split it"
            except ArgumentError as error:
                problem = str(error)
            yield replace(first, document_id=named, at=offset, size=len(line), problem=problem)
        offset += len(line)


def _of_rows(first: DocumentRef, rows: Sequence[tuple[str, int]]) -> Iterator[DocumentRef]:
    for at, (named, size) in enumerate(rows):
        yield replace(first, document_id=named or f"{first.document_id}/{at}", at=at, size=size)


def _of_dataset(folder: Path, text_column: str, id_column: str) -> Iterator[DocumentRef]:
    for split in splits(str(folder)):
        name = f"{folder}#{split}" if split else str(folder)
        first = DocumentRef("/".join(filter(None, (folder.name, split))), name, "dataset", name, column=text_column)
        yield from _of_rows(first, dataset_rows(str(folder), split, text_column, id_column))


def _of_bucket(address: str, text_column: str, id_column: str) -> Iterator[DocumentRef]:
    from kvwire.offline.bucket import Bucket  # boto3 is slow to import

    bucket, shown = Bucket(address), address.partition("?")[0].rstrip("/")
    try:
        for name, size in bucket.objects():
            path = PurePosixPath(name)
            ref = DocumentRef(
                path.with_suffix("").as_posix() if path.suffix else name, f"{shown}/{name}", "text", name, bucket.url,
                size=size,
            )  # fmt: skip
            if path.suffix in _TEXTS:
                yield ref
            elif path.suffix in _LINES:
                lines = bucket.read(name).splitlines(keepends=True)
                yield from _of_lines(replace(ref, kind="lines", column=text_column), lines, id_column)
    finally:
        bucket.close()
