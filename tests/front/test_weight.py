"""How much of the package one question runs through: a newcomer follows these modules."""

from __future__ import annotations

import json
import subprocess
import sys

from kvwire.runtime.corpus import Corpus, Document
from kvwire.store import FolderStore

MOST_ENTERED, MOST_IMPORTED = 140, 206
"""Modules of kvwire in which a function runs, and that are imported, for one ``kvwire ask``.

Entered are 135 to 138: it depends on what is fetched and what recomputed."""

WATCH = """
import json, sys, threading

entered, seen = set(), {}


def at_import(frame):
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def watch(frame, event, _):
    code = frame.f_code
    if id(code) in seen:
        return
    ours = code.co_flags & 1 and "kvwire" in code.co_filename + frame.f_globals.get("__name__", "")
    if ours and at_import(frame):
        return
    seen[id(code)] = code
    if ours:
        entered.add(frame.f_globals.get("__name__", ""))


import numba, torch, transformers.modeling_utils  # nothing of ours is in them: they need not be watched

threading.settrace(watch)  # told of calls alone, as it asks for no more of a function
sys.settrace(watch)
from kvwire.cli import main

try:
    main()
finally:
    sys.settrace(None)
    ours = sorted(name for name in sys.modules if name.split(".")[0] == "kvwire")
    with open(told, "w") as file:
        json.dump({"imported": ours, "entered": sorted(entered & set(ours))}, file)
"""


STAGES = ("gpu.decode", "kinds.cachegen", "kinds.lossless", "upkeep", "server", "whatif", "comparison", "simulator",
          "store.cache", "sources.http")  # fmt: skip
"""What a question about a plain corpus in a folder has no use for."""


def test_a_question_runs_through_few_modules(small, demo_model, tmp_path, run, monkeypatch):
    corpus = Corpus(small.engine, FolderStore(tmp_path / "store"))
    corpus.set_profile(small.profile)
    list(corpus.encode([Document(name, tuple(ids)) for name, ids in small.tokens.items()]))
    words = ["ask", "--docs", *small.tokens, "--question", "Who?"]
    words += ["--model", str(demo_model), "--store", str(tmp_path / "store")]
    monkeypatch.setenv("KVWIRE_ESTIMATES", str(tmp_path / "estimates.json"))
    assert run(*words)[0] == 0  # its costs are remembered
    told = tmp_path / "told.json"
    script = f"import sys\nsys.argv = ['kvwire', *{words!r}]\ntold = {str(told)!r}\n{WATCH}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(told.read_text(encoding="utf-8"))
    assert len(seen["entered"]) <= MOST_ENTERED, seen["entered"]
    assert len(seen["imported"]) <= MOST_IMPORTED, seen["imported"]
    assert not [name for name in seen["imported"] if any(f".{stage}" in name for stage in STAGES)]
