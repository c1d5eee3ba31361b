"""The connector inside vLLM itself: runs where vLLM is installed, see ``make test-engines``."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

from kvwire.controller import CostModel, DecodeCost, PrefillCost
from kvwire.engines.transformers import open_engine
from kvwire.engines.vllm.requests import PARAMS, body_of, entries_of, salt_of
from kvwire.reuse import LinkedPrompt, link
from kvwire.runtime.corpus import Document
from kvwire.runtime.kept import RepairKeeper
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings
from kvwire.store import FolderStore
from kvwire.transport.testing import serving
from kvwire.vllm import Choice, request_body

from .inside import CLOSE, LENGTHS, QUESTION, Place, distance, encoded, save_model, serving_llm

pytestmark = pytest.mark.filterwarnings("default")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[(32, "http"), (128, "file")], ids=["32-http", "128-file"])
def place(request, model, tmp_path_factory):
    block, scheme = request.param
    root = tmp_path_factory.mktemp("store")
    engine = open_engine(model, dtype=torch.float32)
    with ExitStack() as stack:
        store = stack.enter_context(closing(FolderStore(root)))
        corpus = encoded(engine, store)
        url = stack.enter_context(serving(store)) if scheme == "http" else f"file://{root}"
        with serving_llm(model, url, block_size=block) as llm:
            yield Place(llm, engine, corpus, root, block, stack)


def test_linked_documents_are_those_of_transformers_and_stay_apart(place):
    body = place.body("abc", 2)
    plain = {"prompt": body["prompt"]}
    exact, linked = place.expected(body["prompt"]), place.expected(body["prompt"], place.linked("abc", 2))
    ((before, *_),) = place.ask(plain | {"cache_salt": "other"})
    assert distance(before, exact) <= 1e-5
    ((first, tokens, told, cached),) = place.ask(body)
    assert distance(first, linked) <= CLOSE < distance(first, exact)
    assert cached == told["promised_tokens"] == told["loaded_tokens"] == 748
    assert (told["lost_tokens"], told["level"]) == (0, 2)
    assert told["bytes"] > 0
    ((again, same, told, again_cached),) = place.ask(body)
    assert same == tokens
    assert distance(again, linked) <= CLOSE
    assert told.get("promised_tokens", 0) < place.block  # the rest is in vLLM's own memory
    assert again_cached == 748
    for salt in (None, "a third"):
        ((after, *_),) = place.ask(plain | {"cache_salt": salt})
        assert distance(after, exact) <= 1e-5


@pytest.mark.parametrize("salt", [None, "guessed"])
def test_a_request_without_its_salt_is_computed_and_told_it(place, salt):
    body = place.body("ba", 1)
    ((first, _, told, _),) = place.ask(body | {"cache_salt": salt})
    assert distance(first, place.expected(body["prompt"])) <= 1e-5
    assert f'"cache_salt": "{body["cache_salt"]}"' in told["refused"]
    assert "promised_tokens" not in told


def test_wrong_parameters_are_told(place):
    body = place.body("a", 1)
    ((first, _, told, _),) = place.ask(body | {"kv_transfer_params": {PARAMS: {"documents": ["a"], "level": -1}}})
    assert "level is a whole number" in told["refused"]
    assert distance(first, place.expected(body["prompt"])) <= 1e-5


def test_documents_behind_those_that_are_loaded_see_them(place):
    body = request_body(place.corpus, Choice(("d", "b"), level=1), list(QUESTION), computed=("a",))
    ((first, _, told, _),) = place.ask(body)
    assert told["promised_tokens"] == LENGTHS["d"] + LENGTHS["b"]
    assert distance(first, place.expected(body["prompt"], place.linked("db", 1))) <= CLOSE


def test_kept_repairs_are_those_of_transformers(place):
    """Rows that kvwire's own loader repaired and kept, laid over linked documents; without the word, none."""
    chosen = LoadSettings(repair=0.2, quality_floor=2, keep_repairs=True)
    costs = CostModel(PrefillCost(5.0, 0.01), DecodeCost(5e-4, 1e-5))  # text is slow: blobs are fetched
    with Loader(place.engine, place.corpus, costs=costs, settings=chosen) as loader:
        assert len(loader.ask(("c", "a", "b"), list(QUESTION)).repair.rows)
    body = request_body(place.corpus, Choice(("c", "a", "b"), level=2, repair="kept"), list(QUESTION))
    linked, entries = place.linked("cab", 2), [place.corpus.find(name) for name in "cab"]
    blind = place.expected(body["prompt"], linked)
    catalog, config = place.corpus.catalog, place.corpus.meta.config_digest()
    entry = catalog.kept.find(config, [each.token_digest for each in entries])
    rows = RepairKeeper(place.corpus, catalog.store, 1 << 30).read(entry, [each.tokens for each in entries])
    rows.write(LinkedPrompt([each.tokens for each in entries], linked.meta, cache=linked))
    right = place.expected(body["prompt"], linked)
    received = []
    for promised in (748, 748 % place.block):  # the second time vLLM has the whole blocks itself
        ((first, _, told, _),) = place.ask(body)
        assert distance(first, right) <= CLOSE < distance(first, blind)
        assert told["promised_tokens"] == promised
        received.append(told["bytes"])
    ((first, _, told, _),) = place.ask(place.body("cab", 2))
    assert distance(first, blind) <= CLOSE
    assert received[0] == told["bytes"] + sum(part.size for part in entry.parts)
    ((first, _, told, _),) = place.ask(body | {"cache_salt": place.body("cab", 2)["cache_salt"]})
    assert f'"cache_salt": "{body["cache_salt"]}"' in told["refused"]
    ((first, *_),) = place.ask({"prompt": body["prompt"]})
    assert distance(first, place.expected(body["prompt"])) <= 1e-5


def kept(place, body, names, level, front):
    """What is right where only the front of the documents could be loaded, cut to whole blocks."""
    whole = front // place.block * place.block
    return place.expected(body["prompt"], place.linked(names, level).slice(0, whole) if whole else None)


def test_a_flipped_byte_costs_what_follows_it(place):
    body = place.body("acb", 1)
    entry = place.corpus.find("c")
    info = place.corpus.read_header(entry)
    path = next(place.root.rglob(entry.blob_key.rpartition("/")[2]))
    sound = path.read_bytes()
    damaged = bytearray(sound)
    damaged[info.segments[1][0].offset + 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(damaged)
    try:
        ((first, _, told, _),) = place.ask(body)
    finally:
        path.write_bytes(sound)
    expected = kept(place, body, "acb", 1, LENGTHS["a"] + 64)
    assert distance(first, expected) <= CLOSE
    assert told["promised_tokens"] == 748


def test_a_missing_document_costs_what_follows_it(place):
    choice = Choice(("b", "absent", "a"), level=1)
    texts = {name: place.corpus.text(place.corpus.find(name)) for name in "ba"}
    prompt = [*texts["b"], *range(30, 60), *texts["a"], *QUESTION]
    entries = entries_of(place.corpus, choice.documents)
    salt = salt_of(choice, place.corpus.catalog.tenant, place.corpus.meta.config_digest(), entries)
    body = {"prompt": prompt, "cache_salt": salt, "kv_transfer_params": {PARAMS: choice.params()}}
    ((first, _, told, _),) = place.ask(body)
    assert "'absent' is not in the catalog" in told["trouble"]
    assert told["promised_tokens"] == LENGTHS["b"]
    assert distance(first, place.expected(prompt, place.linked("b", 1))) <= CLOSE


def test_another_prompt_than_the_documents_is_computed(place):
    body = place.body("da", 1)
    prompt = [*body["prompt"][:200], 3, *body["prompt"][201:]]
    ((first, _, told, _),) = place.ask(body | {"prompt": prompt})
    assert "from token 200 on the prompt is not the text of document 'a'" in told["trouble"]
    assert told["loaded_tokens"] == 200
    assert distance(first, place.expected(prompt, place.linked("da", 1).slice(0, 200))) <= CLOSE
    ((first, _, told, _),) = place.ask(body | {"kv_transfer_params": None})  # the salt alone
    assert distance(first, place.expected(body["prompt"])) <= CLOSE
    ((first, _, told, cached),) = place.ask(body)
    assert cached == LENGTHS["d"] + LENGTHS["a"]  # of these, only loaded rows stand under the salt
    assert distance(first, place.expected(body["prompt"], place.linked("da", 1))) <= CLOSE


def test_what_stands_before_documents_is_loaded_without_loss(place):
    head = tuple(range(400, 424))
    place.corpus.encoder().put_exact(Document("head", head))
    texts = [token for name in "ac" for token in place.corpus.text(place.corpus.find(name))]
    body = body_of(place.corpus, Choice(("a", "c"), level=2, head=24), [*head, *texts, *QUESTION], {})
    documents = [place.corpus.decode(name, 2, dtype=torch.float32) for name in "ac"]
    ((first, _, told, _),) = place.ask(body)
    assert (told["loaded_tokens"], told["level"]) == (24 + len(texts), 2)
    linked = link([*place.engine.prefill([head]), *documents])
    assert distance(first, place.expected(body["prompt"], linked)) <= CLOSE


def test_prompts_whose_every_token_is_computed_are_told_why_nothing_loads(place):
    body = place.body("db", 2)
    ((first, _, told, _),) = place.ask(body, prompt_logprobs=1)
    assert "leave them out" in told["trouble"]
    assert distance(first, place.expected(body["prompt"])) <= CLOSE
    ((_, _, told, _),) = place.ask(body)
    assert told["loaded_tokens"] == LENGTHS["d"] + LENGTHS["b"]


def test_two_hundred_requests_at_once_are_each_their_own(place):
    """Linked at several levels, plain with several salts, and some refused: all interleaved."""
    bodies = [place.body(names, level) for names in ("abc", "cab", "bd", "d") for level in (0, 1, 2)]
    expected = [
        place.expected(body["prompt"], place.linked(names, level))
        for body, (names, level) in zip(
            bodies, ((n, x) for n in ("abc", "cab", "bd", "d") for x in (0, 1, 2)), strict=True
        )
    ]
    for number in range(0, 12, 2):
        plain = {"prompt": bodies[number]["prompt"], "cache_salt": f"tenant {number}"}
        bodies += [plain, bodies[number] | {"cache_salt": None}]
        expected += [place.expected(plain["prompt"])] * 2
    order = [random.Random(8).randrange(len(bodies)) for _ in range(200)]
    answers = place.ask(*(bodies[number] for number in order), tokens=2)
    worst = max(distance(first, expected[number]) for (first, *_), number in zip(answers, order, strict=True))
    assert worst <= CLOSE


def test_a_store_that_dies_leaves_plain_answers(place):
    """The last test of a vLLM: its store is gone afterwards."""
    body = place.body("bca", 2)
    exact = place.expected(body["prompt"])
    place.stop.close()
    if place.block == 128:
        for path in place.root.rglob("*.kvw"):
            path.unlink()
    ((first, tokens, *_),) = place.ask(body)
    assert distance(first, exact) <= 1e-5
    ((_, same, *_),) = place.ask({"prompt": body["prompt"], "cache_salt": "plain"})
    assert tokens == same


def free_port():
    with closing(socket.create_server(("127.0.0.1", 0))) as found:
        return str(found.getsockname()[1])


def test_the_page_runs_as_written(tmp_path):
    """docs/vllm.md, but for the installation, a path, ports and a patience of this run's own."""
    if not (ROOT / "demo" / "model").is_dir():
        pytest.skip("needs the demonstration's model in demo/model")
    page = (ROOT / "docs" / "vllm.md").read_text(encoding="utf-8")
    commands, proxied = (part.partition("```")[0].splitlines() for part in page.split("```bash\n")[1:3])
    assert (len(commands), len(proxied)) == (5, 2)
    assert commands[0].startswith("python scripts/vllm_environment.py")
    other = {"8077": free_port(), "8078": free_port(), "file:///tmp/kvwire-vllm": f"file://{tmp_path}/kv"}
    other["--retry 60"] = "--retry 300"  # the page's two minutes may be short where others compute, too
    script = re.sub("|".join(other), lambda found: other[found[0]], "\n".join([*commands[1:], *proxied]))
    script = script.replace("body.json", f"{tmp_path}/body.json").replace("demo/", f"{ROOT}/demo/")
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euc", f"trap 'kill $(jobs -p) || true; wait' EXIT\n{script}"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | {"PATH": bin_first}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    ) as run:  # fmt: skip
        try:
            out, told_by_them = run.communicate(timeout=1800)  # minutes, but where others compute, too
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)  # vLLM would outlive the shell
    assert run.returncode == 0, told_by_them[-3000:]
    starts = [found.start() for found in re.finditer(r'\{"id"', out)]
    answers = [json.JSONDecoder().raw_decode(out[at:])[0] for at in starts]  # vLLM's log goes on behind each
    answer, through = answers
    told = answer["kv_transfer_params"]["kvwire"]
    assert through["kv_transfer_params"]["kvwire"].keys().isdisjoint({"refused", "trouble"})
    assert answer["choices"][0]["text"].startswith(through["choices"][0]["text"])
    assert "refused" not in told
    prompt = json.loads((tmp_path / "body.json").read_text(encoding="utf-8"))["prompt"]
    assert len(prompt) - 8 < told["promised_tokens"] < len(prompt)  # all but the question
    assert answer["choices"][0]["text"]
