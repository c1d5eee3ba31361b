"""The command line."""

from typing import TYPE_CHECKING

from kvwire._lazy import lazy

if TYPE_CHECKING:
    from kvwire.cli.app import cli, main

__all__ = ["cli", "main"]

__getattr__ = lazy(__name__)
