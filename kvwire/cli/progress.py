"""Progress of commands that take long."""

from __future__ import annotations

import logging
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvwire.cli.say import say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROGRESS = logging.getLogger("kvwire.progress")
"""Stages of what commands do, a line each at INFO; nothing is printed outside ``stages``."""


@contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Progress on stderr, where that is a terminal."""
    from tqdm import tqdm

    with tqdm(unit=unit, unit_scale=True, disable=None, desc=what, file=sys.stderr) as bar:
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
