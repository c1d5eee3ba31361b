"""``kvwire simulate`` end to end: tables, JSON, pictures, and errors that say what to do."""

from __future__ import annotations

import json
import sys
from functools import partial

import pytest

import kvwire
from kvwire.cli.links import LEAD_S, made_link, recorded_link, steady_link, with_outage
from kvwire.errors import ArgumentError, CorruptError, NotFoundError
from kvwire.whatif.pictures import draw_cdf

QUICK = ("--context", "2k", "--documents", "2", "--machine", "a100")


@pytest.fixture
def run(run):
    return partial(run, "simulate")


def test_all_policies_are_compared_and_the_report_is_json(run):
    code, out, _ = run(*QUICK, "--link", "1gbit,5ms", "--deadline", "0.3", "--loads", "2", "--seed", "3", "--json")
    assert code == 0
    report = json.loads(out)
    policies = [row["policy"] for row in report["summaries"]]
    rivals = ["cachegen", "cachegen-timed", "cachegen-artefact", "cacheblend"]
    assert policies == ["adaptive", *rivals, *(f"level-{n}" for n in range(5)), "text", "raw"]
    assert all(row["loads"] == 2 for row in report["summaries"])
    ours, text = report["summaries"][0], report["summaries"][-2]
    assert ours["avoidable"] == 0
    assert text["recomputed"] == 1
    assert len(report["loads"]) == 2 * len(policies)
    assert report["settings"]["links"] == ["1gbit,5ms"]


def test_the_same_seed_gives_the_same_report(run):
    words = (*QUICK, "--made", "ar1:500mbit,0.5,0.9", "--deadline", "0.2", "--policy", "adaptive", "--json",
             "--trouble", "fail=0.1,noise=0.2", "--loads", "2")  # fmt: skip
    assert run(*words, "--seed", 5) == run(*words, "--seed", 5)
    assert run(*words, "--seed", 5) != run(*words, "--seed", 6)


def test_repair_takes_time_and_is_told(run):
    words = (*QUICK, "--policy", "adaptive", "--loads", "1", "--json", "--repair")
    plain, repaired = (json.loads(run(*words, each)[1])["loads"][0] for each in ("none", "0.2"))
    assert [load["repair"] for load in (plain, repaired)] == [0.0, 0.2]
    assert repaired["ttft_s"] > plain["ttft_s"]
    assert repaired["link_error"] > plain["link_error"] == 0
    code, _, told = run(*words, "much")
    assert code == 2
    assert "--repair is none" in told


def test_a_table_names_what_was_played(run):
    code, out, err = run(*QUICK, "--policy", "adaptive", "--policy", "text", "--together", "2")
    assert code == 0
    assert "llama-3.1-8b on a100, 2k in 2: 2 loads over 1gbit" in out
    assert [line.split()[0] for line in out.splitlines() if line.startswith(("adaptive", "text"))] == [
        "adaptive",
        "text",
    ]
    assert not err


def test_pictures_and_report_are_written(run, tmp_path):
    words = (*QUICK, "--context", "2k,1k", "--policy", "adaptive", "--policy", "level-0", "--trouble", "fail=0.3")
    code, _, err = run(*words, "--deadline", "0.1", "--out", tmp_path / "new" / "out")
    assert code == 0, err
    for name in ("ttft.png", "load.png"):
        assert (tmp_path / "new" / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert len(json.loads((tmp_path / "new" / "out" / "simulation.json").read_text())["summaries"]) == 4


def test_a_picture_bears_policies_without_a_first_token(tmp_path):
    draw_cdf({"a": {"adaptive": [0.1, 0.2], "raw": []}}, None, tmp_path / "cdf.png")


def test_only_levels_share_a_line_in_pictures(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr("matplotlib.figure.Figure.legend", lambda _, _handles, labels, **_more: told.extend(labels))
    times = {"adaptive": [0.1], "level-0": [0.2], "level-1": [0.3], "one of my own": [0.4]}
    draw_cdf({"a": times}, 0.5, tmp_path / "cdf.png")
    assert told == ["adaptive", "fixed levels", "one of my own", "deadline"]
    assert (tmp_path / "cdf.png").stat().st_size > 1000


def test_without_matplotlib_pictures_are_refused_before_anything_is_played(run, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "kvwire.whatif.pictures", None)
    code, _, err = run("--loads", "10000", "--out", tmp_path / "out")
    assert code == 3
    assert "pip install" in err
    assert not (tmp_path / "out").exists()


def test_real_blobs_take_the_place_of_drawn_sizes(run, small, tmp_path, monkeypatch):
    from kvwire.controller.simulator import models

    cache = small.engine.prefill([next(iter(small.tokens.values()))])[0]
    file = tmp_path / "one.kvw"
    file.write_bytes(kvwire.encode(cache, profile=small.profile))
    width = cache.meta.elements_per_token
    tiny = models.Model(
        name="tiny", layers=1, hidden=48, heads=1, kv_heads=1, key_dim=width // 2, value_dim=width // 2, parameters=1e5,
        active_parameters=1e5,
    )  # fmt: skip
    monkeypatch.setitem(models.MODELS, "tiny", tiny)
    words = ("--blob", file, "--machine", "cpu", "--policy", "level-0", "--link", "1mbit", "--max-kl", "none")
    code, out, err = run("--model", "tiny", *words, "--json")
    assert code == 0, err
    (load,) = json.loads(out)["loads"]
    info = kvwire.inspect(file.read_bytes())
    assert load["received"] == sum(info.chunk_bytes(chunk, 0) for chunk in range(info.chunks))
    code, _, err = run("--model", "demo", *words)
    assert code == 8
    assert "--model" in err


def test_who_loses_patience_gets_no_first_token(run):
    words = ("--link", "10mbit", "--policy", "raw", "--patience", "0.5")
    code, out, _ = run(*QUICK, *words, "--json")
    assert code == 0
    assert json.loads(out)["summaries"][0]["failed"] == 1
    assert json.loads(out)["summaries"][0]["ttft_s"] is None
    lines = run(*QUICK, *words)[1].splitlines()
    assert lines[4].split()[:3] == ["raw", "-", "-"]
    assert lines[2] == json.loads(out)["summaries"][0]["sizes"]


def test_priors_may_be_wrong_and_estimates_cold(run):
    words = (*QUICK, "--policy", "cachegen", "--json")
    right = json.loads(run(*words, "--cold")[1])["loads"][0]
    wrong = json.loads(run(*words, "--prior", "bandwidth=0.001,prefill=0.5")[1])["loads"][0]
    assert right["recomputed"] == 0
    assert wrong["recomputed"] > 0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "gpt-9"], 3, "choose one of"),
        (["--machine", "toaster"], 3, "choose one of"),
        (["--model", "deepseek-v3", "--machine", "a100"], 2, "larger group"),
        (["--machine", "a100", "--machine", "h100"], 2, "one for each model"),
        (["--policy", "best"], 3, "adaptive"),
        (["--context", "many"], 2, "32k"),
        (["--context", "9999999k"], 2, "8192k"),
        (["--context", "3", "--documents", "4"], 2, "4 documents"),
        (["--link", "fast"], 2, "50mbit"),
        (["--trace", "absent.txt"], 3, "absent.txt"),
        (["--made", "sine:1gbit"], 2, "ar1:1gbit"),
        (["--outage", "1"], 2, "0.3,0.5"),
        (["--trouble", "fail=2"], 2, "got fail=2"),
        (["--link", "0mbit"], 2, "bandwidth above 0"),
        (["--made", "steps:0=0mbit"], 2, "bandwidth above 0"),
        (["--made", "ar1:1gbit,9e9,0.5"], 2, "sigma"),
        (["--made", "ar1:1gbit,0.5,0.9", "--outage", "59.9,0.5"], 2, "within the 60 s"),
        (["--outage", "0,0"], 2, "lasts some time"),
        (["--stretch", "2"], 2, "--trace"),
        (["--mean", "1gbit"], 2, "--trace"),
        (["--trace", "absent.txt", "--stretch", "nan"], 2, "above 0"),
        (["--loads", "10000", "--together", "1000"], 2, "lower --loads"),
        (["--trouble", "fire=1"], 2, "corrupt=NUMBER"),
        (["--trouble", "fail=nan"], 2, "number"),
        (["--prior", "bandwidth=0"], 2, "above 0"),
        (["--objective", "cheapest"], 2, "deadline"),
        (["--blob", "absent.kvw"], 3, "absent.kvw"),
        (["--blob", "absent.kvw", "--context", "4k"], 2, "leave out"),
        (["--deadline", "0"], 2, "deadline"),
        (["--method", "zip"], 3, "cachegen"),
    ],
)
def test_bad_input_is_told_with_what_to_do(run, words, code, said):
    got, out, err = run(*words)
    assert got == code
    assert said in err
    assert not any(internal in err for internal in ("Trouble(", "make a M", "LinkSettings", "Warning"))
    assert not out


def test_recorded_links_are_scaled_and_stretched(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("0 8\n1 16\n2 0\n")
    link = recorded_link(str(file), 3e6, 0.5)
    assert link.rate.mean_bytes_s == pytest.approx(3e6)
    assert link.rate.period_s == 1.5
    log = tmp_path / "b.json"
    log.write_text(json.dumps([{"duration_ms": 500, "bandwidth_kbps": 8000, "latency_ms": 20}]))
    assert recorded_link(str(log), None, 1.0).rate.rates == (1e6,)


def test_damaged_traces_are_named(tmp_path):
    file = tmp_path / "bad.txt"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptError, match=r"bad\.txt"):
        recorded_link(str(file), None, 1.0)
    file.write_text("0 8\n0 9\n")
    with pytest.raises(CorruptError, match=r"bad\.txt.*line 2"):
        recorded_link(str(file), None, 1.0)
    file.write_text("0 0\n")
    with pytest.raises(ArgumentError, match="scaled"):
        recorded_link(str(file), 1e6, 1.0)
    with pytest.raises(NotFoundError):
        recorded_link(str(tmp_path), None, 1.0)


def test_what_does_not_repeat_begins_with_the_load():
    link = made_link("steps:0=8mbit,0.5=800kbit", 0)
    assert link.start_s == LEAD_S
    assert (link.rate.at(LEAD_S + 0.4), link.rate.at(LEAD_S + 0.6)) == (1e6, 1e5)
    bucket = made_link("bucket:16mbit,8mbit,500kB", 0)
    assert bucket.rate.bytes_between(LEAD_S, LEAD_S + 1.0) == pytest.approx(1.5e6)
    out = with_outage(steady_link("8mbit"), "0.3,0.5")
    assert out.rate.bytes_between(out.start_s, out.start_s + 1.0) == pytest.approx(0.5e6)
    again = with_outage(out, "0.9,0.1")
    assert again.rate.bytes_between(again.start_s, again.start_s + 1.0) == pytest.approx(0.4e6)


def test_a_wandering_link_repeats_and_takes_outages_in_every_period():
    link = made_link("ar1:8mbit,0.5,0.9", 1)
    assert link.rate.mean_bytes_s == pytest.approx(1e6)
    assert made_link("ar1:8mbit,0.5,0.9", 1) == link != made_link("ar1:8mbit,0.5,0.9", 2)
    assert with_outage(link, "1,0.5").rate.at(1.2 + link.rate.period_s) == 0


@pytest.mark.parametrize("text", ["ar1:1gbit", "ar1:1gbit,-1,0", "steps:", "steps:1=1gbit", "bucket:1gbit,2gbit,1MB",
                                  "bucket:2gbit,1gbit,much", "ar1:1gbit,1,nan"])  # fmt: skip
def test_formulas_that_make_no_link_are_refused(text):
    with pytest.raises(ArgumentError, match=text.split(":", maxsplit=1)[0]):
        made_link(text, 0)
