"""GGUF files, converted once into a folder of safetensors in the user's cache folder, which opens like any model."""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kvwire._user_file import user_file
from kvwire.engines.transformers.progress_bars import silent
from kvwire.engines.transformers.weight_files import files_digest
from kvwire.errors import ArgumentError, CorruptError, MismatchError, StorageError

if TYPE_CHECKING:
    from pathlib import Path

_log = logging.getLogger("kvwire.progress")
_MAGIC = b"GGUF"
_VARIABLE = "KVWIRE_MODELS"
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_CUT = ("reshape", "mmap", "buffer")
"""Words in errors of NumPy and gguf for truncated files; there is no error class for it."""
_ABANDONED_S = 86400.0
"""Age of unfinished conversions that must be a killed process's."""


def file_of(path: Path) -> Path | None:
    """The GGUF file at a path, or the only one in a folder without config.json; None: there is none."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" else None
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    found = sorted(each for each in path.iterdir() if each.suffix.lower() == ".gguf" and each.is_file())
    if len(found) > 1:
        raise ArgumentError(f"{path} holds {len(found)} GGUF files; name the one to open ({found[0].name}, ...)")
    return found[0] if found else None


def converted(file: Path) -> Path:
    """Convert a GGUF file's model, unless that was done before.

    Weights become bfloat16. Folders are in ``~/.cache/kvwire/models``, or in ``KVWIRE_MODELS``, named by the file and
    its content, and appear atomically.
    """
    if _PART.search(file.name.lower()):
        msg = f"{file} is one part of a model; merge the parts first (llama-gguf-split --merge), and name the whole"
        raise ArgumentError(msg)
    place = user_file(os.environ, _VARIABLE, "models")
    if place is None:
        msg = f"a GGUF file is converted once into a folder, and there is no place for it: name one in {_VARIABLE}"
        raise ArgumentError(msg)
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(len(_MAGIC)) == _MAGIC
        digest = files_digest([file]) if is_gguf else ""
    except OSError as error:
        raise StorageError(f"{file} cannot be read ({error}); check its permissions and the disk") from error
    if not is_gguf:
        raise CorruptError(f"{file} is no GGUF file, or its beginning is lost; copy it again")
    folder = place / f"{file.stem}-{digest[:16]}"
    if (folder / "config.json").is_file():
        return folder
    _log.info("converting %s into %s, once", file.name, folder)
    part = place / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        part.mkdir(parents=True)
        _convert(file, part)
        try:
            part.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # another process was faster
                raise
    except OSError as error:
        msg = f"{file.name} cannot be converted into {place} ({error}); make room, or name another in {_VARIABLE}"
        raise StorageError(msg) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        _sweep(place, folder.name)
    return folder


def _convert(file: Path, folder: Path) -> None:
    """Write a file's model and tokenizer into a folder."""
    import torch

    model, tokenizer = _read(file)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # describes the file, not the saved weights
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.config.dtype = torch.bfloat16
    with silent():
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _read(file: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a file; each tensor is rounded as it is read, so that memory holds it once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        with silent():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.bfloat16, output_loading_info=True, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    except ImportError as error:
        msg = f"GGUF files need other packages: pip install 'kvwire[gguf]' ({_first_line(error)})"
        raise ArgumentError(msg) from error
    except OSError as error:
        msg = f"{file} cannot be read ({_first_line(error)}); check its permissions and the disk"
        raise StorageError(msg) from error
    except Exception as error:  # the packages raise anything on unreadable files
        is_cut = isinstance(error, (EOFError, IndexError)) or any(word in str(error) for word in _CUT)
        if is_cut:
            raise CorruptError(f"{file} is damaged ({_first_line(error)}); copy it again") from error
        raise MismatchError(
            f"{file} cannot be converted ({_first_line(error)}): transformers knows neither all architectures nor all "
            "quantisations; use the model's safetensors, or a GGUF file of another quantisation"
        ) from error
    model, info = loaded
    lacks = sorted(str(name) for kind in ("missing_keys", "mismatched_keys") for name in info.get(kind, ()))
    if lacks:
        raise CorruptError(f"{file} lacks or misshapes {len(lacks)} tensors ({lacks[0]}, ...); copy it again")
    return model, tokenizer


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _sweep(place: Path, name: str) -> None:
    """Remove leftovers of killed conversions of the same file."""
    for each in place.glob(f".{name}.*"):
        with suppress(OSError):  # another process removes it, too
            if time.time() - each.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(each, ignore_errors=True)
