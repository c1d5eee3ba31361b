"""Where a fit has got to: shown on a terminal, and kept in a file from which an interrupted fit goes on."""

from __future__ import annotations

import logging
import sys
import time
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvwire.errors import CorruptError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Moments = Mapping[str, NDArray[np.generic]]

_log = logging.getLogger("kvwire.runtime")
SAVE_S = 60.0
"""Seconds between two writings of the file: sums of a wide model take gigabytes."""
_DIGEST = "digest"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
"""What reading an archive raises where it is none."""


class MomentFile:
    """What ``fit_profile`` tells of its progress, on a terminal, and in a file where one is named."""

    def __init__(self, path: Path | None, save_s: float = SAVE_S) -> None:
        """Read nothing yet."""
        self._path, self._save_s = path, save_s
        self._digest, self._saved_at = "", time.monotonic()
        self._bar: object = None

    def recall(self, digest: Callable[[], str]) -> Moments | None:
        """Read the file, where there is one."""
        if self._path is None:
            return None
        self._digest = digest()
        try:
            with self._path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                known = {name: file[name] for name in file.files}
            told = str(known.pop(_DIGEST))
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            msg = f"the sums kept in {self._path} are damaged ({error}): delete the file, and the fit begins anew"
            raise CorruptError(msg) from error
        if told != self._digest:
            msg = (
                f"the sums kept in {self._path} are of another model, of other settings or of other texts: "
                "name another file, or delete this one"
            )
            raise MismatchError(msg)
        return known

    def keep(self, arrays: Callable[[], Moments], total: int) -> None:
        """Show that one more cache was summed, and write the file where it is time to."""
        self._show(total)
        now = time.monotonic()
        if self._path is None or now - self._saved_at < self._save_s:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with part.open("wb") as file:
                np.savez(file, **cast("Any", {_DIGEST: np.array(self._digest), **arrays()}))
            part.replace(self._path)
        except OSError as error:
            _log.warning("what was summed could not be kept in %s (%s): the fit goes on without", self._path, error)
            part.unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def _show(self, total: int) -> None:
        from tqdm import tqdm

        if self._bar is None:
            self._bar = tqdm(total=total, unit="text", disable=None, desc="summing", file=sys.stderr, delay=1.0)
        if isinstance(self._bar, tqdm):
            self._bar.update(1)
            if self._bar.n >= total:
                self._bar.close()

    def done(self) -> None:
        """Delete the file: the profile is there."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
