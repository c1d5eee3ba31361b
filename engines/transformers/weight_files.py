"""A model folder's weights: the files that transformers reads, and a digest of every tensor in them."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from kvwire.engines.transformers.revisions import RevisionsFile, fingerprint
from kvwire.errors import CorruptError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Tell = Callable[[int], object]

_BLOCK = 1 << 20
_SHOWN = 1 << 30
"""Bytes of weights from which hashing shows its progress."""
_REMEMBERED = 1 << 28
"""Bytes of weights from which a digest is remembered; hashing less takes a fraction of a second."""
_THREADS = 4  # hashing at once
_SETTLED_NS = 2 * 10**9
"""Age below which a file may change again within one tick of the file system's clock."""
_COMPUTED = "rotary_emb.inv_freq"  # in old files; computed from the configuration
_LENGTH = 8  # bytes at the start of a safetensors file: the header's length
_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def weight_files(folder: Path) -> list[Path]:
    """Files with a folder's weights."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        try:
            named = {folder / str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CorruptError(f"{index} is no index of weights; copy the model's files again") from error
        return sorted(path for path in named if path.is_file())
    return sorted(path for kind in ("*.safetensors", "*.bin", "*.gguf") for path in folder.glob(kind) if path.is_file())


def weights_digest(folder: Path, revisions: RevisionsFile | None = None) -> str:
    """SHA-256 over every tensor: its name, type, shape and numbers, independent of sharding.

    All weights are read once. Digests of large ones are then remembered for files with the same names, real paths,
    sizes, times of change, inodes and devices. This trusts the file system's metadata, and the file of revisions, which
    only this user may write.
    """
    return files_digest(weight_files(folder), revisions)


def files_digest(paths: Sequence[Path], revisions: RevisionsFile | None = None) -> str:
    """``weights_digest`` of given files; files other than safetensors count as one tensor."""
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


def _digest(paths: Sequence[Path], total: int) -> str:
    """Hash tensors in parallel; files other than safetensors as one."""
    from tqdm import tqdm

    quiet = True if total < _SHOWN else None  # None: show a bar only on a terminal
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=quiet, desc="hashing weights", file=sys.stderr) as bar,
        ThreadPoolExecutor(_THREADS) as pool,
    ):
        parts = sorted(part for path in paths for part in _parts(path))
        hashes = pool.map(partial(_hashed, tell=bar.update), [part[-1] for part in parts])
        told = [[*part[:-1], found] for part, found in zip(parts, hashes, strict=True)]
    embedded = [row[1:] for row in told if row[0].endswith("embed_tokens.weight")]
    told = [row for row in told if row[0] != "lm_head.weight" or row[1:] not in embedded]  # tied, but written
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _parts(path: Path) -> list[tuple[str, str, tuple[Path, int, int]]]:
    """Name, type with shape, and location of each tensor in a file."""
    size = path.stat().st_size
    if path.suffix != ".safetensors":
        return [(path.name, "", (path, 0, size))]
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH), "little")
        header = file.read(length) if length <= min(size, _LONGEST_HEADER) else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        start = _LENGTH + length
        parts = []
        for name, tensor in tensors.items():
            if name.endswith(_COMPUTED):
                continue
            first, end = (start + int(offset) for offset in tensor["data_offsets"])
            if not start <= first <= end <= size:
                raise ValueError(name)  # noqa: TRY301 - told below
            parts.append((name, f"{tensor['dtype']} {tensor['shape']}", (path, first, end)))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise CorruptError(f"{path} is damaged or cut short; copy the model's files again") from error
    return parts


def _hashed(place: tuple[Path, int, int], tell: Tell) -> str:
    path, at, end = place
    digest = hashlib.sha256()
    with path.open("rb") as file:
        file.seek(at)
        while at < end and (block := file.read(min(_BLOCK, end - at))):
            digest.update(block)
            tell(len(block))
            at += len(block)
    return digest.hexdigest()
