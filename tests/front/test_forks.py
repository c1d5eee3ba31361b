"""Loaders and processes: what a forked child is told, what it can do anew, and what cannot be sent to another one."""

import os
import pickle
import subprocess
import sys

import pytest

from kvwire.errors import ArgumentError
from kvwire.runtime.loader import Loader
from kvwire.store import FolderStore
from kvwire.transport.testing import serving

SCRIPT = """
import asyncio, os, sys
import torch
import kvwire
from kvwire import controller as ctl

engine = kvwire.open_engine(sys.argv[1], dtype=torch.float32)
corpus = kvwire.Corpus(engine, kvwire.open_store(sys.argv[2]))
costs = ctl.CostModel(ctl.PrefillCost(0.002, 0.0005), ctl.DecodeCost(0.0005, 1e-5))
names, question, words = [sys.argv[3]], engine.tokenize("It was plain"), engine.tokenize("word " * 500)

def asked(loader):
    answer = loader.ask(names, question, deadline_s=30, tokens=4)
    return answer.tokens, [decision.action for decision in answer.decisions]

def refused(work):
    try:
        work()
    except kvwire.errors.ArgumentError as error:
        assert "was forked from it" in str(error) and "after the fork" in str(error), error
    else:
        raise AssertionError("it was not refused")

loader = kvwire.Loader(engine, corpus, costs=costs)
expected = asked(loader)
engine.prefill([words])  # torch's threads are there, in this thread too
child = os.fork()
if not child:
    refused(lambda: asked(loader))
    refused(lambda: asyncio.run(loader.ask_async(names, question, deadline_s=1)))
    refused(lambda: loader.estimates)
    loader.close()
    engine.prefill([words])
    with kvwire.Loader(engine, corpus, costs=costs) as own:
        assert asked(own) == expected
    del loader
    sys.exit(0)  # everything that runs at a process's end does
assert os.waitpid(child, 0)[1] == 0
assert asked(loader) == expected
loader.close()
print(expected)
"""


@pytest.fixture
def encoded(run, demo_model, documents, tmp_path):
    """A folder store with a document, and its name."""
    name = next(iter(documents))
    path = demo_model.parent / "documents" / f"{name}.txt"
    code, _, err = run("encode", path, "--model", demo_model, "--store", f"file://{tmp_path}")
    assert code == 0, err
    return tmp_path, name


@pytest.mark.parametrize("is_served", [False, True], ids=["folder", "http"])
def test_a_forked_child_is_told_at_once_and_loads_with_a_loader_of_its_own(encoded, demo_model, is_served):
    folder, name = encoded
    with serving(FolderStore(folder)) as url:
        address = url if is_served else f"file://{folder}"
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(demo_model), address, name],
            capture_output=True, text=True, timeout=180, check=False, env=os.environ | {"KVWIRE_ESTIMATES": "off"},
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fetch" in done.stdout
    assert "Traceback" not in done.stderr
    assert "Unclosed" not in done.stderr


def test_a_loader_is_not_pickled(small):
    with Loader(small.engine, small.corpus(), costs=small.costs) as loader, pytest.raises(ArgumentError, match="there"):
        pickle.dumps(loader)
