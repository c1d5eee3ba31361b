"""A corpus that is opened from its store alone: the model's record there, and what can be done without weights."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvwire.codec import decode
from kvwire.errors import ArgumentError, CorruptError, FormatVersionError, MismatchError, NotFoundError
from kvwire.runtime.corpus import Coding, Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import Catalog, FolderStore, Keyring, MemoryStore, ModelRecord, collect, copy_store, verify_store
from kvwire.types import CacheMeta, LayerSpec, RopeRegime


@pytest.fixture(scope="module")
def corpus(small):
    return small.corpus()


def record_key(corpus):
    return corpus.catalog.keys(corpus.meta.config_digest()).model_record


def test_encoding_publishes_the_model_and_a_store_alone_opens_it(small, corpus):
    opened = Corpus.open(corpus.catalog.store)
    assert opened.meta == replace(small.engine.meta, token_digest="")
    assert opened.window == small.engine.window
    assert opened.model_config_digest == small.engine.model_config_digest != ""
    assert opened.profile().digest == small.profile.digest
    for name, ids in small.tokens.items():
        entry = opened.find(name)
        assert entry == corpus.find(name)
        assert opened.text(entry) == tuple(ids)
        ours = opened.decode(name)
        theirs = decode(corpus.catalog.store.get(entry.blob_key), profile=small.profile)
        assert ours.token_ids == theirs.token_ids == tuple(ids)
        for mine, other in zip((*ours.keys, *ours.values), (*theirs.keys, *theirs.values), strict=True):
            assert torch.equal(mine, other)


def test_a_document_is_decoded_at_a_level_and_place_of_choice(small, corpus):
    name = next(iter(small.tokens))
    opened, blob = Corpus.open(corpus.catalog.store), corpus.catalog.store.get(corpus.find(name).blob_key)
    ours = opened.decode(name, 0, dtype=torch.bfloat16, offset=7)
    theirs = decode(blob, 0, small.profile, dtype=torch.bfloat16, offset=7)
    assert ours.meta.offset == 7
    assert all(torch.equal(a, b) for a, b in zip(ours.keys, theirs.keys, strict=True))


def test_sealed_documents_open_with_their_keys_alone(small):
    keyring = Keyring([bytes(32)])
    corpus = Corpus(small.engine, MemoryStore(), keyring=keyring)
    corpus.set_profile(small.profile)
    name, ids = next(iter(small.tokens.items()))
    list(corpus.encode([Document(name, tuple(ids))]))
    opened = Corpus.open(corpus.catalog.store, keyring=keyring)
    assert opened.decode(name).token_ids == tuple(ids)


@pytest.mark.parametrize("how", ["name", "revision", "configuration"])
def test_a_model_goes_by_its_name_or_first_digits(corpus, how):
    meta = corpus.meta
    name = {"name": meta.model_id, "revision": meta.model_revision[:8], "configuration": meta.config_digest()[:16]}[how]
    assert Corpus.open(corpus.catalog.store, model=name).meta.config_digest() == meta.config_digest()


def test_several_models_are_told_apart(corpus):
    store = MemoryStore()
    copy_store(corpus.catalog.store, store)
    other = replace(corpus.meta, model_id="other", model_revision="f" * 64)
    Catalog(store).models.put(ModelRecord(other, 100))
    with pytest.raises(ArgumentError, match=f"several models are in.*{corpus.meta.model_id}.*name one by its digits"):
        Corpus.open(store)
    assert Corpus.open(store, model="other").window == 100


def test_without_an_engine_nothing_is_encoded(small, corpus):
    opened, (name, ids) = Corpus.open(corpus.catalog.store), next(iter(small.tokens.items()))
    for call in (
        lambda: list(opened.encode([Document(name, tuple(ids))])),
        lambda: opened.calibrate([Document(name, tuple(ids))]),
    ):
        with pytest.raises(ArgumentError, match=r"without an engine.*Corpus\(engine, store\)"):
            call()


def test_a_store_from_before_is_named_a_way(small, corpus):
    store = MemoryStore()
    copy_store(corpus.catalog.store, store)
    store.delete(record_key(corpus))
    with pytest.raises(NotFoundError, match=r"no record of a model.*kvwire encode.*Corpus\(engine, store\)"):
        Corpus.open(store)
    again = Corpus(small.engine, store)
    name, ids = next(iter(small.tokens.items()))
    (encoded,) = again.encode([Document(name, tuple(ids))])
    assert encoded.skipped  # what is there is left as it is, and the record is written all the same
    assert Corpus.open(store).find(name) == encoded.entry


def test_a_document_that_needs_the_first_layers_says_so(small):
    corpus = Corpus(small.engine, MemoryStore(), coding=Coding(prefix_layers=1))
    documents = [Document(name, tuple(ids)) for name, ids in small.tokens.items()]
    list(corpus.encode(documents))
    with pytest.raises(MismatchError, match="run the model's first layers"):
        Corpus.open(corpus.catalog.store).decode(documents[0].document_id)


def test_a_text_is_no_blob(small):
    from kvwire.store import UseCounts

    corpus = Corpus(small.engine, MemoryStore(), uses=UseCounts())
    name, ids = next(iter(small.tokens.items()))
    list(corpus.encode([Document(name, tuple(ids))], encode_after=3))
    with pytest.raises(NotFoundError, match="kept as text"):
        Corpus.open(corpus.catalog.store).decode(name)


class AgedStore(MemoryStore):
    """Objects can be made older than they are."""

    def age(self, seconds):
        for one in self._objects.values():
            one.modified -= seconds


def test_the_collector_never_deletes_a_record_nor_its_profile(small, corpus):
    store = AgedStore()
    copy_store(corpus.catalog.store, store)
    space = corpus.catalog.keys(corpus.meta.config_digest())
    store.delete(space.current_profile)
    for name in small.tokens:
        Catalog(store).remove(space, name)
    store.age(1e6)
    done = collect(store, allow_empty_catalog=True)
    assert not done.failures
    assert done.blobs == len(small.tokens)
    assert space.model_record in store.keys("")
    assert space.profile(small.profile.digest) in store.keys("")


def test_verify_finds_a_damaged_record_and_encoding_heals_it(small, corpus):
    store = MemoryStore()
    copy_store(corpus.catalog.store, store)
    key = record_key(corpus)
    store.put(key, store.get(key)[:-9])
    with pytest.raises(CorruptError, match="model record"):
        Corpus.open(store)
    (damage,) = verify_store(store, [Catalog(store)]).damaged
    assert damage.key == key
    name, ids = next(iter(small.tokens.items()))
    list(Corpus(small.engine, store).encode([Document(name, tuple(ids))]))
    assert not verify_store(store, [Catalog(store)]).damaged
    assert Corpus.open(store).meta.config_digest() == corpus.meta.config_digest()


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("version", 2, FormatVersionError),
        ("version", "1", CorruptError),
        ("window", 0, CorruptError),
        ("window", 4096.5, CorruptError),
        ("config_digest", "0" * 64, CorruptError),
        ("model_config_digest", "xyz", CorruptError),
        ("profile_digest", None, CorruptError),
        ("meta", [], CorruptError),
        ("meta", {}, CorruptError),
    ],
)
def test_hostile_records_are_refused(corpus, field, value, kind):
    fields = json.loads(corpus.catalog.store.get(record_key(corpus)))
    with pytest.raises(kind):
        ModelRecord.from_json(json.dumps(fields | {field: value}).encode())


def test_a_record_under_another_key_is_refused(corpus):
    store = MemoryStore()
    data = corpus.catalog.store.get(record_key(corpus))
    space = Catalog(store).keys("d" * 64)
    store.put(space.model_record, data)
    with pytest.raises(CorruptError, match="another configuration"):
        Catalog(store).models.get(space)


def test_inspect_needs_no_model(run, small, tmp_path):
    with closing(FolderStore(tmp_path / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
    name, ids = next(iter(small.tokens.items()))
    code, out, err = run("inspect", name, "--store", tmp_path / "store", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["tokens"] == len(ids)
    code, _, err = run("inspect", "absent", "--store", tmp_path / "store", "--model", small.engine.meta.model_id)
    assert code == 3
    assert "'absent' is not in" in err


def test_the_record_is_what_the_format_says():
    meta = CacheMeta(
        "m", "e" * 64, "", "float32", (LayerSpec(1, 2, 2, rope=0),), (RopeRegime((1.0,), interleaved=False),)
    )
    record = ModelRecord(meta, 128, "a" * 64, "b" * 64)
    section = (Path(__file__).resolve().parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    (example,) = [line for line in section.splitlines() if line.startswith('{"config_digest"')]
    assert record.to_json() == example.encode()
    assert ModelRecord.from_json(example.encode()) == record


def test_salt_prints_what_a_request_to_vllm_carries(run, small, demo_model, tmp_path):
    with closing(FolderStore(tmp_path / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
    names = list(small.tokens)
    words = ["salt", "--docs", *names, "--level", 1, "--store", tmp_path / "store"]
    code, salt, err = run(*words)
    assert (code, err) == (0, "")
    assert json.loads(run(*words, "--json")[1]) == {"cache_salt": salt.strip()}
    code, out, err = run(*words, "--question", "Who rang?", "--model", demo_model, "--max-tokens", 3)
    assert (code, err) == (0, "")
    body = json.loads(out)
    assert body["cache_salt"] == salt.strip()
    assert body["prompt"] == [token for name in names for token in small.tokens[name]] + small.engine.tokenize(
        "Who rang?"
    )
    assert body["kv_transfer_params"] == {"kvwire": {"documents": names, "level": 1}}
    assert (body["model"], body["max_tokens"]) == (str(demo_model), 3)
    first = ["salt", "--docs", names[0], "--level", 1, "--store", tmp_path / "store", "--model", demo_model]
    code, out, err = run(*first, "--computed", names[1], "--question", "Who rang?")
    assert (code, err) == (0, "")
    front = [*small.tokens[names[0]], *small.tokens[names[1]]]
    assert json.loads(out)["prompt"] == front + small.engine.tokenize("Who rang?")
    assert json.loads(out)["kv_transfer_params"] == {"kvwire": {"documents": names[:1], "level": 1}}


@pytest.mark.parametrize(
    ("more", "code", "say"),
    [
        ([], 2, "say how good"),
        (["--level", 1, "absent"], 3, "'absent' is not in"),
        (["--level", 1, "--question", "Who?"], 2, "give --model FOLDER"),
    ],
)
def test_salt_says_what_it_lacks(run, small, tmp_path, more, code, say):
    with closing(FolderStore(tmp_path / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
    got, _, err = run("salt", "--docs", next(iter(small.tokens)), *more, "--store", tmp_path / "store")
    assert say in err
    assert got == code


def test_salt_names_repaired_rows_that_are_kept(run, small, tmp_path):
    names = list(small.tokens)[:2]
    words = ["salt", "--docs", *names, "--level", 1, "--repair", "kept", "--store", tmp_path / "store"]
    with closing(FolderStore(tmp_path / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
        code, _, err = run(*words)
        assert code == 3
        assert "--floor 1 --repair 0.15 --keep-repairs" in err
        chosen = LoadSettings(repair=0.15, quality_floor=1, keep_repairs=True)
        with Loader(small.engine, Corpus(small.engine, store), costs=small.costs, settings=chosen) as loader:
            assert loader.ask(names, small.engine.tokenize("Who rang?")).repair
    code, salt, err = run(*words)
    assert (code, err) == (0, "")
    assert salt != run(*words[:-4], "--store", tmp_path / "store")[1]


def test_salt_prints_what_a_request_for_a_prefix_carries(run, small, demo_model, tmp_path):
    with closing(FolderStore(tmp_path / "store")) as store:
        copy_store(small.corpus().catalog.store, store)
    words = ["salt", "--prefix", "--level", 1, "--store", tmp_path / "store"]
    code, salt, err = run(*words)
    assert (code, err) == (0, "")
    assert salt.startswith(f"kvwire-prefix-level-1-profile-{small.profile.digest[:12]}-")
    code, out, err = run(*words, "--save", "--question", "Who rang?", "--model", demo_model)
    assert (code, err) == (0, "")
    body = json.loads(out)
    assert (body["cache_salt"], body["prompt"]) == (salt.strip(), small.engine.tokenize("Who rang?"))
    assert body["kv_transfer_params"] == {"kvwire": {"prefix": True, "save": True, "level": 1}}
    code, _, err = run("salt", "--save", "--store", tmp_path / "store")
    assert code == 2
    assert "name documents with --docs" in err


@pytest.mark.parametrize("more", [(), ("--save",), ("--level", 1)])
def test_a_salt_without_documents_names_the_options(run, tmp_path, more):
    code, _, err = run("salt", *more, "--store", tmp_path / "store")
    assert code == 2
    assert "name documents with --docs, or ask for --prefix" in err
