"""The soonest first token from the slowest link to the fastest, and what wrong priors cost.

    python benchmarks/controller_sweep.py

plays, in the simulator, a prompt of 32k tokens in eight documents over steady links of 20 rates from 0.1 to 40 Gbit/s
and round trips of 1, 20 and 100 ms, for three models, with the controller, CacheGen's, every fixed level, text and raw
caches; then, at the shortest round trip, with priors of the bandwidth or of prefill that are wrong by a factor of 2.
Settings are those that ship, and what steering takes is charged. The goal is the soonest first token at quality floor
0; fixed levels above 0 give more. Draws the picture beside the JSON. See docs/simulator.md for what is modelled.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from controller_parts.links import GBIT, LEAST_GBIT, MOST_GBIT
from controller_parts.picture import draw_sweep
from measure import RESULTS, summary, table, write_json

from kvwire.controller import Goal
from kvwire.controller.simulator import (
    Scenario,
    constant,
    machine_named,
    model_named,
    policy_named,
    policy_names,
    settings_for,
    simulate,
    variants_for,
)

MACHINES = {"llama-3.1-8b": "h100", "llama-3.1-70b": "4xh100", "deepseek-v3": "8xh200"}
DOCUMENTS = (4096,) * 8
LEVELS = 5
RTTS_S = (0.001, 0.02, 0.1)
ALIKE = 1.02
"""Times the best other policy's time that the controller may take."""
WRONG = {
    "bandwidth x 2": {"bandwidth_error": 2.0},
    "bandwidth / 2": {"bandwidth_error": 0.5},
    "prefill x 2": {"prefill_error": 2.0},
    "prefill / 2": {"prefill_error": 0.5},
}
MOST_LOST = 0.15
"""What a wrong prior may cost of the time to the first token."""


def scenario(model: str, gbit: float, rtt_s: float, *, warm: bool, **wrong: float) -> Scenario:
    """A load over a steady link."""
    known = model_named(model)
    return Scenario(
        model=known, machine=machine_named(MACHINES[model]), documents=variants_for(known, DOCUMENTS),
        rate=constant(gbit * GBIT), rtt_s=rtt_s, goal=Goal(), warm=warm, **wrong,
    )  # fmt: skip


def swept(model: str, gbit: float, rtt_s: float, *, priors: bool) -> dict[str, Any]:
    """Seconds to the first token of every policy on one link, and what wrong priors make of the controller's."""
    known = scenario(model, gbit, rtt_s, warm=True)
    ttft = {name: simulate(known, policy_named(name, known.rate))[0].ttft_s for name in policy_names(LEVELS)}
    # The rule is one for deadlines: without one it looks at a share of the prompt alone.
    del ttft["cachegen-artefact"]
    others = {name: seconds for name, seconds in ttft.items() if name != "adaptive"}
    best = min(others, key=lambda name: others[name])
    cold = scenario(model, gbit, rtt_s, warm=False)
    right = simulate(cold, policy_named("adaptive", cold.rate))[0].ttft_s
    wrong = {name: _cold(cold, **factors) / right for name, factors in WRONG.items()} if priors else {}
    return {
        "gbit_s": gbit, "rtt_s": rtt_s, "ttft_s": ttft, "bound_s": known.bounds[0].ttft_s, "best_of_others": best,
        "over_best_of_others": ttft["adaptive"] / others[best], "text_over_adaptive": ttft["text"] / ttft["adaptive"],
        "over_bound": ttft["adaptive"] / known.bounds[0].ttft_s, "cold_s": right, "wrong_priors": wrong,
    }  # fmt: skip


def _cold(known: Scenario, **factors: float) -> float:
    wrong = replace(known, **factors)  # type: ignore[arg-type]
    return simulate(wrong, policy_named("adaptive", wrong.rate))[0].ttft_s


def prior_figures(points: list[dict[str, Any]]) -> dict[str, Any]:
    """How times with wrong priors compare with those of right ones, over all points."""
    out = {}
    for name in WRONG:
        found = [point["wrong_priors"][name] for point in points if point["wrong_priors"]]
        p90 = float(np.quantile(found, 0.9))
        out[name] = summary(found) | {"p90": p90, "beyond": sum(ratio > 1 + MOST_LOST for ratio in found)}
    return out


def shown(points: list[dict[str, Any]]) -> str:
    """A model's points as a table."""
    names = list(points[0]["ttft_s"])
    head = ["Gbit/s", *names, "bound", "over best", "text over", "priors"]
    rows = [
        [
            f"{point['gbit_s']:.2f}", *(f"{point['ttft_s'][name]:.3g}" for name in names), f"{point['bound_s']:.3g}",
            f"{point['over_best_of_others']:.3f}", f"{point['text_over_adaptive']:.1f}x",
            f"{max(point['wrong_priors'].values(), default=float('nan')):.2f}",
        ]
        for point in points
    ]  # fmt: skip
    return table(head, rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--rtts", nargs="+", type=float, default=list(RTTS_S), help="seconds")
    parser.add_argument("--points", type=int, default=20, help="rates")
    parser.add_argument("--quick", action="store_true", help="five rates")
    parser.add_argument("--out", type=Path, default=RESULTS / "controller_sweep.json")
    options = parser.parse_args()
    options.points = 5 if options.quick else options.points
    return options


def main() -> None:
    """Play, print, draw and write down."""
    options, began = arguments(), time.perf_counter()
    rates = np.geomspace(LEAST_GBIT, MOST_GBIT, options.points).tolist()
    models: dict[str, list[dict[str, Any]]] = {model: [] for model in options.models}
    for model, points in models.items():
        for rtt_s in options.rtts:
            for gbit in rates:
                points.append(swept(model, gbit, rtt_s, priors=rtt_s == options.rtts[0]))
                if sys.stderr.isatty():
                    print(f"\r{model} {rtt_s:g} s {gbit:.2f} Gbit/s   ", end="", file=sys.stderr, flush=True)
            print(f"\n{model} on {MACHINES[model]}, round trip {rtt_s:g} s, seconds to the first token")
            print(shown(points[-len(rates) :]))
    overall = told([point for each in models.values() for point in each])
    settings = {
        "machines": MACHINES, "documents": DOCUMENTS, "rtts_s": options.rtts, "seconds": time.perf_counter() - began,
        "controls": {name: asdict(settings_for(machine_named(MACHINES[name]))) for name in models},
        "steering": {name: asdict(machine_named(MACHINES[name]).steering) for name in models},
    }  # fmt: skip
    write_json(options.out, "controller_sweep", settings, {"models": models, "overall": overall})
    draw_sweep({name: (MACHINES[name], each) for name, each in models.items()}, options.out.with_suffix(".png"))


def told(points: list[dict[str, Any]]) -> dict[str, Any]:
    """Print figures over all points; what goes into the JSON."""
    by_rtt = {}
    for rtt_s in sorted({point["rtt_s"] for point in points}):
        ratios = [point["over_best_of_others"] for point in points if point["rtt_s"] == rtt_s]
        by_rtt[f"{rtt_s:g}"] = figures = summary(ratios) | {"beyond": sum(ratio > ALIKE for ratio in ratios)}
        spread = f"median {figures['median']:.3f}, greatest {figures['greatest']:.3f}"
        print(f"\nround trip {rtt_s:g} s: over the best other: {spread}, {figures['beyond']} points beyond {ALIKE:g}")
    print(f"text over adaptive: {summary([point['text_over_adaptive'] for point in points])}")
    priors = prior_figures(points)
    for name, figures in priors.items():
        print(f"{name}: median {figures['median']:.3f}, p90 {figures['p90']:.3f}, greatest {figures['greatest']:.3f}")
    ratio = summary([point["over_best_of_others"] for point in points])
    return {"over_best_of_others": ratio, "by_rtt": by_rtt, "priors": priors, "n": len(points)}


if __name__ == "__main__":
    main()
