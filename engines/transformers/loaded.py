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


def revision_of(model: PreTrainedModel, folder: Path, revision: str, *, is_quantised: bool) -> str:
    """Tell which weights a model runs that was loaded from a folder.

    Args:
        model: As it was loaded.
        folder: With weights in safetensors.
        revision: Of the folder.
        is_quantised: The folder's weights are.

    Returns:
        The folder's revision; where the model was quantised as it was loaded, so that its caches are others, a digest
        of that and the settings.

    Raises:
        MismatchError: A tensor differs, or none can be compared.
        CorruptError: The folder's weights cannot be read.
    """
    _check_alike(model, folder)
    found = getattr(model.config, "quantization_config", None)
    if is_quantised or found is None:
        return revision
    settings = json.dumps(found if isinstance(found, dict) else found.to_dict(), sort_keys=True, default=str)
    return hashlib.sha256(f"{revision} {settings}".encode()).hexdigest()


def _check_alike(model: PreTrainedModel, folder: Path) -> None:
    """Compare the beginning of every tensor that both have, and that is not quantised."""
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
