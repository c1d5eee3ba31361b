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
    Trouble,
    World,
    constant,
    machine_named,
    model_named,
    settings_for,
    variants_for,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

PROMPTS = {f"{count} x {length}": (length,) * count for count, length in ((1, 4096), (8, 4096), (8, 16384), (64, 512))}
"""Documents, in chunks of 256 tokens."""
LARGE = {"1000 x 256": (256,) * 1000, "1000 x 2560": (2560,) * 1000, "1 x 2560000": (2_560_000,)}
"""Likewise; played three times at most, on the faster link, and no part of what is fitted."""
GBIT_S = (1.0, 10.0)
RTT_S = 0.01
NOISE = 0.03  # of what computing takes: else nothing would be learnt, which takes its time, too
GOALS = {"earliest": Goal(), "quality": Goal(objective="quality", deadline_s=1.0)}


class Timed(Controller):
    """A controller whose ``handle`` is timed, with what a driver asks for after each event that it tells.

    Drivers keep measurements of the link until there is another event, and tell them with it.

    Attributes:
        seconds: Of each event, but for first bytes, which are only noted.
        decided: Which of these led to instructions.
    """

    seconds: list[float]
    decided: list[bool]

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Handle, and note the processor time of the thread."""
        began = time.thread_time()
        out = super().handle(event, now)
        if not isinstance(event, (ev.FirstByte, ev.TransferProgress)):
            _ = self.wake_at
        if not isinstance(event, ev.FirstByte):
            self.seconds.append(time.thread_time() - began)
            self.decided.append(bool(out))
        return out


def played(prompt: str, objective: str, gbit_s: float) -> Floats:
    """Seconds of each event of one load, and whether it led to instructions ``[events, 2]``."""
    model, machine = model_named("llama-3.1-8b"), replace(machine_named("h100"), steering=Steering())
    scenario = Scenario(
        model=model, machine=machine, documents=variants_for(model, (PROMPTS | LARGE)[prompt]),
        rate=constant(gbit_s * 1.25e8), rtt_s=RTT_S, goal=GOALS[objective],
    )  # fmt: skip
    controller = Timed(scenario.estimates(), settings_for(machine), Adaptive())
    controller.seconds, controller.decided = [], []
    world = World(controller, scenario.rate, scenario.costs, rtt_s=RTT_S, trouble=Trouble(noise=NOISE))
    # After the load that taught the estimates: seconds that they have seen would count as busy already.
    world.run([LoadArrival(scenario.begins_s, scenario.documents, scenario.goal)])
    return np.stack([controller.seconds, controller.decided], axis=1)


def whole_loads(rounds: int) -> list[dict[str, Any]]:
    """Every prompt, objective and rate.

    A load's events are the same in every round, so each counts with the round in which it was quickest: in the others
    it was disturbed. ``load_s`` are whole rounds as they were, ``undisturbed_s`` is the sum of the quickest events.
    """
    cases = [(prompt, objective, gbit) for prompt in PROMPTS for objective in GOALS for gbit in GBIT_S]
    found: dict[tuple[str, str, float], list[Floats]] = {case: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            found[case].append(played(*case))
    for prompt in LARGE:
        found[prompt, "earliest", GBIT_S[-1]] = [played(prompt, "earliest", GBIT_S[-1]) for _ in range(min(rounds, 3))]
    rows = []
    for (prompt, objective, gbit), loads in found.items():
        best, decided = np.min([load[:, 0] for load in loads], axis=0), loads[0][:, 1]
        rows.append({
            "prompt": prompt,
            "chunks": sum(length // 256 for length in (PROMPTS | LARGE)[prompt]),
            "objective": objective,
            "gbit_s": gbit, "events": len(best), "decided": int(decided.sum()),
            "load_s": summary([float(load[:, 0].sum()) for load in loads]),
            "undisturbed_s": float(best.sum()), "event_s": float(best.mean()),
            "decided_s": float(best[decided > 0].sum()), "p99_s": float(np.quantile(best, 0.99)),
        })  # fmt: skip
    return rows


def fitted(rows: Sequence[dict[str, Any]]) -> Steering:
    """Means over the events of loads of usual sizes, of those that lead to instructions apart."""
    rows = [row for row in rows if row["prompt"] in PROMPTS]
    events, decided = (sum(row[name] for row in rows) for name in ("events", "decided"))
    of_decided = sum(row["decided_s"] for row in rows)
    event_s = (sum(row["event_s"] * row["events"] for row in rows) - of_decided) / (events - decided)
    return Steering(event_s=event_s, decided_s=of_decided / decided - event_s)
