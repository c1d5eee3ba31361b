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

OFF = 1.25
"""Times the usual error from which on a source or a document does not fit. With a profile of three books' prose their
own errors lay at 0.8 to 1.2 times the usual one at the middle level, program text at 1.3, lists of numbers at 1.9; a
profile of all of them took 44 % of the bits and 46 % of the error from the program text, a tenth of the bits from the
numbers."""
PAYS, PAYS_SCATTERED = 0.1, 0.25
"""Share of the tokens in sources that do not fit, from which on a new profile pays; and the same in single documents,
among which some of every kind of text lie apart."""
_MIDDLE = 2


@dataclass(frozen=True)
class GroupCheck:
    """The documents of one source: a folder, a file of rows or a dataset.

    Attributes:
        source: Its name.
        documents: How many there are.
        tokens: That they have.
        error: Measured at the level, in the mean over tokens.
        bits_per_element: In the mean over tokens.
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
        usual_error: That a quarter of the tokens do not exceed.
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
    Text that is hard to predict has more error under any profile: what still does not fit after a refit is that.

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
        raise ArgumentError("the manifest names no document with a blob; encode some first")
    name = level or coded[0].levels[min(_MIDDLE, len(coded[0].levels) - 1)].name
    found = {row.id: each for row in coded for each in row.levels if each.name == name}
    of_level = [(row, found[row.id]) for row in coded if row.id in found]
    if not of_level:
        names = ", ".join(each.name for each in coded[0].levels)
        raise ArgumentError(f"no document has a level {name!r}; the levels are {names}")
    usual, tokens = _usual(of_level), sum(row.tokens for row, _ in of_level)
    off = [row for row, each in of_level if each.error >= OFF * usual > 0]
    off_tokens, groups = sum(row.tokens for row in off), _groups(of_level, usual)
    in_groups = sum(group.tokens for group in groups if group.is_off)
    profiles = Counter(row.profile for row, _ in of_level)
    return ProfileCheck(
        name, len(of_level), tokens, usual, groups, len(off), off_tokens,
        len(of_level) - profiles.most_common(1)[0][1], _seconds(coded, tokens), sum(row.bytes for row, _ in of_level),
        in_groups >= PAYS * tokens or off_tokens >= PAYS_SCATTERED * tokens,
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
        groups.append(GroupCheck(source, len(group), tokens, error, bits, error >= OFF * usual > 0))
    return tuple(sorted(groups, key=lambda each: (-each.error, each.source)))


def _usual(rows: Sequence[tuple[Row, LevelRow]]) -> float:
    """The error that a quarter of the tokens have at most: new text of another kind hardly moves it."""
    ahead = sum(row.tokens for row, _ in rows) / 4
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
