"""The command line: its commands, and what errors become.

Data goes to stdout, progress and errors to stderr. Every command takes ``--json``. Exit codes: 0 done, 2 wrong usage,
3 not found, 4 corrupt, 5 not allowed, 6 deadline missed, 7 disk or network failed, 8 does not belong together,
9 done in part, 10 links lose more than was allowed, 130 interrupted, 141 nobody reads stdout any more.
"""

from __future__ import annotations

import json
import signal
import sys
from contextlib import suppress
from importlib import import_module
from io import StringIO
from typing import NoReturn

import click

from kvwire._version import __version__
from kvwire.cli.say import error_as_data, leave, prepare_output, say, say_text
from kvwire.errors import KvwireError, StorageError


class LazyGroup(click.Group):
    """The group of all commands; ``--help`` lists them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names in the order of the alphabet."""
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - likewise
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(
            import_module(f"kvwire.cli.{COMMANDS[cmd_name][0]}"), cmd_name.replace("-", "_")
        )
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in self.list_commands(ctx)])


COMMANDS = {
    "append": ("append", "Append text to a document, encoding the new tokens alone."),
    "ask": ("ask", "Answer a question over documents of a store."),
    "check-model": ("check_model", "Measure what links lose with a model, and what repair gives."),
    "demo": ("demo", "Compare text, raw caches and kvwire on your documents."),
    "encode": ("encode", "Encode documents into a store, here or on many machines."),
    "inspect": ("inspect_blob", "Show what a blob holds: a file, or a document."),
    "key": ("serve", "Make a master key for --keys."),
    "plan": ("plan", "Tell what a load would do, why, and alternatives."),
    "profile": ("profile", "Fit a profile once, look at it, and see when a new one pays."),
    "repair": ("repair", "Repair documents that were linked often, beside vLLM."),
    "report": ("report", "Write a page of what a store holds and is good for."),
    "salt": ("salt", "Print what a request to vLLM for documents must carry."),
    "serve": ("serve", "Serve a store over HTTP until interrupted."),
    "sign": ("serve", "Print a URL that gives access to one object for a while."),
    "simulate": ("simulate", "Simulate loads on a modelled link and machine."),
    "store": ("store", "List, remove, collect, check and copy what a store has."),
    "train-links": ("train_links", "Train link tokens or wrappers for linked documents."),
    "token": ("serve", "Make a bearer token and its line for the tenants file."),
    "vllm-proxy": ("vllm_proxy", "Stand before vLLM: placeholders become documents."),
}
"""The module of each command, which is called as the command, and a line of help."""


def main() -> None:
    """Run the command line; translates kvwire errors into messages and exit codes."""
    prepare_output()
    as_json, stdout = "--json" in sys.argv[1:], sys.stdout
    try:
        cli.main(prog_name="kvwire", standalone_mode=False)
    except click.ClickException as error:
        if as_json:
            say(json.dumps({"error": {"kind": "UsageError", "message": error.format_message()}}))
        usage = StringIO()
        error.show(usage)
        say_text(usage.getvalue().rstrip("\n"), err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)
    except SystemExit:
        if sys.stdout is not stdout:  # click puts a silent one there where the pipe is closed, as by head
            sys.exit(128 + signal.SIGPIPE)
        raise
    except KvwireError as error:
        _fail(error, as_json=as_json)
    except OSError as error:  # of the disk, of stdout, or of a library that finds no place for its files
        msg = f"the system refused ({error}); look at free space, permissions, open files, TMPDIR and HOME"
        _fail(StorageError(msg), as_json=as_json)


def _fail(error: KvwireError, *, as_json: bool) -> NoReturn:
    if as_json:
        with suppress(OSError):
            say(json.dumps(error_as_data(error)))
    leave(error)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvwire")
def cli() -> None:
    """Ship the KV caches of language models like media."""
