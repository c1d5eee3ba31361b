"""Make ``.venv``, in which kvwire is developed: pinned packages, and the torch that is there already.

``make .venv`` runs this with ``PYTHON``. Where that Python has torch, a CPU build for example, ``.venv`` takes no
other: it sees that Python's packages behind its own. Else pip installs the pinned torch. pip's words go to
``.venv/set_up.log``; a terminal sees the step that it is at, and a failure is printed.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HOME = ROOT / ".venv"
LOG = HOME / "set_up.log"
_STEP = re.compile(r"(Collecting|Downloading|Building|Installing|Preparing) .*")
_SHOWN_LINES = 25
_NEW_INTERPRETER = [2, 12]
"""Of torch: the first whose Triton has an interpreter that works with NumPy 2.4."""


@dataclass(frozen=True)
class Torch:
    """A torch outside ``.venv``: its version, and the folder that it is imported from."""

    version: str
    folder: Path


def main() -> int:
    """Make or renew the environment.

    Returns:
        pip's exit status.
    """
    began = time.monotonic()
    torch = _torch_of_this_python()
    beside = _site_packages() / "torch_beside.pth"
    line = f"{torch.folder}\n" if torch else ""
    renewable = _is_this_pythons() and beside.is_file() and beside.read_text(encoding="utf-8") == line
    try:
        venv.create(HOME, clear=not renewable, with_pip=not renewable, symlinks=True)
    except subprocess.CalledProcessError as error:
        words = (error.output or b"").decode(errors="replace")
        _say(f"{sys.executable} makes no environment with pip (Debian and Ubuntu: install python3-venv)\n{words}")
        return 1
    # Up to 3.11, venv puts an old setuptools in front of the one that torch came with.
    status = _pip("uninstall", "-y", "setuptools") if torch and not renewable else 0
    beside.write_text(line, encoding="utf-8")
    pins = HOME / "constraints.txt"
    pins.write_text(_pins(torch), encoding="utf-8")
    whose = f"torch {torch.version} from {torch.folder}" if torch else "installing torch too"
    _say(f"Python {sys.version.split()[0]}, {whose}")

    status = status or _pip("install", "--progress-bar", "off", "-c", str(pins), "-e", f"{ROOT}[dev,demo,docs]")
    if status:
        _say(f"pip failed; the end of {LOG.relative_to(ROOT)}:\n{_failure()}")
        return status
    _say(f"ready after {time.monotonic() - began:.0f} s; pip's words are in {LOG.relative_to(ROOT)}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(f".venv: {text}\n")
    sys.stdout.flush()


def _is_this_pythons() -> bool:
    """Whether ``.venv`` is there and of this Python, so that it can be renewed in place."""
    file = HOME / "pyvenv.cfg"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    known = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    folder = Path(sys._base_executable).parent  # noqa: SLF001 - what venv itself records as its home
    return known.get("home") == str(folder) and known.get("version") == ".".join(map(str, sys.version_info[:3]))


def _site_packages() -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(HOME), "platbase": str(HOME)}))


def _torch_of_this_python() -> Torch | None:
    try:
        found = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(str(found.locate_file(""))).resolve()
    if folder.is_relative_to(HOME):
        return None
    if str(folder).startswith(str(HOME)):  # pip compares the same way, and would take those packages for .venv's own
        sys.exit(f".venv: {folder} lies in a folder whose name begins with .venv; rename it, or name another PYTHON")
    if (folder / "kvwire").exists():
        sys.exit(f".venv: {folder} has a kvwire of its own, which would hide this one; name another PYTHON")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    least = max((need.removeprefix("torch>=") for need in needs if need.startswith("torch>=")), key=_major_minor)
    if _major_minor(found.version) < _major_minor(least):
        _say(f"torch {found.version} in {folder} is too old, kvwire needs {least}; another one is installed")
        return None
    return Torch(found.version, folder)


def _major_minor(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


def _pins(torch: Torch | None) -> str:
    """The constraints; a torch that is there stands in for the pinned one, and says which Triton and setuptools."""
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    if torch is None:
        return pins
    kept = [line for line in pins.splitlines() if not line.startswith(("torch==", "triton==", "setuptools=="))]
    if _major_minor(torch.version) < _NEW_INTERPRETER:
        kept = [line for line in kept if not line.startswith("numpy==")] + ["numpy<2.4"]
    return "\n".join([*kept, f"torch=={torch.version}", ""])


def _pip(*words: str) -> int:
    """Run the environment's pip, its words into the log; a terminal's last line tells the step."""
    command = [str(HOME / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
    terminal = sys.stderr.isatty()
    with (
        LOG.open("w", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as pip,
    ):
        for line in pip.stdout or ():
            log.write(line)
            log.flush()
            if terminal and (step := _STEP.match(line.strip())):
                sys.stderr.write(f"\r\x1b[K  {step[0][:90]}")
                sys.stderr.flush()
    if terminal:
        sys.stderr.write("\r\x1b[K")
    return pip.returncode


def _failure() -> str:
    """Of the log, the first error that pip reports, and the end."""
    lines = LOG.read_text(encoding="utf-8").splitlines()
    first = [line for line in lines[:-_SHOWN_LINES] if line.startswith("ERROR")][:1]
    return "\n".join([*first, *lines[-_SHOWN_LINES:]])


if __name__ == "__main__":
    sys.exit(main())
