"""Memory and time of decoding one document to bfloat16, level by level.

Memory: a process of its own for each level and repetition loads blob and profile, decodes a document of one chunk
(which compiles the kernels and unpacks the profile), hands freed memory back, resets the kernel's high-water mark and
decodes the long document. The figure is the growth of the peak resident set over what was resident before, output
included, in units of the output.
Time: one thread's processor time, encode and decode, for each megabyte of bfloat16 cache.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import (
    add_common_options,
    calibration,
    default_texts,
    interleaved,
    one_thread,
    summary,
    table,
    windows,
    write_json,
)

import kvwire

if TYPE_CHECKING:
    from kvwire import KVCache, Profile

TARGET = 2.0
"""Peak growth over the size of the output."""
MEGABYTE = 1e6
_RESET_PEAK = "5"
"""What ``/proc/self/clear_refs`` takes to forget the peak resident set so far (proc(5))."""


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    msg = f"/proc/self/status has no {field}: this benchmark needs Linux"
    raise SystemExit(msg)


def child(folder: Path, level: int) -> None:
    """Decode ``long`` at one level in this process and print the growth of its peak."""
    one_thread()
    profile = kvwire.Profile.from_bytes((folder / "profile").read_bytes())
    short, blob = (folder / "short").read_bytes(), (folder / "long").read_bytes()
    for _ in range(3):
        kvwire.decode(short, level, profile=profile, dtype=torch.bfloat16, threads=1)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the working set would hide in what the warm-up left behind
    Path("/proc/self/clear_refs").write_text(_RESET_PEAK, encoding="ascii")
    before = _resident_bytes("VmRSS")
    cache = kvwire.decode(blob, level, profile=profile, dtype=torch.bfloat16, threads=1)
    peak = _resident_bytes("VmHWM")
    print(json.dumps({"growth": peak - before, "output": cache.nbytes}))


def peaks(folder: Path, level: int, repetitions: int) -> tuple[list[float], int]:
    """Peak growth over output of some fresh processes, and the output's bytes."""
    found, output = [], 0
    for _ in range(repetitions):
        command = [sys.executable, __file__, "--child", str(folder), str(level)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        answer = json.loads(run.stdout.splitlines()[-1])
        output = answer["output"]
        found.append(answer["growth"] / output)
    return found, output


def speeds(cache: KVCache, profile: Profile, blob: bytes, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds for each megabyte of bfloat16: encoding all levels, decoding each."""
    names = [level.name for level in kvwire.inspect(blob).levels]
    cases = {"encode, all levels": lambda: kvwire.encode(cache, profile=profile, threads=1)} | {
        f"decode {name}": lambda name=name: kvwire.decode(blob, name, profile=profile, dtype=torch.bfloat16, threads=1)
        for name in names
    }
    megabytes = cache.nbytes / MEGABYTE
    return {
        name: summary([1e3 * taken / megabytes for taken in found])
        for name, found in interleaved(cases, rounds).items()
    }


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "decode_memory")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the document")
    parser.add_argument("--repetitions", type=int, default=5, help="processes for each level")
    parser.add_argument("--rounds", type=int, default=11, help="repetitions of the timing")
    parser.add_argument("--child", nargs=2, metavar=("FOLDER", "LEVEL"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Encode, measure, print, save."""
    args = options()
    if args.child:
        child(Path(args.child[0]), int(args.child[1]))
        return
    engine = kvwire.open_engine(args.model, dtype=torch.bfloat16)
    documents = calibration(engine, args.fit, 12, 1024, args.seed)
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    assert profile is not None, "calibration needs at least one window"
    texts = default_texts() or args.fit
    (ids,) = windows(engine, texts[0], 1, args.tokens, args.seed)
    cache, short = engine.prefill([ids, ids[:256]])
    one_thread()
    blob = kvwire.encode(cache, profile=profile)
    memory: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "profile").write_bytes(profile.data)
        (folder / "long").write_bytes(blob)
        (folder / "short").write_bytes(kvwire.encode(short, profile=profile))
        for index, level in enumerate(kvwire.inspect(blob).levels):
            found, output = peaks(folder, index, args.repetitions)
            memory[level.name] = {"peak_over_output": summary(found), "output_bytes": output}
    times = speeds(cache, profile, blob, args.rounds)
    print_results(memory, times)
    settings = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "tokens": args.tokens,
        "dtype": "bfloat16",
        "threads": 1,
        "clock": "processor time",
    }
    results = {"memory": memory, "ms_per_mb": times, "blob_bytes": len(blob)}
    write_json(args.out, "decode_memory", settings, results)


def print_results(memory: dict[str, Any], times: dict[str, dict[str, float]]) -> None:
    """Both tables and the acceptance line."""
    rows = [
        [
            name,
            f"{found['output_bytes'] / MEGABYTE:.1f}",
            f"{found['peak_over_output']['median']:.2f}",
            f"{found['peak_over_output']['least']:.2f} to {found['peak_over_output']['greatest']:.2f}",
        ]
        for name, found in memory.items()
    ]
    print(table(["level", "output MB", "peak over output", "spread"], rows))
    worst = max(found["peak_over_output"]["median"] for found in memory.values())
    word = "met" if worst <= TARGET else "MISSED"
    print(f"acceptance: decoding takes at most {worst:.2f} times the output (target {TARGET:.0f}): {word}\n")
    rows = [
        [name, f"{ms['median']:.1f}", f"{ms['least']:.1f} to {ms['greatest']:.1f}", f"{1e3 / ms['median']:.0f}"]
        for name, ms in times.items()
    ]
    print(table(["one thread", "ms/MB", "spread", "MB/s"], rows))


if __name__ == "__main__":
    main()
