"""How the codec's numba kernels are compiled.

All kernels release the GIL and cache their machine code. LLVM vectorises the lane loops under two conditions: indices
stay unsigned, so that numba leaves out the test for negative ones; and no two arguments overlap, which every caller
keeps to and ``jit`` tells the compiler. It cannot find that out by itself where a loop gathers from tables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeAlias

    from numpy import float32, int32, uint8, uint16, uint32
    from numpy.typing import NDArray

    U8: TypeAlias = NDArray[uint8]
    U16: TypeAlias = NDArray[uint16]
    U32: TypeAlias = NDArray[uint32]
    I32: TypeAlias = NDArray[int32]
    F32: TypeAlias = NDArray[float32]

_Kernel = TypeVar("_Kernel", bound="Callable[..., None]")


def jit(kernel: _Kernel) -> _Kernel:
    """Compile on first use. Arguments are declared not to alias, which doubles the speed of the decoders.

    Args:
        kernel: A function of arrays and numbers that returns nothing.

    Returns:
        The compiled function.
    """
    dispatcher = njit(nogil=True, cache=True, error_model="numpy")(kernel)
    # numba has the flag and sets it for its own parallel loops, but gives njit no option for it. Where its compiler
    # should lose this hook, the kernels only get slower.
    if hasattr(getattr(dispatcher, "_compiler", None), "_customize_flags"):
        dispatcher._compiler._customize_flags = _without_aliases  # type: ignore[attr-defined]  # noqa: SLF001
    return cast("_Kernel", dispatcher)


def _without_aliases(flags: Any) -> Any:  # noqa: ANN401 - numba's, untyped
    flags.noalias = True
    return flags
