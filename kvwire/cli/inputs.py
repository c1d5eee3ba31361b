"""What commands read alike: engines, files, blob headers, lengths, links, machines and shapes."""

from __future__ import annotations

import gc
import re
from typing import TYPE_CHECKING, TypeVar

from kvwire._user_file import file_errors
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, NotFoundError, StorageError, TruncatedError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvwire.controller.simulator import Machine, Model
    from kvwire.engines.base import Engine
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.engines.transformers.tokenizing import PieceTokenizer
    from kvwire.reuse import LinkLayout, SoftTokens
    from kvwire.store import Catalog, CatalogEntry, KeySpace
    from kvwire.transport import LinkSettings
    from kvwire.types import BlobInfo


T = TypeVar("T")
_PREFIX_BYTES = 1 << 16  # most headers are shorter
_TOKENS = re.compile(r"([0-9]{1,9})(k?)")
_MOST_NAMED = 40  # characters of what somebody wrote that errors repeat
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,3})?)([smhd]?)")


def read_file_header(path: Path) -> BlobInfo:
    """Read the header of a blob file, and no more of it."""
    from kvwire.codec import inspect

    if not path.is_file():
        raise NotFoundError(f"{path} is not a file; name a .kvw file, as kvwire encode writes them")
    try:
        with path.open("rb") as file:
            data = file.read(_PREFIX_BYTES)
            try:
                return inspect(data)
            except TruncatedError as error:
                more = file.read(max(0, error.needed - len(data)))  # of a header that the format bounds
                return inspect(data + more)
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror})") from error
    except TruncatedError as error:
        raise TruncatedError(f"{path}: {error}", error.needed) from error
    except (CorruptError, FormatVersionError) as error:
        raise type(error)(f"{path}: {error}") from error


def read_file(path: Path, advice: str, most: int | None = None) -> bytes:
    """Read a whole file, or one byte more than ``most``; a pipe, too: a shell gives ``<(command)`` as one."""
    if path.is_dir() or not path.exists():
        raise NotFoundError(f"{path} is not a file; {advice}")
    with file_errors(f"{path} cannot be read", "check its permissions and the disk"), path.open("rb") as file:
        return file.read() if most is None else file.read(most + 1)


def read_tokens(text: str, most: int) -> int:
    """Read a number of tokens such as 4000 or 32k, which is 32768."""
    found = _TOKENS.fullmatch(text.strip().lower())
    tokens = int(found[1]) * (1024 if found[2] else 1) if found else 0
    if not 0 < tokens <= most:
        named = text[:_MOST_NAMED]
        msg = f"{named!r} is no length of a prompt: write tokens, such as 4000 or 32k, at most {most // 1024}k"
        raise ArgumentError(msg)
    return tokens


def read_link(text: str) -> LinkSettings:
    """Read a link such as ``1gbit`` or ``1gbit,2ms``."""
    from kvwire.transport import parse_link

    try:
        return parse_link(text)
    except ArgumentError as error:
        named = text[:_MOST_NAMED]
        msg = f"{named!r} is not a link: write a bandwidth above 0, such as 50mbit or 6.25MB/s, or 50mbit,20ms"
        raise ArgumentError(msg) from error


def read_machine(name: str) -> Machine:
    """Look up a machine."""
    from kvwire.controller.simulator import MACHINES

    return _named("machine", name, MACHINES)


def read_shape(name: str) -> Model:
    """Look up a model's shape."""
    from kvwire.controller.simulator import MODELS

    return _named("model shape", name, MODELS)


def _named(kind: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise NotFoundError(f"no {kind} is called {name[:_MOST_NAMED]!r}; choose one of {', '.join(known)}")
    return known[name]


def spaces_of(catalog: Catalog, config: str) -> Iterator[KeySpace]:
    """A tenant's model configurations that begin so."""
    return (space for space in catalog.configurations() if space.config.startswith(config))


def find_entry(catalog: Catalog, config: str, document: str) -> tuple[KeySpace, CatalogEntry]:
    """A document's entry, in the one configuration that has it."""
    spaces = list(spaces_of(catalog, config))
    found = [(space, entry) for space in spaces if (entry := catalog.by_document(space, document)) is not None]
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(space.config for space, _ in found)
        raise ArgumentError(f"several model configurations have {document!r}: choose one with --config: {names}")
    like = f" that begin with {config!r}" if config else ""
    raise NotFoundError(
        f"{document!r} is not in {catalog.store.url}, where this tenant has {len(spaces)} model configurations{like}; "
        "see kvwire store ls, --tenant and --config"
    )


def open_engine(model: str, device: str = "cpu", dtype: str = "auto") -> TransformersEngine:
    """Open the engine that options name."""
    import torch

    from kvwire.engines.transformers.opening import open_engine

    usual = torch.float32 if device == "cpu" else None
    engine = open_engine(model, device=device, dtype=usual if dtype == "auto" else getattr(torch, dtype))
    gc.freeze()  # what is imported stays, and searching it for garbage holds all up for a third of a second
    return engine


def model_name(model: str) -> str:
    """What a store's record knows a model by."""
    from kvwire.engines.transformers.identity import find_folder, model_revision

    try:
        folder, _ = find_folder(model)
    except NotFoundError:
        return model
    if not (folder / "config.json").is_file():
        return model
    try:
        return model_revision(folder)
    except OSError as error:
        raise StorageError(f"{folder} cannot be read ({error}); check its permissions and the disk") from error


def open_tokenizer(model: str) -> PieceTokenizer:
    """Open a model's tokenizer alone."""
    from kvwire.engines.transformers.opening import open_tokenizer

    return open_tokenizer(model)


def read_soft_tokens(path: Path) -> SoftTokens:
    """Read a file of soft tokens."""
    from kvwire._user_file import read_at_most
    from kvwire.reuse import SoftTokens
    from kvwire.reuse.soft_tokens import MAX_FILE_BYTES

    try:
        data = read_at_most(path, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise NotFoundError(f"{path} is not there; --soft-tokens names a file that kvwire train-links wrote") from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); --soft-tokens names a file that kvwire train-links wrote"
        raise StorageError(msg) from error
    if len(data) > MAX_FILE_BYTES:
        raise CorruptError(f"{path} is longer than any file of soft tokens; name the one that kvwire train-links wrote")
    return SoftTokens.from_bytes(data)


def use_layout(engine: Engine, links: str | None, soft_tokens: Path | None) -> LinkLayout:
    """The layout that options name; soft tokens are put into the engine."""
    from kvwire.reuse import PLAIN, read_layout

    layout = read_layout(links) if links else PLAIN
    if soft_tokens is None:
        return layout
    soft = read_soft_tokens(soft_tokens)
    layout = layout if links else soft.link_layout
    soft.check_layout(layout)
    engine.use_soft_tokens(soft)
    return layout


def read_seconds(text: str) -> float:
    """A length of time, such as 90s or 24h."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ArgumentError(f"{text!r} is no length of time: write 90s, 30m, 24h or 7d")
    return float(match[1]) * _SECONDS[match[2] or "s"]
