"""Encoding options, inputs and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvwire.codec import CHUNK_TOKENS, DEFAULT_METHOD, Ladder, Profile, kind_of_method
from kvwire.errors import ArgumentError
from kvwire.reuse import PLAIN
from kvwire.types.cache import plain_token_ids

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvwire.codec import AnyProfile, Backend, LevelKind
    from kvwire.reuse import LinkLayout
    from kvwire.store import CatalogEntry
    from kvwire.types import BlobInfo, BlockDeviation, KVCache


CALIBRATION_TOKENS, QUICK_TOKENS = 16384, 2048
"""Tokens to fit a profile on: more than the first number hardly change the basis. Caches of the fit are on disk."""
LEAST_TOKENS = 64
"""Less text cannot fit a model: such documents carry a plain profile of their own."""
Extent = Literal["full", "quick"]
EXTENTS: dict[Extent, int] = {"full": CALIBRATION_TOKENS, "quick": QUICK_TOKENS}


def read_whole(profile: AnyProfile | None) -> AnyProfile | None:
    """A profile, with all that encoders need of it."""
    if isinstance(profile, Profile):  # other kinds are read whole in any case
        profile.read_all()
    return profile


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
        """Convert ids of any integer type; raise ArgumentError for others."""
        object.__setattr__(self, "token_ids", plain_token_ids(self.token_ids))


@dataclass(frozen=True)
class Encoded:
    """Result of encoding a document.

    Attributes:
        entry: The document's entry in the catalog.
        blob: The blob's header; None if only the text was stored, or an older blob was left alone.
        skipped: Whether the catalog already had the document, encoded alike.
        encode_s: Seconds of prefilling, encoding and writing; 0 if nothing was encoded.
    """

    entry: CatalogEntry
    blob: BlobInfo | None
    skipped: bool
    encode_s: float

    @property
    def info(self) -> BlobInfo:
        """The blob's header."""
        if self.blob is None:
            raise ArgumentError(f"no blob was made of {self.entry.document_id!r}: look at ``blob`` first")
        return self.blob


@dataclass(frozen=True)
class Computed:
    """Output of the model for a document.

    Attributes:
        cache: Of the whole document, positions on and from 0.
        neutral_prefix: Tokens before it when it was computed.
        hidden: States of the prefix layers, if the profile has some.
        deviation: How much tokens change behind other documents, if measured.
        opening: How many of ``neutral_prefix``, from the first on, are the engine's opening tokens.
        beginning: The first token computed alone, for prompts that begin with the document; else None.
    """

    cache: KVCache
    neutral_prefix: tuple[int, ...] = ()
    hidden: Tensor | None = None
    deviation: BlockDeviation | None = None
    opening: int = 0
    beginning: KVCache | None = None


@dataclass(frozen=True)
class Coding:
    """Encoding options of a corpus.

    Attributes:
        method: Method of the lossy levels, one of ``codec.methods()``.
        prefix_layers: Layers that readers compute, which makes blobs smaller.
        lossless: Add a bit-exact level.
        ladder: Quality levels of kvwire's own method, None for the default.
        chunk_tokens: Tokens of a chunk.
        backend: Kernels that encode; blobs are the same with all.
        deviation: Measure and store how much tokens change behind neighbours, documents of the same call. A blob then
            depends on these neighbours.
        neutral_prefix: Compute documents after so many tokens of a neutral text, dropped afterwards: links with few
            repaired rows lose less, but a prompt that begins with a document is not exact. 0: documents alone.
        layout: Its tokens inside caches are computed with each document and become part of it; soft tokens are the
            engine's (``Engine.use_soft_tokens``). With anchors, only these are stored.
        calibration: Amount of text to fit a profile on: ``full`` or ``quick``, see ``calibration_tokens``.
        resume: File for the sums of a profile's fit until it is done; an interrupted fit resumes from it. None: not
            saved.
    """

    method: str = DEFAULT_METHOD
    prefix_layers: int = 0
    lossless: bool = False
    ladder: Ladder | None = None
    chunk_tokens: int = CHUNK_TOKENS
    backend: Backend = "auto"
    deviation: bool = False
    neutral_prefix: int = 0
    layout: LinkLayout = PLAIN
    resume: Path | None = None
    calibration: Extent = "full"

    def __post_init__(self) -> None:
        """Refuse options that exclude each other."""
        if self.prefix_layers < 0:
            raise ArgumentError(f"prefix_layers is a number of layers, 0 for none, got {self.prefix_layers}")
        if self.neutral_prefix and (self.neutral_prefix < 0 or self.prefix_layers):
            msg = "a neutral prefix is a number of tokens, 0 for none, and cannot be combined with prefix layers"
            raise ArgumentError(msg)
        if self.layout.cached_tokens and self._moves:
            raise ArgumentError(
                f"the layout {self.layout.name} has tokens inside caches: encode without prefix layers, a neutral "
                "prefix and deviations"
            )
        if self.layout.anchors and max(self.layout.anchors.tokens) >= 0:
            raise ArgumentError(
                f"the layout {self.layout.name} has anchors that texts may hold, too, so that what was stored is "
                "ambiguous: encode with soft tokens as anchors, such as the layout anchors:100/25"
            )
        if self.calibration not in EXTENTS:
            raise ArgumentError(f"a calibration is one of {', '.join(EXTENTS)}, got {self.calibration!r}")
        self.kind.check_settings(self)

    @property
    def _moves(self) -> bool:
        """Whether prefix layers, deviations or a neutral prefix are in use."""
        return bool(self.neutral_prefix or self.prefix_layers or self.deviation)

    @property
    def lays_out(self) -> bool:
        """Whether the layout adds tokens to documents."""
        return bool(self.layout.cached_tokens)

    @property
    def is_prefill(self) -> bool:
        """Whether documents are computed as by the engine's ``prefill``: alone, under a causal mask."""
        return not self.neutral_prefix and self.layout.anchors is None

    def calibration_tokens(self, available: int) -> int:
        """Number of tokens to fit on: a small corpus gets a small fit, and some text is held out to judge it."""
        return max(LEAST_TOKENS, min(EXTENTS[self.calibration], available // 2))

    @property
    def kind(self) -> LevelKind:
        """Level kind of the lossy levels."""
        return kind_of_method(self.method)
