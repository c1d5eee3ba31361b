"""What tests of every room may ask for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

os.environ["KVWIRE_ESTIMATES"] = "off"  # what tests measure is nobody's business
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined: no test needs a GPU
ROOT = Path(__file__).resolve().parents[1]


def pytest_configure() -> None:
    """Make runs even: the same examples in each, no hypothesis deadline, and one torch thread in each xdist worker.

    A first call may compile a kernel, which no deadline allows for; workers with full thread pools fight over cores.
    With KVWIRE_EXPLORE set, hypothesis draws new examples in every run.
    """
    settings.register_profile("kvwire", deadline=None, derandomize="KVWIRE_EXPLORE" not in os.environ)
    settings.load_profile("kvwire")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """Folder of the shared material: ``$KVWIRE_SHARED``, or ``shared`` beside the repository."""
    folder = Path(os.environ.get("KVWIRE_SHARED") or ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip("needs the shared material beside the repository")
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the demonstration's model."""
    folder = ROOT / "demo" / "model"
    if not folder.is_dir():
        pytest.skip("needs the demonstration's model in demo/model")
    return folder
