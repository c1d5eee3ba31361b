"""Hides progress bars of transformers unless stderr is a terminal."""

from __future__ import annotations

import io
import sys
from contextlib import contextmanager, redirect_stderr
from typing import TYPE_CHECKING

from transformers.utils import logging

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bar unless stderr is a terminal; restores its switch afterwards."""
    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def silent() -> Iterator[None]:
    """The same for bars without a switch, such as GGUF conversion's; without warnings, on a terminal too."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        if sys.stderr.isatty():
            yield
            return
        with quiet(), redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(before)
