"""What every benchmark shares: the machine in words, interleaved timing, text and model, and the JSON of results."""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import subprocess
import time
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvwire
from kvwire._user_file import user_file

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from kvwire import TransformersEngine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SHARED = ROOT.parent / "shared"
CHARACTERS_PER_TOKEN = 8
"""More than any of the tokenizers used here needs for English, so that a slice of text always yields enough tokens."""
_PACKAGES = ("torch", "numpy", "numba", "transformers", "constriction", "zstandard")


_TURN_S = 0.02
"""Processor time of one turn of a case."""


def machine() -> dict[str, Any]:
    """Processor, cores and versions; nothing that names the machine or its folders."""
    found = {name: _version(name) for name in _PACKAGES}
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "kvwire": kvwire.__version__,
        "commit": _commit(),
        **{name: version for name, version in found.items() if version},
    }


def _commit() -> str:
    """What was measured: the checkout's commit, with a plus where tracked files differ from it."""
    run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    try:
        found = run(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()
        return found + ("+" if run(["git", "status", "--porcelain", "--untracked-files=no"]).stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )


def one_thread() -> None:
    """Let torch and numba use the calling thread alone, so that figures are per core."""
    import_module("torch").set_num_threads(1)
    import_module("numba").set_num_threads(1)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and spread of samples: n, median, least, greatest."""
    return {"n": len(samples), "median": statistics.median(samples), "least": min(samples), "greatest": max(samples)}


def interleaved(
    cases: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.thread_time
) -> dict[str, list[float]]:
    """Seconds of each case, ``rounds`` times, the cases taking turns so that a busy moment hits all of them alike.

    The clock is this thread's processor time: what other processes take does not count, nor do a case's other threads.
    For cases that let other threads work, pass another clock.
    Each case runs before, untimed: kernels compile and caches fill there. A turn repeats a short case back to back for
    about 20 ms: what is measured is the steady rate, not how a case finds the caches that the one before it left.
    """
    turns = {name: _turns(case, clock) for name, case in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start = clock()
            for _ in range(turns[name]):
                case()
            seconds[name].append((clock() - start) / turns[name])
    return seconds


def _turns(case: Callable[[], object], clock: Callable[[], float]) -> int:
    case()
    start = clock()
    case()
    return max(1, round(_TURN_S / max(clock() - start, 1e-6)))


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """How many times faster ``fast`` was, round by round: neighbours in time are compared with each other."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def write_json(path: Path, benchmark: str, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Save one benchmark's results with the machine and the settings that they were measured on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"benchmark": benchmark, "machine": machine(), "settings": dict(settings), "results": dict(results)}
    path.write_text(json.dumps(_rounded(document), indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten: {path.name}")


def _rounded(value: Any) -> Any:  # noqa: ANN401 - anything that JSON holds
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(entry) for entry in value]
    return value


def add_common_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Options of every benchmark that runs a model: ``--model``, ``--fit``, ``--seed``, ``--out``."""
    parser.add_argument(
        "--model",
        type=Path,
        default=default_model(),
        help="a model's folder; default: SmolLM2 where make demo has fetched it",
    )
    parser.add_argument("--fit", type=Path, nargs="+", default=books(), help="texts that the profile is fitted on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")


def default_texts() -> list[Path]:
    """The held-out texts beside the repository, where they are present."""
    return sorted((SHARED / "text" / "heldout").glob("*.txt"))


def books() -> list[Path]:
    """The texts beside the repository that profiles are fitted on, where they are present."""
    return sorted((SHARED / "text" / "books").glob("*.txt"))


def default_model() -> Path:
    """SmolLM2 where the demonstration has fetched it; else the bundled model, or the one beside the repository."""
    place = user_file(os.environ, "KVWIRE_MODELS", "models")
    real = sorted(place.glob("SmolLM2-135M-Instruct*/config.json")) if place else []
    if real:
        return real[0].parent
    demo = ROOT / "demo" / "model"
    return demo if demo.is_dir() else SHARED / "models" / "ebook-llama-14m"


def windows(engine: TransformersEngine, path: Path, count: int, tokens: int, seed: int) -> list[list[int]]:
    """``count`` stretches of ``tokens`` token ids, drawn at random from a text and cut at line ends."""
    return windows_in(engine, path.read_text(encoding="utf-8"), path.name, count, tokens, seed)


def windows_in(engine: TransformersEngine, text: str, name: str, count: int, tokens: int, seed: int) -> list[list[int]]:
    """``windows`` of a text that is at hand; seed and name decide where they lie."""
    room = CHARACTERS_PER_TOKEN * tokens
    if len(text) < 2 * room:
        raise SystemExit(f"{name} is too short for windows of {tokens} tokens; name a longer text")
    draw = random.Random(f"{seed} {name}")
    found = []
    while len(found) < count:
        start = text.find("\n", draw.randrange(len(text) - 2 * room)) + 1
        ids = engine.tokenize(text[start : start + room])
        if len(ids) >= tokens:
            found.append(ids[:tokens])
    return found


def calibration(
    engine: TransformersEngine, texts: Sequence[Path], count: int, tokens: int, seed: int
) -> list[list[int]]:
    """``count`` windows from as many different texts, in an order that the seed decides."""
    if not texts:
        raise SystemExit("no text to fit the profile on; name some with --fit")
    order = list(texts)
    random.Random(seed).shuffle(order)
    return [windows(engine, order[index % len(order)], 1, tokens, seed + index)[0] for index in range(count)]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows in aligned columns, the first column flush left, the others flush right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return "\n".join(lines)
