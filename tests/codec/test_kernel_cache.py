"""Kernels where their files cannot be written, are damaged, or are of another: right results, at most slower."""

import os
import subprocess
import sys

import pytest

KERNEL = """
import sys
import numpy as np
from kvwire.codec.entropy.jit import jit

@jit
def fill(out, value):
    for at in range(len(out)):
        out[at] = value

@jit
def double(out, value):
    for at in range(len(out)):
        out[at] = 2 * value

if __name__ == "__main__":
    for kind in sys.argv[1:]:
        for kernel, factor in ((fill, 1), (double, 2)):
            out = np.zeros(3, kind)
            kernel(out, out.dtype.type(3))
            assert (out == 3 * factor).all(), out
    print(sum(fill.stats.cache_hits.values()))
"""


@pytest.fixture
def compute(tmp_path):
    """Run the kernels, with a folder for their files; gives how many came from a file, and what was told."""
    (tmp_path / "kernels.py").write_text(KERNEL)

    def run(*kinds, folder=tmp_path / "cache", **environment):
        env = os.environ | {"NUMBA_CACHE_DIR": str(folder)} | environment
        done = subprocess.run(
            [sys.executable, str(tmp_path / "kernels.py"), *kinds],
            capture_output=True, text=True, timeout=120, check=False, env=env,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return int(done.stdout), done.stderr

    return run


def test_kernels_are_kept(compute):
    assert compute("float32") == (0, "")
    assert compute("float32") == (1, "")


def test_without_a_folder_to_write_they_are_compiled_in_memory_which_is_told_once(compute, tmp_path):
    (tmp_path / "__pycache__").write_text("a file, where a folder should be")
    hits, told = compute("float32", folder=tmp_path / "kernels.py" / "cache", HOME="/proc", XDG_CACHE_HOME="/proc")
    assert hits == 0
    assert told.count("compiled kernels cannot be kept") == 1
    assert "no locator available" in told
    assert "set NUMBA_CACHE_DIR to a folder that this user may write" in told


@pytest.mark.parametrize("ending", ["nbi", "nbc"])
@pytest.mark.parametrize("content", [b"", b"not a pickle", b"\x80\x05\x95\xff\xff\xff\xff\xff\xff\xff\x7f"])
def test_a_damaged_file_is_made_anew(compute, tmp_path, ending, content):
    compute("float32")
    damaged = list((tmp_path / "cache").rglob(f"*.{ending}"))
    assert damaged
    for path in damaged:
        path.write_bytes(content)
    assert compute("float32") == (0, "")
    assert compute("float32") == (1, "")


def test_a_file_that_cannot_be_replaced_is_told_and_done_without(compute, tmp_path):
    compute("float32")
    for path in (tmp_path / "cache").rglob("*.nbi"):
        path.unlink()
        path.mkdir()
    hits, told = compute("float32")
    assert hits == 0
    assert told.count("compiled kernels cannot be kept (IsADirectoryError") == 1


def test_code_for_other_types_under_the_same_name_is_not_run(compute, tmp_path):
    """As two processes leave it that compiled for two types at the same time."""
    compute("float32", "int64")
    for first in (tmp_path / "cache").rglob("*.1.nbc"):
        second = first.with_name(first.name.replace(".1.nbc", ".2.nbc"))
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
    assert compute("float32", "int64") == (0, "")
    assert compute("float32", "int64") == (2, "")
