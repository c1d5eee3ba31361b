"""A room imports only rooms on a lower floor, and holds only what belongs in it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
DOOR = "kvwire"
FLOORS = {
    "_lazy": 0,
    "errors": 0,
    "types": 0,
    "codec": 1,
    "controller": 2,
    "store": 2,
    "reuse": 3,
    "transport": 3,
    "engines": 4,
    DOOR: 5,
}
ROOMS = sorted(name for name, floor in FLOORS.items() if 0 < floor < FLOORS[DOOR])
BESIDE = ("benchmarks", "demo", "tests")  # folders beside the rooms: they import kvwire, nothing imports them

# What a room never holds, as packages that it never imports.
STRANGERS = {
    "codec": {"aiohttp", "asyncio", "boto3", "http", "requests", "socket", "transformers", "urllib"},
    "controller": {"aiohttp", "asyncio", "http", "socket", "threading", "time", "transformers"},
    "reuse": {"aiohttp", "boto3", "http", "requests", "socket", "urllib"},
}
MODEL_NAMES = ("deepseek", "falcon", "gemma", "gpt2", "gpt_", "llama", "mistral", "mixtral", "olmo", "qwen", "smollm")

Import = tuple[int, str]  # line, absolute name of what is imported


def module_name(path: Path) -> str:
    """Dotted name under which a file of the tree is installed; a package's own file ends in ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == DOOR else (DOOR, *parts))


def sources(*folders: str) -> Iterator[Path]:
    """Python files of folders at the root."""
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def room_of(module: str) -> str | None:
    """Room that a dotted name leads to; None outside kvwire. What is in no room stands at the front door."""
    top, *rest = module.split(".")
    if top != DOOR:
        return None
    return rest[0] if rest and rest[0] in FLOORS else DOOR


def absolute(name: str, level: int, module: str) -> str:
    """Dotted name that ``level`` dots and ``name`` mean inside ``module``."""
    if not level:
        return name
    package = module.split(".")[:-level]
    return ".".join([*package, name] if name else package)


def imports(tree: ast.AST, module: str) -> Iterator[Import]:
    """Every import of a module: at the top, in functions, for type checkers only, and by a literal name."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=name, names=names, level=level):
                base = absolute(name or "", level, module)
                found = [f"{DOOR}.{alias.name}" for alias in names] if base == DOOR else [base]
                yield from ((node.lineno, target) for target in found)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                level = len(name) - len(name.lstrip("."))
                yield node.lineno, absolute(name.lstrip("."), level, module)


def layer_faults(source: str, module: str) -> list[Import]:
    """Imports of a module that lead to its own floor's neighbour or upstairs."""
    own = room_of(module) or DOOR
    faults = []
    for line, target in imports(ast.parse(source), module):
        room = room_of(target)
        if room is None or room == own or FLOORS[room] == FLOORS[own] == 0:
            continue
        if FLOORS[room] >= FLOORS[own]:
            message = f"{own} (floor {FLOORS[own]}) imports {target} (floor {FLOORS[room]})"
            faults.append((line, message))
    return faults


def top_names(source: str, module: str) -> list[Import]:
    """First part of the name of every import."""
    return [(line, target.partition(".")[0]) for line, target in imports(ast.parse(source), module)]


def words(tree: ast.AST) -> Iterator[Import]:
    """Every name and string of a module, without comments and docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            texts = (value for _, value in ast.iter_fields(node) if isinstance(value, str))
            yield from ((getattr(node, "lineno", 0), text) for text in texts)


def at(path: Path, faults: list[Import]) -> list[str]:
    """Faults of one file as ``file:line: what``."""
    return [f"{path.relative_to(ROOT)}:{line}: {what}" for line, what in faults]


def report(faults: list[str]) -> None:
    assert not faults, "\n" + "\n".join(faults)


def test_rooms_import_only_lower_floors() -> None:
    faults: list[str] = []
    for path in sources(DOOR, *ROOMS):
        faults += at(path, layer_faults(path.read_text(encoding="utf-8"), module_name(path)))
    report(faults)


def test_rooms_are_imported_under_their_installed_name() -> None:
    banned = {*ROOMS, *BESIDE}
    faults: list[str] = []
    for path in sources(DOOR, *ROOMS, *BESIDE):
        names = top_names(path.read_text(encoding="utf-8"), module_name(path))
        faults += at(
            path, [(line, f"imports {name}; rooms are kvwire.<room>") for line, name in names if name in banned]
        )
    report(faults)


def test_rooms_leave_strangers_outside() -> None:
    faults: list[str] = []
    for room, strangers in STRANGERS.items():
        for path in sources(room):
            names = top_names(path.read_text(encoding="utf-8"), module_name(path))
            faults += at(path, [(line, f"{room} never imports {name}") for line, name in names if name in strangers])
    report(faults)


def test_the_codec_knows_no_model_by_name() -> None:
    faults: list[str] = []
    for path in sources("codec"):
        found = words(ast.parse(path.read_text(encoding="utf-8")))
        faults += at(path, [(line, text) for line, text in found if any(name in text.lower() for name in MODEL_NAMES)])
    report(faults)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvwire.codec.a", "import kvwire"),
        ("kvwire.codec.a", "import kvwire.store.backends.memory as m"),
        ("kvwire.codec.a", "from kvwire import KVCache"),
        ("kvwire.codec.a", "from kvwire import controller"),
        ("kvwire.codec.a", "from ..store import Store"),
        ("kvwire.codec.a", "from .. import store"),
        ("kvwire.codec.a", "def f():\n    from kvwire.engines import x"),
        ("kvwire.codec.a", "if TYPE_CHECKING:\n    from kvwire.reuse import x"),
        ("kvwire.codec.a", "importlib.import_module('kvwire.engines')"),
        ("kvwire.codec.a.__init__", "from ...transport import x"),
        ("kvwire.store.__init__", "from kvwire.controller import x"),
        ("kvwire.types.cache", "from kvwire.codec import x"),
        ("kvwire.transport.a", "from kvwire.cli.app import main"),
    ],
)
def test_a_wrong_import_is_found(module: str, source: str) -> None:
    assert len(layer_faults(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvwire.codec.a", "import torch, codecs\nfrom .b import x\nfrom . import c"),
        ("kvwire.codec.a", "from kvwire import errors\nfrom kvwire.types import KVCache"),
        ("kvwire.codec.sub.a", "from ..b import x\nfrom .. import b"),
        ("kvwire.codec.sub.__init__", "from .a import x\nfrom ..b import y"),
        ("kvwire.types.cache", "from kvwire.errors import ArgumentError"),
        ("kvwire.engines.a", "from kvwire.reuse import x\nfrom kvwire.store import y\nfrom kvwire import transport"),
        ("kvwire.cli.app", "from kvwire import engines, open_engine\nfrom . import codec"),
    ],
)
def test_a_right_import_passes(module: str, source: str) -> None:
    assert not layer_faults(source, module)


def test_model_names_are_looked_for_in_code_alone() -> None:
    tree = ast.parse('"""Llama."""\n# llama\ndef fit(qwen):\n    "Llama."\n    return "x"')
    assert [line for line, text in words(tree) if text == "qwen"] == [3]
    assert not [text for _, text in words(tree) if "llama" in text.lower()]
