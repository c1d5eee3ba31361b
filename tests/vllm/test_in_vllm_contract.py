"""What the connector needs of vLLM, read from a version's source: nothing of it is imported.

Of the vLLM that is installed, and of wheels of other versions: KVWIRE_VLLM_WHEELS=one.whl:another.whl.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import zipfile
from functools import cache
from pathlib import Path

import pytest

OWN = Path(__file__).resolve().parents[2] / "engines" / "vllm"
BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


class Source:
    """Modules of a vLLM, from a wheel or from the folder that holds the package."""

    def __init__(self, place):
        self._place = Path(place)

    @cache  # noqa: B019 - as long as a run
    def module(self, name):
        """A module's tree; None where there is none."""
        for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
            if (text := self._text(path)) is not None:
                return ast.parse(text)
        return None

    def _text(self, path):
        if self._place.is_dir():
            file = self._place / path
            return file.read_text(encoding="utf-8") if file.is_file() else None
        with zipfile.ZipFile(self._place) as wheel:
            return wheel.read(path).decode() if path in wheel.namelist() else None

    @cache  # noqa: B019
    def names(self, name):
        """What can be imported from a module."""
        tree, found = self.module(name), set()
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.ImportFrom) and [each.name for each in node.names] == ["*"]:
                found |= self.names(node.module if not node.level else f"{name}.{node.module}")
            elif isinstance(node, ast.Import | ast.ImportFrom):
                found |= {each.asname or each.name for each in node.names}
        return found

    def methods(self, name):
        """A class of the base's module: its methods, by their names."""
        tree = self.module(BASE)
        (found,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name]
        return {each.name: each for each in found.body if isinstance(each, ast.FunctionDef)}


def signature(method):
    told = method.args
    return (
        [each.arg for each in told.posonlyargs + told.args], told.vararg and told.vararg.arg,
        [each.arg for each in told.kwonlyargs], told.kwarg and told.kwarg.arg,
    )  # fmt: skip


def broken(source):
    """What of vLLM is not as the connector takes it, in words."""
    found = []
    for path in sorted(OWN.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm" and not node.level:
                missing = {each.name for each in node.names} - source.names(node.module)
                found += [f"{node.module} has no {name}" for name in sorted(missing)]
    tree = ast.parse((OWN / "connector.py").read_text(encoding="utf-8"))
    (own,) = [each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == "KvwireConnector"]
    mine = {each.name: each for each in own.body if isinstance(each, ast.FunctionDef)}
    theirs = source.methods("KVConnectorBase_V1") | source.methods("SupportsHMA")
    for name, method in theirs.items():
        is_abstract = any(isinstance(each, ast.Name) and each.id == "abstractmethod" for each in method.decorator_list)
        if name in mine and name != "__init__" and signature(mine[name]) != signature(method):
            found.append(f"{name} takes {signature(method)}")
        elif is_abstract and name not in mine:
            found.append(f"{name} is to be there")
    unknown = {name for name in mine if name[0] != "_"} - set(theirs) - {"outcomes"}
    return found + [f"{name} is called by nobody" for name in sorted(unknown)]


def sources():
    installed = importlib.util.find_spec("vllm")
    places = [Path(installed.origin).parents[1]] if installed and installed.origin else []
    return [*places, *filter(None, os.environ.get("KVWIRE_VLLM_WHEELS", "").split(os.pathsep))]


@pytest.mark.parametrize("place", sources(), ids=lambda place: Path(place).name)
def test_the_connector_keeps_the_contract(place):
    """All that it imports is there, every method that vLLM may call too, and takes what vLLM gives it."""
    assert broken(Source(place)) == []


def test_what_changes_is_told(tmp_path):
    base = tmp_path / f"{BASE.replace('.', '/')}.py"
    base.parent.mkdir(parents=True)
    base.write_text(
        "class KVConnectorBase_V1:\n"
        "    def take_events(self, since): ...\n"
        "    def shutdown(self): ...\n"
        "    @abstractmethod\n"
        "    def new(self): ...\n"
        "class SupportsHMA:\n    pass\n"
    )
    told = broken(Source(tmp_path))
    assert "take_events takes (['self', 'since'], None, [], None)" in told
    assert {"new is to be there", "start_load_kv is called by nobody"} <= set(told)
    assert f"{BASE} has no KVConnectorRole" in told
    assert not any(each.startswith("shutdown") for each in told)
