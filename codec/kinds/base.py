"""What a level kind is: one module of this folder, with a ``KIND``, and one row of ``format.codecs.CODECS``.

docs/how-to/add-a-level-kind.md says what to write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from kvwire.codec.format.codecs import CODEC_LAYERED, CODECS, SegmentCodec, codec_of_method
from kvwire.codec.workers import each
from kvwire.errors import ArgumentError, CorruptError, MismatchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvwire.codec.format.header import Level
    from kvwire.codec.format.pack import Coded
    from kvwire.codec.format.segment import ChunkSegments
    from kvwire.codec.gpu.streams import Pending
    from kvwire.codec.kinds.requests import AnyProfile, Calibration, CodingSettings, DecodeRequest, EncodeRequest
    from kvwire.types import BlobInfo, KVCache, PagedKVCache

    Span = tuple[int, int]
    from kvwire.codec.format.header import Header


class LevelEncoder(ABC):
    """Codes the chunks of one cache in one kind's levels.

    Attributes:
        levels: What it makes of every chunk, coarsest first.
        profile_digest: Name of the profile that readers need; empty where they need none, or find it inside.
        profile_bytes: The profile to put inside the blob; empty for none.
        prefix_layers: The profile's own.
        sinks: What is stored of each attention sink, by its place; in order.
        beginning: What is stored of the first token where the document begins a prompt; empty for nothing.
        error_to_kl: The profile's own.
    """

    levels: tuple[Level, ...] = ()
    profile_digest = ""
    profile_bytes = b""
    prefix_layers = 0
    sinks: Mapping[int, bytes] = MappingProxyType({})
    beginning = b""
    error_to_kl: tuple[float, float] | None = None

    @abstractmethod
    def encode(self, start: int, stop: int) -> list[Coded]:
        """Code one chunk."""

    def encode_all(self, spans: Sequence[Span], threads: int | None) -> list[list[Coded]]:
        """Code every chunk of the cache; equal bytes whatever ``threads`` is."""
        return each(lambda span: self.encode(*span), spans, threads)


class LevelDecoder(ABC):
    """Decodes the chunks of one blob that are of one kind; several threads may call it."""

    @abstractmethod
    def decode(self, piece: ChunkSegments, out: KVCache, at: int) -> None:
        """Decode one chunk on the processor; a damaged one writes nothing."""

    def use_device(  # noqa: B027 - most kinds have no kernels
        self,
        out: KVCache | PagedKVCache,
        workspace_bytes: int | None,
        finish: Callable[[int, int], bool] | None,
    ) -> None:
        """Prepare to decode on the device of the output; a kind without kernels has nothing to do."""

    def suits_device(self, piece: ChunkSegments) -> bool:  # noqa: ARG002 - for kinds with kernels
        """Say where a chunk is decoded."""
        return False

    def submit(self, pieces: Sequence[ChunkSegments]) -> Pending:
        """Queue chunks on the device."""
        raise NotImplementedError

    @property
    def on_device(self) -> bool:
        """Whether ``use_device`` found kernels to run."""
        return False


class LevelKind(ABC):
    """A way to code the levels of a blob. Each has a module of its own, which holds one as ``KIND``.

    Attributes:
        number: Its codec number, the key of its row in ``format.codecs.CODECS``.
        title: Its name in messages.
        needs_profile: Whether encoding takes a profile that was fitted before.
    """

    number: ClassVar[int]
    title: ClassVar[str]
    needs_profile: ClassVar[bool] = False

    @property
    def codec(self) -> SegmentCodec:
        """Its row of the registry."""
        return CODECS[self.number]

    @abstractmethod
    def encoder(self, request: EncodeRequest) -> LevelEncoder:
        """Prepare to encode a cache.

        Args:
            request: What to encode, and how.

        Returns:
            What codes the chunks.

        Raises:
            ArgumentError: The request is not one that the kind can serve.
            MismatchError: The profile does not fit the cache.
        """

    @abstractmethod
    def decoder(self, request: DecodeRequest) -> LevelDecoder:
        """Prepare to decode a blob.

        Args:
            request: What to decode, and how.

        Returns:
            What decodes the chunks.

        Raises:
            ArgumentError: Something that the profile needs was not given.
        """

    def read_profile(self, data: bytes) -> AnyProfile:
        """Read a stored profile of the kind.

        Args:
            data: Its bytes, which come from anyone.

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
            data: Its bytes; empty where the blob carries none.

        Returns:
            The profile.

        Raises:
            CorruptError: Blobs of the kind carry none, or this one is damaged.
        """
        raise CorruptError(f"the blob carries a profile inside, which {self.title}'s levels never do; fetch it again")

    def check_blob(self, info: BlobInfo, profile: AnyProfile) -> None:  # noqa: B027 - most kinds have no bounds
        """Compare a blob with the profile that it names or carries, of this kind; the layouts fit.

        Args:
            info: What the blob says about itself.
            profile: Of this kind.

        Raises:
            CorruptError: The blob's levels are not of the profile, or a chunk's working set is out of bounds.
        """

    def check_settings(self, settings: CodingSettings) -> None:
        """Refuse settings that the kind does not know.

        Args:
            settings: What a corpus is to be encoded with.

        Raises:
            ArgumentError: They do not go together.
        """
        if settings.prefix_layers or settings.ladder:
            msg = f"{self.title}'s method knows neither prefix layers nor ladder; leave them out or use kvwire's own"
            raise ArgumentError(msg)

    def fit(self, texts: Calibration, settings: CodingSettings) -> AnyProfile | None:
        """Fit a profile.

        Args:
            texts: What to fit it on.
            settings: What the corpus is to be encoded with.

        Returns:
            The profile; None where the kind needs none, or the texts say too little.
        """
        raise NotImplementedError

    def is_wanted(self, profile: AnyProfile, settings: CodingSettings) -> bool:
        """Compare a profile with settings.

        Args:
            profile: Of any kind.
            settings: What a corpus is to be encoded with.

        Returns:
            Whether the profile is one that ``fit`` with these settings could have made.
        """
        return profile.codec == self.number and profile.prefix_layers == settings.prefix_layers

    def has_levels(self, info: BlobInfo, settings: CodingSettings) -> bool:  # noqa: ARG002 - for kinds with a ladder
        """Compare a blob's levels with settings.

        Args:
            info: What the blob says about itself; its profile is the one in use.
            settings: What a corpus is to be encoded with.

        Returns:
            Whether encoding with these settings would give the same lossy levels.
        """
        return True


def kind_of(number: int) -> LevelKind:
    """Find a level kind and import its module, unless it is there already."""
    kind: LevelKind = import_module(CODECS[number].module).KIND
    return kind


def kind_of_method(method: str) -> LevelKind:
    """Find the kind that a method's lossy levels are of.

    Args:
        method: One of ``format.codecs.methods()``.

    Returns:
        The kind.

    Raises:
        ArgumentError: No kind has this method.
    """
    return kind_of(codec_of_method(method).number)


def read_profile(data: bytes) -> AnyProfile:
    """Read a stored profile, of whichever kind its first bytes say.

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
    """Choose what a blob's lossy levels are decoded with, and check it."""
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
            "the blob is of another method than the profile that it names, which does not know its levels; "
            "fetch the blob's header again"
        )
    kind_of(codec).check_blob(header.info, profile)
    return profile
