"""The picture of the sweep: time to the first token against bandwidth, a panel for each model and round trip."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers tell apart; widths and dashes say the same again.
_LINES = {
    "raw": ("raw bfloat16", "#E69F00", 1.6, (0, (5, 2))),
    "text": ("recompute all", "#555555", 1.6, (0, (1, 1.2))),
    "cachegen": ("CacheGen's policy, same levels", "#CC79A7", 1.6, (0, (4, 1.5, 1, 1.5))),
    "adaptive": ("kvwire, level 0 or better", "#0072B2", 2.8, "-"),
}
_LEVEL_COLOR = "#56B4E9"


def draw_sweep(models: dict[str, tuple[str, list[dict[str, Any]]]], path: Path) -> None:
    """Write a PNG. models: machine and points of each model, as ``controller_sweep.py`` writes them down."""
    trips = sorted({point["rtt_s"] for _, points in models.values() for point in points})
    figure = Figure(figsize=(4.0 * len(models), 0.9 + 2.7 * len(trips)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(trips), len(models), squeeze=False, sharex=True, sharey=True)
    for number, (row, rtt_s) in enumerate(zip(panels, trips, strict=True)):
        for axes, (name, (machine, points)) in zip(row, models.items(), strict=True):
            _panel(axes, [point for point in points if point["rtt_s"] == rtt_s])
            if not number:
                axes.set_title(f"{name}, {machine}", fontsize=10)
            if number == len(trips) - 1:
                axes.set_xlabel("bandwidth, Gbit/s")
        row[0].set_ylabel(f"seconds, round trip {1000 * rtt_s:g} ms")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle("Time to the first token of a 32k-token prompt (simulated; lower is better)", weight="bold")
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, points: list[dict[str, Any]]) -> None:
    rates = [point["gbit_s"] for point in points]
    levels = sorted(policy for policy in points[0]["ttft_s"] if policy.startswith("level-"))
    for number, level in enumerate(levels):
        label = f"fixed levels 0 to {len(levels) - 1}" if not number else None
        seconds = [point["ttft_s"][level] for point in points]
        axes.plot(rates, seconds, color=_LEVEL_COLOR, linewidth=0.9, alpha=0.9, label=label)
    for policy, (label, color, width, dashes) in _LINES.items():
        seconds = [point["ttft_s"][policy] for point in points]
        axes.plot(rates, seconds, color=color, linewidth=width, linestyle=dashes, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(0.03, 100)
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_formatter(plain)
    axes.yaxis.set_major_formatter(plain)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
