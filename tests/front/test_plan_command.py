"""``kvwire plan``: real headers, real costs."""

from __future__ import annotations

import json
from functools import partial

import pytest

from kvwire import controller as ctl
from kvwire.cli.plan_inputs import COMPUTE
from kvwire.controller.simulator import costs, machine_named, model_named
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.estimates_file import EstimatesFile, link_key
from kvwire.runtime.settings import LoadSettings, controls_of
from kvwire.store import FolderStore
from kvwire.whatif.plan import plan_load
from kvwire.whatif.situation import Details, PlanScenario, known_link

MODEL, MACHINE = model_named("llama-3.1-8b"), machine_named("h100")
COSTS = costs(MODEL, MACHINE)
SETTINGS = ctl.ControllerSettings(workers=2, decode_batch=8)
BANDWIDTH, RTT_S = 125e6, 0.002


@pytest.fixture
def run(run):
    return partial(run, "plan")


@pytest.fixture(scope="module")
def folder(small, tmp_path_factory):
    """A store with the small corpus, and one document that is text alone."""
    folder = tmp_path_factory.mktemp("planned")
    corpus = Corpus(small.engine, FolderStore(folder))
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    return folder


@pytest.fixture
def estimates(small, tmp_path):
    """A file with the small engine's costs, which are fixed, as a plan prints them."""
    path = tmp_path / "estimates.json"
    state = known_link(small.costs, 1e6, 0.01).to_state()
    path.write_text(json.dumps({"estimates": {"version": 1, "engine": state["engine"]}}))
    return path


def test_real_heads_are_planned_without_weights(run, small, folder, estimates):
    names = list(small.tokens)
    words = ("--docs", *names, "--store", folder, "--estimates", estimates, "--link", "40kbit,10ms", "--json")
    words += ("--max-kl", "none")
    code, out, _ = run(*words)
    report = json.loads(out)
    assert code == 0
    assert report["documents"] == names
    assert report["link"] == {"bandwidth": 5000.0, "ttfb_s": 0.01}

    corpus = Corpus(small.engine, FolderStore(folder))
    infos = [corpus.read_header(corpus.find(name)) for name in names]
    details = Details(header_bytes=sum(info.header_bytes for info in infos))
    inputs = tuple((ctl.DocumentPlanInput.from_blob(info),) for info in infos)
    settings = controls_of(LoadSettings(), on_gpu=False)
    estimates = known_link(small.costs, 5000.0, 0.01)
    plan = plan_load(PlanScenario(inputs, estimates, settings=settings, details=details), compare=False)
    assert report["prediction"]["ttft_s"] == pytest.approx(plan.prediction.ttft_s)
    assert [(row["document"], row["chunk"], row["level"]) for row in report["chunks"]] == [
        (names[chunk.document], chunk.chunk, chunk.level) for chunk in plan.chunks
    ]
    assert all((row["action"] == "recompute") == (row["level"] is None) for row in report["chunks"])
    assert report["prediction"]["headers_s"] == pytest.approx(0.01 + details.header_bytes / 5000)
    for new, old in (("headers_s", "heads_s"), ("fetch_s", "link_s")):  # both spellings for one version
        assert report["prediction"][new] == report["prediction"][old]
    kl = [level.predicted_kl for level in infos[0].levels]
    level_1 = next(each for each in report["alternatives"] if each["name"].startswith("level 1"))
    assert min(kl) < report["prediction"]["kl"] <= max(level.predicted_kl for i in infos for level in i.levels)
    assert level_1["kl"] < max(kl)
    raw = next(each for each in report["alternatives"] if each["name"] == "raw cache")
    assert raw["bytes"] == sum(2 * info.tokens * info.meta.elements_per_token for info in infos)

    again = json.loads(run(*words)[1])
    assert again == report


def test_lanes_and_batches_travel_with_estimates(run, small, folder, estimates):
    words = ("--docs", *small.tokens, "--store", folder, "--estimates", estimates, "--link", "1mbit", "--no-compare")
    here = controls_of(LoadSettings(), on_gpu=False)
    assert json.loads(run(*words, "--json")[1])["compute"] == {name: getattr(here, name) for name in COMPUTE}
    state = json.loads(estimates.read_text())
    other = {"workers": 2, "decode_batch": 16, "decode_threads": 4}
    estimates.write_text(json.dumps(state | {"compute": other}))
    assert json.loads(run(*words, "--json")[1])["compute"] == other
    assert json.loads(run(*words, "--workers", 1, "--json")[1])["compute"]["workers"] == 1
    for bad in ([], {}, other | {"workers": 3}, other | {"workers": 1.0}, {"workers": 1, "decode_batch": 1}):
        estimates.write_text(json.dumps(state | {"compute": bad}))
        code, _, err = run(*words)
        assert (code, "compute must hold" in err) == (4, True), bad


def test_a_link_outside_the_searched_range_is_told(run):
    words = ("--context", "1k", "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "1kbit,2ms")
    code, out, _ = run(*words)
    assert code == 0
    assert "outside the range that was searched, 8 kbit/s to" in out
    assert "some chunk changes" not in out


def test_the_engine_is_measured_where_nothing_is_known_of_it(run, small, folder, demo_model):
    (name, *_) = small.tokens
    code, out, _ = run(
        "--docs", name, "--store", folder, "--model", demo_model, "--link", "10mbit", "--no-compare", "--json"
    )
    report = json.loads(out)
    assert code == 0
    prefill = report["estimates"]["engine"]["prefill"]
    assert sum(prefill[part] for part in ("base_s", "token_s", "pair_s")) > 0  # noise may leave one of them at 0
    assert report["alternatives"] == []


def test_what_is_remembered_of_the_link_is_used(run, small, folder, estimates, tmp_path, monkeypatch):
    words = ("--docs", *small.tokens, "--store", folder, "--estimates", estimates, "--no-compare", "--json")
    code, out, _ = run(*words)
    assert code == 2
    assert "nothing is remembered" in json.loads(out)["error"]["message"]

    known = ctl.Estimates(small.costs, 1e6, 0.01)
    for number in range(40):
        known.bandwidth.add(20_000, number * 0.01, number * 0.01 + 0.01)
    known.ttfb.add(0.004)
    EstimatesFile(tmp_path / "known.json").remember(link_key(folder.as_uri()), "some engine", known)
    monkeypatch.setenv("KVWIRE_ESTIMATES", str(tmp_path / "known.json"))
    code, out, _ = run(*words)
    assert code == 0
    assert json.loads(out)["link"]["bandwidth"] == pytest.approx(2e6, rel=0.05)


def test_blob_files_are_documents_too(run, small, folder, estimates, tmp_path):
    corpus = Corpus(small.engine, FolderStore(folder))
    (name, other) = small.tokens
    blob = tmp_path / "one.kvw"
    blob.write_bytes(corpus.catalog.store.get(corpus.find(name).blob_key))
    common = ("--estimates", estimates, "--link", "1mbit,10ms", "--no-compare", "--json")
    alone = json.loads(run("--docs", blob, *common)[1])
    stored = json.loads(run("--docs", name, "--store", folder, *common)[1])
    assert alone["documents"] == [str(blob)]
    assert alone["prediction"] == stored["prediction"]
    both = json.loads(run("--docs", blob, other, "--store", folder, *common)[1])
    assert len(both["documents"]) == 2
    blob.write_bytes(blob.read_bytes()[:50])
    assert run("--docs", blob, *common)[0] == 4


def test_made_up_documents_on_a_named_machine(run):
    words = ("--context", "4k", "--documents", 3, "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "1gbit,2ms")
    code, out, _ = run(*words, "--deadline", 0.1, "--json")
    report = json.loads(out)
    assert code == 0
    assert sum(row["tokens"] for row in report["chunks"]) == 4096
    assert len(report["documents"]) == 3
    assert report["goal"]["objective"] == "quality"
    assert report["levels"][0] == "coarse"
    assert {each["what"] for each in report["break_evens"]} == {"fetches", "fetches all", "beats text", "in time"}


def test_repair_is_part_of_the_plan(run):
    words = ("--context", "4k", "--documents", 3, "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "1gbit,2ms")
    plain, repaired = (json.loads(run(*words, "--json", "--repair", each)[1]) for each in ("none", "0.3"))
    assert repaired["prediction"]["ttft_s"] > plain["prediction"]["ttft_s"]


def test_people_get_a_verdict_runs_alternatives_and_break_evens(run):
    words = ("--context", "16k", "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "1gbit,2ms")
    code, out, _ = run(*words)
    assert code == 0
    verdict, table, alternatives, points = out.split("\n\n")
    assert verdict.startswith("First token after ")
    assert 3 <= len(table.splitlines()) < 10
    assert "recompute" in table
    assert "level 1 (standard)" in table
    assert alternatives.splitlines()[1].startswith("this plan")
    assert "level 4 alone beats text" in points
    code, out, err = run(*words, "--deadline", "0.001", "--no-compare")
    assert code == 6
    assert out.startswith("Late by ")
    assert "the deadline is 0.001 s" in err


def test_a_missed_deadline_is_an_error_beside_the_plan(run):
    code, out, err = run(
        "--context",
        600,
        "--machine",
        "cpu",
        "--shape",
        "demo",
        "--link",
        "1mbit",
        "--deadline",
        0.01,
        "--no-compare",
        "--json",
    )
    report = json.loads(out)
    assert code == 6
    assert report["error"]["kind"] == "DeadlineError"
    assert not report["prediction"]["in_time"]
    assert "would come after" in err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ((), 2, "nothing to plan"),
        (("--docs", "a", "--context", "1k"), 2, "not both"),
        (("--context", "1k"), 2, "--machine and --shape"),
        (("--context", "1k", "--machine", "h100"), 2, "go together"),
        (("--context", "1k", "--machine", "h100", "--shape", "demo"), 2, "give --link"),
        (("--context", "1k", "--machine", "x", "--shape", "demo", "--link", "1gbit"), 3, "no machine is called"),
        (("--context", "no", "--machine", "h100", "--shape", "demo", "--link", "1gbit"), 2, "no length"),
        (("--context", "1k", "--machine", "h100", "--shape", "demo", "--link", "fast"), 2, "not a link"),
        (("--docs", "a", "--machine", "h100", "--shape", "demo", "--link", "1gbit"), 2, "no store is named"),
        (("a.kvw", "--machine", "h100", "--shape", "demo", "--link", "1gbit"), 3, "a.kvw is not a .kvw file"),
        (("b/a", "--machine", "h100", "--shape", "demo", "--link", "1gbit"), 3, "b/a is not a .kvw file"),
        (("a.kvw", "--store", "file:///", "--machine", "h100", "--shape", "demo"), 3, "a.kvw is not a .kvw file"),
        (("--context", "3", "--documents", 4, "--machine", "h100", "--shape", "demo"), 2, "4 documents"),
        (("--context", "1k", "--machine", "h100", "--shape", "demo", "--link", "0mbit"), 2, "above 0"),
        (("--docs", "a"), 2, "whose costs"),
    ],
)
def test_wrong_options_are_refused(run, monkeypatch, words, code, says):
    monkeypatch.delenv("KVWIRE_MODEL", raising=False)
    monkeypatch.delenv("KVWIRE_STORE", raising=False)
    found, _, err = run(*words)
    assert (found, says in err) == (code, True), err


def test_documents_and_costs_that_do_not_belong_together_are_refused(run, small, folder, estimates, tmp_path):
    (name, *_) = small.tokens
    common = ("--store", folder, "--link", "1gbit")
    code, _, err = run("--docs", name, *common, "--machine", "h100", "--shape", "llama-3.1-8b")
    assert (code, "elements for each token" in err) == (8, True)
    assert run("--docs", "nobody", *common, "--estimates", estimates)[0] == 3
    assert run("--docs", name, *common, "--estimates", estimates, "--config", "zz")[0] == 3
    assert run("--docs", name, *common, "--estimates", tmp_path / "none.json")[0] == 3
    engine = json.dumps(json.loads(estimates.read_text())["estimates"]["engine"])
    bad = {
        "{": "not valid JSON at line 1, column 2",
        "[]": "must be a JSON object, got list",
        "{}": "holds no estimates of an engine",
        '{"engine": {}}': "",
        '{"engine": NaN}': "finite numbers",
        f'{{"version": 1, "engine": {engine}, "engine": {engine}}}': "no repeated names",
        "[" * 100_000: "deeply nested",
        "[" + " " * (1 << 24): "is longer than",
    }
    path = tmp_path / "bad.json"
    for text, says in bad.items():
        path.write_text(text)
        code, _, err = run("--docs", name, *common, "--estimates", path)
        assert (code, says in err) == (4, True), (text[:20], err)
