"""For authors of stores: the conformance suite and a state machine. They need pytest and hypothesis."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.store.testing.blobs import BlobConformance
    from kvwire.store.testing.conformance import StoreConformance
    from kvwire.store.testing.machine import StoreMachine

__all__ = ["BlobConformance", "StoreConformance", "StoreMachine"]

_find = lazy(__name__)
_ASSERTING = ("blobs", "conformance", "machine", "objects", "raw")


def __getattr__(name: str) -> object:
    """Import what needs pytest, or say what is missing."""
    if name in __all__:
        missing = [package for package in ("pytest", "hypothesis") if find_spec(package) is None]
        if missing:
            raise ImportError(f"{__name__}.{name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")
        import pytest

        pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _ASSERTING))
    found: object = _find(name)
    return found
