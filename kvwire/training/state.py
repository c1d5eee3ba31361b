"""A training's state in a file: trained weights, optimiser, random generator, and counts."""

from __future__ import annotations

import contextlib
import os
import pickle
from typing import TYPE_CHECKING, Any

import torch

from kvwire.errors import ArgumentError, CorruptError, StorageError
from kvwire.store.files.files import put_in_place

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.nn import Parameter
    from torch.optim import Optimizer

_PARTS = {"about", "step", "losses", "counts", "parameters", "optimiser", "generator"}


def save_state(
    path: Path, about: Mapping[str, Any], parameters: Mapping[str, Parameter], optimiser: Optimizer,
    losses: list[float], counts: Mapping[str, int],
) -> None:  # fmt: skip
    """Save the state atomically."""
    state = {
        "about": dict(about), "step": len(losses), "losses": losses, "counts": dict(counts),
        "parameters": {name: parameter.detach() for name, parameter in parameters.items()},
        "optimiser": optimiser.state_dict(), "generator": torch.get_rng_state(),
    }  # fmt: skip
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, temporary)
        put_in_place(temporary, path)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise StorageError(f"{path} cannot be written ({error}); free some space or name another --out") from error


def restore_state(
    path: Path, about: Mapping[str, Any], parameters: Mapping[str, Parameter], optimiser: Optimizer
) -> tuple[list[float], dict[str, int]]:
    """Restore a saved state."""
    state = _read(path)
    changed = [name for name in about if state["about"].get(name) != about[name]]
    if changed or state["about"].keys() != about.keys():
        names = ", ".join(changed) or "settings"
        msg = f"{path} was kept with other {names}; repeat the first command to go on, or name another --out"
        raise ArgumentError(msg)
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state["parameters"][name])
        optimiser.load_state_dict(state["optimiser"])
        torch.set_rng_state(state["generator"].cpu())
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} does not fit this model ({type(error).__name__}); name another --out") from error
    return list(state["losses"]), dict(state["counts"])


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)  # never runs code from the file
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror}); leave --resume out to start again") from error
    except (EOFError, KeyError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise CorruptError(f"{path} is damaged; leave --resume out and start again in another --out") from error
    if not isinstance(state, dict) or state.keys() != _PARTS:
        raise CorruptError(f"{path} holds no training; leave --resume out and start again in another --out")
    return state
