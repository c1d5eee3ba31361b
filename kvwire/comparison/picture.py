"""The demo's picture: time to first token by link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

_WAYS = (("kvwire", "kvwire", "#1b7f79"), ("raw", "raw KV cache", "#e0a458"), ("text", "recompute", "#9aa5b1"))


def draw_demo(report: Mapping[str, Any], path: Path) -> None:
    """Write a PNG with one panel per link: three bars with their seconds, speed-up and cost in quality."""
    rows = report["links"]
    figure = Figure(figsize=(4.1 * len(rows), 2.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(rows), squeeze=False)[0]
    for number, (axes, row) in enumerate(zip(panels, rows, strict=True)):
        _panel(axes, row, first=number == 0)
    title = (
        f"Seconds until the first token of an answer, prompt of {report['prompt_tokens']:,} tokens (shorter is better)"
    )
    figure.suptitle(title, weight="bold", fontsize=12)
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, row: Mapping[str, Any], *, first: bool) -> None:
    times = [row["ttft_s"][way] for way, _, _ in _WAYS]
    colors = [color for _, _, color in _WAYS]
    bars = axes.barh([label for _, label, _ in _WAYS], times, color=colors, height=0.62)
    axes.bar_label(bars, [f"{seconds:.2f} s" for seconds in times], padding=4)
    gain = min(row["ttft_s"]["text"], row["ttft_s"]["raw"]) / row["ttft_s"]["kvwire"]
    speedup = f"{gain:.1f}x sooner" if gain >= 1 else f"{1 / gain:.1f}x later"
    axes.set_title(f"{row['name']} link, {row['mbit_s']:g} Mbit/s: {speedup}", fontsize=11)
    axes.set_xlim(0, max(times) * 1.22)
    axes.set_xlabel(f"next token as with exact caches: {row['greedy_agreement']:.0%}", fontsize=9)
    axes.tick_params(axis="y", length=0, labelleft=first)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
