"""Size against quality of kvwire and of CacheGen as released, on text that the profile never saw.

Size is bits for each element of the original tensors, everything counted (``cachegen`` says what that is for CacheGen;
for kvwire it is the whole blob up to the level: header, index, token ids and segments; the profile is shared by all
blobs of a model and reported apart). Quality is the next-token distribution over the 256 tokens after the context: mean
KL divergence from the exact float32 cache, greedy agreement, change of perplexity.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from cachegen import encode_size_and_reconstruct
from measure import add_common_options, calibration, default_texts, summary, table, windows, write_json

import kvwire
from kvwire.codec import Ladder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvwire import KVCache, Profile, TransformersEngine

CONTINUATION = 256
TARGET_RATIO = 1 / 25
"""Bits of kvwire over bits of CacheGen in 256-token chunks, at no more KL divergence."""
TARGET_LAYERING = 0.01
"""Bytes that a ladder of three levels may cost over its finest level alone."""
REFERENCE = "CacheGen, 256-token chunks"
_CACHEGEN = {
    REFERENCE: (256, None),
    "CacheGen, 1024-token chunks": (1024, None),
    "CacheGen level 2, 256": (256, 2),
    "CacheGen level 2, 1024": (1024, 2),
    "CacheGen level 1, 256": (256, 1),
    "CacheGen level 1, 1024": (1024, 1),
}


@dataclass(frozen=True)
class Point:
    """One codec on one window of text."""

    codec: str
    bits_per_element: float
    kl: float
    agreement: float
    perplexity_change: float


@dataclass(frozen=True)
class Exact:
    """What the exact cache predicts: log-probabilities ``[256, vocabulary]`` and the tokens that came."""

    log_p: torch.Tensor
    fed: list[int]
    targets: torch.Tensor
    context: int

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of what came."""
        return float(-self.log_p.gather(1, self.targets).mean())


def predictions(engine: TransformersEngine, cache: KVCache, fed: Sequence[int], start: int) -> torch.Tensor:
    """float64 log-probabilities ``[tokens, vocabulary]`` of the token after each of ``fed``."""
    logits = engine.forward(engine.past_key_values(cache), fed, start)
    return torch.log_softmax(logits.double(), dim=-1)


def compare(engine: TransformersEngine, exact: Exact, decoded: KVCache, codec: str, bits: float) -> Point:
    """Quality of a decoded cache."""
    log_q = predictions(engine, decoded, exact.fed, exact.context)
    kl = float((exact.log_p.exp() * (exact.log_p - log_q)).sum(-1).mean())
    agreement = float((exact.log_p.argmax(-1) == log_q.argmax(-1)).double().mean())
    loss = float(-log_q.gather(1, exact.targets).mean())
    return Point(codec, bits, kl, agreement, math.expm1(loss - exact.loss))


def measure_window(engine: TransformersEngine, profile: Profile, ids: list[int], context: int) -> Iterator[Point]:
    """Every codec on one window: ``context`` tokens cached, 256 more fed, one more as the last target."""
    (cache,) = engine.prefill([ids[:context]])
    elements = context * cache.meta.elements_per_token
    fed = ids[context:-1]
    exact = Exact(predictions(engine, cache, fed, context), fed, torch.tensor(ids[context + 1 :])[:, None], context)
    for name, (chunk_tokens, level) in _CACHEGEN.items():
        size, decoded = encode_size_and_reconstruct(cache, chunk_tokens, level)
        yield compare(engine, exact, decoded, name, 8 * size / elements)
    blob = kvwire.encode(cache, profile=profile)
    levels = kvwire.inspect(blob).levels
    assert levels[-1].cumulative_bytes == len(blob), "a level's bytes must count the whole blob"
    for index, level in enumerate(levels):
        decoded = kvwire.decode(blob, index, profile=profile, dtype=torch.float32)
        yield compare(engine, exact, decoded, f"kvwire {level.name}", 8 * level.cumulative_bytes / elements)


def layering(engine: TransformersEngine, profile: Profile, documents: list[list[int]]) -> dict[str, dict[str, float]]:
    """Bytes of a ladder over its finest level alone, minus 1, for three levels and for the default ladder."""
    default = Ladder()
    three = Ladder(default.step, default.names[:3])
    costs: dict[str, list[float]] = {"three levels": [], f"default, {len(default.names)} levels": []}
    for cache in engine.prefill(documents):
        for name, ladder in zip(costs, (three, default), strict=True):
            alone = Ladder(ladder.steps[-1], ladder.names[-1:])
            whole = len(kvwire.encode(cache, profile=profile, levels=ladder))
            costs[name].append(whole / len(kvwire.encode(cache, profile=profile, levels=alone)) - 1)
    return {name: summary(values) for name, values in costs.items()}


def summarise(points: list[Point]) -> dict[str, dict[str, Any]]:
    """For each codec, in order of appearance: the mean KL and each figure's median and spread over the windows."""
    out: dict[str, dict[str, Any]] = {}
    for codec in dict.fromkeys(point.codec for point in points):
        mine = [point for point in points if point.codec == codec]
        names = ("bits_per_element", "kl", "agreement", "perplexity_change")
        out[codec] = {name: summary([getattr(point, name) for point in mine]) for name in names}
        for name in names:
            out[codec][name]["mean"] = statistics.fmean(getattr(point, name) for point in mine)
    return out


def acceptance(codecs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The cheapest kvwire level whose mean KL is no worse than the reference's, and the ratio of their bits."""
    reference = codecs[REFERENCE]
    good = [
        (figures["bits_per_element"]["mean"], name)
        for name, figures in codecs.items()
        if name.startswith("kvwire") and figures["kl"]["mean"] <= reference["kl"]["mean"]
    ]
    if not good:
        return {"level": None, "ratio": None, "met": False}
    bits, name = min(good)
    wanted = reference["bits_per_element"]["mean"]
    ratio = bits / wanted
    between = bits_at(codecs, reference["kl"]["mean"])
    return {
        "level": name,
        "ratio": ratio,
        "factor": 1 / ratio,
        "met": ratio <= TARGET_RATIO,
        "factor_interpolated": None if between is None else wanted / between,
    }


def bits_at(codecs: dict[str, dict[str, Any]], kl: float) -> float | None:
    """Bits at which kvwire's curve crosses a KL divergence, straight between levels on both logarithmic axes."""
    curve = sorted(
        (figures["bits_per_element"]["mean"], figures["kl"]["mean"])
        for name, figures in codecs.items()
        if name.startswith("kvwire")
    )
    for (few, worse), (many, better) in itertools.pairwise(curve):
        if better <= kl <= worse:
            share = math.log(worse / kl) / math.log(worse / better)
            return few * (many / few) ** share
    return None


def print_text(kind: str, codecs: dict[str, dict[str, Any]], verdict: dict[str, Any]) -> None:
    """One text's table and acceptance line."""
    rows = [
        [
            name,
            f"{figures['bits_per_element']['mean']:.3f}",
            f"{figures['kl']['mean']:.2e}",
            f"{figures['kl']['least']:.1e} to {figures['kl']['greatest']:.1e}",
            f"{100 * figures['agreement']['mean']:.2f} %",
            f"{100 * figures['perplexity_change']['mean']:+.3f} %",
        ]
        for name, figures in codecs.items()
    ]
    print(f"\n{kind}")
    print(table(["codec", "bits/element", "mean KL", "KL of windows", "greedy agreement", "perplexity"], rows))
    if verdict["level"] is None:
        print(f"acceptance: MISSED, no kvwire level reaches the KL of {REFERENCE}")
        return
    word = "met" if verdict["met"] else "MISSED"
    print(
        f"acceptance: {verdict['level']} needs {verdict['ratio']:.4f} of the bits of {REFERENCE} "
        f"(1/{verdict['factor']:.1f}, target 1/{1 / TARGET_RATIO:.0f}): {word}"
    )
    if verdict["factor_interpolated"]:
        print(f"            at exactly its KL, interpolated between levels: 1/{verdict['factor_interpolated']:.1f}")


def draw(path: Path, texts: dict[str, dict[str, Any]]) -> None:
    """Bits for each element against KL divergence, one panel for each text."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(texts), figsize=(5.6 * len(texts), 4.6), sharey=True, squeeze=False)
    curves = (
        ("kvwire", "kvwire, 256-token chunks", "o-", "tab:blue", lambda name: name.startswith("kvwire")),
        ("256", "CacheGen, 256-token chunks: levels 1, 2, as released", "s--", "tab:red", lambda name: "256" in name),
        (
            "1024",
            "CacheGen, 1024-token chunks: levels 1, 2, as released",
            "^--",
            "tab:orange",
            lambda name: "1024" in name,
        ),
    )
    for panel, (kind, found) in zip(panels[0], texts.items(), strict=True):
        for _, label, style, colour, belongs in curves:
            chosen = sorted(
                (figures["bits_per_element"]["mean"], figures["kl"]["mean"], name)
                for name, figures in found["codecs"].items()
                if belongs(name)
            )
            panel.plot([p[0] for p in chosen], [p[1] for p in chosen], style, color=colour, label=label)
            for bits, kl, name in chosen if label.startswith("kvwire") else []:
                text = name.removeprefix("kvwire ")
                panel.annotate(text, (bits, kl), textcoords="offset points", xytext=(7, 4), fontsize=8, color=colour)
        panel.set(xscale="log", yscale="log", title=kind, xlabel="bits per element, everything counted")
        panel.grid(visible=True, which="both", alpha=0.25)
        ticks = [0.1, 0.2, 0.5, 1, 2, 5]
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_xticks([], minor=True)
    panels[0][0].set_ylabel("mean KL divergence of the next token")
    panels[0][0].legend(fontsize=8, loc="upper right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"written: {path.name}")


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "versus_cachegen")
    parser.add_argument("--text", type=Path, nargs="+", default=default_texts(), help="unseen texts to measure on")
    parser.add_argument("--contexts", type=int, default=1024, help="tokens in a cached context")
    parser.add_argument("--windows", type=int, default=4, help="contexts from each text")
    parser.add_argument("--calibration", type=int, default=16, help="windows that the profile is fitted on")
    return parser.parse_args()


def main() -> None:
    """Fit, measure, print, save."""
    args = options()
    if not args.text:
        msg = "no text to measure on; name some with --text"
        raise SystemExit(msg)
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    documents = calibration(engine, args.fit, args.calibration, args.contexts, args.seed)
    profile = kvwire.fit_profile(engine.prefill(documents), statistics=engine.statistics(documents))
    assert profile is not None, "calibration needs at least one window"
    texts: dict[str, dict[str, Any]] = {}
    contexts = []
    for path in args.text:
        drawn = windows(engine, path, args.windows, args.contexts + CONTINUATION + 1, args.seed)
        contexts += [ids[: args.contexts] for ids in drawn]
        points = [point for ids in drawn for point in measure_window(engine, profile, ids, args.contexts)]
        codecs = summarise(points)
        verdict = acceptance(codecs)
        texts[path.stem] = {"codecs": codecs, "acceptance": verdict}
        print_text(path.stem, codecs, verdict)
    costs = layering(engine, profile, contexts)
    print()
    for name, cost in costs.items():
        word = "" if name.startswith("default") else (": met" if cost["median"] <= TARGET_LAYERING else ": MISSED")
        target = "" if name.startswith("default") else f", target {100 * TARGET_LAYERING:.0f} %{word}"
        print(f"layering, {name}: {100 * cost['median']:+.2f} % over the finest alone{target}")
    print(f"profile: {len(profile.data) / 1e6:.2f} MB, once for each model")
    settings = {
        "model": args.model.resolve().name,
        "seed": args.seed,
        "context_tokens": args.contexts,
        "continuation_tokens": CONTINUATION,
        "windows_per_text": args.windows,
        "calibration_windows": args.calibration,
        "exact": "float32",
    }
    results = {"texts": texts, "layering": costs, "profile_bytes": len(profile.data)}
    write_json(args.out, "versus_cachegen", settings, results)
    draw(args.out.with_suffix(".png"), texts)


if __name__ == "__main__":
    main()
