"""What a whole load costs the controller: played in the simulator, with each ``Controller.handle`` timed."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from measure import summary

from kvwire.controller import Controller, Goal
from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive
from kvwire.controller.simulator import (
    LoadArrival,
    Scenario,
    Steering,
    World,
    constant,
    machine_named,
    model_named,
    settings_for,
    variants_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

PROMPTS = {f"{count} x {length}": (length,) * count for count, length in ((1, 4096), (8, 4096), (8, 16384), (64, 512))}
"""Documents, in chunks of 256 tokens."""
LARGE = {"1000 x 256": (256,) * 1000, "1000 x 2560": (2560,) * 1000, "1 x 2560000": (2_560_000,)}
"""Likewise; played once, on the faster link, and no part of what is fitted."""
GBIT_S = (1.0, 10.0)
RTT_S = 0.01
GOALS = {"earliest": Goal(), "quality": Goal(objective="quality", deadline_s=1.0)}


class Timed(Controller):
    """A controller whose ``handle`` is timed, with what a driver asks for after each event that it tells.

    Drivers keep measurements of the link until there is another event, and tell them with it.

    Attributes:
        seconds: Of each event, but for first bytes, which are only noted.
    """

    seconds: list[float]

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Handle, and note the processor time of the thread."""
        began = time.thread_time()
        out = super().handle(event, now)
        if not isinstance(event, (ev.FirstByte, ev.TransferProgress)):
            _ = self.wake_at
        if not isinstance(event, ev.FirstByte):
            self.seconds.append(time.thread_time() - began)
        return out


def played(prompt: str, objective: str, gbit_s: float) -> list[float]:
    """Seconds of each event of one load."""
    model, machine = model_named("llama-3.1-8b"), replace(machine_named("h100"), steering=Steering())
    scenario = Scenario(
        model=model, machine=machine, documents=variants_for(model, (PROMPTS | LARGE)[prompt]),
        rate=constant(gbit_s * 1.25e8), rtt_s=RTT_S, goal=GOALS[objective],
    )  # fmt: skip
    controller = Timed(scenario.estimates(), settings_for(machine), Adaptive())
    controller.seconds = []
    world = World(controller, scenario.rate, scenario.costs, rtt_s=RTT_S)
    world.run([LoadArrival(0.0, scenario.documents, scenario.goal)])
    return controller.seconds


def whole_loads(rounds: int) -> list[dict[str, Any]]:
    """Every prompt, objective and rate; events are those of the quickest round, others were disturbed."""
    cases = [(prompt, objective, gbit) for prompt in PROMPTS for objective in GOALS for gbit in GBIT_S]
    found: dict[tuple[str, str, float], list[list[float]]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(played(*case))
    for prompt in LARGE:
        found[prompt, "earliest", GBIT_S[-1]] = [played(prompt, "earliest", GBIT_S[-1])]
    rows = []
    for (prompt, objective, gbit), loads in found.items():
        best = min(loads, key=sum)
        rows.append({
            "prompt": prompt,
            "chunks": sum(length // 256 for length in (PROMPTS | LARGE)[prompt]),
            "objective": objective,
            "gbit_s": gbit, "events": len(best),
            "load_s": summary([sum(load) for load in loads]), "event_s": sum(best) / len(best),
            "p99_s": float(np.quantile(best, 0.99)),
        })  # fmt: skip
    return rows


def fitted(rows: Sequence[dict[str, Any]]) -> Steering:
    """An event's seconds and those for each chunk, by least squares over loads; requests are measured elsewhere."""
    rows = [row for row in rows if row["prompt"] in PROMPTS]
    chunks = np.array([row["chunks"] for row in rows], np.float64)
    seconds = np.array([row["event_s"] for row in rows])
    columns = np.stack([np.ones_like(chunks), chunks], axis=1)
    base, slope = np.linalg.lstsq(columns, seconds, rcond=None)[0].tolist()
    if base < 0 or slope < 0:
        base, slope = (0.0, float(chunks @ seconds / (chunks @ chunks))) if base < 0 else (float(seconds.mean()), 0.0)
    return Steering(event_s=base, chunk_s=slope)
