"""Finds a model's folder, and identifies models by what computes their caches, not by name.

A model's revision is a digest of the weights that transformers reads from its folder and of the configuration fields in
the computation. Names of shards, chat templates and other files do not count.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvwire.engines.transformers.weight_files import weights_digest
from kvwire.errors import ArgumentError, CorruptError, NotFoundError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from kvwire.engines.transformers.revisions import RevisionsFile

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
_NOT_COMPUTED = frozenset({
    # names and versions
    "architectures", "auto_map", "name_or_path", "tokenizer_class", "transformers_version",
    # the dtype, which is separate from the revision: blobs decode into any
    "dtype", "torch_dtype",
    # special tokens, which belong to the tokenizer and to generation
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    # training
    "gradient_checkpointing", "initializer_factor", "initializer_range", "layerdrop", "neftune_noise_alpha",
    "output_router_logits", "pretraining_tp", "router_aux_loss_coef", "unsloth_fixed", "unsloth_version",
    # outputs of a call, and other tasks
    "chunk_size_feed_forward", "finetuning_task", "id2label", "keys_to_ignore_at_inference",
    "label2id", "num_labels", "output_attentions", "output_hidden_states",
    "problem_type", "return_dict", "task_specific_params", "torchscript", "use_cache", "use_return_dict",
})  # fmt: skip
"""Configuration fields that change no cache, like those of dropout, and private ones."""


def find_folder(path: str | Path, revision: str | None = None) -> tuple[Path, str]:
    """Find a model's folder and name."""
    folder = Path(path).expanduser()
    if folder.exists() or isinstance(path, Path):
        if revision is not None:
            msg = f"{folder} is a folder, which has no revisions; leave revision out, or name an id on the Hub"
            raise ArgumentError(msg)
        if folder.is_file() or not (folder / "config.json").is_file():
            from kvwire.engines.transformers.gguf import converted, file_of  # few models are GGUF

            if (file := file_of(folder)) is not None:
                return converted(file), file.stem
        return folder, folder.resolve().name
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True)), path
    except (HFValidationError, LocalEntryNotFoundError) as error:
        snapshot = f"{path} --revision {revision}" if revision else path
        raise NotFoundError(
            f"{path} is no folder with a model (config.json is missing), and {constants.HF_HUB_CACHE} holds no "
            f"snapshot of it; name a folder saved by save_pretrained, or fetch it first: hf download {snapshot}"
        ) from error


def model_revision(folder: Path, revisions: RevisionsFile | None = None) -> str:
    """Digest of a folder's weights and configuration, without adapters."""
    fields = _whole_numbers(computed_fields(read_config(folder)))
    told = {"configuration": fields, "weights": weights_digest(folder, revisions)}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def read_config(folder: Path) -> PreTrainedConfig | dict[str, Any]:
    """Read a model's configuration."""
    path = folder / "config.json"
    try:
        written = json.loads(path.read_bytes())
    except (RecursionError, ValueError) as error:
        raise CorruptError(f"{path} cannot be read ({error}); copy the model's files again") from error
    if not isinstance(written, dict):
        raise CorruptError(f"{path} holds no configuration; copy the model's files again")
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.get_text_config(decoder=True).to_dict()
    except Exception:  # noqa: BLE001 - of whatever kind: opening the model tells what is wrong
        return written
    return config


def computed_fields(config: PreTrainedConfig | dict[str, Any]) -> dict[str, Any]:
    """Configuration fields that affect a cache, unless left at their defaults."""
    if isinstance(config, dict):
        return {name: value for name, value in config.items() if _is_computed(name)}
    text = config.get_text_config(decoder=True)
    try:
        usual = type(text)().to_dict()
    except Exception:  # noqa: BLE001 - a class that cannot be made without arguments
        usual = {}
    fields = {name: value for name, value in text.to_dict().items() if _is_computed(name) and value != usual.get(name)}
    fields.pop("quantization_config", None)
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        fields["quantization_config"] = quantised if isinstance(quantised, dict) else quantised.to_dict()
    return fields | {"model_type": text.model_type}


def _whole_numbers(value: Any) -> Any:  # noqa: ANN401 - JSON
    """JSON with 10000.0 as 10000, so that both spellings are equal."""
    if isinstance(value, dict):
        return {name: _whole_numbers(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_computed(name: str) -> bool:
    return not (name.startswith("_") or name in _NOT_COMPUTED or "dropout" in name)


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of the tokenizer."""
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]
