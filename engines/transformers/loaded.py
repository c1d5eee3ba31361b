"""Whether a model that the caller loaded is what a folder holds: its caches will bear the folder's identity."""

from __future__ import annotations

import hashlib
import json
from itertools import chain
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from kvwire.engines.transformers.plain import is_plain
from kvwire.errors import CorruptError, MismatchError

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from transformers import PreTrainedModel

_ROWS = 2
"""Of each tensor that are compared; training, merging and editing change them all."""


def quantisation_of(model: PreTrainedModel) -> str:
    """How a model's weights were quantised.

    Args:
        model: As it was loaded.

    Returns:
        SHA-256 of its settings, hexadecimal; empty where they were not.
    """
    found = getattr(model.config, "quantization_config", None)
    if found is None:
        return ""
    settings = found if isinstance(found, dict) else found.to_dict()
    return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()


def check_is_of(model: PreTrainedModel, folder: Path) -> None:
    """Compare the beginning of every tensor that a model and a folder both have, and that is not quantised.

    Args:
        model: As it was loaded.
        folder: With weights in safetensors.

    Raises:
        MismatchError: A tensor differs, or none can be compared.
        CorruptError: The folder's weights cannot be read.
    """
    ours = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers()))
    compared = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                names = [name for name in file.keys() if name in ours]  # noqa: SIM118 - no mapping
                found = [(name, file.get_slice(name)) for name in names]
                for name, theirs in found:
                    compared += _compared(name, ours[name], theirs, folder)
        except (OSError, SafetensorError) as error:
            msg = f"{path} cannot be read ({error}); copy the model's files again"
            raise CorruptError(msg) from error
    if not compared:
        msg = f"the model has no tensor of {folder} to be told by; pass the model as it was loaded from there"
        raise MismatchError(msg)


def _compared(name: str, ours: Tensor, theirs: object, folder: Path) -> bool:
    """Whether a tensor could be compared."""
    shape = theirs.get_shape()  # type: ignore[attr-defined]
    if not is_plain(ours) or list(ours.shape) != shape or not shape:
        return False
    stored = theirs[:_ROWS]  # type: ignore[index]
    if not stored.is_floating_point():
        return False
    if torch.equal(stored.to(ours.dtype), ours[:_ROWS].detach().cpu()):
        return True
    msg = (
        f"the model's {name} is not that of {folder}: it was trained, merged or loaded from elsewhere; save it with "
        "save_pretrained and name that folder, or use TransformersEngine(model, tokenizer, revision=...)"
    )
    raise MismatchError(msg)
