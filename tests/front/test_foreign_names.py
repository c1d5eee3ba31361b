"""Names from strangers: commands show them on their own line and as they are, and nothing new gets such a name."""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import sys
import unicodedata
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvwire import cli
from kvwire.cli.app import main
from kvwire.cli.printing import print_answer
from kvwire.codec import Ladder, encode, read_header
from kvwire.errors import ArgumentError
from kvwire.runtime.answer import Timing
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import Catalog, CatalogEntry, FolderStore, MemoryStore, UseCounts
from kvwire.types import ChunkId, Decision

from .tiny_engine import TinyEngine

EVIL = "a\nforged: 9 tokens\x1b[31m\u202efdp.exe\x9b\u2028\u200b"
SHOWN = "a\\nforged: 9 tokens\\x1b[31m\\u202efdp.exe\\x9b\\u2028\\u200b"
LEVELS = (f"one {EVIL}", "two \udcff")
IDS = tuple(range(40))


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; gives exit code, stdout and stderr, which nothing may steer."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["kvwire", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        for shown in (out.out, out.err):
            assert not {e for e in shown if unicodedata.category(e) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - set("\n\t")
            assert not [line for line in shown.splitlines() if line.startswith("forged")]
        return code, out.out, out.err

    return call


@pytest.fixture(scope="module")
def blob():
    """A blob whose model and levels have such names, as another encoder could write it."""
    (cache,) = TinyEngine().prefill([IDS])
    return encode(replace(cache, meta=replace(cache.meta, model_id=f"model {EVIL}")), None, Ladder(3.6, LEVELS))


def written_before(store, blob):
    """An entry of such a document, as it could be written before names were looked at."""
    catalog, info, digest = Catalog(store), read_header(blob), hashlib.sha256(blob).hexdigest()
    space = catalog.keys(info.meta.config_digest())
    levels = tuple((level.name, level.cumulative_bytes) for level in info.levels)
    names = (EVIL, space.blob(digest), digest, len(blob), info.header_bytes, info.tokens, info.meta.token_digest)
    entry = CatalogEntry(*names, info.profile_digest, levels)
    store.put(entry.blob_key, blob)
    store.put(space.document(EVIL), entry.to_json())
    return catalog, space, entry


@pytest.fixture
def folder(tmp_path, blob):
    """A store with such a document, and an entry whose id is half a surrogate pair."""
    with closing(FolderStore(tmp_path / "store")) as store:
        _, space, entry = written_before(store, blob)
        broken = entry.to_json().replace(json.dumps(EVIL).encode(), b'"\\udcff"')
        store.put(space.document("another"), broken)
    return tmp_path / "store"


def test_documents_are_listed_each_on_its_line(run, folder):
    code, out, err = run("store", "ls", "--store", folder)
    assert code == 4  # the other entry
    (line,) = out.splitlines()
    assert line.endswith(f"  {SHOWN}")
    assert f"one {SHOWN},two \\udcff" in line
    assert "half a surrogate pair" in err
    row = json.loads(run("store", "ls", "--store", folder, "--json")[1].splitlines()[0])
    assert (row["id"], row["levels"]) == (EVIL, list(LEVELS))


def test_a_document_is_shown_and_removed(run, folder):
    code, out, _ = run("store", "stat", EVIL, "--store", folder)
    assert code == 0
    assert out.startswith(f"{SHOWN}: 40 tokens")
    assert f"\nmodel model {SHOWN}, profile" in out
    assert f"\none {SHOWN}" in out
    assert json.loads(run("store", "stat", EVIL, "--store", folder, "--json")[1])["document_id"] == EVIL
    assert run("store", "rm", EVIL, "--store", folder)[0] == 0
    code, _, err = run("store", "rm", EVIL, "--store", folder)
    assert code == 3
    assert SHOWN in err
    assert run("store", "stat", EVIL, "--store", folder)[0] == 3


def test_a_store_is_checked_and_collected(run, folder):
    code, _, err = run("store", "verify", "--store", folder)
    assert code == 4
    assert len(err.splitlines()) == 2  # the entry that is no text, and the sum
    assert run("store", "gc", "--store", folder)[0] in (0, 4)


def test_a_blob_file_is_inspected_and_planned(run, tmp_path, blob):
    path = tmp_path / f"{EVIL}.kvw"
    path.write_bytes(blob)
    code, out, _ = run("inspect", path)
    assert code == 0
    assert f"model model {SHOWN}" in out
    made = ("--machine", "h100", "--shape", "llama-3.1-8b", "--link", "1gbit")
    code, _, err = run("plan", path, *made)
    assert code == 8
    assert SHOWN in err
    path.write_bytes(blob[:100])
    code, _, err = run("inspect", path)
    assert code == 4


def test_messages_about_what_was_typed(run, tmp_path):
    for words in (
        ("store", EVIL),
        ("inspect", EVIL),
        ("store", "gc", "--store", tmp_path, "--grace", EVIL),
        ("plan", EVIL, "--machine", EVIL, "--shape", EVIL),
        ("store", "ls", "--store", f"ftp://{EVIL}"),
        ("simulate", "--link", EVIL),
        ("simulate", "--trace", EVIL),
        ("encode", f"{tmp_path}/\udcff", "--model", "m", "--store", tmp_path),
        ("ask", "--model", "m", "--store", tmp_path, "--floor", EVIL, "--question", "q", "--docs", "d"),
    ):
        code, _, err = run(*words)
        assert code
        assert err


def test_an_answer_keeps_its_lines_and_nothing_else(capsys):
    names = (EVIL,)
    decisions = (Decision(ChunkId(0, 0), "recompute", None, f"because {EVIL}"),)
    answer = SimpleNamespace(
        timing=Timing(1, 1, 1, 1, 1, 1), decisions=decisions, misses=(f"{EVIL}: lost",), bytes=0, reason=EVIL,
        text="first line\nsecond \x1b[2Jline", repair=None, link_warning="", computed=0, shifted=0, reused=None,
        document_kl=(None,), expected_kl=None,
    )  # fmt: skip
    print_answer(names, answer, as_json=False)
    out = capsys.readouterr()
    assert out.out.splitlines()[0].startswith(f"{SHOWN} chunk 0: ")
    assert out.out.endswith("first line\nsecond \\x1b[2Jline\n")
    assert out.err == f"kvwire: recomputed: {SHOWN}: lost\n"


def test_what_is_logged_without_handlers_is_shown(run, capsys, monkeypatch):
    run("store")  # whatever it is, it prepares the output
    logger = logging.getLogger("kvwire.foreign")
    monkeypatch.setattr(logger, "propagate", False)
    logger.warning("name %s", EVIL)
    assert capsys.readouterr().err == f"name {SHOWN}\n"


def test_every_line_goes_through_one_place():
    faults = []
    for path in Path(cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in ("print", "click.echo", "click.secho", "sys.stdout.write", "sys.stderr.write"):
                faults.append(f"{path.name}:{node.lineno}: {name}")
    assert {fault.partition(":")[0] for fault in faults} == {"say.py"}


def test_nothing_new_gets_such_a_name(blob):
    for name in ("a\nb", "\x1b", "a\u202eb", "\udcff", "a\u2028"):
        store = MemoryStore()
        corpus = Corpus(TinyEngine(), store, uses=UseCounts())
        for options in ({}, {"encode_after": 1}):
            with pytest.raises(ArgumentError, match="name it otherwise"):
                next(corpus.encode([Document("good", IDS), Document(name, IDS)], **options))
        with pytest.raises(ArgumentError, match=r"U\+|half"):
            corpus.catalog.put_blob("c" * 64, blob, document_id=name, header_bytes=1, tokens=1)
        with pytest.raises(ArgumentError, match=r"U\+"):
            corpus.catalog.add_text("c" * 64, name, IDS)
        assert not list(store.keys(""))
    with pytest.raises(ArgumentError, match="the level's name"):
        Catalog(MemoryStore()).put_blob("c" * 64, blob, document_id="d", header_bytes=1, tokens=1, levels=[("\x1b", 1)])


def test_what_was_written_before_is_read(blob):
    store = MemoryStore()
    catalog, space, entry = written_before(store, blob)
    assert catalog.by_document(space, EVIL) == entry
    assert list(catalog.documents(space)) == [entry]
    with pytest.raises(ArgumentError, match="U\\+000A"):
        catalog.add(entry)
    assert catalog.alias(entry, "a good name").document_id == "a good name"
    assert catalog.remove(space, EVIL)


def test_a_kept_text_of_such_a_name_is_not_promoted_and_holds_nobody_up():
    uses = UseCounts()
    corpus = Corpus(TinyEngine(), MemoryStore(), uses=uses)
    list(corpus.encode([Document("good", IDS)], encode_after=1))
    for name in ("good", EVIL):
        corpus.count_use(name)
    assert [one.entry.document_id for one in corpus.promote(1)] == ["good"]


def test_two_names_that_look_alike_are_listed_apart(run, small, tmp_path):
    names = ("caf\u00e9", "cafe\u0301")
    corpus = Corpus(small.engine, FolderStore(tmp_path / "store"))
    corpus.set_profile(small.profile)
    ids = next(iter(small.tokens.values()))[:40]
    assert len(list(corpus.encode([Document(name, (*ids, at)) for at, name in enumerate(names)]))) == 2
    code, out, _ = run("store", "ls", "--store", f"file://{tmp_path}/store")
    assert code == 0
    assert {line.split()[-1] for line in out.splitlines() if "caf" in line} == {"caf\u00e9", "cafe\\u0301"}


def test_a_miss_of_the_load_as_a_whole_is_not_called_recomputed(capsys):
    answer = SimpleNamespace(
        timing=Timing(1, 1, 1, 1, 1, 1), decisions=(Decision(ChunkId(0, 0), "fetch", 2, "soonest"),),
        misses=("the report on links was not read", "doc: a level was lost"), bytes=0, reason="in time", text="",
        repair=None, link_warning="", computed=0, shifted=0, reused=None,
        document_kl=(None,), expected_kl=None,
    )  # fmt: skip
    print_answer(("doc",), answer, as_json=False)
    told = capsys.readouterr().err.splitlines()
    assert told == ["kvwire: the report on links was not read", "kvwire: used at level 2: doc: a level was lost"]
