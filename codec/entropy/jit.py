"""Compile the codec's numba kernels.

All kernels release the GIL and cache their machine code. LLVM vectorises the lane loops under two conditions: indices
are unsigned, so that numba omits the test for negative ones; and arguments do not overlap. Every caller keeps to that,
and ``jit`` declares it, since LLVM cannot prove it where a loop gathers from tables.
"""

from __future__ import annotations

import logging
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from numba import njit
from numba.core.caching import FunctionCache, NullCache

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from numpy import float32, int8, int32, int64, uint8, uint16, uint32
    from numpy.typing import NDArray

    I8: TypeAlias = NDArray[int8]
    U8: TypeAlias = NDArray[uint8]
    U16: TypeAlias = NDArray[uint16]
    U32: TypeAlias = NDArray[uint32]
    I32: TypeAlias = NDArray[int32]
    I64: TypeAlias = NDArray[int64]
    F32: TypeAlias = NDArray[float32]

_Kernel = TypeVar("_Kernel", bound="Callable[..., None]")
_LOG = logging.getLogger("kvwire.codec")
_WARNED = threading.Event()


def jit(kernel: _Kernel) -> _Kernel:
    """Compile on first use; arguments are declared not to alias, which doubles the decoders' speed."""
    dispatcher: Any = njit(nogil=True, error_model="numpy")(kernel)
    dispatcher._cache = KernelCache(kernel)  # noqa: SLF001 - ``cache=True`` would set numba's own, which may raise
    # numba sets the flag for its own parallel loops but gives njit no option for it. Without this hook in numba's
    # compiler, the kernels would only be slower.
    if hasattr(getattr(dispatcher, "_compiler", None), "_customize_flags"):
        dispatcher._compiler._customize_flags = _without_aliases  # noqa: SLF001
    return cast("_Kernel", dispatcher)


def _without_aliases(flags: Any) -> Any:  # noqa: ANN401 - numba's, untyped
    flags.noalias = True
    return flags


class KernelCache:
    """numba's files of machine code for one kernel; where they fail, the kernel is compiled in memory again."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        """Take the kernel; files are opened at the first compilation."""
        self._kernel = kernel

    @cached_property
    def _files(self) -> Any:  # noqa: ANN401 - numba's, untyped
        try:
            return FunctionCache(self._kernel)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - no folder is writable, or the path is not a folder
            _warn_once(error)
            return NullCache()

    @property
    def cache_path(self) -> str | None:
        """The folder of the files, or None."""
        return cast("str | None", self._files.cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # noqa: ANN401 - numba's, untyped
        """Return the machine code for argument types; None where none can be read."""
        try:
            found = self._files.load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - a damaged pickle raises anything
            self.flush()  # or loading would fail in every process
            return None
        # Two processes that compile for different types at the same time may give their files the same name.
        return found if found is not None and tuple(found.signature.args) == tuple(getattr(sig, "args", sig)) else None

    def save_overload(self, sig: Any, data: Any) -> None:  # noqa: ANN401 - numba's, untyped
        """Store machine code for other processes if possible."""
        try:
            self._files.save_overload(sig, data)
        except Exception as error:  # noqa: BLE001 - a full disk, a folder that was taken away, a damaged index
            _warn_once(error)

    def flush(self) -> None:
        """Delete the stored machine code."""
        try:
            self._files.flush()
        except Exception as error:  # noqa: BLE001 - as above
            _warn_once(error)


def _warn_once(error: Exception) -> None:
    if not _WARNED.is_set():
        _WARNED.set()
        _LOG.warning(
            "compiled kernels cannot be kept (%s: %s), so every process compiles its own, which takes some seconds; "
            "set NUMBA_CACHE_DIR to a folder that this user may write",
            type(error).__name__,
            error,
        )
