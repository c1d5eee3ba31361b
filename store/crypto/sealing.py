"""Encryption at rest: AES-256-GCM around each part of a blob, so that ranges can still be fetched one by one.

A sealed object begins with a prologue that names the key. A sealed *blob* keeps the blob's own division: its header is
one message, each segment another, each 16 bytes longer than what it hides. Exactly specified in docs/format.md.

Keys. A keyring's master keys give each tenant a key of its own (HKDF, RFC 5869), and a tenant's key gives each object
one of its own, salted with an id that is derived from all that is sealed and said beside it. So no nonce can ever meet
another message under the same key, nothing random is needed, and the same object sealed twice gives the same bytes,
which content-addressed storage wants. A reader of the store learns lengths, which objects of one tenant are equal, and
what the objects' names tell: a guess of a whole text or of a document's id can be confirmed. That an object is the
newest of its name is not protected.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvwire._lazy import require
from kvwire.codec.format.container import parse_header, read_header
from kvwire.codec.format.header import MAX_HEADER_BYTES
from kvwire.errors import ArgumentError, AuthError, CorruptError, FormatVersionError, NotSealedError, TruncatedError
from kvwire.types import SEALED_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    from kvwire.codec.format.header import Header
    from kvwire.types import BlobInfo, SegmentInfo

KEY_BYTES = 32
TAG_BYTES = 16
_ID_BYTES = 16
_VERSION = (1, 0)
_OBJECT, _BLOB = 0, 1
_PROLOGUE = struct.Struct("<8sHHIQI16s16sI")
_MAX_PART_BYTES = (1 << 31) - TAG_BYTES - 1  # AES-GCM allows 64 GiB; the library takes what fits an int


def derive_key(key: bytes, purpose: bytes, salt: bytes = b"") -> bytes:
    """A key for a purpose from another key (HKDF with SHA-256, RFC 5869)."""
    require("cryptography", "crypto", "encryption at rest")
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=hashes.SHA256(), length=KEY_BYTES, salt=salt or None, info=purpose).derive(key)


@dataclass(frozen=True)
class TenantKey:
    """A key of 32 bytes that seals one tenant's objects, and the id of 16 bytes by which they name it."""

    key_id: bytes
    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        """Refuse what is no key."""
        if len(self.key) != KEY_BYTES or len(self.key_id) != _ID_BYTES:
            msg = f"a tenant's key has {KEY_BYTES} bytes and an id of {_ID_BYTES}; take them from a Keyring"
            raise ArgumentError(msg)

    def object_id(self, prologue: bytes, place: str, content: bytes) -> bytes:
        """What tells one object's key from all others: a keyed hash."""
        told = hashlib.sha256(place.encode()).digest() + hashlib.sha256(content).digest()
        return hmac.digest(self.key, b"kvwire object id" + prologue + told, "sha256")[:_ID_BYTES]

    def cipher(self, object_id: bytes) -> AESGCM:
        """The cipher of one object."""
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        return AESGCM(derive_key(self.key, b"kvwire object key", object_id))


class TenantKeys:
    """A tenant's keys: the first one seals, all of them open. Made by ``store.Keyring.tenant``."""

    def __init__(self, keys: Sequence[TenantKey]) -> None:
        """Keep them."""
        if not keys:
            raise ArgumentError("there is no key to seal with; make one with kvwire key")
        self._newest, self._oldest = keys[0], keys[-1]
        self._by_id = {key.key_id: key for key in reversed(keys)}

    @property
    def naming_secret(self) -> bytes:
        """What the names of prefix entries are keyed with: of the oldest key, so that a new one renames nothing."""
        return derive_key(self._oldest.key, b"kvwire prefix names")

    def seal(self, content: bytes, place: str) -> bytes:
        """Seal an object in one part."""
        size = _PROLOGUE.size + len(content) + TAG_BYTES
        prologue, cipher = self._begun(content, _OBJECT, len(content), size, place)
        return prologue + cipher.encrypt(_nonce(0), content, prologue + place.encode())

    def unseal(self, sealed: bytes, place: str) -> bytes:
        """Open an object that was sealed in one part."""
        prologue = _parsed(sealed, _OBJECT)
        if len(sealed) != prologue.file_bytes or prologue.header_bytes + TAG_BYTES + _PROLOGUE.size != len(sealed):
            raise CorruptError(f"a sealed object has {len(sealed)} bytes, not those that it claims; write it again")
        cipher = self.cipher(prologue.key_id, prologue.object_id)
        associated = sealed[: _PROLOGUE.size] + place.encode()
        return _opened(cipher, 0, sealed[_PROLOGUE.size :], associated, f"the object {place}")

    def seal_blob(self, blob: bytes) -> bytes:
        """Seal a blob, header and segments apart. Raises what ``read_header`` raises."""
        info = read_header(blob)
        segments = _in_order(info)
        size = _PROLOGUE.size + info.file_bytes + TAG_BYTES * (1 + len(segments))
        if len(blob) != info.file_bytes:
            raise CorruptError(f"the blob has {len(blob)} of {info.file_bytes} bytes; fetch it again")
        prologue, cipher = self._begun(blob, _BLOB, info.header_bytes, size, "")
        parts = [prologue, cipher.encrypt(_nonce(0), blob[: info.header_bytes], prologue)]
        for number, segment in enumerate(segments, 1):
            parts.append(cipher.encrypt(_nonce(number), blob[segment.offset : segment.end], None))
        return b"".join(parts)

    def unseal_blob(self, sealed: bytes) -> bytes:
        """Open a sealed blob."""
        reader = self.blob_reader()
        info = reader.read_header(sealed)
        if len(sealed) != info.file_bytes:
            raise CorruptError(f"the sealed blob has {len(sealed)} of {info.file_bytes} bytes; fetch it again")
        return reader.head + b"".join(reader.unsealed(s, sealed[s.offset : s.end]) for s in _in_order(info))

    def blob_reader(self) -> SealedBlob:
        """A reader of one sealed blob, range by range."""
        return SealedBlob(self)

    def _begun(self, content: bytes, kind: int, header_bytes: int, file_bytes: int, place: str) -> tuple[bytes, AESGCM]:
        if max(header_bytes, len(content) if kind == _OBJECT else 0) > _MAX_PART_BYTES:
            raise ArgumentError(f"an object of {len(content)} bytes is too long to be sealed in one part; split it")
        key = self._newest
        known = (SEALED_MAGIC, *_VERSION, 0, file_bytes, header_bytes, key.key_id)
        object_id = key.object_id(_PROLOGUE.pack(*known, bytes(_ID_BYTES), kind), place, content)
        return _PROLOGUE.pack(*known, object_id, kind), key.cipher(object_id)

    def cipher(self, key_id: bytes, object_id: bytes) -> AESGCM:
        """The cipher of an object."""
        key = self._by_id.get(key_id)
        if key is None:
            raise AuthError(
                f"an object is sealed with key {key_id.hex()}, which is not among this tenant's; "
                "add that master key to the keyring, and check the tenant's name and the salt"
            )
        return key.cipher(object_id)


class _Prologue(NamedTuple):
    key_id: bytes
    object_id: bytes
    header_bytes: int
    file_bytes: int


def _parsed(data: bytes, kind: int) -> _Prologue:
    if not data or data[: len(SEALED_MAGIC)] != SEALED_MAGIC[: len(data)]:
        raise NotSealedError("an object is not sealed, though this tenant's are; seal it by writing it again")
    if len(data) < _PROLOGUE.size:
        raise TruncatedError("a sealed object ends within its prologue; fetch it again", _PROLOGUE.size)
    _, major, minor, flags, file_bytes, header_bytes, key_id, object_id, told = _PROLOGUE.unpack_from(data)
    if major != _VERSION[0] or flags:
        msg = f"sealing format {major}.{minor} (flags {flags:#x}) is newer than this kvwire; upgrade kvwire"
        raise FormatVersionError(msg)
    least = _PROLOGUE.size + header_bytes + TAG_BYTES
    if told != kind or file_bytes < least or (kind == _BLOB and header_bytes > MAX_HEADER_BYTES):
        raise CorruptError("a sealed object is of another kind or length than it should be; write it again")
    return _Prologue(key_id, object_id, header_bytes, file_bytes)


class BlobReader(Protocol):
    """What turns ranges of a stored blob into its header and segments, whether it is sealed or not."""

    check: Callable[[SegmentInfo, bytes], bytes] | None
    """Takes a segment as it was stored, gives its content or raises CorruptError; None: the CRC-32 decides."""

    @property
    def parsed(self) -> Header | None:
        """The blob's plain header, parsed; None before it was read."""
        ...

    def read_header(self, data: bytes) -> BlobInfo:
        """Parse the stored bytes' beginning, or more; offsets and lengths are those of the stored bytes."""
        ...


class PlainBlob:
    """Reads a blob that is stored as it is."""

    check: Callable[[SegmentInfo, bytes], bytes] | None = None

    def __init__(self) -> None:
        """Nothing was read yet."""
        self.parsed: Header | None = None

    def read_header(self, data: bytes) -> BlobInfo:
        """``codec.read_header``, and the header is kept."""
        self.parsed = parse_header(data)
        return self.parsed.info


class SealedBlob:
    """Reads a sealed blob: first its header, then segments in any order."""

    check: Callable[[SegmentInfo, bytes], bytes] | None

    def __init__(self, keys: TenantKeys) -> None:
        """Nothing was read yet."""
        self._keys = keys
        self._numbers: dict[tuple[int, int], int] = {}
        self._cipher: AESGCM | None = None
        self.head = b""
        self.parsed: Header | None = None
        self.check = self.unsealed

    def read_header(self, data: bytes) -> BlobInfo:
        """Parse the stored bytes' beginning."""
        prologue = _parsed(data, _BLOB)
        stored = _PROLOGUE.size + prologue.header_bytes + TAG_BYTES
        if len(data) < stored:
            raise TruncatedError(f"the sealed header ends after {len(data)} of {stored} bytes; fetch it again", stored)
        cipher = self._keys.cipher(prologue.key_id, prologue.object_id)
        header = _opened(cipher, 0, data[_PROLOGUE.size : stored], data[: _PROLOGUE.size], "the header")
        parsed = parse_header(header)
        info = parsed.info
        order = _in_order(info)
        size = _PROLOGUE.size + info.file_bytes + TAG_BYTES * (1 + len(order))
        if (info.header_bytes, size) != (prologue.header_bytes, prologue.file_bytes):
            raise CorruptError("the sealed blob is not of the length that its header tells; write it again")
        self.head, self.parsed, self._cipher = header, parsed, cipher
        self._numbers = {(segment.chunk, segment.level): number for number, segment in enumerate(order, 1)}
        return self._as_stored(info, stored, size)

    def unsealed(self, segment: SegmentInfo, stored: bytes) -> bytes:
        """Open one segment."""
        number = self._numbers.get((segment.chunk, segment.level))
        if self._cipher is None or number is None:
            raise ArgumentError("a segment can be opened only after its blob's header; call read_header first")
        return _opened(self._cipher, number, stored, None, f"chunk {segment.chunk} level {segment.level}")

    def _as_stored(self, info: BlobInfo, header_bytes: int, file_bytes: int) -> BlobInfo:
        shift = header_bytes - info.header_bytes

        def moved(segment: SegmentInfo) -> SegmentInfo:
            number = self._numbers[segment.chunk, segment.level]
            offset = segment.offset + shift + TAG_BYTES * (number - 1)
            return replace(segment, offset=offset, stored=segment.stored + TAG_BYTES)

        segments = tuple(tuple(moved(segment) for segment in row) for row in info.segments)
        levels = []
        for index, level in enumerate(info.levels):
            tags = TAG_BYTES * sum(len(row) > index for row in segments)
            read = TAG_BYTES * sum(len(info.reads(chunk, index)) for chunk in range(info.chunks))
            total = level.cumulative_bytes + shift + read
            levels.append(replace(level, bytes=level.bytes + tags, cumulative_bytes=total))
        return replace(info, header_bytes=header_bytes, file_bytes=file_bytes, segments=segments, levels=tuple(levels))


def _in_order(info: BlobInfo) -> list[SegmentInfo]:
    """All segments as they lie in the blob."""
    return sorted((segment for row in info.segments for segment in row), key=lambda segment: segment.offset)


def _nonce(number: int) -> bytes:
    return struct.pack("<QI", number, 0)


def _opened(cipher: AESGCM, number: int, stored: bytes, associated: bytes | None, what: str) -> bytes:
    from cryptography.exceptions import InvalidTag

    try:
        return cipher.decrypt(_nonce(number), stored, associated)
    except (InvalidTag, ValueError) as error:  # ValueError: shorter than a tag
        msg = f"{what} was changed since it was sealed, or sealed with another key; fetch or write it again"
        raise CorruptError(msg) from error
