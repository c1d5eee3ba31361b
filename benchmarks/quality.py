"""Quality of decoded caches, for benchmarks of the codec: windows of text, KL divergence, curves of bits against KL."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from measure import summary

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvwire import KVCache, TransformersEngine

Figures = dict[str, dict[str, Any]]
"""For each codec: family, and each measure's n, median, least, greatest and mean."""
CONTINUATION = 256
"""Tokens after a context over which quality is the mean."""
NOVEL, QUESTIONS = "novel", "questions"
MEASURES = ("bits_per_element", "kl", "perplexity_change", "agreement")


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


def summarise(points: list[dict[str, Any]], measures: Sequence[str] = MEASURES) -> Figures:
    """For each codec, in order of appearance: its family and each measure over the windows."""
    out: Figures = {}
    for codec in dict.fromkeys(point["codec"] for point in points):
        mine = [point for point in points if point["codec"] == codec]
        out[codec] = {"family": mine[0]["family"]}
        for name in measures:
            samples = [point[name] for point in mine]
            out[codec][name] = summary(samples) | {"mean": statistics.fmean(samples)}
    return out


def curve(figures: Figures, family: str) -> list[tuple[float, float]]:
    """Mean bits and mean KL of a family's codecs, the smallest first."""
    mine = (found for found in figures.values() if found["family"] == family)
    return sorted((found["bits_per_element"]["mean"], found["kl"]["mean"]) for found in mine)


def bits_at(points: list[tuple[float, float]], kl: float) -> float | None:
    """Least bits at which a curve crosses a KL divergence, straight between its points on both logarithmic axes."""
    for (few, worse), (many, better) in itertools.pairwise(points):
        if better <= kl <= worse:
            share = math.log(worse / kl) / math.log(worse / better) if worse > better else 0.0
            return few * (many / few) ** share
    return None


def question_windows(engine: TransformersEngine, path: Path, count: int, context: int, seed: int) -> list[list[int]]:
    """Passages of several questions as the context, then a further passage, its question and the answer.

    path: JSON, a list of ``{"ctxs": [{"text": ...}], "question": ..., "answers": [...]}``.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    draw = random.Random(f"{seed} {path.name}")
    found = []
    for _ in range(count):
        order = draw.sample(entries, len(entries))
        last, ids = order[0], []
        for entry in order[1:]:
            ids += engine.tokenize(draw.choice(entry["ctxs"])["text"] + "\n\n")
            if len(ids) >= context:
                break
        answer = next(iter(last["answers"]), "")
        passages = "\n\n".join(passage["text"] for passage in last["ctxs"][:3])
        tail = engine.tokenize(f"{passages}\n\n{last['question']}\n{answer}\n")
        if min(len(ids) - context, len(tail) - CONTINUATION - 1) < 0:
            raise SystemExit(f"{path.name} holds too little text for contexts of {context} tokens; name a longer one")
        found.append(ids[:context] + tail[-CONTINUATION - 1 :])
    return found
