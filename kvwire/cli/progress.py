"""Progress of commands that take long."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def progress(what: str, unit: str) -> Iterator[Callable[[int], None]]:
    """Progress on stderr, where that is a terminal.

    Args:
        what: Is done.
        unit: Of what is counted.

    Yields:
        What is called with how many more there are.
    """
    from tqdm import tqdm

    with tqdm(unit=unit, unit_scale=True, disable=None, desc=what, file=sys.stderr) as bar:
        yield lambda count: (bar.update(count), None)[1]
