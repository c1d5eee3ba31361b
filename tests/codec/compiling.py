"""Kernels compiled for GPUs that need not be there: registers, spills and shared memory of the machine code.

The tests run with Triton's interpreter switched on, which decides for the whole process when kernels are defined. So a
second process, started on first use and kept, compiles with the interpreter off.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from kvwire.codec import backend


@dataclass(frozen=True)
class Report:
    """What the compiler made of a kernel.

    registers: 32-bit ones of a thread (vector registers on AMD). spilled: bytes of local memory that a thread needs,
    0 where all stays in registers. shared: bytes of a block.
    """

    registers: int
    spilled: int
    shared: int


def compile_for(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, object],
    arch: int | str,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Report:
    """Compile a kernel of an importable module, whether the interpreter wraps it here or not.

    signature: type of each argument that is not constant, such as ``*i32``, ``u32``. constexprs: the constant ones.
    arch: compute capability such as 80 or 90, or an AMD target such as ``gfx942``. Raises RuntimeError with the
    compiler's words where it refuses. Skips the test where the installed Triton lacks AMD's linker.
    """
    job = {
        "module": kernel.fn.__module__,
        "name": kernel.fn.__name__,
        "signature": signature,
        "constexprs": constexprs,
        "arch": arch,
        "options": {"num_warps": num_warps, "num_stages": num_stages},
    }
    worker = _worker()
    worker.stdin.write(json.dumps(job) + "\n")
    worker.stdin.flush()
    answer = json.loads(worker.stdout.readline() or '{"error": "the compiling process has died"}')
    if "ROCm linker" in answer.get("error", "") and backend._triton_version() < (3, 5):
        pytest.skip("before 3.5, Triton compiles for AMD only where ROCm is installed")
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return Report(**answer)


@lru_cache(maxsize=1)
def _worker() -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).resolve())]
    worker = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )
    atexit.register(worker.communicate)  # closes its input, which ends it
    return worker


def _serve() -> None:
    """Answer jobs, one a line, until there are no more. What the compilers print goes to the error stream."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = asdict(_compiled(json.loads(line)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the test is to see it
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _compiled(job: dict[str, Any]) -> Report:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(job["module"]), job["name"])
    types = {name: job["signature"].get(name, "constexpr") for name in kernel.arg_names}
    missing = [name for name, kind in types.items() if kind == "constexpr" and name not in job["constexprs"]]
    if missing:
        raise ValueError(f"the signature leaves out {', '.join(missing)}")
    arch = job["arch"]
    target = GPUTarget("hip", arch, 64) if isinstance(arch, str) else GPUTarget("cuda", arch, 32)
    compiled = triton.compile(ASTSource(kernel, types, job["constexprs"]), target=target, options=job["options"])
    registers, spilled = _amd_usage(compiled.asm) if isinstance(arch, str) else _nvidia_usage(compiled.asm)
    return Report(registers, spilled, compiled.metadata.shared)


def _nvidia_usage(asm: dict[str, Any]) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, as ``cuobjdump`` reads them off the machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    if found is None:
        raise ValueError(f"cuobjdump says something else than expected: {text}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_usage(asm: dict[str, Any]) -> tuple[int, int]:
    """The same from the kernel's description in the assembly."""
    fields = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", asm["amdgcn"]))
    return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])


if __name__ == "__main__":
    _serve()
