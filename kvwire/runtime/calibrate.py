"""Calibration of a corpus: texts to fit a profile on, and texts to measure its errors on."""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import zipfile
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from kvwire.errors import CorruptError, MismatchError
from kvwire.reuse import compute_cached, compute_stored, own_tokens, stored_tokens
from kvwire.runtime.coding import EXTENTS, LEAST_TOKENS
from kvwire.runtime.prefill import compute_behind, neutral_prefix, opening_of, prefill_documents, states_of
from kvwire.runtime.quality import calibrate_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from typing import IO

    from numpy.typing import NDArray
    from torch import Tensor

    from kvwire.codec import AnyProfile, Ladder, Statistics
    from kvwire.codec.kinds.requests import Calibrated
    from kvwire.engines.base import Engine
    from kvwire.runtime.coding import Coding, Document
    from kvwire.types import KVCache

    Moments = Mapping[str, NDArray[np.generic]]

_progress = logging.getLogger("kvwire.progress")
HELD_OUT, HELD_TOKENS, EACH_OUT = 24, 1280, 6
"""For measuring errors: most texts, and least tokens in total; with fewer tokens, one of so many texts is held out of
the fit."""


def calibration_texts(
    documents: Sequence[Document], tokens: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Texts to fit on, up to that many tokens, and others to measure errors on: seen text flatters a profile.

    The others come next, with the rest of a cut text. If they are less than ``HELD_TOKENS`` and less than half of the
    fit, every sixth text is held out of the fit instead, if there are that many; else there are none.
    """
    chosen: list[tuple[int, ...]] = []
    others: list[tuple[int, ...]] = []
    for document in documents:
        room = max(0, tokens - sum(map(len, chosen)))
        if room:
            chosen.append(document.token_ids[:room])
        if len(rest := document.token_ids[room:]) >= LEAST_TOKENS and len(others) < HELD_OUT:
            others.append(rest)
    if sum(map(len, others)) >= min(HELD_TOKENS, max(LEAST_TOKENS, sum(map(len, chosen)) // 2)):
        return chosen, others
    kept = [ids for number, ids in enumerate(chosen) if (number + 1) % EACH_OUT]
    out = chosen[EACH_OUT - 1 :: EACH_OUT]
    usable = min(map(len, out), default=0) >= LEAST_TOKENS and sum(map(len, kept)) >= LEAST_TOKENS
    return (kept, out) if usable else (chosen, [])


class Calibration:
    """Fits profiles to documents, as encoding with one engine and coding computes them.

    Attributes:
        opens: Number of opening tokens, such as BOS, before documents; 0 with soft tokens.
    """

    def __init__(self, engine: Engine, coding: Coding) -> None:
        """Take the parts."""
        self.engine, self.coding, self._layout = engine, coding, coding.layout
        self._is_soft = min(coding.layout.cached_tokens, default=0) < 0
        self.opens = 0 if self._is_soft else len(engine.opening_tokens)

    def laid_out(self, document: Document) -> Document:
        """Add the tokens that the layout puts into a document's cache."""
        return _with_ids(document, self._stored(document.token_ids) if self._layout.cached_tokens else None)

    def without_anchors(self, document: Document) -> Document:
        """Remove anchors, so that the document can be cut anywhere."""
        return _with_ids(document, self.own(document.token_ids) if self._layout.anchors else None)

    def _stored(self, ids: Sequence[int]) -> tuple[int, ...]:
        return stored_tokens(self._layout, ids, self.engine.vocabulary_size)

    def own(self, ids: Sequence[int]) -> tuple[int, ...]:
        """A text without the layout's tokens."""
        return own_tokens(self._layout, ids, self.engine.vocabulary_size)

    def compute(self, ids: Sequence[int], neutral: int = 0) -> tuple[KVCache, tuple[int, ...]]:
        """Compute a document's cache after ``neutral`` neutral tokens; returns also all tokens before it."""
        engine, opening = self.engine, opening_of(self.engine, ids)
        if self._layout.anchors is not None:
            return compute_stored(engine, self._layout, ids), ()
        if neutral:
            prefix = neutral_prefix(engine, ids, neutral)
            if len(prefix) > len(opening):
                return compute_behind(engine, prefix, ids), prefix
        return prefill_documents(engine, [ids])[0], opening

    def tokens_to_take(self, documents: Sequence[Document]) -> int:
        """Number of documents' tokens to fit on: see ``Coding.calibration_tokens``."""
        available = sum(len(document.token_ids) for document in documents)
        return EXTENTS[self.coding.calibration] if self._layout.anchors else self.coding.calibration_tokens(available)

    def tokens_to_fit_on(self, documents: Sequence[Document]) -> int:
        """Number of stored tokens in a fit, as profiles note it; without anchors all tokens are stored."""
        return self._count_stored(self._texts(documents, self.tokens_to_take(documents))[0])

    def _count_stored(self, texts: Sequence[Sequence[int]]) -> int:
        """Tokens of texts that the layout stores."""
        kept = [(len(ids), self._layout.cache_stored(len(ids))) for ids in texts]
        return sum(length if stored is None else int(stored.sum()) for length, stored in kept)

    def _texts(self, documents: Sequence[Document], tokens: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """``calibration_texts`` as computed: cut between documents' own tokens, with the layout's anchors."""
        chosen, others = calibration_texts([self.without_anchors(each) for each in documents], tokens)
        if self._layout.anchors:
            chosen, others = ([self._stored(ids) for ids in texts] for texts in (chosen, others))
        return chosen, others

    def fit(self, documents: Sequence[Document], tokens: int) -> AnyProfile | None:
        """Fit a profile on the first tokens of documents; None if they are too few."""
        chosen, others = self._texts(documents, tokens)
        if (left := self._count_stored(chosen)) < LEAST_TOKENS:
            return None
        notes: dict[str, str | int] = {}
        if self.engine.soft_tokens and self._is_soft:
            notes["soft_tokens"] = self.engine.soft_tokens.digest
        if self._layout.anchors:
            notes["tokens"] = left
        if self.opens:
            notes["opening"] = self.opens
        profile = self.coding.kind.fit(_Texts(self, chosen, others), self.coding)
        if profile is None or not notes:
            return profile
        return cast("AnyProfile", replace(cast("Any", profile), notes=profile.notes | notes))


def _with_ids(document: Document, ids: tuple[int, ...] | None) -> Document:
    return document if ids in (None, document.token_ids) else replace(document, token_ids=ids)


class _Texts:
    """Calibration texts as inputs of the level kinds' ``fit``."""

    def __init__(
        self, calibration: Calibration, chosen: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]
    ) -> None:
        self._calibration, self._engine = calibration, calibration.engine
        self._chosen, self._others = chosen, others
        self.keeper = MomentFile(calibration.coding.resume)

    def caches(self) -> list[KVCache]:

        tokens, count = sum(map(len, self._chosen)), len(self._chosen)
        _progress.info("computing calibration texts: %d tokens of %d texts", tokens, count)
        return spilled((self._calibration.compute(ids)[0] for ids in self._chosen), count)

    def statistics(self, *, tokens: bool) -> Statistics | None:
        _progress.info("gathering statistics: what attention weighs, and what errors do to answers")
        found = self._engine.statistics(self._chosen, tokens=tokens)
        _progress.info("fitting the profile")
        return found

    def prefix_states(self, layers: int) -> list[Tensor]:
        return [states_of(self._engine, ids, layers) for ids in self._chosen]

    def calibrate_error(self, profile: Calibrated, ladder: Ladder | None) -> Calibrated:
        _progress.info("measuring what errors do to answers, level by level")
        layout = self._calibration.coding.layout
        texts, compute = self._others or self._chosen, None
        if layout.anchors:  # a document cut inside a chunk would not match the layout
            texts = [self._calibration.own(ids) for ids in texts]
            compute = partial(compute_cached, self._engine, layout)
        profile = calibrate_error(self._engine, profile, texts, ladder, compute)
        held_out = int(bool(self._others) and profile.error_to_kl is not None)
        return replace(profile, notes=profile.notes | {"kl_held_out": held_out})


_ALIGNED = 16
"""Alignment of tensors in their file, in bytes."""


def spilled(caches: Iterable[KVCache], total: int, folder: Path | None = None) -> list[KVCache]:
    """Write caches to files as they come and map them, so that the system may evict them from memory.

    The files are unlinked once mapped, and vanish with the caches. If the disk is full, a cache stays in memory.
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
            with suppress(OSError):  # systems that cannot unlink a mapped file clean it up later
                path.unlink()
        return replace(cache, keys=mapped[: len(cache.keys)], values=mapped[len(cache.keys) :])
    _log.warning("no room for a cache of %d bytes among temporary files; it stays in memory", cache.nbytes)
    return cache


def _mapped(tensors: list[Tensor], file: IO[bytes], path: Path) -> Iterator[Tensor]:
    """Map all tensors of one file."""
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


_log = logging.getLogger("kvwire.runtime")
SAVE_S = 60.0
"""Seconds between writes of the file: sums of a wide model take gigabytes."""
_DIGEST = "digest"
_DAMAGE = (OSError, ValueError, KeyError, EOFError, TypeError, AttributeError, zipfile.BadZipFile, zlib.error)
"""Errors of reading a damaged archive."""


class MomentFile:
    """Progress of ``fit_profile``, shown on a terminal, and saved in a file if one is named."""

    def __init__(self, path: Path | None, save_s: float = SAVE_S) -> None:
        """Do not read yet."""
        self._path, self._save_s = path, save_s
        self._digest, self._saved_at = "", time.monotonic()
        self._bar: Any = None

    def recall(self, digest: Callable[[], str]) -> Moments | None:
        """Read the file, if there is one."""
        if self._path is None:
            return None
        self._digest = digest()
        try:
            with self._path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                known = {name: file[name] for name in file.files}
            told = str(known.pop(_DIGEST))
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            msg = f"the sums kept in {self._path} are damaged ({error}): delete the file, and the fit begins anew"
            raise CorruptError(msg) from error
        if told != self._digest:
            raise MismatchError(
                f"the sums kept in {self._path} are of another model, of other settings or of other texts: "
                "name another file, or delete this one"
            )
        return known

    def keep(self, arrays: Callable[[], Moments], total: int) -> None:
        """Show one more summed cache, and write the file if it is due."""
        self._show(total)
        now = time.monotonic()
        if self._path is None or now - self._saved_at < self._save_s:
            return
        part = self._path.with_name(f"{self._path.name}.part")
        try:
            with part.open("wb") as file:
                np.savez(file, **cast("Any", {_DIGEST: np.array(self._digest), **arrays()}))
            part.replace(self._path)
        except OSError as error:
            _log.warning("what was summed could not be kept in %s (%s): the fit goes on without", self._path, error)
            part.unlink(missing_ok=True)
        self._saved_at = time.monotonic()

    def _show(self, total: int) -> None:
        from tqdm import tqdm

        bar = self._bar = self._bar or tqdm(
            total=total, unit="text", disable=None, desc="summing", file=sys.stderr, delay=1.0
        )
        bar.update(1)
        if bar.n >= total:
            bar.close()

    def done(self) -> None:
        """Delete the file, once the profile is stored."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
