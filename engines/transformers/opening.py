"""Opens a model folder: weights, tokenizer and identity; every failure of transformers becomes a kvwire error."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_accelerate_available, is_peft_available

from kvwire.engines.transformers.engine import TransformersEngine
from kvwire.engines.transformers.identity import find_folder, model_revision, tokenizer_files
from kvwire.engines.transformers.progress_bars import quiet
from kvwire.engines.transformers.registration import ENCODER
from kvwire.engines.transformers.tokenizer_limits import check_tokenizer, no_panics
from kvwire.engines.transformers.tokenizing import PieceTokenizer
from kvwire.errors import ArgumentError, CorruptError, KvwireError, MismatchError, NotFoundError, StorageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Options for transformers: no download, and no code from a model's folder."""
_PICKLES = ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt")
"""Pickled weights, which may run any code when read, so they never are."""
ADAPTER = "adapter_config.json"
"""Present in folders with an adapter, which transformers loads with the model."""
_SHARD = re.compile(r"[^/\\]+\.safetensors")
_UNUSABLE = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, StrictDataclassError, TypeError,
    ValueError
)  # fmt: skip
"""Errors of transformers for unusable configurations."""
_NO_SDPA = "scaled_dot_product_attention"
"""Part of transformers' message about models without an sdpa path."""


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause the garbage collector: a vocabulary of a quarter of a million tokens is millions of objects to walk."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@_collector_paused()
def open_engine(
    path: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    model: PreTrainedModel | None = None,
) -> TransformersEngine:
    """Open a model, without downloads and without running code of its folder.

    Args:
        path: A folder with config.json, weights in safetensors, quantised or not, and a tokenizer if texts are to be
            read; a GGUF file, or a folder with one, which is converted once; or the id of a Hub model downloaded
            before.
        device: The model's device; None: the processor.
        dtype: Of weights, and of computation with quantised ones; None: as stored.
        revision: Branch, tag or commit of a Hub id.
        device_map: Spreads the model over devices, as in transformers, instead of ``device``.
        model: The same model already loaded, in any precision, on any devices: its weights are compared with the
            folder's, not loaded again. If it was quantised when loaded, its caches fit it alone.

    Returns:
        The engine.

    Raises:
        NotFoundError: The folder holds no model, or the Hub's cache no such snapshot.
        CorruptError: Its files cannot be read, or weights are missing.
        MismatchError: kvwire cannot run the model, its weights are a pickle, which is never read, or ``model`` is
            another.
        RopeRegimeError: Its keys cannot be rotated to other positions.
        StorageError: The disk fails.
        ArgumentError: The device or dtype cannot be used, options contradict each other, or a package is missing.
    """
    _check_options(device, dtype, device_map, model)
    folder, name = find_folder(path, revision)
    if not (folder / "config.json").is_file():
        raise NotFoundError(f"{folder} holds no model: config.json is missing; name a folder saved by save_pretrained")
    _check_weights(folder)
    check_tokenizer(tokenizer_files(folder))
    try:
        weights = model_revision(folder)
        config = (folder / "config.json").read_bytes()
    except OSError as error:
        raise StorageError(f"{folder} cannot be read ({error}); check its permissions and the disk") from error
    written = json.loads(config)
    if written.get("transformers_weights"):
        msg = f"{folder / 'config.json'} names its weights (transformers_weights); rename them to model.safetensors"
        raise MismatchError(msg)
    if written.get("is_encoder_decoder"):  # transformers would open half of it, and miss weights
        raise MismatchError(ENCODER)
    is_quantised = bool(written.get("quantization_config"))
    tokenizer = _tokenizer(folder) if tokenizer_files(folder) else None
    is_adapted = _has_adapter(folder)
    is_given = model is not None
    if model is None:
        model = _placed(folder, device or "cpu", dtype, device_map, is_quantised=is_quantised)
    if is_given or is_adapted:
        from kvwire.engines.transformers.adapters import revision_with_adapters
        from kvwire.engines.transformers.loaded import revision_of

        weights = revision_of(model, folder, weights, is_quantised=is_quantised)
        weights = revision_with_adapters(model, weights)
    return TransformersEngine(
        model,
        tokenizer,
        model_id=name,
        revision=weights,
        tokenizer_id=None,
        model_config_digest=hashlib.sha256(config).hexdigest(),
    )


def _placed(
    folder: Path,
    device: str | torch.device,
    dtype: torch.dtype | None,
    device_map: str | Mapping[str, Any] | None,
    *,
    is_quantised: bool,
) -> PreTrainedModel:
    """Load the model onto its device; a quantised one directly, since it cannot be moved."""
    if is_quantised and device_map is None and torch.device(device).type != "cpu":
        device_map = {"": str(device)}
    model: Any = _model(folder, dtype, device_map)
    return model if is_quantised or device_map is not None else model.to(device)  # type: ignore[no-any-return]


def open_tokenizer(path: str | Path) -> PieceTokenizer:
    """Open only a model folder's tokenizer."""
    folder, _ = find_folder(path)
    if not tokenizer_files(folder):
        msg = f"{folder} holds no tokenizer; name the model's folder, or pass token ids to kvwire.vllm.request_body"
        raise NotFoundError(msg)
    check_tokenizer(tokenizer_files(folder))
    return PieceTokenizer(_tokenizer(folder))


def _check_options(
    device: str | torch.device | None, dtype: torch.dtype | None, device_map: object, model: object
) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ArgumentError(f"models run in floating point, not in {dtype}; pass torch.float32 or torch.bfloat16")
    if device is not None and device_map is not None:
        raise ArgumentError("a device map says where everything goes; leave device out")
    if model is not None and any(option is not None for option in (device, dtype, device_map)):
        raise ArgumentError("a model that is loaded already stays as it is; leave device, dtype and device_map out")
    try:
        torch.empty(1, device=device)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        msg = f"device {device} cannot be used here ({error}); pass 'cpu' or a device that torch sees"
        raise ArgumentError(msg) from error


def _check_weights(folder: Path) -> None:
    """Refuse a folder with only pickled weights, or whose index of shards names other files than safetensors."""
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    others = [
        name
        for index in folder.glob("*.safetensors.index.json")
        for name in _shards(index)
        if not _SHARD.fullmatch(name)
    ]
    if others:
        msg = f"{folder}'s index names {others[0]!r}; only safetensors beside it are read: copy the model's files again"
        raise MismatchError(msg)
    if pickles and not any(folder.glob("*.safetensors")):
        raise MismatchError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which may run any code when it is read; only "
            "safetensors are read. Where you trust the file, convert it with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )


def _shards(index: Path) -> set[str]:
    """Files named by an index."""
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except OSError as error:
        raise StorageError(f"{index} cannot be read ({error}); check its permissions and the disk") from error
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptError(f"{index} is no index of weights; copy the model's files again") from error


def _has_adapter(folder: Path) -> bool:
    """Whether transformers will load an adapter; without PEFT it would silently leave it out."""
    if not (folder / ADAPTER).is_file():
        return False
    if not is_peft_available():
        raise ArgumentError(f"{folder} holds an adapter ({ADAPTER}), which needs another package: pip install peft")
    return True


def _model(folder: Path, dtype: torch.dtype | None, device_map: str | Mapping[str, Any] | None) -> PreTrainedModel:
    options: dict[str, Any] = {"dtype": dtype or "auto", "output_loading_info": True, "use_safetensors": True, **_LOCAL}
    if device_map is not None:
        if not is_accelerate_available():
            msg = "device maps, and quantised models on a GPU, need another package: pip install accelerate"
            raise ArgumentError(msg)
        options["device_map"] = device_map if isinstance(device_map, str) else dict(device_map)
    try:
        with quiet():
            loaded = _weights(folder, options)
    except ImportError as error:  # quantised weights and device maps need other packages
        raise ArgumentError(f"{folder} cannot be opened without another package: {error}") from error
    except Exception as error:
        raise _explained(folder, error) from error
    model, info = loaded
    wrong = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in info.get(kind, ()))
    if wrong:
        raise CorruptError(
            f"{folder}'s weights lack or misshape {len(wrong)} tensors ({wrong[0]}, ...); copy the model's files again"
        )
    if getattr(model.config.get_text_config(decoder=True), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # some transformers choose sdpa here and leave out the capping
    return model  # type: ignore[no-any-return]


def _weights(folder: Path, options: dict[str, Any]) -> Any:  # noqa: ANN401 - transformers' own pair
    try:
        return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", **options)
    except ValueError as error:
        if _NO_SDPA not in str(error):
            raise
        return AutoModelForCausalLM.from_pretrained(folder, **options)


def _explained(folder: Path, error: Exception) -> KvwireError | Exception:
    """Translate a failure of from_pretrained; memory and device errors stay."""
    if isinstance(error, OSError) and error.errno not in {None, errno.ENOENT}:
        return StorageError(f"{folder} cannot be read ({error}); check its permissions and the disk")
    if isinstance(error, OSError):  # transformers' error for missing files
        return NotFoundError(f"{folder} holds no weights that transformers can read ({error}); name a complete folder")
    if isinstance(error, _UNUSABLE):
        first = next(iter(str(error).splitlines()), type(error).__name__)
        return MismatchError(f"{folder} cannot be opened as a causal language model ({first}); use another model")
    if isinstance(error, (EOFError, RuntimeError)) or type(error).__module__.startswith("safetensors"):
        if "memory" in str(error).lower():
            return error
        return CorruptError(f"{folder}'s weights cannot be read ({error}); copy the model's files again")
    return error


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        with no_panics():
            return AutoTokenizer.from_pretrained(folder, **_LOCAL)
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CorruptError(
            f"{folder}'s tokenizer cannot be read ({error}); copy its files again, or remove them to use token ids only"
        ) from error
