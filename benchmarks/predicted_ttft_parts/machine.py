"""How much the machine has to do for others, which times are only comparable without."""

from __future__ import annotations

import time
from pathlib import Path

_LOOK_S = 0.25
_QUIET_CORES = 0.3


def others_busy(wait_s: float) -> float:
    """Cores that are busy while this process sleeps; looks again for ``wait_s`` seconds while it is not quiet."""
    until = time.monotonic() + wait_s
    while True:
        before, began = _busy_s(), time.monotonic()
        time.sleep(_LOOK_S)
        cores = (_busy_s() - before) / (time.monotonic() - began)
        if cores <= _QUIET_CORES or time.monotonic() >= until:
            return cores


def _busy_s() -> float:
    """Seconds that all cores were busy since the machine started; 0 where the system does not tell."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, *rest = map(int, fields)
    return (user + nice + system + sum(rest)) / 100
