"""Packages of extras are imported where they are used; without one, the error names the extra."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvwire._lazy import require
from kvwire.errors import ArgumentError

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
OPTIONAL = {"prometheus_client": "serve", "cryptography": "crypto"}
LARGE = {"pyarrow": "parquet", "datasets": "datasets", "ray": "ray"}  # of which the set-up installs none
IMPORT_ALL = """
import importlib, pkgutil, sys
for name in {blocked!r}: sys.modules[name] = None
import kvwire
for room in ("store", "transport", "runtime", "offline", "cli"):
    package = importlib.import_module(f"kvwire.{{room}}")
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if ".testing" not in found.name:
            importlib.import_module(found.name)
from kvwire.errors import ArgumentError
from kvwire.store import Catalog, Keyring, MemoryStore
from kvwire.transport import ObjectServer
for use in (lambda: ObjectServer(MemoryStore()), lambda: Catalog(MemoryStore(), keyring=Keyring([bytes(32)]))):
    try:
        use()
    except ArgumentError as error:
        print(error)
"""


def test_everything_imports_without_the_extras_and_their_use_names_them():
    script = IMPORT_ALL.format(blocked=(*OPTIONAL, *LARGE))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "kvwire serve needs prometheus_client: pip install 'kvwire[serve]'",
        "encryption at rest needs cryptography: pip install 'kvwire[crypto]'",
    ]


def test_every_package_has_its_extra():
    extras = PROJECT["optional-dependencies"]
    for package, extra in (OPTIONAL | LARGE).items():
        assert any(need.replace("-", "_").startswith(package) for need in extras[extra]), package


def test_another_package_that_is_missing_inside_is_not_blamed_on_the_extra(tmp_path, monkeypatch):
    (tmp_path / "half_there.py").write_text("import kvwire_never_made")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="kvwire_never_made"):
        require("half_there", "serve", "serving")
    with pytest.raises(ArgumentError, match="serve"):
        require("kvwire_never_made", "serve", "serving")


def test_the_set_up_installs_every_package_of_the_extras():
    extras = PROJECT["optional-dependencies"]
    needed = {need for name in OPTIONAL.values() for need in extras[name]}
    assert not needed & set(PROJECT["dependencies"])
    for name in ("all", "dev"):
        own = next(need for need in extras[name] if need.startswith("kvwire["))
        assert set(OPTIONAL.values()) <= set(own.removeprefix("kvwire[").removesuffix("]").split(","))
