"""Loads that come in at random, from few to more than there is room for: who is in time, and how finely.

    python benchmarks/controller_load.py

plays, in the simulator, loads that share one link and one engine (8B shape, one H100, 2 Gbit/s, 8k tokens in four
documents, half a second each) at rates from 2 to 60 a second, under the controller, always level 0 and CacheGen's rule,
and with refusal. What deciding costs is charged. Rates mean little without the sizes, so each comes with the share of
the link that its loads take at level 0: above 1 not all can be in time. Throughput: the greatest rate at which
the mean first token, as early as it can be at level 1, comes within twice what one text takes alone: for text, for
caches, and with 15 % of the rows repaired (CacheBlend's claim: 2.8 to 5 times as many requests as by full prefill).
And ten loads at once at 10 Gbit/s,
and an engine whose forward passes take five times as long as they did, for the whole load or for 0.3 s of it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import RESULTS, table, write_json

from kvwire.controller import Controller, Goal, RepairOption
from kvwire.controller.simulator import (
    LoadArrival,
    Scenario,
    World,
    constant,
    machine_named,
    model_named,
    policy_named,
    settings_for,
    simulate,
    variants_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.controller import events as ev
    from kvwire.controller.simulator import Outcome

RATES = (2, 5, 8, 12, 20, 26, 30, 40, 60)
"""Loads a second; 26 take nine tenths of the link."""
POLICIES = ("adaptive", "level-0", "cachegen")
GBIT_S, DEADLINE_S, TOKENS, DOCUMENTS = 2.0, 0.5, 8192, 4
MOST_RATE = 256.0
SLOW = 5.0
BYTES_S = 1.25e8
"""Of a gigabit."""


class Slowed(World):
    """A world whose forward passes take ``SLOW`` times as long in some seconds.

    Attributes:
        between: First and last instant of these.
    """

    between = (0.0, 0.0)

    def _start(self, lane: Any, instruction: ev.Instruction, seconds: float) -> None:  # noqa: ANN401 - the world's own
        first, last = self.between
        if lane == "prefill" and first <= self._now < last:
            left_s = last - self._now
            seconds = min(SLOW * seconds, left_s + max(0.0, seconds - left_s / SLOW))
        super()._start(lane, instruction, seconds)


def scenario(asked: tuple[float, ...], *, tokens: int = TOKENS, gbit_s: float = GBIT_S, **goal: Any) -> Scenario:  # noqa: ANN401
    """Loads of one prompt that come in at these instants."""
    model = model_named("llama-3.1-8b")
    documents = variants_for(model, [tokens // DOCUMENTS] * DOCUMENTS)
    wanted = Goal(**({"objective": "quality", "deadline_s": DEADLINE_S} | goal))
    return Scenario(
        model=model, machine=machine_named("h100"), documents=documents, rate=constant(gbit_s * BYTES_S), goal=wanted,
        asked=asked,
    )  # fmt: skip


def arrivals(rate: float, seconds: float, seed: int) -> tuple[float, ...]:
    """Instants of a Poisson process; one at least."""
    random, at, found = Random(f"{seed} {rate}"), 0.0, []
    while (at := at + random.expovariate(rate)) < seconds or not found:
        found.append(at)
    return tuple(found)


def link_share(rate: float) -> float:
    """How much of the link loads at this rate take if all is fetched at level 0."""
    scene = scenario((0.0,))
    floor = sum(row[0] for variants in scene.documents for row in variants[0].fetch_bytes)
    return rate * floor / (GBIT_S * BYTES_S)


def judged(outcomes: list[Outcome]) -> dict[str, Any]:
    """Shares and means over loads; refused ones apart."""
    admitted = [outcome for outcome in outcomes if not outcome.refused]
    said = [outcome.reason.startswith("in time") == outcome.in_time for outcome in admitted]
    return {
        "loads": len(outcomes),
        "refused": len(outcomes) - len(admitted),
        "in_time": float(np.mean([outcome.in_time for outcome in admitted])),
        "error": float(np.mean([outcome.error for outcome in admitted])),
        "latest_s": max(outcome.ttft_s for outcome in admitted),
        "verdicts_right": float(np.mean(said)),
    }


def rising(seeds: int, seconds: float) -> list[dict[str, Any]]:
    """Every rate under every policy, and under the controller with refusal."""
    rows = []
    for rate in RATES:
        for name, on_late in (*((policy, "serve") for policy in POLICIES), ("adaptive", "refuse")):
            outcomes: list[Outcome] = []
            for seed in range(seeds):
                scene = scenario(arrivals(rate, seconds, seed), on_late=on_late)
                outcomes += simulate(scene, policy_named(name, scene.rate))
            asked = {"rate": rate, "link_share": link_share(rate), "policy": name, "on_late": on_late}
            rows.append(asked | judged(outcomes))
            print(shown([rows[-1]]), flush=True)
    return rows


def held(name: str, repair: RepairOption | None, seeds: int) -> dict[str, Any]:
    """The greatest rate, within an eighth, at which the mean first token comes within twice what one text takes."""
    earliest: dict[str, Any] = {"deadline_s": None, "objective": "earliest", "floor": 1}
    alone = simulate(scenario((0.0,), **earliest), policy_named("text", constant(1.0)))
    bound_s = 2 * alone[0].ttft_s

    def is_held(rate: float) -> bool:
        took_s: list[float] = []
        for seed in range(seeds):
            scene = replace(scenario(arrivals(rate, max(3.0, 20 / rate), seed), **earliest), repair=repair)
            took_s += [outcome.ttft_s for outcome in simulate(scene, policy_named(name, scene.rate))]
        return float(np.mean(took_s)) <= bound_s

    low = high = 1.0
    while high < MOST_RATE and is_held(high):
        low, high = high, 2 * high
    while high / low > 1 + 1 / 8:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_held(middle) else (low, middle)
    return {"policy": name, "repaired": repair.least if repair else 0.0, "rate": low, "bound_s": bound_s}


def throughput(seeds: int) -> list[dict[str, Any]]:
    """Loads a second by text, by caches, and by caches of which 15 % of the rows are computed anew."""
    rows, text = [], held("text", None, seeds)
    for repair in (None, RepairOption(least=0.15, most=0.15)):
        row = held("adaptive", repair, seeds)
        rows.append(row | {"text_rate": text["rate"], "times": row["rate"] / text["rate"]})
        print(shown([rows[-1]]), flush=True)
    return rows


def at_once() -> list[dict[str, Any]]:
    """Ten loads at once, 10 Gbit/s, a second."""
    rows = []
    for tokens in (8192, 32768):
        for name in POLICIES:
            scene = scenario((0.0,) * 10, tokens=tokens, gbit_s=10.0, deadline_s=1.0)
            rows.append({"tokens": tokens, "policy": name, **judged(simulate(scene, policy_named(name, scene.rate)))})
    return rows


def slow_engines() -> list[dict[str, Any]]:
    """Loads by themselves whose engine becomes slow after an earlier load has shown how fast it is."""
    rows = []
    for name in ("adaptive", "level-0"):
        for between in ((0.0, 1e9), (0.1, 0.4)):
            outcomes = []
            for machine in ("a100", "h100"):
                for gbit_s in (0.3, 0.5, 1.0, 2.0, 5.0):
                    for deadline_s in (0.5, 1.0, 2.0):
                        scene = scenario((0.0,), tokens=32768, gbit_s=gbit_s, deadline_s=deadline_s)
                        scene = replace(scene, machine=machine_named(machine))
                        outcomes.append(slowed(scene, name, between))
            rows.append({"policy": name, "slow_between_s": between, **judged(outcomes)})
    return rows


def slowed(scene: Scenario, name: str, between: tuple[float, float]) -> Outcome:
    """One load in a slowed world; ``between`` counts from when it comes in, after that which taught the estimates."""
    controller = Controller(scene.estimates(), settings_for(scene.machine), policy_named(name, scene.rate))
    world = Slowed(controller, scene.rate, scene.costs, rtt_s=scene.rtt_s, workers=scene.machine.workers)
    begin = scene.begins_s
    world.between = (begin + between[0], begin + between[1])
    return world.run([LoadArrival(begin, scene.documents, scene.goal, scene.query_tokens)])[0]


def shown(rows: list[dict[str, Any]]) -> str:
    """As a table."""
    names = [name for name in rows[0] if name != "verdicts_right"]
    cells = [[f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in names] for row in rows]
    return table(names, cells)


def main() -> None:
    """Play, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.5, help="in which loads come in")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_load.json")
    parser.add_argument("--parts", nargs="*", default=["slow", "at_once", "rising", "throughput"])
    args = parser.parse_args()
    parts: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "slow": slow_engines, "at_once": at_once, "rising": lambda: rising(args.seeds, args.seconds),
        "throughput": lambda: throughput(args.seeds),
    }  # fmt: skip
    results = json.loads(args.out.read_text())["results"] if args.out.exists() else {}
    for name in args.parts:
        results[name] = parts[name]()
        print(shown(results[name]))
    settings = {"model": "llama-3.1-8b", "machine": "h100", "gbit_s": GBIT_S, "deadline_s": DEADLINE_S,
                "tokens": TOKENS, "seeds": args.seeds, "seconds": args.seconds}  # fmt: skip
    write_json(args.out, "controller_load", settings, results)


if __name__ == "__main__":
    main()
