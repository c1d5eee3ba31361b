"""``kvwire encode`` killed at random moments; ``benchmarks/kills.py`` does it hundreds of times."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are forked")
def test_nothing_that_was_told_of_is_lost_when_its_writer_is_killed(tmp_path):
    """Into a folder, into S3 and through a write-back tier: all is whole, and questions are answered."""
    out = tmp_path / "kills.json"
    command = [sys.executable, "benchmarks/kills.py", "--kills", str(KILLS), "--out", str(out)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    places = json.loads(out.read_text())["results"]["places"]
    assert [place["place"] for place in places] == ["folder", "s3", "write-back"]
    assert all(place["kills"] == KILLS and place["troubles"] == [] for place in places)
