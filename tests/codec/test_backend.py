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
    backend._warn_once.cache_clear()


def test_the_processor_is_numbas_unless_triton_is_forced():
    assert not backend.uses_triton("auto", "cpu")
    assert not backend.uses_triton("numba", "cuda")
    assert backend.uses_triton("triton", "cpu")  # the tests run in Triton's interpreter


def test_a_gpu_without_triton_falls_back_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(backend, "_triton_version", lambda: None)
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


def test_versions_that_cannot_work_are_refused_with_what_to_install(monkeypatch):
    monkeypatch.setattr(backend, "_triton_version", lambda: (3, 2))
    with pytest.raises(ArgumentError, match=r"Triton 3\.2 is too old; pip install --upgrade torch"):
        backend.uses_triton("triton", "cuda")
    monkeypatch.setattr(backend, "_triton_version", lambda: (3, 6))
    monkeypatch.setattr(backend.np, "__version__", "2.4.0rc1")
    with pytest.raises(ArgumentError, match=r"3\.6 fails with NumPy 2\.4\.0rc1; pip install 'numpy<2\.4'"):
        backend.uses_triton("triton", "cpu")
    monkeypatch.setattr(backend.np, "__version__", "2.3.5")
    assert backend.uses_triton("triton", "cpu")


def test_gpus_that_cannot_run_the_kernels_are_told(monkeypatch, caplog):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert not backend.uses_triton("auto", "cuda")
    assert "compute capability is 7.5, and they need 8.0" in caplog.text
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(backend, "_driver_trouble", lambda: "")
    assert backend.uses_triton("auto", "cuda:0")
    monkeypatch.setattr(backend, "_driver_trouble", lambda: "no compiler")
    with pytest.raises(ArgumentError, match="cannot run on cuda: no compiler"):
        backend.uses_triton("triton", "cuda")


def test_unknown_backends_are_refused_and_decoders_say_who_decodes():
    cache = make_cache(4)
    blob = encode(cache)
    for use in (lambda: encode(cache, backend="cuda"), lambda: decode(blob, backend="cuda")):
        with pytest.raises(ArgumentError, match="auto, triton, numba"):
            use()
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
