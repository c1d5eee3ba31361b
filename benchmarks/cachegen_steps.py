"""CacheGen's paper (arXiv 2310.07240) as a ladder of ingredients: what each gives, in bits for each element and KL.

Steps, each on top of the one before: 8 bits with a scale for each token of a layer's keys or values; bins by layer, in
place of 8 bits; deltas against the first of ten tokens, which keeps 8 bits; arithmetic coding with one table for each
layer's keys or values; with one for each channel, which is ``encode --method cachegen`` at its default level. Beside
them: tables for each channel without deltas. Bins are the same in all steps but the first, so that these differ in bits
and hardly in quality.

Chunks have 256 tokens, keys are coded without positions. Sizes hold all that a reader of the chunks needs besides the
profile, which is stored once for each model and reported apart: scales, escapes, lengths, and for numbers that are not
arithmetic-coded, the least one and the width of each layer's keys or values. Sizes of the method itself are those of
its segments, the others are ideal code lengths, rounded up to bytes. A blob's header counts in none of them.

Variances: of tokens over that of their deltas, against the exact first of ten or against the token before, for each
layer's keys or values, about one mean for all channels or about each channel's own; keys as the engine keeps them and
without positions.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from measure import (
    RESULTS,
    books,
    calibration,
    default_model,
    default_texts,
    summary,
    table,
    windows,
    write_json,
)
from quality import CONTINUATION, Exact, Point, compare, predictions, summarise

import kvwire
from kvwire.codec import positions_off, positions_on
from kvwire.codec.entropy.range_coder import frequencies_of
from kvwire.codec.kinds import cachegen_coding as coding
from kvwire.codec.transform.analysis import gather, scatter_planes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from kvwire import KVCache, TransformersEngine
    from kvwire.codec import CacheGenProfile

    Floats = NDArray[np.float32]
    Ints = NDArray[np.int32]

CHUNK = 256
DEFAULT = 1
"""The level of the paper's bins."""
LIMIT = 127
"""Largest symbol of values without deltas; what lies beyond is escaped, with 32 bits."""
PLAIN_BYTES = 3
"""Of a chunk's layer's keys or values that are not arithmetic-coded: the least number, and the width in bits."""
CLAIM = (3.7, 4.3)
"""Times below 8 bits, by the paper."""
CLAIMED_VARIANCE = (2.4, 2.9)
_SHARED = 64.0  # symbols that a channel's table takes over from all others, as the method's own does
EIGHT, BINS, DELTAS, ONE_TABLE, OWN = (
    "8 bit", "layer-wise bins", "deltas against anchors", "arithmetic coding, a table a layer", "a table a channel",
)  # fmt: skip
NO_DELTAS = "a table a channel, no deltas"
STEPS = (EIGHT, BINS, DELTAS, ONE_TABLE, OWN)


def quantised(elements: Floats, width: np.float32) -> Ints:
    """Every token rounded to bins, ``[tokens, width]``."""
    return np.rint(elements / np.float64(width)).astype(np.int32)


def split(elements: Floats, width: np.float32) -> tuple[Ints, NDArray[np.float16], Floats, Ints]:
    """Anchors, their scales, anchors as decoded, and quantised deltas of the other tokens."""
    anchors, scales = coding.quantise_anchors(elements)
    decoded = coding.restore_anchors(anchors, scales)
    return anchors, scales, decoded, coding.quantise_deltas(coding.deltas_of(elements, decoded), width)


def plain_bits(values: Ints) -> int:
    """Bits of numbers written one like the other, least number and width included."""
    if not values.size:
        return 8 * PLAIN_BYTES
    return 8 * PLAIN_BYTES + values.size * int(np.ptp(values)).bit_length()


def counts_of(values: Ints) -> NDArray[np.float64]:
    """How often each symbol occurs in each channel of ``[count, width]``: ``[width, 2 LIMIT + 2]``, 0 the escape."""
    size, symbols = 2 * LIMIT + 2, symbols_of(values)
    index = symbols + np.arange(values.shape[1]) * size
    return np.bincount(index.ravel(), minlength=values.shape[1] * size).reshape(-1, size).astype(np.float64)


def symbols_of(values: Ints) -> Ints:
    """Symbols of quantised numbers, and the escape for what is beyond them."""
    return np.where(np.abs(values) <= LIMIT, values + LIMIT + 1, 0)


def coded_bits(values: Ints, tables: NDArray[np.uint16]) -> float:
    """Ideal code length of ``[count, width]`` by tables ``[width or 1, symbols]``, escaped numbers included."""
    symbols = symbols_of(values)
    cost = 16 - np.log2(tables.astype(np.float64))
    rows = np.arange(values.shape[1]) if len(tables) > 1 else np.zeros(values.shape[1], np.int64)
    return float(cost[rows[None, :], symbols].sum()) + 32.0 * int(np.count_nonzero(symbols == 0))


class Tables:
    """Distributions that steps need besides the method's own, learnt from calibration caches, for each block."""

    def __init__(self, profile: CacheGenProfile, caches: Sequence[KVCache]) -> None:
        """Count symbols of deltas, anchors and plain values at the default level's bins."""
        self.deltas, self.anchors, self.values = [], [], []
        for block, width in zip(profile.blocks, profile.bins(DEFAULT), strict=True):
            deltas = anchors = values = np.zeros((block.width, 2 * LIMIT + 2))
            for cache in caches:
                elements = gather(cache, block.side, (block.layer,), 0, cache.tokens).numpy()
                anchor, _, _, delta = split(elements, width)
                deltas, anchors = deltas + counts_of(delta), anchors + counts_of(anchor)
                values = values + counts_of(quantised(elements, width))
            self.deltas.append(frequencies_of(deltas.sum(0)[None]))
            self.anchors.append(frequencies_of(anchors.sum(0)[None]))
            self.values.append(frequencies_of(values + _SHARED * values.sum(0) / values.sum()))


def step_bits(cache: KVCache, profile: CacheGenProfile, tables: Tables) -> dict[str, float]:
    """Bits of a cache by each step."""
    bits = dict.fromkeys((*STEPS, NO_DELTAS), 0.0)
    for start in range(0, cache.tokens, CHUNK):
        stop = min(start + CHUNK, cache.tokens)
        one_table = no_deltas = 0.0
        for index, (block, width) in enumerate(zip(profile.blocks, profile.bins(DEFAULT), strict=True)):
            elements = gather(cache, block.side, (block.layer,), start, stop).numpy()
            anchors, scales, _, deltas = split(elements, width)
            values = quantised(elements, width)
            bits[EIGHT] += 8 * elements.size + 16 * len(elements)
            bits[BINS] += plain_bits(values)
            bits[DELTAS] += 8 * anchors.size + 16 * len(scales) + plain_bits(deltas)
            one_table += 16 * len(scales)
            one_table += coded_bits(anchors, tables.anchors[index]) + coded_bits(deltas, tables.deltas[index])
            no_deltas += coded_bits(values, tables.values[index])
        bits[ONE_TABLE] += 8 * ceil(one_table / 8)
        bits[NO_DELTAS] += 8 * ceil(no_deltas / 8)
        bits[OWN] += 8 * len(coding.encode_cachegen(cache, profile, DEFAULT, start, stop)[0])
    return bits


def decoded_as(cache: KVCache, profile: CacheGenProfile, decode: Callable[[Floats, int], Floats]) -> KVCache:
    """The cache that comes of a way to code a chunk's elements of a block, given by its number."""
    off = positions_off(cache)
    keys, values = ([torch.empty_like(part) for part in side] for side in (off.keys, off.values))
    out = replace(off, keys=keys, values=values)
    for index, block in enumerate(profile.blocks):
        for start in range(0, cache.tokens, CHUNK):
            elements = gather(off, block.side, (block.layer,), start, min(start + CHUNK, cache.tokens)).numpy()
            made = torch.from_numpy(decode(elements, index).astype(np.float32))
            scatter_planes(made, ((block.side, block.layer),), out, off.meta, start, {})
    return positions_on(out, cache.meta.offset)


def eight_bit(elements: Floats, _block: int = 0) -> Floats:
    """Every token as anchors are coded."""
    scale = np.abs(elements).max(1).astype(np.float64) / LIMIT
    scale = np.where(scale > 0, np.nextafter(scale.astype(np.float16), np.float16(np.inf)), 1).astype(np.float32)
    return np.rint(elements / scale[:, None]) * scale[:, None]


def measure_window(
    engine: TransformersEngine, profile: CacheGenProfile, tables: Tables, ids: list[int], context: int
) -> tuple[list[Point], dict[str, list[float]]]:
    """Every step on one window of text, and the variance ratios of its cache."""
    (cache,) = engine.prefill([ids[:context]])
    fed, elements = ids[context:-1], context * cache.meta.elements_per_token
    exact = Exact(predictions(engine, cache, fed, context), fed, torch.tensor(ids[context + 1 :])[:, None], context)
    bits = {name: size / elements for name, size in step_bits(cache, profile, tables).items()}
    widths = profile.bins(DEFAULT)

    def by_bins(x: Floats, block: int) -> Floats:
        return quantised(x, widths[block]) * widths[block]

    def by_deltas(x: Floats, block: int) -> Floats:
        _, _, anchors, deltas = split(x, widths[block])
        out = np.repeat(anchors, coding.GROUP_TOKENS, axis=0)[: len(x)]
        out[np.arange(len(x)) % coding.GROUP_TOKENS > 0] += deltas * widths[block]
        return out

    ways = {(EIGHT,): eight_bit, (BINS, NO_DELTAS): by_bins, (DELTAS, ONE_TABLE, OWN): by_deltas}
    found = {}
    for names, way in ways.items():
        point = compare(engine, exact, decoded_as(cache, profile, way), "", 0.0)
        found |= {name: replace(point, codec=name, bits_per_element=bits[name]) for name in names}
    return [found[name] for name in bits if name in found], variance_ratios(cache, profile)


def variance_ratios(cache: KVCache, profile: CacheGenProfile) -> dict[str, list[float]]:
    """Variance of tokens over that of their deltas, for each layer; see the module."""
    out: dict[str, list[float]] = {}
    for block in profile.blocks:
        plain = (cache.keys if block.side == "key" else cache.values)[block.layer].detach()
        kept = plain.permute(1, 0, 2).reshape(cache.tokens, -1).float().numpy()
        kinds = {"values": kept} if block.side == "value" else {
            "keys as kept": kept,
            "keys without positions": gather(cache, "key", (block.layer,), 0, cache.tokens).numpy(),
        }  # fmt: skip
        for kind, elements in kinds.items():
            against = {
                "the first of ten": coding.deltas_of(elements, elements[:: coding.GROUP_TOKENS]),
                "the token before": np.diff(elements.astype(np.float64), axis=0),
            }
            for about, axis in (("one mean", None), ("channels' means", 0)):
                own = float(elements.var(axis=axis).mean())
                for what, deltas in against.items():
                    ratio = own / max(float(deltas.var(axis=axis).mean()), 1e-30)
                    out.setdefault(f"{kind}, {what}, about {about}", []).append(ratio)
    return out


def measure_model(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All texts with one model."""
    engine = kvwire.open_engine(model, dtype=torch.float32)
    context = min(args.contexts, engine.window - CONTINUATION - 1)
    caches = engine.prefill(calibration(engine, args.fit, args.calibration, context, args.seed))
    profile = kvwire.fit_cachegen_profile(caches)
    tables = Tables(profile, caches)
    texts: dict[str, Any] = {}
    for path in args.text:
        points, ratios = [], dict[str, list[float]]()
        for ids in windows(engine, path, args.windows, context + CONTINUATION + 1, args.seed):
            found, more = measure_window(engine, profile, tables, ids, context)
            points += found
            for name, values in more.items():
                ratios.setdefault(name, []).extend(values)
        steps = summarise([{**asdict(point), "family": point.codec} for point in points])
        eight = steps[EIGHT]["bits_per_element"]["mean"]
        for figures in steps.values():
            figures["times_below_8_bit"] = eight / figures["bits_per_element"]["mean"]
        texts[path.stem] = {
            "steps": steps,
            "variance_ratios": {n: summary(v) | {"mean": statistics.fmean(v)} for n, v in ratios.items()},
        }
        print_text(f"{model.resolve().name}, {path.stem}", texts[path.stem])
    drawn = {"windows_per_text": args.windows, "calibration_windows": args.calibration}
    return {"texts": texts, "context_tokens": context, **drawn, "profile_bytes": len(profile.data)}


def print_text(title: str, found: dict[str, Any]) -> None:
    """One text's steps and variance ratios."""
    rows = [
        [
            name, f"{f['bits_per_element']['mean']:.3f}", f"{f['times_below_8_bit']:.2f}", f"{f['kl']['mean']:.1e}",
            f"{100 * f['agreement']['mean']:.1f} %", f"{100 * f['perplexity_change']['mean']:+.2f} %",
        ]
        for name, f in found["steps"].items()
    ]  # fmt: skip
    print(f"\n{title}")
    print(table(["step", "bits/element", "times below 8 bit", "KL", "greedy agreement", "perplexity"], rows))
    ratios = found["variance_ratios"].items()
    rows = [[name, *(f"{f[part]:.2f}" for part in ("median", "least", "greatest"))] for name, f in ratios]
    print(table(["variance of tokens over deltas", "median", "least", "greatest"], rows), flush=True)


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, action="append", help="folder of a Hugging Face model; repeatable")
    parser.add_argument("--fit", type=Path, nargs="+", default=books(), help="texts that the profile is fitted on")
    parser.add_argument("--text", type=Path, nargs="+", default=default_texts(), help="unseen texts to measure on")
    parser.add_argument("--contexts", type=int, default=1024, help="tokens in a cached context")
    parser.add_argument("--windows", type=int, default=4, help="contexts from each text")
    parser.add_argument("--calibration", type=int, default=8, help="windows that the profile is fitted on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "cachegen_steps.json")
    return parser.parse_args()


def main() -> None:
    """Fit, measure, print, save; after each model, so that an interrupted run leaves those before it."""
    args = options()
    if not args.text:
        raise SystemExit("no text to measure on; name some with --text")
    settings = {
        "seed": args.seed, "context_tokens": args.contexts, "continuation_tokens": CONTINUATION, "chunk_tokens": CHUNK,
        "exact": "float32",
        "claims": {"times_below_8_bit": CLAIM, "variance_ratio": CLAIMED_VARIANCE},
    }  # fmt: skip
    results: dict[str, Any] = {}
    for model in args.model or [default_model()]:
        results[model.resolve().name] = measure_model(model, args)
        write_json(args.out, "cachegen_steps", settings, results)


if __name__ == "__main__":
    main()
