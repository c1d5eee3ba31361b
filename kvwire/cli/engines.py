"""The engine that a command runs on."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError, StorageError

if TYPE_CHECKING:
    from kvwire.engines.base import Engine
    from kvwire.engines.transformers.tokenizing import PieceTokenizer


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
