"""A room imports only rooms on a lower floor, and holds only what belongs in it."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
DOOR = "kvwire"
FLOORS = {
    "_forks": 0,
    "_json": 0,
    "_lazy": 0,
    "_html": 0,
    "_printable": 0,
    "_user_file": 0,
    "_version": 0,
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
# Within a room: sub-folders and files, lowest shelf first. A file imports its own sub-folder and lower shelves alone.
SHELVES: dict[str, list[set[str]]] = {
    "codec": [
        {"backend.py", "entropy", "workers.py"},
        {"format"},
        {"profile"},
        {"prediction"},
        {"transform"},
        {"fitting", "gpu"},
        {"kinds"},
        {"api"},
    ],
    "controller": [
        {"costs.py", "documents.py", "horizons.py", "repair.py", "settings.py", "workers.py"},
        {"estimators.py", "events.py", "snapshot.py"},
        {"forecast.py", "learning.py"},
        {"chunk_table.py", "estimates.py", "policies"},
        {"document_state.py", "link.py"},
        {"load.py"},
        {"state.py"},
        {"joining.py", "limits.py", "repairing.py"},
        {"outcomes.py", "planner.py"},
        {"starting.py"},
        {"core.py"},
        {"simulator"},
    ],
    "engines": [{"texts.py"}, {"base.py"}, {"calibration.py", "weightless.py"}, {"transformers"}, {"testing.py"}],
    "reuse": [
        {"assemble.py", "layout.py"},
        {"layout_presets.py", "link_shift.py", "repair"},
        {"edits", "link_rows.py", "schema.py", "soft_tokens.py"},
        {"compress.py", "link_repair.py"},
        {"schema_json.py"},
    ],
    "store": [
        {"http_clients.py", "keys.py", "recent.py"},
        {"base.py"},
        {"records.py"},
        {"index_records.py", "kept_repair.py"},
        {"content_checks.py"},
        {"key_kinds.py"},
        {"files"},
        {"backends", "crypto"},
        {"listing.py"},
        {"catalog"},
        {"cache", "prefix"},
        {"donors.py"},
        {"upkeep"},
        {"schemes.py"},
        {"testing"},
    ],
    "transport": [{"errors.py", "links.py"}, {"sources"}, {"fetch"}, {"server"}, {"testing.py"}],
    DOOR: [
        {"_version.py", "errors.py"},
        {"_forks.py", "_html.py", "_json.py", "_lazy.py", "_printable.py", "_user_file.py"},
        {"types"},
        {"runtime", "whatif"},
        {"comparison", "engines.lmcache", "engines.sglang", "engines.vllm", "offline", "report", "training"},
        {"lmcache.py", "sglang.py", "vllm.py"},
        {"cli"},
        {"__main__.py"},
    ],
}
ADAPTERS = {"engines.lmcache", "engines.sglang", "engines.vllm"}
"""In the folder of engines, on the floor of what runs loads: another process has the model, these load for it."""
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
    if ".".join(rest[:2]) in ADAPTERS:
        return DOOR
    return rest[0] if rest and rest[0] in FLOORS else DOOR


def absolute(name: str, level: int, module: str) -> str:
    """Dotted name that ``level`` dots and ``name`` mean inside ``module``."""
    if not level:
        return name
    package = module.split(".")[:-level]
    return ".".join([*package, name] if name else package)


@cache
def imports(source: str, module: str) -> list[Import]:
    """Every import of a module: at the top, in functions, for type checkers only, and by a literal name."""
    return list(_imports(ast.parse(source), module))


def _imports(tree: ast.AST, module: str) -> Iterator[Import]:
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
    for line, target in imports(source, module):
        room = room_of(target)
        if room is None or room == own or FLOORS[room] == FLOORS[own] == 0:
            continue
        if FLOORS[room] >= FLOORS[own]:
            message = f"{own} (floor {FLOORS[own]}) imports {target} (floor {FLOORS[room]})"
            faults.append((line, message))
    return faults


def top_names(source: str, module: str) -> list[Import]:
    """First part of the name of every import."""
    return [(line, target.partition(".")[0]) for line, target in imports(source, module)]


def words(tree: ast.AST) -> Iterator[Import]:
    """Every name and string of a module, without comments and docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in docstrings:
            texts = (value for _, value in ast.iter_fields(node) if isinstance(value, str))
            yield from ((getattr(node, "lineno", 0), text) for text in texts)


@cache
def graph() -> dict[str, set[str]]:
    """Every module of the package with the modules that it imports, anywhere in its text."""
    files = {module_name(path): path for path in sources(DOOR, *ROOMS)}
    names = {name.removesuffix(".__init__"): name for name in files}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        targets = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ImportFrom(module=base, names=taken, level=level):
                    start = absolute(base or "", level, name)
                    targets |= {f"{start}.{each.name}" if f"{start}.{each.name}" in names else start for each in taken}
                case ast.Import(names=taken):
                    targets |= {each.name for each in taken}
        found[name] = {names[target] for target in targets if target in names} - {name}
    return found


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules that import each other, in one step or in several."""
    reach: dict[str, set[str]] = {}
    for name in edges:
        seen, ahead = set(), [name]
        while ahead:
            ahead += (new := edges[ahead.pop()] - seen)
            seen |= new
        reach[name] = seen
    return [set(group) for group in {frozenset(x for x in reach[n] if n in reach[x]) for n in edges if n in reach[n]}]


def place_of(module: str) -> tuple[str, str]:
    """Room of a module, and its sub-folder or file there; empty for the room's own ``__init__``."""
    room = room_of(module) or DOOR
    rest = module.split(".")[1:] if room == DOOR or FLOORS[room] == 0 else module.split(".")[2:]
    if ".".join(rest[:2]) in ADAPTERS:
        return room, ".".join(rest[:2])
    if FLOORS[room] == 0:
        room = DOOR
    return room, "" if rest == ["__init__"] else rest[0] if len(rest) > 1 else f"{rest[0]}.py"


def shelf_of(module: str) -> int | None:
    """Index of the shelf that a module stands on, None for the front of its room."""
    room, unit = place_of(module)
    return next((at for at, units in enumerate(SHELVES[room]) if unit in units), None) if unit else None


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


def test_no_file_imports_itself_through_others() -> None:
    inside = {name: {each for each in targets if not each.endswith("__init__")} for name, targets in graph().items()}
    assert not circles(inside)


def test_every_file_stands_on_a_shelf() -> None:
    modules = [name for name in graph() if place_of(name)[1]]
    assert not [name for name in modules if shelf_of(name) is None], "name their folders or files in SHELVES"


def test_sub_folders_import_lower_shelves_alone() -> None:
    faults = []
    for name, targets in graph().items():
        (room, unit), own = place_of(name), shelf_of(name)
        for target in targets:
            other, theirs = place_of(target), shelf_of(target)
            if own is None or unit == "testing" or other[0] != room or other == (room, unit):
                continue
            if theirs is None or theirs >= own:
                why = "import from the file that has it" if target.endswith("__init__") else "which stands no lower"
                faults.append(f"{name} imports {target}, {why}")
    report(sorted(faults))


OPENERS = (
    "kvwire.__init__",
    "kvwire.cli.",
    "kvwire.training.",
    "kvwire.engines.vllm.chat",
    "kvwire.engines.vllm.opening",
    "kvwire.engines.vllm.proxy.bodies",
)
"""Modules that may name the engine of one library: the public names, what opens one or tells its model, training."""


def test_only_openers_name_an_engine() -> None:
    faults = [
        f"{name} imports {target}: it needs no more of an engine than kvwire.engines.base"
        for name, targets in graph().items()
        for target in targets
        if room_of(name) == DOOR and target.startswith("kvwire.engines.transformers") and not name.startswith(OPENERS)
    ]
    report(faults)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [{"a", "b", "c"}]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})


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


def test_no_public_name_is_that_of_a_module_beside_it() -> None:
    """A package would give the function or the module by that name, whichever was imported last."""
    faults = []
    for path in sources(DOOR, *ROOMS):
        text = path.read_text(encoding="utf-8")
        if path.name != "__init__.py" or "lazy(" not in text:
            continue
        tree = ast.parse(text)
        beside = {each.stem for each in path.parent.glob("*.py")} | {each.name for each in path.parent.iterdir()}
        exported = {
            word.value
            for node in tree.body
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets)
            for word in ast.walk(node.value)
            if isinstance(word, ast.Constant)
        }
        faults += [f"{path.relative_to(ROOT)} exports {name}, which is a module there" for name in exported & beside]
    report(faults)
