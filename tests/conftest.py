"""What tests of every room may ask for."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from collections.abc import Generator

os.environ["KVWIRE_ESTIMATES"] = "off"  # what tests measure stays out of the user's file
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when kernels are defined: no test needs a GPU
pytest.register_assert_rewrite("kvwire.engines.testing")  # no test module, yet its failures show both sides
ROOT = Path(__file__).resolve().parents[1]
SLOW = (
    "codec/test_round_trips.py",
    "controller/simulator/test_scenario.py",
    "test_set_up.py",
    "front/test_links.py",
    "controller/test_overload.py",
    "controller/test_insurance.py",
    "controller/test_look.py",
    "vllm/test_saving.py",
    "store/test_collecting.py",
    "front/test_killed_turns.py",
    "front/test_kills.py",
    "codec/attacks/test_fuzz.py",
    "front/test_cli.py",
    "engines/test_generate_inputs.py",
    "controller/test_timeline.py",
    "codec/test_mutations.py",
    "codec/test_device_decode.py",
    "codec/test_sinks.py",
    "controller/test_sharing.py",
    "engines/test_opening.py",
    "engines/test_identity.py",
    "front/test_silent_store.py",
    "front/test_bos.py",
    "store/test_s3_store.py",
    "front/test_session.py",
    "controller/test_repair_in_order.py",
    "store/test_partition.py",
    "benchmarks/test_gpu_benchmark.py",
    "transport/test_fault_matrix.py",
    "front/test_weight.py",
    "transport/test_soak.py",
    "codec/test_lossless.py",
    "engines/test_round_trips.py",
    "engines/test_gradients.py",
    "codec/test_device_encode.py",
)
"""Files that take longest, which begin first: at the end of a run, no worker waits long for another.

The first one compiles the codec's kernels, which takes half a minute in a new clone. The others run files that have no
use for kernels meanwhile: else all would compile the same ones; later they find them kept.
"""

EXHAUSTIVE = (
    "benchmarks/",
    "codec/attacks/test_fuzz.py",
    "codec/test_device_compiled.py",
    "codec/test_device_decode.py",
    "codec/test_device_encode.py",
    "codec/test_kernel_cache.py",
    "codec/test_memory.py",
    "codec/test_mutations.py",
    "controller/simulator/test_optimum.py",
    "controller/simulator/test_scenario.py",
    "controller/test_insurance.py",
    "controller/test_look.py",
    "controller/test_overload.py",
    "controller/test_sharing.py",
    "engines/test_generate_inputs.py",
    "engines/test_gradients.py",
    "engines/test_growing_past.py",
    "engines/test_identity.py",
    "engines/test_opening.py",
    "engines/test_round_trips.py",
    "front/test_anchored.py",
    "front/test_canaries.py",
    "front/test_exit.py",
    "front/test_forks.py",
    "front/test_growing_retries.py",
    "front/test_held.py",
    "front/test_killed_turns.py",
    "front/test_kills.py",
    "front/test_layouts.py",
    "front/test_links.py",
    "front/test_read_only_store.py",
    "front/test_refusals.py",
    "front/test_repair_in_order.py",
    "front/test_report.py",
    "front/test_same_prompts.py",
    "front/test_shift.py",
    "front/test_silent_store.py",
    "front/test_train_links.py",
    "front/test_weight.py",
    "real/",
    "store/test_donor_index.py",
    "store/test_full_disk.py",
    "store/test_partition.py",
    "store/test_s3_store.py",
    "test_exploring.py",
    "test_extras.py",
    "test_packaging.py",
    "test_set_up.py",
    "training/",
    "transport/test_fault_matrix.py",
    "transport/test_soak.py",
    "transport/test_ways.py",
    "vllm/test_combinations.py",
    "vllm/test_kept_repairs.py",
    "vllm/test_proxy.py",
    "vllm/test_saving.py",
)
"""Files, and folders, that ``make test-all`` alone runs, like cases with ``triton``, whose interpreter is slow."""


@pytest.hookimpl(tryfirst=True)  # hypothesis reads its option in a hook of the same name
def pytest_configure(config: pytest.Config) -> None:
    """Make runs even: the same examples in each, no hypothesis deadline, and one torch thread in each xdist worker.

    A first call may compile a kernel, which no deadline allows for; workers with full thread pools fight over cores.
    KVWIRE_EXPLORE, a whole number, is the seed of other examples; the same seed draws the same ones. Where a test
    names no number it gets fifty examples: runs with other seeds draw further ones.
    """
    seed = os.environ.get("KVWIRE_EXPLORE", "")
    if seed:
        if not (seed.isascii() and seed.isdecimal()):
            msg = f"KVWIRE_EXPLORE is a seed, a whole number from 0; got {seed!r}"
            raise pytest.UsageError(msg)
        config.option.hypothesis_seed = seed
    _begin_elsewhere(config)
    settings.register_profile("kvwire", max_examples=50, deadline=None, derandomize=not seed, database=None)
    settings.load_profile("kvwire")
    _one_thread_each()


def _begin_elsewhere(config: pytest.Config) -> None:
    """Let each worker collect from another folder on: what one has compiled, the others find, also in a new clone."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and worker.isdecimal():
        places = sorted(str(path) for path in (ROOT / "tests").glob("[a-z]*") if path.is_dir() or path.match("test_*"))
        first = int(worker) * len(places) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
        config.args[:] = places[first:] + places[:first]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, object, object]:
    """Millions of objects come with the imports and stay to the end: no search for garbage goes through them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _one_thread_each() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A parallel kernel of numba's sets up threads in OpenMP, which is torch's too: whatever ran before, it is one."""
    _one_thread_each()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, all else by name; mark those that only ``make test-all`` runs."""
    rank = {ROOT / "tests" / name: place for place, name in enumerate(SLOW)}
    items.sort(key=lambda item: (rank.get(item.path, len(SLOW)), item.path))
    for item in items:
        name = item.path.as_posix().removeprefix(f"{(ROOT / 'tests').as_posix()}/")
        callspec = getattr(item, "callspec", None)
        if name.startswith(EXHAUSTIVE) or (callspec and "triton" in callspec.params.values()):
            item.add_marker("exhaustive")


def _repeat() -> str:
    seed = os.environ.get("KVWIRE_EXPLORE", "")
    return f"random examples are drawn from seed {seed}; to repeat: KVWIRE_EXPLORE={seed} make test" if seed else ""


def pytest_report_header() -> str:
    """Say what a run explores."""
    return _repeat()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say it again where something failed."""
    if _repeat() and (terminalreporter.stats.get("failed") or terminalreporter.stats.get("error")):
        terminalreporter.write_line(_repeat())


@pytest.fixture
def few_objects() -> Generator[None, None, None]:
    """Garbage is looked for among a test's own objects: among all that came before it, each search takes a second."""
    gc.freeze()
    yield
    gc.unfreeze()


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
