"""What a request carries in secret is in no error: neither in its text, nor in its causes, nor in its traceback."""

import asyncio
import errno
import logging
import os
import socket
import traceback
from contextlib import closing

import pytest

from kvwire.errors import KvwireError, StorageError
from kvwire.store import HttpAddress
from kvwire.transport import HttpSource, HttpStore, HttpStoreSettings

SIGNATURE, TOKEN = "5ec2e751", "70ce2"
QUERY = f"X-Amz-Credential=id&X-Amz-Signature={SIGNATURE}"

BROKEN = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n",
    "garbage": b"garbage\r\n\r\n",
    "cut": b"HTTP/1.1 206 OK\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n\r\nabc",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    "hung up": b"",
    "refused": b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n",
    "moved": b"HTTP/1.1 302 No\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n",
}


def told_by(error):
    """All that a log or a report shows of an error."""
    told = [repr(error), str(error), *traceback.format_exception(error)]
    cause = error.__cause__
    while cause is not None:
        told += [repr(cause), str(cause), repr(vars(cause))]
        cause = cause.__cause__
    return "\n".join(told)


def assert_no_secret(text):
    assert SIGNATURE not in text
    assert TOKEN not in text


@pytest.mark.parametrize("answer", [*BROKEN.values(), None], ids=[*BROKEN, "echo"])
async def test_a_source_keeps_signed_urls_and_tokens_to_itself(answering, session, answer, caplog):
    caplog.set_level(logging.INFO)
    source = HttpSource(session, f"{answering(answer)}/b/k?{QUERY}", token=TOKEN)
    with pytest.raises(KvwireError) as caught:
        await source.read(0, 10, lambda _: None)
    assert_no_secret(told_by(caught.value) + caplog.text)
    assert source.url in str(caught.value)


@pytest.mark.parametrize("answer", [*list(BROKEN.values())[1:], None], ids=[*list(BROKEN)[1:], "echo"])
async def test_a_store_keeps_its_token_to_itself(answering, answer, caplog):
    caplog.set_level(logging.INFO)
    with closing(HttpStore(answering(answer), token=TOKEN, settings=HttpStoreSettings(attempts=1))) as store:
        for call in (lambda: store.get("k"), lambda: store.put("k", b"x"), lambda: list(store.scan(""))):
            with pytest.raises(KvwireError) as caught:
                await asyncio.to_thread(call)
            assert_no_secret(told_by(caught.value) + caplog.text)
            assert str(caught.value).isprintable()


async def test_a_refused_connection_is_told_with_the_systems_reason(session):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        source = HttpSource(session, f"{url}/k?{QUERY}", token=TOKEN)
        with pytest.raises(StorageError, match="ClientConnectorError") as caught:
            await source.read(0, 10, lambda _: None)
        assert_no_secret(told_by(caught.value))
        store = HttpStore(url, settings=HttpStoreSettings(backoff_s=0.001))
        with closing(store), pytest.raises(StorageError, match=os.strerror(errno.ECONNREFUSED)):
            await asyncio.to_thread(store.get, "k")


@pytest.mark.parametrize("url", [f"http://[/?{QUERY}", f"http://h:x/?{QUERY}", f"ftp://h/?{QUERY}", f"http://?{QUERY}"])
async def test_an_address_that_is_none_is_not_repeated(session, url):
    for address in (url, lambda _: HttpAddress(url, (("Authorization", TOKEN),))):
        with pytest.raises(KvwireError) as caught:
            await HttpSource(session, address).read(0, 1, lambda _: None)
        assert_no_secret(told_by(caught.value))
