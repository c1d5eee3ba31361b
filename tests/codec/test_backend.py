"""Which kernels run where."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
import torch

from kvwire.codec import BlobDecoder, backend, decode, encode
from kvwire.errors import ArgumentError

from .synthetic import make_cache


@pytest.fixture(autouse=True)
def _says_it_again():
    backend._say_once.cache_clear()


def test_the_processor_is_numbas_unless_triton_is_forced():
    assert not backend.uses_triton("auto", "cpu")
    assert not backend.uses_triton("numba", "cuda")
    assert backend.uses_triton("triton", "cpu")  # the tests run in Triton's interpreter


def test_a_gpu_without_triton_falls_back_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(backend, "_installed", lambda: False)
    with caplog.at_level(logging.WARNING, "kvwire.codec"):
        assert not backend.uses_triton("auto", "cuda")
        assert not backend.uses_triton("auto", "cuda:0")
    (record,) = caplog.records
    assert "pip install 'kvwire[gpu]'" in record.getMessage()
    with pytest.raises(ArgumentError, match=r"pip install 'kvwire\[gpu\]'"):
        backend.uses_triton("triton", "cuda")


def test_what_is_missing_is_named(monkeypatch):
    with pytest.raises(ArgumentError, match="TRITON_INTERPRET is set"):
        backend.uses_triton("triton", "cuda")
    with pytest.raises(ArgumentError, match="CUDA and ROCm, not for mps"):
        backend.uses_triton("triton", "mps")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ArgumentError, match="set TRITON_INTERPRET=1"):
        backend.uses_triton("triton", "cpu")
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="torch sees no GPU"):
            backend.uses_triton("triton", "cuda")


def test_unknown_backends_are_refused():
    cache = make_cache(4)
    with pytest.raises(ArgumentError, match="auto, triton, numba"):
        encode(cache, backend="cuda")
    blob = encode(cache)
    with pytest.raises(ArgumentError, match="auto, triton, numba"):
        decode(blob, backend="cuda")


def test_decoders_say_who_decodes():
    blob = encode(make_cache(4))
    assert not BlobDecoder(blob).on_gpu
    assert BlobDecoder(blob, backend="triton").on_gpu


def test_the_codec_works_where_triton_cannot_be_imported(tmp_path):
    """Nothing on the processor's way imports it."""
    (tmp_path / "triton.py").write_text("raise ImportError('none here')\n")
    program = (
        "import torch, kvwire\n"
        "cache = kvwire.KVCache.from_tensors([torch.randn(1, 5, 4)], [torch.randn(1, 5, 4)])\n"
        "back = kvwire.decode(kvwire.encode(cache))\n"
        "assert back.keys[0].shape == (1, 5, 4)\n"
        "try:\n"
        "    kvwire.decode(kvwire.encode(cache), backend='triton')\n"
        "except kvwire.errors.ArgumentError as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "pip install 'kvwire[gpu]'" in done.stdout
