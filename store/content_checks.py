"""Whether content is what was written: deep checks of blobs, profiles and texts, a piece at a time where they are long.

Each raises CorruptError, or FormatVersionError, for what is wrong, and returns whether what the object holds could be
looked at: what is sealed cannot, without its key.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvwire import codec, types
from kvwire.errors import CorruptError, TruncatedError
from kvwire.types import SEALED_MAGIC, SHIFT_MAGIC

if TYPE_CHECKING:
    from kvwire.store.base import ObjectReader
    from kvwire.types import SegmentInfo

_PIECE_BYTES = 8 << 20
MAX_TEXT_BYTES = 64 << 20
"""Of a text, which is read whole."""


def check_blob(reader: ObjectReader, sha256: str) -> bool:
    """Check a blob against its digest, and its segments against their checksums."""
    digest, check = hashlib.sha256(), _SegmentCheck()
    for start in range(0, reader.size, _PIECE_BYTES):
        piece = reader.read(start, start + _PIECE_BYTES)
        digest.update(piece)
        check.feed(piece)
    _compare(digest, sha256, "encode the document again")
    return check.finish()


def check_profile(reader: ObjectReader, sha256: str) -> bool:
    """Check a profile against its digest, and parse it."""
    data = reader.read(0, reader.size)
    if data.startswith(SEALED_MAGIC):
        return False
    _compare(hashlib.sha256(data), sha256, "fit or copy the profile again")
    codec.read_profile(data)
    return True


def check_shift(reader: ObjectReader, sha256: str) -> bool:
    """Check a link shift against its digest and its own checksum; whether it fits a model, its readers see."""
    from kvwire.codec.format.arrays import unpack_arrays

    data = reader.read(0, reader.size)
    _compare(hashlib.sha256(data), sha256, "run kvwire check-model again")
    unpack_arrays(SHIFT_MAGIC, data, "link shift")
    return True


def check_text(reader: ObjectReader, token_digest: str) -> bool:
    """Check a text's token ids against their digest."""
    ids = _token_ids(reader)
    if ids is not None and types.digest_tokens(ids) != token_digest:
        raise CorruptError("it holds another text than its key says: encode the document again")
    return ids is not None


def check_part_text(reader: ObjectReader, _sha256: str) -> bool:
    """Check the text of a part against its own checksum; whether it is the part's, readers of the document see."""
    return _token_ids(reader) is not None


def _token_ids(reader: ObjectReader) -> tuple[int, ...] | None:
    """A text's token ids; None of a sealed one."""
    data = reader.read(0, min(reader.size, MAX_TEXT_BYTES))
    return None if data.startswith(SEALED_MAGIC) else codec.read_text(data)


def _compare(digest: hashlib._Hash, sha256: str, advice: str) -> None:
    if digest.hexdigest() != sha256:
        raise CorruptError(f"its SHA-256 is not the one in its key: {advice}")


class _SegmentCheck:
    """Checks a blob's header and the checksums of its segments while its bytes come by, in order."""

    def __init__(self) -> None:
        self._start = b""
        self._needed = 1
        self._is_sealed = False
        self._segments: list[SegmentInfo] | None = None
        self._file_bytes = 0
        self._at = self._index = self._crc = 0

    def feed(self, piece: bytes) -> None:
        if self._is_sealed:
            return
        if self._segments is None:
            self._start += piece
            if len(self._start) >= self._needed and self._begin():
                piece, self._start = self._start, b""
                self._segment_bytes(piece)
            return
        self._segment_bytes(piece)

    def finish(self) -> bool:
        """Whether the content could be checked; raises CorruptError where it ended early or late."""
        if self._is_sealed:
            return False
        if self._segments is None:
            self._begin()
        if self._segments is None or self._at != self._file_bytes or self._index != len(self._segments):
            msg = f"the blob has {self._at} bytes, its header says {self._file_bytes}: encode the document again"
            raise CorruptError(msg)
        return True

    def _begin(self) -> bool:
        if self._start.startswith(SEALED_MAGIC):
            self._is_sealed = True
            return False
        try:
            info = codec.read_header(self._start)
        except TruncatedError as error:
            if error.needed <= len(self._start):
                raise
            self._needed = error.needed
            return False
        self._segments = sorted((one for row in info.segments for one in row), key=lambda one: one.offset)
        self._file_bytes = info.file_bytes
        return True

    def _segment_bytes(self, piece: bytes) -> None:
        from isal.isal_zlib import crc32

        view, segments = memoryview(piece), self._segments or []
        start, self._at = self._at, self._at + len(piece)
        while self._index < len(segments) and segments[self._index].offset < self._at:
            segment = segments[self._index]
            self._crc = crc32(view[max(0, segment.offset - start) : segment.end - start], self._crc)
            if segment.end > self._at:
                return
            if self._crc != segment.crc32:
                msg = f"chunk {segment.chunk} level {segment.level} does not match its checksum: encode it again"
                raise CorruptError(msg)
            self._index, self._crc = self._index + 1, 0
