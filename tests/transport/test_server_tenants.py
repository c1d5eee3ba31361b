"""One tenant learns nothing of another's content from a salted server: not by status, headers or listings.

``benchmarks/timing_channels.py`` measures what time tells.
"""

import contextlib
import hashlib
import http.client
import json
import random

import pytest

from kvwire.codec import pack_text
from kvwire.errors import NotFoundError
from kvwire.store import Catalog, FolderStore, MemoryStore, tenant_hash
from kvwire.transport import AccessSettings, HttpStore, new_token
from kvwire.transport.testing import serving
from kvwire.types import digest_tokens

SALT = b"pepper"
CONFIG = "c0" * 32
VARYING = ("Date", "X-Request-Id", "ETag", "Connection")  # the last: whether a refused body had come by then


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    with contextlib.closing(MemoryStore() if request.param == "memory" else FolderStore(tmp_path / "store")) as store:
        yield store


class Tenant:
    """A client with one tenant's token, and the same tenant's keys."""

    def __init__(self, name, token, url):
        self.name, self.token, self.url = name, token, url
        self.root = f"v1/{tenant_hash(name, SALT)}/{CONFIG[:16]}"
        self._link = http.client.HTTPConnection(url.rpartition("/")[2], timeout=20)

    def blob(self, data):
        digest = hashlib.sha256(data).hexdigest()
        return f"{self.root}/{digest[:2]}/{digest}.kvw"

    def ask(self, method, path, body=None, **headers):
        """Status, what is told in headers and body, without what differs by content or by request."""
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        self._link.request(method, f"/{path}", body, {"Authorization": f"Bearer {self.token}"} | given)
        with self._link.getresponse() as answer:
            told = {name: value for name, value in answer.getheaders() if name not in VARYING}
            text = answer.read()
        if text.startswith(b"{"):
            text = {name: value for name, value in json.loads(text).items() if name != "request_id"}
        return answer.status, told, text

    def close(self):
        self._link.close()


@pytest.fixture
def tenants(store, tmp_path):
    """Anna and Berta on one server, whose file holds the namespaces that a salt makes, and no salt."""
    made = {name: new_token() for name in ("anna", "berta")}
    lines = [
        {"namespace": tenant_hash(name, SALT), "token_sha256": digest, "write": True}
        for name, (_, digest) in made.items()
    ]
    (tmp_path / "tenants.json").write_text(json.dumps(lines))
    with serving(store, access=AccessSettings(tenants=tmp_path / "tenants.json")) as url:
        both = [Tenant(name, token, url) for name, (token, _) in made.items()]
        yield both
        for tenant in both:
            tenant.close()


def blobs(count, seed):
    draw = random.Random(seed)
    return [draw.randbytes(3000) for _ in range(count)]


@pytest.mark.parametrize("headers", [{}, {"If_None_Match": "*"}, {"Expect": "100-continue"}])
def test_an_upload_of_what_another_has_is_answered_like_any_other(tenants, headers):
    anna, berta = tenants
    (theirs, new) = blobs(2, seed=1)
    assert berta.ask("PUT", berta.blob(theirs), theirs)[0] == 201
    answers = [anna.ask("PUT", anna.blob(data), data, **headers) for data in (theirs, new)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 201
    answers = [anna.ask("GET", anna.blob(data))[:1] for data in (theirs, new)]
    assert answers[0] == answers[1] == (200,)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=0-0"}, {"If_None_Match": "*"}, {"If_Match": '"x"'}])
def test_keys_of_another_are_answered_alike_whether_they_exist_or_not(tenants, store, method, headers):
    anna, berta = tenants
    (theirs, absent) = blobs(2, seed=2)
    ids = (1, 2, 3)
    text = f"{berta.root}/texts/{digest_tokens(ids)[:2]}/{digest_tokens(ids)}.kvt"
    berta.ask("PUT", berta.blob(theirs), theirs)
    assert berta.ask("PUT", text, pack_text(ids))[0] == 201
    keys = (berta.blob(theirs), berta.blob(absent), text, text.replace("texts/", "text5/"), berta.root)
    answers = [anna.ask(method, key, theirs if method == "PUT" else None, **headers) for key in keys]
    assert answers == [answers[0]] * len(keys)
    assert answers[0][0] == 404
    assert store.get(berta.blob(theirs)) == theirs


def test_listings_show_nothing_of_another(tenants):
    anna, berta = tenants
    (mine, theirs) = blobs(2, seed=3)
    anna.ask("PUT", anna.blob(mine), mine)
    prefixes = ("", "v1/", berta.root, f"{berta.root}/")
    lists = [f"?list&prefix={prefix}&after={after}&limit={limit}" for prefix in prefixes
             for after in ("", berta.root, f"{berta.root}/zz") for limit in (1, 1000)]  # fmt: skip
    before = [anna.ask("GET", path) for path in lists]
    berta.ask("PUT", berta.blob(theirs), theirs)
    after = [anna.ask("GET", path) for path in lists]
    assert before == after
    assert tenant_hash("berta", SALT) not in str(after)


def test_a_catalog_of_one_tenant_writes_what_another_has(tenants):
    """Through the client: nothing is skipped because somebody else has it, and nothing of theirs is found."""
    anna, berta = tenants
    (data,) = blobs(1, seed=4)
    catalogs = []
    with contextlib.ExitStack() as stack:
        for tenant in (berta, anna):
            store = stack.enter_context(contextlib.closing(HttpStore(tenant.url, token=tenant.token)))
            catalogs.append(Catalog(store, tenant.name, SALT))
            catalogs[-1].put_blob(CONFIG, data, document_id="d", header_bytes=9, tokens=3)
            assert catalogs[-1].by_document(CONFIG, "d") is not None
            with pytest.raises(NotFoundError):
                store.get(Catalog(store, "another", SALT).keys(CONFIG).document("d"))
