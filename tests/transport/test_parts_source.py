"""One object out of several: bytes come in order, whoever is quick."""

import asyncio

import pytest

from kvwire.errors import NotFoundError
from kvwire.store.crypto.joined import Extents
from kvwire.store.records import BlobPart
from kvwire.transport.sources.base import ByteSource
from kvwire.transport.sources.open_source import AT_ONCE, PartsSource

SIZES = [(3, 10), (2, 2), (4, 30)] * 20


class Part(ByteSource):
    """Gives a byte at a time, the later parts sooner."""

    under_way = most = 0

    def __init__(self, number, size):
        self.data = bytes((number + at) % 251 for at in range(size))
        self.number, self.distrusted, self.closed = number, [], False

    url = "memory:part"
    size = None

    async def read(self, start, end, sink):
        Part.under_way += 1
        Part.most = max(Part.most, Part.under_way)
        try:
            for at in range(start, end):
                await asyncio.sleep(0 if self.number % 2 else 1e-4)
                if self.number % 3 == 0:
                    self.on_local(1)
                sink(self.data[at : at + 1])
        finally:
            Part.under_way -= 1

    def distrust(self, start, end):
        self.distrusted.append((start, end))

    async def close(self):
        self.closed = True


def _made():
    parts = [Part(number, size) for number, (_, size) in enumerate(SIZES)]
    extents = Extents([BlobPart("", size, header, 1, "") for header, size in SIZES])
    joined = b"".join(part.data[:header] for part, (header, _) in zip(parts, SIZES, strict=True))
    joined += b"".join(part.data[header:] for part, (header, _) in zip(parts, SIZES, strict=True))
    return parts, PartsSource(parts, extents), joined


def test_any_range_comes_in_order():
    async def run():
        parts, source, joined = _made()
        local = []
        source.on_local = local.append
        for start, end in ((0, None), (0, 50), (100, 101), (170, 400), (5, 5)):
            got = []
            await source.read(start, end, got.append)
            assert b"".join(got) == joined[start:end]
        assert sum(local) > 0
        assert Part.most == AT_ONCE
        assert source.size == len(joined)
        source.distrust(0, 4)
        assert [part.distrusted for part in parts[:3]] == [[(0, 3)], [(0, 1)], []]
        await source.close()
        assert all(part.closed for part in parts)

    asyncio.run(run())


def test_a_part_that_is_gone_ends_the_read_and_leaves_nothing_under_way():
    async def run():
        parts, source, _ = _made()

        async def read(*_):
            await asyncio.sleep(0)
            raise NotFoundError(parts[7].url)

        parts[7].read = read
        with pytest.raises(NotFoundError):
            await source.read(0, None, lambda _: None)
        assert Part.under_way == 0

    asyncio.run(run())
