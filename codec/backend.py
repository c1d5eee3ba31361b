"""Which kernels code a cache: Triton's on a GPU, or numba's on the processor.

Both read and write the same streams, symbol for symbol. Triton is an optional extra (``pip install kvwire[gpu]``);
where it cannot run, caches are coded on the processor and copied, and the log says so once.
"""

from __future__ import annotations

import logging
import os
from functools import lru_cache
from typing import Literal

import torch

from kvwire.errors import ArgumentError

Backend = Literal["auto", "triton", "numba"]
"""``auto``: Triton on a GPU where it can run, else numba. ``triton`` and ``numba`` force either."""
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "numba")
_LEAST_CAPABILITY = (8, 0)
_LOG = logging.getLogger("kvwire.codec")


def uses_triton(backend: Backend, device: str | torch.device) -> bool:
    """Whether Triton's kernels are to run for tensors on ``device``.

    With ``auto``, a GPU on which Triton cannot run is served by numba, and one line of the log says why. Raises
    ArgumentError for a backend that does not exist, and for ``triton`` where it cannot run.
    """
    if backend not in BACKENDS:
        msg = f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}"
        raise ArgumentError(msg)
    device = torch.device(device)
    kind = device.type
    if backend == "numba" or (backend == "auto" and kind == "cpu"):
        return False
    missing = _missing(device)
    if missing and backend == "triton":
        msg = f"Triton kernels cannot run on {device}: {missing}"
        raise ArgumentError(msg)
    if missing:
        _say_once(kind, missing)
    return not missing


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on the processor: slow, and meant for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}


def _missing(device: torch.device) -> str:
    """What keeps Triton from running on a device, and what to do; empty where nothing does."""
    kind = device.type
    if not _installed():
        return "Triton is not installed; pip install 'kvwire[gpu]'"
    if kind == "cpu" and not interpreted():
        return "the processor runs them only in Triton's interpreter; set TRITON_INTERPRET=1 before starting Python"
    if kind not in {"cpu", "cuda"}:
        return f"they are written for CUDA and ROCm, not for {kind}"
    if kind == "cuda" and interpreted():
        return "TRITON_INTERPRET is set, and the interpreter would read the GPU's tensors on the processor; unset it"
    return (
        "" if kind == "cpu" or torch.cuda.is_available() else "torch sees no GPU; check its CUDA build and the driver"
    )


@lru_cache(maxsize=1)
def _installed() -> bool:
    try:
        import triton  # noqa: F401
    except Exception:  # noqa: BLE001 - a broken installation fails in many ways
        return False
    return True


@lru_cache(maxsize=1)
def _trouble() -> str:
    """What Triton says when it is to reach the GPU: it compiles a stub of the driver, which takes a C compiler."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001 - the compiler, the driver, and more
        return f"Triton does not reach the GPU ({error}); it needs a C compiler and Python's headers"
    return ""


@lru_cache(maxsize=8)
def _say_once(kind: str, missing: str) -> None:
    _LOG.warning("caches on %s are coded by the processor and copied: %s", kind, missing)
