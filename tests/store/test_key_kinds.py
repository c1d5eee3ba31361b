"""A kind of object is one row of a table: server, collector, verifier, copier and tiers follow it."""

import json
import re
import urllib.error
import urllib.request
from contextlib import closing
from hashlib import sha256

import numpy as np
import pytest

from kvwire.codec import pack_text
from kvwire.codec.format.arrays import pack_arrays
from kvwire.errors import ArgumentError, AuthError, CorruptError, NotFoundError
from kvwire.store import (
    Catalog,
    FolderStore,
    Keyring,
    MemoryStore,
    collect,
    content_digest,
    copy_store,
    kind_of,
    open_tiers,
    verify_store,
)
from kvwire.store import key_kinds as table
from kvwire.store.cache.pending import upload_entry
from kvwire.store.records import parse_object
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving
from kvwire.types import SHIFT_MAGIC, digest_tokens

from .conftest import CONFIG, DAY, AgedStore

INDEX = b"index of similar prompts"


def names(key, data):
    found = parse_object(data).get("index")
    if not isinstance(found, str):
        raise CorruptError("it names no index")
    return [table.ObjectRef(key.partition("catalog/")[0] + f"similar/{found}.kvi", "index")]


def checked(reader, digest):
    if sha256(reader.read(0, reader.size)).hexdigest() != digest:
        raise CorruptError("the index is damaged")
    return True


ROWS = (
    table.KeyKind(
        "index",
        re.compile(r"(?:.*/)?(?P<digest>[0-9a-f]{64})\.kvi"),
        digest="sha256",
        prefix=lambda space: f"{space.root}similar/",
        place=lambda space, digest: f"{space.root}similar/{digest}.kvi",
        gc_role="content",
        max_bytes=None,
        verify=checked,
        advice="index again",
    ),
    table.KeyKind(
        "index pointer",
        re.compile(table._CATALOG + r"similar\.json"),
        digest="",
        prefix=lambda space: f"{space.catalog}similar.json",
        place=None,
        gc_role="root",
        accept=lambda key, data: names(key, bytes(data)),
        names=names,
        advice="index again",
    ),
)


@pytest.fixture
def rows(monkeypatch):
    monkeypatch.setattr(table, "KINDS", (*table.KINDS, *ROWS))


def keys(data=INDEX):
    space = Catalog(MemoryStore()).keys(CONFIG)
    return f"{space.root}similar/{sha256(data).hexdigest()}.kvi", f"{space.catalog}similar.json"


def pointer(data=INDEX):
    return json.dumps({"index": sha256(data).hexdigest()}).encode()


def filled(store):
    content, entry = keys()
    store.put(content, INDEX)
    store.put(entry, pointer())
    return store


def test_every_built_in_kind_lies_where_its_row_says():
    space = Catalog(MemoryStore()).keys(CONFIG)
    digest = "ab" * 32
    made = {
        "blob": space.blob(digest), "profile": space.profile(digest), "text": space.text(digest),
            "part's text": space.part_text(digest),
        "kept rows": space.kept_rows(digest), "link shift": space.shift(digest),
        "document entry": space.document("doc"), "token entry": space.token_entry(digest),
        "prefix entry": space.prefix_entry(digest), "last use": space.last_use("doc"),
        "donor entry": space.donor_entry(digest, digest),
        "current profile": space.current_profile, "link report": space.link_report,
        "edit report": space.edit_report,
        "kept repair": space.kept_repair(digest), "model record": space.model_record,
        "announcement": space.announcement("0" * 32),
    }  # fmt: skip
    assert list(made) == [kind.name for kind in table.KINDS]
    for name, key in made.items():
        kind = kind_of(key)
        assert kind.name == name
        assert key.startswith(kind.prefix(space))
        assert kind.is_catalog == key.startswith(space.catalog)
        assert kind.place is None or kind.place(space, table.key_digest(key)) == key


DIGEST = sha256(b"x").hexdigest()
MISPLACED = (
    f"zz/{DIGEST}.kvw", f"{DIGEST}.kvw", f"{DIGEST[:2]}/ab/{DIGEST}.kvw", f"texts/{DIGEST}.kvp",
    f"texts/00/{DIGEST}.kvt", f"profiles/{DIGEST[:2]}/{DIGEST}.kvp",
    f"shifts/{DIGEST}.kvs",
)  # fmt: skip


@pytest.fixture(params=["folder", "write-back", "server"])
def taking(request, tmp_path):
    """A store, and what lies behind it."""
    with closing(FolderStore(tmp_path / "s")) as behind:
        if request.param == "folder":
            yield behind, behind
        elif request.param == "write-back":
            options = {"memory_bytes": 0, "folder": tmp_path / "tiers", "folder_bytes": 1 << 20, "write_back": True}
            with closing(open_tiers(behind, **options)) as tiers:
                yield tiers, behind
        else:
            with serving(behind) as url, closing(HttpStore(url)) as client:
                yield client, behind


@pytest.mark.parametrize("place", MISPLACED)
def test_what_would_lie_where_nothing_leads_to_it_is_not_taken(taking, place):
    store, behind = taking
    key = Catalog(store).keys(CONFIG).root + place
    assert table.is_misplaced(key)
    for write in (store.put, store.create):
        with pytest.raises(ArgumentError, match="not where an object of its kind and digest lies"):
            write(key, b"x")
    with pytest.raises(ArgumentError):
        store.put_many([(key, b"x")])
    assert list(behind.keys("")) == []


def test_keys_of_no_configuration_are_nobodys_business():
    for key in (f"{DIGEST}.kvw", f"v1/t/{DIGEST}.kvw", f"v1/{'ab' * 16}/other/zz/{DIGEST}.kvw", "v1/notes"):
        assert table.check_place(key) == key


@pytest.mark.parametrize("place", MISPLACED)
def test_a_server_refuses_what_would_be_misplaced_before_it_is_sent(tmp_path, place):
    with closing(FolderStore(tmp_path)) as behind, serving(behind) as url:
        address = f"{url}/{Catalog(behind).keys(CONFIG).root}{place}"
        request = urllib.request.Request(address, data=b"x", method="PUT")
        with pytest.raises(urllib.error.HTTPError) as raised, urllib.request.urlopen(request):
            pass
        assert raised.value.code == 403
        raised.value.close()
        assert not list(behind.keys(""))


def test_verify_names_what_is_misplaced_and_leaves_it():
    store = MemoryStore()
    space = Catalog(store).keys(CONFIG)
    text = pack_text([1, 2, 3])
    store.put(space.text(digest_tokens([1, 2, 3])), text)
    for place in MISPLACED:
        store.put(space.root + place, text)
    found = verify_store(store, [Catalog(store)], delete_damaged=True)
    assert {one.key for one in found.damaged} == {space.root + place for place in MISPLACED}
    assert all("nothing leads to it" in one.problem and not one.deleted for one in found.damaged)
    assert found.objects == 1
    assert len(list(store.keys(""))) == 1 + len(MISPLACED)


def test_a_copy_leaves_out_what_is_misplaced_and_says_so(tmp_path):
    source = MemoryStore()
    space = Catalog(source).keys(CONFIG)
    source.put(space.root + MISPLACED[0], b"x")
    source.put(space.blob(DIGEST), b"x")
    with closing(FolderStore(tmp_path)) as target:
        done = copy_store(source, target)
        assert done.objects == 1
        assert [one.startswith(space.root + MISPLACED[0]) for one in done.failures] == [True]
        assert list(target.keys("")) == [space.blob(DIGEST)]


@pytest.mark.usefixtures("rows")
def test_a_server_takes_and_serves_a_new_kind(tmp_path):
    content, entry = keys()
    with closing(FolderStore(tmp_path)) as behind, serving(behind) as url, closing(HttpStore(url)) as store:
        filled(store)
        assert (store.get(content), store.get(entry)) == (INDEX, pointer())
        assert store.stat(content).etag == content_digest(content)
        with pytest.raises(ArgumentError, match="SHA-256"):
            store.put(content, b"other bytes")
        with pytest.raises(ArgumentError, match="not a index pointer: it names no index"):
            store.put(entry, b"{}")


def test_a_server_refuses_what_no_row_tells_of(tmp_path):
    content, entry = keys()
    with closing(FolderStore(tmp_path)) as behind, serving(behind) as url, closing(HttpStore(url)) as store:
        with pytest.raises(AuthError):
            store.put(content, INDEX)
        with pytest.raises(ArgumentError):
            store.put(entry, pointer())
        assert not list(behind.keys(""))


@pytest.mark.usefixtures("rows")
def test_the_collector_keeps_what_a_new_kind_names_and_takes_the_rest():
    store = filled(AgedStore())
    spare = keys(b"of nobody")[0]
    store.put(spare, b"of nobody")
    store.age(2 * DAY)
    done = collect(store)
    assert (done.others, done.bytes, done.failures) == (1, len(b"of nobody"), ())
    assert sorted(store.keys("")) == sorted(keys())


def test_nothing_is_collected_beside_a_kind_that_is_unknown():
    store = filled(AgedStore())
    blob = Catalog(store).keys(CONFIG).blob(sha256(b"blob").hexdigest())
    store.put(blob, b"blob")  # the unknown entry may name it
    store.age(2 * DAY)
    done = collect(store)
    assert blob in store.keys("")
    assert "does not know" in done.failures[0]
    store.delete(keys()[1])
    assert collect(store, allow_empty_catalog=True).blobs == 1
    assert keys()[0] in store.keys("")  # content of an unknown kind stays too


@pytest.mark.usefixtures("rows")
def test_verify_checks_a_new_kind():
    store = filled(MemoryStore())
    found = verify_store(store, [Catalog(store)])
    assert (found.objects, found.entries, found.damaged) == (1, 1, ())
    store.put(keys()[0], INDEX[::-1])
    assert [one.problem for one in verify_store(store, [Catalog(store)]).damaged] == ["the index is damaged"]
    store.delete(keys()[0])
    store.put(keys(b"x")[0], b"x")
    [damage] = verify_store(store, [Catalog(store)]).damaged
    assert damage.problem == "the index of the index pointer is not there: index again"
    store.put(keys()[1], b"{}")
    [damage] = verify_store(store, [Catalog(store)], delete_damaged=True).damaged
    assert damage.deleted
    assert keys()[1] not in store.keys("")


@pytest.mark.usefixtures("rows")
def test_copy_takes_a_new_kind_and_leaves_out_what_is_damaged():
    source, target = filled(MemoryStore()), MemoryStore()
    done = copy_store(source, target)
    assert (done.objects, done.entries, done.failures) == (1, 1, ())
    assert sorted(target.keys("")) == sorted(keys())
    source.put(keys(b"x")[0], b"y")
    assert copy_store(source, MemoryStore()).failures[0].endswith("it is left out, index again")


@pytest.mark.usefixtures("rows")
def test_write_back_uploads_no_entry_of_a_new_kind_that_leads_nowhere():
    remote = MemoryStore()
    assert not upload_entry(remote, keys()[1], pointer(), lambda _key: True)
    remote.put(keys()[0], INDEX)
    assert upload_entry(remote, keys()[1], pointer(), lambda _key: True)
    assert remote.get(keys()[1]) == pointer()


SHIFT = pack_arrays(SHIFT_MAGIC, {"prompts": 1}, {"key 0000": np.zeros((1, 2, 4), np.float32)})


def shifted(store):
    """A catalog whose report on links names a shift, and one that nothing names."""
    catalog = Catalog(store)
    digest = catalog.models.put_link_shift(CONFIG, SHIFT)
    catalog.models.put_link_report(CONFIG, json.dumps({"version": 2, "shift": digest}).encode())
    spare = catalog.models.put_link_shift(CONFIG, pack_arrays(SHIFT_MAGIC, {}, {}))
    return catalog, catalog.keys(CONFIG), digest, spare


def test_a_link_shift_stays_while_the_report_names_it():
    store = AgedStore()
    catalog, space, digest, spare = shifted(store)
    assert catalog.models.link_shift(CONFIG, digest) == SHIFT
    store.age(2 * DAY)
    assert collect(store).failures == ()
    assert space.shift(digest) in store.keys("")
    with pytest.raises(NotFoundError, match="check-model again"):
        catalog.models.link_shift(CONFIG, spare)
    catalog.models.put_link_report(CONFIG, b'{"version": 2, "shift": ""}')
    store.age(2 * DAY)
    assert collect(store, allow_empty_catalog=True).failures == ()
    assert list(store.keys("")) == [space.link_report]


def test_a_damaged_link_shift_is_found_and_not_read():
    store = MemoryStore()
    catalog, space, digest, _ = shifted(store)
    assert verify_store(store, [catalog]).damaged == ()
    target = MemoryStore()
    assert copy_store(store, target).failures == ()
    assert target.get(space.shift(digest)) == SHIFT
    store.put(space.shift(digest), SHIFT[:-1])
    with pytest.raises(CorruptError, match="check-model again"):
        catalog.models.link_shift(CONFIG, digest)
    [damage] = verify_store(store, [catalog]).damaged
    assert damage.key == space.shift(digest)
    other = b"no shift"
    store.put(space.shift(sha256(other).hexdigest()), other)
    assert len(verify_store(store, [catalog]).damaged) == 2


@pytest.mark.parametrize("report", [b"[]", b'{"shift": "c"}', b'{"shift": 3}', b'{"shift": ["x"]}'])
def test_a_server_takes_no_report_that_names_no_shift(tmp_path, report):
    with closing(FolderStore(tmp_path)) as behind, serving(behind) as url, closing(HttpStore(url)) as store:
        with pytest.raises(ArgumentError, match="link"):
            Catalog(store).models.put_link_report(CONFIG, report)
        assert shifted(store)[0].models.link_shift(CONFIG, sha256(SHIFT).hexdigest()) == SHIFT


def test_a_sealed_report_keeps_its_shift():
    keyring = Keyring([bytes(32)])
    store = AgedStore()
    catalog = Catalog(store, keyring=keyring)
    digest = catalog.models.put_link_shift(CONFIG, SHIFT)
    catalog.models.put_link_report(CONFIG, json.dumps({"shift": digest}).encode())
    assert b"shift" not in store.get(catalog.keys(CONFIG).link_report)
    store.age(2 * DAY)
    collect(store)  # what cannot be read names who knows what
    collect(store, keyring=keyring)
    assert catalog.models.link_shift(CONFIG, digest) == SHIFT


@pytest.mark.parametrize("kind", [one for one in table.KINDS if one.names], ids=lambda kind: kind.name)
@pytest.mark.parametrize("data", [b"", b"[]", b"\xff"])
def test_a_damaged_entry_is_corrupt_and_the_error_says_what_to_do(kind, data):
    """Which collectors and other walkers of a store rely on."""
    key = f"{Catalog(MemoryStore()).keys(CONFIG).root}catalog/any.json"
    for read in filter(None, (kind.accept, kind.names)):
        with pytest.raises(CorruptError, match=r"(: |; )(\w+ ){2,}"):
            read(key, data)
