"""What the controller's regret on links that vary is made of: the same loads with one cause after another taken away.

    python benchmarks/controller_regret.py

plays the loads that the aims of ``controller_traces.py`` are of (32k tokens, 0.5 and 1 s) as shipped, and then with
deciding in no time; with the link's true mean until the deadline known at every instant; without coarse levels first;
without the reserve; with passes that are never cut short; and with all of that. What the last one loses still is the
bound's part: it knows no order on the link and in the lanes, and its chunks have no size. Links are in two halves by
their names: what is chosen by figures is chosen on the first half and held against the other. See docs/controller.md.
"""

from __future__ import annotations

import argparse
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import numpy as np
from controller_traces import GIVEN_UP_S, LENGTHS, MACHINES, RTT_S, Case, cases
from measure import RESULTS, SHARED, table, write_json

from kvwire.controller import Controller, Goal
from kvwire.controller.estimators import BandwidthEstimator
from kvwire.controller.policies import Adaptive
from kvwire.controller.simulator import (
    LoadArrival,
    Scenario,
    Scored,
    Steering,
    Summary,
    World,
    machine_named,
    model_named,
    settings_for,
    variants_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.controller import events as ev
    from kvwire.controller.snapshot import Plan, PlanRequest
    from kvwire.types.rates import RateTrace

Half = Literal["chosen on", "held against"]
TOKENS = 32768
DEADLINES_S = (0.5, 1.0)
MODELS = ("llama-3.1-8b", "llama-3.1-70b", "deepseek-v3")
TRACED = {"lengths": list(LENGTHS), "shaky": False, "scales": ["tenth", "native"]}
MUCH = 0.05
"""Regret above which a load is one to explain."""
CAUSES = {
    "as shipped": frozenset(),
    "deciding is free": frozenset({"steering"}),
    "the link is known": frozenset({"link"}),
    "no coarse levels first": frozenset({"insurance"}),
    "no reserve": frozenset({"reserve"}),
    "passes as long as they can be": frozenset({"passes"}),
    "all but the reserve": frozenset({"steering", "link", "insurance", "passes"}),
    "all of these": frozenset({"steering", "link", "insurance", "passes", "reserve"}),
}


class KnownLink(BandwidthEstimator):
    """Knows the true mean until an instant. now: of the clock, told by whoever drives it."""

    def __init__(self, rate: RateTrace, until: float) -> None:
        """Take the trace, and the instant until which its mean counts."""
        super().__init__(rate.mean_bytes_s, prior_error=0.0)
        self._rate, self._until, self.now = rate, until, 0.0

    @property
    def value(self) -> float:
        """Bytes per second on average from now on."""
        until = max(self._until, self.now + 0.01)
        return max(self._rate.bytes_between(self.now, until) / (until - self.now), 1.0)

    @property
    def low(self) -> float:
        """Likewise: nothing is uncertain."""
        return self.value

    @property
    def high(self) -> float:
        """Likewise."""
        return self.value

    def low_over(self, _horizon_s: float) -> float:
        """Likewise."""
        return self.value

    def share_after(self, _silent_s: float) -> float:
        """Silence tells nothing new."""
        return 1.0


@dataclass(frozen=True)
class Uninsured:
    """The controller's own policy, told that no link falls."""

    name: str = "uninsured"
    preemptible: bool = True

    def plan(self, request: PlanRequest) -> Plan:
        """Decide as the controller does."""
        return Adaptive().plan(replace(request, risk=0.0))


class Told(Controller):
    """A controller that tells a known link what time it is."""

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Handle, the time told."""
        if isinstance(self.estimates.bandwidth, KnownLink):
            self.estimates.bandwidth.now = now
        return super().handle(event, now)


def without(scenario: Scenario, causes: frozenset[str]) -> Scored:
    """Play a scenario's load with some causes taken away."""
    estimates, begin = scenario.estimates(), scenario.begins_s
    settings = settings_for(scenario.machine)
    if "reserve" in causes:
        settings = replace(settings, reserve_s=0.0)
    if "link" in causes:
        estimates.bandwidth = KnownLink(scenario.rate, begin + (scenario.goal.deadline_s or 0.0))
    policy = Uninsured() if "insurance" in causes else Adaptive()
    controller = Told(estimates, settings, policy)
    steering = Steering() if "steering" in causes else scenario.machine.steering
    world = World(
        controller, scenario.rate, scenario.costs, rtt_s=scenario.rtt_s, steering=steering, workers=settings.workers,
        seed=scenario.seed,
    )  # fmt: skip
    arrival = LoadArrival(begin, scenario.documents, scenario.goal, scenario.query_tokens, leaves_s=scenario.leaves_s)
    with patch("kvwire.controller.starting.pass_limit_s", lambda *_: inf) if "passes" in causes else nullcontext():
        (outcome,) = world.run([arrival])
    return Scored(scenario.goal, replace(outcome, spans=(), decisions=()), scenario.bounds[0])


def half_of(link: str) -> Half:
    """Which half a link belongs to, by its name alone."""
    return "held against" if zlib.crc32(link.encode()) % 2 else "chosen on"


@dataclass(frozen=True)
class SimulatedLoad:
    """One load, by the causes that were taken away."""

    model: str
    deadline_s: float
    half: Half
    scored: dict[str, Scored]


def play(case: Case) -> list[SimulatedLoad]:
    """Both deadlines of a case."""
    model, machine = model_named(case.model), machine_named(MACHINES[case.model])
    count = LENGTHS[case.length]
    documents = variants_for(model, [case.length // count] * count, seed=case.seed)
    out = []
    for deadline_s in DEADLINES_S:
        scenario = Scenario(
            model=model, machine=machine, documents=documents, rate=case.link.rate, rtt_s=RTT_S, start_s=case.start_s,
            goal=Goal(objective="quality", deadline_s=deadline_s), leaves_s=GIVEN_UP_S, seed=case.seed,
        )  # fmt: skip
        scored = {name: without(scenario, causes) for name, causes in CAUSES.items()}
        out.append(SimulatedLoad(case.model, deadline_s, half_of(case.link.name), scored))
    return out


def groups(loads: list[SimulatedLoad]) -> Iterator[tuple[str, list[SimulatedLoad]]]:
    """All loads, the halves, and each model with each deadline."""
    yield "all", loads
    for half in ("chosen on", "held against"):
        yield f"links {half}", [load for load in loads if load.half == half]
    for model in MODELS:
        for deadline_s in DEADLINES_S:
            some = [load for load in loads if (load.model, load.deadline_s) == (model, deadline_s)]
            yield f"{model}, {deadline_s:g} s", some


def figures(loads: list[SimulatedLoad]) -> dict[str, dict[str, Any]]:
    """For each cause: misses, regret, and the mean regret of the loads that lose much as shipped."""
    much = [load for load in loads if (load.scored["as shipped"].regret or 0.0) > MUCH]
    out = {}
    for name in CAUSES:
        summary = Summary.of(load.scored[name] for load in loads)
        regrets = [regret for load in much if (regret := load.scored[name].regret) is not None]
        out[name] = {
            "loads": summary.loads, "missed": summary.missed, "avoidable": summary.avoidable,
            "regret_p50": summary.regret[0] if summary.regret else None,
            "regret_p90": summary.regret[1] if summary.regret else None,
            "lose_much": len(much), "regret_of_these": float(np.mean(regrets)) if regrets else None,
        }  # fmt: skip
    return out


def shown(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Lines of the table."""

    def share(figure: float | None) -> str:
        return "-" if figure is None else f"{figure:.1%}"

    return [
        [name, str(each["missed"]), str(each["avoidable"]), *map(share, (each["regret_p50"], each["regret_p90"])),
         share(each["regret_of_these"])]
        for name, each in found.items()
    ]  # fmt: skip


def main() -> None:
    """Play, print and write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, default=SHARED / "traces", help="folder of collections of traces")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--every", type=int, default=1, help="only every n-th link")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_regret.json")
    options, began = parser.parse_args(), time.perf_counter()
    # Drawn as the loads of controller_traces.py are, which numbers models and lengths.
    drawn = argparse.Namespace(**TRACED, models=MODELS, traces=options.traces, every=options.every, seed=options.seed)
    todo = [case for case in cases(drawn) if case.length == TOKENS and case.model in options.models]
    with ProcessPoolExecutor(options.jobs) as pool:
        loads = [load for both in pool.map(play, todo, chunksize=2) for load in both]
    found = {name: figures(some) for name, some in groups(loads) if some}
    for name, each in found.items():
        shipped = each["as shipped"]
        print(f"\n{name}: {shipped['loads']} loads, {shipped['lose_much']} with a regret above {MUCH:.0%}")
        print(table(("taken away", "missed", "avoidable", "regret p50", "p90", "mean of these"), shown(each)))
    settings = {
        "seed": options.seed, "models": options.models, "every": options.every, "tokens": TOKENS, "much": MUCH,
        "deadlines_s": DEADLINES_S, "rtt_s": RTT_S, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    write_json(options.out, "controller_regret", settings, found)


if __name__ == "__main__":
    main()
