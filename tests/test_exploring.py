"""KVWIRE_EXPLORE seeds what property tests draw."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
TEST = """
from pathlib import Path

from hypothesis import given, strategies

drawn = []

@given(strategies.integers())
def test_something(number):
    drawn.append(number)

def test_write_down():
    Path("drawn").write_text(repr(drawn))

def test_that_fails():
    assert False
"""


@pytest.fixture
def run(tmp_path):
    """Runs a property test under the project's conftest; returns what it drew, and the output."""
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_some.py").write_text(TEST, encoding="utf-8")

    def drawn(seed: str | None) -> tuple[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("KVWIRE_", "PYTEST_"))}
        environment |= {} if seed is None else {"KVWIRE_EXPLORE": seed}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        command = [sys.executable, "-m", "pytest", "-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        told = tmp_path / "drawn"
        return told.read_text(encoding="utf-8") if told.exists() else "", done.stdout + done.stderr

    return drawn


def test_a_seed_draws_the_same_examples_again_and_another_seed_others(run):
    seven, told = run("7")
    assert run("7")[0] == seven
    others = [run(seed)[0] for seed in ("8", None, None)]
    assert others[1] == others[2]  # without a seed too, the same in every run
    assert len({seven, *others}) == 3
    assert told.count("KVWIRE_EXPLORE=7 make test") == 2  # at the beginning, and after the failure


def test_what_is_no_seed_is_refused(run):
    assert "KVWIRE_EXPLORE is a seed, a whole number from 0; got 'yes'" in run("yes")[1]
