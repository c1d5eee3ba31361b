"""Whether a SQLite file is one that kvwire made: then nothing in it can run, and no question goes on for ever.

A file may come from anybody: a view in place of the table would be asked without end, a trigger would change what is
written. So what a file declares has to be, word for word, what kvwire declares.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from functools import cache, partial
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, FormatVersionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

QUERY_S = 60.0
"""Longest time of one question or transaction; ordinary ones take milliseconds."""
_STEPS = 10_000  # of SQLite's machine between looks at the clock
_MAX_VALUE_BYTES = 64 << 20  # of one value or row: what a hostile file may make this process allocate
_LAYOUT = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY type, name LIMIT 10"
_Layout = list[tuple[object, ...]]


def restrict(connection: sqlite3.Connection) -> None:
    """Trust nothing of what a file says: before anything is asked of it."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
    connection.execute("PRAGMA trusted_schema=OFF")
    connection.execute("PRAGMA cell_size_check=ON")


def limit_time(connection: sqlite3.Connection) -> None:
    """Interrupt whatever is asked once QUERY_S from now are over."""
    connection.set_progress_handler(partial(_is_over, time.monotonic() + QUERY_S), _STEPS)


def check_layout(connection: sqlite3.Connection, path: Path, schemas: Sequence[str], version: int, advice: str) -> None:
    """Look whether a file is of this version, and declares what one of the schemas makes and nothing else."""
    found_version = connection.execute("PRAGMA user_version").fetchone()[0]
    found = connection.execute(_LAYOUT).fetchall()
    if not found_version and not found:
        msg = f"{path} is damaged: it is empty, and kvwire leaves none so: {advice}"
        raise CorruptError(msg)
    if found_version != version:
        msg = f"{path} has version {found_version}, this kvwire knows {version}: use the one that wrote it"
        raise FormatVersionError(msg)
    if not any(found == _layout(schema) for schema in schemas):
        known = [one for schema in schemas for one in _layout(schema)]
        strange = [f"the {kind} {str(name)[:80]!r}" for kind, name, *_ in found if (kind, name, *_) not in known]
        what = f"it holds {', '.join(strange)}" if strange else "its table is not there"
        msg = f"{path} is not as kvwire made it ({what}): {advice}"
        raise CorruptError(msg)


@cache
def _layout(schema: str) -> _Layout:
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(schema)
        return connection.execute(_LAYOUT).fetchall()


def _is_over(end: float) -> bool:
    return time.monotonic() > end
