"""Telling models and tokenizers apart by what they are, not by what their folder is called."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 64 << 10
_BLOCKS = 64
"""Blocks of each weight file that are hashed, evenly spread: fine-tuning changes all of a file, and 140 GB are not read for it."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_TOKENIZER = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json")


def model_revision(folder: Path) -> str:
    """SHA-256 over config.json and evenly spread blocks of every weight file, sizes included."""
    digest = hashlib.sha256()
    _add(digest, folder / "config.json", 1 << 30)
    for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
        _add(digest, path, _BLOCKS)
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files; the empty string where there are none."""
    found = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    if not found:
        return ""
    digest = hashlib.sha256()
    for path in found:
        _add(digest, path, 1 << 30)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path, blocks: int) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}:".encode())
    step = max(_BLOCK, size // blocks)
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK))
