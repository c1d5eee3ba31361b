"""Speed of the whole codec and of its parts, beside rivals and the machine's own limits, all in one run.

Entropy: kvwire's streams against constriction, ``entropy_speed``'s workloads, pinned to one core.
Whole codec: wall time of ``kvwire.encode`` and ``kvwire.decode`` to bfloat16 at every level, of CacheGen as released
restated for a CPU (``cachegen_fast``), of CacheGen with torchac's coder, of torch.save with zstd, of safetensors, and
of a copy in memory; in memory all of them, no files. Cases take turns, with the same number of threads.
Scaling: encode and decode of documents joined to 32k tokens; the exponent of time against tokens should be 1.
Roofline: where a decode's time goes, and what this machine's matrix products and copies reach in the same run.

Speeds are bytes of the bfloat16 cache over seconds of wall time; documents are several, positions on. A ratio is the
median over rounds of neighbouring times; where two threads run, other work on the machine spoils wall times, so the
ratio of the least times stands beside it, and a target is met if both meet it. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import inspect
import io
import os
import random
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import cachegen_fast
import entropy_speed
import numba
import numpy as np
import safetensors.torch
import torch
import zstandard
from measure import CHARACTERS_PER_TOKEN, ROOT, add_common_options, ratios, summary, table, write_json

import kvwire
from kvwire.codec import Ladder, positions_off, positions_on
from kvwire.codec.prediction import text as prediction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvwire import KVCache, Profile, TransformersEngine

ENTROPY_TARGET, DECODE_TARGET, ENCODE_TARGET = 8.0, 15.0, 5.0
"""Times constriction's ANS decoder; times CacheGen's decode and encode."""
MEGABYTE = 1e6
BYTES = 2
"""Of a bfloat16."""
PREFILL = "prefill"
FAST, TORCHAC = "CacheGen, fast", "CacheGen, torchac's coder"
_TURN_S = 0.02
"""Wall time of one turn of a case."""
_ZSTD_LEVEL = 3
_DEMO = ROOT / "demo" / "documents"
_NUMBA_THREADS: int = vars(numba.config)["NUMBA_NUM_THREADS"]
PARTS = {
    "entropy decoding": ("decode_base", "decode_ternary"),
    "inverse transform": ("_product", "_factors", "synthesise", "coefficients_of"),
    "prediction": ("expected",),
    "rotating, converting, storing": ("_place", "scatter_planes"),
}
"""Functions of the codec whose own time, without that of each other, makes up a part of a decode."""


def threaded(function: Callable[..., Any], threads: int) -> Callable[..., Any]:
    """``function`` with that many threads, where it can be told."""
    return partial(function, threads=threads) if "threads" in inspect.signature(function).parameters else function


def use_threads(threads: int) -> None:
    """Let torch and numba use that many threads."""
    if threads > _NUMBA_THREADS:
        raise SystemExit(f"numba was started with {_NUMBA_THREADS} threads; set NUMBA_NUM_THREADS={threads}")
    torch.set_num_threads(threads)
    numba.set_num_threads(threads)


def interleaved_wall(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of wall time of each case, ``rounds`` times, the cases taking turns.

    Each runs before, untimed. A turn repeats a short case for about 20 ms, as ``measure.interleaved`` does.
    """
    turns = {name: _turns(case) for name, case in cases.items()}
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, case in cases.items():
            start = time.perf_counter()
            for _ in range(turns[name]):
                case()
            seconds[name].append((time.perf_counter() - start) / turns[name])
    return seconds


def _turns(case: Callable[[], object]) -> int:
    case()
    start = time.perf_counter()
    case()
    return max(1, round(_TURN_S / max(time.perf_counter() - start, 1e-6)))


def read_documents(engine: TransformersEngine, paths: Sequence[Path], tokens: int) -> list[list[int]]:
    """Token ids of each text's beginning."""
    texts = [path.read_text(encoding="utf-8")[: CHARACTERS_PER_TOKEN * tokens] for path in paths]
    return [engine.tokenize(text)[:tokens] for text in texts]


def joined(caches: Sequence[KVCache], tokens: int) -> KVCache:
    """One bfloat16 cache of that many tokens, documents one after the other, over and over, each as if it stood alone.

    Positions run through: what the codec takes off and puts back has no window to respect.
    """
    off = [positions_off(cache) for cache in caches]
    ids = [token for cache in off for token in cache.token_ids or ()]
    times = -(-tokens // len(ids))

    def tensors(side: str) -> list[torch.Tensor]:
        layers = zip(*(getattr(cache, side) for cache in off), strict=True)
        return [torch.cat(list(parts) * times, 1)[:, :tokens].bfloat16().contiguous() for parts in layers]

    meta = replace(off[0].meta, dtype="bfloat16", token_digest="")
    return positions_on(kvwire.KVCache.from_tensors(tensors("keys"), tensors("values"), meta, (ids * times)[:tokens]))


def _named(cache: KVCache) -> dict[str, torch.Tensor]:
    sides = (("key", cache.keys), ("value", cache.values))
    return {f"{side}{layer}": tensor for side, tensors in sides for layer, tensor in enumerate(tensors)}


def _saved(cache: KVCache, threads: int) -> bytes:
    file = io.BytesIO()
    torch.save(_named(cache), file)
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, threads=threads).compress(file.getbuffer())


def _loaded(data: bytes) -> object:
    return torch.load(io.BytesIO(zstandard.ZstdDecompressor().decompress(data)), weights_only=True)


def _cloned(cache: KVCache) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in _named(cache).values()]


def codecs(cache: KVCache, profile: Profile, threads: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Cases to encode, cases to decode, and the bytes that each writes; kvwire's levels by name."""
    encode, decode = threaded(kvwire.encode, threads), threaded(kvwire.decode, threads)
    blob = encode(cache, profile=profile)
    levels = kvwire.inspect(blob).levels
    fast, slow = cachegen_fast.encode(cache), cachegen_fast.encode(cache, bitwise=True)
    saved, tensors = _saved(cache, threads), safetensors.torch.save(_named(cache))
    encodes = {
        "kvwire": lambda: encode(cache, profile=profile),
        FAST: lambda: cachegen_fast.encode(cache),
        TORCHAC: lambda: cachegen_fast.encode(cache, bitwise=True),
        "torch.save, zstd": lambda: _saved(cache, threads),
        "safetensors": lambda: safetensors.torch.save(_named(cache)),
        "copy": lambda: _cloned(cache),
    }
    decodes = {
        f"kvwire {level.name}": partial(decode, blob, level.name, profile=profile, dtype=torch.bfloat16)
        for level in levels
    } | {
        FAST: lambda: cachegen_fast.decode(fast),
        TORCHAC: lambda: cachegen_fast.decode(slow),
        "torch.save, zstd": lambda: _loaded(saved),
        "safetensors": lambda: safetensors.torch.load(tensors),
        "copy": lambda: _cloned(cache),
    }
    sizes = {f"kvwire {level.name}": level.cumulative_bytes for level in levels}
    sizes |= {"kvwire": len(blob), FAST: len(fast), TORCHAC: len(slow)}
    return encodes, decodes, sizes | {"torch.save, zstd": len(saved), "safetensors": len(tensors), "copy": cache.nbytes}


def whole(
    cache: KVCache, profile: Profile, threads: int, rounds: int, level: str, prefill: Callable[[], list[KVCache]]
) -> dict[str, Any]:
    """MB/s of every codec with that many threads, kvwire's ratios to CacheGen, and its shares of a prefill's time."""
    use_threads(threads)
    encodes, decodes, sizes = codecs(cache, profile, threads)
    encoding = interleaved_wall(encodes | {PREFILL: prefill}, rounds)
    decoding = interleaved_wall(decodes | {PREFILL: prefill}, rounds)
    computed = sum(each.tokens for each in prefill()) / cache.tokens
    shares = {
        name: summary([taken * computed for taken in ratios(seconds[name], seconds[PREFILL])])
        for seconds in (encoding, decoding)
        for name in seconds
        if name.startswith("kvwire")
    }
    del encoding[PREFILL], decoding[PREFILL]
    elements = cache.nbytes / BYTES
    found: dict[str, Any] = {
        "share_of_prefill": shares,
        "bits_per_element": {name: 8 * size / elements for name, size in sizes.items()},
        "encode_mb_s": _speeds(encoding, cache.nbytes),
        "decode_mb_s": _speeds(decoding, cache.nbytes),
    }
    mine = decoding[f"kvwire {level}"]
    for name, key in ((FAST, "cachegen"), (TORCHAC, "cachegen_torchac")):
        found[f"decode_over_{key}"] = _compared(decoding[name], mine)
        found[f"encode_over_{key}"] = _compared(encoding[name], encoding["kvwire"])
    return found


def _compared(slow: Sequence[float], fast: Sequence[float]) -> dict[str, float]:
    """Ratios of neighbouring times, and that of the least times, which other work on the machine disturbs less."""
    return summary(ratios(slow, fast)) | {"best": min(slow) / min(fast)}


def _speeds(seconds: dict[str, list[float]], size: int) -> dict[str, dict[str, float]]:
    return {name: summary([size / taken / MEGABYTE for taken in found]) for name, found in seconds.items()}


@contextmanager
def one_core() -> Iterator[None]:
    """Keep this thread, and the threads it starts, on one core, where the system lets it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def entropy(cache: KVCache, profile: Profile, rounds: int) -> dict[str, dict[str, Any]]:
    """``entropy_speed``'s figures on this document, one thread on one core: chunks come in order."""
    use_threads(1)
    ladder = Ladder()
    finest = Ladder(ladder.steps[-1], ladder.names[-1:])
    with one_core():
        works = [
            entropy_speed.workload("base symbols, level 0", "base", cache, profile, ladder),
            entropy_speed.workload("base symbols, finest level alone", "base", cache, profile, finest),
            entropy_speed.workload("ternary refinements", "ternary", cache, profile, ladder),
        ]
        return {work.name: entropy_speed.measure(work, rounds) for work in works}


def scaling(
    caches: Sequence[KVCache], profile: Profile, sizes: Sequence[int], rounds: int, level: str
) -> dict[str, Any]:
    """Seconds a token against tokens, one thread, and the exponents of time against tokens."""
    use_threads(1)
    encode, decode = threaded(kvwire.encode, 1), threaded(kvwire.decode, 1)
    cases: dict[str, Callable[[], object]] = {}
    for tokens in sizes:
        cache = joined(caches, tokens)
        blob = encode(cache, profile=profile)
        cases[f"encode {tokens}"] = partial(encode, cache, profile=profile)
        cases[f"decode {tokens}"] = partial(decode, blob, level, profile=profile, dtype=torch.bfloat16)
    seconds = interleaved_wall(cases, rounds)
    out: dict[str, Any] = {}
    for kind in ("encode", "decode"):
        medians = [statistics.median(seconds[f"{kind} {tokens}"]) for tokens in sizes]
        out[kind] = {
            "exponent": float(np.polyfit(np.log(sizes), np.log(medians), 1)[0]) if len(sizes) > 1 else None,
            "us_per_token": {
                str(tokens): summary([1e6 * taken / tokens for taken in seconds[f"{kind} {tokens}"]])
                for tokens in sizes
            },
        }
    return out


class Clock:
    """Own time of functions that call each other: a call's time less that of the watched calls within it."""

    def __init__(self) -> None:
        """Start at nothing."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.calls = dict.fromkeys(PARTS, 0)
        self._inner = [0.0]

    def watch(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, timed."""

        @wraps(function)
        def timed(*arguments: object, **named: object) -> object:
            self._inner.append(0.0)
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                taken = time.perf_counter() - start
                self.seconds[part] += taken - self._inner.pop()
                self.calls[part] += 1
                self._inner[-1] += taken

        return timed


@contextmanager
def watched(clock: Clock) -> Iterator[None]:
    """Time the functions of ``PARTS`` wherever a module of the codec has them, and the method that predicts."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("kvwire.codec.")]
    with ExitStack() as stack:
        for part, names in PARTS.items():
            for owner in [*modules, prediction.TextPredictor]:
                for name in set(names) & set(vars(owner)):
                    stack.enter_context(mock.patch.object(owner, name, clock.watch(part, getattr(owner, name))))
        yield


def roofline(cache: KVCache, profile: Profile, level: str, rounds: int) -> dict[str, Any]:
    """Shares of a decode's time by part, one thread, with the rates reached and the machine's own."""
    use_threads(1)
    encode, decode = threaded(kvwire.encode, 1), threaded(kvwire.decode, 1)
    blob = encode(cache, profile=profile)
    info = kvwire.inspect(blob)
    index = [entry.name for entry in info.levels].index(level)
    seconds: dict[str, list[float]] = {name: [] for name in [*PARTS, "all else", "whole"]}
    for turn in range(rounds + 1):
        clock = Clock()
        with watched(clock):
            start = time.perf_counter()
            decode(blob, level, profile=profile, dtype=torch.bfloat16)
            taken = time.perf_counter() - start
        assert all(clock.calls.values()), f"parts of the codec were not met: {clock.calls}; adapt PARTS"
        if turn:
            rest = taken - sum(clock.seconds.values())
            for name, part in {**clock.seconds, "all else": rest, "whole": taken}.items():
                seconds[name].append(part)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    width = sum(group.width for group in profile.groups) / len(profile.groups)
    coded = sum(row[index].raw for row in info.segments)
    symbols = sum(segment.raw for row in info.segments for segment in row[: index + 1])
    megabytes = cache.nbytes / MEGABYTE
    return {
        "share": {name: found / median["whole"] for name, found in median.items() if name != "whole"},
        "ms_per_mb": {name: summary([1e3 * taken / megabytes for taken in found]) for name, found in seconds.items()},
        "entropy_msym_s": symbols / median["entropy decoding"] / 1e6,
        "transform_gflop_s": 2 * coded * width / median["inverse transform"] / 1e9,
        "coded_columns": coded / cache.tokens,
        "width": width,
        "limits": limits(info.chunk_tokens, round(coded / cache.tokens), round(width), cache, rounds),
    }


def limits(tokens: int, columns: int, width: int, cache: KVCache, rounds: int) -> dict[str, dict[str, float]]:
    """GFLOP/s of a chunk's matrix product, and GB/s of a copy of the cache, one thread."""
    left, right = torch.randn(tokens, max(columns, 1)), torch.randn(max(columns, 1), width)
    pairs = {str(dtype).removeprefix("torch."): (left.to(dtype), right.to(dtype)) for dtype in _GEMM_DTYPES}
    cases: dict[str, Callable[[], object]] = {name: partial(torch.matmul, *pair) for name, pair in pairs.items()}
    seconds = interleaved_wall(cases | {"copy": lambda: _cloned(cache)}, rounds)
    flops = 2 * tokens * max(columns, 1) * width
    rates = {f"{name}_gflop_s": summary([flops / taken / 1e9 for taken in seconds[name]]) for name in pairs}
    return rates | {"copy_gb_s": summary([cache.nbytes / taken / 1e9 for taken in seconds["copy"]])}


_GEMM_DTYPES = (torch.float32, torch.bfloat16)


def print_entropy(found: dict[str, dict[str, Any]]) -> None:
    """Msym/s of one core, and the target."""
    rows = []
    for name, figures in found.items():
        for codec, decode in figures["decode_msym_s"].items():
            encode = figures["encode_msym_s"].get(codec)
            rows.append([f"{name}: {codec}", f"{decode['median']:.0f}", f"{encode['median']:.0f}" if encode else ""])
    print(table(["entropy, Msym/s, one core", "decode", "encode"], rows))
    for name, figures in found.items():
        print_target(f"{name}: decode over constriction ANS", figures["decode_over_ans"], ENTROPY_TARGET)


def print_whole(threads: int, found: dict[str, Any], level: str) -> None:
    """MB/s of all codecs with that many threads, and the targets."""
    rows = []
    encodes, decodes = found["encode_mb_s"], found["decode_mb_s"]
    for name in dict.fromkeys([*encodes, *decodes]):
        row = [name, f"{found['bits_per_element'][name]:.2f}"]
        for side in (encodes, decodes):
            speed = side.get(name)
            row += [f"{speed['median']:.0f}", f"{speed['greatest']:.0f}"] if speed else ["", ""]
        rows.append(row)
    plural = "thread" if threads == 1 else "threads"
    shares = {name.removeprefix("kvwire").strip() or "encode": v for name, v in found["share_of_prefill"].items()}
    print("\nshare of a prefill's time: " + ", ".join(f"{name} {v['median']:.3f}" for name, v in shares.items()))
    print(f"\n{table([f'MB/s, {threads} {plural}', 'bits/element', 'encode', 'best', 'decode', 'best'], rows)}")
    for codec, key, target in ((FAST, "cachegen", "target"), (TORCHAC, "cachegen_torchac", "the same target")):
        print_target(f"decode {level} over {codec}", found[f"decode_over_{key}"], DECODE_TARGET, target)
        print_target(f"encode over {codec}", found[f"encode_over_{key}"], ENCODE_TARGET, target)


def print_target(what: str, ratio: dict[str, float], target: float, word: str = "target") -> None:
    """One line: the ratio's median and spread, and whether it reaches the target."""
    verdict = "met" if min(ratio["median"], ratio.get("best", target)) >= target else "MISSED"
    spread = f"{ratio['least']:.2f} to {ratio['greatest']:.2f}"
    spread += f", best over best {ratio['best']:.2f}" if "best" in ratio else ""
    print(f"{what}: {ratio['median']:.2f} times ({spread}), {word} {target:.0f}: {verdict}")


def print_scaling(found: dict[str, Any], level: str) -> None:
    """Microseconds a token."""
    sizes = list(found["encode"]["us_per_token"])
    rows = [
        [label, *(f"{found[kind]['us_per_token'][size]['median']:.1f}" for size in sizes), _exponent(found[kind])]
        for kind, label in (("encode", "encode"), ("decode", f"decode {level}"))
    ]
    print(f"\n{table(['microseconds a token, one thread, tokens:', *sizes, 'exponent'], rows)}")


def _exponent(found: dict[str, Any]) -> str:
    return "" if found["exponent"] is None else f"{found['exponent']:.3f}"


def print_roofline(found: dict[str, Any], level: str) -> None:
    """Shares, rates and limits."""
    rows = [
        [name, f"{100 * share:.0f} %", f"{found['ms_per_mb'][name]['median']:.2f}"]
        for name, share in found["share"].items()
    ]
    print(f"\n{table([f'decode {level}, one thread', 'share', 'ms/MB'], rows)}")
    limit = {name: figures["median"] for name, figures in found["limits"].items()}
    print(
        f"entropy decoding {found['entropy_msym_s']:.0f} Msym/s; transform {found['transform_gflop_s']:.0f} GFLOP/s, "
        f"where products of {found['coded_columns']:.0f} columns by {found['width']:.0f} reach "
        f"{limit['float32_gflop_s']:.0f} in float32 and {limit['bfloat16_gflop_s']:.0f} in bfloat16; "
        f"a copy runs at {limit['copy_gb_s']:.1f} GB/s"
    )


def draw(path: Path, results: dict[str, Any], level: str) -> None:
    """Bars of decoding and encoding speed by threads, and time a token against tokens."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, width_ratios=(5, 5, 4))
    for axes, kind in zip(panels[:2], ("decode", "encode"), strict=True):
        _draw_bars(axes, results["whole"], kind)
    axes = panels[2]
    for kind, colour, label in (("encode", "tab:orange", "encode"), ("decode", "tab:blue", f"decode {level}")):
        found = results["scaling"][kind]
        sizes = [int(size) for size in found["us_per_token"]]
        times = [figures["median"] for figures in found["us_per_token"].values()]
        axes.plot(sizes, times, "o-", color=colour, label=f"{label}: tokens to the {_exponent(found)}")
    axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds a token", title="one thread")
    axes.set_xticks(sizes, [f"{size // 1024}k" if size % 1024 == 0 else str(size) for size in sizes])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, high * 2)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=9)
    figure.savefig(path, dpi=110)
    print(f"written: {path.name}")


def _draw_bars(axes: Any, runs: dict[str, Any], kind: str) -> None:  # noqa: ANN401 - matplotlib has no types
    for offset, (threads, found) in enumerate(runs.items()):
        speeds = found[f"{kind}_mb_s"]
        places = [at + (offset - (len(runs) - 1) / 2) * 0.38 for at in range(len(speeds))]
        colours = ["tab:blue" if name.startswith("kvwire") else "tab:gray" for name in speeds]
        medians = [figures["median"] for figures in speeds.values()]
        bars = axes.barh(places, medians, height=0.36, color=colours, alpha=0.55 if threads == "1" else 1.0)
        plural = "thread" if threads == "1" else "threads"
        axes.bar_label(bars, [f"{speed:,.0f}  ({threads} {plural})" for speed in medians], padding=3, fontsize=7)
        axes.set_yticks(range(len(speeds)), list(speeds))
    axes.invert_yaxis()
    axes.set(xscale="log", title=f"{kind}, MB/s of bfloat16 (longer is better)")
    fastest = max(figures["median"] for found in runs.values() for figures in found[f"{kind}_mb_s"].values())
    axes.set_xlim(10, 20 * fastest)  # room for the figures beside the bars
    axes.grid(visible=True, axis="x", alpha=0.25)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "codec_speed")
    demo = sorted(_DEMO.glob("*.txt"))
    parser.set_defaults(fit=None)
    parser.add_argument("--text", type=Path, nargs="+", default=demo[1::2], help="documents to measure on")
    parser.add_argument("--level", default="fine", help="the level that targets, scaling and roofline look at")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the cache that all codecs share")
    parser.add_argument("--document-tokens", type=int, default=1024, help="most tokens of a document")
    parser.add_argument("--scaling", type=int, nargs="+", default=[256, 1024, 4096, 16384, 32768])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--scaling-rounds", type=int, default=5)
    args = parser.parse_args()
    if args.fit is None:
        args.fit = [path for path in demo if path not in args.text]
    if set(args.fit) & set(args.text) or not args.fit or not args.text:
        raise SystemExit("name documents to fit on with --fit and other ones to measure on with --text")
    return args


def main() -> None:
    """Fit, measure, print, draw, save."""
    args = options()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    for threads in args.threads:
        use_threads(threads)
    engine = kvwire.open_engine(args.model, dtype=torch.bfloat16)
    fit = list(args.fit)
    random.Random(args.seed).shuffle(fit)
    documents = read_documents(engine, fit[:12], args.document_tokens)
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    assert profile is not None, "calibration needs at least one document"
    texts = read_documents(engine, args.text, args.document_tokens)
    caches = engine.prefill(texts)
    prefill = partial(kvwire.open_engine(args.model, dtype=torch.float32).prefill, texts)
    cache = joined(caches, args.tokens)
    names = [level.name for level in kvwire.inspect(kvwire.encode(joined(caches, 256), profile=profile)).levels]
    level = names[int(args.level)] if args.level.isdigit() else args.level
    results: dict[str, Any] = {"entropy": entropy(joined(caches, 1024), profile, args.rounds)}
    print_entropy(results["entropy"])
    results["whole"] = {}
    for threads in args.threads:
        results["whole"][str(threads)] = whole(cache, profile, threads, args.rounds, level, prefill)
        print_whole(threads, results["whole"][str(threads)], level)
    results["scaling"] = scaling(caches, profile, args.scaling, args.scaling_rounds, level)
    print_scaling(results["scaling"], level)
    results["roofline"] = roofline(cache, profile, level, args.rounds)
    print_roofline(results["roofline"], level)
    settings = {
        "load_average_before": load,
        "model": args.model.resolve().name,
        "seed": args.seed,
        "level": level,
        "tokens": args.tokens,
        "document_tokens": args.document_tokens,
        "fit_documents": len(documents),
        "rounds": args.rounds,
        "scaling_rounds": args.scaling_rounds,
        "clock": "wall time; entropy: processor time",
    }
    write_json(args.out, "codec_speed", settings, results)
    draw(args.out.with_suffix(".png"), results, level)


if __name__ == "__main__":
    main()
