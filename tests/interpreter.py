"""Triton's interpreter without work whose outcome nobody looks at: kernels give the same, in less time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import getmembers


def quicken() -> None:
    """Leave out what the interpreter does for nothing.

    It computes all sums and products of integers once more to check them for overflow, and drops the verdict unless it
    debugs. It makes a table of dtypes for every look-up. And it looks through the whole language for what a kernel may
    call, in each call of a function.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    real = interpreter._get_np_dtype
    plain = cache(real)

    def dtype_of(kind):
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return real(element) if isinstance(element, tl.pointer_type) else plain(element)

    interpreter._get_np_dtype = dtype_of
    search = interpreter._patch_builtin
    is_builtin = tl.core.is_builtin
    homes = (tl, tl.core, tl.tensor, tl.math)
    builtins = {home: [name for name, member in getmembers(home) if is_builtin(member)] for home in homes}

    def patch(home, builder, scope):
        if home not in builtins:
            return search(home, builder, scope)
        for name in builtins[home]:
            if is_builtin(member := getattr(home, name)):
                interpreter._patch_attr(home, name, member, builder, scope)
        return None

    interpreter._patch_builtin = patch
