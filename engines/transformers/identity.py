"""Finding a model's folder, and telling models and tokenizers apart by what they are, not by what it is called."""

from __future__ import annotations

import hashlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvwire.engines.transformers.revisions import RevisionsFile, fingerprint
from kvwire.errors import ArgumentError, NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Tell = Callable[[int], object]

_BLOCK = 1 << 20
_WHOLE = 1 << 30
"""The content of files up to this size goes into the revision as it is, of larger ones as a SHA-256 of its own."""
_REMEMBERED = 1 << 28
"""Bytes of weights from which on a revision is remembered; hashing less takes a fraction of a second."""
_THREADS = 4  # hashing at once
_SETTLED_NS = 2 * 10**9
"""Files that changed this lately may change again within one tick of the file system's clock."""
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


def find_folder(path: str | Path, revision: str | None = None) -> tuple[Path, str]:
    """Find the folder of a model.

    Args:
        path: A folder, or an id on the Hub such as ``organisation/model``.
        revision: Of an id: branch, tag or commit; None: the main branch as it was when it was downloaded.

    Returns:
        The folder, and the model's name.

    Raises:
        NotFoundError: There is no such folder, and the cache has no such snapshot.
        ArgumentError: A folder was given a revision.
    """
    folder = Path(path).expanduser()
    if folder.exists() or isinstance(path, Path):
        if revision is not None:
            msg = f"{folder} is a folder, which has no revisions; leave revision out, or name an id on the Hub"
            raise ArgumentError(msg)
        return folder, folder.resolve().name
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True)), path
    except (HFValidationError, LocalEntryNotFoundError) as error:
        wanted = f"{path} --revision {revision}" if revision else path
        msg = (
            f"{path} is no folder with a model (config.json is missing), and {constants.HF_HUB_CACHE} holds no "
            f"snapshot of it; name a folder saved by save_pretrained, or fetch it first: hf download {wanted}"
        )
        raise NotFoundError(msg) from error


def model_revision(folder: Path, revisions: RevisionsFile | None = None) -> str:
    """SHA-256 over config.json and every weight file: names, sizes and contents, to the last byte.

    Weights are read whole once. After that the revision of a large model is remembered for files that have the same
    names, real paths, sizes, times of change, inodes and devices: what the file system says of them is trusted, and so
    is the file of revisions, which only this user may write.

    Args:
        folder: Holds config.json and the weights.
        revisions: Where revisions are remembered; None: where ``KVWIRE_REVISIONS`` says.

    Returns:
        Hexadecimal digest.

    Raises:
        OSError: A file cannot be read.
    """
    weights = {path for pattern in _WEIGHTS for path in folder.glob(pattern) if path.is_file()}
    paths = [folder / "config.json", *sorted(weights)]
    total = sum(path.stat().st_size for path in paths)
    if total < _REMEMBERED:
        return _digest(paths, total)
    known = RevisionsFile.of_environment() if revisions is None else revisions
    key = fingerprint(paths)
    found = known.recall(key)
    if found is None:
        settled = time.time_ns() - max(path.stat().st_mtime_ns for path in paths) > _SETTLED_NS
        found = _digest(paths, total)
        if settled and fingerprint(paths) == key:
            known.remember(key, found)
    return found


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files.

    Args:
        folder: Holds the files.

    Returns:
        Those that are there.
    """
    return [folder / name for name in _TOKENIZER if (folder / name).is_file()]


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over the tokenizer's files.

    Args:
        folder: Holds the files.

    Returns:
        Hexadecimal digest; the empty string where there are no such files.
    """
    found = tokenizer_files(folder)
    return _digest(found, 0) if found else ""


def _digest(paths: Sequence[Path], total: int) -> str:
    """SHA-256 over names, sizes and contents; large files are hashed side by side, small ones in their order."""
    from tqdm import tqdm

    digest = hashlib.sha256()
    quiet = True if total < _WHOLE else None  # None: unless stderr is a terminal
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=quiet, desc="hashing weights", file=sys.stderr) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        large = {path: pool.submit(_hashed, path, bar.update) for path in paths if path.stat().st_size > _WHOLE}
        for path in paths:
            digest.update(f"{path.name}:{path.stat().st_size}:".encode())
            if path in large:
                digest.update(b"sha256:" + large[path].result())
                continue
            for block in _blocks(path, bar.update):
                digest.update(block)
    return digest.hexdigest()


def _hashed(path: Path, tell: Tell) -> bytes:
    digest = hashlib.sha256()
    for block in _blocks(path, tell):
        digest.update(block)
    return digest.digest()


def _blocks(path: Path, tell: Tell) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield block
            tell(len(block))
