"""What a profile of an 8B model takes: bytes by part and by level, and seconds to fit it.

The shape is Llama 3.1 8B's: 32 layers of 8 heads of 128 keys and values, 128,256 tokens. Caches are drawn at these
widths for some of the layers, by a law: how wide the coefficients are that the text does not predict, by their rank,
and what each column of the token table explains, as measured on a smaller model. ``fit_profile`` itself does the rest.
A group of layers counts as often as the model has such groups; the token table counts once. It is also fitted with
each layer by itself.

``--law MODEL ...`` measures the law (minutes for each model) and writes it to ``results/profile_size_law.json``; its
name is the model's ``--name``, or its folder's.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import RESULTS, add_common_options, calibration, one_thread, table, write_json

import kvwire
from kvwire.codec.entropy.tables import GRID_PER_LEVEL
from kvwire.codec.fitting.statistics import Statistics
from kvwire.codec.format.arrays import describe
from kvwire.codec.profile.profile import MAGIC
from kvwire.types import CacheMeta, KVCache, LayerSpec

LAYERS, HEADS, DIM, VOCABULARY = 32, 8, 128, 128_256
FEATURES, GROUP_WIDTH = 384, 4096
WEIGHT_BYTES = 16e9
"""8 billion weights of two bytes; a hundredth of them is what a profile may take."""
POINTS = 65
"""Samples of each curve of the law."""
CHUNK = 1024
PEAK_FLOPS, MATRIX_SHARE, SOLVER_SHARE = 67e12, 0.4, 0.03
"""An H200's float64 operations a second by its data sheet, and the shares of them assumed for products and for
eigenvalue problems."""


def law_of(path: Path, fit: list[Path], windows: int, seed: int) -> dict[str, Any]:
    """Spectra of one model, at even steps of their ranks."""
    engine = kvwire.open_engine(path, dtype=torch.float32)
    documents = calibration(engine, fit, windows, CHUNK, seed)
    profile = kvwire.fit_profile(engine.prefill(documents), engine.statistics(documents), rank_cut=0.0)
    assert profile is not None
    assert profile.table is not None
    width = sum(group.width for group in profile.groups)
    widths = np.sort(np.concatenate([0.05 * 3.0 ** ((g.spread - 1.0) / GRID_PER_LEVEL) for g in profile.groups]))[::-1]
    seen = profile.table[np.concatenate(documents)].astype(np.float64)
    length = np.zeros(profile.token_features)
    for group in profile.groups:
        told = group.predictor[: profile.token_features].double()
        at = 0
        for (_, layer), block in zip(group.planes, group.metric, strict=True):
            heads = profile.layers[layer].kv_heads
            dim = block.shape[-1] if block.ndim > 1 else len(block) // heads
            whole = (
                torch.from_numpy(block).double()
                if block.ndim > 1
                else torch.diag_embed(torch.from_numpy(block).double().reshape(heads, dim))
            )
            part = told[:, at : at + heads * dim].reshape(-1, heads, dim)
            length += torch.einsum("rhd,hde,rhe->r", part, whole, part).numpy()
            at += heads * dim
    explained = np.sort(seen.var(0) * length)[::-1]
    return {
        "width": width,
        "columns": len(explained),
        "deviations": _samples(widths).tolist(),
        "explained_of_an_element": _samples(explained / width).tolist(),
        "explained_share": float(explained.sum() / (explained.sum() + (widths**2).sum())),
    }


def _samples(curve: np.ndarray) -> np.ndarray:
    return np.interp(np.linspace(0, 1, POINTS), np.linspace(0, 1, len(curve)), curve)


def _curve(samples: list[float], count: int) -> torch.Tensor:
    """A curve of the law at so many even steps; straight between samples on a logarithmic axis."""
    logs = np.log(np.maximum(samples, 1e-12))
    return torch.from_numpy(np.exp(np.interp(np.linspace(0, 1, count), np.linspace(0, 1, len(logs)), logs))).float()


class Drawn:
    """Caches and statistics by the law."""

    def __init__(self, law: dict[str, Any], layers: int, group_layers: int, draw: torch.Generator) -> None:
        """Draw bases, metrics and what tokens say; group_layers: layers that have a basis in common."""
        self.layers, self.draw, self.group = layers, draw, group_layers * 2 * HEADS * DIM
        self.bases = [self._basis(self.group) for _ in range(layers // group_layers)]
        self.deviations = _curve(law["deviations"], self.group)
        columns = law["columns"]
        self.features = torch.randn(VOCABULARY, FEATURES, generator=draw)
        scale = _curve(law["explained_of_an_element"], columns).sqrt()
        self.weights = torch.zeros(FEATURES, layers * 2 * HEADS * DIM)
        self.weights[:columns] = scale[:, None] * torch.randn(columns, self.weights.shape[1], generator=draw)
        self.roots = [self._metric() for _ in range(2 * layers)]
        common = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)  # words by rank: Zipf's law
        self.frequency = common / common.sum()

    def _basis(self, width: int) -> torch.Tensor:
        return torch.linalg.qr(torch.randn(width, width, generator=self.draw))[0]

    def _metric(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A metric by head and the inverse of its root: axes turned at random, weights over two decades."""
        weights = 10 ** (2 * torch.rand(HEADS, DIM, generator=self.draw) - 1)
        axes = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=self.draw))[0]
        return (axes * weights[:, None]) @ axes.mT, (axes * weights[:, None].rsqrt()) @ axes.mT

    def cache(self, ids: torch.Tensor) -> KVCache:
        """The cache of some tokens."""
        values = self.features[ids] @ self.weights
        for number, basis in enumerate(self.bases):
            signs = torch.rand(len(ids), self.group, generator=self.draw) - 0.5
            laplace = -signs.sign() * torch.log1p(-2 * signs.abs().clamp(max=0.4999999)) / math.sqrt(2)
            values[:, number * self.group : (number + 1) * self.group] += (laplace * self.deviations) @ basis
        planes = values.reshape(len(ids), 2 * self.layers, HEADS, DIM).permute(1, 2, 0, 3)
        planes = [plane @ root[1] for plane, root in zip(planes, self.roots, strict=True)]
        return KVCache.from_tensors(planes[0::2], planes[1::2], self.meta, tuple(ids.tolist()))

    @property
    def meta(self) -> CacheMeta:
        """Of the measured layers; positions off."""
        return CacheMeta("drawn", "", layers=(LayerSpec(HEADS, DIM, DIM),) * self.layers)

    def text(self, tokens: int) -> torch.Tensor:
        """Token ids, frequent ones more often."""
        return torch.multinomial(self.frequency, tokens, replacement=True, generator=self.draw)

    def statistics(self) -> Statistics:
        """Metrics and the vocabulary."""
        metrics = [root[0] for root in self.roots]
        return Statistics(tuple(metrics[0::2]), tuple(metrics[1::2]), self.features)


def part_of(name: str) -> str:
    """The part of a profile that an array belongs to."""
    inner = name.partition(".")[2]
    kinds = {"rows": "synthesis rows", "predictor": "text prediction", "metric": "metrics (encoders alone)"}
    found = next((kind for start, kind in kinds.items() if inner.startswith(start)), "")
    return found or ("token table" if name == "table" else "means, classes and tables")


def measure(law: dict[str, Any], args: argparse.Namespace, group_width: int) -> dict[str, Any]:
    """Fit at real widths, and count for all layers."""
    group_layers = max(1, GROUP_WIDTH // (2 * HEADS * DIM))
    began = time.perf_counter()
    drawn = Drawn(law, args.layers, group_layers, torch.Generator().manual_seed(args.seed))
    statistics = drawn.statistics()
    caches = [drawn.cache(drawn.text(CHUNK)) for _ in range(args.tokens // CHUNK)]
    drawn_s, began, processor = time.perf_counter() - began, time.perf_counter(), time.process_time()
    profile = kvwire.fit_profile(caches, statistics, group_width=group_width)
    assert profile is not None
    fit_s, fit_processor_s = time.perf_counter() - began, time.process_time() - processor
    times = LAYERS / args.layers
    told = describe(MAGIC, profile.data, "profile")
    parts: dict[str, float] = {}
    levels = []
    total = float(told.start)
    for section in told.sections:
        for name, _, _, stored in section.listed:
            size = stored * (times if name.startswith("g") else 1)
            parts[part_of(name)] = parts.get(part_of(name), 0.0) + size
            total += size
        levels.append(total)
    entries = sum(g.rank * g.width for g in profile.groups)
    return {
        "rank_share": sum(g.rank for g in profile.groups) / sum(g.width for g in profile.groups),
        "rows_bits_an_entry": 8 * parts["synthesis rows"] / times / entries,
        "table_columns": profile.token_features,
        "bytes_by_part": parts,
        "bytes_by_level": levels[:5],
        "bytes_for_all_levels": levels[-2],
        "bytes": total,
        "share_of_weights": total / WEIGHT_BYTES,
        "drawing_s": drawn_s,
        "fit_s": fit_s,
        "fit_processor_s": fit_processor_s,
        "fit_processor_s_all_layers": fit_processor_s * times,
        "h200": on_h200(args, group_width, profile.token_features),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def on_h200(args: argparse.Namespace, w: int, columns: int) -> dict[str, float]:
    """An estimate, not a measurement: operations in float64 over what the card is assumed to do of them.

    For each group of width w: products for moments 2 t w (w + 2 F), the weighted covariance and its products 10 w^3,
    the predictor's rounding 2 r w^2 and factors 3 w^3; eigenvectors 25 w^3. t tokens, F features, r columns.
    """
    t = args.calibration_tokens
    groups = LAYERS * 2 * HEADS * DIM / w
    products = groups * (2 * t * w * (w + 2 * FEATURES) + 13 * w**3 + 2 * columns * w**2)
    eigen = groups * 25 * w**3
    seconds = products / (PEAK_FLOPS * MATRIX_SHARE) + eigen / (PEAK_FLOPS * SOLVER_SHARE)
    return {"product_operations": products, "eigen_operations": eigen, "minutes": seconds / 60}


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "profile_size")
    parser.add_argument("--law", type=Path, nargs="+", help="measure the law on these models, and nothing else")
    parser.add_argument("--name", nargs="+", help="what these models are called in the results")
    parser.add_argument("--law-file", type=Path, default=RESULTS / "profile_size_law.json")
    parser.add_argument("--of", nargs="+", help="use the laws of these models alone")
    parser.add_argument("--windows", type=int, default=12, help="contexts that the law is measured on")
    parser.add_argument("--layers", type=int, default=4, help="layers that are drawn")
    parser.add_argument("--tokens", type=int, default=8192, help="that the profile is fitted on")
    parser.add_argument("--calibration-tokens", type=int, default=16384, help="that the estimate for a GPU is for")
    return parser.parse_args()


def main() -> None:
    """Measure, print, save."""
    args = options()
    one_thread()
    if args.law:
        names = args.name or [path.resolve().name for path in args.law]
        found = {
            name: law_of(path, args.fit, args.windows, args.seed) for name, path in zip(names, args.law, strict=True)
        }
        write_json(args.law_file, "profile_size_law", {"windows": args.windows, "seed": args.seed}, found)
        return
    laws = json.loads(args.law_file.read_text(encoding="utf-8"))["results"]
    found = {name: measure(law, args, GROUP_WIDTH) for name, law in laws.items() if not args.of or name in args.of}
    most = max(found, key=lambda name: found[name]["bytes"])
    found[f"{most}; each layer by itself"] = measure(laws[most], args, GROUP_WIDTH // 2)
    head = ["law of", *next(iter(found.values()))["bytes_by_part"], "all", "of the weights"]
    rows = [
        [name, *(f"{size / 1e6:.1f}" for size in row["bytes_by_part"].values()), f"{row['bytes'] / 1e6:.1f} MB",
         f"{row['share_of_weights']:.2%}"]
        for name, row in found.items()
    ]  # fmt: skip
    print(table(head, rows))
    for name, row in found.items():
        levels = ", ".join(f"{size / 1e6:.1f}" for size in row["bytes_by_level"])
        minutes = row["fit_processor_s_all_layers"] / 60
        print(f"{name}: readers of levels 0 to 4 fetch {levels} MB")
        print(
            f"    {row['fit_processor_s']:.0f} processor seconds for {args.layers} layers; all: {minutes:.0f} minutes"
        )
        print(f"    an H200 by arithmetic: {row['h200']['minutes']:.1f} minutes")
    settings = {name: getattr(args, name) for name in ("layers", "tokens", "calibration_tokens", "seed")} | {
        "n": 1,
        "group_width": GROUP_WIDTH,
        "model_layers": LAYERS,
        "weight_bytes": WEIGHT_BYTES,
    }
    write_json(args.out, "profile_size", settings, found)


if __name__ == "__main__":
    main()
