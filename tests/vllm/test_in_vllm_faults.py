"""One vLLM through everything that fails: each request is answered as its own reference is, and nothing leaks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-engines runs this in its own environment")

from ..small_disk import on_small_disk
from .faulty_run import ROUNDS, SETTLED
from .inside import save_model

pytestmark = pytest.mark.filterwarnings("default")


def test_a_thousand_requests_are_each_their_own_through_every_fault_and_leak_nothing(tmp_path):
    """The store flickers, dies and freezes, blobs are damaged or gone, the cache's disk is full until the last round.

    Threads and connections are begun when requests first need them side by side, which may be late; a leak would be of
    hundreds.
    """
    model, disk = save_model(tmp_path / "model"), tmp_path / "cache"
    disk.mkdir()
    program = "from tests.vllm.faulty_run import run\nif __name__ == '__main__':\n    run(disk, fill, *sys.argv[2:])\n"
    file = Path(os.environ.get("KVWIRE_FAULTS") or tmp_path / "figures.json")
    told = on_small_disk(program, disk, model, tmp_path / "store", file)
    figures = json.loads(file.read_text(encoding="utf-8"))
    assert sum(each["requests"] for each in figures["rounds"]) == 1000
    loaded = {plan: [each["loaded_tokens"] for each in figures["rounds"] if each["link"] == plan] for plan in ROUNDS}
    assert max(loaded["dead"]) < 1000 < min(loaded["sound"])
    assert max(loaded["flaky"]) > 1000
    assert figures["kvwire_lost_tokens"] > 1000
    assert figures["kvwire_cache_write_errors"] > 0
    assert "the disk tier takes nothing in" in told
    assert len(figures["states"][-1]) >= 2  # a scheduler and a worker
    for early, late in zip(figures["states"][SETTLED], figures["states"][-1], strict=True):
        assert late[0] <= early[0] * 1.05 + 20
        assert late[1] <= early[1] + 16
        assert late[2] <= early[2] + 16
    assert figures["blocks_held"] == 0
