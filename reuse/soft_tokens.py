"""Soft tokens: trained embeddings outside the vocabulary, in one small file.

The file is safetensors with one tensor, ``embeddings``; its metadata names model and layout. The digest covers the
content, not the bytes, so that files from other tools agree.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import safetensors
import safetensors.torch
import torch

from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, MismatchError
from kvwire.reuse.layout import MAX_SOFT_TOKENS
from kvwire.reuse.layout_presets import read_layout
from kvwire.types import SoftTokensName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from kvwire.reuse.layout import LinkLayout
    from kvwire.types import CacheMeta

FORMAT = "kvwire soft tokens 1"
MAX_FILE_BYTES = 64 << 20
"""Longest file that is read: a thousand embeddings of 16,384 numbers."""
_RANK = 2


@dataclass(frozen=True, eq=False)
class SoftTokens:
    """Trained embeddings.

    Attributes:
        embeddings: Float32 ``[count, hidden_size]`` on the processor, as input of the first layer; row k is soft token
            k.
        layout: Name of the layout they were trained for, see ``read_layout``.
        model_id: The model's name.
        model_revision: Identifies its weights; empty if not known.
    """

    embeddings: Tensor
    layout: str
    model_id: str = ""
    model_revision: str = ""

    def __post_init__(self) -> None:
        """Check shape and numbers."""
        rows = self.embeddings
        if rows.ndim != _RANK or not rows.numel() or len(rows) > MAX_SOFT_TOKENS or not rows.is_floating_point():
            msg = f"soft tokens are floats [1 to {MAX_SOFT_TOKENS}, hidden_size], got {rows.dtype} {tuple(rows.shape)}"
            raise ArgumentError(msg)
        object.__setattr__(self, "embeddings", rows.detach().to("cpu", torch.float32).contiguous())
        if not bool(self.embeddings.isfinite().all()):
            raise ArgumentError("the soft tokens hold NaN or infinity; the training that made them diverged")
        self.check_layout(self.link_layout)

    @property
    def count(self) -> int:
        """Number of embeddings."""
        return len(self.embeddings)

    @cached_property
    def link_layout(self) -> LinkLayout:
        """The layout they were trained for."""
        return read_layout(self.layout)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file's content, hexadecimal."""
        named = [FORMAT, self.layout, self.model_id, self.model_revision, list(self.embeddings.shape)]
        data = json.dumps(named).encode() + self.embeddings.numpy().astype("<f4").tobytes()
        return hashlib.sha256(data).hexdigest()

    def name(self, vocabulary_size: int) -> SoftTokensName:
        """How blobs name them.

        Args:
            vocabulary_size: Of the model.
        """
        return SoftTokensName(self.digest, vocabulary_size, self.count)

    def check_layout(self, layout: LinkLayout) -> None:
        """Refuse a layout that uses more soft tokens.

        Args:
            layout: The prompts' layout.

        Raises:
            ArgumentError: It uses more than the file has.
        """
        if layout.soft_tokens > self.count:
            msg = f"the layout {layout.name} takes {layout.soft_tokens} soft tokens, the file has {self.count}"
            raise ArgumentError(msg)

    def check_model(self, meta: CacheMeta, hidden_size: int) -> None:
        """Refuse a model of another revision or, if either is unknown, of another name.

        Args:
            meta: Of the model's caches.
            hidden_size: Of the model.

        Raises:
            MismatchError: They were trained for another one.
        """
        own, other = self.model_revision, meta.model_revision
        is_same = own == other if own and other else self.model_id == meta.model_id
        if self.embeddings.shape[1] != hidden_size or not is_same:
            raise MismatchError(
                f"the soft tokens were trained for model {self.model_id!r} ({self.model_revision[:12] or 'unnamed'}, "
                f"embeddings of {self.embeddings.shape[1]}), this engine runs {meta.model_id!r} "
                f"({meta.model_revision[:12] or 'unnamed'}, {hidden_size}); train some for this model"
            )

    def to_bytes(self) -> bytes:
        """The file's content."""
        named = {"format": FORMAT, "layout": self.layout, "model_id": self.model_id}
        named |= {"model_revision": self.model_revision, "digest": self.digest}
        return safetensors.torch.save({"embeddings": self.embeddings}, named)

    @classmethod
    def from_bytes(cls, data: bytes) -> SoftTokens:
        """Read a file's content.

        Args:
            data: As ``to_bytes`` gives it.

        Returns:
            The soft tokens.

        Raises:
            CorruptError: It is another kind of file, or damaged.
            FormatVersionError: It is of a newer format.
        """
        try:
            named, tensors = _header(data), safetensors.torch.load(data)
        except (ValueError, KeyError, RecursionError, safetensors.SafetensorError) as error:
            raise CorruptError(f"this is no file of soft tokens ({error}); kvwire train-links writes one") from error
        if named.get("format") != FORMAT:
            msg = f"this kvwire reads the format {FORMAT!r}, this file is {named.get('format', 'another')!r}"
            raise FormatVersionError(msg)
        rows = tensors.get("embeddings")
        texts = [named.get(name, "") for name in ("layout", "model_id", "model_revision")]
        if rows is None or len(tensors) > 1:
            raise CorruptError("a file of soft tokens holds one tensor, embeddings, and nothing else; write it again")
        try:
            tokens = cls(rows, *texts)
        except ArgumentError as error:
            raise CorruptError(f"the file of soft tokens is damaged: {error}") from error
        if tokens.digest != named.get("digest"):
            raise CorruptError("the file of soft tokens does not match its digest; copy it again")
        return tokens


def _header(data: bytes) -> dict[str, str]:
    """Metadata of a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    if size > len(data) - 8:
        raise ValueError("it ends within its header")
    parsed = json.loads(data[8 : 8 + size])
    named = parsed.get("__metadata__") if isinstance(parsed, dict) else None
    if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
        raise ValueError("it has no metadata")
    return named


def as_stored(token_ids: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """A layout's tokens as blobs and texts store them: non-negative ids.

    Args:
        token_ids: Soft tokens are negative.
        vocabulary_size: Of the model.

    Returns:
        The same, with soft token k as the vocabulary's size + k.
    """
    return tuple(token if token >= 0 else vocabulary_size - 1 - token for token in token_ids)


def own_tokens(layout: LinkLayout, token_ids: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """Remove a layout's tokens from those of a document.

    Args:
        layout: The layout.
        token_ids: The document's, with or without them.
        vocabulary_size: Of the model.

    Returns:
        The document's own.
    """
    ids, length = tuple(token_ids), len(token_ids)
    try:
        layout.own_length(length)
    except ArgumentError:
        return ids
    start, stop = len(layout.before), length - len(layout.after)
    stored = layout.cache_stored(length)
    own = ids[start:stop] if stored is None else tuple(ids[at] for at in (~stored).nonzero()[:, 0].tolist())
    return own if as_stored(layout.cache_tokens(own), vocabulary_size) == ids else ids


def stored_tokens(layout: LinkLayout, token_ids: Sequence[int], vocabulary_size: int) -> tuple[int, ...]:
    """Tokens of a document as text and blob store them, including the layout's.

    Args:
        layout: The layout.
        token_ids: The document's, with or without them.
        vocabulary_size: Of the model.

    Returns:
        All tokens of its cache.
    """
    return as_stored(layout.cache_tokens(own_tokens(layout, token_ids, vocabulary_size)), vocabulary_size)
