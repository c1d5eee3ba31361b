"""Size and error of every segment of the demonstration's documents, for the controller's simulator.

    python benchmarks/segment_sizes.py

writes ``controller/simulator/segment_sizes.json``, which is part of the package: for each method, document, chunk and
level, the bits for each element that a reader of that level fetches (segments alone, without the blob's header) and the
error of what it decodes. The error is taken in the same way for every method: attention-weighted squared error over
attention-weighted energy about the means, all directions counted. For kvwire's own levels that is, within some per
cent, what a blob's index says; CacheGen's index counts plain elements instead, which says five times as much.

The documents are dealt into two halves, in an order that the seed decides, and each half is encoded with a profile that
was fitted on the other one: no document is coded with what was learnt from itself. Methods: kvwire's default ladder
without a head start and with one of 1 and 2 layers, and CacheGen's levels. The same machine, versions and seed give the
same file; it takes some minutes on one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from measure import ROOT, one_thread, table, write_json
from test_parts.codec.naive_coding import energy_of

import kvwire
from kvwire.codec.prediction.text import TextPredictor
from kvwire.codec.transform.analysis import analyse

if TYPE_CHECKING:
    from kvwire import KVCache, TransformersEngine
    from kvwire.codec import AnyProfile

OUT = ROOT / "controller" / "simulator" / "segment_sizes.json"
HEAD_STARTS = {"kvwire": 0, "kvwire-head-start-1": 1, "kvwire-head-start-2": 2}
CACHEGEN = "cachegen"


class Halves:
    """Documents of one half, ready to be fitted on or encoded."""

    def __init__(self, engine: TransformersEngine, paths: list[Path]) -> None:
        """Compute the caches; a document longer than the model's window is cut."""
        self.engine = engine
        self.names = [path.stem for path in paths]
        self.ids = [engine.tokenize(path.read_text(encoding="utf-8"))[: engine.window] for path in paths]
        self.caches = [engine.prefill([ids])[0] for ids in self.ids]

    def hidden(self, layers: int) -> list[Any] | None:
        """What a reader with that head start computes first; None without one."""
        return [self.engine.prefix_states(ids, layers) for ids in self.ids] if layers else None

    def fit(self, method: str) -> AnyProfile:
        """A profile of these documents."""
        if method == CACHEGEN:
            return kvwire.fit_cachegen_profile(self.caches)
        layers = HEAD_STARTS[method]
        seen = self.engine.statistics(self.ids, tokens=not layers)
        profile = kvwire.fit_profile(self.caches, seen, prefix_layers=layers, hidden=self.hidden(layers))
        assert profile is not None
        return profile

    def ruler(self) -> TextPredictor:
        """The metric in which errors are taken: no prediction, no direction left out."""
        profile = kvwire.fit_profile(self.caches, self.engine.statistics(self.ids), text=False, rank_cut=0.0)
        assert profile is not None
        return TextPredictor(profile, self.engine.window, None, None)

    def encode(self, method: str, profile: AnyProfile, ruler: TextPredictor) -> list[dict[str, Any]]:
        """Every document's segments."""
        hidden = self.hidden(HEAD_STARTS.get(method, 0)) or [None] * len(self.ids)
        return [
            {"document": name, "chunks": chunks(cache, states, profile, ruler)}
            for name, cache, states in zip(self.names, self.caches, hidden, strict=True)
        ]


def chunks(
    cache: KVCache, hidden: torch.Tensor | None, profile: AnyProfile, ruler: TextPredictor
) -> list[dict[str, Any]]:
    """Tokens of each chunk, and bits for each element and error of its levels."""
    blob = kvwire.encode(cache, profile, hidden=hidden)
    info = kvwire.inspect(blob)
    decoded = [
        kvwire.decode(blob, level=level, profile=profile, hidden=hidden, dtype=torch.float32)
        for level in range(len(info.levels))
    ]
    width = sum(part[:, :1].numel() for part in (*cache.keys, *cache.values))
    found = []
    for chunk in range(info.chunks):
        start, stop = info.chunk_span(chunk)
        exact = analyse(cache, ruler, start, stop)[0]
        missed = [energy_of(np.subtract(analyse(other, ruler, start, stop)[0], exact)) for other in decoded]
        read = [info.chunk_bytes(chunk, level) for level in range(len(decoded))]
        found.append(
            {
                "tokens": stop - start,
                "bits_per_element": [8 * size / ((stop - start) * width) for size in read],
                "errors": [error / energy_of(exact) for error in missed],
            }
        )
    return found


def measure(method: str, halves: tuple[Halves, Halves], layers: int) -> dict[str, Any]:
    """One method on all documents."""
    first, second = halves
    profiles = first.fit(method), second.fit(method)
    documents = [
        *first.encode(method, profiles[1], second.ruler()),
        *second.encode(method, profiles[0], first.ruler()),
    ]
    levels = profiles[0].level_names if isinstance(profiles[0], kvwire.CacheGenProfile) else kvwire.Ladder().names
    return {
        "levels": list(levels),
        "layered": method != CACHEGEN,
        "head_start": HEAD_STARTS.get(method, 0) / layers,
        "documents": sorted(documents, key=lambda entry: entry["document"]),
    }


def print_methods(methods: dict[str, Any]) -> None:
    """Mean bits and error of each level over full chunks."""
    rows = []
    for name, found in methods.items():
        whole = [chunk for entry in found["documents"] for chunk in entry["chunks"] if chunk["tokens"] == 256]
        for level, title in enumerate(found["levels"]):
            bits = [chunk["bits_per_element"][level] for chunk in whole]
            errors = [chunk["errors"][level] for chunk in whole]
            spread = f"{min(bits):.3f} to {max(bits):.3f}"
            rows.append([name, title, f"{statistics.mean(bits):.3f}", spread, f"{statistics.mean(errors):.5f}"])
    print(table(["method", "level", "bits", "of chunks", "error"], rows))


def main() -> None:
    """Encode, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    one_thread()  # threads change the last bits of a sum
    engine = kvwire.open_engine(ROOT / "demo" / "model")
    paths = sorted((ROOT / "demo" / "documents").glob("*.txt"))
    random.Random(args.seed).shuffle(paths)
    halves = Halves(engine, sorted(paths[::2])), Halves(engine, sorted(paths[1::2]))
    layers = len(engine.meta.layers)
    methods = {method: measure(method, halves, layers) for method in (*HEAD_STARTS, CACHEGEN)}
    print_methods(methods)
    settings = {
        "model": "demo/model",
        "documents": "demo/documents",
        "seed": args.seed,
        "chunk_tokens": 256,
        "dtype": str(engine.model.dtype),
        "fitted_on_tokens": [sum(map(len, half.ids)) for half in halves],
    }
    write_json(args.out, "segment_sizes", settings, methods)


if __name__ == "__main__":
    main()
