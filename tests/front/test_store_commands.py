"""``kvwire store`` over folders and the real server: lists, removals, garbage, checks and copies."""

import json
import os
import random
import shutil
import threading
import time
from contextlib import closing
from functools import partial

import pytest

from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import Catalog, FolderStore, MemoryStore, UseCounts, copy_store, tenant_hash, verify_store
from kvwire.store.catalog.announcements import announce
from kvwire.store.upkeep.collect import collect
from kvwire.transport.testing import serving

from ..store_wrappers import FaultyStore, StoreFault, StoreWrapper

DAY = 24 * 3600.0
BEARER = "made-up"


@pytest.fixture
def run(run):
    return partial(run, "store")


@pytest.fixture(scope="session")
def content(small):
    """Everything of a small corpus: two blobs, a profile, texts, one document that is text alone."""
    corpus = small.corpus()
    (entry,) = Corpus(small.engine, corpus.catalog.store, uses=UseCounts()).encode(
        [Document("text alone", (5, 6, 7))], encode_after=1
    )
    assert entry.entry.is_text
    store = corpus.catalog.store
    return {key: store.get(key) for key in store.keys("")}


@pytest.fixture
def folder(content, tmp_path):
    with closing(FolderStore(tmp_path / "store")) as store:
        store.put_many(content.items())
    return tmp_path / "store"


def names(small):
    return {*small.tokens, "text alone"}


def rows(out):
    return [json.loads(line) for line in out.splitlines()]


def test_documents_are_listed_without_a_model(run, folder, small):
    code, out, _ = run("ls", "--store", folder, "--json")
    found = rows(out)
    assert code == 0
    assert {row["id"] for row in found} == names(small)
    assert {row["config"] for row in found} == {small.engine.meta.config_digest()[:16]}
    assert [row["levels"] for row in found if row["id"] == "text alone"] == [[]]
    code, out, _ = run("ls", "--store", folder)
    assert len(out.splitlines()) == 3
    code, cut, _ = run("ls", "--store", folder, "--json", "--limit", 2)
    assert rows(cut) == found[:2]
    code, rest, _ = run("ls", "--store", folder, "--json", "--after", found[1]["key"])
    assert rows(rest) == found[2:]
    assert run("ls", "--store", folder, "--config", "0123")[1] == ""
    assert run("ls", "--store", folder, "--tenant", "nobody")[1] == ""


def test_tenants_configurations_and_keys_are_listed(run, folder, content, small):
    assert rows(run("ls", "--store", folder, "--tenants", "--json")[1]) == [{"tenant": tenant_hash("default")}]
    config = small.engine.meta.config_digest()[:16]
    assert rows(run("ls", "--store", folder, "--configs", "--json")[1]) == [{"config": config}]
    found = rows(run("ls", "--store", folder, "--keys-of", "v1/", "--json")[1])
    assert [(row["key"], row["bytes"]) for row in found] == [(key, len(data)) for key, data in sorted(content.items())]


def test_a_damaged_entry_is_told_after_the_list(run, folder, small):
    with closing(FolderStore(folder)) as store:
        catalog = Catalog(store)
        store.put(next(catalog.configurations()).document("text alone"), b"{}")
    code, out, err = run("ls", "--store", folder, "--json")
    assert code == 4
    assert {json.loads(line).get("id") for line in out.splitlines()} == {*small.tokens, None}
    assert "1 entries cannot be read" in err


def test_a_document_is_shown(run, folder, small):
    name = next(iter(small.tokens))
    code, out, _ = run("stat", name, "--store", folder, "--json")
    about = json.loads(out)
    assert code == 0
    assert (about["document_id"], about["tokens"]) == (name, len(small.tokens[name]))
    assert [level["name"] for level in about["blob"]["levels"]] == [level for level, _ in about["levels"]]
    assert "bits/element" in run("stat", name, "--store", folder)[1]
    assert "kept as text" in run("stat", "text alone", "--store", folder)[1]
    code, out, err = run("stat", "nobody", "--store", folder)
    assert code == 3
    assert "kvwire store ls" in err


def test_a_document_of_several_configurations_needs_one_named(run, folder, small):
    with closing(FolderStore(folder)) as store:
        Catalog(store).add_text("e" * 64, "text alone", (1, 2))
    code, _, err = run("stat", "text alone", "--store", folder)
    assert code == 2
    assert "--config" in err
    assert run("stat", "text alone", "--store", folder, "--config", "eee")[0] == 0
    code, _, err = run("stat", "text alone", "--store", folder, "--config", "zz")
    assert (code, "this tenant has 0 model configurations that begin with 'zz'" in err) == (3, True)


def test_removed_documents_are_garbage_afterwards(run, folder, small):
    first, second = small.tokens
    code, out, _err = run("rm", first, "nobody", "--store", folder, "--json")
    assert code == 3
    assert json.loads(out)["removed"] == [first]
    assert json.loads(out)["absent"] == ["nobody"]
    assert run("rm", "text alone", "--store", folder)[0] == 0
    assert json.loads(run("gc", "--store", folder, "--json")[1])["blobs"] == 0  # too young
    dry = json.loads(run("gc", "--store", folder, "--grace", "0s", "--dry-run", "--json")[1])
    assert (dry["blobs"], dry["profiles"], dry["texts"]) == (1, 0, 2)
    assert json.loads(run("gc", "--store", folder, "--grace", "0s", "--json")[1]) == dry | {"dry_run": False}
    assert {row["id"] for row in rows(run("ls", "--store", folder, "--json")[1])} == {second}
    assert run("verify", "--store", folder)[0] == 0
    assert run("gc", "--store", folder, "--grace", "soon")[0] == 2


def test_garbage_of_all_tenants(run, tmp_path):
    with closing(FolderStore(tmp_path)) as store:
        for tenant in ("alice", "bob"):
            catalog = Catalog(store, tenant)
            catalog.add_text("c" * 64, "kept", tuple(range(1000)))
            catalog.texts.put("c" * 64, (1, 2))
    common = ("--store", tmp_path, "--grace", "0s", "--json")
    assert json.loads(run("gc", *common)[1])["texts"] == 0  # the default tenant has nothing
    assert json.loads(run("gc", *common, "--tenant", "alice")[1])["texts"] == 1
    assert json.loads(run("gc", *common, "--all-tenants")[1])["texts"] == 1


@pytest.mark.parametrize("shared", [False, True], ids=["of all bytes", "of the documents' bytes"])
def test_more_than_half_goes_only_where_that_was_confirmed(run, folder, small, content, shared):
    with closing(FolderStore(folder)) as store:
        profile = next(store.stat(key).size for key in content if key.endswith(".kvp"))
        if not shared:  # so that what documents take is most of all bytes
            ids = tuple(random.Random(1).choices(range(60_000), k=profile // 2 * 2))
            Catalog(store).add_text(small.engine.meta.config_digest(), "long", ids)
    names = [*small.tokens] if shared else [*small.tokens, "long"]
    assert run("rm", *names, "--store", folder)[0] == 0
    code, _, err = run("gc", "--store", folder, "--grace", "0s")
    assert code == 2
    assert "--yes" in err
    assert "rebuild" in err
    with closing(FolderStore(folder)) as store:
        assert not set(content) - set(store.keys("")) - {key for key in content if "/catalog/" in key}
    code, out, _ = run("gc", "--store", folder, "--grace", "0s", "--yes", "--json")
    assert (code, json.loads(out)["blobs"]) == (0, 2)


@pytest.mark.parametrize("how", ["copied without dot files", "of another model", "other"])
def test_content_whose_catalog_is_lost_is_not_garbage_and_the_catalog_is_made_anew(run, folder, small, content, how):
    broken = folder.with_name("broken")
    if how == "copied without dot files":
        broken.mkdir()
        for path in folder.glob("[!.]*"):
            shutil.copytree(path, broken / path.name)
    else:
        shutil.copytree(folder, broken)
        for file in broken.glob(".catalog*"):
            file.unlink()
        with closing(FolderStore(broken)) as store:
            other = Catalog(store, "somebody else") if how == "other" else Catalog(store)
            other.add_text("e" * 64, "of another model", (1, 2))
    with closing(FolderStore(broken)) as store:
        before = {key for key in store.keys("") if "/catalog/" not in key}
    assert before
    for words in ((), ("--yes",), ("--all-tenants", "--yes"), ("--dry-run",)):
        code, out, err = run("gc", "--store", broken, "--grace", "0s", "--json", *words)
        assert code == 4
        assert json.loads(out)["bytes"] == 0
        assert "kvwire store rebuild" in err
    config = small.engine.meta.config_digest()[:16]
    assert rows(run("ls", "--store", broken, "--config", config, "--json")[1]) == []
    dry = json.loads(run("rebuild", "--store", broken, "--dry-run", "--json")[1])
    code, out, _ = run("rebuild", "--store", broken, "--json")
    assert code == 0
    assert json.loads(out) == dry | {"dry_run": False}
    assert (dry["documents"], dry["texts"], dry["unnamed"], dry["profiles"]) == (2, 1, 0, 1)

    def listed(place):
        return sorted(run("ls", "--store", place, "--config", config, "--json")[1].splitlines())

    assert listed(broken) == listed(folder)
    assert run("verify", "--store", broken)[0] == 0
    assert json.loads(run("gc", "--store", broken, "--grace", "0s", "--json")[1])["bytes"] == 0
    with closing(FolderStore(broken)) as store:
        assert {key for key in store.keys("") if "/catalog/" not in key} == before
        entries = {key: data for key, data in content.items() if "/catalog/doc" in key or "profile.json" in key}
        assert {key: store.get(key) for key in entries} == entries
    assert " entries were there" in run("rebuild", "--store", broken)[1]


def test_garbage_collection_that_was_stopped_by_damage_is_an_error(run, folder):
    with closing(FolderStore(folder)) as store:
        store.put(next(Catalog(store).configurations()).document("text alone"), b"{}")
    code, out, err = run("gc", "--store", folder, "--grace", "0s", "--json")
    assert code == 4
    assert json.loads(out)["blobs"] == 0
    assert "left alone" in err


def test_a_sound_store_is_verified(run, folder, content):
    code, out, _ = run("verify", "--store", folder, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["damaged"] == []
    assert found["objects"] == sum(1 for key in content if "/catalog/" not in key)
    assert found["entries"] == 5  # three documents, the model's record and the pointer to the profile


def _flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["kvw", "kvp", "kvt"])
@pytest.mark.parametrize("where", ["first", "middle", "last", "cut"])
def test_damage_anywhere_is_found_and_can_be_deleted(run, folder, content, kind, where):
    path = min(folder.rglob(f"*.{kind}"))
    size = path.stat().st_size
    if where == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        _flip(path, {"first": 0, "middle": size // 2, "last": size - 1}[where])
    code, out, _err = run("verify", "--store", folder, "--json")
    found = json.loads(out)
    key = path.relative_to(folder).as_posix()
    assert code == 4
    assert key in {damage["key"] for damage in found["damaged"]}
    assert path.exists()
    assert run("verify", "--store", folder, "--delete-damaged")[0] == 4
    assert not path.exists()


@pytest.mark.parametrize("name", ["profile.json", "links.json", "edits.json"])
@pytest.mark.parametrize("data", [b"", b"no JSON", b"[]"])
def test_a_damaged_pointer_or_report_is_found_and_can_be_deleted(run, folder, small, name, data):
    with closing(FolderStore(folder)) as store:
        space = next(Catalog(store).configurations())
        key = f"{space.catalog}{name}"
        store.put(key, data)
        code, out, _ = run("verify", "--store", folder, "--json")
        assert code == 4
        assert [damage["key"] for damage in json.loads(out)["damaged"]] == [key]
        assert run("verify", "--store", folder, "--delete-damaged")[0] == 4
        assert list(store.keys(key)) == []
        assert run("verify", "--store", folder)[0] == 0
        if name == "profile.json":
            assert run("rebuild", "--store", folder)[0] == 0
            assert Catalog(store).profiles.current(space) == small.profile.digest


def test_a_pointer_to_a_lost_profile_is_found(run, folder, content):
    (profile,) = (key for key in content if key.endswith(".kvp"))
    with closing(FolderStore(folder)) as store:
        store.delete(profile)
        found = json.loads(run("verify", "--store", folder, "--json")[1])["damaged"]
    assert [damage["problem"] for damage in found if damage["key"].endswith("/profile.json")] == [
        "the profile of the current profile is not there: kvwire store rebuild writes it again"
    ]


class Healing(StoreWrapper):
    """A store in which somebody writes an object again right after it was looked at that often."""

    def __init__(self, inner, key, data, looks):
        super().__init__(inner)
        self.key, self.data, self.looks = key, data, looks

    def _do(self, request, call):
        result = super()._do(request, call)
        if request.key == self.key and request.method in ("get", "read"):
            self.looks -= 1
            if self.looks == 0:
                self.inner.put(self.key, self.data)
        return result


@pytest.mark.parametrize("looks", [1, 2])
@pytest.mark.parametrize("kind", ["kvw", "kvp", "kvt", "doc"])
def test_what_was_written_again_meanwhile_is_not_deleted_as_damaged(folder, content, kind, looks):
    with closing(FolderStore(folder)) as inner:
        key = next(key for key in content if key.endswith(f".{kind}") or f"/catalog/{kind}/" in key)
        inner.put(key, b"\0" + content[key][1:])
        store = Healing(inner, key, content[key], looks)
        (damage,) = verify_store(store, [Catalog(store)], delete_damaged=True).damaged
        assert (damage.key, damage.deleted) == (key, False)
        assert inner.get(key) == content[key]
        assert verify_store(inner, [Catalog(inner)]).damaged == ()


@pytest.mark.parametrize("kind", ["kvw", "kvp", "kvt", "doc"])
def test_what_was_damaged_on_its_way_alone_is_not_deleted(folder, content, kind):
    with closing(FolderStore(folder)) as inner:
        key = next(key for key in content if key.endswith(f".{kind}") or f"/catalog/{kind}/" in key)
        flipped = []

        def plan(_number, method, at):
            if at == key and method in ("get", "read") and not flipped:
                flipped.append(at)
                return StoreFault.TRUNCATE if kind == "doc" else StoreFault.FLIP
            return None

        store = FaultyStore(inner, plan)
        verify_store(store, [Catalog(store)], delete_damaged=True)
        assert flipped
        assert inner.get(key) == content[key]


def test_blobs_are_checked_piece_by_piece_as_if_whole(run, folder, content, monkeypatch):
    for piece in (1000, 4096, 65537):
        monkeypatch.setattr("kvwire.store.content_checks._PIECE_BYTES", piece)
        assert run("verify", "--store", folder)[0] == 0


def test_a_wrong_checksum_under_a_right_hash_is_found(folder, content):
    """A blob that was broken before it was hashed."""
    from hashlib import sha256

    with closing(FolderStore(folder)) as store:
        catalog = Catalog(store)
        key = next(key for key in content if key.endswith(".kvw"))
        blob = bytearray(content[key])
        blob[-3] ^= 4
        (space,) = catalog.configurations()
        bad = space.blob(sha256(blob).hexdigest())
        store.put(bad, bytes(blob))
        (damage,) = verify_store(store, [catalog]).damaged
        assert damage.key == bad
        assert "checksum" in damage.problem


def test_entries_that_name_what_is_not_there_are_found(run, folder, small):
    for path in [*[*folder.rglob("*.kvw")][:1], *folder.rglob("*.kvp")]:
        path.unlink()
    code, _, err = run("verify", "--store", folder, "--delete-damaged")
    assert code == 4
    assert err.count("is not there") == 4  # a blob, and the profile of two documents and of the pointer
    assert len(run("ls", "--store", folder)[1].splitlines()) == 3  # their texts answer for them


def test_a_store_is_copied_and_the_copy_goes_on_where_it_was(run, folder, content, tmp_path):
    target = tmp_path / "copy"
    code, out, _ = run("cp", folder, target, "--json")
    about = json.loads(out)
    assert code == 0
    with closing(FolderStore(target)) as store:
        assert {key: store.get(key) for key in store.keys("")} == content
        store.delete(next(key for key in content if key.endswith(".kvw")))
    assert about["objects"] + about["entries"] == len(content)
    again = json.loads(run("cp", folder, target, "--json")[1])
    assert (again["objects"], again["entries"], again["skipped"]) == (1, 0, len(content) - 1)


@pytest.mark.parametrize("names", [("store", "store/below"), ("store/below", "store"), ("store", "link/below")])
def test_folders_inside_each_other_are_not_copied(run, folder, names):
    (folder.parent / "link").symlink_to(folder)
    shutil.copytree(folder, folder.parent / "copy")
    (folder.parent / "copy").rename(folder / "below")
    code, _, err = run("cp", *(folder.parent / name for name in names))
    assert (code, "lies inside the other" in err) == (2, True)


def test_a_name_that_is_given_twice_counts_once(run, folder, small):
    name = next(iter(small.tokens))
    code, out, _ = run("rm", "--store", folder, name, name, "nowhere", "--json")
    told = json.loads(out)
    assert (code, told["removed"], told["absent"]) == (3, [name], ["nowhere"])


def test_entries_come_last(content):
    class Recording(MemoryStore):
        def __init__(self):
            super().__init__()
            self.writes = []

        def put(self, key, data):
            super().put(key, data)
            self.writes.append(key)

    source, target = MemoryStore(), Recording()
    for key, data in content.items():
        source.put(key, data)
    copy_store(source, target)
    kinds = ["/catalog/" in key for key in target.writes]
    assert kinds == sorted(kinds)
    assert set(target.writes) == set(content)


def test_over_the_real_server_in_both_directions(run, folder, content, tmp_path, monkeypatch):
    with closing(FolderStore(tmp_path / "remote")) as remote, serving(remote, token=BEARER) as url:
        code, _, err = run("cp", folder, url)
        assert code == 5
        code, _, err = run("cp", folder, url, "--to-token", BEARER, "--json")
        assert (code, err) == (0, "")
        assert {key: remote.get(key) for key in remote.keys("")} == content
        code, _out, _ = run("cp", url, tmp_path / "back", "--token", BEARER, "--json")
        assert code == 0
        monkeypatch.setenv("KVWIRE_TOKEN", BEARER)
        assert run("verify", "--store", url)[0] == 0
        assert len(run("ls", "--store", url)[1].splitlines()) == 3
    with closing(FolderStore(tmp_path / "back")) as back:
        assert {key: back.get(key) for key in back.keys("")} == content


@pytest.mark.parametrize("kind", ["kvw", "kvp"])
def test_what_is_damaged_is_not_copied(run, folder, content, tmp_path, kind):
    path = next(folder.rglob(f"*.{kind}"))
    sound = path.read_bytes()
    _flip(path, 5000)
    code, _, err = run("cp", folder, tmp_path / "copy")
    assert code == 4
    assert "SHA-256" in err
    copied = tmp_path / "copy" / path.relative_to(folder)
    assert not copied.exists()
    path.write_bytes(sound)
    assert run("cp", folder, tmp_path / "copy")[0] == 0
    assert copied.read_bytes() == sound


def test_a_copy_into_a_store_that_is_being_collected_is_whole(content):
    source, target = MemoryStore(), MemoryStore()
    for key, data in content.items():
        source.put(key, data)
        if "/catalog/" not in key:
            target.put(key, data)
    for one in target._objects.values():
        one.modified -= 2 * DAY
    (space,) = Catalog(source).configurations()
    at = announce(target, space, [key for key in content if key.endswith(".kvw")])

    def sweep():
        while not any(target.keys(space.documents)):  # the copier relies on what is there, and writes entries
            time.sleep(0.001)
        target.delete_many([key for key in content if key.endswith(".kvw")])
        target.delete(at)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    copy_store(source, target)
    sweeper.join()
    assert {key: target.get(key) for key in target.keys("")} == content
    assert collect(target).blobs == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["ls", "--store", "memory:"], 2),
        (["cp", "memory:", "x"], 2),
        (["cp", "/nowhere/at/all", "x"], 3),
        (["ls", "--store", "/nowhere/at/all"], 3),
        (["ls"], 2),
        (["verify", "--store", "ftp://x"], 2),
    ],
)
def test_bad_addresses_have_their_exit_codes(run, words, code):
    got, _, err = run(*words)
    assert got == code
    assert err


def test_a_full_check_holds_no_blob_in_memory(folder, content, monkeypatch):
    """Every read is at most a piece long."""
    sizes = []
    monkeypatch.setattr("kvwire.store.content_checks._PIECE_BYTES", 10_000)
    real = os.pread

    def pread(descriptor, size, offset):
        sizes.append(size)
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    for path in [*folder.rglob("*.kvp"), *folder.rglob("*.kvt")]:
        path.unlink()
    with closing(FolderStore(folder)) as store:
        assert verify_store(store, [Catalog(store)], jobs=1).objects == 2
    assert max(sizes) <= 10_000


def test_saved_prompts_are_forgotten_and_named_documents_only_when_asked(run, folder, small):
    with closing(FolderStore(folder)) as store:
        catalog, first = Catalog(store), next(iter(small.tokens))
        config = next(catalog.configurations())
        catalog.alias(catalog.by_document(config, first), "prompts/again")
    common = ("gc", "--store", folder, "--grace", "0s", "--json")
    assert run(*common, "--named")[0] == run(*common, "--keep", "much")[0] == 2
    done = json.loads(run(*common, "--keep", "0")[1])
    assert done["forgotten"]["documents"] == 0  # the document of that name needs its blob
    assert names(small) < {row["id"] for row in rows(run("ls", "--store", folder, "--json")[1])}
    code, _, err = run(*common, "--unused", "0s", "--named")
    assert code == 2
    assert "--yes" in err
    done = json.loads(run(*common, "--unused", "0s", "--named", "--yes")[1])
    assert done["forgotten"]["documents"] == 3
    assert done["forgotten"]["left"] == 0
    assert done["blobs"] == 2
    assert [row["id"] for row in rows(run("ls", "--store", folder, "--json")[1])] == ["text alone"]
    assert "0 bytes are left" in run("gc", "--store", folder, "--keep", "1GB")[1]
