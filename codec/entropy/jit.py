"""How the codec's numba kernels are compiled.

All kernels release the GIL and cache their machine code. LLVM vectorises the lane loops under two conditions: indices
stay unsigned, so that numba leaves out the test for negative ones; and no two arguments overlap, which every caller
keeps to and ``jit`` tells the compiler. It cannot find that out by itself where a loop gathers from tables.
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

    from numpy import float32, int32, int64, uint8, uint16, uint32
    from numpy.typing import NDArray

    U8: TypeAlias = NDArray[uint8]
    U16: TypeAlias = NDArray[uint16]
    U32: TypeAlias = NDArray[uint32]
    I32: TypeAlias = NDArray[int32]
    I64: TypeAlias = NDArray[int64]
    F32: TypeAlias = NDArray[float32]

_Kernel = TypeVar("_Kernel", bound="Callable[..., None]")
_LOG = logging.getLogger("kvwire.codec")
_TOLD = threading.Event()


def jit(kernel: _Kernel) -> _Kernel:
    """Compile on first use. Arguments are declared not to alias, which doubles the speed of the decoders."""
    dispatcher: Any = njit(nogil=True, error_model="numpy")(kernel)
    dispatcher._cache = KernelCache(kernel)  # noqa: SLF001 - ``cache=True`` would set numba's own, which may raise
    # numba has the flag and sets it for its own parallel loops, but gives njit no option for it. Where its compiler
    # should lose this hook, the kernels only get slower.
    if hasattr(getattr(dispatcher, "_compiler", None), "_customize_flags"):
        dispatcher._compiler._customize_flags = _without_aliases  # noqa: SLF001
    return cast("_Kernel", dispatcher)


def _without_aliases(flags: Any) -> Any:  # noqa: ANN401 - numba's, untyped
    flags.noalias = True
    return flags


class KernelCache:
    """numba's files of machine code for one kernel. Where they fail, it is compiled in memory, which costs time."""

    def __init__(self, kernel: Callable[..., None]) -> None:
        """Touch no file before the first compilation."""
        self._kernel = kernel

    @cached_property
    def _files(self) -> Any:  # noqa: ANN401 - numba's, untyped
        try:
            return FunctionCache(self._kernel)  # type: ignore[no-untyped-call]
        except Exception as error:  # noqa: BLE001 - no folder can be written, or what lies there is none
            _tell_once(error)
            return NullCache()

    @property
    def cache_path(self) -> str | None:
        """The folder; None where there is none."""
        return cast("str | None", self._files.cache_path)

    def load_overload(self, sig: Any, target_context: Any) -> Any:  # noqa: ANN401 - numba's, untyped
        """Machine code for argument types; None where there is none that can be read."""
        try:
            found = self._files.load_overload(sig, target_context)
        except Exception:  # noqa: BLE001 - what reads a damaged pickle raises anything
            self.flush()  # so that it is made anew: it would fail in every process
            return None
        # Two processes that compile for other types at the same time may give their files the same name.
        return found if found is not None and tuple(found.signature.args) == tuple(getattr(sig, "args", sig)) else None

    def save_overload(self, sig: Any, data: Any) -> None:  # noqa: ANN401 - numba's, untyped
        """Keep machine code for other processes, if that can be."""
        try:
            self._files.save_overload(sig, data)
        except Exception as error:  # noqa: BLE001 - a full disk, a folder that was taken away, a damaged index
            _tell_once(error)

    def flush(self) -> None:
        """Forget what is kept."""
        try:
            self._files.flush()
        except Exception as error:  # noqa: BLE001 - as above
            _tell_once(error)


def _tell_once(error: Exception) -> None:
    if not _TOLD.is_set():
        _TOLD.set()
        _LOG.warning(
            "compiled kernels cannot be kept (%s: %s), so every process compiles its own, which takes some seconds; "
            "set NUMBA_CACHE_DIR to a folder that this user may write",
            type(error).__name__,
            error,
        )
