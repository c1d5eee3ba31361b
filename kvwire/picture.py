"""The demo's picture: time to the first token, link by link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

_WAYS = (
    ("text", "recompute from text", "#9aa5b1"),
    ("raw", "raw KV cache", "#e0a458"),
    ("kvwire", "kvwire", "#1b7f79"),
)


def draw_demo(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG with one panel for each link: three bars, seconds on them, and what was gained."""
    rows = report["links"]
    figure = Figure(figsize=(3.6 * len(rows), 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for axes, row in zip(panels, rows, strict=True):
        _panel(axes, row)
    figure.suptitle(
        f"Seconds until the first token, prompt of {report['prompt_tokens']:,} tokens (shorter is better)",
        weight="bold",
    )
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, row: Mapping[str, Any]) -> None:
    times = [row["ttft_s"][way] for way, _, _ in _WAYS]
    bars = axes.bar([label for _, label, _ in _WAYS], times, color=[color for _, _, color in _WAYS], width=0.65)
    axes.bar_label(bars, [f"{seconds:.2f} s" for seconds in times], padding=3)
    others = min(row["ttft_s"]["text"], row["ttft_s"]["raw"])
    gain = others / row["ttft_s"]["kvwire"]
    axes.set_title(f"{row['name']} link, {row['mbit_s']:g} Mbit/s\n{gain:.1f}x sooner than the better of the two")
    axes.set_ylim(0, max(times) * 1.18)
    axes.set_ylabel("seconds")
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    agreement = row["greedy_agreement"]
    axes.text(
        0.98, 0.97, f"same next token: {agreement:.0%}", transform=axes.transAxes, ha="right", va="top", fontsize=8
    )
