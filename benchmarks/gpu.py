"""kvwire's GPU codec on the GPU that is there: checks first, then figures, a table, JSON and a picture.

Checks: tensors and symbols of the device against the processor's, damage, bounds, and the rivals' kernels. Figures,
for cache shapes of known models and several lengths: both halves of a decode alone and together, from pinned host
memory to the finished cache, the whole call, encoding, memory; beside a copy on the device, prefill by a randomly
initialised model of that shape, CacheGen as released, int8, and the raw cache. Profiles and caches are synthetic, the
JSON says how. Times are CUDA events, medians of many, inputs rotated and caches flushed in between.

Without a GPU nothing is measured and nothing written: exit status 2. ``--check`` runs the checks alone, with
TRITON_INTERPRET=1 in Triton's interpreter on small shapes.
"""

from __future__ import annotations

import argparse
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpu_parts import shapes
from gpu_parts.timing import Device, Effort
from measure import RESULTS, table, write_json

from kvwire.codec.backend import interpreted, uses_triton
from kvwire.codec.transform.levels import Ladder
from kvwire.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_parts.measuring import Plan

NO_GPU = 2
_TOKENS = (1024, 8192, 32768)
_QUICK = {"shapes": ["llama-3.1-8b"], "tokens": [1024, 8192], "levels": [0, 2, 4]}


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    known = [shape.name for shape in shapes.SHAPES]
    levels = range(len(Ladder().names))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=known, default=known, metavar="SHAPE", help=", ".join(known))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(_TOKENS))
    parser.add_argument("--levels", nargs="+", type=int, choices=levels, default=list(levels))
    parser.add_argument("--quick", action="store_true", help="one shape, two lengths, three levels: a minute")
    parser.add_argument("--check", action="store_true", help="run the checks alone, measure nothing")
    parser.add_argument("--device", default="cuda", help="which GPU, such as cuda:1")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    args = parser.parse_args(arguments)
    if args.quick:
        vars(args).update(_QUICK)
    if min(args.tokens) < 1:
        parser.error("--tokens must be at least 1")
    return args


def say(text: str) -> None:
    """Progress, on the error stream, with the seconds since the start."""
    print(f"{time.perf_counter() - _START:6.0f} s  {text}", file=sys.stderr, flush=True)


_START = time.perf_counter()


def device_for(args: argparse.Namespace) -> torch.device | None:
    """The GPU; the processor for checks in the interpreter; None, and a line that says why, where neither works."""
    device = torch.device("cpu" if args.check and interpreted() else args.device)
    missing = "" if device.type == "cpu" or torch.cuda.is_available() else "torch sees no GPU here"
    try:
        uses_triton("triton", device)
    except ArgumentError as error:
        missing = missing or str(error)
    if not missing:
        return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device
    verb, hint = ("checked", "") if args.check else ("measured", " with --check")
    print(
        f"{missing}: nothing can be {verb}, nothing is written; "
        f"TRITON_INTERPRET=1{hint} runs the checks in Triton's interpreter"
    )
    return None


def check(device: torch.device, names: list[str]) -> list[str]:
    """Run the checks; in the interpreter, also try every timed call on tiny shapes."""
    from gpu_parts import checks, measuring

    done = checks.run(device, names, say)
    if device.type == "cpu":
        measuring.dry(names[:1], Device(device, Effort(1, 1, 0.0, 0)), lambda _: None)  # its figures mean nothing
        done.append("every call that would be timed runs")
        say(done[-1])
    return done


def plan_of(args: argparse.Namespace) -> Plan:
    """What was asked for."""
    from gpu_parts.measuring import Plan
    from gpu_parts.synthetic import Sizes

    chosen = tuple(shapes.named(name) for name in dict.fromkeys(args.shapes))
    return Plan(chosen, tuple(sorted(set(args.tokens))), tuple(sorted(set(args.levels))), Sizes())


def print_results(results: dict[str, Any]) -> None:
    """A table for each shape and length, and what was left out."""
    head = ["bits/el.", "entropy Gsym/s", "place ms", "GB/s", "copies", "ready ms", "call ms", "prefill/ready"]
    for shape in results["shapes"].values():
        for tokens, found in shape["documents"].items():
            title = f"{shape['title']}, {int(tokens):,} tokens, {found['cache_bytes'] / 1e9:.2f} GB"
            rows = [*_level_rows(found), *_rival_rows(found)]
            print(f"\n{table([title, *head, 'memory', 'bound by'], rows)}")
            print(_document_line(found))
    leak = results["leak"]
    print(f"\n{leak['loads']:,} loads of {leak['tokens']} tokens left {leak['leaked_bytes']:,} bytes allocated")
    for line in results["skipped"]:
        print(f"left out: {line}")


def _level_rows(found: dict[str, Any]) -> list[list[str]]:
    copy = found["copy_ms"]["median"]
    return [
        [
            f"kvwire {name}",
            f"{level['bits_per_element']:.2f}",
            f"{level['entropy_gsym_s']:.1f}",
            f"{level['place_ms']['median']:.2f}",
            f"{level['decode_gb_s']:.0f}",
            f"{level['decode_ms'] / copy:.1f}",
            f"{level['ready_ms']['median']:.2f}",
            f"{level['call_ms']['median']:.1f}",
            _times(found, level["ready_ms"]["median"]),
            f"{100 * level['peak_extra_share']:.0f} %",
            level["roofline"]["bound_by"],
        ]
        for name, level in found["levels"].items()
    ]


def _rival_rows(found: dict[str, Any]) -> list[list[str]]:
    copy = found["copy_ms"]["median"]
    rows = []
    for name, rival in found["rivals"].items():
        decoding = rival.get("decode_ms")  # the raw cache needs no decoding
        speed = f"{rival['decode_gb_s']:.0f}" if decoding else ""
        copies = f"{decoding['median'] / copy:.1f}" if decoding else ""
        ready = rival["ready_ms"]["median"]
        times = _times(found, ready)
        rows.append(
            [name, f"{rival['bits_per_element']:.2f}", "", "", speed, copies, f"{ready:.2f}", "", times, "", ""]
        )
    return rows


def _times(found: dict[str, Any], ready: float) -> str:
    return f"{found['prefill']['ms'] / ready:.0f}" if found["prefill"] else ""


def _document_line(found: dict[str, Any]) -> str:
    prefill, said = found["prefill"], "not measured"
    if prefill:
        how = f", {prefill['layers_timed']} of {prefill['layers']} layers timed" if prefill["extrapolated"] else ""
        said = f"{prefill['ms']:.0f} ms{how}"
    return (
        f"copy on the device {found['copy_ms']['median']:.2f} ms; prefill {said}; "
        f"encode {found['encode_ms']['median']:.0f} ms, {found['encode_gb_s']:.1f} GB/s"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print, save, draw; returns the exit status."""
    args = options(arguments)
    device = device_for(args)
    if device is None:
        return NO_GPU
    done = check(device, args.shapes)
    if args.check:
        print("\n".join(["checked:", *done]))
        return 0
    from gpu_parts import measuring, picture

    where = Device(device, Effort(budget_s=0.1) if args.quick else Effort())
    results = measuring.run(plan_of(args), where, say)
    print_results(results)
    settings = {
        "shapes": args.shapes,
        "tokens": args.tokens,
        "levels": args.levels,
        "quick": args.quick,
        "triton": metadata.version("triton"),
        "checked": done,
        "clock": "CUDA events on the device's current stream; stage_ms, call_ms and encode_ms: the host's clock, until "
        "the device is idle",
        "definitions": DEFINITIONS,
    }
    write_json(args.out, "gpu", settings, results)
    picture.draw(args.out.with_suffix(".png"), results)
    return 0


DEFINITIONS = {
    "stage_ms": "the host takes segments apart and lays them out in pinned memory",
    "upload_ms": "the staged bytes travel to the device, alone",
    "entropy_ms": "all streams of all levels up to this one are decoded, bytes on the device",
    "place_ms": "inverse transform, prediction, rotation, storing, values on the device",
    "decode_ms": "entropy_ms + place_ms; decode_gb_s: bytes of the bfloat16 cache over it",
    "ready_ms": "from staged bytes in pinned memory to the finished, checked cache; parts overlap",
    "call_ms": "kvwire.decode from a blob in ordinary memory: head, staging, allocation, ready",
    "copy_ms": "the bfloat16 cache is copied on the device",
    "peak_extra_bytes": "device memory that kvwire.decode needs at most beside its output; the profile is resident and "
    "counted apart, as profile_bytes",
    "prefill": "layers timed times all layers over those, plus embedding and head; random weights, sdpa, bfloat16",
    "rivals": "decode_ms on the device, ready_ms from pinned memory; CacheGen: LMCache's bins, 256-token chunks",
}


if __name__ == "__main__":
    sys.exit(main())
