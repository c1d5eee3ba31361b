"""Imports on first use: a package's public names, and optional packages."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` (PEP 562)."""
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:  # noqa: ANN401 - any of the names
        if name not in home_of:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get


def require(package: str, extra: str, purpose: str) -> None:
    """Import an optional package, or raise an error that names kvwire's extra."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        msg = f"{purpose} needs {package}: pip install 'kvwire[{extra}]'"
        raise ArgumentError(msg) from error
