"""Which kernels code a cache: Triton's on a GPU, or numba's on the processor.

Both read and write the same streams, symbol for symbol. Triton is an optional extra (``pip install kvwire[gpu]``);
where it cannot run, caches are coded on the processor and copied, and the log says so once.
"""

from __future__ import annotations

import logging
import os
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from kvwire.types import LayerSpec


Backend = Literal["auto", "triton", "numba"]
"""``auto``: Triton on a GPU where it can run, else numba. ``triton`` and ``numba`` force either."""
BACKENDS: tuple[Backend, ...] = ("auto", "triton", "numba")
_LEAST_CAPABILITY = (8, 0)
_LEAST_TRITON = (3, 3)
_LEAST_INTERPRETER = (3, 7)
"""From here on Triton's interpreter runs with NumPy 2.4, which no longer accepts one-element arrays as numbers."""
_LOG = logging.getLogger("kvwire.codec")
Side = Literal["key", "value"]
SIDES: tuple[Side, ...] = ("key", "value")
Plane = tuple[Side, int]
"""The keys or the values of one layer."""


def uses_triton(backend: Backend, device: str | torch.device) -> bool:
    """Decide whether Triton's kernels run for tensors on a device.

    With ``auto``, numba serves a GPU on which Triton cannot run, and one log line says why.

    Args:
        backend: What the caller asked for.
        device: Where the tensors lie.

    Returns:
        Whether Triton's kernels run.

    Raises:
        ArgumentError: There is no such backend, or ``triton`` cannot run there.
    """
    if backend not in BACKENDS:
        raise ArgumentError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    device = torch.device(device)
    kind = device.type
    if backend == "numba" or (backend == "auto" and kind == "cpu"):
        return False
    missing = _missing(device)
    if missing and backend == "triton":
        raise ArgumentError(f"Triton kernels cannot run on {device}: {missing}")
    if missing:
        _warn_once(kind, missing)
    return not missing


def interpreted() -> bool:
    """Return whether Triton kernels run in its interpreter on the processor: slow, meant for tests."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "yes", "y"}


def _missing(device: torch.device) -> str:
    """Return why Triton cannot run on a device, and what to do; empty where it can."""
    version = _triton_version()
    if version is None:
        return "Triton is not installed; pip install 'kvwire[gpu]'"
    if version < _LEAST_TRITON:
        return f"Triton {version[0]}.{version[1]} is too old; pip install --upgrade torch 'kvwire[gpu]'"
    if device.type == "cpu":
        return _missing_on_the_processor(version)
    if device.type == "cuda":
        return _missing_on_the_gpu(device)
    return f"they are written for CUDA and ROCm, not for {device.type}; use backend='numba'"


def _missing_on_the_processor(version: tuple[int, ...]) -> str:
    if not interpreted():
        return "the processor runs them only in Triton's interpreter; set TRITON_INTERPRET=1 before starting Python"
    if version < _LEAST_INTERPRETER and _release(np.__version__) >= (2, 4):
        return (
            f"the interpreter of Triton {version[0]}.{version[1]} fails with NumPy {np.__version__}; "
            "pip install 'numpy<2.4', or 'triton>=3.7' with a torch that allows it (2.12 and later)"
        )
    return ""


def _missing_on_the_gpu(device: torch.device) -> str:
    if interpreted():
        return "TRITON_INTERPRET is set, and the interpreter would read the GPU's tensors on the processor; unset it"
    if not torch.cuda.is_available():
        return "torch sees no GPU; check its CUDA build and the driver"
    if torch.version.hip is None and (capability := torch.cuda.get_device_capability(device)) < _LEAST_CAPABILITY:
        found = ".".join(map(str, capability))
        return f"its compute capability is {found}, and they need 8.0 or later; use backend='numba'"
    return _driver_trouble()


@lru_cache(maxsize=1)
def _triton_version() -> tuple[int, ...] | None:
    """Return the major and minor version of Triton; None where it cannot be imported."""
    try:
        import triton

        return _release(triton.__version__)
    except Exception:  # noqa: BLE001 - a broken installation fails in many ways
        return None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@lru_cache(maxsize=1)
def _driver_trouble() -> str:
    """Return why Triton cannot reach the GPU (its driver stub needs a C compiler); empty where it can."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001 - the compiler, the driver, and more
        needs = "a C compiler, Python's headers, and a folder to write to (TRITON_CACHE_DIR)"
        return f"Triton does not reach the GPU ({error}); it needs {needs}"
    return ""


@lru_cache(maxsize=8)
def _warn_once(kind: str, missing: str) -> None:
    _LOG.warning("caches on %s are coded by the processor and copied: %s", kind, missing)


def plane_width(layers: tuple[LayerSpec, ...], plane: Plane) -> int:
    """Count the elements of a plane for one token."""
    side, layer = plane
    spec = layers[layer]
    return 0 if spec.kind == "none" else (spec.key_width if side == "key" else spec.value_width)


def planes_of(layers: tuple[LayerSpec, ...]) -> list[Plane]:
    """List the planes that have elements.

    Args:
        layers: The model's layers.

    Returns:
        The keys of each layer, then the values of each layer.
    """
    return [(side, layer) for side in SIDES for layer in range(len(layers)) if plane_width(layers, (side, layer))]
