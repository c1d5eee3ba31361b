"""The picture of one load in docs/controller.md: what link, decoder and forward passes do until the deadline.

    python benchmarks/controller_decision.py

plays the third situation of that page in the simulator.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kvwire.controller import (
    Controller,
    ControllerSettings,
    CostModel,
    DecodeCost,
    DocumentPlanInput,
    Estimates,
    Goal,
    PrefillCost,
)
from kvwire.controller.simulator import LoadArrival, World, constant

COSTS = CostModel(PrefillCost(0.005, 1e-4), DecodeCost(0.001, 1e-6, 1e-9), 1e-6)
BYTES_S, RTT_S, DEADLINE_S = 2e6, 0.01, 0.15
LANES = {"link": 2, "prefill": 1, "decode": 0}
COLORS = {"fetch": "#56B4E9", "refinement": "#0072B2", "recompute": "#E69F00", "decode": "#999999"}


def main() -> None:
    """Play and draw."""
    errors = tuple(0.1 ** (level + 1) for level in range(4))
    sizes = tuple(12_800 * 2**level for level in range(4))
    document = DocumentPlanInput((256,) * 8, (sizes,) * 8, errors=(errors,) * 8)
    controller = Controller(Estimates(COSTS, BYTES_S, RTT_S), ControllerSettings(workers=2))
    world = World(controller, constant(BYTES_S), COSTS, rtt_s=RTT_S, workers=2)
    goal = Goal(objective="quality", deadline_s=DEADLINE_S)
    (outcome,) = world.run([LoadArrival(0.0, ((document,),), goal)])
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    came: dict[int, int] = {}
    link_free = 0.0
    for span in sorted(outcome.spans, key=lambda each: each.ended):
        what, began = span.what, span.began
        if span.lane == "link":
            what = "refinement" if span.first in came else "fetch"
            came[span.first] = span.level or 0
            began, link_free = max(began + RTT_S, link_free), span.ended  # answers share the link; it ends them in turn
        axes.barh(LANES[span.lane], 1e3 * (span.ended - began), left=1e3 * began, color=COLORS[what], edgecolor="white")
        label = str(span.first) if span.level is None else f"{span.first}:{span.level}"
        if span.lane != "decode":
            axes.text(500 * (began + span.ended), LANES[span.lane], label, ha="center", va="center", fontsize=8)
    axes.axvline(1e3 * outcome.ready_s, color="black", linewidth=1, linestyle=":")
    axes.axvline(1e3 * DEADLINE_S, color="black", linewidth=1.5)
    axes.text(1e3 * outcome.ready_s - 1, 2.65, "handed over", ha="right", fontsize=8)
    axes.text(1e3 * DEADLINE_S - 1, 2.65, "due", ha="right", fontsize=8)
    axes.set_yticks([*LANES.values()], ["link", "passes", "decoding"])
    axes.set_xlim(0, 1e3 * DEADLINE_S + 5)
    axes.set_ylim(-0.6, 2.95)
    axes.set_xlabel("milliseconds")
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.savefig(Path(__file__).parents[1] / "docs" / "controller.png", dpi=110)


if __name__ == "__main__":
    main()
