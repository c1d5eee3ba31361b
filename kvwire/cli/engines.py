"""The engine that a command runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvwire.engines.base import Engine


def open_engine(model: str, device: str = "cpu", dtype: str = "auto") -> Engine:
    """Open the engine that options name.

    Args:
        model: Folder of the model.
        device: Where it runs, as torch names devices.
        dtype: ``float32``, ``bfloat16`` or ``float16``; ``auto``: float32 on the CPU, elsewhere as the weights are
            stored.

    Returns:
        The engine, ready to run.

    Raises:
        KvwireError: There is no model that can be run, see ``kvwire.open_engine``.
    """
    import torch

    from kvwire.engines import transformers

    usual = torch.float32 if device == "cpu" else None
    chosen = usual if dtype == "auto" else getattr(torch, dtype)
    return transformers.open_engine(model, device=device, dtype=chosen)
