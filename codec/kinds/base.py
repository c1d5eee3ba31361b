"""Interfaces of a level kind: a module of this folder with a ``KIND``, and a row of ``format.codecs.CODECS``.

docs/how-to/add-a-level-kind.md shows how to add one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS, SegmentCodec, codec_of_method
from kvwire.codec.workers import map_parallel
from kvwire.errors import ArgumentError, CorruptError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvwire.codec.format.header import Level
    from kvwire.codec.format.pack import EncodedSegment
    from kvwire.codec.format.segment import ChunkSegments
    from kvwire.codec.gpu.streams import Pending
    from kvwire.codec.kinds.requests import AnyProfile, Calibration, CodingSettings, DecodeRequest, EncodeRequest
    from kvwire.types import BlobInfo, KVCache, PagedKVCache

    Span = tuple[int, int]
    from kvwire.codec.format.header import Header


class LevelEncoder(ABC):
    """Encodes the chunks of one cache in one kind's levels.

    Attributes:
        levels: The levels of every chunk, coarsest first.
        profile_digest: SHA-256 of the profile that readers need besides the blob; empty for none.
        profile_bytes: The profile to put inside the blob; empty for none.
        prefix_layers: The profile's prefix layers.
        sinks: Stored bytes of each attention sink by token index, ascending.
        beginning: Stored bytes of the first token for a document that begins a prompt; empty for none.
        error_to_kl: The profile's ``(a, b)`` of ``KL = a * error^b``, or None.
    """

    levels: tuple[Level, ...] = ()
    profile_digest = ""
    profile_bytes = b""
    prefix_layers = 0
    sinks: Mapping[int, bytes] = MappingProxyType({})
    beginning = b""
    error_to_kl: tuple[float, float] | None = None

    @abstractmethod
    def encode(self, start: int, stop: int) -> list[EncodedSegment]:
        """Encode tokens ``start`` to ``stop`` into one segment for each level."""

    def encode_all(self, spans: Sequence[Span], threads: int | None) -> list[list[EncodedSegment]]:
        """Encode every chunk of the cache; the bytes do not depend on ``threads``."""
        return map_parallel(lambda span: self.encode(*span), spans, threads)


class LevelDecoder(ABC):
    """Decodes one blob's chunks of one kind; several threads may call it."""

    @abstractmethod
    def decode(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        """Decode one chunk on the processor into ``out`` from token ``at`` on; a damaged chunk writes nothing."""

    def use_device(  # noqa: B027 - most kinds have no kernels
        self, out: KVCache | PagedKVCache, workspace_bytes: int | None, finish: Callable[[int, int], bool] | None
    ) -> None:
        """Prepare to decode on the output's device; a kind without kernels does nothing."""

    def suits_device(self, piece: ChunkSegments) -> bool:  # noqa: ARG002 - for kinds with kernels
        """Return whether ``submit`` can decode a chunk on the device."""
        return False

    def submit(self, pieces: Sequence[ChunkSegments]) -> Pending:
        """Queue chunks on the device."""
        raise NotImplementedError

    @property
    def on_device(self) -> bool:
        """Whether ``use_device`` found kernels to run."""
        return False


class LevelKind(ABC):
    """A way to code the levels of a blob. Each kind has a module of its own with an instance as ``KIND``.

    Attributes:
        number: The codec number, the key of its row in ``format.codecs.CODECS``.
        title: The kind's name in messages.
        needs_profile: Whether encoding needs a fitted profile.
    """

    number: ClassVar[int]
    title: ClassVar[str]
    needs_profile: ClassVar[bool] = False

    @property
    def codec(self) -> SegmentCodec:
        """The kind's row in the registry."""
        return CODECS[self.number]

    @abstractmethod
    def encoder(self, request: EncodeRequest) -> LevelEncoder:
        """Prepare to encode a cache.

        Args:
            request: What to encode, and how.

        Returns:
            The encoder of the chunks.

        Raises:
            ArgumentError: The kind cannot serve the request.
            MismatchError: The profile does not fit the cache.
        """

    @abstractmethod
    def decoder(self, request: DecodeRequest) -> LevelDecoder:
        """Prepare to decode a blob.

        Args:
            request: What to decode, and how.

        Returns:
            The decoder of the chunks.

        Raises:
            ArgumentError: An input that the profile needs is missing.
        """

    def read_profile(self, data: bytes) -> AnyProfile:
        """Read a stored profile of the kind.

        Args:
            data: The stored bytes, untrusted.

        Returns:
            The profile.

        Raises:
            CorruptError: The bytes are no profile of the kind.
            TruncatedError: They end too early.
            FormatVersionError: A later version wrote them.
        """
        raise NotImplementedError

    def read_profile_inside(self, data: bytes) -> AnyProfile:  # noqa: ARG002 - for kinds whose blobs carry one
        """Read the profile that a blob carries.

        Args:
            data: The stored bytes; empty where the blob carries none.

        Returns:
            The profile.

        Raises:
            CorruptError: Blobs of the kind carry no profile, or this one is damaged.
        """
        raise CorruptError(f"the blob carries a profile inside, which {self.title}'s levels never do; fetch it again")

    def check_blob(self, info: BlobInfo, profile: AnyProfile) -> None:  # noqa: B027 - most kinds have no bounds
        """Compare a blob with the profile that it names or carries, whose layout is checked already.

        Args:
            info: What the blob says about itself.
            profile: A profile of this kind.

        Raises:
            CorruptError: The levels do not fit the profile, or a chunk's working set is too large.
        """

    def check_settings(self, settings: CodingSettings) -> None:
        """Reject settings that the kind does not support.

        Args:
            settings: How a corpus is to be encoded.

        Raises:
            ArgumentError: The kind does not support them.
        """
        if settings.prefix_layers or settings.ladder:
            msg = f"{self.title}'s method knows neither prefix layers nor ladder; leave them out or use kvwire's own"
            raise ArgumentError(msg)

    def fit(self, texts: Calibration, settings: CodingSettings) -> AnyProfile | None:
        """Fit a profile.

        Args:
            texts: The texts to fit it on.
            settings: How the corpus is to be encoded.

        Returns:
            The profile; None where the kind needs none or the texts are too few.
        """
        raise NotImplementedError

    def is_wanted(self, profile: AnyProfile, settings: CodingSettings) -> bool:
        """Compare a profile with settings.

        Args:
            profile: A profile of any kind.
            settings: How a corpus is to be encoded.

        Returns:
            Whether ``fit`` with these settings could have made the profile.
        """
        return profile.codec == self.number and profile.prefix_layers == settings.prefix_layers

    def has_levels(self, info: BlobInfo, settings: CodingSettings) -> bool:  # noqa: ARG002 - for kinds with a ladder
        """Compare a blob's levels with settings.

        Args:
            info: What the blob says about itself; it uses the current profile.
            settings: How a corpus is to be encoded.

        Returns:
            Whether encoding with these settings would give the same lossy levels.
        """
        return True


def kind_of(number: int) -> LevelKind:
    """Return the level kind with a codec number; imports its module."""
    kind: LevelKind = import_module(CODECS[number].module).KIND
    return kind


def kind_of_method(method: str) -> LevelKind:
    """Return the kind of a method's lossy levels.

    Args:
        method: One of ``format.codecs.methods()``.

    Returns:
        The kind.

    Raises:
        ArgumentError: No kind has this method.
    """
    return kind_of(codec_of_method(method).number)


def read_profile(data: bytes) -> AnyProfile:
    """Read a stored profile of any kind; its first bytes tell which.

    Args:
        data: The file's bytes.

    Returns:
        The profile.

    Raises:
        CorruptError: The bytes are no profile.
        TruncatedError: They end too early.
        FormatVersionError: A later version wrote them.
    """
    magics = {codec.profile_magic: number for number, codec in CODECS.items() if codec.profile_magic}
    found = next((number for magic, number in magics.items() if data.startswith(magic)), CODEC_LAYERED)
    return kind_of(found).read_profile(data)


def profile_for(header: Header, profile: AnyProfile | None) -> AnyProfile | None:
    """Return the checked profile for a blob's lossy levels; None where it has none."""
    wanted, codec = header.info.profile_digest, header.lossy_codec
    if codec is None:
        return None
    if not wanted:
        profile = kind_of(codec).read_profile_inside(header.profile_bytes)
    elif profile is None or profile.digest != wanted:
        have = "none was given" if profile is None else f"{profile.digest[:12]} was given"
        msg = f"the blob was encoded with profile {wanted[:12]}, {have}; pass profile= as stored beside the blob"
        raise MismatchError(msg)
    profile.check_fits(header.info.meta)
    if profile.codec != codec:
        raise CorruptError(
            "the profile that the blob names is of another method and does not know the blob's levels; "
            "fetch the blob's header again"
        )
    kind_of(codec).check_blob(header.info, profile)
    return profile
