"""Commands are imported when they are called."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvwire.cli import cli
from kvwire.cli.app import COMMANDS

OTHERS = ("kvwire.cli.plan", "kvwire.cli.simulate", "kvwire.cli.serve", "kvwire.cli.store", "kvwire.cli.demo",
          "kvwire.comparison", "kvwire.whatif")  # fmt: skip


def imported(*words):
    """Modules that are there after a command."""
    code = f"""
import json, sys
from kvwire.cli import cli
cli.main({list(words)!r}, standalone_mode=False)
print(json.dumps(sorted(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def test_help_imports_no_command():
    found = imported("--help")
    assert not [name for name in found if name.startswith("kvwire.") and name not in
                {"kvwire._lazy", "kvwire._version", "kvwire.cli", "kvwire.cli.app", "kvwire.cli.say",
                 "kvwire._printable", "kvwire.errors"}]  # fmt: skip
    assert not {"numpy", "torch", "transformers"} & set(found)


def test_ask_imports_no_other_command():
    found = imported("ask", "--help")
    assert "kvwire.cli.ask" in found
    assert not [name for name in found if name.startswith(OTHERS)]
    assert not {"numpy", "torch", "transformers"} & set(found)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_where_the_table_says(name):
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, click.Command)
    assert command.name == name
    assert command.help


def test_help_lists_every_command_with_its_line():
    shown = CliRunner().invoke(cli, ["--help"]).output
    width = max(map(len, COMMANDS))
    for name, (_, words) in COMMANDS.items():
        assert f"  {name:<{width}}  {words}\n" in shown


def test_a_command_that_is_not_there():
    found = CliRunner().invoke(cli, ["asc"])
    assert found.exit_code == 2
    assert "No such command 'asc'" in found.output


def test_the_group_knows_its_commands():
    context = click.Context(cli)
    assert cli.list_commands(context) == sorted(COMMANDS)
    assert cli.get_command(context, "nothing") is None


@pytest.mark.parametrize("words", [["token", "--json"], ["store", "ls", "--help"]])
def test_output_that_nobody_reads_ends_a_command_as_the_signal_does(words):
    command = [sys.executable, "-c", "from kvwire.cli.app import main; main()", *words]
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_a_disk_that_is_full_under_the_output_is_told():
    command = [sys.executable, "-c", "from kvwire.cli.app import main; main()", "token", "--json"]
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 7
    assert done.stderr.startswith("kvwire: the system refused ([Errno 28] No space left on device); look at")
    assert done.stderr.count("\n") == 1
