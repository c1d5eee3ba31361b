"""``kvwire key``: make a master key."""

from __future__ import annotations

import click

from kvwire.cli.say import say


@click.command("key")
def key() -> None:
    """Make a master key for --keys; put it at the top of the file, which only you may read."""
    from kvwire.store import Keyring

    say(Keyring.new_line())
