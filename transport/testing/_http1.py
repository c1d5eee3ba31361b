"""As much of HTTP/1.1 as a proxy needs: heads, and where bodies end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire.errors import StorageError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator

MAX_HEADER_BYTES = 64 * 1024
_MAX_FRAMED_BYTES = 64 * 1024 * 1024  # bodies without a length are read whole, to give them one
_PIECE_BYTES = 64 * 1024
_BODILESS = frozenset({204, 304})
_FIRST_FINAL = 200


class Head:
    """First line and fields of a message, in order, with their spelling kept."""

    def __init__(self, line: str, fields: list[tuple[str, str]]) -> None:
        """Keep both."""
        self.line = line
        self.fields = fields

    def get(self, name: str) -> str | None:
        """The first field of that name, in any case of letters."""
        return next((value for field, value in self.fields if field.lower() == name.lower()), None)

    def drop(self, *names: str) -> None:
        """Remove fields."""
        lower = {name.lower() for name in names}
        self.fields = [(field, value) for field, value in self.fields if field.lower() not in lower]

    def replace(self, name: str, value: str) -> None:
        """Leave one field of that name."""
        self.drop(name)
        self.fields.append((name, value))

    @property
    def status(self) -> int:
        """The status of an answer."""
        words = self.line.split(" ", 2)
        return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0

    @property
    def length(self) -> int | None:
        """The announced length; None where there is none."""
        told = self.get("Content-Length")
        return int(told) if told is not None and told.isdigit() else None

    def encode(self) -> bytes:
        """The head as it goes over the wire."""
        lines = [self.line, *(f"{name}: {value}" for name, value in self.fields)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def read_header(reader: asyncio.StreamReader) -> Head | None:
    """The next head, or None where the other side closed instead. The reader's limit bounds it."""
    line = await reader.readline()
    if not line.strip():
        return None
    fields = []
    while (field := await reader.readline()).strip():
        name, _, value = field.decode("latin-1").partition(":")
        fields.append((name, value.strip()))
    return Head(line.decode("latin-1").strip(), fields)


async def read_answer(reader: asyncio.StreamReader) -> Head:
    """The head of the final answer. Raises StorageError where the server closed instead."""
    while head := await read_header(reader):
        if head.status >= _FIRST_FINAL:
            return head
    msg = "the server behind the proxy closed without an answer"
    raise StorageError(msg)


async def exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    """That many bytes, as they arrive; fewer where the other side closes."""
    while size and (piece := await reader.read(min(size, _PIECE_BYTES))):
        size -= len(piece)
        yield piece


async def framed(reader: asyncio.StreamReader, head: Head, method: str) -> tuple[int, AsyncIterator[bytes]]:
    """Length and pieces of an answer's body; one without a length is read whole and given one."""
    if method == "HEAD" or head.status in _BODILESS:
        return 0, exactly(reader, 0)
    if head.length is not None:
        return head.length, exactly(reader, head.length)
    if (head.get("Transfer-Encoding") or "").lower() == "chunked":
        body = b"".join([chunk async for chunk in _chunks(reader)])
    else:
        body = await reader.read(_MAX_FRAMED_BYTES)
        head.replace("Connection", "close")
    head.drop("Transfer-Encoding")
    head.replace("Content-Length", str(len(body)))
    return len(body), _once(body)


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    left = _MAX_FRAMED_BYTES
    while size := int((await reader.readline()).split(b";")[0] or b"0", 16):
        left -= size
        if left < 0:
            msg = "the server behind the proxy sent more than the proxy keeps"
            raise StorageError(msg)
        yield await reader.readexactly(size)
        await reader.readline()
    while (await reader.readline()).strip():
        pass  # trailers


async def _once(body: bytes) -> AsyncIterator[bytes]:
    if body:
        yield body
