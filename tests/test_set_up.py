"""``make .venv``: which torch the environment takes, and what a person is shown. Nothing here needs a network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "small"
version = "1"
dependencies = ["torch>=2.6", {more}]
optional-dependencies = {{ dev = [], demo = [], docs = [] }}
[tool.setuptools]
packages = []
"""


def describe(project: Path, more: str = "") -> None:
    """Write a project that needs torch, and one package more perhaps."""
    (project / "pyproject.toml").write_text(PROJECT.format(more=more), encoding="utf-8")


def make(project: Path) -> subprocess.CompletedProcess[str]:
    """``make .venv`` with the Python that runs the tests, which has torch, and without an index."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE"))}
    environment |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "LC_ALL": "C"}
    environment["PIP_NO_BUILD_ISOLATION"] = "0"  # pip reads it as the option's value: no isolation
    command = ["make", ".venv", f"PYTHON={sys.executable}"]
    return subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def stand_in(project: Path) -> None:
    """Put a set-up of one line in the place of the real one, as old as that."""
    script = project / "scripts" / "set_up.py"
    seen = script.stat()
    script.write_text("print('.venv: ready after 0 s')\n", encoding="utf-8")
    os.utime(script, ns=(seen.st_atime_ns, seen.st_mtime_ns))


@pytest.fixture
def project(tmp_path):
    """A folder with the real Makefile, set-up and constraints."""
    for name in ("Makefile", "constraints.txt", "scripts/set_up.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_failure_is_told_and_the_torch_that_is_there_is_used(project):
    describe(project, '"no-such-package-of-ours==1"')
    failed = make(project)
    assert failed.returncode != 0
    assert "No matching distribution found for no-such-package-of-ours==1" in failed.stdout
    assert ".venv/set_up.log" in failed.stdout
    assert len(failed.stdout.splitlines()) < 40

    describe(project)
    done = make(project)  # the failure left nothing that passes for an environment
    assert done.returncode == 0, done.stdout + done.stderr
    version = metadata.version("torch")
    first, last = done.stdout.splitlines()
    assert f"torch {version} from " in first
    assert ".venv: ready after " in last
    assert done.stderr == ""
    pins = (project / ".venv" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert [pin for pin in pins if pin.startswith(("torch==", "triton=="))] == [f"torch=={version}"]
    where = "import torch; print(torch.__version__, torch.__file__)"
    its = subprocess.run(
        [project / ".venv" / "bin" / "python", "-c", where], capture_output=True, text=True, check=True
    ).stdout
    assert its == f"{torch.__version__} {torch.__file__}\n"

    stand_in(project)  # what it does is seen above; from here on, whether it runs
    assert make(project).stdout == "make: Nothing to be done for '.venv'.\n"
    (project / ".venv" / "python").write_text("/somewhere/python3.99\n", encoding="utf-8")
    assert ".venv: ready after " in make(project).stdout  # another Python was named


@pytest.fixture
def set_up(project, monkeypatch):
    """The set-up as a module, of a project that needs torch."""
    describe(project)
    spec = importlib.util.spec_from_file_location("set_up", project / "scripts" / "set_up.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "set_up", module)
    spec.loader.exec_module(module)
    return module


def test_a_torch_that_is_too_old_or_the_environments_own_is_not_used(set_up, project, monkeypatch, capsys):
    found = set_up._torch_of_this_python()
    assert found.version == metadata.version("torch")
    assert (found.folder / "torch").is_dir()
    (project / "pyproject.toml").write_text(PROJECT.format(more="").replace("2.6", "99.0"), encoding="utf-8")
    assert set_up._torch_of_this_python() is None
    assert "is too old, kvwire needs 99.0" in capsys.readouterr().out
    describe(project)
    monkeypatch.setattr(set_up, "HOME", found.folder.parent)
    assert set_up._torch_of_this_python() is None


def test_an_old_torch_brings_the_numpy_that_its_interpreter_takes(set_up, project):
    assert "numpy<2.4" in set_up._pins(set_up.Torch("2.11.0+cpu", project)).splitlines()
    assert "numpy<2.4" not in set_up._pins(set_up.Torch("2.12.0", project))


def test_environments_that_would_be_altered_or_in_the_way_are_refused(set_up, monkeypatch, tmp_path):
    """pip takes for its own what begins with its environment's path: it would remove packages there."""

    class Torch:
        version = "2.13.0"

        def locate_file(self, name):
            return folder / name

    monkeypatch.setattr(set_up.importlib.metadata, "distribution", lambda _: Torch())
    folder = tmp_path / ".venv-cpu" / "site-packages"
    with pytest.raises(SystemExit, match=r"begins with \.venv; rename it"):
        set_up._torch_of_this_python()
    folder = tmp_path / "cpu"
    assert set_up._torch_of_this_python().folder == folder
    (folder / "kvwire").mkdir(parents=True)
    with pytest.raises(SystemExit, match="a kvwire of its own"):
        set_up._torch_of_this_python()


def test_the_end_of_pips_words_and_the_first_error_are_shown(set_up):
    set_up.HOME.mkdir()
    set_up.LOG.write_text("Collecting\nERROR: Exception:\n" + "  at\n" * 60 + "Read timed out\n", encoding="utf-8")
    shown = set_up._failure().splitlines()
    assert (shown[0], shown[-1]) == ("ERROR: Exception:", "Read timed out")
    assert len(shown) < 30
