"""What S3 refuses: absent or forbidden, as far as S3 lets one tell, and the permission that is missing is named."""

import logging
from contextlib import closing

import pytest

from kvwire.errors import AuthError, NotFoundError, StorageError
from kvwire.store import Catalog, S3Settings, S3Store, collect, open_object
from kvwire.store.testing.samples import blob
from kvwire.transport import HttpStore, open_session, open_source, read_object
from kvwire.transport.testing import serving

from ..posing_s3 import EVERYTHING, posing_s3, use_keys
from ..s3_servers import fails

CONFIG = "c" * 64


@pytest.fixture
def pose(monkeypatch):
    use_keys(monkeypatch)
    with posing_s3() as pose:
        yield pose


@pytest.fixture
def store(pose):
    with closing(S3Store(pose.address("p"))) as store:
        yield store


async def ranged(store, key, start=0, end=None):
    async with open_session() as session:
        source = open_source(store, key, session)
        try:
            return await read_object(source, start=start, end=end)
        finally:
            await source.close()


async def test_what_is_absent_is_absent_without_the_permission_to_list(pose, store, caplog):
    pose.allowed -= {"s3:ListBucket"}
    for read in (store.get, store.stat, lambda key: store.get(key, 3, 9), lambda key: open_object(store, key)):
        error = fails(read, "absent")
        assert isinstance(error, NotFoundError)
        assert "s3:ListBucket is missing" in str(error)
    with pytest.raises(NotFoundError, match="s3:ListBucket"):
        await ranged(store, "absent")
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 1
    assert "s3:GetObject" in told[0]  # nothing was read yet: that may be missing, too
    store.put("k", b"0123456789")
    assert store.get("k", 2, 5) == b"234"
    assert await ranged(store, "k", 2, 5) == b"234"
    assert "s3:GetObject" not in str(fails(store.get, "absent"))


def test_everything_that_is_written_can_be_without_the_permission_to_list(pose, store):
    pose.allowed -= {"s3:ListBucket"}
    catalog = Catalog(store)
    assert catalog.by_document(CONFIG, "d") is None
    digest = catalog.profiles.put(CONFIG, b"profile")
    catalog.profiles.set_current(CONFIG, digest)
    entry = catalog.put_blob(CONFIG, b"blob", document_id="d", header_bytes=1, tokens=1, token_digest="1" * 64)
    catalog.texts.put(CONFIG, [1, 2], document_id="d")
    assert catalog.by_document(CONFIG, "d") == entry
    assert catalog.profiles.current(CONFIG) == digest
    assert catalog.models.link_report(CONFIG) is None
    assert catalog.models.get(CONFIG) is None
    assert catalog.kept.find(CONFIG, ["1" * 64]) is None
    assert store.replace("v", b"1", "")
    assert not store.replace("v", b"2", "")
    assert store.replace("v", b"2", store.stat("v").etag)


@pytest.mark.parametrize(
    ("missing", "call"),
    [
        ("s3:ListBucket", lambda store: list(store.keys(""))),
        ("s3:ListBucket", collect),
        ("s3:GetObject", lambda store: store.get("there")),
        ("s3:GetObject", lambda store: store.stat("there")),
        ("s3:GetObject", lambda store: store.get("there", 1, 2)),
        ("s3:PutObject", lambda store: store.put("k", b"x")),
        ("s3:PutObject", lambda store: store.create(*blob(1))),
        ("s3:PutObject", lambda store: store.replace("k", b"x", "")),
        ("s3:PutObject", lambda store: store.put(*blob(1, 6 << 20))),
        ("s3:DeleteObject", lambda store: store.delete("there")),
        ("s3:DeleteObject", lambda store: store.delete_many(["there"])),
    ],
)
def test_the_missing_permission_is_named(pose, missing, call):
    pose.objects["p/there"] = b"0123"
    pose.allowed -= {missing}
    settings = S3Settings(multipart_bytes=5 << 20)
    with closing(S3Store(pose.address("p"), settings=settings)) as store, pytest.raises(AuthError) as caught:
        call(store)
    assert missing in str(caught.value)
    assert "hush" not in str(caught.value)


async def test_what_may_not_be_read_but_is_listed_is_no_absence(pose, store):
    pose.objects["p/there"] = b"0123"
    pose.allowed -= {"s3:GetObject"}
    with pytest.raises(AuthError, match="s3:GetObject"):
        await ranged(store, "there")
    assert isinstance(fails(store.get, "absent"), NotFoundError)


@pytest.mark.parametrize("code", ["InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"])
@pytest.mark.parametrize("missing", [set(), {"s3:ListBucket"}])
async def test_wrong_keys_are_wrong_keys(pose, store, code, missing):
    pose.allowed -= missing
    pose.keys = dict.fromkeys(pose.keys, code)
    for call in (store.get, store.stat, lambda key: store.put(key, b"x"), store.delete, lambda _: list(store.keys(""))):
        assert isinstance(fails(call, "k"), AuthError)
    with pytest.raises(AuthError, match=code):
        await ranged(store, "k")


async def test_a_public_bucket_needs_no_credentials(monkeypatch):
    use_keys(monkeypatch, None)
    with posing_s3(is_public=True, allowed=EVERYTHING - {"s3:ListBucket"}) as pose:
        pose.objects["k"] = b"0123"
        with closing(S3Store(pose.address())) as store:
            assert store.get("k") == b"0123"
            assert await ranged(store, "k", 1, 3) == b"12"
            assert isinstance(fails(store.get, "absent"), NotFoundError)
            for call in (lambda: store.put("k", b"x"), lambda: list(store.keys(""))):
                error = fails(call)
                assert isinstance(error, AuthError)
                assert "AWS_ACCESS_KEY_ID" in str(error)


async def test_without_credentials_another_bucket_says_what_to_set(monkeypatch):
    use_keys(monkeypatch, None)
    with posing_s3() as pose, closing(S3Store(pose.address())) as store:
        assert "AWS_ACCESS_KEY_ID" in str(fails(store.get, "k"))
        with pytest.raises(AuthError, match="AWS_ACCESS_KEY_ID"):
            await ranged(store, "k")


async def test_deleted_while_being_read_is_replaced_and_not_forbidden(pose, store):
    pose.allowed -= {"s3:ListBucket"}
    store.put("k", b"0123456789")
    async with open_session() as session:
        source = open_source(store, "k", session)
        await source.read(0, 5, lambda _: None)
        del pose.objects["p/k"]
        with pytest.raises(StorageError, match="replaced"):
            await source.read(5, 9, lambda _: None)


async def test_a_server_in_front_says_404(pose, store):
    pose.allowed -= {"s3:ListBucket"}
    store.put("k", b"0123")
    with serving(store) as url, closing(HttpStore(url)) as behind:
        assert behind.get("k") == b"0123"
        for read in (behind.get, behind.stat):
            assert isinstance(fails(read, "absent"), NotFoundError)
        with pytest.raises(NotFoundError):
            await ranged(behind, "absent")


def test_a_server_that_the_bucket_refuses_does_not_put_its_clients_off(pose, store, caplog):
    pose.keys = dict.fromkeys(pose.keys, "ExpiredToken")
    with serving(store) as url, closing(HttpStore(url)) as behind:
        for call in (behind.get, behind.stat):
            error = fails(call, "k")
            assert isinstance(error, StorageError)
            assert "later" not in str(error)
        assert "the store refuses this server" in str(fails(behind.get, "k"))
    assert "ExpiredToken" in caplog.text


@pytest.mark.parametrize("lists_by_name", [True, False])
def test_what_a_collector_finds_and_may_not_read_is_no_absence(pose, store, catalog, lists_by_name):
    entry = catalog.put_blob(CONFIG, b"blob", document_id="d", header_bytes=1, tokens=1)
    at = catalog.keys(CONFIG).document("d")
    pose.denied = {f"p/{at}"}
    if not lists_by_name:  # a policy with a condition on s3:prefix
        pose.listable = {f"p/{catalog.keys(CONFIG).documents}"}
        assert isinstance(fails(store.get, at), NotFoundError)  # nothing tells
    assert list(store.keys(catalog.keys(CONFIG).documents)) == [at]
    for read in (store.get, store.stat):
        assert "s3:GetObject" in str(fails(read, at))
    pose.listable = None
    collect(store, grace_s=0, allow_empty_catalog=True)
    assert f"p/{entry.blob_key}" in pose.objects
