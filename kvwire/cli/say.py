"""What commands say: lines for people, errors, and the progress of what takes long.

Every line for people goes through ``say``, so that no name on it forges anything.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn

import click

from kvwire._printable import PrintableLines, printable, printable_text
from kvwire.errors import CorruptError, DeadlineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvwire.errors import KvwireError


def say(*lines: str, err: bool = False) -> None:
    """Print lines, each on its own line whatever is in it. JSON passes unchanged, since it is printable ASCII."""
    for line in lines:
        click.echo(printable(line), err=err)


def say_text(text: str, *, err: bool = False) -> None:
    """Print running text with its line ends, such as a model's answer."""
    click.echo(printable_text(text), err=err)


def prepare_output() -> None:
    """Let nothing that is printed fail or reach a terminal raw: what stdout cannot encode, and what libraries log."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())


def error_as_data(error: KvwireError | None) -> dict[str, Any]:
    """An error as plain data; nothing for None."""
    return {"error": {"kind": type(error).__name__, "message": str(error)}} if error else {}


def late_error(ttft_s: float, deadline_s: float | None) -> DeadlineError | None:
    """The error of a plan whose first token would miss the deadline."""
    if deadline_s is None or ttft_s <= deadline_s:
        return None
    return DeadlineError(f"the first token would come after {ttft_s:.3f} s, the deadline is {deadline_s:g} s")


def leave(error: KvwireError) -> NoReturn:
    """Print an error and exit."""
    say(f"kvwire: {error}", err=True)
    sys.exit(error.exit_code)


def count_failures(failures: Sequence[str], words: str, *, as_json: bool) -> CorruptError | None:
    """Tell people of each failure; the error that counts them."""
    for failure in failures if not as_json else ():
        say(failure, err=True)
    return CorruptError(f"{len(failures)} {words}") if failures else None


def finish(about: dict[str, Any], words: str | Iterable[str], error: KvwireError | None, *, as_json: bool) -> None:
    """Print what was done, in one line or several, and leave with the error's exit code where there was one."""
    if as_json:
        say(json.dumps(about | error_as_data(error)))
    else:
        say(*([words] if isinstance(words, str) else words))
    if error is not None:
        leave(error)


PROGRESS = logging.getLogger("kvwire.progress")
"""Stages of what commands do, a line each at INFO; nothing is printed outside ``stages``."""


@contextmanager
def progress(what: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Progress on stderr, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, unit_scale=True, disable=None, desc=what, file=sys.stderr) as bar:
        yield lambda count: (bar.update(count), None)[1]


class _Lines(logging.Handler):
    """Prints stages on stderr, each with the seconds since the first."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        with tqdm.external_write_mode(file=sys.stderr):
            say(f"[{time.monotonic() - self._began:.0f} s] {record.getMessage()}", err=True)


@contextmanager
def stages(*, is_told: bool = True) -> Iterator[None]:
    """Tell on stderr, in a line each, which stages of work begin inside."""
    if not is_told:
        yield
        return
    handler, level = _Lines(), PROGRESS.level
    PROGRESS.addHandler(handler)
    PROGRESS.setLevel(logging.INFO)
    try:
        yield
    finally:
        PROGRESS.removeHandler(handler)
        PROGRESS.setLevel(level)
