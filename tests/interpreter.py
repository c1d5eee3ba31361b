"""Triton's interpreter without work whose outcome nobody looks at: kernels give the same, in less time."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import getmembers
from types import SimpleNamespace


def quicken() -> None:
    """Leave out what the interpreter does for nothing.

    It computes all sums and products of integers once more to check them for overflow, and drops the verdict unless it
    debugs. It makes a table of dtypes for every look-up. It looks through the whole language for what a kernel may
    call, in each call of a function, where the kernel that calls it had all of it replaced already. It works out anew
    what a shape says of every tensor, and makes a block of every number that a kernel names, whenever it comes by.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    _remember_dtypes(tl, interpreter)
    _replace_once(tl, interpreter)
    _remember_shapes(tl)
    if semantic := getattr(interpreter, "TritonSemantic", None):  # since 3.4
        _leave_alike(semantic)


def _remember_dtypes(tl, interpreter) -> None:
    real = interpreter._get_np_dtype
    plain = cache(real)

    def dtype_of(kind):
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        return real(element) if isinstance(element, tl.pointer_type) else plain(element)

    interpreter._get_np_dtype = dtype_of


def _replace_once(tl, interpreter) -> None:
    """Look up once what is built in, and replace it once for a kernel and all the functions that it calls."""
    search, replace_all = interpreter._patch_builtin, interpreter._patch_lang
    nothing = SimpleNamespace(restore=lambda: None)
    is_builtin = tl.core.is_builtin
    homes = (tl, tl.core, tl.tensor, tl.math, getattr(tl.core, "tensor_descriptor_base", tl.tensor))
    builtins = {home: [name for name, member in getmembers(home) if is_builtin(member)] for home in homes}

    def patch(home, builder, scope):
        if home not in builtins:
            return search(home, builder, scope)
        for name in builtins[home]:
            if is_builtin(member := getattr(home, name)):
                interpreter._patch_attr(home, name, member, builder, scope)
        return None

    interpreter._patch_builtin = patch

    @cache
    def languages(function):
        return [module for module in (tl, tl.core) if module in function.__globals__.values()]

    def is_replaced(language):
        mine = language.dtype.to_ir.__module__ == interpreter.__name__
        return mine and not is_builtin(language.load) and not is_builtin(language.tensor.__add__)

    def patch_all(function):
        found = languages(function)
        return nothing if found and all(map(is_replaced, found)) else replace_all(function)

    interpreter._patch_lang = patch_all


def _remember_shapes(tl) -> None:
    """Work out once what follows from a shape: a block's name and size, the constants that a tensor has of it."""
    make_type, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    types, shapes, same = {}, {}, {}

    def init_type(self, element_ty, shape):
        place = getattr(element_ty, "address_space", None)  # pointers have no hash
        lengths = tuple(getattr(length, "value", length) for length in shape)
        key = (element_ty.name, place, lengths)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = vars(self) | {"shape": same.setdefault(lengths, self.shape)}
        vars(self).update(types[key], element_ty=element_ty)

    def init_tensor(self, handle, type):  # noqa: A002 - Triton's name
        shape = type.shape if type.is_block() else ()
        _, known = shapes.get(id(shape), (None, None))
        if known is None:
            make_tensor(self, handle, type)
            shapes[id(shape)] = shape, vars(self).copy()  # blocks of a shape share it, so that it stays the same object
        else:
            vars(self).update(known, handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor


def _leave_alike(semantic) -> None:
    """Convert nothing to its own type; compare no lengths of two blocks of one shape, which is the same object."""
    _make_numbers_once(semantic)
    cast, broadcast = semantic.cast, semantic.broadcast_impl_value

    def cast_unlike(self, input, dst_ty, *more, **named):  # noqa: A002 - Triton's name
        return input if input.type.scalar is dst_ty.scalar else cast(self, input, dst_ty, *more, **named)

    def broadcast_unlike(self, lhs, rhs):
        alike = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if alike else broadcast(self, lhs, rhs)

    semantic.cast, semantic.broadcast_impl_value = cast_unlike, broadcast_unlike


def _make_numbers_once(semantic) -> None:
    """Keep the tensors and blocks of numbers that a kernel names. To write to one would be an error."""
    make, broadcast = semantic.scalar_constant, semantic.broadcast_impl_value
    numbers, known, blocks = {}, {}, {}

    def constant(self, value, dtype):
        key = (type(value), repr(value), getattr(dtype, "name", None))
        if key not in numbers:
            made = numbers[key] = make(self, value, dtype)
            made.handle.data.flags.writeable = False
            known[id(made)] = made
        return numbers[key]

    def block_of(self, number, like):
        key = (id(number), *like.type.shape)
        if key not in blocks:
            blocks[key] = broadcast(self, number, like)[0]
            blocks[key].handle.data.flags.writeable = False
        return blocks[key]

    def broadcast_numbers(self, lhs, rhs):
        if id(lhs) in known and rhs.type.is_block():
            return block_of(self, lhs, rhs), rhs
        if id(rhs) in known and lhs.type.is_block():
            return lhs, block_of(self, rhs, lhs)
        return broadcast(self, lhs, rhs)

    semantic.scalar_constant, semantic.broadcast_impl_value = constant, broadcast_numbers
