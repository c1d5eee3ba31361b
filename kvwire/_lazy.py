"""Imports on first use: a package's public names, and optional packages."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType


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
            home_of.update(_homes(package))  # at once: other threads see none or all
        value = getattr(import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    return get


def _homes(package: str) -> dict[str, str]:
    """Where a package imports names from, above its ``__all__``."""
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]  # a file's or an archive's
    source: str | None = loader.get_source(package)
    if source is None:  # installed as bytecode alone, which has the same imports
        return _compiled_homes(loader.get_code(package))
    found: dict[str, str] = {}
    for home, several, one in _IMPORT.findall(source.partition("\n__all__")[0]):
        found |= dict.fromkeys(re.findall(r"\w+", several or one), home)
    return found


def _compiled_homes(code: CodeType) -> dict[str, str]:
    import dis  # takes longer than to read a source

    found, home = {}, ""
    for step in dis.get_instructions(code):
        if step.opname == "IMPORT_NAME":
            home = step.argval
        elif step.opname == "IMPORT_FROM":
            found[step.argval] = home
        elif step.argval == "__all__":
            break
    return found


def require(package: str, extra: str, purpose: str) -> None:
    """Import an optional package, or raise an error that names kvwire's extra."""
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        msg = f"{purpose} needs {package}: pip install 'kvwire[{extra}]'"
        raise ArgumentError(msg) from error
