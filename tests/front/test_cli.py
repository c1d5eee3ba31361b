from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file

from kvwire import Corpus, open_store
from kvwire.cli.printing import print_answer
from kvwire.codec import read_header
from kvwire.comparison.run import run_demo
from kvwire.errors import ArgumentError
from kvwire.runtime.answer import Timing
from kvwire.runtime.text_files import read_texts, token_ids
from kvwire.types import ChunkId, Decision

from .answers import troubles

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def texts(tmp_path_factory, documents):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in documents.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


@pytest.fixture(scope="session")
def filled(tmp_path_factory, small):
    """A folder store with the small corpus."""
    from kvwire.runtime.corpus import Corpus, Document
    from kvwire.store import FolderStore

    folder = tmp_path_factory.mktemp("store")
    corpus = Corpus(small.engine, FolderStore(folder))
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    return folder


@pytest.fixture
def store(filled, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(filled, tmp_path / "store"))


def test_control_tokens_and_byte_order_marks_are_read_right_in_documents(run, tmp_path, demo_model, engine):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_bytes(b"\xef\xbb\xbf" + b"A bell rang.<|eos|> It rang again. " * 9)
    common = ["--model", demo_model, "--store", tmp_path / "store"]
    code, *_ = run("encode", tmp_path / "texts", *common, "--index", "kvwire")
    assert code == 0
    ids = Corpus(engine, open_store(f"file://{tmp_path / 'store'}")).decode("a").token_ids
    assert 1 not in ids
    assert engine.detokenize(ids) == "A bell rang.<|eos|> It rang again. " * 9


def test_encode_then_skip_then_inspect_then_ask(run, texts, tmp_path, demo_model):
    common = ["--model", demo_model, "--store", tmp_path / "new"]
    code, out, _ = run("encode", texts, *common, "--json")
    report = json.loads(out)
    assert code == 0
    assert [row["skipped"] for row in report["documents"]] == [False, False]
    bits = [level["bits_per_element"] for level in report["documents"][0]["levels"]]
    assert bits == sorted(bits)
    assert 0.01 < bits[0] < bits[-1] < 5

    code, out, _ = run("encode", texts, *common, "--json")
    assert [row["skipped"] for row in json.loads(out)["documents"]] == [True, True]

    name = report["documents"][0]["id"]
    code, out, _ = run("inspect", name, *common, "--json")
    assert code == 0
    assert json.loads(out)["levels"] == report["documents"][0]["levels"]

    question = ["--question", "It was plain that", "--tokens", "4"]
    code, out, _ = run(
        "ask", "--docs", name, report["documents"][1]["id"], *question, *common, "--json", "--link", "80mbit"
    )
    answer = json.loads(out)
    assert code == 0
    assert answer["text"]
    assert answer["ttft_s"] > 0
    assert {d["document"] for d in answer["decisions"]} == {row["id"] for row in report["documents"]}

    code, out, _ = run("ask", "--docs", name, *question, *common)
    assert code == 0
    assert "first token after" in out


def test_people_see_levels_and_bits(run, texts, demo_model, store):
    code, out, _ = run("encode", texts, "--model", demo_model, "--store", store)
    assert code == 0
    assert "bits/element" in out
    assert "had it already" in out


def test_a_missed_deadline_answers_and_says_so(run, store, demo_model, documents):
    code, out, err = run(
        "ask", "--docs", next(iter(documents)), "--question", "So", "--deadline", "0.0001",
        "--model", demo_model, "--store", store, "--tokens", "2",
    )  # fmt: skip
    assert code == 6
    assert "first token after" in out
    assert "deadline" in err


def test_empty_and_overlong_documents_are_left_out_and_named(run, tmp_path, demo_model, documents):
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "empty.txt").write_text("")
    (folder / "long.txt").write_text("word upon word " * 5000)
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "good.txt").write_text(next(iter(documents.values()))[:800])
    code, out, err = run("encode", folder, "--model", demo_model, "--store", tmp_path / "s", "--json")
    report = json.loads(out)
    assert code == 9
    assert report["error"]["kind"] == "PartialError"
    assert [row["id"] for row in report["documents"]] == ["good"]
    assert set(report["failures"]) == {"empty", "long", "latin"}
    assert "UTF-8" in err
    assert "window" in err
    assert "split" in err
    assert "empty" in err


def test_enormous_texts_are_left_out_before_they_are_read_or_tokenised(run, tmp_path, demo_model, documents):
    folder = tmp_path / "large"
    folder.mkdir()
    with (folder / "gigabyte.txt").open("wb") as file:
        file.truncate(1 << 30)
    (folder / "long.txt").write_text("The old toll gate stood at the end of the lane. " * 1_000_000)
    (folder / "good.txt").write_text(next(iter(documents.values()))[:800])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code, out, err = run("encode", folder, "--model", demo_model, "--store", tmp_path / "s", "--json")
    assert code == 9
    assert [row["id"] for row in json.loads(out)["documents"]] == ["good"]
    assert "gigabyte.txt is larger than 64 MiB" in err
    assert "tokens or more do not fit" in err
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in KiB: 48 MB of text took 8 GB


def test_a_text_is_tokenised_no_further_than_it_takes_to_see_that_it_does_not_fit():
    seen = []

    def words(text):
        seen.append(len(text))
        return text.split()

    assert token_ids(words, 10, "a b c") == ["a", "b", "c"]
    assert token_ids(words, 10, "longer " * 10) == ["longer"] * 10
    assert seen == [5, 70]
    seen.clear()
    assert len(token_ids(words, 10, "word " * 1000)) > 10
    assert seen == [80]
    seen.clear()
    assert token_ids(words, 10, "w" * 1000) == ["w" * 1000]  # a text of few long words fits
    assert seen == [80, 320, 1000]


def test_line_ends_are_read_alike(tmp_path):
    (tmp_path / "d.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert read_texts([str(tmp_path)]) == {"d": "one\ntwo\nthree\n"}


def test_texts_that_are_not_asked_for_are_not_read(tmp_path):
    (tmp_path / "d.txt").write_text("one")
    (tmp_path / "other.txt").write_bytes(b"\xff")
    assert read_texts([str(tmp_path)], ["d", "gone"]) == {"d": "one"}


def test_files_whose_names_are_no_text_are_left_out_and_named(run, tmp_path, demo_model, documents):
    folder = tmp_path / "mixed"
    folder.mkdir()
    text = next(iter(documents.values()))[:800]
    for name in (b"caf\xe9.txt", b"two\nlines.txt", b"\x1b[31m.md", "good שלום.txt".encode()):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text(text)
    common = ("--model", demo_model, "--store", tmp_path / "s")
    code, out, err = run("encode", folder, *common)
    assert code == 9
    assert out.startswith("good שלום: ")
    assert "kvwire: caf\\udce9: its name holds U+DCE9, half of a surrogate pair" in err
    assert "kvwire: two\\nlines: its name holds U+000A, a control character; rename the file" in err
    assert "kvwire: \\x1b[31m: its name holds" in err
    assert err.splitlines()[-1] == "kvwire: 3 of 4 documents were left out"
    code, out, _ = run("encode", folder, *common, "--json")
    assert code == 9
    assert set(json.loads(out)["failures"]) == {"caf\udce9", "two\nlines", "\x1b[31m"}


@pytest.mark.parametrize(
    ("words", "code", "say"),
    [
        (["encode", "/nowhere", "--model", "{model}", "--store", "memory:"], 3, "neither a file nor a folder"),
        (["encode", "{texts}", "--model", "/nowhere", "--store", "{store}"], 3, "config.json is missing"),
        (["encode", "{texts}", "--model", "{model}", "--store", "memory:"], 2, "memory store ends"),
        (["serve", "--store", "/nowhere/at/all"], 3, "not a folder"),
        (["serve", "--store", "{store}", "--port", "99999"], 2, "65535"),
        (["ask", "--docs", "x", "--question", "y", "--model", "m", "--store", "s", "--deadline", "-1"], 2, "deadline"),
        (["ask", "--docs", "x", "--question", "y", "--model", "{model}", "--store", "{store}"], 3, "encode it first"),
        (["ask", "--docs", "x", "--question", "y", "--model", "{model}", "--store", "ftp://x"], 2, "cannot open"),
        (
            ["ask", "--docs", "x", "--question", "y", "--model", "{model}", "--store", "{store}", "--link", "fast"],
            2,
            "not a link",
        ),
        (
            ["ask", "--docs", "x", "--question", "y", "--model", "{model}", "--store", "http://127.0.0.1:9"],
            7,
            "127.0.0.1:9",
        ),
        (["inspect", "nothing.kvw"], 3, "no file"),
        (["serve", "--store", "{store}", "--host", "0.0.0.0"], 5, "token"),
        (["token", "--tenant", ""], 2, "1 to 4096 characters"),
        (["encode"], 2, "Missing"),
        (["demo", "--model", "/nowhere"], 3, "no folder"),
    ],
)
def test_clear_errors(run, words, code, say, demo_model, texts, store):
    places = {"model": demo_model, "texts": texts, "store": store}
    got, _, err = run(*[word.format(**places) for word in words])
    assert got == code, err
    assert say in err
    assert "Traceback" not in err


def test_json_errors(run):
    code, out, _ = run("inspect", "nothing.kvw", "--json")
    assert code == 3
    assert json.loads(out)["error"]["kind"] == "NotFoundError"


def _blob(store):
    return next(iter(sorted(store.rglob("*.kvw"))))


@pytest.mark.parametrize(
    ("damage", "code", "say"),
    [
        (lambda data: data[:40], 4, "ends within its header"),
        (lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:], 4, "checksum"),
        (lambda data: data[:8] + b"\x09\x00" + data[10:], 4, "upgrade"),
        (lambda data: b"GIF89a" + data[6:], 4, "signature"),
        (lambda data: data[: len(data) // 2], 4, "ends after"),
        (lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], 4, "checksum"),
    ],
)
def test_inspect_of_damaged_blobs(run, store, tmp_path, damage, code, say):
    path = tmp_path / "damaged.kvw"
    path.write_bytes(damage(_blob(store).read_bytes()))
    got, _, err = run("inspect", path)
    assert got == code
    assert say in err


def test_a_damaged_head_needs_texts(run, store, texts, demo_model, documents):
    for path in store.rglob("*.kvw"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(bytes(data))
    words = [
        "ask",
        "--docs",
        next(iter(documents)),
        "--question",
        "So",
        "--model",
        demo_model,
        "--store",
        store,
        "--tokens",
        "2",
    ]
    code, _, err = run(*words)
    assert code == 0
    assert "checksum" in err
    for path in store.rglob("*.kvt"):
        path.unlink()
    code, _, err = run(*words)
    assert code == 4
    assert "checksum" in err
    code, _, err = run(*words, "--texts", texts)
    assert code == 0
    assert "recomputed: " in err


def test_a_lost_profile_is_recomputed_around_and_then_healed(run, store, texts, demo_model, documents):
    (profile,) = store.rglob("*.kvp")
    data = bytearray(profile.read_bytes())
    data[3000] ^= 1  # in the first section, which every load reads
    profile.write_bytes(data)
    ask = ["ask", "--docs", next(iter(documents)), "--question", "So", "--tokens", "2"]
    common = ["--model", demo_model, "--store", store]
    code, _, err = run(*ask, *common)
    assert code == 0
    assert "recomputed" in err
    code, _, err = run("encode", texts, *common)
    assert code == 4  # it may be whole for everybody else: nothing is replaced by itself
    assert "verify --delete-damaged" in err
    assert run("encode", texts, *common, "--force")[0] == 0
    code, _, err = run(*ask, *common)
    assert code == 0
    assert not troubles(err.splitlines())


def test_encoding_again_heals_a_damaged_blob(run, store, texts, demo_model):
    path = _blob(store)
    sound = path.read_bytes()
    path.write_bytes(sound[:-100])
    code, out, _ = run("encode", texts, "--model", demo_model, "--store", store, "--json")
    assert code == 0
    assert sorted(row["skipped"] for row in json.loads(out)["documents"]) == [False, True]
    assert path.read_bytes() == sound


def test_a_tiny_first_document_does_not_rule(run, tmp_path, texts, demo_model):
    """One token says nothing about a model, a few lines say little: more text makes a better profile."""
    (tmp_path / "a").mkdir()
    common = ["--model", demo_model, "--store", tmp_path / "s", "--json"]
    for text in ("The", "The old clock in the hall struck nine, and nobody stirred. " * 8):
        (tmp_path / "a" / f"{len(text)}.txt").write_text(text)
        code, out, _ = run("encode", tmp_path / "a", *common)
        assert code == 0
        assert all(row["levels"][3]["measured_error"] < 0.01 for row in json.loads(out)["documents"])
    code, out, _ = run("encode", texts, *common)
    for row in json.loads(out)["documents"]:
        assert row["levels"][0]["bits_per_element"] < 0.5
        assert row["levels"][0]["measured_error"] < 0.3


def test_a_store_of_another_model(run, store, demo_model, tmp_path, documents):
    """The same layout with other weights: its caches must not be found."""
    other = Path(shutil.copytree(demo_model, tmp_path / "other"))
    weights = {name: tensor * 2 for name, tensor in load_file(other / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    code, _, err = run("ask", "--docs", next(iter(documents)), "--question", "So", "--model", other, "--store", store)
    assert code == 3
    assert "with this very model" in err


def test_a_missing_tokenizer(run, demo_model, texts, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(demo_model / name, bare / name)
    code, _, err = run("encode", texts, "--model", bare, "--store", tmp_path / "s")
    assert code == 3
    assert "tokenizer.json" in err


def test_a_full_disk(run, demo_model, texts, tmp_path, monkeypatch):
    def full(*_args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    code, _, err = run("encode", texts, "--model", demo_model, "--store", tmp_path / "s")
    assert code == 7
    assert "space" in err or "full" in err
    assert not [path for path in (tmp_path / "s").rglob("*") if path.suffix == ".json"]


def test_serve_as_a_process(store):
    command = [sys.executable, "-P", "-m", "kvwire", "serve", "--store", store.as_uri(), "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = json.loads(process.stdout.readline())["url"]
        key = _blob(store).relative_to(store).as_posix()
        request = urllib.request.Request(f"{url}/{key}", headers={"Range": "bytes=0-99999"})
        with urllib.request.urlopen(request) as answer:
            assert answer.status == 206
            assert read_header(answer.read()).tokens > 0
        with urllib.request.urlopen(f"{url}/healthz") as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_demo_on_a_folder_of_ones_own(small, tmp_path, capfd):
    """A user's texts and model, no questions file, two quick links."""
    report = run_demo(
        small.engine, small.texts, out=tmp_path, links=["a=400mbit,1ms", "b=40mbit,5ms"], say=lambda _: None
    )
    assert "kvwire.access" not in capfd.readouterr().err  # its server's log is not what a user came to see
    assert report == json.loads((tmp_path / "demo.json").read_text())
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert [row["name"] for row in report["links"]] == ["a", "b"]
    for row in report["links"]:
        assert set(row["ttft_s"]) == {"text", "raw", "kvwire"}
        assert row["kl"] < 0.05  # of a profile that was fitted on half of three short texts
        assert row["bytes"]["kvwire"] * 2 < row["bytes"]["raw"]  # whichever levels this machine had time for
        assert row["decisions"]
    assert set(report["encode"]["bits_per_element"]) == {"coarse", "standard", "fine", "finer", "finest"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "not valid JSON at line 1"),
        ("[" * 100_000, "deeply nested"),
        ('[{"documents": ["a"], "question": "So", "question": "Who?"}]', "no repeated names"),
        ('[{"documents": NaN, "question": "So"}]', "finite numbers"),
        ('[{"documents": ["a"]}]', "question"),
        ("{}", "no questions at all"),
    ],
)
def test_a_damaged_file_of_questions_is_refused_before_anything_is_encoded(small, tmp_path, text, says):
    path = tmp_path / "questions.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match=says):
        run_demo(small.engine, small.texts, questions=str(path), out=tmp_path, say=lambda _: None)


def test_rare_documents_are_kept_as_text_and_encoded_once_they_were_asked_for(run, tmp_path, texts, demo_model):
    store, uses = tmp_path / "store", tmp_path / "uses"
    encode = ["encode", texts, "--model", demo_model, "--store", store, "--encode-after", 1, "--uses", uses, "--json"]
    code, out, err = run(*encode)
    assert (code, err.count("Error")) == (0, 0)
    assert all(row["text_only"] for row in json.loads(out)["documents"])
    assert not list(store.rglob("*.kvw"))
    code, _, err = run("inspect", json.loads(out)["documents"][0]["id"], "--model", demo_model, "--store", store)
    assert code == 3
    assert "kept as text" in err
    name = json.loads(out)["documents"][0]["id"]
    words = ["ask", "--docs", name, "--question", "So", "--model", demo_model, "--store", store, "--tokens", 2]
    code, out, err = run(*words, "--uses", uses)
    assert code == 0
    assert "recomputed: " not in err  # nothing was missed: that is how it is kept
    code, out, _ = run(*encode)
    assert [("levels" in row, row["skipped"]) for row in json.loads(out)["documents"]] == [(True, False), (False, True)]
    assert len(list(store.rglob("*.kvw"))) == 1
    code, _, err = run(*encode[:6], "--encode-after", 1)
    assert code == 2
    assert "uses" in err


def test_an_objective_and_a_ceiling_are_passed_on(run, store, demo_model, documents):
    words = ["ask", "--docs", next(iter(documents)), "--question", "So", "--model", demo_model, "--store", store]
    words += ["--tokens", "2"]
    code, out, _ = run(*words, "--deadline", "60", "--ceiling", "2", "--json")
    assert code == 0
    assert {d["level"] for d in json.loads(out)["decisions"]} <= {0, 1, 2, None}
    code, out, _ = run(*words, "--deadline", "60", "--objective", "cheapest", "--json")
    assert code == 0
    assert {d["level"] for d in json.loads(out)["decisions"]} == {None}  # in a minute all can be computed
    code, _, err = run(*words, "--objective", "quality")
    assert code == 2
    assert "needs a deadline" in err
    code, _, err = run(*words, "--ceiling", "1", "--floor", "2")
    assert code == 2
    assert "ceiling" in err


def test_of_a_chunk_that_was_used_at_a_lower_level_nobody_says_that_it_was_recomputed(capsys):
    actions = (("fetch", 2), ("recompute", None), ("fetch", 0), ("recompute", None))
    decisions = tuple(
        Decision(ChunkId(at // 2, at % 2), action, level, "") for at, (action, level) in enumerate(actions)
    )
    misses = ("a chunk 0: level 3 is damaged", "a chunk 1: lost", "b: its head is damaged")
    answer = SimpleNamespace(
        decisions=decisions, misses=misses, timing=Timing(0, 0, 0, 0, 0, 0), bytes=0, reason="", text="",
        repair=None, link_warning="", computed=0, shifted=0, reused=None, expected_kl=0.0, document_kl=(0.0, 0.0),
    )  # fmt: skip
    print_answer(["a", "b"], answer, as_json=False)
    lines = capsys.readouterr().err.splitlines()
    said = ("used at level 2", "recomputed", "used at level 0 and recomputed in part")
    assert lines == [f"kvwire: {words}: {miss}" for words, miss in zip(said, misses, strict=True)]
