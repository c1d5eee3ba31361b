"""Deadlines on links that vary: the controller beside CacheGen's, fixed levels, text and raw caches.

    python benchmarks/controller_traces.py --traces ../shared/traces

plays, in the simulator, a load over every recorded link and some made ones, at their own scale of time and at a tenth
of it, for every model, prompt length and deadline, with each policy in turn on the same link, documents and moment. The
goal is the best quality within the deadline. Estimates are those of a process that has loaded over the link once
before. Loads that text alone brings in time are told apart: there no policy has to be late. See docs/simulator.md for
what is modelled, and benchmarks/README.md for the columns.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from controller_parts.judging import JUDGED, LATE, Run, judged, summaries, told_apart
from controller_parts.links import LEAST_GBIT, MOST_GBIT, SCALES, DrawnLink, links
from controller_parts.shaky_links import shaky_links
from measure import RESULTS, SHARED, table, write_json

from kvwire.controller import Goal
from kvwire.controller.simulator import (
    Scenario,
    Scored,
    Summary,
    machine_named,
    model_named,
    policy_named,
    policy_names,
    simulate,
    variants_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.controller.simulator import Outcome

MACHINES = {
    "llama-3.1-8b": "a100",
    "llama-3.1-70b": "4xh100",
    "deepseek-v3": "8xh200",
    "qwen3-32b": "4xa100",
}
LENGTHS = {4096: 4, 32768: 8}
"""Documents of a prompt of so many tokens."""
DEADLINES_S = (0.5, 1.0, 2.0)
LEVELS = 5
BY_DEADLINE = ("adaptive", "cachegen", "cachegen-timed", "cachegen-artefact")
"""Policies that look at the deadline; what the others do is the same for all deadlines, and is played once."""
GIVEN_UP_S = 30.0
STARTS_S = (4.0, 20.0)
RTT_S = 0.002
WORST = 12


@dataclass(frozen=True)
class Case:
    """One link, prompt and model, for all deadlines and policies."""

    model: str
    length: int
    link: DrawnLink
    start_s: float
    seed: int


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Everything that is to be played, the same for the same seed."""
    for number, model in enumerate(options.models):
        for length in options.lengths:
            of = shaky_links if options.shaky else links
            drawn = of(options.traces, (options.seed, number, length), options.scales)[:: options.every]
            rng = np.random.default_rng((options.seed, number, length, 1))
            for index, link in enumerate(drawn):
                yield Case(model, length, link, float(rng.uniform(*STARTS_S)), options.seed + index)


def play(case: Case, deadlines_s: tuple[float, ...], names: tuple[str, ...]) -> list[Run]:
    """All deadlines and policies of a case."""
    model, machine = model_named(case.model), machine_named(MACHINES[case.model])
    count = LENGTHS[case.length]
    documents = variants_for(model, [case.length // count] * count, seed=case.seed)
    runs = []
    blind: dict[tuple[str, float], Outcome] = {}
    for deadline_s in deadlines_s:
        scenario = Scenario(
            model=model, machine=machine, documents=documents, rate=case.link.rate, rtt_s=RTT_S, start_s=case.start_s,
            goal=Goal(objective="quality", deadline_s=deadline_s), leaves_s=GIVEN_UP_S, seed=case.seed,
        )  # fmt: skip
        found = {}
        for name in names:
            known = blind.get((name, scenario.begins_s))
            outcome = known or simulate(scenario, policy_named(name, case.link.rate))[0]
            found[name] = replace(outcome, deadline_s=deadline_s, spans=(), decisions=())
            if name not in BY_DEADLINE:
                blind[name, scenario.begins_s] = found[name]
        bound, by_text = scenario.bounds[0], found["text"].in_time
        for name, outcome in found.items():
            scored = Scored(scenario.goal, outcome, bound)
            runs.append(Run(case.model, case.length, deadline_s, name, case.link, scored, text_in_time=by_text))
    return runs


def played(options: argparse.Namespace) -> Iterator[Run]:
    """All runs, in the order of the cases, on as many processes as asked for."""
    todo, fixed = list(cases(options)), (options.deadlines, options.policies)
    if options.jobs > 1:
        with ProcessPoolExecutor(options.jobs) as pool:
            for done, runs in enumerate(pool.map(play, todo, *([each] * len(todo) for each in fixed), chunksize=2), 1):
                _tell(done, len(todo))
                yield from runs
    else:
        for done, case in enumerate(todo, 1):
            yield from play(case, *fixed)
            _tell(done, len(todo))


def _tell(done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{of} links played", end="" if done < of else "\n", file=sys.stderr, flush=True)


def shown(name: str, figures: Summary) -> list[str]:
    """A line of the table."""
    regret = [f"{share:.1%}" for share in figures.regret] if figures.regret else ["-", "-"]
    half = f"{figures.ttft_s[1]:.3f}" if figures.ttft_s else "-"
    quality = "-" if figures.quality_db is None else f"{figures.quality_db:.1f}"
    wasted = f"{figures.wasted / max(figures.received, 1):.1%}"
    late = "-" if figures.late is None else f"{figures.late:.0%}"
    misses = [f"{count / figures.loads:.1%}" for count in (figures.missed, figures.avoidable)]
    return [name, *misses, *regret, quality, half, late, wasted, f"{figures.recomputed:.0%}"]


HEAD = (
    "policy", "missed", "avoidable", "regret p50", "p90", "dB in time", "TTFT p50", "late by", "wasted", "recomputed",
)  # fmt: skip


def worst(runs: list[Run], policy: str) -> list[dict[str, Any]]:
    """The loads that a policy lost most on: misses that the bound does not have, then the largest regrets."""
    mine = [run for run in runs if run.policy == policy]
    misses = sorted((run for run in mine if run.scored.avoidable), key=lambda run: run.scored.late, reverse=True)
    rest = [run for run in mine if run.scored.regret is not None]
    rest.sort(key=lambda run: run.scored.regret or 0.0, reverse=True)
    return [
        {
            "model": run.model, "tokens": run.length, "deadline_s": run.deadline_s, "link": run.link.name,
            "scale": run.link.scale, "gbit_s": run.link.gbit_s, "ttft_s": run.scored.outcome.ttft_s,
            "bound_ttft_s": run.scored.bound.ttft_s, "regret": run.scored.regret,
            "error": run.scored.outcome.error, "bound_error": run.scored.bound.error,
        }
        for run in [*misses[:WORST], *rest[:WORST]]
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=SHARED / "traces", help="folder of collections of traces")
    parser.add_argument("--models", nargs="+", default=list(MACHINES)[:3], choices=list(MACHINES))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), choices=list(LENGTHS))
    parser.add_argument("--deadlines", nargs="+", type=float, default=list(DEADLINES_S), help="seconds")
    parser.add_argument("--scales", nargs="+", default=list(SCALES), choices=list(SCALES), help="of the links' time")
    parser.add_argument("--policies", nargs="+", default=list(policy_names(LEVELS)), help="text is always among them")
    parser.add_argument("--judged", action="store_true", help="what the aims are of: the longest prompt, 0.5 and 1 s")
    parser.add_argument("--shaky", action="store_true", help="made links of other kinds in place of recorded ones")
    parser.add_argument("--every", type=int, default=1, help="only every n-th link")
    parser.add_argument("--quick", action="store_true", help="every fifth link, the longest prompt, a second")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_traces.json")
    options = parser.parse_args()
    if options.quick:
        options.every, options.lengths, options.deadlines = max(options.every, 5), [max(LENGTHS)], [1.0]
    if options.judged:
        options.lengths, options.deadlines, options.policies = [max(LENGTHS)], [0.5, 1.0], list(JUDGED)
    options.deadlines, options.policies = tuple(options.deadlines), tuple(dict.fromkeys([*options.policies, "text"]))
    return options


def main() -> None:
    """Play, print and write down."""
    options, began = arguments(), time.perf_counter()
    runs = list(played(options))
    found = summaries(runs)
    for key, figures in found.items():
        ours = next(iter(figures.values()))
        whole = found[key.removesuffix(LATE)]
        if (key.count(" ") < 2 or "," in key) and (whole is figures or ours.loads < whole[options.policies[0]].loads):
            print(f"\n{key}: {ours.loads} loads, of which nobody could keep {ours.missed_by_bound} deadlines")
            print(table(HEAD, [shown(name, each) for name, each in figures.items()]))
    print("\nof them in time with text alone, where no policy has to be late")
    print(table(("loads", "", "text in time"), told_apart(runs)))
    verdict = judged(runs)
    seconds = time.perf_counter() - began
    print(f"\n{len(runs)} loads in {seconds:.0f} s")
    settings = {
        "seed": options.seed, "machines": {name: MACHINES[name] for name in options.models}, "scales": options.scales,
        "gbit_s": [LEAST_GBIT, MOST_GBIT], "rtt_s": RTT_S, "given_up_s": GIVEN_UP_S, "documents": LENGTHS,
        "deadlines_s": options.deadlines, "every": options.every, "links": sorted({run.link.name for run in runs}),
        "seconds": seconds,
    }  # fmt: skip
    results = {
        "summaries": {key: {name: asdict(each) for name, each in by.items()} for key, by in found.items()},
        "text_in_time": told_apart(runs),
        "judged": verdict,
        "worst": worst(runs, "adaptive"),
    }
    write_json(options.out, "controller_traces", settings, results)


if __name__ == "__main__":
    main()
