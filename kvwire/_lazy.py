"""Public names of a package, imported from their modules when they are first used."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


def lazy(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Make a package's ``__getattr__`` (PEP 562).

    Args:
        package: The package's ``__name__``.
        homes: Public names by the module that defines them.

    Returns:
        A function that imports a name when it is first asked for, and raises AttributeError for any other.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def get(name: str) -> Any:  # noqa: ANN401 - any of the names
        if name not in home_of:
            msg = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(msg)
        value = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
