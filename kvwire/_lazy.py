"""Imports on first use: a package's public names, and optional packages."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable


_IMPORT = re.compile(r"^    from (\S+) import (?:\(([^)]*)\)|(.+))$", re.MULTILINE)


def lazy(package: str) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` (PEP 562): what it imports for type checkers, it imports on first use.

    The names are those of ``__all__``; the imports stand above it, under ``if TYPE_CHECKING``, and are read from there.
    """
    home_of: dict[str, str] = {}

    def get(name: str) -> Any:  # noqa: ANN401 - any of the names
        module = sys.modules[package]
        if name not in module.__all__:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        if not home_of:
            source: str | None = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]  # a file's or an archive's
            if source is None:
                raise ImportError(f"{package} is installed without its source, which names what it imports")
            found = _IMPORT.findall(source.partition("\n__all__")[0])
            # At once: another thread that finds some names takes them for all.
            home_of.update({name: home for home, several, one in found for name in re.findall(r"\w+", several or one)})
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)
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
