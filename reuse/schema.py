"""Prompt Cache schemas: modules at fixed positions, unions, and parameters with reserved slots.

Prompt Cache (arXiv 2311.04934): a schema fixes the position of every module; a prompt takes some of them, each at its
place. Members of a union start at the same position, and a prompt takes at most one. Modules not taken leave a gap. A
parameter is a slot inside a module, whose tokens an argument replaces.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from kvwire.errors import ArgumentError
from kvwire.reuse.assemble import LinkedPrompt
from kvwire.types import KVCache
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvwire.reuse.repair.rows import RowsEngine


@dataclass(frozen=True)
class Parameter:
    """A slot in a module. Without an argument it keeps the module's own tokens.

    Attributes:
        name: Within its module.
        at: The slot's first token, counted from the module's first; None: located by ``text``.
        tokens: Length of the slot.
        text: The slot's text in the module, used to locate it.
        held: The module's token ids in the slot, if it was located by ``text``.
    """

    name: str
    at: int | None = None
    tokens: int = 0
    text: str = ""
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class Module:
    """A document at a fixed place.

    Attributes:
        name: Within the schema.
        document: Name of the document; empty: the module's name.
        tokens: Positions reserved for it, at least the document's length; 0: not known yet.
        start: Position of its first token; None: after the previous part.
        parameters: Its slots.
    """

    name: str
    document: str = ""
    tokens: int = 0
    start: int | None = None
    parameters: tuple[Parameter, ...] = ()

    @property
    def document_id(self) -> str:
        """Name of the module's document."""
        return self.document or self.name


@dataclass(frozen=True)
class Union:
    """Modules that start at the same position; a prompt takes at most one.

    Attributes:
        members: The modules.
        start: Position of their first token; None: after the previous part.
    """

    members: tuple[Module, ...]
    start: int | None = None


@dataclass(frozen=True)
class Fill:
    """An argument in its slot.

    Attributes:
        name: ``module.parameter``.
        document: Number of the document in the prompt.
        at: The slot's first token, counted from the document's first.
        tokens: Length of the slot.
        token_ids: The argument; if shorter, the rest of the slot is masked.
        held: The document's token ids in the slot, if it was located by its text.
    """

    name: str
    document: int
    at: int
    tokens: int
    token_ids: tuple[int, ...]
    held: tuple[int, ...] = ()


@dataclass(frozen=True)
class SchemaPrompt:
    """Modules and arguments that a prompt takes from a schema.

    Attributes:
        names: Of the modules, by position.
        documents: Of each module.
        starts: Position of each module's first token.
        rooms: Positions reserved for each.
        fills: Arguments in their slots.
    """

    names: tuple[str, ...]
    documents: tuple[str, ...]
    starts: tuple[int, ...]
    rooms: tuple[int, ...]
    fills: tuple[Fill, ...] = ()

    @property
    def tokens(self) -> int:
        """Position after the last module, where the question starts."""
        return self.starts[-1] + self.rooms[-1]

    def check_documents(self, lengths: Sequence[int]) -> None:
        """Refuse documents that do not fit their modules.

        Args:
            lengths: Of the documents, in tokens.

        Raises:
            ArgumentError: One is longer than its module, or too short for a slot.
        """
        for name, room, length in zip(self.names, self.rooms, lengths, strict=True):
            if length > room:
                msg = f"module {name!r} has room for {room} tokens, its document has {length}; give it more room"
                raise ArgumentError(msg)
        for fill in self.fills:
            if fill.at + fill.tokens > lengths[fill.document]:
                raise ArgumentError(
                    f"the slot {fill.name} ends at token {fill.at + fill.tokens} of a document of "
                    f"{lengths[fill.document]}; move it in the schema"
                )


@dataclass(frozen=True)
class Schema:
    """Modules and unions, in the order of their positions.

    Attributes:
        parts: Modules and unions.
    """

    parts: tuple[Module | Union, ...]
    _starts: dict[str, int] = field(init=False, repr=False, compare=False, hash=False)

    def __post_init__(self) -> None:
        """Assign positions to the modules."""
        starts: dict[str, int] = {}
        end = 0
        for part in self.parts:
            start = end if part.start is None else part.start
            for module in _members(part):
                _check_module(module)
                if module is not part and module.start is not None:
                    raise ArgumentError(f"module {module.name!r} starts where its union does: give the union its start")
                if module.name in starts or start < end:
                    wrong = "is named twice" if module.name in starts else f"starts before {end}, inside another one"
                    raise ArgumentError(f"module {module.name!r} {wrong}; each needs a name and a place of its own")
                starts[module.name] = start
            end = start + max((module.tokens for module in _members(part)), default=0)
        if not starts:
            raise ArgumentError("a schema needs at least one module")
        object.__setattr__(self, "_starts", starts)

    @property
    def modules(self) -> tuple[Module, ...]:
        """All modules, members of unions included."""
        return tuple(module for part in self.parts for module in _members(part))

    def with_modules(self, found: Mapping[str, Module]) -> Schema:
        """The same schema with some modules replaced, such as those whose lengths are now known.

        Args:
            found: Replacements by name.

        Returns:
            The schema with new positions.
        """
        parts: list[Module | Union] = []
        for part in self.parts:
            if isinstance(part, Union):
                parts.append(replace(part, members=tuple(found.get(each.name, each) for each in part.members)))
            else:
                parts.append(found.get(part.name, part))
        return Schema(tuple(parts))

    def prompt(self, modules: Sequence[str], arguments: Mapping[str, Sequence[int]] | None = None) -> SchemaPrompt:
        """Select modules and fill their slots.

        Args:
            modules: Names, in any order.
            arguments: Token ids by ``module.parameter``; slots without one keep their document's tokens.

        Returns:
            The prompt.

        Raises:
            ArgumentError: A module or parameter does not exist, a length is unknown, two members of a union are taken,
                or an argument exceeds its slot.
        """
        self._check_taken(modules)
        taken = [module for module in self.modules if module.name in modules]
        names = tuple(module.name for module in taken)
        fills = tuple(self._fill(names, taken, name, ids) for name, ids in (arguments or {}).items())
        starts = tuple(self._starts[name] for name in names)
        documents, rooms = tuple(each.document_id for each in taken), tuple(each.tokens for each in taken)
        return SchemaPrompt(names, documents, starts, rooms, fills)

    def _check_taken(self, modules: Sequence[str]) -> None:
        known = {module.name: module for module in self.modules}
        for name in modules:
            if name not in known:
                raise ArgumentError(f"the schema has no module {name!r}; it has {', '.join(known)}")
        if not modules or len(set(modules)) < len(modules):
            raise ArgumentError("a prompt takes at least one module, and each once")
        for part in self.parts:
            both = [module.name for module in _members(part) if module.name in modules]
            if len(both) > 1:
                raise ArgumentError(f"{' and '.join(both)} are members of one union; take one of them")
        unknown = [module.name for module in known.values() if not module.tokens]
        if unknown:
            msg = f"the length of {unknown[0]!r} is not known; give the schema its tokens, or ask its corpus (sized)"
            raise ArgumentError(msg)

    def _fill(self, names: Sequence[str], taken: Sequence[Module], name: str, ids: Sequence[int]) -> Fill:
        owner, _, parameter = name.rpartition(".")
        slots = [each for module in taken if module.name == owner for each in module.parameters]
        slot = next((each for each in slots if each.name == parameter), None)
        if slot is None or slot.at is None:
            options = [f"{module.name}.{each.name}" for module in taken for each in module.parameters]
            msg = f"the modules taken have no parameter {name!r}; they have {', '.join(options) or 'none'}"
            raise ArgumentError(msg)
        taken_ids = plain_token_ids(ids)
        if len(taken_ids) > slot.tokens:
            raise ArgumentError(
                f"the argument of {name} has {len(taken_ids)} tokens, its slot {slot.tokens}; shorten it"
            )
        return Fill(name, names.index(owner), slot.at, slot.tokens, taken_ids, slot.held)


def place_modules(caches: Sequence[KVCache], prompt: SchemaPrompt) -> LinkedPrompt:
    """Place modules' caches at their positions of the schema.

    Args:
        caches: Of the modules' documents, in the order of ``prompt``.
        prompt: The selected modules.

    Returns:
        The prompt, with gaps between modules; slots still hold their documents' tokens.

    Raises:
        ArgumentError: A document does not fit its module, or caches and modules differ in number.
        MismatchError: The caches come from different models.
    """
    if len(caches) != len(prompt.names):
        raise ArgumentError(f"the prompt takes {len(prompt.names)} modules, got {len(caches)} caches")
    lengths = [cache.tokens for cache in caches]
    prompt.check_documents(lengths)
    sample = next(key for key in caches[0].keys if key.numel())
    room = KVCache.zeros(caches[0].meta, prompt.tokens, dtype=sample.dtype, device=sample.device)
    linked = LinkedPrompt(lengths, caches[0].meta, cache=room, starts=prompt.starts)
    for index, cache in enumerate(caches):
        linked.write(index, 0, cache)
    return linked


def fill_parameters(engine: RowsEngine, linked: LinkedPrompt, fills: Sequence[Fill]) -> int:
    """Compute arguments in their slots; each token attends to all before it.

    Args:
        engine: Runs the model.
        linked: The prompt, in the engine's own memory; it is written to.
        fills: The arguments.

    Returns:
        How many tokens were computed.

    Raises:
        ArgumentError: The cache cannot be written in place.
        MismatchError: The model cannot run rows.
    """
    ids = [0] * linked.cache.tokens
    rows: list[int] = []
    for fill in fills:
        start, count = linked.offset(fill.document) + fill.at, len(fill.token_ids)
        linked.hide(start, start + fill.tokens)
        linked.show(start, start + count)
        ids[start : start + count] = fill.token_ids
        rows += range(start, start + count)
    if rows:
        engine.update_rows(linked.cache, ids, torch.tensor(sorted(rows)))
    return len(rows)


def _members(part: Module | Union) -> Iterator[Module]:
    yield from part.members if isinstance(part, Union) else (part,)


def _check_module(module: Module) -> None:
    """Refuse slots outside of their module, or overlapping."""
    if not module.name or module.tokens < 0 or (module.start or 0) < 0:
        raise ArgumentError(f"module {module.name!r} needs a name, and its start and tokens count from 0")
    end = 0
    names = {each.name for each in module.parameters}
    for slot in sorted(module.parameters, key=lambda each: each.at or 0):
        if slot.at is None and slot.text:
            continue
        if slot.at is None or not slot.name or "." in slot.name or slot.tokens < 1 or slot.at < end:
            raise ArgumentError(
                f"parameter {slot.name!r} of module {module.name!r} needs a name without dots and a slot of its own: "
                "at, its first token, and tokens, its length, or text"
            )
        end = slot.at + slot.tokens
    if len(names) < len(module.parameters) or (module.tokens and end > module.tokens):
        msg = f"parameters of module {module.name!r} have names and slots of their own in its {module.tokens} tokens"
        raise ArgumentError(msg)
