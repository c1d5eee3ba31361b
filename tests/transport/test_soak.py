"""Six seconds of loads over a bad network leave nothing behind and never a wrong byte."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

_FOLDER = str(Path(__file__).resolve().parents[2] / "benchmarks")
sys.path.insert(0, _FOLDER)
import soak  # noqa: E402 - a script in a folder beside the package

sys.path.remove(_FOLDER)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("soak") / "soak.json"
    command = [sys.executable, soak.__file__, "--seconds", "6", "--seed", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["results"]


@pytest.mark.parametrize("remote", ["http", "s3"])
def test_loads_over_a_bad_network_are_right_or_fail_and_leave_nothing(results, remote):
    found = results[remote]
    assert found["wrong_bytes"] == 0
    assert found["segments"] > 150
    assert found["late"] == 0
    assert not any(count > 0 for count in found["leaks"].values())
    assert found["loads"]["right"] > 15
    assert sum(found["proxy"]["faults"].values()) > 10
    assert found["rss_growth_kib"] < 100_000


def test_the_verdict_names_what_is_wrong(results):
    assert soak.verdict(results) == []
    for name, value in (("wrong_bytes", 1), ("late", 2), ("folder_bytes", 10**9), ("loads", {})):
        broken = deepcopy(results)
        broken["http"][name] = value
        assert len(soak.verdict(broken)) == 1
    broken = deepcopy(results)
    broken["s3"]["leaks"]["sockets"] = 3
    assert soak.verdict(broken) == ["s3: 3 sockets are left"]
