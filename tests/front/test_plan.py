"""``kvwire plan`` and the library under it: real policies, real heads, real costs."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvwire import controller as ctl
from kvwire.cli.app import main
from kvwire.cli.plan_inputs import COMPUTE
from kvwire.controller.policies import Adaptive, CacheGen, Fixed
from kvwire.controller.simulator import LoadArrival, World, constant, costs, documents_for, machine_named, model_named
from kvwire.errors import ArgumentError
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.estimates_file import EstimatesFile, link_key
from kvwire.runtime.loader import LoadSettings, controls_of
from kvwire.store import FolderStore
from kvwire.whatif.break_even import FASTEST, SLOWEST
from kvwire.whatif.plan import plan_load
from kvwire.whatif.records import Details
from kvwire.whatif.situation import Situation, known_link

MODEL, MACHINE = model_named("llama-3.1-8b"), machine_named("h100")
COSTS = costs(MODEL, MACHINE)
SETTINGS = ctl.ControllerSettings(workers=2, decode_batch=8)
BANDWIDTH, RTT_S = 125e6, 0.002
GOALS = (
    ctl.Goal(),
    ctl.Goal(objective="quality", deadline_s=0.2),
    ctl.Goal(objective="cheapest", deadline_s=0.2),
    ctl.Goal(objective="quality", deadline_s=0.15, floor=1, ceiling=2),
)
"""On this link: some recomputed, some fetched, some upgraded and refined."""


@pytest.fixture(scope="module")
def prompt():
    return documents_for(MODEL, [2048, 1500, 4096])


def made(prompt, goal=None, bandwidth=BANDWIDTH, *, compare=False, details=None):
    estimates = known_link(COSTS, bandwidth, RTT_S)
    return plan_load(prompt, estimates, goal, settings=SETTINGS, details=details, compare=compare)


def loaded(prompt, goal, policy=None, bandwidth=BANDWIDTH):
    """A load on a link of that bandwidth, played by nothing of what plans it."""
    controller = ctl.Controller(known_link(COSTS, bandwidth, RTT_S), SETTINGS, policy)
    world = World(controller, constant(bandwidth), replace(COSTS, query_tokens=32), rtt_s=RTT_S)
    return world.run([LoadArrival(0.0, tuple((document,) for document in prompt), goal, 32, RTT_S)])[0]


@pytest.mark.parametrize("goal", GOALS, ids=lambda goal: f"{goal.objective}-{goal.floor}")
def test_the_plan_is_what_a_load_then_does(prompt, goal):
    plan, outcome = made(prompt, goal), loaded(prompt, goal)
    assert [(c.document, c.chunk, c.level, c.reason) for c in plan.chunks] == [
        (d.chunk.document, d.chunk.chunk, d.level, d.reason) for d in outcome.decisions
    ]
    prediction = plan.prediction
    assert (prediction.ttft_s, prediction.bytes) == (outcome.ttft_s, outcome.received)
    assert prediction.error == pytest.approx(outcome.error)
    assert prediction.in_time == outcome.in_time
    assert prediction.recomputed == outcome.recomputed
    assert prediction.recomputed + sum(prediction.levels) == 7644
    assert sum(chunk.bytes for chunk in plan.chunks) == outcome.received - outcome.wasted
    assert prediction.closing_s == pytest.approx(outcome.ttft_s - outcome.ready_s)
    for part in (prediction.fetch_s, prediction.decode_s, prediction.prefill_s):
        assert 0 <= part <= outcome.ready_s


@pytest.mark.parametrize("goal", GOALS[:3], ids=lambda goal: goal.objective)
def test_what_the_policy_expects_comes_true_on_a_link_that_it_knows(prompt, goal):
    plan = made(prompt, goal)
    assert plan.expected_s == pytest.approx(plan.prediction.ttft_s, rel=0.2)
    kept = sum(chunk.level == chunk.first_level for chunk in plan.chunks)
    assert kept >= 0.7 * len(plan.chunks)


def test_the_first_plan_of_one_document_is_what_a_controller_asks_its_policy_for(prompt):
    asked = []

    class Recording(Adaptive):
        def plan(self, request):
            asked.append(super().plan(request))
            return asked[-1]

    loaded(prompt[:1], ctl.Goal(), Recording())
    plan = made(prompt[:1])
    assert [-1 if chunk.first_level is None else chunk.first_level for chunk in plan.chunks] == asked[0].levels.tolist()
    assert plan.expected_s == RTT_S + asked[0].finish_s


def test_estimates_stay_as_they_are(prompt):
    estimates = known_link(COSTS, BANDWIDTH, RTT_S)
    before = estimates.to_state()
    plan_load(prompt[:1], estimates, settings=SETTINGS)
    assert estimates.to_state() == before


def test_alternatives_are_loads_by_other_policies(prompt):
    goal = GOALS[1]
    plan = made(prompt, goal, compare=True, details=Details(raw_token_bytes=MODEL.cache_bytes))
    found = {each.name: each for each in plan.alternatives}
    assert list(found) == [
        "text only", *(f"level {level}" for level in range(5)), "raw cache", "CacheGen's rule", "objective earliest",
        "objective cheapest",
    ]  # fmt: skip
    assert found["text only"].bytes == 0
    assert found["text only"].recomputed == 7644
    assert found["raw cache"].bytes == 7644 * MODEL.cache_bytes
    assert found["raw cache"].error == pytest.approx(found["text only"].error)
    for level in range(5):
        outcome, each = loaded(prompt, goal, Fixed(level)), found[f"level {level}"]
        assert (each.ttft_s, each.bytes, each.in_time) == (outcome.ttft_s, outcome.received, outcome.in_time)
        assert each.error == pytest.approx(outcome.error)
    assert found["objective earliest"].ttft_s == loaded(prompt, replace(goal, objective="earliest")).ttft_s
    assert found["objective earliest"].ttft_s <= min(each.ttft_s for each in found.values()) * 1.25
    for each in plan.alternatives:
        if each.in_time and each.name.startswith(("level", "objective")):
            assert plan.prediction.error <= each.error * 1.001


def holds(point, prompt, bandwidth, goal):
    """Whether a plan made anew at a bandwidth is on the far side of a break-even point."""
    if point.what == "in time":
        plan = made(prompt, replace(goal, floor=point.level), bandwidth)
        return plan.expected_s <= goal.deadline_s - SETTINGS.reserve_s
    if point.what == "beats text":
        blobs = made([replace(document, has_text=False) for document in prompt], ctl.Goal(floor=point.level), bandwidth)
        texts = made([replace(document, fetch_bytes=(), errors=()) for document in prompt], None, bandwidth)
        return blobs.expected_s < texts.expected_s
    recomputed = sum(chunk.first_level is None for chunk in made(prompt, goal, bandwidth).chunks)
    return not recomputed if point.what == "fetches all" else recomputed < 7 - 1


def test_plans_differ_at_both_sides_of_every_break_even_point():
    prompt, goal = documents_for(MODEL, [1024, 700]), ctl.Goal(objective="quality", deadline_s=0.05)
    plan = made(prompt, goal, compare=True)
    levels = [("beats text", level) for level in range(5)] + [("in time", level) for level in range(5)]
    assert [(p.what, p.level) for p in plan.break_evens] == [("fetches", None), ("fetches all", None), *levels]
    assert sum(point.holds == "from" for point in plan.break_evens) > 6
    for point in plan.break_evens:
        below, above = SLOWEST, FASTEST
        if point.bandwidth is not None:
            below, above = point.bandwidth / 1.01, point.bandwidth * 1.01
        expected = {"from": (False, True), "always": (True, True), "never": (False, False)}[point.holds]
        assert (holds(point, prompt, below, goal), holds(point, prompt, above, goal)) == expected, point


def test_the_first_plan_is_another_beyond_the_bandwidths_told_and_the_same_within(prompt):
    plan = made(prompt, compare=True)

    def first(bandwidth):
        return [chunk.first_level for chunk in made(prompt, None, bandwidth).chunks]

    below, above = plan.unchanged
    assert below < BANDWIDTH < above
    known = [chunk.first_level for chunk in plan.chunks]
    assert first(below * 1.002) == first(above / 1.002) == known
    assert known not in (first(below / 1.0001), first(above * 1.0001))


def test_finer_levels_need_more_bandwidth(prompt):
    points = made(prompt[:1], ctl.Goal(objective="quality", deadline_s=0.05), compare=True).break_evens
    for what in ("beats text", "in time"):
        rates = [point.bandwidth for point in points if point.what == what and point.bandwidth]
        assert len(rates) > 2
        assert rates == sorted(rates)


def test_a_load_that_is_too_long_to_be_played_is_as_its_policy_expects(prompt):
    unread = [replace(document, has_text=False) for document in prompt]
    plan = made(unread, None, 1e3)
    assert not plan.prediction.played
    assert plan.prediction.ttft_s == plan.expected_s > plan.prediction.bytes / 1e3
    assert [chunk.level for chunk in plan.chunks] == [0] * len(plan.chunks)


def test_many_documents_are_planned_though_not_played_and_too_many_are_refused():
    many = documents_for(MODEL, [128] * 65)
    plan = made(many)
    assert not plan.prediction.played
    assert sorted({chunk.document for chunk in plan.chunks}) == list(range(65))
    with pytest.raises(ArgumentError, match="up to 128"):
        made(many * 2)


def test_asking_again_is_the_same_as_asking_anew(prompt):
    """However a prompt was asked about before, and with a deadline that counts from the asking."""
    goal = ctl.Goal(objective="quality", deadline_s=0.2)
    old = Situation(tuple((each,) for each in prompt), known_link(COSTS, BANDWIDTH, RTT_S), goal, SETTINGS, 32,
                    Details(header_bytes=100_000))  # fmt: skip
    for bandwidth in (1e5, 1e9, 1e6, 1e8):
        for policy in (Adaptive(), Fixed(1), CacheGen()):
            again, anew = (each.forecast(policy, bandwidth) for each in (old, replace(old)))
            assert again.levels == anew.levels
            assert again.plan.finish_s == pytest.approx(anew.plan.finish_s)
            assert again.plan.in_time == anew.plan.in_time


def test_a_variant_is_chosen_and_counted(prompt):
    heads = documents_for(MODEL, [2048], method="kvwire-head-start-2")
    plans = {bandwidth: made([(prompt[0], heads[0])], None, bandwidth) for bandwidth in (1e6, 1e7, 1e11)}
    for bandwidth, plan in plans.items():
        fetched = [chunk for chunk in plan.chunks if chunk.level is not None]
        assert any(
            all(chunk.bytes == variant.fetch_bytes[chunk.chunk][chunk.level] for chunk in fetched)
            for variant in (prompt[0], heads[0])
        ), bandwidth
        alone = [made([each], None, bandwidth).expected_s for each in (prompt[0], heads[0])]
        assert plan.expected_s == pytest.approx(min(alone))


def test_recomputed_chunks_count_with_the_finest_divergence(prompt):
    kl = (0.5, 0.4, 0.3, 0.2, 0.1)
    details = Details(level_kl=(kl, kl, kl))
    plan = made(prompt, details=details)
    expected = sum(c.tokens * (0.1 if c.level is None else kl[c.level]) for c in plan.chunks) / 7644
    assert plan.prediction.kl == pytest.approx(expected)
    assert made(prompt, details=Details(level_kl=(kl, ()))).prediction.kl is None


def test_a_chunk_without_text_and_bytes_cannot_be_planned(prompt):
    lost = replace(prompt[0], has_text=False, fetch_bytes=(*prompt[0].fetch_bytes[:-1], ()), errors=())
    with pytest.raises(ArgumentError, match="neither text nor a segment"):
        made([lost])
    with pytest.raises(ArgumentError, match="at least one document"):
        made([])
    with pytest.raises(ArgumentError, match="above 0"):
        known_link(COSTS, 0.0, 0.0)


# The command.


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["kvwire", "plan", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        out = capsys.readouterr()
        return code, out.out, out.err

    return call


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
    code, out, _ = run(*words)
    report = json.loads(out)
    assert code == 0
    assert report["documents"] == names
    assert report["link"] == {"bandwidth": 5000.0, "ttfb_s": 0.01}

    corpus = Corpus(small.engine, FolderStore(folder))
    infos = [corpus.read_header(corpus.find(name)) for name in names]
    details = Details(header_bytes=sum(info.header_bytes for info in infos))
    inputs = [ctl.DocumentPlanInput.from_blob(info) for info in infos]
    settings = controls_of(LoadSettings(), on_gpu=False)
    estimates = known_link(small.costs, 5000.0, 0.01)
    plan = plan_load(inputs, estimates, settings=settings, details=details, compare=False)
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


def test_people_get_a_verdict_runs_alternatives_and_break_evens(run):
    words = ("--context", "16k", "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "1gbit,2ms")
    code, out, _ = run(*words)
    assert code == 0
    verdict, table, alternatives, points = out.split("\n\n")
    assert verdict.startswith("First token after ")
    assert 3 <= len(table.splitlines()) < 10
    assert "recompute" in table
    assert "level 0 (coarse)" in table
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
    for text in ("[", "{}", '{"engine": {}}', '{"engine": NaN}', "[" * 100_000):
        path = Path(tmp_path / "bad.json")
        path.write_text(text)
        assert run("--docs", name, *common, "--estimates", path)[0] == 4, text[:20]
