"""A click group that imports a command when it is called, so that none pays for the imports of the others."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class LazyCommand:
    """Where a command is.

    Attributes:
        module: To import.
        attribute: The command's name in that module.
        help: One line for the list of commands.
    """

    module: str
    attribute: str
    help: str

    def load(self) -> click.Command:
        """Import the command."""
        command = getattr(import_module(self.module), self.attribute)
        if not isinstance(command, click.Command):
            msg = f"{self.module}.{self.attribute} is no click command"
            raise TypeError(msg)
        return command


class LazyGroup(click.Group):
    """A group whose commands are in a table; ``--help`` lists them without importing any."""

    def __init__(self, *args: Any, table: Mapping[str, LazyCommand], **settings: Any) -> None:  # noqa: ANN401
        """Keep the table."""
        super().__init__(*args, **settings)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the alphabet."""
        return sorted(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - likewise
        """Import a command."""
        found = self._table.get(cmd_name)
        return None if found is None else found.load()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._table[name].help) for name in self.list_commands(ctx)])
