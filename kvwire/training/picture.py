"""Plot of a training's loss over its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvwire._lazy import require

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_PARTS = 40
"""Points of the plotted line, each the mean over an equal number of steps."""
_UNITS = {
    "links": "surprise at answers (nats a token)",
    "anchors": "surprise at answers (nats a token)",
    "wrappers": "KL divergence from full prefill (nats a token)",
}


def check_drawable() -> None:
    """Check for matplotlib before a training, not at its end."""
    require("matplotlib", "train", "kvwire train-links")


def draw_losses(losses: Sequence[float], title: str, method: str, path: Path) -> None:
    """Write a PNG: the loss of every step, and its running means."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    size = max(1, len(losses) // _PARTS)
    parts = [losses[at : at + size] for at in range(0, len(losses), size)]
    middles = [at * size + (len(part) + 1) / 2 for at, part in enumerate(parts)]
    axes.plot(range(1, len(losses) + 1), losses, color="#56B4E9", alpha=0.4, linewidth=0.8, label="each step")
    means = [sum(part) / len(part) for part in parts]
    axes.plot(middles, means, color="#0072B2", linewidth=1.8, label=f"mean over {size} steps")
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(_UNITS[method])
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(title, fontsize=11)
    figure.savefig(path, dpi=130)
