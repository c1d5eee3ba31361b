"""numba kernels that describe a chunk's columns for a GPU; see ``kernels`` for the rules of all kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from numpy import int32, uint32

from kvwire.codec.entropy.jit import jit

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    from kvwire.codec.entropy.jit import F32, U8, U32


@jit
def enter_level(codes: U8, spread: NDArray[int64], shift: int, below: U8, classes: U8) -> None:
    """Compute the classes of all columns at a level from the class codes of the open ones."""
    at = 0
    for c in range(classes.shape[0]):
        if below[c] > 0:
            classes[c] = min(below[c] + 6, 42)
        else:
            code = int(codes[at]) - 1
            at += 1
            delta = code // 2 if code % 2 == 0 else -(code + 1) // 2
            own = min(max(spread[c] - shift, 1), 42)
            classes[c] = min(max(own + delta, 1), 42) if code >= 0 else 0


@jit
def entries_of(classes: U8, below: U8, slots: U32, entries: U32) -> None:
    """Pack each coded column for GPU kernels: slot, class - 1 from bit 23 on, bit 29 where it enters here."""
    at = 0
    for c in range(classes.shape[0]):
        if classes[c] > 0:
            fresh = uint32(below[c] == 0)
            entries[at] = slots[c] | ((uint32(classes[c]) - uint32(1)) << uint32(23)) | (fresh << uint32(29))
            at += 1


@jit
def assign_slots(classes: U8, firsts: NDArray[int64], align: int, slots: U32, group_slots: NDArray[int32]) -> None:
    """Assign slots to the coded columns, group by group."""
    at = 0
    for group in range(group_slots.shape[0]):
        group_slots[group, 0] = at
        for c in range(firsts[group], firsts[group + 1]):
            if classes[c] > 0:
                slots[c] = at
                at += 1
        group_slots[group, 1] = at
        at = (at + align - 1) // align * align


@jit
def describe_slots(
    classes: U8, slots: U32, firsts: NDArray[int64], sizes: F32, rows: NDArray[int32], sizes_out: F32
) -> None:
    """Write each slot's row of its group's basis, and the sizes of its values 1 and 2."""
    for group in range(firsts.shape[0] - 1):
        for c in range(firsts[group], firsts[group + 1]):
            if classes[c] > 0:
                rows[slots[c]] = c - firsts[group]
                sizes_out[slots[c], 0] = sizes[classes[c], 1]
                sizes_out[slots[c], 1] = sizes[classes[c], 2]
