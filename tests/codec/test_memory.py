"""Decoding takes the output and little more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvwire.codec import KVCache, encode

SCRIPT = """
import resource, sys
import torch
from kvwire.codec import decode
torch.set_num_threads(1)
blob, small = (open(path, "rb").read() for path in sys.argv[1:3])
decode(small, 3, dtype=torch.bfloat16)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cache = decode(blob, 3, dtype=torch.bfloat16)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(cache.nbytes, (after - before) * 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak resident memory is in KiB only on Linux")
def test_decoding_peaks_below_twice_its_output(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(4, 4096, 64, generator=generator).bfloat16() for _ in range(3)]
    big = KVCache.from_tensors(tensors, tensors[::-1])
    for name, cache in (("big", big), ("small", big.slice(0, 300))):
        (tmp_path / name).write_bytes(encode(cache))
    command = [sys.executable, "-P", "-c", SCRIPT, str(tmp_path / "big"), str(tmp_path / "small")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path.cwd())
    output, peak = map(int, ran.stdout.split())
    assert output == 3 * 2 * 4 * 4096 * 64 * 2
    assert peak < 2 * output
