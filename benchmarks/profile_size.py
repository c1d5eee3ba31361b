"""What a profile of an 8B model takes: some of its layers fitted at their real widths, the rest by extrapolation.

The shape is that of a Llama 3.1 8B: 32 layers of 8 heads of 128 keys and values, 128,256 tokens. Caches are synthetic:
a part that the token decides, a part of the context whose spectrum falls off as a power of the rank, both turned at
random within two neighbouring layers, since keys and values of real models show no axes. How fast the spectrum falls
and how much the token decides are options; the bits of an element at the finest level say how rich the caches are.

Bytes grow in proportion to the layers, but for the token table. So does time, but for what is done once; both are
measured with half of the layers, too. The time on a GPU is an estimate from the operations alone.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import RESULTS, one_thread, table, write_json

import kvwire
from kvwire.codec import Ladder, Statistics, Vocabulary
from kvwire.codec.format.arrays import array_sizes
from kvwire.types import CacheMeta, KVCache, LayerSpec

if TYPE_CHECKING:
    from torch import Tensor

    from kvwire import Profile

LAYERS, HEADS, DIM, HIDDEN, VOCABULARY = 32, 8, 128, 4096, 128_256
WEIGHTS_BYTES = 2 * 8_030_261_248
"""bfloat16 weights of Llama 3.1 8B."""
SHARE = 0.01
"""Of the weights' bytes that a profile may take."""
TOGETHER = 2
"""Layers of one group, whose keys and values share a rotation."""
DOCUMENT = 1024
"""Tokens of a calibration text."""
GPU_FLOPS, GPU_EIGEN_FLOPS = 3e13, 1e12
"""Assumed of an H200: float32 products of matrices, and float64 eigenvectors, both well below its data sheet."""
EIGEN = 25
"""Operations of a symmetric eigenproblem over the cube of its width."""


def layer_specs(count: int) -> tuple[LayerSpec, ...]:
    """Layers of the shape; without rotary positions, which the codec takes off first anyway."""
    return (LayerSpec(HEADS, DIM, DIM),) * count


def rotation_of(width: int, draw: torch.Generator) -> Tensor:
    """A random orthonormal matrix."""
    turned: Tensor = torch.linalg.qr(torch.randn(width, width, generator=draw))[0]
    return turned


def synthetic(args: argparse.Namespace, layers: int) -> tuple[list[KVCache], Statistics]:
    """Calibration caches of the first layers, and what an engine would know of tokens and errors."""
    draw = torch.Generator().manual_seed(args.seed)
    meta = CacheMeta("synthetic-8b", layers=layer_specs(layers), positions="off")
    features = torch.randn(VOCABULARY, args.features, generator=draw)
    ids = (VOCABULARY * torch.rand(args.tokens, generator=draw) ** 3).long()  # few tokens are frequent
    width = TOGETHER * 2 * HEADS * DIM
    falls = torch.arange(1, width + 1) ** (-args.exponent / 2)
    of_context = falls * (1 - args.decided) ** 0.5 / falls.square().mean().sqrt()
    of_token = torch.arange(1, args.features + 1) ** (-args.exponent / 2)
    of_token *= (args.decided * width / of_token.square().sum()) ** 0.5
    groups = []
    for _ in range(layers // TOGETHER):
        turned = rotation_of(width, draw)
        elements = torch.randn(args.tokens, width, generator=draw) * of_context @ turned
        groups.append(elements + features[ids] * of_token @ rotation_of(width, draw)[: args.features])
    parts = torch.cat(groups, 1).reshape(args.tokens, 2 * layers, HEADS, DIM).permute(1, 2, 0, 3).bfloat16()
    caches = []
    for start in range(0, args.tokens, DOCUMENT):
        stop = min(start + DOCUMENT, args.tokens)
        keys, values = ([part[:, start:stop] for part in parts[side::2]] for side in (0, 1))
        caches.append(KVCache.from_tensors(keys, values, meta, ids[start:stop].tolist()))
    metrics = [_metric(draw) for _ in range(2 * layers)]
    examples = caches[0].slice(0, min(256, caches[0].tokens))
    known = Statistics(tuple(metrics[::2]), tuple(metrics[1::2]), Vocabulary(features, examples))
    return caches, known


def _metric(draw: torch.Generator) -> Tensor:
    """Of each head, with eigenvalues that fall off as queries' do."""
    factor = torch.randn(HEADS, DIM, DIM, generator=draw) * torch.arange(1, DIM + 1) ** -0.5
    return factor @ factor.mT


def fitted(args: argparse.Namespace, layers: int) -> tuple[Profile, list[KVCache], float]:
    """A profile of that many layers, its caches, and the processor seconds of the fit."""
    caches, statistics = synthetic(args, layers)
    start = time.process_time()
    profile = kvwire.fit_profile(caches, statistics)
    seconds = time.process_time() - start
    if profile is None:
        msg = "too few tokens to fit on; give more with --tokens"
        raise SystemExit(msg)
    return profile, caches, seconds


def bytes_by_part(profile: Profile) -> Counter[str]:
    """Stored bytes of the token table, rows, predictors, metrics, and of all else."""
    found: Counter[str] = Counter()
    for name, size in array_sizes(profile.data).items():
        kind = name.split(".")[-1].split("_")[0].rstrip("0123456789")
        found[kind if kind in {"table", "rows", "predictor", "metric"} else "other"] += size
    found["other"] += len(profile.data) - found.total()
    return found


def plainly(profile: Profile) -> Counter[str]:
    """The same with bfloat16 rows and predictors, float32 metrics and a table in whole bytes."""
    groups = profile.groups
    return Counter(
        table=0 if profile.table is None else profile.table.nbytes,
        rows=sum(2 * group.width**2 for group in groups),
        predictor=sum(0 if g.predictor is None else g.predictor.nbytes for g in groups),
        metric=sum(block.nbytes for group in groups for block in group.metric),
        other=sum(group.mean.nbytes + group.spread.nbytes for group in groups),
    )


def extrapolated(part: Counter[str], layers: int) -> Counter[str]:
    """For all layers of the shape: the table is there once."""
    return Counter({name: size if name == "table" else size * LAYERS // layers for name, size in part.items()})


def gpu_minutes(args: argparse.Namespace) -> float:
    """Minutes of the moments, regression and eigenvectors of all layers on the GPU assumed."""
    width, groups = TOGETHER * 2 * HEADS * DIM, LAYERS // TOGETHER
    features = 2 * HIDDEN  # the embedding, and as much again of what the layers make of a token
    products = 2 * args.tokens * (width**2 + 2 * features * width) * groups + 2 * args.tokens * features**2
    products += groups * 8 * features**2 * width
    eigen = EIGEN * (groups * width**3 + 6 * features**3)
    forward = 3 * 2 * 8e9 * args.tokens  # of the model, forwards and for gradients backwards
    return (products / GPU_FLOPS + eigen / GPU_EIGEN_FLOPS + forward / GPU_FLOPS) / 60


def finest_bits(profile: Profile, cache: KVCache) -> float:
    """Bits of an element at the finest level of one calibration text."""
    info = kvwire.inspect(kvwire.encode(cache, profile, threads=1))
    return info.levels[-1].bits_per_element


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="that are fitted, a multiple of four")
    parser.add_argument("--tokens", type=int, default=8192, help="to fit on")
    parser.add_argument("--features", type=int, default=1024, help="of a token; a real fit has some 8000")
    parser.add_argument("--exponent", type=float, default=1.8, help="by which variances fall off with their rank")
    parser.add_argument("--decided", type=float, default=0.5, help="share of the energy that tokens decide")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "profile_size.json")
    return parser.parse_args()


def main() -> None:
    """Fit twice, extrapolate, print, save."""
    args = options()
    one_thread()
    _, _, few_s = fitted(args, args.layers // 2)
    profile, caches, seconds = fitted(args, args.layers)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    stored, plain = bytes_by_part(profile), plainly(profile)
    whole, whole_plain = extrapolated(stored, args.layers), extrapolated(plain, args.layers)
    each_s = (seconds - few_s) / (args.layers - args.layers // 2)
    hours = (seconds + each_s * (LAYERS - args.layers)) / 3600
    names = sorted(stored, key=stored.__getitem__, reverse=True)
    rows = [[n, *(f"{c[n] / 1e6:.2f}" for c in (stored, plain, whole, whole_plain))] for n in names]
    rows.append(["all", *(f"{c.total() / 1e6:.2f}" for c in (stored, plain, whole, whole_plain))])
    print(table(["MB", f"{args.layers} layers", "plainly", f"{LAYERS} layers", "plainly"], rows))
    bits = finest_bits(profile, caches[0])
    results: dict[str, Any] = {
        "layers_fitted": args.layers,
        "bytes": dict(stored),
        "bytes_plainly": dict(plain),
        "bytes_all_layers": dict(whole) | {"all": whole.total()},
        "bytes_all_layers_plainly": dict(whole_plain) | {"all": whole_plain.total()},
        "share_of_weights": whole.total() / WEIGHTS_BYTES,
        "rank_share": profile.rank / sum(group.width for group in profile.groups),
        "table_columns": profile.token_features,
        "finest_bits_per_element": bits,
        "fit_s": {str(args.layers // 2): few_s, str(args.layers): seconds},
        "fit_hours_all_layers": hours,
        "fit_gpu_minutes_estimated": gpu_minutes(args),
        "peak_bytes": peak,
    }
    told = f"{whole.total() / WEIGHTS_BYTES:.2%} of the weights ({SHARE:.0%} allowed)"
    print(f"\n{told}; {bits:.2f} bits an element at the finest level, rank {results['rank_share']:.0%}")
    print(f"fit: {hours:.2f} h on one core, about {gpu_minutes(args):.1f} min on a GPU; peak {peak / 1e9:.1f} GB")
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    write_json(args.out, "profile_size", settings | {"ladder": list(Ladder().names), "n": 1}, results)


if __name__ == "__main__":
    main()
