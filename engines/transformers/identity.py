"""Telling models and tokenizers apart by what they are, not by what their folder is called."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_BLOCK = 64 << 10
_WHOLE = 1 << 30
"""Files up to this size are hashed whole, which takes about a second."""
_BLOCKS = 4096
"""Blocks of a larger file that are hashed, evenly spread: fine-tuning changes all of a file; 140 GB are not read."""
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
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


def model_revision(folder: Path) -> str:
    """SHA-256 over config.json and every weight file: names, sizes and contents.

    Of a file above 1 GiB only evenly spread blocks are read, so a change to a few of its weights may go unseen.
    """
    digest = hashlib.sha256()
    _add(digest, folder / "config.json")
    for path in sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)}):
        if path.is_file():
            _add(digest, path)
    return digest.hexdigest()


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files; the empty string where there are none."""
    found = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    if not found:
        return ""
    digest = hashlib.sha256()
    for path in found:
        _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.name}:{size}:".encode())
    step = _BLOCK if size <= _WHOLE else size // _BLOCKS
    with path.open("rb") as file:
        for start in range(0, size, step):
            file.seek(start)
            digest.update(file.read(_BLOCK))
