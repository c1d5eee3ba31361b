"""Profiles out of a store: a load reads the sections that its level needs, checks each, and reads on where it must."""

from __future__ import annotations

import json

import pytest
import torch
from msgspec import structs

import kvwire
from kvwire.codec.format.arrays import describe
from kvwire.codec.profile.profile import MAGIC
from kvwire.errors import CorruptError, NotFoundError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore, MemoryStore
from kvwire.store.files.files import FileReader
from kvwire.transport import HttpStore
from kvwire.transport.testing import serving

from .tiny_engine import TinyEngine

QUESTION = "It was plain to everybody that"


class _Counted:
    def __init__(self, reader, read):
        self._reader, self._read, self.size, self.etag = reader, read, reader.size, reader.etag

    def read(self, start, end):
        data = self._reader.read(start, end)
        self._read.append((start, start + len(data)))
        return data

    def close(self):
        self._reader.close()


class Counting(MemoryStore):
    """Remembers the ranges of profiles that were read."""

    def __init__(self):
        super().__init__()
        self.read = []

    def get(self, key, start=0, end=None):
        data = super().get(key, start, end)
        if key.endswith(".kvp"):
            self.read.append((start, start + len(data)))
        return data

    def snapshot(self, key):
        found = super().snapshot(key)
        return _Counted(found, self.read) if key.endswith(".kvp") else found

    @property
    def bytes(self):
        return sum(end - start for start, end in self.read)


@pytest.fixture
def corpus(small):
    """A corpus in a counting store, as another process opens it: it has read nothing yet."""
    store = Counting()
    filled = Corpus(small.engine, store)
    filled.set_profile(small.profile)
    for _ in filled.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]):
        pass
    store.read.clear()
    return Corpus(small.engine, store)


def sections(small):
    return describe(MAGIC, small.profile.data, "profile").sections


def ask(small, corpus, level, **given):
    settings = LoadSettings(quality_floor=level, quality_ceiling=level, keep_repairs=False)
    names = list(small.tokens)[:1]
    with Loader(small.engine, corpus, settings=settings, **given) as loader:
        return loader.ask(names, small.engine.tokenize(QUESTION))


def pointer(corpus):
    return corpus.catalog.keys(corpus.meta.config_digest()).current_profile


def profile_key(small, corpus):
    return corpus.catalog.keys(corpus.meta.config_digest()).profile(small.profile.digest)


@pytest.mark.parametrize("costs", ["given", "measured"])
def test_a_load_at_level_1_reads_the_sections_that_it_needs(small, corpus, costs):
    """Also where costs are measured first, which codes and decodes at every level."""
    answer = ask(small, corpus, 1, **({"costs": small.costs} if costs == "given" else {}))
    if costs == "given":  # with measured ones a model as small as this is recomputed, and a fetch may be given up
        assert not answer.misses
        assert {d.level for d in answer.decisions} == {1}
    known, store = sections(small), corpus.catalog.store
    starts, ends = zip(*store.read, strict=True)
    assert starts == (0, *ends[:-1])  # one after the other, none twice
    assert store.bytes in {known[1].end, known[2].end}  # one more where a column beyond calibration's was coded
    assert known[2].end < len(small.profile.data)


def test_asking_at_level_1_from_the_command_line_reads_less(small, run, demo_model, tmp_path, monkeypatch):
    """What a folder gives of profiles is counted; the same question at the finest level is given more."""
    store = FolderStore(tmp_path / "store")
    filled = Corpus(small.engine, store)
    filled.set_profile(small.profile)
    names = list(small.tokens)[:1]
    assert list(filled.encode([Document(name, tuple(small.tokens[name])) for name in names]))
    store.close()
    read, as_ever = [], FileReader.read

    def counted(reader, start, end):
        data = as_ever(reader, start, end)
        read.append(len(data) * reader._key.endswith(".kvp"))
        return data

    monkeypatch.setattr(FileReader, "read", counted)
    place = ["--store", tmp_path / "store", "--model", demo_model, "--tokens", 1]
    found = {}
    for level in (1, 4):
        read.clear()
        words = ["--docs", *names, "--question", QUESTION, "--floor", level, "--ceiling", level]
        code, _, err = run("ask", *words, *place)
        assert code == 0, err
        found[level] = sum(read)
    assert 0 < found[1] < found[4] <= len(small.profile.data)


def test_finer_loads_of_the_same_process_read_the_rest(small, corpus):
    ask(small, corpus, 0, costs=small.costs)
    before = corpus.catalog.store.bytes
    assert before < len(small.profile.data)
    ask(small, corpus, 4, costs=small.costs)  # the first load's session has ended
    assert before < corpus.catalog.store.bytes < len(small.profile.data)  # encoders' metrics are nobody's here
    starts, ends = zip(*corpus.catalog.store.read, strict=True)
    assert starts == (0, *ends[:-1])


def test_what_is_decoded_lazily_is_the_same(small, corpus):
    name = next(iter(small.tokens))
    stored = corpus.catalog.store.get(corpus.find(name).blob_key)
    for level in range(5):
        lazy = corpus.decode(name, level, dtype=torch.float32)
        whole = kvwire.decode(stored, level, small.profile, dtype=torch.float32)
        assert all(map(torch.equal, [*lazy.keys, *lazy.values], [*whole.keys, *whole.values]))


def test_over_http_and_from_a_folder(small, corpus, tmp_path):
    """Ranges of one object; the rows that are here tell what was read."""
    folder = FolderStore(tmp_path / "store")
    for key in corpus.catalog.store.keys(""):
        folder.put(key, corpus.catalog.store.get(key))
    with serving(folder) as url:
        for store in (folder, HttpStore(url)):
            other = Corpus(small.engine, store)
            assert not ask(small, other, 1, costs=small.costs).misses
            group = other.profile().groups[0]
            assert small.profile.groups[0].cuts[1] <= group.ready < group.rank
            assert other.profile().data == small.profile.data


def test_without_an_outline_the_profile_is_read_whole(small, corpus):
    """Of entries that were made anew, or written before there were sections."""
    store, name = corpus.catalog.store, next(iter(small.tokens))
    entry = structs.replace(corpus.find(name), profile_outline=None)
    assert b"outline" not in entry.to_json()
    corpus.catalog.add(entry)
    corpus.catalog.profiles.set_current(corpus.meta.config_digest(), small.profile.digest)
    assert b"outline" not in store.get(pointer(corpus))
    assert not ask(small, corpus, 1, costs=small.costs).misses
    assert store.bytes == len(small.profile.data)


def changed(small, corpus, at):
    data = bytearray(small.profile.data)
    data[at] ^= 1
    corpus.catalog.store.put(profile_key(small, corpus), bytes(data))


@pytest.mark.parametrize("where", ["outline", "first", "second"])
def test_damage_is_noticed_and_told_with_what_to_do(small, corpus, where):
    known = sections(small)
    changed(small, corpus, {"outline": 50, "first": known[0].end - 1, "second": known[1].end - 1}[where])
    with pytest.raises(CorruptError, match=r"damaged or cut short .* store verify"):
        corpus.profile()
    answer = ask(small, corpus, 1, costs=small.costs)
    assert {d.action for d in answer.decisions} == {"recompute"}


@pytest.mark.parametrize("what", ["damaged", "cut", "gone"])
def test_a_section_that_is_lost_later_costs_time_only(small, corpus, what):
    """Level 4 needs sections that were not read when the profile was opened."""
    ask(small, corpus, 0, costs=small.costs)
    last = sections(small)[-2]
    if what == "damaged":
        changed(small, corpus, (last.start + last.end) // 2)
    elif what == "cut":
        corpus.catalog.store.put(profile_key(small, corpus), small.profile.data[: last.end - 1])
    else:
        corpus.catalog.store.delete(profile_key(small, corpus))
    name = next(iter(small.tokens))
    with pytest.raises(NotFoundError if what == "gone" else CorruptError, match="fit"):
        corpus.decode(name, 4)
    answer = ask(small, corpus, 4, costs=small.costs)
    assert answer.misses
    assert {d.action for d in answer.decisions} == {"recompute"}
    corpus.catalog.store.put(profile_key(small, corpus), small.profile.data)
    assert not ask(small, corpus, 4, costs=small.costs).misses


@pytest.mark.parametrize("outline", [[0, "a" * 64], [5], [True, "a" * 64], [9, "b"], "x", [1 << 40, "a" * 64]])
def test_outlines_in_the_catalog_that_are_none(small, corpus, outline):
    store, name = corpus.catalog.store, next(iter(small.tokens))
    for key in (pointer(corpus), corpus.catalog.keys(corpus.meta.config_digest()).document(name)):
        fields = json.loads(store.get(key)) | {"profile_outline": outline}
        store.put(key, json.dumps(fields).encode())
    with pytest.raises(CorruptError, match="outline"):
        corpus.profile()
    with pytest.raises(CorruptError, match="outline"):
        corpus.find(name)


def test_an_outline_of_another_profile_is_refused(small, corpus):
    with pytest.raises(CorruptError, match="damaged"):
        corpus.profile(small.profile.digest, outline=(small.profile.outline[0], "a" * 64))


def test_profiles_without_sections_are_read_as_ever():
    """Engines without statistics give profiles that predict nothing; these have sections as well."""
    engine = TinyEngine()
    corpus = Corpus(engine, Counting())
    document = Document("doc", tuple(range(50)) * 4)
    assert list(corpus.encode([document]))
    assert Corpus(engine, corpus.catalog.store).decode("doc", 1).tokens == 200
