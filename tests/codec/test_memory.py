"""Decoding takes the output and little more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvwire.codec import KVCache, encode

SCRIPT = """
import sys
import torch
from pathlib import Path
from kvwire.codec import decode

def status(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])

torch.set_num_threads(1)
blob, small = (Path(path).read_bytes() for path in sys.argv[1:3])
for level in (3, "lossless"):
    decode(small, level, dtype=torch.bfloat16)
for level in (3, "lossless"):
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status("VmRSS")
    cache = decode(blob, level, dtype=torch.bfloat16)
    print(cache.nbytes, status("VmHWM") - before)
    del cache
"""
"""A warm decoder's own peak: the process's usual peak counts what it inherited from its parent."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc tells the peak")
def test_decoding_peaks_below_twice_its_output(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 4096, 64, generator=generator).bfloat16() for _ in range(3)]
    big = KVCache.from_tensors(tensors, tensors[::-1])
    for name, cache in (("big", big), ("small", big.slice(0, 300))):
        (tmp_path / name).write_bytes(encode(cache, levels=4, lossless=True))
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "big"), str(tmp_path / "small")]
    # Memory that is freed goes back at once: what the warm-up freed and malloc kept would not count.
    kept = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd(), env=kept)
    for output, peak in (map(int, line.split()) for line in ran.stdout.splitlines()):
        assert output == 3 * 2 * 4 * 4096 * 64 * 2
        assert 0.9 * output < peak < 2 * output
