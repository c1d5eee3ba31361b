"""CacheBlend's gradual filter: fewer and fewer rows from layer to layer, against as many in all layers, at equal work.

    python benchmarks/gradual_filter.py --prompts 24

CacheBlend (arXiv 2405.16444) chooses some more rows than it wants after the first layers, and drops the steadiest of
them later, again by how much keys and values change; its schedule is not published. Here the share of rows is dropped
to at a second layer and after each third of the layers, in two schedules that run as many rows through layers as 15 %
in all of them. Prompts are six documents that follow each other in an unseen book; KL divergence from a full prefill.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, Any

import torch
from measure import add_common_options, default_texts, one_thread, write_json
from reuse_parts.prompts import DOCUMENTS, LENGTH, QUESTION, copy, draw, expected

import kvwire
from kvwire.reuse import RepairInput, repair_prompt
from kvwire.reuse.repair.selectors.base import Chosen, RepairCost, highest
from kvwire.reuse.repair.selectors.cacheblend import CacheBlend, deviation

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

SHARE = 0.15
SCHEDULES = {"15 % in all layers": (0.15,) * 3, "20, 15, 10 %": (0.2, 0.15, 0.1), "30, 10, 5 %": (0.3, 0.1, 0.05)}


@dataclass(frozen=True)
class Gradual(CacheBlend):
    """CacheBlend that drops rows again after each third of the layers."""

    schedule: tuple[float, ...] = (SHARE,)

    def choose(self, given: RepairInput, count: int) -> Chosen:
        """See ``Selector``; count: of 15 % of all tokens."""
        layers = len(given.cache.meta.layers)
        edges = [self.check_layer + (layers - self.check_layer) * at // len(self.schedule) for at in range(3)]
        counts = {layer: round(share / SHARE * count) for layer, share in zip(edges, self.schedule, strict=True)}
        rows = torch.arange(given.documents[0], given.cache.tokens)
        return Chosen(rows, _Dropping(counts, given.documents))

    def cost(self, tokens: int, rows: int, question: int, layers: int) -> RepairCost:
        """See ``Selector``: that of as many rows in all layers."""
        return super().cost(tokens, rows, question, layers)


class _Dropping:
    writes_all = True

    def __init__(self, counts: dict[int, int], documents: tuple[int, ...]) -> None:
        self._counts, self._documents = counts, documents

    def choose(
        self, layer: int, rows: Tensor, stale: tuple[Tensor, Tensor], fresh: tuple[Tensor, Tensor]
    ) -> Tensor | None:
        """See ``Narrowing``."""
        if self._counts.get(layer, len(rows)) >= len(rows):
            return None
        scores = torch.full((sum(self._documents),), -torch.inf)
        scores[rows] = deviation(stale, fresh).cpu()
        chosen = torch.zeros(len(scores), dtype=torch.bool)
        chosen[highest(scores, self._counts[layer], self._documents)] = True
        return chosen[rows].nonzero()[:, 0]


def measured(engine: Any, books: list[Path], number: int, seed: int) -> dict[str, float]:  # noqa: ANN401 - any engine
    """KL divergence of one prompt in each way."""
    prompt = draw(engine, books, number, seed)
    caches = {"linked": prompt.linked}
    for name, schedule in SCHEDULES.items():
        caches[name] = copy(prompt.linked)
        given = RepairInput(engine, caches[name], prompt.text, (LENGTH,) * DOCUMENTS, prompt.question)
        repair_prompt(given, Gradual(schedule=schedule), SHARE)
    found = {}
    for name, cache in caches.items():
        (log_p,) = expected(engine, [cache], prompt.follows)
        found[name] = float((prompt.log_p.exp() * (prompt.log_p - log_p)).sum(-1).mean())
    return found


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "gradual_filter")
    parser.add_argument("--prompts", type=int, default=24)
    args = parser.parse_args()
    one_thread()
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    rows: list[dict[str, float]] = []
    settings = {"model": "SmolLM2-135M-Instruct" if "SmolLM2" in args.model.name else args.model.name,
                "documents": DOCUMENTS, "tokens": LENGTH, "question": QUESTION, "seed": args.seed}  # fmt: skip
    for number in range(args.prompts):
        rows.append(measured(engine, default_texts(), number, args.seed))
        print(number, rows[-1], flush=True)
        if len(rows) > 1:
            write_json(args.out, "gradual_filter", settings, _summed(rows))


def _summed(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Of each way: mean and median, and what it gains on the same rows in all layers, with 95 % of its uncertainty."""
    out: dict[str, Any] = {"prompts": len(rows)}
    plain = next(iter(SCHEDULES))
    for name in rows[0]:
        each, gains = [row[name] for row in rows], [row[plain] - row[name] for row in rows]
        error = 1.96 * stdev(gains) / len(gains) ** 0.5
        out[name] = {"kl": fmean(each), "kl_median": median(each), "gained": [fmean(gains), error]}
    return out


if __name__ == "__main__":
    main()
