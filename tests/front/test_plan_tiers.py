"""``kvwire plan --tiers``: the same load from several devices, and the cheapest that is fast enough."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvwire import controller as ctl
from kvwire.controller.simulator import costs, documents_for, machine_named, model_named
from kvwire.errors import ArgumentError
from kvwire.whatif.plan import plan_load
from kvwire.whatif.situation import PlanScenario, known_link
from kvwire.whatif.tiers import LATER, Tier, parse_tiers

DEVICES = "ram=400gbit,0.01ms,2.5 nvme=38gbit,0.1ms,0.08 hdd=2gbit,8ms,0.02 s3=1gbit,20ms,0.023"
GB = 1_000_000_000


def planned(devices, **goal):
    shape = model_named("llama-3.1-8b")
    estimates = known_link(costs(shape, machine_named("h100")), 1.25e9, 0.001)
    settings = ctl.ControllerSettings(workers=2)
    scenario = PlanScenario((tuple(documents_for(shape, [8000])),), estimates, ctl.Goal(**goal), settings)
    return plan_load(scenario, compare=False, tiers=parse_tiers(devices), stored_bytes=2 * GB)


def test_devices_are_read():
    assert parse_tiers("nvme=38gbit,0.1ms,0.08 s3=125MB/s,0.023") == (
        Tier("nvme", 4.75e9, 1e-4, 0.08), Tier("s3", 1.25e8, 0.0, 0.023),
    )  # fmt: skip


@pytest.mark.parametrize(
    "wrong", ["", "nvme", "nvme=38gbit", "=38gbit,1", "a=38gbit,x", "a=38gbit,-1", "a=38gbit,nan", "a=3,1",
              "a=1gbit,1 a=2gbit,1", " ".join(f"d{n}=1gbit,1" for n in range(17))],
)  # fmt: skip
def test_what_is_no_device_is_refused(wrong):
    with pytest.raises(ArgumentError, match="NAME=BANDWIDTH"):
        parse_tiers(wrong)


@pytest.mark.parametrize("deadline_s", [None, 1e-3, 0.1, 0.2, 5.0])
def test_the_cheapest_of_those_that_are_fast_enough_is_best(deadline_s):
    objective = "earliest" if deadline_s is None else "quality"
    tiers = planned(DEVICES, deadline_s=deadline_s, objective=objective).tiers
    assert [each.tier.name for each in tiers] == ["ram", "nvme", "hdd", "s3"]
    due = deadline_s or LATER * min(each.prediction.ttft_s for each in tiers)
    assert [each.is_fast_enough for each in tiers] == [each.prediction.ttft_s <= due for each in tiers]
    cheapest = min((each.cost_per_month for each in tiers if each.is_fast_enough), default=None)
    assert [each.cost_per_month for each in tiers if each.is_cheapest] == ([] if cheapest is None else [cheapest])
    assert [each.cost_per_month for each in tiers] == pytest.approx([5.0, 0.16, 0.04, 0.046])


def test_a_device_like_the_link_loads_as_the_plan_does():
    made = planned("like=10gbit,1ms,1")
    (only,) = made.tiers
    assert replace(only.prediction, name="kvwire") == made.prediction
    assert only.is_cheapest


def test_the_command_line_shows_devices(run):
    words = ("plan", "--context", "8k", "--machine", "h100", "--shape", "llama-3.1-8b", "--link", "10gbit")
    code, out, _ = run(*words, "--no-compare", "--deadline", "0.5", "--tiers", DEVICES, "--json")
    told = json.loads(out)["tiers"]
    assert code == 0
    best = [each for each in told if each["is_cheapest"]]
    assert [each["tier"]["name"] for each in best] == ["hdd"]
    code, out, _ = run(*words, "--no-compare", "--deadline", "0.5", "--tiers", DEVICES)
    assert [line.split()[0] for line in out.splitlines() if line.endswith("and the cheapest")] == ["hdd"]
    code, _, err = run(*words, "--tiers", "nvme")
    assert (code, "is not a device" in err) == (2, True)
    code, out, _ = run(*words, "--no-compare", "--json")
    assert "tiers" not in json.loads(out)


@pytest.mark.parametrize("words", [("--tiers", DEVICES), ("--price", "gpu_hour=1"), ("--exact",)])
def test_prompts_are_planned_without_devices_and_prices(run, tmp_path, words):
    (tmp_path / "prompt.txt").write_text("The bell rang.")
    place = ("--model", "m", "--store", str(tmp_path))
    code, _, err = run("plan", "--prompt", tmp_path / "prompt.txt", *place, *words)
    assert (code, "leave them out with --prompt" in err) == (2, True)
