"""The distribution holds the packages of the tree and nothing else, and works where the repository is not."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("codec", "controller", "engines", "reuse", "store", "transport")
FOLDERS = {"kvwire": "kvwire", **{f"kvwire.{room}": room for room in ROOMS}}
BESIDE = ("benchmarks", "demo", "scripts", "tests")

IMPORT_ALL = """
import importlib, pathlib, sys
for name in sys.argv[1:]:
    path = pathlib.Path(importlib.import_module(name).__file__).resolve()
    if not path.is_relative_to(pathlib.Path(sys.prefix).resolve()):
        sys.exit(f"{name} comes from {path}, not from the wheel in {sys.prefix}")
"""


def installed_files() -> set[str]:
    """Python files of the tree, by the path that they have in the wheel."""
    return {
        (Path(*package.split(".")) / path.relative_to(ROOT / folder)).as_posix()
        for package, folder in FOLDERS.items()
        for path in (ROOT / folder).rglob("*.py")
    }


def run(*command: str | Path, cwd: Path) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from the sdist, which is built from a copy of the tree."""
    copy = tmp_path_factory.mktemp("source")
    litter = shutil.ignore_patterns("__pycache__")
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=litter)
    for path in (path for folder in BESIDE for path in (ROOT / folder).rglob("*.py")):
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, cwd=copy)
    (built,) = out.glob("*.whl")
    return built


def test_every_room_is_linked() -> None:
    assert {path.name: str(path.readlink()) for path in (ROOT / "kvwire").iterdir() if path.is_symlink()} == {
        room: f"../{room}" for room in ROOMS
    }


def test_every_package_has_an_init_module() -> None:
    files = installed_files()
    missing = {f"{Path(file).parent}/__init__.py" for file in files} - files
    assert not missing, f"without these the folders are not packages: {sorted(missing)}"


def facades() -> list[Path]:
    """Packages that import their public names on first use."""
    files = (path for folder in FOLDERS.values() for path in sorted((ROOT / folder).rglob("__init__.py")))
    return [path for path in files if "= lazy(" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", facades(), ids=lambda path: path.parent.relative_to(ROOT).as_posix())
def test_type_checkers_users_and_the_first_use_see_the_same_names(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname or alias.name
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    tables = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    public = ast.literal_eval(tables["__all__"])
    assert {name for name in public if not name.startswith("__")} == seen
    parts = path.parent.relative_to(ROOT).parts
    package = importlib.import_module(".".join(parts if parts[0] == "kvwire" else ("kvwire", *parts)))
    assert all(hasattr(package, name) for name in public)
    assert not hasattr(package, "TYPE_CHECKERS")


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if name.endswith(".py")} == installed_files()
    assert "kvwire/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"kvwire"}
    seconds = {name.split("/")[1] for name in names if name.startswith("kvwire/")}
    assert not seconds & set(BESIDE)


def test_the_wheel_works_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # A path in a .pth file is searched last and its own .pth files are not read: the dependencies come from the running
    # environment, and torch perhaps from beside it; an editable kvwire there stays out of sight.
    torch = metadata.distribution("torch").locate_file("")
    paths = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(torch)}
    (site,) = home.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text("\n".join(sorted(paths)) + "\n", encoding="utf-8")
    packages = {Path(file).parent.as_posix().replace("/", ".") for file in installed_files()}
    run(python, "-I", "-c", IMPORT_ALL, *sorted(packages), cwd=tmp_path)
