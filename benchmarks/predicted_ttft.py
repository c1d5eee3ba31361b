"""Predicted against measured time to the first token: real loads beside the simulator, policy by policy, link by link.

The model answers a question over three of the demonstration's documents, warm, over emulated links and over a real
connection that the kernel shapes. The simulator plays the same load with the same sizes, settings and policy, the
link as it was set, and the costs that the loader had measured by then. What the machine takes besides is measured in
every round with a load over a link of 10 Gbit/s: idle time of the lanes between jobs, opening of headers, what the
thread that steers takes with each event, handing over. Lookups in the catalog are not predicted but taken as measured.
One thread computes, another one fetches. Needs root for the shaped links. Writes ``results/predicted_ttft.json`` and
draws ``results/predicted_ttft.png``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import tempfile
from contextlib import ExitStack
from itertools import cycle, islice
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from measure import RESULTS, ROOT, default_model, one_thread, table, write_json
from predicted_ttft_parts.links import Link, first_bytes
from predicted_ttft_parts.loads import Contender, Loaded, Model, Prompt, Way
from predicted_ttft_parts.machine import others_busy
from predicted_ttft_parts.picture import draw

import kvwire
from kvwire.comparison.run import local_server
from kvwire.controller import Adaptive
from kvwire.controller.policies import CacheGen, Fixed, TextOnly
from kvwire.runtime.corpus import Corpus, Document
from kvwire.runtime.costs import measure_costs
from kvwire.store import FolderStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.engines.transformers import TransformersEngine
    from kvwire.store import Store
    from kvwire.transport import EmulatedLink

DOCUMENTS = ("01-the-lighthouse-keeper", "05-the-wager-at-the-weir", "07-the-clockmakers-apprentice")
PAIRS = ((0, 1), (1, 2), (2, 0))
QUESTION = "\n\nWhen all this had been told, it was plain that"
RATES_MBIT = (5.0, 20.0, 50.0, 200.0)
RTT_S = 0.02
TOGETHER, TOGETHER_LOADS = Link("emulated", 50.0, RTT_S), (3, 10)
FAST = Link("emulated", 10_000.0, RTT_S)  # so far from being a limit that what is left is the machine's
LEVELS = (0, 2, 4)
WARM_UPS = 2
BAND = 0.15
SOON, TIGHT = Way("earliest", Adaptive()), "quality"
OTHERS = (
    Way("cachegen", CacheGen()), *(Way(f"level {level}", Fixed(level)) for level in LEVELS), Way("text", TextOnly()),
)  # fmt: skip


def links(kinds: Sequence[str], rates: Sequence[float]) -> list[Link]:
    """All links, emulated ones first."""
    found = []
    if "emulated" in kinds:
        found += [*(Link("emulated", mbit, RTT_S) for mbit in rates), Link("emulated", None, RTT_S)]
    if "shaped" in kinds:
        found += [Link("shaped", mbit, rtt_s) for rtt_s in (0.0, RTT_S) for mbit in rates]
    return found


class Benchmark:
    """One engine and one store, whose documents are encoded where they are not."""

    def __init__(self, engine: TransformersEngine, folder: Path, rounds: int, wait_s: float) -> None:
        """Encode, and measure costs to start from."""
        self._engine, self._folder, self._rounds, self._wait_s = engine, folder, rounds, wait_s
        texts = [(ROOT / "demo" / "documents" / f"{name}.txt").read_text(encoding="utf-8") for name in DOCUMENTS]
        documents = [Document(name, tuple(engine.tokenize(text))) for name, text in zip(DOCUMENTS, texts, strict=True)]
        corpus = Corpus(engine, FolderStore(folder))
        self._entries = [done.entry for done in corpus.encode(documents)]
        self.costs = measure_costs(engine, corpus.profile())
        self._profiles = corpus._profiles  # noqa: SLF001 - see ``over``
        question = tuple(engine.tokenize(QUESTION))
        self.prompt = Prompt(DOCUMENTS, question)
        self._pairs = [Prompt((DOCUMENTS[a], DOCUMENTS[b]), question) for a, b in PAIRS]

    def over(self, link: Link, local: str) -> list[dict[str, Any]]:
        """All policies over one link, taking turns."""
        with link.running(self._folder, local) as (store, emulated), FAST.running(self._folder, local) as (near, fast):
            corpus = Corpus(self._engine, store)
            corpus._profiles = self._profiles  # noqa: SLF001 - readers keep a profile, as they keep the model
            contenders = [self._contender(corpus, emulated, link, way) for way in (SOON, *OTHERS)]
            rounds = Rounds(
                self, link, store, emulated, self._contender(Corpus(self._engine, near), fast, FAST, OTHERS[2])
            )
            for _ in range(WARM_UPS):
                rounds.run(contenders, [self.prompt])
            deadline_s = self._deadline_s(rounds, contenders)
            contenders.insert(1, self._contender(corpus, emulated, link, Way(TIGHT, Adaptive(), deadline_s)))
            contenders[1].load(self.prompt)
            rounds.clear()
            for _ in range(self._rounds):
                rounds.run(contenders, [self.prompt], self._wait_s)
            found = [rounds.row(each, 1) for each in contenders]
            if link == TOGETHER:
                found += self._together(rounds, [contenders[0], contenders[4]])
        return found

    def _together(self, rounds: Rounds, some: Sequence[Contender]) -> list[dict[str, Any]]:
        """Several loads at once."""
        found = []
        for count in TOGETHER_LOADS:
            prompts = [*islice(cycle(self._pairs), count)]
            rounds.clear()
            rounds.run(some, prompts)
            rounds.clear()
            for _ in range(self._rounds):
                rounds.run(some, prompts, self._wait_s)
            found += [rounds.row(each, count) for each in some]
        return found

    def _contender(self, corpus: Corpus, emulated: EmulatedLink | None, link: Link, way: Way) -> Contender:
        return Contender(self._engine, corpus, emulated, way, self.costs, link.rate.rates[0], link.rtt_s)

    def _deadline_s(self, rounds: Rounds, contenders: Sequence[Contender]) -> float:
        """Half way between the soonest first token and the finest level's, as predicted."""
        finest = next(each for each in contenders if each.way.name == f"level {LEVELS[-1]}")
        return sum(median(rounds.predicted(each)) for each in (contenders[0], finest)) / 2

    @property
    def head_key(self) -> str:
        """Any object."""
        return self._entries[0].blob_key

    def header_bytes(self, prompt: Prompt) -> int:
        """Bytes of the headers of a prompt's documents."""
        return sum(entry.header_bytes for entry in self._entries if entry.document_id in prompt.documents)


class Rounds:
    """Loads over one link, with what is measured beside them."""

    def __init__(
        self, bench: Benchmark, link: Link, store: Store, emulated: EmulatedLink | None, beside: Contender
    ) -> None:
        """Start without any. beside: loads over ``FAST``."""
        self._bench, self._link, self._store, self._emulated, self._beside = bench, link, store, emulated, beside
        beside.load(bench.prompt)
        self.clear()

    def clear(self) -> None:
        """Forget what was measured so far."""
        self._loads: dict[str, list[Loaded]] = {}
        self._near: list[Loaded] = []
        self._first_bytes: list[tuple[float, float]] = []
        self._near_first_bytes: list[tuple[float, float]] = []
        self._busy: list[float] = []
        self._prompts: Sequence[Prompt] = ()

    def run(self, contenders: Sequence[Contender], prompts: Sequence[Prompt], wait_s: float = 0.0) -> None:
        """One load of each, or several at once, when the machine is quiet or ``wait_s`` is over."""
        self._busy.append(others_busy(wait_s))
        self._prompts = prompts
        key = self._bench.head_key
        self._near.append(self._beside.load(self._bench.prompt))
        self._near_first_bytes.append(
            asyncio.run(first_bytes(self._beside.corpus.catalog.store, key, self._beside.link))
        )
        if self._emulated:
            self._emulated.begin()
        self._first_bytes.append(asyncio.run(first_bytes(self._store, key, self._emulated)))
        for each in contenders:
            self._loads.setdefault(each.way.name, []).append(each.load(*prompts))

    @property
    def model(self) -> Model:
        """What the simulator is told."""
        near = self._near
        connected_s, answered_s = (median(seconds) for seconds in zip(*self._first_bytes, strict=True))
        near_s = median(seconds for seconds, _ in self._near_first_bytes)
        header_s = max(0.0, median(loaded.heads_s for loaded in near) - near_s) / len(DOCUMENTS)
        steering = [(loaded.loop_s - header_s * len(DOCUMENTS)) / loaded.events for loaded in near]
        event_s = max(0.0, median(steering))
        return Model(
            link=self._link,
            header_bytes=self._bench.header_bytes(self._prompts[0]),
            catalog_s=median(loaded.catalog_s for loads in self._loads.values() for loaded in loads),
            connected_s=connected_s,
            answered_s=answered_s,
            header_s=header_s,
            event_s=event_s,
            lane_s=max(0.0, median(seconds for loaded in near for seconds in loaded.idle_s) - event_s),
            handing_over_s=max(0.0, median(loaded.handing_over_s for loaded in near)),
            settings=self._beside.settings,
        )

    def predicted(self, contender: Contender) -> list[float]:
        """Seconds predicted for each load of a contender, from what was known when it began; of several, the mean."""
        model, found = self.model, []
        for loaded in self._loads[contender.way.name]:
            inputs = loaded.inputs
            numbers = sorted({load for load, _ in inputs})
            documents = [[inputs[key] for key in sorted(inputs) if key[0] == number] for number in numbers]
            question = len(self._prompts[0].question)
            times = model.ttft_s(contender.way, loaded.known, documents, question)
            found.append(sum(times) / len(times))
        return found

    def row(self, contender: Contender, together: int) -> dict[str, Any]:
        """Measured beside predicted. told_s: what the controller itself expected when all headers were read."""
        loads, model = self._loads[contender.way.name], self.model
        measured = [sum(timing.ttft_s for timing in loaded.timings) / together for loaded in loads]
        predicted = self.predicted(contender)
        told = [seconds for loaded in loads for seconds in loaded.told_s]
        row = {
            "link": self._link.name, "policy": contender.way.name, "together": together,
            "deadline_s": contender.way.deadline_s, "measured_s": spread(measured), "predicted_s": spread(predicted),
            "told_s": spread(told), "ratio": median(predicted) / median(measured),
            "model": {
                name: getattr(model, name)
                for name in (
                    "catalog_s", "connected_s", "answered_s", "header_s", "event_s", "lane_s", "handing_over_s",
                )
            },
            "heads_s": {
                "measured": median(loaded.heads_s for loaded in loads),
                "predicted": model.heads_s(together, len(self._prompts[0].documents)),
            },
            "others_busy_cores": median(self._busy),
        }  # fmt: skip
        print("  ".join(line_of(row)), flush=True)
        return row


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Number, median, and 10 % and 90 % quantiles."""
    tenths = quantiles(samples, n=10, method="inclusive") if len(samples) > 1 else [samples[0]] * 9
    return {"n": len(samples), "median": median(samples), "p10": tenths[0], "p90": tenths[-1]}


def line_of(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    measured, predicted = row["measured_s"], row["predicted_s"]
    name = row["policy"] + (f" x{row['together']}" if row["together"] > 1 else "")
    return [
        row["link"], name, f"{measured['median']:.3f}", f"{measured['p10']:.3f}-{measured['p90']:.3f}",
        f"{predicted['median']:.3f}", f"{row['ratio'] - 1:+.0%}", f"{row['told_s']['median']:.3f}",
    ]  # fmt: skip


def show(rows: Sequence[dict[str, Any]]) -> str:
    """All rows as a table, and how many are within the band."""
    within = [row for row in rows if abs(row["ratio"] - 1) <= BAND]
    head = ["link", "policy", "measured s", "p10-p90", "predicted s", "off by", "controller's own"]
    return "\n".join([table(head, [line_of(row) for row in rows]), f"\n{len(within)} of {len(rows)} within {BAND:.0%}"])


def main() -> None:
    """Measure, predict, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_model(), help="default: SmolLM2 where it is")
    parser.add_argument("--rounds", type=int, default=7, help="measured loads of each policy over each link")
    parser.add_argument("--kinds", nargs="+", default=["emulated", "shaped"], choices=["emulated", "shaped"])
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES_MBIT), help="Mbit/s")
    parser.add_argument("--store", type=Path, help="folder of an encoded store, to be kept and used again")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds to wait for others before a round, at most")
    parser.add_argument("--out", type=Path, default=RESULTS / "predicted_ttft.json")
    given = parser.parse_args()
    logging.getLogger("kvwire").setLevel(logging.ERROR)
    one_thread()
    with ExitStack() as stack:
        folder = given.store or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Benchmark(kvwire.open_engine(given.model), folder, given.rounds, given.wait)
        gc.freeze()  # as servers do: a collection of garbage takes as long as a load
        local = stack.enter_context(local_server(folder))
        bench.over(FAST, local)  # a process's first loads are slower than all others
        rows = [row for link in links(given.kinds, given.rates) for row in bench.over(link, local)]
    print(show(rows))
    settings = {"documents": DOCUMENTS, "rounds": given.rounds, "threads": 1, "band": BAND, "nice": os.nice(0)}
    write_json(given.out, "predicted_ttft", settings, {"rows": rows})
    draw(rows, BAND, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
