"""``kvwire ask --session`` killed at random moments: a turn is kept whole, or it never was."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from contextlib import closing

from kvwire.store import Catalog, open_store, verify_store

KILLS = 6


def test_a_killed_turn_is_whole_or_never_was(demo_model, tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    command = [
        sys.executable, "-m", "kvwire", "ask", "--session", "anna", "--question", "The bell rang again, and then",
        "--model", str(demo_model), "--store", str(folder), "--tokens", "4", "--json",
    ]  # fmt: skip

    def turn():
        began = time.monotonic()
        ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        return json.loads(ran.stdout)["reused"], time.monotonic() - began

    def said():
        """Tokens of the session, all of which can be read."""
        with closing(open_store(str(folder))) as store:
            catalog = Catalog(store)
            assert verify_store(store, [catalog]).damaged == ()
            (space,) = catalog.configurations()
            entry = catalog.by_document(space, "sessions/anna")
            text = catalog.texts.of(space, entry)
            assert len(text) == catalog.blobs.header(entry).tokens == entry.tokens
            return text

    turn()
    _, took_s = turn()
    before, draw = said(), random.Random(5)
    for _ in range(KILLS):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
            time.sleep(draw.uniform(0.5, 1.1) * took_s)
            killed.kill()
        after = said()
        assert after[: len(before)] == before
        before = after
    reused, _ = turn()
    assert reused["document"] == "sessions/anna"
    assert said()[: len(before)] == before
