"""Opening documents: headers that are late, and then fail."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from kvwire.errors import StorageError
from kvwire.runtime.document import FoundDocument, OpenDocument, Timeouts
from kvwire.runtime.find import DocumentOpener
from kvwire.types import digest_tokens

IDS = tuple(range(10))
ENTRY = SimpleNamespace(tokens=len(IDS), token_digest=digest_tokens(IDS), header_bytes=10, is_text=False)


@pytest.mark.parametrize("text_s", [0.05, 0.2], ids=["the text comes first", "the header fails first"])
def test_a_text_that_was_read_while_a_header_was_late_serves_when_that_fails(text_s):
    reads = []

    class Session:
        http = link = None

        async def look_up(self, _work, limit_s):
            reads.append(limit_s)
            await asyncio.sleep(text_s)
            return IDS

    class Fetcher:
        url = "http://far"

        async def open(self, *, deadline):
            assert deadline > 0
            await asyncio.sleep(0.15)
            msg = "connection reset"
            raise StorageError(msg)

    async def opened():
        driver = SimpleNamespace(clock=time.monotonic, meter=None)
        opener = DocumentOpener(
            Session(), driver, SimpleNamespace(text=lambda *_: IDS), None, Timeouts(0.1, 5.0, 1.0, 1.0)
        )

        async def connected(found, entry):
            return OpenDocument(found, found.text), Fetcher()

        opener._connected = connected
        return await opener.open(FoundDocument(None, "d", ENTRY, None, None))

    document = asyncio.run(opened())
    assert document.token_ids == IDS
    assert document.trouble
    assert len(reads) == 1
