"""Runs in vLLM's workers: what is allocated there, without what the allocator keeps free."""

from __future__ import annotations

import ctypes


class _Mallinfo2(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``hblkhd`` is mapped by itself, ``uordblks`` in use of the arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


class UsedMemory:
    """A method more for vLLM's workers: ``worker_extension_cls``."""

    def used_mib(self) -> float:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
        mallinfo2.restype = _Mallinfo2
        found = mallinfo2()
        return (found.hblkhd + found.uordblks) / (1 << 20)
