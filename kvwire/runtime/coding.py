"""What is encoded, how, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvwire.codec import CHUNK_TOKENS, DEFAULT_METHOD, Ladder, kind_of_method
from kvwire.errors import ArgumentError
from kvwire.reuse import PLAIN
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvwire.codec import Backend, LevelKind
    from kvwire.reuse import LinkLayout
    from kvwire.store import CatalogEntry
    from kvwire.types import BlobInfo, BlockDeviation, KVCache


CALIBRATION_TOKENS, QUICK_TOKENS = 16384, 2048
"""Tokens that a profile is fitted on: the basis hardly moves beyond the first number. Their caches wait on disk."""
LEAST_TOKENS = 64
"""Less text says nothing about a model: such documents carry a plain profile of their own."""
Extent = Literal["full", "quick"]
EXTENTS: dict[Extent, int] = {"full": CALIBRATION_TOKENS, "quick": QUICK_TOKENS}


@dataclass(frozen=True)
class Document:
    """A document to encode.

    Attributes:
        document_id: Its name in the catalog.
        token_ids: Its token ids.
    """

    document_id: str
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        """Take ids of any integer type, and refuse what is none (``ArgumentError``)."""
        object.__setattr__(self, "token_ids", plain_token_ids(self.token_ids))


@dataclass(frozen=True)
class Encoded:
    """What became of a document.

    Attributes:
        entry: The document's entry in the catalog.
        blob: What the blob's header says; None where only the text is kept, or where an older blob was left as it is.
        skipped: The catalog had the document already, as it was wanted.
        encode_s: Seconds of prefilling, encoding and writing; 0 where nothing was encoded.
    """

    entry: CatalogEntry
    blob: BlobInfo | None
    skipped: bool
    encode_s: float

    @property
    def info(self) -> BlobInfo:
        """What the blob's header says."""
        if self.blob is None:
            msg = f"of {self.entry.document_id!r} no blob was made: look at ``blob`` first"
            raise ArgumentError(msg)
        return self.blob


@dataclass(frozen=True)
class Computed:
    """What the model made of a document.

    Attributes:
        cache: Of the whole document, positions on and from 0.
        neutral_prefix: Tokens that it was computed behind.
        hidden: States of the prefix layers, where the profile has some.
        deviation: How far tokens move behind others, where that was measured.
        opening: How many of ``neutral_prefix``, the first ones, are the engine's opening tokens.
        beginning: The first token alone, for prompts that begin with the document; None where none does.
    """

    cache: KVCache
    neutral_prefix: tuple[int, ...] = ()
    hidden: Tensor | None = None
    deviation: BlockDeviation | None = None
    opening: int = 0
    beginning: KVCache | None = None


@dataclass(frozen=True)
class Coding:
    """How a corpus is encoded.

    Attributes:
        method: Of the lossy levels, one of ``codec.methods()``.
        prefix_layers: Layers that readers will compute anew, which makes blobs smaller.
        lossless: Add a level that holds every number bit for bit.
        ladder: The quality levels of kvwire's own method, None for the default.
        chunk_tokens: Tokens of a chunk.
        backend: Which kernels encode; blobs are alike.
        deviation: Measure how far tokens move behind neighbours, documents of the same call, and store that. The same
            text then gives the same blob only beside the same neighbours.
        neutral_prefix: Compute documents behind so many tokens of short neutral texts, which are then dropped, so that
            links lose much less. None: all of these texts where the model has attention sinks, but for documents that
            are stored bit for bit or in another method, have prefix layers, deviations or a layout's tokens, or begin
            prompts (indexes). 0: documents alone.
        layout: Its tokens inside caches are computed with each document and become part of it; soft tokens among them
            are those that the engine has (``Engine.use_soft_tokens``). With anchors these alone are stored.
        calibration: How much text a profile is fitted on: ``full`` or ``quick``, see ``calibration_tokens``.
        resume: A file that keeps what a fit of a profile has summed, until the profile is there: a fit that was
            interrupted goes on from it. None for none.
    """

    method: str = DEFAULT_METHOD
    prefix_layers: int = 0
    lossless: bool = False
    ladder: Ladder | None = None
    chunk_tokens: int = CHUNK_TOKENS
    backend: Backend = "auto"
    deviation: bool = False
    neutral_prefix: int | None = None
    layout: LinkLayout = PLAIN
    resume: Path | None = None
    calibration: Extent = "full"

    def __post_init__(self) -> None:
        """Refuse what does not go together."""
        if self.prefix_layers < 0:
            msg = f"a head start takes layers, {self.prefix_layers} are none; 0 goes without"
            raise ArgumentError(msg)
        if self.neutral_prefix and (self.neutral_prefix < 0 or self.prefix_layers):
            msg = "a neutral prefix takes tokens, 0 for none, and does not go together with prefix layers"
            raise ArgumentError(msg)
        if self.layout.cached_tokens and self._moves:
            msg = (
                f"the layout {self.layout.name} has tokens inside caches: encode without prefix layers, a neutral "
                "prefix and deviations"
            )
            raise ArgumentError(msg)
        if self.layout.anchors and max(self.layout.anchors.tokens) >= 0:
            msg = (
                f"the layout {self.layout.name} has anchors that texts may hold, too, so that what was stored is "
                "ambiguous: encode with soft tokens as anchors, such as the layout anchors:100/25"
            )
            raise ArgumentError(msg)
        if self.calibration not in EXTENTS:
            msg = f"a calibration is one of {', '.join(EXTENTS)}, got {self.calibration!r}"
            raise ArgumentError(msg)
        self.kind.check_settings(self)

    @property
    def _moves(self) -> bool:
        """Whether documents are computed in another way than alone, or read in another way than decoded."""
        return bool(self.neutral_prefix or self.prefix_layers or self.deviation)

    @property
    def lays_out(self) -> bool:
        """Whether documents are computed from other tokens than their own."""
        return bool(self.layout.cached_tokens)

    @property
    def may_be_neutral(self) -> bool:
        """Whether documents may be computed behind neutral texts where that was not asked for."""
        is_plain = self.method == DEFAULT_METHOD and not (self.lossless or self.prefix_layers or self.deviation)
        return is_plain and not self.layout.cached_tokens and self.layout.anchors is None

    @property
    def is_prefill(self) -> bool:
        """Whether documents are computed as the engine's ``prefill`` does: alone, each token seeing all before it."""
        return not self.neutral_prefix and self.layout.anchors is None

    def calibration_tokens(self, available: int) -> int:
        """How many tokens a profile is fitted on: a small corpus gets a small fit, and keeps text to judge it by."""
        return max(LEAST_TOKENS, min(EXTENTS[self.calibration], available // 2))

    @property
    def kind(self) -> LevelKind:
        """What codes the lossy levels."""
        return kind_of_method(self.method)
