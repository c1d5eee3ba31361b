"""Where the command line prints: every line for people goes through ``say``, so that no name on it forges anything."""

from __future__ import annotations

import logging
import sys
from io import TextIOWrapper

import click

from kvwire._printable import PrintableLines, printable, printable_text


def say(*lines: str, err: bool = False) -> None:
    """Print lines, each on its own line whatever is in it. JSON passes unchanged, since it is printable ASCII."""
    for line in lines:
        click.echo(printable(line), err=err)


def say_text(text: str, *, err: bool = False) -> None:
    """Print running text with its line ends, such as a model's answer."""
    click.echo(printable_text(text), err=err)


def prepare_output() -> None:
    """Let nothing that is printed fail or reach a terminal raw: what stdout cannot encode, and what libraries log."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableLines())
