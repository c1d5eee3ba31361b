"""PEFT adapters (LoRA and others) in a model: the modules beneath them, and a digest of what they add."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


_NAMES = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "init_lora_weights", "init_weights", "peft_version",
    "revision", "task_type", "target_modules",
})  # fmt: skip
"""Fields of an adapter's configuration that change no number; its modules are in the digest anyway."""


def base_modules(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """A model's modules under their names without adapters."""
    while is_adapted(module):
        module = module.base_layer  # type: ignore[assignment]
    yield name, module
    for part, child in module.named_children():
        yield from base_modules(child, f"{name}.{part}" if name else part)


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether a module is PEFT's and adds something to the module beneath it."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")  # without an import of PEFT, no module is PEFT's
    return tuners is not None and isinstance(module, tuners.BaseTunerLayer)


def revision_with_adapters(model: torch.nn.Module, revision: str) -> str:
    """Extend a revision by a digest of the active adapters."""
    configs = getattr(model, "peft_config", {})
    added = [[name, *_added(module, configs)] for name, module in model.named_modules() if is_adapted(module)]
    added = [row for row in added if row[1:]]
    if not added:
        return revision
    return hashlib.sha256(json.dumps([revision, added], sort_keys=True, default=_plain).encode()).hexdigest()


def _added(module: Any, configs: dict[str, Any]) -> list[object]:  # noqa: ANN401 - PEFT may not be installed
    """What the active adapters of a module add, in order; their names do not count."""
    if module.disable_adapters:
        return []
    kinds = sorted({*module.adapter_layer_names, *module.other_param_names})
    entries: list[object] = []
    for adapter in module.active_adapters:
        parts: dict[str, Any] = {kind: getattr(module, kind, None) for kind in kinds}
        parts_of_adapter = {kind: _plain(part[adapter]) for kind, part in parts.items() if _has(part, adapter)}
        if parts_of_adapter:
            config = configs[adapter].to_dict() if adapter in configs else {}
            read = {name: value for name, value in config.items() if name not in _NAMES and "dropout" not in name}
            entries.append([type(module).__name__, adapter in module.merged_adapters, parts_of_adapter, read])
    return entries


def _has(part: Any, adapter: str) -> bool:  # noqa: ANN401 - as PEFT has it
    return hasattr(part, "keys") and adapter in part  # a dictionary, or one of torch's or PEFT's


def _plain(part: object) -> object:
    """Tensors as digests, all else as JSON."""
    if isinstance(part, torch.nn.Module):
        return [type(part).__name__, {name: digest_of(tensor) for name, tensor in part.state_dict().items()}]
    if isinstance(part, set | frozenset):
        return sorted(map(str, part))
    return digest_of(part) if isinstance(part, torch.Tensor) else repr(part)


def digest_of(tensor: torch.Tensor) -> str:
    """Digest of a tensor's numbers: floating point as float32, quantised tensors by their stored parts."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return hashlib.sha256("".join(digest_of(getattr(tensor, name)) for name in names).encode()).hexdigest()
    plain = tensor.detach().cpu().contiguous()
    if plain.is_floating_point() and plain.element_size() > 1:
        plain = plain.float()
    numbers = plain.reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(f"{plain.dtype} {list(plain.shape)} ".encode() + numbers.tobytes()).hexdigest()
