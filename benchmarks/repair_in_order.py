"""Repair in document order against repair at the end: time to first token, and divergence from a full prefill.

    python benchmarks/repair_in_order.py

serves the demonstration's documents over emulated links and asks its first prompt and one over eight shorter ones,
with no rows repaired and with shares of them: chosen by a selector that knows its rows beforehand, once all computed
after the last chunk and once document by document while the link brings the rest, and by the question's attention,
which has to see all documents first. Ways take turns, so that a busy moment hits all of them alike. Every load is the
shipped one, but for the level, which is the same for all: the finest (``--level``), so that the divergence is that of
links. What the simulator makes of published shapes is written down beside.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from measure import ROOT, add_common_options, summary, table, write_json
from reuse_parts.in_order import draw, published, trades
from tqdm import tqdm

import kvwire
from kvwire.comparison.run import local_server
from kvwire.reuse import selector_of
from kvwire.runtime.coding import Document
from kvwire.runtime.corpus import Corpus
from kvwire.runtime.costs import measure_costs
from kvwire.runtime.estimates_file import EstimatesFile
from kvwire.runtime.loader import Loader
from kvwire.runtime.quality import Reference
from kvwire.runtime.settings import LoadSettings
from kvwire.runtime.text_files import read_texts
from kvwire.store.schemes import open_store
from kvwire.transport import parse_link

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LINKS = ("10mbit,60ms", "50mbit,20ms", "500mbit,5ms")
ANSWER_TOKENS = 32
WARM = 1
"""Loads before those that count: a server in use knows its link and its kernels."""


@dataclass(frozen=True)
class Way:
    """How a prompt is loaded: rows, what chooses them, and when they are computed."""

    share: float
    selector: str
    in_order: bool

    @property
    def name(self) -> str:
        """For tables."""
        if not self.share:
            return "none"
        return f"{self.selector} {100 * self.share:g} %, {'in order' if self.in_order else 'at the end'}"


def ways(shares: Sequence[float], selectors: Sequence[str]) -> list[Way]:
    """All that is compared; the question's attention is known at the end alone where nothing is looked at before."""
    orders = {name: (False,) if "question" in selector_of(name).needs else (False, True) for name in selectors}
    paired = [Way(s, name, order) for name in selectors for s in shares for order in orders[name]]
    return [Way(0.0, "none", in_order=False), *paired]


@dataclass(frozen=True)
class Prompt:
    """Documents by name, the question's token ids, and a full prefill of them."""

    name: str
    documents: tuple[str, ...]
    question: tuple[int, ...]
    reference: Reference


def prompts(engine: Any, texts: dict[str, list[int]], question: str, length: int) -> list[Prompt]:  # noqa: ANN401
    """The demonstration's, and as many documents of ``length`` tokens as its window holds, eight at most."""
    ids = tuple(engine.tokenize(question))
    demo = ("01-the-lighthouse-keeper", "05-the-wager-at-the-weir", "08-the-flood-at-mellish-bridge")
    short = {f"{name}, {length} tokens": tokens[:length] for name, tokens in [*texts.items()][:8]}
    texts.update(short)
    made = []
    for name, documents in (("demonstration", demo), (f"eight of {length} tokens", tuple(short))):
        parts = [texts[document] for document in documents]
        made.append(Prompt(name, documents, ids, Reference.of(engine, parts, ids, ANSWER_TOKENS)))
    return made


def measured(args: argparse.Namespace, told: Callable[[list[dict[str, Any]]], None]) -> list[dict[str, Any]]:
    """Every prompt over every link. told: hears of what is measured so far."""
    engine = kvwire.open_engine(args.model, dtype=torch.float32)
    texts = {name: engine.tokenize(text) for name, text in read_texts([str(args.documents)]).items()}
    asked = prompts(engine, texts, args.question, args.length)
    names = {name for prompt in asked for name in prompt.documents}
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = args.store or stack.enter_context(tempfile.TemporaryDirectory(prefix="kvwire-order-"))
        corpus = Corpus(engine, open_store(str(folder)))

        list(corpus.encode([Document(name, tuple(texts[name])) for name in sorted(names)]))
        with local_server(folder) as url, closing(open_store(url)) as remote:
            far = Corpus(engine, remote)
            costs = measure_costs(engine, far.profile())
            for prompt in asked:
                for link in args.links:
                    print(f"{link}, {prompt.name}", flush=True)
                    rows += over(engine, far, costs, link, prompt, args)
                    told(rows)
    return rows


def over(
    engine: Any, corpus: Corpus, costs: Any, link: str, prompt: Prompt, args: argparse.Namespace  # noqa: ANN401
) -> list[dict[str, Any]]:  # fmt: skip
    """One prompt over one link, in all ways."""
    chosen, found, kl, beside = ways(args.shares, args.selectors), {}, {}, {}
    expected: dict[str, list[float]] = {}
    with ExitStack() as stack:
        loaders = {
            way: stack.enter_context(
                Loader(
                    engine, corpus, costs=costs, link=parse_link(link), memory=EstimatesFile(None),
                    settings=LoadSettings(
                        repair=way.share or "none", selector=way.selector if way.share else "auto",
                        repair_in_order=way.in_order, quality_floor=args.level, quality_ceiling=args.level,
                        bandwidth_prior=parse_link(link).bandwidth_bytes_s,
                    ),
                )
            )
            for way in chosen
        }  # fmt: skip
        for turn in tqdm(
            range(args.rounds + WARM), desc=f"{link} {prompt.name}", mininterval=10, leave=False, file=sys.stderr
        ):
            for way, loader in loaders.items():
                answer = loader.ask(prompt.documents, prompt.question)
                if turn < WARM:
                    continue
                found.setdefault(way, []).append(answer.timing)
                expected.setdefault(way.name, []).append(answer.predicted_s or 0.0)
                beside.setdefault(way, []).append(answer.repair.beside if answer.repair else 0)
                if turn == args.rounds + WARM - 1:
                    kl[way] = prompt.reference.from_full(engine, answer.prompt.cache)
                    texts = sum(decision.action == "recompute" for decision in answer.decisions)
                    rows = len(answer.repair.rows) if answer.repair else 0
                    found[way] = found[way], texts, rows
    return [
        {
            "link": link, "prompt": prompt.name, "way": way.name, "share": way.share, "selector": way.selector,
            "in_order": way.in_order, "ttft_s": summary([timing.ttft_s for timing in timings]),
            "ttft_all_s": [timing.ttft_s for timing in timings],
            "predicted_s": statistics.median(expected[way.name]),
            "repair_s": statistics.median(timing.repair_s for timing in timings), "kl_from_full": kl[way],
            "rows": rows, "rows_beside": statistics.median(beside[way]), "chunks_from_text": texts,
        }
        for way, (timings, texts, rows) in found.items()
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "repair_in_order")
    parser.add_argument("--documents", type=Path, default=ROOT / "demo" / "documents")
    parser.add_argument("--question", default="When all this had been told, it was plain that")
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.15])
    parser.add_argument("--selectors", nargs="+", default=["first", "attention"])
    parser.add_argument("--length", type=int, default=192, help="tokens of a document of the longer prompt")
    parser.add_argument("--level", type=int, default=4, help="that everything is fetched at")
    parser.add_argument("--store", type=Path, help="folder where the documents stay encoded; default: a temporary one")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main() -> None:
    """Measure, print, draw and write down."""
    args, began = arguments(), time.perf_counter()
    rows = measured(args, lambda rows: written(args, rows, began))
    head = ["", "TTFT s", "least", "greatest", "predicted", "KL to full", "rows", "beside", "text"]
    for link in args.links:
        for name in dict.fromkeys(row["prompt"] for row in rows):
            mine = [row for row in rows if (row["link"], row["prompt"]) == (link, name)]
            cells = [
                [
                    row["way"], *(f"{row['ttft_s'][key]:.4f}" for key in ("median", "least", "greatest")),
                    f"{row['predicted_s']:.4f}", f"{row['kl_from_full']:.6f}", f"{row['rows']}",
                    f"{row['rows_beside']:g}", f"{row['chunks_from_text']}",
                ]
                for row in mine
            ]  # fmt: skip
            print(f"\n{link}, {name}\n{table(head, cells)}")
    for each in trades(rows):
        print({key: value for key, value in each.items() if key != "against_none"})
    draw(rows, args.out.with_suffix(".png"))


def written(args: argparse.Namespace, rows: list[dict[str, Any]], began: float) -> None:
    """Write down what is measured so far."""
    settings = {
        "rounds": args.rounds, "level": args.level, "links": list(args.links), "shares": args.shares,
        "selectors": args.selectors, "seed": args.seed, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    write_json(args.out, "repair_in_order", settings, {"loads": rows, "trades": trades(rows), "published": published()})


if __name__ == "__main__":
    main()
