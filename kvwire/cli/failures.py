"""How a command ends with an error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

from kvwire.cli.say import say

if TYPE_CHECKING:
    from kvwire.errors import KvwireError


def error_as_data(error: KvwireError | None) -> dict[str, Any]:
    """An error as plain data; nothing for None."""
    return {"error": {"kind": type(error).__name__, "message": str(error)}} if error else {}


def leave(error: KvwireError) -> NoReturn:
    """Print an error and exit."""
    say(f"kvwire: {error}", err=True)
    sys.exit(error.exit_code)
