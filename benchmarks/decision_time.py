"""How long the controller takes to decide: for prompts of 50 to 1,000 chunks, in one document and in eight.

``handle``: the whole of ``Controller.handle`` for the events that bring a new plan: of a load that is played against a
driver that answers at once. ``plan``: ``Adaptive.plan`` alone, with nearly all chunks open. Prompt sizes take turns, so
that a busy moment hits all of them alike; the clock is the processor time of the thread.

``whole loads``: all events of loads of up to 10,000 chunks in the simulator, and the mean seconds of an event, of those
that lead to instructions apart: what the simulator charges (``controller/simulator/machines.py``).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from controller_parts.whole_loads import fitted, whole_loads
from measure import RESULTS, one_thread, summary, table, write_json

from kvwire.controller import (
    Adaptive,
    Controller,
    ControllerSettings,
    CostModel,
    DecodeCost,
    DocumentPlanInput,
    Estimates,
    Goal,
    PrefillCost,
)
from kvwire.controller import events as ev

if TYPE_CHECKING:
    from kvwire.controller.policies import Plan, PlanRequest

CHUNKS = (50, 500, 1000)
LEVELS = 6
LIMIT_S = 0.5  # of a play: some loads have nothing left to plan by then
TOKENS = 256
STEP_S = 0.001
SETTINGS = ControllerSettings(workers=2, replan_s=STEP_S / 2, plan_s=0.0, plan_chunk_s=0.0)
"""A plan for each event, and one only."""
COSTS = CostModel(PrefillCost(0.01, 4e-5, 1e-9), DecodeCost(0.001, 1e-6, 1e-9), 1e-6)
GOALS = {
    "earliest": Goal(),
    "quality": Goal(objective="quality", deadline_s=2.0),
    "cheapest": Goal(objective="cheapest", deadline_s=2.0),
}


class Counted:
    """The policy; plans: how many it made; largest: the request with the most open chunks."""

    def __init__(self) -> None:
        """Start at none."""
        self.name, self.preemptible = "counted", True
        self.plans = 0
        self.largest: PlanRequest | None = None
        self._policy = Adaptive()

    def plan(self, request: PlanRequest) -> Plan:
        """Plan, and remember."""
        self.plans += 1
        if self.largest is None or request.chunks.count >= self.largest.chunks.count:
            self.largest = request
        return self._policy.plan(request)


def documents(chunks: int, count: int, seed: int) -> list[DocumentPlanInput]:
    """Documents of chunks of uneven sizes, six levels each."""
    random = Random(seed)
    made = []
    for _ in range(count):
        rows, errors = [], []
        for _ in range(chunks // count):
            scale = random.uniform(0.7, 1.3)
            rows.append(tuple(int(scale * TOKENS * 300 * 1.6**level) for level in range(LEVELS)))
            errors.append(tuple(scale * 0.3 ** (level + 1) for level in range(LEVELS)))
        made.append(DocumentPlanInput((TOKENS,) * len(rows), tuple(rows), errors=tuple(errors)))
    return made


def played(inputs: list[DocumentPlanInput], goal: Goal, calls: int) -> tuple[list[float], list[float]]:
    """Seconds of ``handle`` for events that bring a plan, and of ``Adaptive.plan`` for the most open chunks."""
    policy = Counted()
    controller = Controller(Estimates(COSTS, 5e7, 0.02), SETTINGS, policy)
    now = 0.0
    seconds: list[float] = []
    waiting: list[ev.Event] = [ev.LoadRequested(0, len(inputs), 32, goal)]
    waiting += [ev.IndexKnown(0, number, (each,)) for number, each in enumerate(inputs)]
    while waiting and len(seconds) < calls and now < LIMIT_S:
        event, before = waiting.pop(0), policy.plans
        now += STEP_S
        began = time.thread_time()
        out = controller.handle(event, now)
        taken = time.thread_time() - began
        if policy.plans > before:
            seconds.append(taken)
        for instruction in out:
            match instruction:
                case ev.Fetch(chunk, _, level, size):
                    waiting += [ev.TransferProgress(size, now, now + size / 5e7), ev.ChunkArrived(chunk, level)]
                case ev.Decode(decoded):
                    waiting.append(ev.DecodeDone(decoded, 0.0015))
        waiting.append(ev.Tick())
    return seconds, [timed(policy.largest) for _ in range(calls // 4)] if policy.largest else []


def timed(request: PlanRequest) -> float:
    """Seconds of one plan."""
    began = time.thread_time()
    Adaptive().plan(request)
    return time.thread_time() - began


def main() -> None:
    """Measure and save."""
    options = arguments()
    one_thread()
    cases = [(chunks, count, goal) for count in (1, 8) for chunks in CHUNKS for goal in GOALS]
    handled: dict[tuple[int, int, str], list[float]] = {case: [] for case in cases}
    planned: dict[tuple[int, int, str], list[float]] = {case: [] for case in cases}
    for turn in range(options.rounds + 1):
        for case in cases:
            chunks, count, goal = case
            handle, plan = played(documents(chunks, count, options.seed), GOALS[goal], options.calls)
            if turn:  # the first turn warms up
                handled[case] += handle
                planned[case] += plan
    results, rows = [], []
    for case in cases:
        chunks, count, goal = case
        spreads = {"handle_s": spread(handled[case]), "plan_s": spread(planned[case])}
        results.append({"chunks": chunks // count * count, "documents": count, "objective": goal, **spreads})
        figures = [f"{1e3 * each[name]:.2f}" for each in spreads.values() for name in ("least", "median", "p99")]
        rows.append([f"{count} x {chunks // count} chunks, {goal}", *figures])
    print(table(["ms", "handle least", "median", "p99", "plan least", "median", "p99"], rows))
    loads = whole_loads(options.rounds)
    print(table(HEAD, [shown(load) for load in loads]))
    steering = fitted(loads)
    print(
        f"an event: {1e3 * steering.event_s:.3f} ms, and {1e3 * steering.decided_s:.3f} ms where it leads to anything"
    )
    settings = {"seed": options.seed, "rounds": options.rounds, "calls": options.calls, "levels": LEVELS}
    found = {"cases": results, "loads": loads, "steering": asdict(steering)}
    write_json(options.out, "decision_time", settings, found)


HEAD = ("whole load", "goal", "Gbit/s", "chunks", "events", "ms median", "least", "undisturbed", "an event", "p99")


def shown(load: dict[str, Any]) -> list[str]:
    """A line of the table of whole loads."""
    spans = [load["load_s"][name] for name in ("median", "least")]
    times = [f"{1e3 * each:.3f}" for each in (*spans, load["undisturbed_s"], load["event_s"], load["p99_s"])]
    return [load["prompt"], load["objective"], f"{load['gbit_s']:g}", str(load["chunks"]), str(load["events"]), *times]


def spread(samples: list[float]) -> dict[str, float]:
    """n, median, least, greatest and the 99th percentile."""
    ranked = sorted(samples)
    return {**summary(samples), "p99": ranked[min(len(ranked) - 1, int(0.99 * len(ranked)))]}


def arguments() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rounds", type=int, default=2, help="times that each case is played; the largest three at most"
    )
    parser.add_argument("--calls", type=int, default=24, help="decisions of each play")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS / "decision_time.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
