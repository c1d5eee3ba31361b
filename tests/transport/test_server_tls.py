"""TLS, and curl as a client that shares no code with the server."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import socket
import ssl

import aiohttp
import pytest

from kvwire.errors import ArgumentError
from kvwire.store import FolderStore
from kvwire.transport import ServerSettings, ServerTls, TlsFiles, serve

from ..certificates import trusting, write_certificate
from .conftest import answered

DATA = bytes(range(256)) * 8192  # 2 MiB
DIGEST = hashlib.sha256(DATA).hexdigest()
BLOB = f"v1/t/{DIGEST}.kvw"


@pytest.fixture
def files(tmp_path):
    return write_certificate(tmp_path, "one")


@pytest.fixture
def store(tmp_path):
    store = FolderStore(tmp_path / "store")
    store.put(BLOB, DATA)
    return store


async def served_name(url, context):
    """Common name of the certificate that a new connection is shown."""
    host, port = url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, port, ssl=context)
    shown = writer.get_extra_info("peercert")
    writer.close()
    await writer.wait_closed()
    return shown["subject"][0][0][1]


async def test_objects_travel_over_tls(store, files):
    async with serve(store, tls=ServerTls(files)) as url, aiohttp.ClientSession() as client:
        assert url.startswith("https://127.0.0.1:")
        tls = trusting(files)
        async with client.get(f"{url}/{BLOB}", ssl=tls, headers={"Range": "bytes=5-1999999"}) as response:
            assert (response.status, await response.read()) == (206, DATA[5:2_000_000])
        assert await answered(client.delete(f"{url}/{BLOB}", ssl=tls)) == 204
        with (store.root.parent / "body").open("wb") as file:
            file.write(DATA)
        with (store.root.parent / "body").open("rb") as file:
            assert await answered(client.put(f"{url}/{BLOB}", ssl=tls, data=file)) == 201
    assert store.get(BLOB) == DATA


async def test_old_tls_and_plain_text_are_refused(store, files):
    async with serve(store, tls=ServerTls(files)) as url:
        host, port = url.removeprefix("https://").split(":")
        assert ServerTls(files).context.minimum_version == ssl.TLSVersion.TLSv1_2
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                assert not (await reader.read()).startswith(b"HTTP")
        writer.close()
        async with aiohttp.ClientSession() as client, client.get(f"{url}/healthz", ssl=trusting(files)) as response:
            assert response.status == 200


async def idle_client(url, context):
    """A blocking connection that has had one answer and reads no more, not even the end of the connection."""
    host, port = url.removeprefix("https://").split(":")

    def ask():
        secured = context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host)
        secured.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert secured.recv(1 << 16).startswith(b"HTTP/1.1 200")
        return secured

    return await asyncio.to_thread(ask)


async def test_an_idle_client_over_tls_does_not_hold_up_the_stop(store, files):
    async with asyncio.timeout(60):
        async with serve(store, tls=ServerTls(files), settings=ServerSettings(shutdown_s=600)) as url:
            client = await idle_client(url, trusting(files))
    client.close()


async def test_a_client_over_tls_that_is_slow_gets_the_end_of_its_answer(store, files):
    async with serve(store, tls=ServerTls(files), settings=ServerSettings(shutdown_s=60)) as url:
        host, port = url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, port, ssl=trusting(files), limit=1 << 14)
        writer.write(f"GET /{BLOB} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        whole = await reader.readexactly(1000)

        async def take_slowly():
            parts = [whole]
            while part := await reader.read(1 << 16):
                parts.append(part)
                await asyncio.sleep(0.02)
            return b"".join(parts)

        taking = asyncio.create_task(take_slowly())
    assert (await taking).partition(b"\r\n\r\n")[2] == DATA
    writer.close()


async def test_a_new_certificate_is_taken_for_new_connections(store, files, tmp_path, caplog):
    tls = ServerTls(files)
    first = trusting(files)
    async with serve(store, tls=tls) as url, aiohttp.ClientSession() as client:
        async with client.get(f"{url}/{BLOB}", ssl=first) as response:  # its connection stays
            await response.read()
        assert await served_name(url, first) == "one"
        write_certificate(tmp_path, "two")
        tls.reload()
        assert await served_name(url, trusting(files)) == "two"
        assert await answered(client.get(f"{url}/{BLOB}", ssl=first)) == 200
        second = trusting(files)
        files.private_key.write_bytes(b"-----BEGIN PRIVATE KEY-----\nnonsense\n")
        tls.reload()
        assert "stays in use" in caplog.text
        assert await served_name(url, second) == "two"


async def test_files_that_change_while_they_are_read_harm_nobody(store, files, tmp_path, monkeypatch, caplog):
    """A reload comes from a signal: it takes one reading of the files or none, and raises nothing."""
    tls = ServerTls(files)
    first = trusting(files)
    load = ssl.SSLContext.load_cert_chain

    def load_once(context, *arguments, **options):
        load(context, *arguments, **options)
        files.private_key.write_bytes(b"nonsense")  # what comes next finds another file

    async with serve(store, tls=tls) as url:
        write_certificate(tmp_path, "two")
        second = trusting(files)
        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", load_once)
        tls.reload()
        assert await served_name(url, second) == "two"
        tls.reload()
        assert "stays in use" in caplog.text
        assert await served_name(url, second) == "two"
        with pytest.raises(ssl.SSLError):
            await served_name(url, first)


def test_files_that_cannot_be_used(files, tmp_path):
    with pytest.raises(ArgumentError, match="PEM"):
        ServerTls(TlsFiles(tmp_path / "absent", files.private_key))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ArgumentError, match="PEM"):
        ServerTls(TlsFiles(files.certificate, write_certificate(other, "other").private_key))
    with pytest.raises(ArgumentError, match="PEM"):  # and nobody is asked for a password
        ServerTls(write_certificate(other, "locked", b"secret"))


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
async def test_curl(store, files, tmp_path):
    async def curl(*arguments):
        process = await asyncio.create_subprocess_exec(
            *("curl", "--silent", "--show-error", "--cacert", files.certificate, "--max-time", "20", *arguments),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out

    token = ("--header", "Authorization: Bearer t")
    body = tmp_path / "body"
    body.write_bytes(DATA)
    async with serve(store, token="t", tls=ServerTls(files)) as url:  # noqa: S106
        assert await curl(*token, "--range", "10-99", f"{url}/{BLOB}") == DATA[10:100]
        assert await curl(*token, f"{url}/{BLOB}") == DATA
        head = (await curl(*token, "--head", f"{url}/{BLOB}")).decode().lower()
        assert f'etag: "{DIGEST}"' in head
        assert f"content-length: {len(DATA)}" in head
        for part in (DATA[:1_000_000], DATA[:1]):  # a download that broke off is taken up again
            (tmp_path / "part").write_bytes(part)
            await curl(*token, "--continue-at", "-", "--output", tmp_path / "part", f"{url}/{BLOB}")
            assert (tmp_path / "part").read_bytes() == DATA
        code = ("--output", "/dev/null", "--write-out", "%{http_code}")
        assert await curl(*code, f"{url}/{BLOB}") == b"401"
        assert await curl(*code, *token, "--header", f'If-None-Match: "{DIGEST}"', f"{url}/{BLOB}") == b"304"
        assert await curl(*code, *token, "--request", "DELETE", f"{url}/{BLOB}") == b"204"
        assert await curl(*code, *token, "--upload-file", body, f"{url}/{BLOB}") == b"201"
        assert await curl(*code, *token, "--upload-file", body, f"{url}/{BLOB.replace('a', 'b')}") in (b"422", b"403")
        assert (
            await curl(*code, *token, "--upload-file", body, "--header", "Transfer-Encoding: chunked", f"{url}/x")
            == b"403"
        )
        page = json.loads(await curl(*token, f"{url}/?list&prefix=v1/"))
        assert [(one["key"], one["size"]) for one in page["objects"]] == [(BLOB, len(DATA))]
    assert store.get(BLOB) == DATA
