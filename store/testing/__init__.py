"""For authors of stores: the conformance suite and a state machine. They need pytest and hypothesis."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwire.store.testing.blobs import BlobConformance
    from kvwire.store.testing.conformance import StoreConformance
    from kvwire.store.testing.machine import StoreMachine

__all__ = ["BlobConformance", "StoreConformance", "StoreMachine"]

_HOMES = {
    "BlobConformance": "kvwire.store.testing.blobs",
    "StoreConformance": "kvwire.store.testing.conformance",
    "StoreMachine": "kvwire.store.testing.machine",
}
_ASSERTING = ("blobs", "conformance", "machine", "objects", "raw")


def __getattr__(name: str) -> object:
    """Import what needs pytest, or say what is missing."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    missing = [package for package in ("pytest", "hypothesis") if find_spec(package) is None]
    if missing:
        raise ImportError(f"{__name__}.{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    import pytest

    pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))
    return getattr(import_module(_HOMES[name]), name)
