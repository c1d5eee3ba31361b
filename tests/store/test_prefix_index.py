"""The index of prefixes: hashes that other engines make too, entries that are not trusted, and the longest prefix."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvwire import KVCache, encode
from kvwire.errors import ArgumentError, AuthError, CorruptError, FormatVersionError, StorageError
from kvwire.store import (
    Catalog,
    FolderStore,
    Keyring,
    MemoryStore,
    PrefixEntry,
    PrefixHit,
    PrefixIndex,
    S3Store,
    collect,
    copy_store,
    hash_scheme,
    index_documents,
    verify_store,
)
from kvwire.store import key_kinds as table
from kvwire.store.index_records import prefix_digest
from kvwire.store.prefix.index import PROBES, search
from kvwire.store.prefix.schemes import SCHEMES
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving
from kvwire.types import digest_tokens

from .conftest import CONFIG, DAY

IDS = [(i * i + 7 * i) % 50021 for i in range(800)]
# As LMCache 0.5.6 (TokenHasher) and SGLang 0.5.23 (get_hash_str) give them for these ids in chunks of 256.
THEIRS = {
    "lmcache:256": [
        "79df6fda7893fc428d56abfc3ff70a45c0b7f5c3c7bdcba3096a826ffa7d3277",
        "b4e5c18c6467629c7d6a9ca08bd64c98a44f398a33aff680c3fecf926266f394",
        "7e8ea7c467f4a67f063b7f1dd7fd1621a4c6855f42b31e85546958856fc69176",
    ],
    "sglang:256": [
        "4f5d7772c2d4e7f7a5cfe8f7dfa08f6001e081177d5a5aa09df2e7c8c68bed9a",
        "35c069374d6618f2b541d0535e333bf6dbf42d50b2a1478f4d18f8d50907bdc6",
        "56ba87818bc3f8fde231cd2803d3b78f58f77f3271dff5555baf51a873cd81a6",
    ],
}


def add(catalog, name, ids, **options):
    """A document with a text and a blob."""
    catalog.texts.put(CONFIG, ids, document_id=name)
    numbers = torch.ones(1, len(ids), 2)
    blob = catalog.blobs.seal(encode(KVCache.from_tensors([numbers], [numbers], token_ids=ids), **options))
    info = catalog.blobs.reader().read_header(blob)
    return catalog.put_blob(
        CONFIG, blob, document_id=name, header_bytes=info.header_bytes, tokens=len(ids),
        token_digest=digest_tokens(ids), overwrite=True,
    )  # fmt: skip


@pytest.fixture
def index(catalog):
    made = PrefixIndex(catalog, CONFIG, "kvwire:16")
    for name, ids in {"a": IDS[:100], "b": [*IDS[:60], *IDS[300:500]]}.items():
        made.write(add(catalog, name, ids), ids)
    return made


@pytest.mark.parametrize("told", THEIRS)
def test_hashes_are_those_of_the_engines_themselves(told):
    scheme = hash_scheme(told, CONFIG)
    assert [each.hex() for each in scheme.hashes(IDS)] == THEIRS[told]
    assert scheme.name == told.replace(":", "-")


def search_reference(chunks, probe):
    """What ``search`` finds, from the last chunk down, one at a time."""
    for chunk in reversed(range(chunks)):
        (hit,) = probe([chunk])
        if hit is not None:
            return hit
    return None


def reference(told, ids, tokens, config):
    """Each hash from the words of its scheme, one chunk at a time."""
    order, kind = (">", blake3) if told == "lmcache" else ("<", hashlib.sha256)
    before = {
        "kvwire": hashlib.sha256(b"kvwire prefix\0" + config.encode()).digest(),
        "lmcache": blake3(struct.pack(">qI", 0, 0)).digest(),
        "sglang": b"",
    }[told]
    found = []
    for start in range(0, len(ids) - tokens + 1, tokens):
        before = kind(before + struct.pack(f"{order}{tokens}I", *ids[start : start + tokens])).digest()
        found.append(before)
    return found


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=60),
    *(st.integers(1, 20), st.sampled_from(sorted(SCHEMES)), st.sampled_from(["a" * 16, "b" * 16])),
)
def test_hashes_are_those_of_the_plain_words_of_which_only_kvwires_name_the_model(ids, tokens, told, config):
    assert hash_scheme(f"{told}:{tokens}", config).hashes(ids) == reference(told, ids, tokens, config)


@pytest.mark.parametrize("told", sorted(SCHEMES))
def test_ids_that_have_no_place_in_a_hash_are_refused(told):
    with pytest.raises(ArgumentError, match=r"2\^32"):
        hash_scheme(f"{told}:8", CONFIG).hashes([1] * 8 + [1 << 32])


@pytest.mark.parametrize(
    "told", ["", "vllm", "lmcache:", "lmcache:0", "lmcache:-1", "lmcache:70000", "kvwire:x", "KVWIRE"]
)
def test_what_is_no_scheme_is_refused(told):
    with pytest.raises(ArgumentError, match=r"an index is one of kvwire, lmcache, sglang|a chunk of an index has"):
        hash_scheme(told, CONFIG)


@pytest.mark.parametrize("wrong", [{"name": "Own 64"}, {"rule": SCHEMES["kvwire"]._replace(digest=lambda _: b"short")}])
def test_a_scheme_of_ones_own_that_no_reader_takes_is_refused(wrong):
    catalog = Catalog(MemoryStore(), "default")
    index = PrefixIndex(catalog, CONFIG, dataclasses.replace(hash_scheme("kvwire", CONFIG), **wrong))
    with pytest.raises(ArgumentError, match="8 to 64 bytes"):
        index.write(add(catalog, "a", IDS), IDS)


def entry_of(index, document, chunk, ids):
    size = index.scheme.chunk_tokens
    chunk_hash = index.scheme.hashes(ids)[chunk].hex()
    return PrefixEntry(
        index.scheme.name, chunk_hash, document, digest_tokens(ids), chunk * size, (chunk + 1) * size
    )  # fmt: skip


def key_of(catalog, entry):
    return catalog.keys(CONFIG).prefix_entry(
        prefix_digest(entry.scheme, entry.chunk_hash, catalog.objects.naming_secret)
    )


def test_an_entry_is_what_the_format_says():
    entry = PrefixEntry("lmcache-256", THEIRS["lmcache:256"][1], "a/b", "d" * 64, 256, 512)
    section = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    (example,) = [line for line in section.splitlines() if line.startswith('{"chunk_hash"')]
    assert entry.to_json() == example.encode()
    assert PrefixEntry.from_json(example.encode()) == entry
    golden = Path(__file__).parent / "golden" / "prefix-entry.json"
    assert golden.read_bytes() == example.encode()
    assert entry.chunk == 1
    key = Catalog(MemoryStore(), "default").keys(CONFIG).prefix_entry(prefix_digest(entry.scheme, entry.chunk_hash))
    assert f"`{key.partition('/catalog/')[2]}`" in section


BAD_FIELDS = [
    ("version", 2), ("version", None), ("scheme", "lmcache"), ("scheme", "lmcache-0"), ("scheme", 3),
    ("scheme", "../a-4"), ("chunk_hash", "zz"), ("chunk_hash", "ab" * 7), ("document_id", ""),
    ("document_id", "x" * 5000), ("token_digest", "d" * 63), ("start", -256), ("start", 1), ("start", True),
    ("stop", 513), ("stop", 256), ("stop", 1 << 40),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_an_entry_with_an_impossible_field_is_refused(field, value):
    good = PrefixEntry("lmcache-256", "ab" * 32, "a", "d" * 64, 256, 512).to_json()
    with pytest.raises((CorruptError, FormatVersionError)):
        PrefixEntry.from_json(json.dumps(json.loads(good) | {field: value}).encode())


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_bytes_that_are_no_entry_are_refused(data):
    with pytest.raises((CorruptError, FormatVersionError)):
        PrefixEntry.from_json(data)


def test_writers_of_one_prefix_write_entries_that_agree(catalog, store):
    index = PrefixIndex(catalog, CONFIG, "sglang:16")
    for name, ids in (("a", IDS[:100]), ("b", IDS[:70])):
        index.write(add(catalog, name, ids), ids)
    keys = list(store.keys(catalog.keys(CONFIG).prefix_entries))
    assert len(keys) == 6
    before = {key: PrefixEntry.from_json(store.get(key)) for key in keys}
    document = catalog.by_document(CONFIG, "a")
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(index.write, document, IDS[:100]) for _ in range(8)]:
            assert done.result() == 6
    after = {key: PrefixEntry.from_json(store.get(key)) for key in store.keys(catalog.keys(CONFIG).prefix_entries)}
    assert before.keys() == after.keys()
    for key, entry in after.items():
        assert (entry.chunk_hash, entry.start, entry.stop) == (
            before[key].chunk_hash, before[key].start, before[key].stop,
        )  # fmt: skip
    assert index.longest(IDS).tokens == 100


def test_a_text_that_is_not_the_documents_is_not_indexed(catalog, index):
    with pytest.raises(ArgumentError, match="not that of 'a'"):
        index.write(catalog.by_document(CONFIG, "a"), IDS[:99])


def test_what_is_indexed_already_costs_one_read(catalog, index, store):
    document = catalog.by_document(CONFIG, "a")
    store.read.clear()
    assert index.add(document, IDS[:100], is_new=False) == 0
    assert len(store.read) == 1
    store.delete(key_of(catalog, entry_of(index, "a", 5, IDS[:100])))
    assert index.add(document, IDS[:100], is_new=False) == 6
    assert index.add(document, IDS[:100]) == 6
    short = add(catalog, "short", [1, 2, 3])
    assert index.add(short, [1, 2, 3], is_new=False) == index.add(short, [1, 2, 3]) == 0


def hits(present):
    entry = None
    return lambda chunks: [
        PrefixHit(entry, entry, (), chunk, chunk, chunk) if chunk in present else None for chunk in chunks
    ]


@given(st.integers(0, 5000), st.integers(0, 5000))
def test_the_search_finds_what_a_walk_finds(chunks, there):
    probe = hits(range(there))
    assert search(chunks, probe) == search_reference(chunks, probe)


@given(st.integers(0, 300), st.sets(st.integers(0, 299)))
def test_where_entries_are_missing_what_is_found_is_there(chunks, present):
    found = search(chunks, hits(present))
    best = search_reference(chunks, hits(present))
    assert found is None or (found.stop in present and found.stop <= best.stop)


@pytest.mark.parametrize(("chunks", "most"), [(1, 1), (16, 1), (200, 2), (4000, 3), (60000, 4)])
def test_a_search_takes_few_rounds(chunks, most):
    for there in (0, 1, chunks // 3, chunks - 1, chunks):
        asked = []
        search(chunks, lambda wanted, there=there, asked=asked: (asked.append(wanted), hits(range(there))(wanted))[1])
        assert len(asked) <= most + 1
        assert all(len(each) <= PROBES for each in asked)


@pytest.mark.parametrize(
    ("ids", "document", "tokens"),
    [
        (IDS, "a", 100),
        (IDS[:100], "a", 100),
        (IDS[:90], "a", 90),
        ([*IDS[:50], 3, *IDS[51:]], "ab", 50),
        ([*IDS[:60], *IDS[300:420]], "b", 180),
        (IDS[:16], "ab", 16),
        (IDS[:15], "", 0),
        (IDS[1:], "", 0),
        ([], "", 0),
    ],
)
def test_the_longest_prefix_is_found_to_the_token(index, ids, document, tokens):
    told = []
    hit = index.longest(ids, told.append)
    assert told == []
    if not tokens:
        assert hit is None
        return
    assert hit.document.document_id in document
    assert hit.tokens == tokens
    assert hit.start < hit.stop <= tokens
    assert hit.token_ids[:tokens] == tuple(ids[:tokens])


def test_chunks_are_looked_up_by_their_hashes_alone_and_each_document_is_read_once(catalog, index, store):
    hashes = index.scheme.hashes(IDS[:100])
    found = index.look_up([hashes[5], b"\0" * 32, hashes[0]])
    assert [hit and (hit.start, hit.stop, hit.tokens) for hit in found] == [(80, 96, 96), None, (0, 16, 16)]
    assert found[0].document.document_id == "a"
    for ask, documents in ((lambda made: made.look_up(hashes), 4), (lambda made: made.longest(IDS[:100]), 2)):
        made = PrefixIndex(catalog, CONFIG, "kvwire:16")
        store.read.clear()
        ask(made)
        read = [key for key in store.read if "/doc/" in key or key.endswith(".kvt")]
        assert len(read) == len(set(read)) == documents  # entries of the first three chunks lead to another
    assert [hit.document.document_id for hit in made.look_up(hashes)] == ["b"] * 3 + ["a"] * 3
    store.read.clear()
    made.longest(IDS[:100])
    assert not any(key.endswith(".kvt") for key in store.read)


def miss(index, ids=IDS):
    """What is told of a look-up that finds nothing."""
    told = []
    assert index.longest(ids, told.append) is None
    assert all("counts as a miss" in each for each in told)
    return " ".join(told)


def test_a_prompt_that_begins_with_a_bos_is_told(index):
    told = []
    assert index.longest([7_777, *IDS], told.append) is None
    assert len(told) == 1


@pytest.mark.parametrize("is_replaced", [False, True])
def test_an_entry_that_names_a_missing_or_replaced_document_is_a_miss(catalog, index, is_replaced):
    for name in "ab":
        assert catalog.remove(CONFIG, name)
        if is_replaced:
            add(catalog, name, IDS[500:700])
    assert "no document with the text of" in miss(index)


def test_an_entry_leads_to_another_document_of_the_same_text(catalog, index, store):
    catalog.alias(catalog.by_document(CONFIG, "a"), "other name")
    store.delete(catalog.keys(CONFIG).document("a"))
    assert index.longest(IDS[:100]).document.document_id == "other name"
    store.age(2 * DAY)
    collect(store)  # which leaves what leads there
    assert index.longest(IDS[:100]).tokens == 100


def test_an_entry_whose_document_has_other_tokens_is_a_miss(catalog, index, store):
    """As if two prompts had one hash."""
    other = add(catalog, "other", IDS[200:300])
    assert catalog.remove(CONFIG, "b")
    for chunk in range(6):
        lying = replace(entry_of(index, "a", chunk, IDS[:100]), document_id="other", token_digest=other.token_digest)
        store.put(key_of(catalog, lying), lying.to_json())
    assert "the tokens of 'other' are others" in miss(index, IDS[:100])


def test_a_lost_or_damaged_text_is_a_miss(catalog, index, store):
    for name in "ab":
        store.delete(catalog.keys(CONFIG).text(catalog.by_document(CONFIG, name).token_digest))
    assert "encode the document again" in miss(PrefixIndex(catalog, CONFIG, "kvwire:16"))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b'{"version": 7}', b'{"version": 1, "scheme": "a-1"}'])
def test_a_damaged_entry_is_a_miss(catalog, index, store, data):
    for key in list(store.keys(catalog.keys(CONFIG).prefix_entries)):
        store.put(key, data)
    assert "a prefix entry" in miss(index)


def test_an_entry_under_anothers_key_is_a_miss(catalog, index, store):
    keys = list(store.keys(catalog.keys(CONFIG).prefix_entries))
    for key in keys[1:]:
        store.put(key, store.get(keys[0]))
    told = []
    hit = index.longest(IDS[:100], told.append)
    assert hit is None or hit.tokens == 100
    assert "of another hash than its key says" in " ".join(told)


def test_a_document_that_is_kept_as_text_is_a_miss(catalog):
    index = PrefixIndex(catalog, CONFIG, "kvwire:16")
    document = add(catalog, "a", IDS[:100])
    index.write(document, IDS[:100])
    assert catalog.remove(CONFIG, "a")
    catalog.add_text(CONFIG, "a", IDS[:100])
    assert "has a blob any more" in miss(index)


def test_rows_behind_a_neutral_prefix_are_a_miss(catalog, index):
    """They are not those that a prompt begins with."""
    for name, ids in {"a": IDS[:100], "b": [*IDS[:60], *IDS[300:500]]}.items():
        index.write(add(catalog, name, ids, neutral_prefix=(5, 6, 7)), ids)
    assert "begin no prompt" in miss(index)


@pytest.mark.parametrize("damage", ["lost", "cut", "of another text"])
def test_a_blob_that_cannot_be_used_is_a_miss(catalog, index, store, damage):
    assert catalog.remove(CONFIG, "b")
    key = catalog.by_document(CONFIG, "a").blob_key
    if damage == "lost":
        store.delete(key)
    elif damage == "cut":
        store.put(key, store.get(key)[:20])
    else:
        catalog.put_blob(
            CONFIG, encode(KVCache.from_tensors([torch.ones(1, 9, 2)], [torch.ones(1, 9, 2)], token_ids=IDS[:9])),
            document_id="a", header_bytes=2000, tokens=100, token_digest=digest_tokens(IDS[:100]),
        )  # fmt: skip
    assert miss(index)


def test_a_store_that_fails_is_told(index, store, monkeypatch):
    def broken(*_args):
        raise StorageError("the disk is gone")

    monkeypatch.setattr(store, "get", broken)
    with pytest.raises(StorageError, match="the disk is gone"):
        index.longest(IDS)


def test_tenants_and_models_have_indexes_of_their_own(catalog, index, store):
    assert index.longest(IDS).tokens == 100
    assert PrefixIndex(Catalog(store, "other"), CONFIG, "kvwire:16").longest(IDS) is None
    assert PrefixIndex(catalog, "d" * 64, "kvwire:16").longest(IDS) is None
    assert PrefixIndex(catalog, CONFIG, "kvwire:32").longest(IDS) is None
    assert PrefixIndex(catalog, CONFIG, "sglang:16").longest(IDS) is None


def test_sealed_entries_are_sound(store):
    catalog = Catalog(store, keyring=Keyring([bytes(32)]))
    index = PrefixIndex(catalog, CONFIG, "kvwire:16")
    index.write(add(catalog, "a", IDS[:100]), IDS[:100])
    found = verify_store(store, [catalog], delete_damaged=True)
    assert found.entries > 6
    assert [damage for damage in found.damaged if "/prefix/" in damage.key] == []
    assert index.longest(IDS).tokens == 100


def test_the_names_of_sealed_entries_cannot_be_guessed(store):
    keyring = Keyring([bytes(32)])
    catalog = Catalog(store, keyring=keyring)
    index = PrefixIndex(catalog, CONFIG, "lmcache:16")
    index.write(add(catalog, "a", IDS[:100]), IDS[:100])
    assert index.longest(IDS).tokens == 100
    space = catalog.keys(CONFIG)
    for entry in (entry_of(index, "a", chunk, IDS[:100]) for chunk in range(6)):
        plain = space.prefix_entry(prefix_digest(entry.scheme, entry.chunk_hash))
        assert plain not in store.keys("")
        assert entry.document_id.encode() * 2 not in store.get(key_of(catalog, entry))
        store.put(plain, store.get(key_of(catalog, entry)))  # moved to where it can be guessed, it opens nowhere
        with pytest.raises(AuthError):
            PrefixIndex(Catalog(store), CONFIG, "lmcache:16").longest(IDS)
    newer = Keyring([b"\1" * 32, bytes(32)])
    assert PrefixIndex(Catalog(store, keyring=newer), CONFIG, "lmcache:16").longest(IDS).tokens == 100


@pytest.fixture(params=["folder", "server", "s3"])
def remote(request, tmp_path, monkeypatch):
    if request.param == "s3":
        server = request.getfixturevalue("ministack_server")
        server.set_environment(monkeypatch)
        with closing(S3Store(server.address("prefix-index"))) as made:
            yield made
        return
    with closing(FolderStore(tmp_path / "s")) as behind:
        if request.param == "folder":
            yield behind
        else:
            with serving(behind) as url, closing(HttpStore(url)) as client:
                yield client


def test_an_index_is_written_and_found_in_every_kind_of_store(remote):
    catalog = Catalog(remote)
    index = PrefixIndex(catalog, CONFIG, "lmcache:16")
    index.write(add(catalog, "a", IDS[:400]), IDS[:400])
    assert PrefixIndex(catalog, CONFIG, "lmcache:16").longest([*IDS[:333], 1]).tokens == 333
    assert verify_entries(remote, catalog) == (2 + 25 - 1, [])  # the entry by tokens is a hint, which is not looked at


def verify_entries(store, catalog):
    found = verify_store(store, [catalog])
    return found.entries, [one.problem for one in found.damaged if "prefix" in one.problem]


def test_a_server_takes_no_entry_under_anothers_key(tmp_path, catalog, index):
    good = entry_of(index, "a", 1, IDS[:100])
    with closing(FolderStore(tmp_path)) as behind, serving(behind) as url, closing(HttpStore(url)) as client:
        key = key_of(catalog, good)
        client.put(key, good.to_json())
        with pytest.raises(ArgumentError, match="of another prefix than its key"):
            client.put(key, replace(good, scheme="sglang-16").to_json())
        with pytest.raises(ArgumentError, match="not a prefix entry"):
            client.put(key, b"{}")
        assert client.get(key) == good.to_json()


def test_verify_tells_of_damaged_entries_and_deletes_them(catalog, index, store):
    entries, damaged = verify_entries(store, catalog)
    assert (entries, damaged) == (2 + 6 + 16 - 3, [])
    key = key_of(catalog, entry_of(index, "a", 5, IDS[:100]))
    store.put(key, b"{}")
    (found,) = [one for one in verify_store(store, [catalog], delete_damaged=True).damaged if one.key == key]
    assert found.deleted
    assert key not in store.keys("")
    assert catalog.remove(CONFIG, "a")  # what leads nowhere any more is no damage
    assert verify_entries(store, catalog)[1] == []


def test_the_collector_takes_what_leads_nowhere_once_it_is_old(catalog, index, store):
    prefix = catalog.keys(CONFIG).prefix_entries
    there = set(store.keys(prefix))
    collect(store)
    assert catalog.remove(CONFIG, "b")
    assert collect(store).entries == 0
    store.age(2 * DAY)
    assert collect(store, dry_run=True).entries == 16
    assert set(store.keys(prefix)) == there
    assert collect(store).entries == 16
    left = set(store.keys(prefix))
    assert left == {key_of(catalog, entry_of(index, "a", chunk, IDS[:100])) for chunk in (3, 4, 5)}
    assert index.longest(IDS).tokens == 100
    store.put(min(left), b"damaged")
    store.age(2 * DAY)
    assert collect(store).entries == 1


def test_the_collector_leaves_sealed_entries_without_their_key(store):
    catalog = Catalog(store, keyring=Keyring([bytes(32)]))
    index = PrefixIndex(catalog, CONFIG, "kvwire:16")
    index.write(add(catalog, "a", IDS[:100]), IDS[:100])
    store.age(2 * DAY)
    done = collect(store)
    assert "sealed" in done.failures[0]
    assert index.longest(IDS).tokens == 100


def test_a_copy_takes_the_index(catalog, index, store):
    target = MemoryStore()
    copy_store(store, target)
    assert set(target.keys("")) == set(store.keys(""))
    assert PrefixIndex(Catalog(target), CONFIG, "kvwire:16").longest(IDS).tokens == 100


def test_documents_are_indexed_afterwards_from_their_texts(catalog, store):
    for name, ids in {"a": IDS[:100], "b": IDS[100:300], "c": IDS[300:400]}.items():
        add(catalog, name, ids)
    catalog.add_text(CONFIG, "kept", IDS[:50])
    add(catalog, "behind", IDS[600:700], neutral_prefix=(1, 2))
    space = catalog.keys(CONFIG)
    store.delete(space.text(catalog.by_document(CONFIG, "c").token_digest))
    done = index_documents(catalog, space, ["lmcache:16", "sglang:32"])
    assert (done.documents, done.entries, done.left_out) == (2, 6 + 3 + 12 + 6, 2)
    assert [failure.partition(":")[0] for failure in done.failures] == ["c"]
    assert PrefixIndex(catalog, CONFIG, "sglang:32").longest(IDS[100:250]).tokens == 150
    with pytest.raises(ArgumentError):
        index_documents(catalog, space, ["other"])


def test_keys_lie_where_the_table_says(catalog, index, store):
    (kind,) = [one for one in table.KINDS if one.name == "prefix entry"]
    for key in store.keys(catalog.keys(CONFIG).prefix_entries):
        assert table.kind_of(key) is kind
        assert not table.is_misplaced(key)
