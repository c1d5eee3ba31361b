"""Checks that a caller's model computes what its folder holds, since caches will bear the folder's identity.

Every weight is compared, and every module with those that the folder's configuration makes: a changed weight, module,
number or hook makes another model.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvwire.engines.transformers.adapters import base_modules, digest_of
from kvwire.engines.transformers.identity import computed_fields, read_config
from kvwire.engines.transformers.plain import is_plain
from kvwire.engines.transformers.weight_files import weight_files
from kvwire.errors import CorruptError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.nn import Module

_WHAT_TO_DO = (
    "save the model with save_pretrained and name that folder, or use TransformersEngine(model, tokenizer, "
    "revision=...) with a revision that names what it computes"
)
_TRUSTED = (
    "transformers.", "accelerate.", "kernels.", "kvwire.engines.transformers.capture", "peft.", "torch.nn.modules.",
)  # fmt: skip
"""Packages whose hooks and attention functions only affect how a model runs, not its caches."""
_QUANTISERS = frozenset({
    "aqlm", "auto_gptq", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "gptqmodel",
    "hqq", "optimum", "quark", "torch", "torchao", "transformers", "vptq",
})  # fmt: skip
"""Packages whose modules replace an architecture's in quantised models."""
_RUNNING = frozenset({"training", "gradient_checkpointing", "max_seq_len_cached"})
"""Attributes about how a module runs, not what it computes."""
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotation whose frequencies change with the last run's length."""
_MAKES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


def revision_of(model: Module, folder: Path, revision: str, *, is_quantised: bool) -> str:
    """Revision of a model loaded from a folder, without adapters."""
    if not isinstance(model, PreTrainedModel):
        msg = f"the model is a {type(model).__name__}, not a model of transformers; pass the model inside it"
        raise MismatchError(msg)
    modules = dict(base_modules(model))
    quantised = _check_modules(model, modules, folder)
    rest = _check_weights(model, modules, quantised, folder, whole=is_quantised)
    settings = getattr(model.config, "quantization_config", None)
    if is_quantised or settings is None:
        return revision
    told = [revision, settings if isinstance(settings, dict) else settings.to_dict(), rest]
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def _check_configuration(model: PreTrainedModel, folder: Path) -> bool:
    """Compare the computing fields with the folder's configuration; returns whether the model was quantised."""
    config = read_config(folder)
    is_known = type(model).__module__.startswith("transformers.models.")
    if not (is_known and isinstance(model.config, model.config_class or ())):
        msg = f"the model is a {type(model).__name__}, which is not transformers' class for it; {_WHAT_TO_DO}"
        raise MismatchError(msg)
    if not isinstance(config, PreTrainedConfig) or model.config.model_type not in {
        config.model_type,
        config.get_text_config(decoder=True).model_type,
    }:
        msg = f"the model is a {model.config.model_type!r}, which is not that of {folder}; pass the one loaded there"
        raise MismatchError(msg)
    ours, theirs = computed_fields(model.config), computed_fields(config)
    is_quantised = ours.pop("quantization_config", None) is not None
    theirs.pop("quantization_config", None)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise MismatchError(
                f"the model's configuration has {name} {ours.get(name)!r}, {folder} {theirs.get(name)!r}; {_WHAT_TO_DO}"
            )
    return is_quantised


def _check_modules(model: PreTrainedModel, modules: dict[str, Module], folder: Path) -> set[str]:
    """Compare modules with those of the folder's configuration; returns names of the quantised ones."""
    is_quantised = _check_configuration(model, folder)
    for name, module in (("", torch.nn.modules.module), *model.named_modules()):
        _check_hooks(name, module)
    made: dict[str, Any] = dict(_made(type(model), model.config).named_modules(remove_duplicate=False))
    quantised = set()
    if lost := made.keys() - modules.keys():
        raise MismatchError(f"the model lacks the module {min(lost)!r} of its architecture; {_WHAT_TO_DO}")
    for name, module in modules.items():
        twin: Any = made.get(name)
        if type(module) is type(twin) and all(is_plain(t) or t.is_meta for t in module.parameters(recurse=False)):
            _check_config(name, module, twin)
            _check_numbers(name, module, twin)
        elif is_quantised and type(module).__module__.partition(".")[0] in _QUANTISERS:
            quantised.add(name)
        else:
            msg = f"the model's module {name!r} is no part of its architecture ({type(module).__name__}); {_WHAT_TO_DO}"
            raise MismatchError(msg)
    return quantised


def _made(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build a configuration's architecture without weights, with small buffers if possible."""
    try:
        with _WithoutWeights():
            return kind(config)
    except (NotImplementedError, RuntimeError):  # buffers computed from weights
        with torch.device("meta"):
            return kind(config)


class _WithoutWeights(TorchFunctionMode):
    """Puts weights on the meta device; tensors computed from numbers are real."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - as torch has it
        del types
        return func(*args, **(kwargs or {}) | ({"device": "meta"} if func in _MAKES else {}))


def _check_hooks(name: str, module: Any) -> None:  # noqa: ANN401 - a module, or torch's own of all modules
    """Refuse hooks that change a module's computation."""
    prefix = "" if isinstance(module, torch.nn.Module) else "_global"
    hooks = [each for kind in ("_forward_pre_hooks", "_forward_hooks") for each in vars(module)[prefix + kind].values()]
    placed = vars(module).get("_hf_hook")
    own = vars(module).get("forward")
    if placed is not None:
        hooks.append(type(placed))
        own = vars(module).get("_old_forward")
    if own is not None and getattr(own, "__func__", None) is not type(module).forward:  # accelerate keeps that aside
        hooks.append(own)
    if not all(map(_is_trusted, hooks)):
        msg = f"the model's module {name!r} has a hook or a forward of the caller's; remove it, or {_WHAT_TO_DO}"
        raise MismatchError(msg)


def _is_trusted(function: object) -> bool:
    """Whether a function's code is from a package that runs models; names it claims do not count."""
    function = getattr(function, "func", function)  # of functools.partial
    function = getattr(function, "__func__", function)  # of a method
    home = getattr(function, "__globals__", {}).get("__name__")
    home = home or getattr(function if isinstance(function, type) else type(function), "__module__", "")
    return function is None or str(home).startswith(_TRUSTED)


def _check_config(name: str, module: Module, twin: Module) -> None:
    """Compare what modules read while running: their configuration, and their attention function."""
    config, expected = getattr(module, "config", None), getattr(twin, "config", None)
    if not isinstance(config, PreTrainedConfig) or not isinstance(expected, PreTrainedConfig):
        return
    if config is not expected and computed_fields(config) != computed_fields(expected):
        raise MismatchError(f"the model's module {name!r} has a configuration of its own; {_WHAT_TO_DO}")
    attention = config._attn_implementation  # noqa: SLF001 - it has no public name
    if not _is_trusted(ALL_ATTENTION_FUNCTIONS.get(attention)):
        msg = f"the model attends by {attention!r}, a function of the caller's; load it with sdpa or eager attention"
        raise MismatchError(msg)


def _check_numbers(name: str, module: Module, twin: Module) -> None:
    """Compare numeric attributes, and buffers without a file."""
    values, expected = ({k: v for k, v in vars(each).items() if _is_setting(k, v)} for each in (module, twin))
    values = {k: v for k, v in values.items() if k in expected}  # loading adds attributes that no architecture reads
    values |= dict(module.named_buffers(recurse=False)) | _present(module)
    expected |= dict(twin.named_buffers(recurse=False)) | _present(twin)
    changes = any(kind in str(getattr(module, "rope_type", "")) for kind in _CHANGING)
    for key in values.keys() | expected.keys():
        value, other = values.get(key), expected.get(key)
        if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
            if changes or other.is_meta or value.is_meta:
                continue
            same = value.shape == other.shape and torch.equal(value.cpu(), other.to(value.dtype))
        else:
            same = value is other if isinstance(value or other, torch.Tensor) else value == other
        if not same:
            raise MismatchError(f"the model's {name}.{key} is not what its configuration makes it; {_WHAT_TO_DO}")


def _present(module: Module) -> dict[str, object]:
    """Which weights a module has and lacks, such as a bias."""
    return {f"{name} is there": tensor is not None for name, tensor in module._parameters.items()}  # noqa: SLF001


def _is_setting(name: str, value: object) -> bool:
    return isinstance(value, int | float | str) and not name.startswith("_") and name not in _RUNNING


def _check_weights(
    model: PreTrainedModel, modules: dict[str, Module], quantised: set[str], folder: Path, *, whole: bool
) -> dict[str, str]:
    """Compare every weight with the folder's; returns digests of quantised ones that the folder lacks.

    whole: the folder's weights are quantised, so that quantised ones are compared, too.
    """
    pending = dict(_weights(modules, set() if whole else quantised))
    if whole:
        pending |= _packed(modules, quantised)
    places = _places(pending)
    for name, stored in _stored(folder):
        if name in pending:
            _compare(name, pending.pop(name), stored, folder)
    matched = {place for name, place in places.items() if name not in pending}
    pending = {name: tensor for name, tensor in pending.items() if places[name] not in matched}  # tied weights
    if pending and not whole:  # weights that transformers renames or joins when loading
        reloaded = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True, use_safetensors=True)
        for name, tensor in _weights(dict(base_modules(reloaded)), quantised):
            if name in pending:
                _compare(name, pending.pop(name), tensor, folder)
    if pending:
        raise MismatchError(
            f"the model has {next(iter(pending))}, which {folder} has not: it was loaded from elsewhere, or packs its "
            "weights as it is loaded; leave model out, so that it is loaded here"
        )
    return {} if whole else {name: digest_of(tensor) for name, tensor in _packed(modules, quantised).items()}


def _weights(modules: dict[str, Module], quantised: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Saved parameters and buffers by name, except quantised ones; includes offloaded ones."""
    for name, module in modules.items():
        if name in quantised:
            continue
        passing = module._non_persistent_buffers_set  # noqa: SLF001 - no public name
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        waiting = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        for part, tensor in own:
            if part not in passing:
                yield f"{name}.{part}" if name else part, waiting[part] if tensor.is_meta and waiting else tensor


def _packed(modules: dict[str, Module], quantised: set[str]) -> dict[str, Tensor]:
    """Saved tensors of quantised modules, by name."""
    states = {name: modules[name].state_dict() for name in quantised}
    return {
        f"{name}.{part}": tensor
        for name, state in sorted(states.items())
        for part, tensor in sorted(state.items())
        if isinstance(tensor, torch.Tensor)
    }


def _places(tensors: dict[str, Tensor]) -> dict[str, object]:
    """Memory location of each tensor, to recognise tied ones."""
    return {
        name: name if tensor.is_meta else (str(tensor.device), tensor.data_ptr()) for name, tensor in tensors.items()
    }


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    for path in weight_files(folder):
        if path.suffix != ".safetensors":
            continue
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - no mapping
                    yield name, file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CorruptError(f"{path} cannot be read ({error}); copy the model's files again") from error


def _compare(name: str, tensor: Tensor, stored: Tensor, folder: Path) -> None:
    if tensor.is_meta:
        msg = f"the model's {name} is not in memory and cannot be compared; leave model out, so that it is loaded here"
        raise MismatchError(msg)
    if tensor.shape != stored.shape or not torch.equal(stored.to(tensor.dtype), tensor.detach().cpu()):
        why = "it was trained, merged or loaded from elsewhere"
        raise MismatchError(f"the model's {name} is not that of {folder}: {why}; {_WHAT_TO_DO}")
