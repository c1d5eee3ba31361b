"""The engine that a command runs on, its tokenizer, and what stands around documents in it."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from kvwire.errors import CorruptError, NotFoundError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.engines.base import Engine
    from kvwire.engines.transformers.tokenizing import PieceTokenizer
    from kvwire.reuse import LinkLayout, SoftTokens


def open_engine(model: str, device: str = "cpu", dtype: str = "auto") -> Engine:
    """Open the engine that options name."""
    import torch

    from kvwire.engines import transformers

    usual = torch.float32 if device == "cpu" else None
    chosen = usual if dtype == "auto" else getattr(torch, dtype)
    engine = transformers.open_engine(model, device=device, dtype=chosen)
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
        msg = f"{folder} cannot be read ({error}); check its permissions and the disk"
        raise StorageError(msg) from error


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
        msg = f"{path} is not there; --soft-tokens names a file that kvwire train-links wrote"
        raise NotFoundError(msg) from error
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); --soft-tokens names a file that kvwire train-links wrote"
        raise StorageError(msg) from error
    if len(data) > MAX_FILE_BYTES:
        msg = f"{path} is longer than any file of soft tokens; name the one that kvwire train-links wrote"
        raise CorruptError(msg)
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
