"""Whether a profile still fits a corpus, as the errors tell that were measured when its documents were encoded."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.offline.manifest import LevelRow, Row

OFF = 1.5
"""Times the usual error from which on a document does not fit. Within a kind of text the errors of documents differ
less; text of another kind has more."""
PAYS = 0.1
"""Share of the tokens that do not fit, from which on a new profile pays."""
_MIDDLE = 2


@dataclass(frozen=True)
class GroupCheck:
    """The documents of one source: a folder, a file of rows or a dataset.

    Attributes:
        source: Its name.
        documents: How many there are.
        tokens: That they have.
        error: Measured at the level, in the mean over tokens.
        bits_per_element: Likewise.
        is_off: The error is ``OFF`` times the usual one or more.
    """

    source: str
    documents: int
    tokens: int
    error: float
    bits_per_element: float
    is_off: bool


@dataclass(frozen=True)
class ProfileCheck:
    """What a manifest tells of a profile.

    Attributes:
        level: The level that was looked at.
        documents: That have a blob.
        tokens: Of these.
        usual_error: The middle of the documents' errors, tokens counted.
        groups: By source, the worst first.
        off_documents: Whose error is ``OFF`` times the usual one or more.
        off_tokens: Of these.
        older_documents: That are coded with another profile than most are.
        seconds: Of encoding all documents again on one engine, as measured; None where none was encoded.
        bytes: Of their blobs, all of which are written anew.
        pays: A new profile would pay.
    """

    level: str
    documents: int
    tokens: int
    usual_error: float
    groups: tuple[GroupCheck, ...]
    off_documents: int
    off_tokens: int
    older_documents: int
    seconds: float | None
    bytes: int
    pays: bool


def check_profile(rows: Sequence[Row], level: str | None = None) -> ProfileCheck:
    """Look whether the documents' errors are alike.

    A profile is fitted on text of all kinds that a corpus has, so errors are alike until text of another kind comes.

    Args:
        rows: Of a manifest.
        level: Name of the level; None for the middle one.

    Returns:
        What was found.

    Raises:
        ArgumentError: No document has a blob, or none such a level.
    """
    coded = [row for row in rows if row.levels and row.status != "failed"]
    if not coded:
        msg = "the manifest names no document with a blob; encode some first"
        raise ArgumentError(msg)
    name = level or coded[0].levels[min(_MIDDLE, len(coded[0].levels) - 1)].name
    found = {row.id: each for row in coded for each in row.levels if each.name == name}
    of_level = [(row, found[row.id]) for row in coded if row.id in found]
    if not of_level:
        names = ", ".join(each.name for each in coded[0].levels)
        msg = f"no document has a level {name!r}; the levels are {names}"
        raise ArgumentError(msg)
    usual, tokens = _middle(of_level), sum(row.tokens for row, _ in of_level)
    off = [row for row, each in of_level if each.error >= OFF * usual]
    off_tokens = sum(row.tokens for row in off)
    profiles = Counter(row.profile for row, _ in of_level)
    return ProfileCheck(
        name, len(of_level), tokens, usual, _groups(of_level, usual), len(off), off_tokens,
        len(of_level) - profiles.most_common(1)[0][1], _seconds(coded, tokens), sum(row.bytes for row, _ in of_level),
        off_tokens >= PAYS * tokens,
    )  # fmt: skip


def group_of(row: Row) -> str:
    """The source that a document belongs to: the folder of a file, or the file or dataset of a row."""
    path = PurePosixPath(row.source)
    return str(path.parent) if path.suffix in (".txt", ".md") else row.source


def _groups(rows: Sequence[tuple[Row, LevelRow]], usual: float) -> tuple[GroupCheck, ...]:
    members: dict[str, list[tuple[Row, LevelRow]]] = {}
    for row, level in rows:
        members.setdefault(group_of(row), []).append((row, level))
    groups = []
    for source, group in members.items():
        tokens = sum(row.tokens for row, _ in group)
        error = sum(level.error * row.tokens for row, level in group) / tokens
        bits = sum(level.bits_per_element * row.tokens for row, level in group) / tokens
        groups.append(GroupCheck(source, len(group), tokens, error, bits, error >= OFF * usual))
    return tuple(sorted(groups, key=lambda each: (-each.error, each.source)))


def _middle(rows: Sequence[tuple[Row, LevelRow]]) -> float:
    """The error that half of the tokens have at most."""
    ahead = sum(row.tokens for row, _ in rows) / 2
    for row, level in sorted(rows, key=lambda each: each[1].error):
        ahead -= row.tokens
        if ahead <= 0:
            return level.error
    return 0.0


def _seconds(rows: Sequence[Row], tokens: int) -> float | None:
    """Of all documents, from what those took that were encoded."""
    timed = [row for row in rows if row.status == "encoded"]
    spent = sum(row.prefill_s + row.encode_s + row.upload_s for row in timed)
    return spent * tokens / seen if (seen := sum(row.tokens for row in timed)) else None
