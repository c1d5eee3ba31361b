"""The registry of level kinds: codec numbers (docs/format.md, section 2.2) and the module of each.

Parsing a header needs this table alone; ``kinds.base.kind_of`` imports a kind's module to encode or decode.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.errors import ArgumentError

MAX_LEVELS = 8
"""Most levels of a blob."""
MAX_SINKS = 64
"""Most attention sinks of a blob: each takes a few kilobytes of the header, and every decoder expands it."""
MAX_CHUNK_SYMBOLS = 1 << 30
"""Most tokens times coefficients of a chunk: 4096 tokens of the widest model; a lane's length stays in 16 bits."""


CODEC_LAYERED = 1
"""Coefficients in levels that refine each other, coded by rANS whose lanes have words of their own."""
CODEC_LOSSLESS = 2
"""Stored numbers bit for bit."""
CODEC_CACHEGEN = 3
"""CacheGen's anchors and deltas."""
DEFAULT_METHOD = "kvwire"


@dataclass(frozen=True)
class SegmentCodec:
    """A row of the registry: what parsing a header needs to know of a level kind.

    Attributes:
        number: The codec number in levels and in the segment index.
        module: Dotted name of the module with the kind's ``KIND``.
        method: The name in ``BlobInfo.method`` and on the command line.
        refines: Whether a level refines those below; otherwise it decodes alone, without step or shift.
        lossless: Whether a level holds the stored numbers bit for bit, without a profile. Lossless levels come last.
        error_of: Meaning of the measured error; empty for none.
        profile_magic: First bytes of the kind's stored profiles; empty for none.
    """

    number: int
    module: str
    method: str = DEFAULT_METHOD
    refines: bool = False
    lossless: bool = False
    error_of: str = ""
    profile_magic: bytes = b""


CODECS = {
    codec.number: codec
    for codec in (
        SegmentCodec(
            CODEC_LAYERED, "kvwire.codec.kinds.layered", refines=True, profile_magic=b"\x89KVP\r\n\x1a\n",
            error_of="squared, weighted by attention, in the unit of the profile",
        ),
        SegmentCodec(CODEC_LOSSLESS, "kvwire.codec.kinds.lossless", lossless=True),
        SegmentCodec(
            CODEC_CACHEGEN, "kvwire.codec.kinds.cachegen", method="cachegen", profile_magic=b"\x89KVG\r\n\x1a\n",
            error_of="squared, of keys without positions and values, relative to their variance within the chunk",
        ),
    )
}  # fmt: skip
"""Every known codec by its number."""


def methods() -> tuple[str, ...]:
    """List the methods that a corpus can be encoded with.

    Returns:
        The methods' names, kvwire's own first.
    """
    return tuple(dict.fromkeys(codec.method for codec in CODECS.values()))


def codec_of_method(method: str) -> SegmentCodec:
    """Return the codec of a method's lossy levels."""
    found = [codec for codec in CODECS.values() if codec.method == method and not codec.lossless]
    if not found:
        raise ArgumentError(f"no method {method!r}; there are {', '.join(methods())}")
    return found[0]


def error_of_method(method: str) -> str:
    """Describe the measured error of a method's lossy levels.

    Args:
        method: One of ``methods()``.

    Returns:
        The description.

    Raises:
        ArgumentError: No lossy kind has this method.
    """
    return codec_of_method(method).error_of
