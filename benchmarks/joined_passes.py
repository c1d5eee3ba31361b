"""Forward passes of several loads in one: first tokens of 1 to 16 requests at once, and what a joined pass takes here.

    python benchmarks/joined_passes.py

plays, in the simulator, requests that come at once and are computed from text (8B shape, one H100, no link to speak
of), with joining and without: short documents, several of them, and a long one. Then, on a real model here, times rows
in one pass and one after the other, in turns, in processor time of all threads; and says what the controller makes of
the costs that it measures for this engine.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import replace
from functools import partial
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from measure import add_common_options, interleaved, one_thread, summary, table, write_json

import kvwire
from kvwire.controller import Controller, DocumentPlanInput, Estimates, Goal
from kvwire.controller import events as ev
from kvwire.controller.joining import WaitingPass, joined
from kvwire.controller.simulator import LoadArrival, World, constant, machine_named, model_named, settings_for
from kvwire.controller.simulator.machines import costs
from kvwire.runtime.costs import measure_costs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire import TransformersEngine
    from kvwire.controller import CostModel

REQUESTS = (1, 2, 4, 8, 16)
PROMPTS = {"1 x 100": (100,), "1 x 200": (200,), "4 x 100": (100,) * 4, "1 x 1000": (1000,)}
"""Documents and tokens of each, of every request."""
QUESTION = 32
NO_LINK = 10.0  # bytes a second
ROWS, LENGTHS, BEFORE = (2, 8), (16, 128), 256
OFF = 1.25
"""Lengths of a prompt's documents differ by up to this factor between requests."""


def played(count: int, lengths: Sequence[int], *, joins: bool, seed: int) -> dict[str, float]:
    """First tokens of requests at once, in seconds, and how many rows joined passes had in the mean."""
    model, machine, draw = model_named("llama-3.1-8b"), machine_named("h100"), random.Random(f"{seed} {count}")
    true, log = costs(model, machine, joins=joins), list[ev.LogEntry]()
    controller = Controller(Estimates(true, NO_LINK, 0.001), settings_for(machine), record=log.append)
    world = World(
        controller, constant(NO_LINK), replace(true, query_tokens=QUESTION), rtt_s=0.001, steering=machine.steering,
        workers=machine.workers,
    )  # fmt: skip
    arrivals = [
        LoadArrival(0.0, tuple((text(round(each * draw.uniform(1 / OFF, OFF))),) for each in lengths), Goal(), QUESTION)
        for _ in range(count)
    ]
    first = [outcome.ttft_s for outcome in world.run(arrivals)]
    rows = [len(each.passes) for entry in log for each in entry.instructions if isinstance(each, ev.RecomputeTogether)]
    return {"mean_s": mean(first), "last_s": max(first), "joined": len(rows), "rows": mean(rows) if rows else 1.0}


def text(tokens: int) -> DocumentPlanInput:
    """A document that has no blob."""
    return DocumentPlanInput((tokens,), ((),), True, ((),))


def simulated(seeds: int) -> list[dict[str, Any]]:
    """Every number of requests and kind of prompt, with joining and without, in the mean over seeds."""
    rows = []
    for name, lengths in PROMPTS.items():
        for count in REQUESTS:
            found = {}
            for joins in (False, True):
                each = [played(count, lengths, joins=joins, seed=seed) for seed in range(seeds)]
                found[joins] = {key: mean(one[key] for one in each) for key in each[0]}
            gain = 1 - found[True]["mean_s"] / found[False]["mean_s"]
            last = 1 - found[True]["last_s"] / found[False]["last_s"]
            rows.append({"prompt": name, "requests": count, "alone": found[False], "joined": found[True],
                         "mean_sooner": gain, "last_sooner": last})  # fmt: skip
    return rows


def timed(engine: TransformersEngine, seed: int, rounds: int) -> list[dict[str, Any]]:
    """Rows in one pass, and one after the other, in turns."""
    draw = random.Random(seed)
    cases = {}
    for rows in ROWS:
        for tokens in LENGTHS:
            for before in (0, BEFORE):
                ids = [[draw.randrange(engine.vocabulary_size) for _ in range(before + tokens)] for _ in range(rows)]
                prefixes = [engine.extend(None, each[:before]) if before else None for each in ids]
                news = [each[before:] for each in ids]
                name = f"{rows} x {tokens} behind {before}"
                cases[f"{name}, joined"] = partial(engine.extend_together, prefixes, news, offsets=[0] * rows)
                cases[f"{name}, alone"] = partial(one_by_one, engine, prefixes, news)
    seconds = interleaved(cases, rounds, clock=time.process_time)
    found = []
    for name in (key.removesuffix(", alone") for key in cases if key.endswith(", alone")):
        ratios = [a / b for a, b in zip(seconds[f"{name}, alone"], seconds[f"{name}, joined"], strict=True)]
        found.append(
            {
                "rows": name,
                "alone_s": summary(seconds[f"{name}, alone"]),
                "joined_s": summary(seconds[f"{name}, joined"]),
                "alone_over_joined": summary(ratios),
            }
        )
    return found


def one_by_one(engine: TransformersEngine, prefixes: Sequence[Any], news: Sequence[Sequence[int]]) -> None:
    """The same without joining."""
    for prefix, ids in zip(prefixes, news, strict=True):
        engine.extend(prefix, ids)


def chosen(model: CostModel, rows: int, tokens: int, before: int) -> int:
    """How many of some equal passes that wait the controller would join."""
    waiting = [WaitingPass(tokens, before, model.prefill.seconds(tokens, before))] * rows
    return len(joined(waiting, model, 16))


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_common_options(parser, "joined_passes")
    parser.add_argument("--seeds", type=int, default=5, help="draws of lengths, in the simulator")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each case, on the real model")
    options = parser.parse_args()
    one_thread()
    found = simulated(options.seeds)
    print(
        table(
            ["prompt, requests", "mean ms", "joined", "last ms", "joined", "rows"],
            [
                [
                    f"{row['prompt']}, {row['requests']}",
                    *(f"{row[how][what] * 1e3:.1f}" for what in ("mean_s", "last_s") for how in ("alone", "joined")),
                    f"{row['joined']['rows']:.1f}",
                ]
                for row in found
            ],
        )
    )
    settings = {
        "seeds": options.seeds, "rounds": options.rounds, "seed": options.seed, "model": options.model.name,
        "question_tokens": QUESTION, "lengths_differ_by": OFF,
    }  # fmt: skip
    write_json(options.out, "joined_passes", settings, {"simulated": found})  # the rest takes long on a busy machine
    engine = kvwire.open_engine(options.model)
    real = timed(engine, options.seed, options.rounds)
    model = measure_costs(engine)
    choices = [
        {"waiting": rows, "tokens": tokens, "before": before, "joined": chosen(model, rows, tokens, before)}
        for rows in ROWS for tokens in LENGTHS for before in (0, BEFORE)
    ]  # fmt: skip
    print(
        table(
            ["rows", "alone ms", "joined ms", "alone / joined", "spread"],
            [
                [
                    row["rows"], f"{row['alone_s']['median'] * 1e3:.1f}", f"{row['joined_s']['median'] * 1e3:.1f}",
                    f"{row['alone_over_joined']['median']:.2f}",
                    f"{row['alone_over_joined']['least']:.2f} to {row['alone_over_joined']['greatest']:.2f}",
                ]
                for row in real
            ],
        )
    )  # fmt: skip
    print(f"median over cases {median(row['alone_over_joined']['median'] for row in real):.2f}; chosen: {choices}")
    measured = {"alone": vars_of(model.prefill), "joined": vars_of(model.joined)}
    write_json(
        options.out, "joined_passes", settings,
        {"simulated": found, "real": real, "measured_costs": measured, "chosen": choices},
    )  # fmt: skip


def vars_of(cost: Any) -> dict[str, float] | None:  # noqa: ANN401 - a cost or none
    """A cost's coefficients."""
    return None if cost is None else {name: getattr(cost, name) for name in ("base_s", "token_s", "pair_s")}


if __name__ == "__main__":
    main()
