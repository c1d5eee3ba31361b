"""Who may do what: tokens, tenants, signed URLs, metrics; and that no secret is ever told."""

import asyncio
import base64
import contextlib
import hashlib
import json
import logging
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvwire.errors import ArgumentError, AuthError, NotFoundError, StorageError
from kvwire.store import FolderStore, MemoryStore, tenant_hash
from kvwire.transport import (
    AccessSettings,
    JsonLines,
    ObjectServer,
    ServerSettings,
    SigningKeys,
    TextLines,
    new_token,
    serve,
    sign_url,
)
from kvwire.transport.server import application
from kvwire.transport.server.credentials import TenantTokens, WatchedFile

from .conftest import answered, until

DATA = bytes(range(256)) * 8
DIGEST = hashlib.sha256(DATA).hexdigest()
NAMES = ("anna", "berta")
CONFIG = "c0" * 8
KEYS = {name: f"v1/{tenant_hash(name)}/{CONFIG}/{DIGEST[:2]}/{DIGEST}.kvw" for name in NAMES}
FULL = "full-token-0123456789"
SECRET = bytes(range(32))
METRICS = "metrics-token"


@pytest.fixture
def tokens(tmp_path):
    """Tokens by what they are for; the tenants file holds their hashes."""
    made = {name: new_token() for name in ("anna", "berta", "reader", "expired")}
    path = tmp_path / "tenants.json"
    entries = [
        {"tenant": "anna", "token_sha256": made["anna"][1], "write": True},
        {"namespace": tenant_hash("berta"), "token_sha256": made["berta"][1], "write": True, "expires": 4e9},
        {"tenant": "anna", "token_sha256": made["reader"][1]},
        {"tenant": "anna", "token_sha256": made["expired"][1], "expires": int(time.time()) - 1},
    ]
    path.write_text(json.dumps(entries))
    return {name: token for name, (token, _) in made.items()} | {"path": path, "entries": entries}


@pytest.fixture
def signing_keys(tmp_path):
    path = tmp_path / "signing.json"
    secret = base64.b64encode(SECRET).decode()
    path.write_text(
        json.dumps({"k1": {"secret": secret}, "anna": {"secret": secret, "namespace": tenant_hash("anna")}})
    )
    path.chmod(0o600)
    return path


@pytest.fixture
def store(tmp_path):
    store = FolderStore(tmp_path / "store")
    for key in KEYS.values():
        store.put(key, DATA)
    store.put("outside", b"x")
    return store


@pytest.fixture
async def url(store, tokens, signing_keys):
    access = AccessSettings(FULL, tokens["path"], signing_keys, METRICS)
    async with serve(store, access=access) as url:
        yield url


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


def plain(headers):
    return {
        name: value for name, value in headers.items() if name.lower() not in ("date", "x-request-id", "connection")
    }


async def test_a_tenant_reads_and_writes_its_own(url, client, tokens, store):
    for name in NAMES:
        async with client.get(f"{url}/{KEYS[name]}", headers=bearer(tokens[name])) as response:
            assert (response.status, await response.read()) == (200, DATA)
            assert response.headers["Cache-Control"] == "private, max-age=31536000, immutable"
    assert await answered(client.delete(f"{url}/{KEYS['anna']}", headers=bearer(tokens["anna"]))) == 204
    assert await answered(client.put(f"{url}/{KEYS['anna']}", headers=bearer(tokens["anna"]), data=DATA)) == 201
    assert store.get(KEYS["anna"]) == DATA


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
async def test_what_is_anothers_is_answered_like_what_is_absent(url, client, tokens, store, method):
    own_but_absent = KEYS["anna"].replace(DIGEST, "0" * 64)
    headers = bearer(tokens["anna"])
    async with client.get(f"{url}/{own_but_absent}", headers=headers) as response:
        absent = (response.status, plain(response.headers), (await response.json())["error"])
    for key in (KEYS["berta"], KEYS["berta"].replace(DIGEST, "0" * 64), "outside", "v1", f"v1/{tenant_hash('berta')}"):
        async with client.request(method, f"{url}/{key}", headers=headers, data=DATA) as response:
            error = (await response.json())["error"] if method != "HEAD" else absent[2]
            assert (response.status, plain(response.headers), error) == absent
    assert store.get(KEYS["berta"]) == DATA
    assert store.get("outside") == b"x"


async def test_a_listing_shows_a_tenant_its_own(url, client, tokens):
    async def listed(token, **params):
        async with client.get(f"{url}/", params={"list": "", **params}, headers=bearer(token)) as response:
            assert response.status == 200
            return [one["key"] for one in (await response.json())["objects"]]

    mine = f"v1/{tenant_hash('anna')}/"
    for prefix in ("", "v1/", "v", mine, mine[:-5]):
        assert await listed(tokens["anna"], prefix=prefix) == [KEYS["anna"]]
    for prefix in (f"v1/{tenant_hash('berta')}/", "o", "outside", "v2"):
        assert await listed(tokens["anna"], prefix=prefix) == []
    assert await listed(FULL) == sorted([*KEYS.values(), "outside"])


async def test_rights_end_where_they_should(url, client, tokens, store):
    for method in ("PUT", "DELETE"):
        assert await answered(client.request(method, f"{url}/{KEYS['anna']}", headers=bearer(tokens["reader"]))) == 403
    for token in (tokens["expired"], "unknown", "", tokens["anna"][:-1], tokens["anna"] + "x"):
        for key in (KEYS["anna"], "absent", "?list"):
            async with client.get(f"{url}/{key}", headers=bearer(token)) as response:
                assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert store.get(KEYS["anna"]) == DATA


async def test_metrics_need_their_token_or_the_full_one(url, client, tokens, store):
    for token, status in ((METRICS, 200), (FULL, 200), (tokens["anna"], 401), ("", 401)):
        async with client.get(f"{url}/metrics", headers=bearer(token)) as response:
            assert response.status == status
            page = await response.text()
    assert await answered(client.get(f"{url}/{KEYS['anna']}", headers=bearer(METRICS))) == 401
    assert not any(tenant_hash(name) in page for name in NAMES)
    async with serve(store, access=AccessSettings(metrics_token=METRICS)) as open_url:
        assert await answered(client.get(f"{open_url}/metrics")) == 401
        assert await answered(client.get(f"{open_url}/outside")) == 200


@pytest.fixture
def _looks_often(monkeypatch):
    monkeypatch.setattr(application, "_REFRESH_S", 0.05)


@pytest.mark.usefixtures("_looks_often")
async def test_the_tenants_file_is_read_again(url, client, tokens, caplog):
    async def status(token):
        async with client.get(f"{url}/{KEYS['anna']}", headers=bearer(token)) as response:
            return response.status

    assert await status(tokens["anna"]) == 200
    token, digest = new_token()
    path = tokens["path"]
    replacement = path.with_suffix(".new")
    replacement.write_text(json.dumps([{"tenant": "anna", "token_sha256": digest}]))
    replacement.replace(path)

    async def known():
        return await status(token) == 200

    await until(known)
    assert await status(tokens["anna"]) == 401
    path.write_text("[{]")

    await until(lambda: "stays in force" in caplog.text)
    assert await status(token) == 200
    path.unlink()
    await until(lambda: caplog.text.count("stays in force") >= 2)
    assert await status(token) == 200


def test_reload_does_it_at_once(tokens, store):
    server = ObjectServer(store, access=AccessSettings(tenants=tokens["path"]))
    find = server.access.rights
    header = {"Authorization": f"Bearer {tokens['anna']}"}
    assert find("GET", "/x", "", header, "a").write
    about = tokens["path"].stat()
    tokens["path"].write_text(tokens["path"].read_text().replace('"write": true', '"write":false'))
    os.utime(tokens["path"], ns=(about.st_atime_ns, about.st_mtime_ns))  # not even the time tells
    server.reload()
    assert not find("GET", "/x", "", header, "a").write


def test_what_is_written_while_a_broken_version_is_read_is_seen(tmp_path, caplog):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def parse(data):
        if data == b"half":
            path.write_bytes(b"half and the rest")  # its writer ends just after it was read
            raise ArgumentError("not valid JSON")
        return data

    watched = WatchedFile(path, parse)
    path.write_bytes(b"half")
    watched.refresh()
    assert watched.value == b"old"
    watched.refresh()
    assert watched.value == b"half and the rest"
    assert caplog.text.count("stays in force") == 1


def test_signing_keys_that_others_can_read_are_refused(signing_keys, caplog):
    access = AccessSettings(signing_keys=signing_keys)
    server = ObjectServer(MemoryStore(), access=access)
    for mode in (0o640, 0o604, 0o602):
        signing_keys.chmod(mode)
        with pytest.raises(AuthError, match="chmod 600") as caught:
            ObjectServer(MemoryStore(), access=access)
        assert base64.b64encode(SECRET).decode() not in str(caught.value)
        with pytest.raises(AuthError):
            SigningKeys.read(signing_keys)
    server.reload()
    assert "chmod 600" in caplog.text
    signing_keys.chmod(0o400)
    assert SigningKeys.read(signing_keys).secret("k1") == SECRET


@pytest.mark.parametrize("token", ["abc ", " abc", "a b", "a\n", "a\tb", "é"])
def test_tokens_that_cannot_be_sent_are_refused(token):
    for access in (AccessSettings(token=token), AccessSettings(metrics_token=token)):
        with pytest.raises(ArgumentError, match="visible ASCII") as caught:
            ObjectServer(MemoryStore(), access=access)
        assert "abc" not in str(caught.value)


FIELDS = ("tenant", "namespace", "token_sha256", "write", "expires", "secret")
BAD_TENANTS = [
    *("", "{}", "[", "[1]", "[[]]", '[{"tenant": "a"}]', "\xff", "[" * 100_000),
    '[{"tenant": "a", "namespace": "' + "a" * 32 + '", "token_sha256": "' + "0" * 64 + '"}]',
    '[{"namespace": "short", "token_sha256": "' + "0" * 64 + '"}]',
    '[{"tenant": 5, "token_sha256": "' + "0" * 64 + '"}]',
    '[{"tenant": "", "token_sha256": "' + "0" * 64 + '"}]',
    '[{"tenant": "a", "token_sha256": "' + "G" * 64 + '"}]',
    '[{"tenant": "a", "token_sha256": "' + "0" * 64 + '", "write": 1}]',
    '[{"tenant": "a", "token_sha256": "' + "0" * 64 + '", "expires": true}]',
    '[{"tenant": "a", "token_sha256": "' + "0" * 64 + '", "expires": NaN}]',
    '[{"tenant": "a", "token_sha256": "' + "0" * 64 + '", "expires": 1' + "0" * 400 + "}]",
    '[{"tenant": "a", "token_sha256": "' + "0" * 64 + '", "expire": 1}]',
    '[{"tenant": "a", "tenant": "b", "token_sha256": "' + "0" * 64 + '"}]',
    json.dumps([{"tenant": name, "token_sha256": "0" * 64} for name in "ab"]),
]


@pytest.mark.parametrize("text", BAD_TENANTS)
def test_a_broken_tenants_file_is_refused(text, tmp_path):
    path = tmp_path / "tenants.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ArgumentError, match=r"tenants\.json") as caught:
        ObjectServer(MemoryStore(), access=AccessSettings(tenants=path))
    assert "0" * 64 not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    for field in ("tenants", "signing_keys"):
        with pytest.raises(StorageError, match="cannot be read"):
            ObjectServer(MemoryStore(), access=AccessSettings(**{field: tmp_path / "absent"}))


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just("0" * 64)
    | st.just("0" * 32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), inner),
    max_leaves=8,
)


@given(st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode()))
def test_whatever_a_file_holds_it_is_parsed_or_refused(data):
    for parse in (TenantTokens.parse, SigningKeys.parse):
        with contextlib.suppress(ArgumentError):
            parse(data)


@given(st.text(max_size=40))
def test_no_text_is_a_token_by_chance(text):
    token, digest = new_token()
    tenants = TenantTokens.parse(json.dumps([{"tenant": "a", "token_sha256": digest}]).encode())
    assert tenants.find(token.encode(), 0.0)
    assert tenants.find(text.encode(errors="replace"), 0.0) is None


def signed(url, key, **changes):
    options = {"secret": SECRET, "key_id": "k1", "expires_at": time.time() + 60} | changes
    return sign_url(url, key, **options)


async def test_a_signed_url_opens_one_object(url, client, store):
    address = signed(url, KEYS["anna"])
    for method in ("GET", "HEAD"):
        assert await answered(client.request(method, address)) == 200
    async with client.get(address, headers={"Range": "bytes=5-9"}) as response:
        assert (response.status, await response.read()) == (206, DATA[5:10])
    for method in ("PUT", "DELETE"):
        assert await answered(client.request(method, address, data=DATA)) == 401
    query = address.partition("?")[2]
    for path in (KEYS["berta"], "outside", "", "metrics", KEYS["anna"] + "x"):
        for more in ("", "&list"):
            assert await answered(client.get(f"{url}/{path}?{query}{more}")) == 401
    assert store.get(KEYS["anna"]) == DATA


async def test_a_browsers_password_neither_hinders_nor_helps_a_signed_url(url, client, tokens):
    """Whoever looked at the status page sends one along with whatever follows."""
    address, query = signed(url, KEYS["anna"]), signed(url, KEYS["anna"]).partition("?")[2]
    for password in (METRICS, FULL, tokens["berta"], "wrong"):
        for word in ("Basic", "basic"):
            headers = {"Authorization": f"{word} " + base64.b64encode(f"anyone:{password}".encode()).decode()}
            async with client.get(address, headers=headers) as response:
                assert (response.status, await response.read()) == (200, DATA)
            assert await answered(client.delete(address, headers=headers)) == 401
            for other in (f"{url}/{KEYS['berta']}?{query}", f"{url}/{KEYS['anna']}", f"{url}/outside", address + "x"):
                assert await answered(client.get(other, headers=headers)) == 401
    for headers in (bearer("wrong"), {"Authorization": "Digest x"}, {"Authorization": ""}):
        assert await answered(client.get(address, headers=headers)) == 401


async def test_signed_writes(url, client, store):
    assert await answered(client.delete(signed(url, KEYS["anna"], method="DELETE"))) == 204
    assert await answered(client.put(signed(url, KEYS["anna"], method="PUT"), data=DATA)) == 201
    assert store.get(KEYS["anna"]) == DATA


async def test_a_signing_key_stays_in_its_namespace(url, client):
    assert await answered(client.get(signed(url, KEYS["anna"], key_id="anna"))) == 200
    for key in (KEYS["berta"], "outside"):
        async with client.get(signed(url, key, key_id="anna")) as response:
            assert (response.status, (await response.json())["error"]) == (404, "no such object")


@pytest.mark.parametrize(
    "change",
    [
        *(lambda url: url.replace("kid=k1", "kid=anna"), lambda url: url.replace("kid=k1", "kid=unknown")),
        *(lambda url: url.replace("kid=k1", "kid="), lambda url: url.replace("exp=", "exp=1")),
        *(lambda url: url.replace("exp=", "exp=x"), lambda url: url[:-1] + ("A" if url[-1] != "A" else "Q")),
        *(lambda url: url.partition("&sig")[0], lambda url: url + "&sig=x", lambda url: url + "&exp=99999999999"),
        *(lambda url: url.partition("?")[0] + "?sig=&kid=&exp=", lambda url: url.partition("?")[0] + "?sig"),
        lambda url: url + "&a=1" * 50,
    ],
)
async def test_a_changed_url_opens_nothing(url, client, change):
    async with client.get(change(signed(url, KEYS["anna"]))) as response:
        assert response.status == 401
        assert "expired" not in (await response.json())["error"]


async def test_an_expired_url_says_so(url, client):
    async with client.get(signed(url, KEYS["anna"], expires_at=time.time() - 1)) as response:
        assert response.status == 401
        assert "expired" in (await response.json())["error"]


def test_what_cannot_be_signed():
    for changes in ({"secret": b"short"}, {"key_id": "a b"}, {"key_id": ""}, {"method": "POST"}, {"expires_at": 1e13}):
        with pytest.raises(ArgumentError) as caught:
            signed("https://h", "k", **changes)
        assert "short" not in str(caught.value)
    for base, key in (("h:80", "k"), ("ftp://h", "k"), ("http://h?x", "k"), ("http://h", "../k")):
        with pytest.raises(ArgumentError):
            signed(base, key)
    assert signed("https://h/prefix/", "a/k").startswith("https://h/prefix/a/k?kid=k1&exp=")


def test_signing_keys_are_parsed_strictly():
    good = base64.b64encode(SECRET).decode()
    keys = SigningKeys.parse(json.dumps({"k": {"secret": good}}).encode())
    assert keys.secret("k") == SECRET
    with pytest.raises(NotFoundError):
        keys.secret("other")
    bad = [[], {"k": good}, {"k": {}}, {"k": {"secret": 5}}, {"k": {"secret": good[:20]}}, {"k": {"secret": "é" * 50}}]
    bad += [{"a b": {"secret": good}}, {"k": {"secret": good, "namespace": "x"}}, {"k": {"secret": good, "more": 1}}]
    for fields in bad:
        with pytest.raises(ArgumentError) as caught:
            SigningKeys.parse(json.dumps(fields).encode())
        assert good not in str(caught.value)


async def test_secrets_are_in_no_log_and_no_answer(url, client, tokens, store, caplog):
    caplog.set_level(logging.DEBUG)
    address = signed(url, KEYS["anna"])
    secrets = [tokens["anna"], FULL, METRICS, "wrong-token", address.partition("sig=")[2], "sig=", "exp="]
    seen = []
    for token in (tokens["anna"], FULL, METRICS, "wrong-token"):
        for path in (KEYS["anna"], KEYS["berta"], "metrics", "../x", "?list&prefix=v1"):
            async with client.get(f"{url}/{path}", headers=bearer(token)) as response:
                seen += [await response.text("latin-1"), str(response.headers)]
    for target in (address, address + "x", address.replace("exp=", "exp=x")):
        async with client.get(target) as response:
            seen += [await response.text("latin-1"), str(response.headers)]
    host, port = url.removeprefix("http://").split(":")
    for bad in ("GET /k HTTP/9.x", "GET  / HTTP/1.1", "G\x01T / HTTP/1.1", f"GET /{KEYS['anna']}?{address} HTTP/1.1"):
        reader, writer = await asyncio.open_connection(host, port)
        lines = (bad, "Host: x", f"Authorization: Bearer {FULL}\x01", "Content-Length: x", "", "")
        writer.write("\r\n".join(lines).encode())
        answer = await reader.read()
        assert answer.split(b" ")[1] == b"400"
        seen.append(answer.decode("latin-1"))
        writer.close()
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"GET http://user:wrong-token@h/{KEYS['anna']}?sig=x HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert b" 401 " in await reader.readuntil(b"\r\n")
    writer.close()
    lines = [JsonLines().format(record) + TextLines().format(record) for record in caplog.records]
    assert any(KEYS["anna"] in line for line in lines)
    assert any('"status": 200' in line for line in lines)
    for text in (*lines, *seen, caplog.text):
        assert not [secret for secret in secrets if secret in text]
        assert "Traceback" not in text


async def test_a_line_for_each_request(url, client, caplog):
    caplog.set_level(logging.INFO)
    headers = bearer(FULL) | {"X-Request-Id": "r1", "Range": "bytes=1-5"}
    assert await answered(client.get(f"{url}/outside%0a?x=secret", headers=headers)) == 400
    async with client.get(f"{url}/{KEYS['anna']}", headers=headers) as response:
        await response.read()
    records = [record for record in caplog.records if hasattr(record, "request")]
    fields = [json.loads(JsonLines().format(record)) for record in records]
    assert [one["status"] for one in fields] == [400, 206]
    assert fields[1] | {"seconds": 0, "time": 0} == {
        "time": 0,
        "level": "info",
        "logger": "kvwire.access",
        "request_id": "r1",
        "method": "GET",
        "path": f"/{KEYS['anna']}",
        "status": 206,
        "bytes": 5,
        "received": 0,
        "seconds": 0,
        "client": "127.0.0.1",
        "range": "bytes=1-5",
    }
    assert "secret" not in str(fields)
    assert all("\n" not in TextLines().format(record) for record in caplog.records)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "localhost.evil.example", "192.0.2.1", "x@[::1]", ""]
)
async def test_an_open_server_answers_only_to_names_of_this_machine(store, client, host):
    """A page in a browser may let its own name lead to 127.0.0.1, and would then read all answers."""
    async with serve(store) as url:
        for path in (KEYS["anna"], "?list", "absent", "metrics"):
            async with client.get(f"{url}/{path}", headers={"Host": host}) as response:
                assert response.status == 403
                assert DIGEST not in await response.text()
        for own in ("localhost", "LOCALHOST:1", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8473"):
            assert await answered(client.get(f"{url}/{KEYS['anna']}", headers={"Host": own})) == 200
    headers = bearer(FULL) | {"Host": host}
    async with serve(store, token=FULL) as url, client.get(f"{url}/outside", headers=headers) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({}, {"Origin": "http://evil"}),
        ({"token": FULL, "settings": ServerSettings(read_only=True)}, {"Authorization": f"Bearer {FULL}"}),
    ],
    ids=["a page in a browser", "read-only"],
)
async def test_neither_a_page_in_a_browser_nor_anybody_where_it_is_read_only_can_write(store, client, options, headers):
    async with serve(store, **options) as url:
        for method in ("PUT", "DELETE"):
            assert await answered(client.request(method, f"{url}/{KEYS['anna']}", headers=headers, data=DATA)) == 403
    assert store.get(KEYS["anna"]) == DATA


async def test_a_public_address_needs_objects_to_be_guarded(tokens, signing_keys, caplog):
    with pytest.raises(AuthError):
        async with serve(MemoryStore(), "0.0.0.0", access=AccessSettings(metrics_token=METRICS)):
            pass
    with pytest.raises(AuthError, match="16 characters"):
        async with serve(MemoryStore(), "0.0.0.0", token="s" * 15):
            pass
    full = AccessSettings(token="s" * 16)
    for access in (full, AccessSettings(tenants=tokens["path"]), AccessSettings(signing_keys=signing_keys)):
        caplog.clear()
        with pytest.raises(StorageError, match="cannot listen"):  # the address is nobody's: access was no obstacle
            async with serve(MemoryStore(), "192.0.2.1", access=access):
                pass
        assert "without TLS" in caplog.text
