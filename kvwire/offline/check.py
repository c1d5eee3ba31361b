"""Whether a profile still fits a corpus, by the errors measured when its documents were encoded."""

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
"""Ratio to the usual error from which a source or document does not fit. With a profile of three books' prose, their
own errors lay at 0.8 to 1.2 times the usual one at the middle level, program text at 1.3, lists of numbers at 1.9; a
profile of all of them took 44 % of the bits and 46 % of the error from the program text, a tenth of the bits from the
numbers."""
PAYS, PAYS_SCATTERED = 0.1, 0.25
"""Share of tokens in sources that do not fit, from which a new profile pays; and in single documents, of which every
kind of text has some outliers."""
_MIDDLE = 2


@dataclass(frozen=True)
class GroupCheck:
    """The documents of one source: a folder, a file of rows or a dataset.

    Attributes:
        source: Its name.
        documents: Number of documents.
        tokens: Their total length.
        error: Measured at the level, mean over tokens.
        bits_per_element: Mean over tokens.
        is_off: Whether the error is at least ``OFF`` times the usual one.
    """

    source: str
    documents: int
    tokens: int
    error: float
    bits_per_element: float
    is_off: bool


@dataclass(frozen=True)
class ProfileCheck:
    """How well a profile fits, from a manifest.

    Attributes:
        level: The level compared.
        documents: Number of documents with a blob.
        tokens: Their total length.
        usual_error: Lower quartile of the error, over tokens.
        groups: By source, the worst first.
        off_documents: Number with at least ``OFF`` times the usual error.
        off_tokens: Their tokens.
        older_documents: Number coded with another profile than most.
        seconds: Time to encode all documents again on one engine, from measured times; None if none was encoded.
        bytes: Size of all their blobs, which would be rewritten.
        pays: Whether a new profile would pay.
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
    """Compare the documents' errors.

    A profile fits the kinds of text it was fitted on, so errors are alike until another kind comes. Text that is hard
    to predict has more error under any profile: it is what does not fit even after a refit.

    Args:
        rows: Rows of a manifest.
        level: Name of the level; None for the middle one.

    Returns:
        The comparison.

    Raises:
        ArgumentError: No document has a blob, or such a level.
    """
    coded = [row for row in rows if row.levels and row.status != "failed"]
    if not coded:
        raise ArgumentError("the manifest names no document with a blob; encode some first")
    name = level or coded[0].levels[min(_MIDDLE, len(coded[0].levels) - 1)].name
    level_rows = {row.id: each for row in coded for each in row.levels if each.name == name}
    of_level = [(row, level_rows[row.id]) for row in coded if row.id in level_rows]
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
    """Source of a document: a file's folder, or the file or dataset of a row."""
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
    """Lower quartile of the error, over tokens: new text of another kind hardly changes it."""
    ahead = sum(row.tokens for row, _ in rows) / 4
    for row, level in sorted(rows, key=lambda each: each[1].error):
        ahead -= row.tokens
        if ahead <= 0:
            return level.error
    return 0.0


def _seconds(rows: Sequence[Row], tokens: int) -> float | None:
    """Time for all documents, extrapolated from those encoded."""
    timed = [row for row in rows if row.status == "encoded"]
    spent = sum(row.prefill_s + row.encode_s + row.upload_s for row in timed)
    return spent * tokens / timed_tokens if (timed_tokens := sum(row.tokens for row in timed)) else None
