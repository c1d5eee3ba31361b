"""Whether a model that the caller loaded computes what a folder holds: its caches will bear the folder's identity.

Every weight is compared, and the model's modules with those that the folder's configuration makes: a changed weight, a
replaced module, a changed number or a hook makes another model.
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
"""Where hooks and attention functions come from that belong to how a model is run, and change no cache."""
_QUANTISERS = frozenset({
    "aqlm", "auto_gptq", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "gptqmodel",
    "hqq", "optimum", "quark", "torch", "torchao", "transformers", "vptq",
})  # fmt: skip
"""Packages whose modules stand in for those of an architecture in quantised models."""
_RUNNING = frozenset({"training", "gradient_checkpointing", "max_seq_len_cached"})
"""Attributes that say how a module is run, not what it computes."""
_CHANGING = ("dynamic", "longrope")
"""Kinds of rotation whose frequencies change with the length of what was run last."""
_MAKES = {torch.empty, torch.zeros, torch.ones, torch.full, torch.rand, torch.randn}


def revision_of(model: Module, folder: Path, revision: str, *, is_quantised: bool) -> str:
    """Tell which weights a model runs that was loaded from a folder, adapters aside."""
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
    """Compare what is computed with the folder's configuration; whether the model was quantised."""
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
            msg = (
                f"the model's configuration has {name} {ours.get(name)!r}, {folder} {theirs.get(name)!r}; {_WHAT_TO_DO}"
            )
            raise MismatchError(msg)
    return is_quantised


def _check_modules(model: PreTrainedModel, modules: dict[str, Module], folder: Path) -> set[str]:
    """Compare modules with those that the folder's configuration makes; names of the quantised ones."""
    is_quantised = _check_configuration(model, folder)
    for name, module in (("", torch.nn.modules.module), *model.named_modules()):
        _check_hooks(name, module)
    made: dict[str, Any] = dict(_made(type(model), model.config).named_modules(remove_duplicate=False))
    quantised = set()
    if lost := made.keys() - modules.keys():
        msg = f"the model lacks the module {min(lost)!r} of its architecture; {_WHAT_TO_DO}"
        raise MismatchError(msg)
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
    """The architecture that a configuration makes, without memory for weights; small buffers are there if they can."""
    try:
        with _WithoutWeights():
            return kind(config)
    except (NotImplementedError, RuntimeError):  # buffers that are worked out from weights
        with torch.device("meta"):
            return kind(config)


class _WithoutWeights(TorchFunctionMode):
    """Tensors that weights are made of go to the meta device; what is computed from numbers is computed."""

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
    """Refuse what changes a module's computation without changing the module."""
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
    """Whether a function is of a package that runs models; where its code is counts, not what it calls itself."""
    function = getattr(function, "func", function)  # of functools.partial
    function = getattr(function, "__func__", function)  # of a method
    home = getattr(function, "__globals__", {}).get("__name__")
    home = home or getattr(function if isinstance(function, type) else type(function), "__module__", "")
    return function is None or str(home).startswith(_TRUSTED)


def _check_config(name: str, ours: Module, theirs: Module) -> None:
    """Compare what modules read while they run: their own configuration, and the function that they attend by."""
    mine, made = getattr(ours, "config", None), getattr(theirs, "config", None)
    if not isinstance(mine, PreTrainedConfig) or not isinstance(made, PreTrainedConfig):
        return
    if mine is not made and computed_fields(mine) != computed_fields(made):
        msg = f"the model's module {name!r} has a configuration of its own; {_WHAT_TO_DO}"
        raise MismatchError(msg)
    attention = mine._attn_implementation  # noqa: SLF001 - it has no public name
    if not _is_trusted(ALL_ATTENTION_FUNCTIONS.get(attention)):
        msg = f"the model attends by {attention!r}, a function of the caller's; load it with sdpa or eager attention"
        raise MismatchError(msg)


def _check_numbers(name: str, ours: Module, theirs: Module) -> None:
    """Compare attributes that are numbers, and buffers that no file holds."""
    mine, made = ({k: v for k, v in vars(each).items() if _is_setting(k, v)} for each in (ours, theirs))
    mine = {k: v for k, v in mine.items() if k in made}  # what loading adds, no architecture reads
    mine |= dict(ours.named_buffers(recurse=False)) | _present(ours)
    made |= dict(theirs.named_buffers(recurse=False)) | _present(theirs)
    changes = any(kind in str(getattr(ours, "rope_type", "")) for kind in _CHANGING)
    for key in mine.keys() | made.keys():
        one, other = mine.get(key), made.get(key)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            if changes or other.is_meta or one.is_meta:
                continue
            same = one.shape == other.shape and torch.equal(one.cpu(), other.to(one.dtype))
        else:
            same = one is other if isinstance(one or other, torch.Tensor) else one == other
        if not same:
            msg = f"the model's {name}.{key} is not what its configuration makes it; {_WHAT_TO_DO}"
            raise MismatchError(msg)


def _present(module: Module) -> dict[str, object]:
    """Which of its weights a module has, and which are left out, such as a bias."""
    return {f"{name} is there": tensor is not None for name, tensor in module._parameters.items()}  # noqa: SLF001


def _is_setting(name: str, value: object) -> bool:
    return isinstance(value, int | float | str) and not name.startswith("_") and name not in _RUNNING


def _check_weights(
    model: PreTrainedModel, modules: dict[str, Module], quantised: set[str], folder: Path, *, whole: bool
) -> dict[str, str]:
    """Compare every weight with the folder's, numbers for numbers; digests of quantised ones that are not there.

    whole: the folder's weights are quantised, so that quantised ones are compared, too.
    """
    left = dict(_weights(modules, set() if whole else quantised))
    if whole:
        left |= _packed(modules, quantised)
    places = _places(left)
    for name, stored in _stored(folder):
        if name in left:
            _compare(name, left.pop(name), stored, folder)
    seen = {place for name, place in places.items() if name not in left}
    left = {name: tensor for name, tensor in left.items() if places[name] not in seen}  # tied to what was compared
    if left and not whole:  # weights that transformers renames or joins as it reads them
        again = type(model).from_pretrained(folder, dtype=model.dtype, local_files_only=True, use_safetensors=True)
        for name, tensor in _weights(dict(base_modules(again)), quantised):
            if name in left:
                _compare(name, left.pop(name), tensor, folder)
    if left:
        msg = (
            f"the model has {next(iter(left))}, which {folder} has not: it was loaded from elsewhere, or packs its "
            "weights as it is loaded; leave model out, so that it is loaded here"
        )
        raise MismatchError(msg)
    return {} if whole else {name: digest_of(tensor) for name, tensor in _packed(modules, quantised).items()}


def _weights(modules: dict[str, Module], quantised: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers that files hold, of what is not quantised, by name; those on the disk, too."""
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
    """What quantised modules would save, by name."""
    states = {name: modules[name].state_dict() for name in quantised}
    return {
        f"{name}.{part}": tensor
        for name, state in sorted(states.items())
        for part, tensor in sorted(state.items())
        if isinstance(tensor, torch.Tensor)
    }


def _places(tensors: dict[str, Tensor]) -> dict[str, object]:
    """Where each tensor lies in memory, so that tied ones are known."""
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
            msg = f"{path} cannot be read ({error}); copy the model's files again"
            raise CorruptError(msg) from error


def _compare(name: str, ours: Tensor, theirs: Tensor, folder: Path) -> None:
    if ours.is_meta:
        msg = f"the model's {name} is not in memory and cannot be compared; leave model out, so that it is loaded here"
        raise MismatchError(msg)
    if ours.shape != theirs.shape or not torch.equal(theirs.to(ours.dtype), ours.detach().cpu()):
        why = "it was trained, merged or loaded from elsewhere"
        msg = f"the model's {name} is not that of {folder}: {why}; {_WHAT_TO_DO}"
        raise MismatchError(msg)
