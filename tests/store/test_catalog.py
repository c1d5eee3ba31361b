"""The catalog: order of writes, strict parsing, tenants kept apart, profiles checked."""

import contextlib
import hashlib
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.store import Catalog, CatalogEntry, FolderStore, KeySpace, MemoryStore, open_tiers, tenant_hash
from kvwire.store.listing import tenants
from kvwire.store.testing.samples import blob
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving
from kvwire.types import digest_tokens

from ..fault_proxy import FaultProxy
from ..store_wrappers import FaultyStore, StoreFault
from .conftest import CONFIG

OTHER_CONFIG = "d" * 64
TOKENS = "ab" * 32


class RecordingStore(MemoryStore):
    def __init__(self):
        super().__init__()
        self.writes = []

    def put(self, key, data):
        super().put(key, data)
        self.writes.append(key)


@pytest.fixture(params=["memory", "folder"])
def store(request, tmp_path):
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path)


def put(catalog, document_id="doc", blob=b"blob bytes", **fields):
    fields = {"header_bytes": 4, "tokens": 7, "token_digest": TOKENS, "levels": [("base", 6), ("full", 10)]} | fields
    return catalog.put_blob(CONFIG, blob, document_id=document_id, **fields)


def test_a_blob_is_sent_once():
    """To send it again in order to see that it is there costs its bytes, and the connection where it is refused."""
    _, data = blob(1, 1 << 20)
    with serving(MemoryStore()) as url, FaultProxy(url) as proxy, contextlib.closing(HttpStore(proxy.url)) as store:
        entry = put(Catalog(store), blob=data)
        sent = [record.request.path for record in proxy.records if record.request.method == "PUT"]
    assert len(sent) == len(set(sent)) == 3
    assert f"/{entry.blob_key}" in sent


def test_a_document_is_found_by_name_and_by_tokens_and_a_new_version_replaces_it(store, catalog):
    entry = put(catalog, "any text: ../ü\u00a0")
    assert catalog.by_document(CONFIG, "any text: ../ü\u00a0") == entry
    assert catalog.by_tokens(CONFIG, TOKENS) == entry
    assert store.get(entry.blob_key) == b"blob bytes"
    assert entry.levels == (("base", 6), ("full", 10))
    assert list(catalog.documents(CONFIG)) == [entry]
    newer = put(catalog, "any text: ../ü\u00a0", blob=b"a newer blob")
    assert catalog.by_document(CONFIG, "any text: ../ü\u00a0") == newer
    assert list(catalog.documents(CONFIG)) == [newer]


def test_what_was_not_added_is_none(catalog):
    put(catalog)
    assert catalog.by_document(CONFIG, "other") is None
    assert catalog.by_document(OTHER_CONFIG, "doc") is None
    assert catalog.by_tokens(CONFIG, "0" * 64) is None
    assert catalog.profiles.current(CONFIG) is None
    assert list(catalog.documents(OTHER_CONFIG)) == []


def test_the_blob_is_written_before_its_entries_and_not_again_where_it_is_there():
    store = RecordingStore()
    catalog = Catalog(store)
    entry = put(catalog)
    assert store.writes[0] == entry.blob_key
    assert [key.split("/")[4] for key in store.writes[1:]] == ["tokens", "doc"]
    put(catalog, "second name")
    assert store.writes.count(entry.blob_key) == 1
    put(catalog, overwrite=True)
    assert store.writes.count(entry.blob_key) == 2
    store.put(entry.blob_key, b"cut short")
    put(catalog)
    assert store.get(entry.blob_key) == b"blob bytes"
    store.writes.clear()
    put(catalog, "without tokens", b"another blob", token_digest="")
    assert len(store.writes) == 2


def test_tenants_and_salts_do_not_see_each_other(store):
    entry = put(Catalog(store, "alice", b"salt"))
    for other in (Catalog(store, "bob", b"salt"), Catalog(store, "alice", b"pepper"), Catalog(store, "alice")):
        assert other.by_document(CONFIG, "doc") is None
        assert list(other.documents(CONFIG)) == []
        with pytest.raises(ArgumentError):
            other.add(entry)
    assert "alice" not in "".join(store.keys(""))


def test_keys_are_the_same_in_every_process():
    space = KeySpace.of(tenant_hash("default"), CONFIG)
    digest = hashlib.sha256(b"doc").hexdigest()
    assert tenant_hash("default") == "0d2e713cb1d0a83717bb0e076f586589"
    assert space.root == f"v1/{tenant_hash('default')}/{'c' * 16}/"
    assert space.document("doc") == f"{space.root}catalog/doc/{digest[:2]}/{digest}.json"
    assert space.blob(TOKENS) == f"{space.root}ab/{TOKENS}.kvw"
    assert space.profile(TOKENS) == f"{space.root}profiles/{TOKENS}.kvp"
    assert space.current_profile == f"{space.root}catalog/profile.json"


@pytest.mark.parametrize("name", ["", "x" * 5000, "\ud800"])
def test_names_that_cannot_be_hashed_are_refused(name):
    with pytest.raises(ArgumentError):
        tenant_hash(name)
    with pytest.raises(ArgumentError):
        put(Catalog(MemoryStore()), name)


@pytest.mark.parametrize("config", ["", "c" * 16, "C" * 64, "../" + "c" * 61])
def test_configuration_digests_are_checked(config):
    with pytest.raises(ArgumentError):
        Catalog(MemoryStore()).by_document(config, "doc")


@pytest.mark.parametrize(
    "change",
    [
        *({"size": 0}, {"header_bytes": 99}, {"tokens": -1}, {"token_digest": "zz"}, {"profile_digest": "A" * 64}),
        *({"blob_key": "../x"}, {"sha256": "0" * 64}, {"levels": (("x", 11),)}, {"document_id": ""}),
    ],
)
def test_entries_that_contradict_themselves_are_refused(change):
    entry = put(Catalog(MemoryStore()))
    with pytest.raises(ArgumentError):
        replace(entry, **change)
    fields = asdict(entry) | change
    fields["head_bytes"] = fields.pop("header_bytes")
    with pytest.raises(CorruptError):
        CatalogEntry.from_json(json.dumps(fields).encode())


def test_json_is_sorted_and_unknown_fields_are_ignored():
    entry = put(Catalog(MemoryStore()))
    fields = json.loads(entry.to_json())
    assert list(fields) == sorted(fields)
    assert CatalogEntry.from_json(json.dumps(fields | {"of a later version": [1]}).encode()) == entry
    assert CatalogEntry.from_json(json.dumps(fields | {"\ud83d": 1}).encode()) == entry


@pytest.mark.parametrize(
    "bad",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 1}', b"[" * 100_000),
        *(b'{"x": ' + b"1" * 5000 + b"}", b" " * (1 << 21)),
        *({"size": "10"}, {"size": True}, {"size": 10.0}, {"tokens": None}, {"document_id": 5}),
        *({"levels": levels} for levels in ({}, [["a", True]], [["a"]], [[1, 2]])),
    ],
)
def test_bad_json_and_wrong_types_are_corrupt(bad):
    if isinstance(bad, dict):
        bad = json.dumps(json.loads(put(Catalog(MemoryStore())).to_json()) | bad).encode()
    with pytest.raises(CorruptError):
        CatalogEntry.from_json(bad)


@given(st.binary(max_size=300))
def test_any_bytes_parse_or_are_corrupt(data):
    with pytest.raises(CorruptError):
        CatalogEntry.from_json(data)


@given(st.data())
def test_mutated_entries_parse_or_are_corrupt(data):
    good = bytearray(put(Catalog(MemoryStore())).to_json())
    for _ in range(data.draw(st.integers(1, 4))):
        good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CorruptError):
        CatalogEntry.from_json(bytes(good))


def test_entries_in_the_wrong_place_are_corrupt(store):
    alice, bob = Catalog(store, "alice"), Catalog(store, "bob")
    entry = put(alice)
    space = bob.keys(CONFIG)
    store.put(space.document("doc"), entry.to_json())  # would lead bob into alice's blobs
    with pytest.raises(CorruptError):
        bob.by_document(CONFIG, "doc")
    space = alice.keys(CONFIG)
    store.put(space.document("other"), entry.to_json())
    with pytest.raises(CorruptError):
        alice.by_document(CONFIG, "other")
    store.put(space.token_entry("0" * 64), entry.to_json())
    with pytest.raises(CorruptError):
        alice.by_tokens(CONFIG, "0" * 64)


def test_a_listing_goes_on_behind_a_key_and_a_damaged_entry_stops_it_or_is_reported(store, catalog):
    for number in range(7):
        put(catalog, f"doc {number}", blob=b"blob %d" % number, levels=())
    everything = list(catalog.documents(CONFIG))
    keys = [catalog.keys(CONFIG).document(entry.document_id) for entry in everything]
    assert len(everything) == 7
    assert list(catalog.documents(CONFIG, after=keys[1], limit=3)) == everything[2:5]
    store.put(keys[2], b"{}")
    with pytest.raises(CorruptError):
        list(catalog.documents(CONFIG))
    reported = []
    found = list(catalog.documents(CONFIG, on_error=lambda key, _error: reported.append(key)))
    assert found == everything[:2] + everything[3:]
    assert reported == [keys[2]]
    assert catalog.remove(CONFIG, everything[2].document_id)  # a damaged document can be removed
    assert list(catalog.documents(CONFIG)) == found


def test_profiles_are_written_once_checked_and_put_to_use(store, catalog):
    for use in (catalog.profiles.set_current, catalog.profiles.get):
        with pytest.raises(NotFoundError):
            use(CONFIG, "0" * 64)
    digest = catalog.profiles.put(CONFIG, b"profile")
    assert digest == hashlib.sha256(b"profile").hexdigest()
    assert catalog.profiles.current(CONFIG) is None
    catalog.profiles.set_current(CONFIG, digest)
    assert catalog.profiles.current(CONFIG) == digest
    assert catalog.profiles.get(CONFIG, digest) == b"profile"
    store.put(catalog.keys(CONFIG).profile(digest), b"prof1le")
    with pytest.raises(CorruptError, match="damaged"):
        catalog.profiles.get(CONFIG, digest)


def flipping_once(method, ending):
    """A plan in which the first such read gives a wrong bit."""
    first = []

    def plan(_number, called, key):
        if called == method and key.endswith(ending) and not first:
            first.append(key)
            return StoreFault.FLIP
        return None

    return plan


def test_a_profile_that_arrived_damaged_is_read_again_past_the_tiers(tmp_path):
    remote = MemoryStore()
    digest = Catalog(remote).profiles.put(CONFIG, b"profile" * 1000)
    faulty = FaultyStore(remote, flipping_once("get", ".kvp"))
    with contextlib.closing(open_tiers(faulty, memory_bytes=1 << 20, folder=tmp_path, folder_bytes=1 << 24)) as tiers:
        for _ in range(2):
            assert Catalog(tiers).profiles.get(CONFIG, digest) == b"profile" * 1000
    assert faulty.faults == {StoreFault.FLIP: 1}


def test_a_damaged_profile_is_not_kept_in_the_tiers():
    remote = MemoryStore()
    digest = Catalog(remote).profiles.put(CONFIG, b"profile")
    key = Catalog(remote).keys(CONFIG).profile(digest)
    remote.put(key, b"prof1le")
    with contextlib.closing(open_tiers(remote, memory_bytes=1 << 20)) as tiers:
        with pytest.raises(CorruptError, match="delete-damaged"):
            Catalog(tiers).profiles.get(CONFIG, digest)
        remote.put(key, b"profile")
        assert Catalog(tiers).profiles.get(CONFIG, digest) == b"profile"


def test_a_blob_that_arrived_damaged_is_read_again_before_it_is_given_up():
    remote = MemoryStore()
    entry = put(Catalog(remote))
    remote._objects[entry.blob_key].modified -= 13 * 3600
    faulty = FaultyStore(remote, flipping_once("get", ".kvw"))
    with contextlib.closing(open_tiers(faulty, memory_bytes=1 << 20)) as tiers:
        assert Catalog(tiers).alias(entry, "other") is not None
    assert faulty.faults == {StoreFault.FLIP: 1}


@pytest.mark.parametrize("data", [b"{}", b"x", b'{"profile_digest": 5}', b'{"profile_digest": "../x"}'])
def test_a_damaged_pointer_is_corrupt(store, catalog, data):
    store.put(catalog.keys(CONFIG).current_profile, data)
    with pytest.raises(CorruptError):
        catalog.profiles.current(CONFIG)


class FarStore(MemoryStore):
    """Neither in memory nor a folder, as far as the catalog can tell: the first gets wait for three others."""

    is_local = False

    def __init__(self, inner):
        self.inner, self.asked, self.met = inner, set(), threading.Event()

    def get(self, key, start=0, end=None):
        self.asked.add(threading.get_ident())
        if len(self.asked) >= 4:
            self.met.set()
        self.met.wait(10)
        return self.inner.get(key, start, end)

    def scan(self, prefix, after=""):
        return self.inner.scan(prefix, after)


def test_entries_of_far_stores_are_read_several_at_a_time_and_in_order():
    near = MemoryStore()
    for number in range(200):
        put(Catalog(near), f"doc {number}", levels=(), token_digest="")
    far = FarStore(near)
    found = list(Catalog(far).documents(CONFIG))
    assert far.met.is_set()
    assert found == list(Catalog(near).documents(CONFIG))
    near.put(Catalog(near).keys(CONFIG).document("doc 7"), b"{}")
    with pytest.raises(CorruptError):
        list(Catalog(far).documents(CONFIG))


def test_tenants_and_configurations_are_listed_from_keys(store):
    assert list(tenants(store)) == []
    for name in ("alice", "bob"):
        put(Catalog(store, name))
    alice = Catalog(store, "alice")
    alice.put_blob(OTHER_CONFIG, b"x", document_id="doc", header_bytes=0, tokens=1)
    store.put("v1/readme", b"an object in a tenant's place")
    strange = "aa" * 16
    store.put(f"v1/{strange}/~~/strange", b"x")
    store.put("v1/aa/~~/of-somebody-else", b"x")
    assert sorted(tenants(store)) == sorted([strange, tenant_hash("alice"), tenant_hash("bob")])
    spaces = list(alice.configurations())
    assert spaces == [alice.keys(CONFIG), alice.keys(OTHER_CONFIG)]
    assert [entry.document_id for space in spaces for entry in alice.documents(space)] == ["doc", "doc"]
    assert Catalog.of_hash(store, tenant_hash("bob")).by_document(CONFIG, "doc") is not None
    with pytest.raises(ArgumentError):
        Catalog(store, "bob").by_document(spaces[0], "doc")
    with pytest.raises(ArgumentError):
        Catalog.of_hash(store, "bob")


def test_a_removed_document_is_gone_and_its_blob_is_left(store, catalog):
    entry = put(catalog)
    assert catalog.remove(CONFIG, "doc")
    assert not catalog.remove(CONFIG, "doc")
    assert catalog.by_document(CONFIG, "doc") is None
    assert catalog.by_tokens(CONFIG, TOKENS) is None
    assert store.get(entry.blob_key) == b"blob bytes"


def test_another_name_shares_the_blob_and_the_entry_of_tokens_stays_while_its_document_does(store, catalog):
    entry = put(catalog)
    alias = catalog.alias(entry, "other")
    assert alias == replace(entry, document_id="other")
    assert catalog.by_document(CONFIG, "other") == alias
    second = put(catalog, "second")
    catalog.remove(CONFIG, "doc")
    assert catalog.by_tokens(CONFIG, TOKENS) == second
    catalog.remove(CONFIG, "second")
    assert catalog.by_tokens(CONFIG, TOKENS) is None
    store.delete(entry.blob_key)
    assert catalog.alias(entry, "third") is None


def test_a_blob_that_may_soon_be_collected_is_written_again_before_it_is_relied_on():
    store = RecordingStore()
    catalog = Catalog(store)
    entry = put(catalog)
    store._objects[entry.blob_key].modified -= 13 * 3600
    store.writes.clear()
    assert catalog.alias(entry, "other") is not None
    assert store.writes[0] == entry.blob_key
    store._objects[entry.blob_key].modified -= 13 * 3600
    store.writes.clear()
    put(catalog, "third")
    assert store.writes.count(entry.blob_key) == 1
    store._objects[entry.blob_key].data = b"blob bytez"
    store._objects[entry.blob_key].modified -= 13 * 3600
    assert catalog.alias(entry, "fourth") is None  # a damaged blob is not made young


def test_texts_are_stored_once_and_checked(store, catalog):
    digest = catalog.texts.put(CONFIG, (1, 2, 3))
    assert digest == digest_tokens((1, 2, 3))
    assert catalog.texts.get(CONFIG, digest) == (1, 2, 3)
    other = catalog.texts.put(CONFIG, (4, 5))
    space = catalog.keys(CONFIG)
    store.put(space.text(digest), store.get(space.text(other)))
    with pytest.raises(CorruptError, match="damaged"):
        catalog.texts.get(CONFIG, digest)
    store.put(space.text(digest), b"\x89KVT")
    with pytest.raises(CorruptError):
        catalog.texts.get(CONFIG, digest)
    catalog.texts.put(CONFIG, (1, 2, 3), overwrite=True)
    assert catalog.texts.get(CONFIG, digest) == (1, 2, 3)
    with pytest.raises(NotFoundError, match="encode"):
        catalog.texts.get(CONFIG, TOKENS)


def test_a_document_may_have_a_text_alone(catalog):
    entry = catalog.add_text(CONFIG, "doc", (1, 2, 3))
    assert entry.is_text
    assert (entry.blob_key, entry.sha256, entry.size, entry.levels, entry.tokens) == ("", "", 0, (), 3)
    assert catalog.by_document(CONFIG, "doc") == entry
    assert catalog.by_tokens(CONFIG, entry.token_digest) is None  # there is no blob to share
    assert list(catalog.documents(CONFIG)) == [entry]
    assert CatalogEntry.from_json(entry.to_json()) == entry
    with pytest.raises(ArgumentError):
        catalog.alias(entry, "other")
    blob = put(catalog, "doc")
    assert catalog.by_document(CONFIG, "doc") == blob


@pytest.mark.parametrize(
    "change",
    [
        *({"token_digest": ""}, {"tokens": 0}, {"size": 5}, {"sha256": "0" * 64}, {"levels": (("a", 0),)}),
        {"header_bytes": 1},
    ],
)
def test_a_text_alone_says_nothing_of_a_blob(change):
    entry = Catalog(MemoryStore()).add_text(CONFIG, "doc", (1, 2, 3))
    with pytest.raises(ArgumentError):
        replace(entry, **change)
