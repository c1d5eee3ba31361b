"""Commands on stores that refuse: a bucket that may not be listed, wrong keys, another region; a plain web server."""

import functools
import json
import threading
from contextlib import closing
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvwire.comparison.run import local_server
from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import FolderStore, open_store

from ..posing_s3 import posing_s3, use_keys

ASK = ("ask", "--question", "It was plain that", "--tokens", "2", "--json")


@pytest.fixture
def pose(monkeypatch):
    use_keys(monkeypatch)
    with posing_s3() as pose:
        yield pose


@pytest.fixture
def texts(tmp_path, documents):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, text in documents.items():
        (folder / f"{name}.txt").write_text(text)
    return folder


def test_a_bucket_that_may_not_be_listed_is_written_and_asked(run, pose, texts, documents, demo_model, caplog):
    pose.allowed -= {"s3:ListBucket"}
    name, other = list(documents)[:2]
    (texts / f"{other}.txt").rename(texts.parent / f"{other}.txt")
    common = ("--model", demo_model, "--store", pose.address("p"))
    code, out, err = run("encode", texts, *common, "--json")
    assert code == 0, err
    assert [row["skipped"] for row in json.loads(out)["documents"]] == [False]
    assert len([1 for record in caplog.records if "Allow s3:ListBucket" in record.message]) == 1
    code, out, _ = run("encode", texts, *common, "--json")
    assert [row["skipped"] for row in json.loads(out)["documents"]] == [True]

    code, out, err = run(*ASK, "--docs", name, other, "--texts", texts.parent / f"{other}.txt", *common)
    assert code == 0, err
    answer = json.loads(out)
    assert {one["document"] for one in answer["decisions"]} == {name, other}
    assert {one["action"] for one in answer["decisions"] if one["document"] == other} == {"recompute"}

    code, _, err = run(*ASK, "--docs", other, *common)
    assert code == 3
    assert "check the token" not in err
    code, _, err = run("store", "ls", "--store", pose.address("p"))
    assert code == 5
    assert "s3:ListBucket" in err


def test_wrong_keys_end_commands_even_where_a_text_is_at_hand(run, pose, texts, documents, demo_model):
    pose.keys = dict.fromkeys(pose.keys, "SignatureDoesNotMatch")
    name = next(iter(documents))
    words = ("--docs", name, "--texts", texts / f"{name}.txt", "--model", demo_model, "--store", pose.address())
    code, _, err = run(*ASK, *words)
    assert code == 5
    assert "SignatureDoesNotMatch" in err


def test_a_bucket_in_another_region_is_asked(run, pose, small, demo_model):
    filled(open_store(pose.address()), small)
    pose.region = "eu-central-1"
    code, out, err = run(*ASK, "--docs", next(iter(small.tokens)), "--model", demo_model, "--store", pose.address())
    assert code == 0, err
    assert json.loads(out)["misses"] == []
    code, out, err = run("store", "ls", "--store", pose.address(), "--json")
    assert code == 0, err


def filled(store, small):
    with closing(store):
        corpus = Corpus(small.engine, store)
        corpus.set_profile(small.profile)
        list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.parametrize("catalog", ["rows", "files"])
def test_a_plain_web_server_needs_the_catalog_as_files_and_the_error_says_so(run, tmp_path, small, demo_model, catalog):
    filled(FolderStore(tmp_path, catalog=catalog), small)
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{listening.server_address[1]}"
        code, out, err = run(*ASK, "--docs", next(iter(small.tokens)), "--model", demo_model, "--store", url)
        listening.shutdown()
        thread.join()
    if catalog == "files":
        assert code == 0, err
        assert json.loads(out)["text"]
    else:
        assert code == 3
        assert "?catalog=files" in err


def test_a_server_of_the_demo_is_asked_directly(monkeypatch, tmp_path):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "elsewhere")
    FolderStore(tmp_path).put("a/k", b"x")
    with local_server(tmp_path) as url, closing(open_store(url)) as store:
        assert store.get("a/k") == b"x"
