"""A user's text files: their document ids, and whether they can be encoded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvwire._user_file import file_errors
from kvwire.errors import ArgumentError, KvwireError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

MOST_BYTES = 64 << 20
"""Limit of a text file, equal to that of a stored document's text."""
_CHARACTERS_PER_TOKEN = 8
"""Characters per token of the window, more than ordinary text needs: a text of as many fills it."""


def read_texts(
    paths: Sequence[str],
    names: Collection[str] | None = None,
    skip: Callable[[str, KvwireError], object] | None = None,
) -> dict[str, str]:
    """Read texts from files and folders: those of ``names``, or all. skip: told of each that cannot be read."""
    texts: dict[str, str] = {}
    for name, file in _found(paths).items():
        if names is not None and name not in names:
            continue
        try:
            texts[name] = decoded_text(read_part(str(file)), str(file))
        except KvwireError as error:
            if skip is None:
                raise
            skip(name, error)
    return texts


def _found(paths: Sequence[str]) -> dict[str, Path]:
    """Files of texts by document id."""
    found: dict[str, Path] = {}
    for name in paths:
        path = Path(name).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
            named = [(file.relative_to(path).with_suffix("").as_posix(), file) for file in files]
        elif path.is_file():
            named = [(path.stem, path)]
        else:
            raise NotFoundError(f"{path} is neither a file nor a folder")
        for document_id, file in named:
            if found.setdefault(document_id, file) != file:
                raise ArgumentError(
                    f"{file} and {found[document_id]} would both be document {document_id!r}; "
                    "rename one or encode them apart"
                )
    if not found:
        raise NotFoundError(f"no .txt or .md files in {', '.join(paths)}")
    return found


def read_part(name: str, start: int = 0, end: int | None = None) -> bytes:
    """Read a file, or a part of it."""
    advice = "check that it is there and its permissions"
    with file_errors(f"{name} cannot be read", advice), Path(name).open("rb") as file:
        file.seek(start)
        return file.read(MOST_BYTES + 1 if end is None else min(end - start, MOST_BYTES + 1))


def decoded_text(data: bytes, name: str) -> str:
    """Decode the bytes of a text."""
    if len(data) > MOST_BYTES:
        raise ArgumentError(f"{name} is larger than {MOST_BYTES >> 20} MiB, more than a document can be; split it")
    try:
        return data.decode().replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        msg = f"{name} is not UTF-8 text ({error.reason} at byte {error.start}); convert it first"
        raise ArgumentError(msg) from error


def token_ids(tokenize: Callable[[str], Sequence[int]], window: int, text: str) -> list[int]:
    """Tokenise a text that may be far too long: tokenizers take some hundred times its length in memory."""
    most = _CHARACTERS_PER_TOKEN * window
    while most < len(text):
        found = list(tokenize(text[:most]))
        if len(found) > window + 1:  # the last token may be cut off
            return found
        most *= 4
    return list(tokenize(text))


def problem_with(ids: Sequence[int], window: int) -> str:
    """Why a document cannot be encoded; empty if it can."""
    if not ids:
        return "the document is empty"
    if len(ids) > window:
        return f"{len(ids)} tokens or more do not fit the model's window of {window}; split the document"
    return ""
