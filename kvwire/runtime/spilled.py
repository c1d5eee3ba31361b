"""Caches on disk instead of in memory: so that a fit takes no more of it for more text."""

from __future__ import annotations

import logging
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import IO

    from torch import Tensor

    from kvwire.types import KVCache

_log = logging.getLogger("kvwire.runtime")
_ALIGNED = 16
"""Each tensor begins at a multiple of so many bytes of its file."""


def spilled(caches: Iterable[KVCache], total: int, folder: Path | None = None) -> list[KVCache]:
    """Write caches to files as they come and give them back mapped: the system keeps of them what memory has room for.

    The files have no name any more once they are mapped, and go with the caches. A cache for which the disk has no room
    stays in memory.
    """
    from tqdm import tqdm

    bar = tqdm(caches, total=total, unit="text", disable=None, desc="computing", file=sys.stderr, delay=1.0)
    return [_on_disk(cache, folder) for cache in bar]


def _on_disk(cache: KVCache, folder: Path | None) -> KVCache:
    tensors = [*cache.keys, *cache.values]
    with (
        suppress(OSError, RuntimeError),
        tempfile.NamedTemporaryFile(dir=folder, prefix="kvwire-", delete=False) as file,
    ):
        path = Path(file.name)
        try:
            mapped = list(_mapped(tensors, file.file, path))
        finally:
            with suppress(OSError):  # where a mapped file keeps its name, the system's cleaning takes it
                path.unlink()
        return replace(cache, keys=mapped[: len(cache.keys)], values=mapped[len(cache.keys) :])
    _log.warning("no room for a cache of %d bytes among temporary files; it stays in memory", cache.nbytes)
    return cache


def _mapped(tensors: list[Tensor], file: IO[bytes], path: Path) -> Iterator[Tensor]:
    """All of them in one file, mapped at their places."""
    for tensor in tensors:
        bytes_of = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        file.write(bytes_of.numpy().data)
        file.write(bytes(-tensor.nbytes % _ALIGNED))
    file.flush()
    size = path.stat().st_size
    whole = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    at = 0
    for tensor in tensors:
        part = whole[at : at + tensor.nbytes].view(tensor.dtype) if tensor.nbytes else tensor.detach().cpu()
        at += tensor.nbytes + -tensor.nbytes % _ALIGNED
        yield part.reshape(tensor.shape)
