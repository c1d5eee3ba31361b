"""Names of facades are found by any thread at once, and where only bytecode is installed."""

from __future__ import annotations

import compileall
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

import kvwire.store
from kvwire._lazy import _compiled_homes, _homes, lazy

FACADES = ("kvwire", "kvwire.codec", "kvwire.controller", "kvwire.reuse", "kvwire.store", "kvwire.transport")
FACADE = """from typing import TYPE_CHECKING

from kvwire._lazy import _compiled_homes, _homes, lazy

if TYPE_CHECKING:
    from some.part import Thing, other
    from some.part.deeper import (
        further,
    )

__all__ = ["Thing", "further", "other"]

__getattr__ = lazy(__name__)
"""


@pytest.fixture
def quick_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_threads_that_ask_first_at_the_same_time_find_their_names():
    names, chance, together = kvwire.store.__all__, random.Random(1), Barrier(3)
    for name in names:
        getattr(kvwire.store, name)  # imported, so that little but the look-up is left

    def ask(find, name, steps):
        together.wait()
        for _ in range(steps):
            pass
        return find(name)

    with ThreadPoolExecutor(3) as pool:
        for _ in range(1000):
            find, name = lazy("kvwire.store"), names[-1]
            asked = [pool.submit(ask, find, name, chance.randrange(3000)) for _ in range(3)]
            assert {one.result() for one in asked} == {getattr(kvwire.store, name)}


@pytest.mark.parametrize("package", FACADES)
def test_bytecode_names_what_the_source_names(package):
    __import__(package)
    module, loader = sys.modules[package], sys.modules[package].__spec__.loader
    compiled, read = _compiled_homes(loader.get_code(package)), _homes(package)
    public = [name for name in module.__all__ if name in read]
    assert public
    assert [compiled[name] for name in public] == [read[name] for name in public]


def test_a_package_without_its_source_finds_its_names(tmp_path):
    for name, text in (
        ("facade/__init__.py", FACADE),
        ("some/__init__.py", ""),
        ("some/part/__init__.py", "Thing, other = 1, 2"),
        ("some/part/deeper.py", "further = 3"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert compileall.compile_dir(tmp_path, quiet=1, legacy=True)
    for path in tmp_path.rglob("*.py"):
        path.unlink()
    code = "import facade; print(facade.Thing, facade.other, facade.further, hasattr(facade, 'nothing'))"
    root = Path(kvwire.__path__[0]).parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(root)!r}]; {code}"],
        capture_output=True, text=True, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.split() == ["1", "2", "3", "False"], done.stderr
