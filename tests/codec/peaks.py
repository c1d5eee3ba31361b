"""The most memory that a piece of work holds."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

_PEAKS = Path("/proc/self/clear_refs")
HAS_RESIDENT_PEAKS = sys.platform.startswith("linux") and _PEAKS.exists()


def status(name):
    """Bytes that Linux tells of this process: ``VmRSS`` is held now, ``VmHWM`` was the most."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


class Peak:
    """Bytes held beyond those at the start, at most: ``with Peak() as peak: ...; peak.bytes``.

    Linux counts them at no cost, torch's and the kernels' too. Elsewhere Python's own are traced, which takes as long
    again as the work.
    """

    bytes = 0

    def __enter__(self):
        if HAS_RESIDENT_PEAKS:
            _PEAKS.write_text("5")  # the peak starts anew
            self.before = status("VmRSS")
        else:
            tracemalloc.start()
        return self

    def __exit__(self, *_):
        if HAS_RESIDENT_PEAKS:
            self.bytes = status("VmHWM") - self.before
        else:
            self.bytes = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
