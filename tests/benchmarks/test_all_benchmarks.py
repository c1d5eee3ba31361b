"""Every benchmark can be imported, and what the ablation changes is there to be changed."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def beside_the_benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_is_imported(name):
    assert importlib.import_module(name).__doc__


def test_the_ablation_changes_what_is_there():
    ablation = importlib.import_module("ablation")
    changed = [patch for setting in ablation.settings() for patch in (*setting.patches, *setting.encoding)]
    assert changed
    for module, name, _ in changed:
        assert hasattr(importlib.import_module(module), name), (module, name)
