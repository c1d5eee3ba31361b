"""The picture: predicted against measured, both axes logarithmic, with the band that predictions should keep to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

# Okabe and Ito's palette, which colour-blind readers tell apart; markers say the same again.
_POLICIES = {
    "earliest": ("kvwire, earliest", "#0072B2", "o"),
    "quality": ("kvwire, deadline", "#56B4E9", "D"),
    "cachegen": ("CacheGen's policy", "#CC79A7", "s"),
    "level 0": ("level 0", "#009E73", "v"),
    "level 2": ("level 2", "#E69F00", "^"),
    "level 4": ("level 4", "#D55E00", "P"),
    "text": ("recompute all", "#555555", "X"),
}
_KINDS = {"emulated": "emulated link", "shaped": "shaped link (tc)"}
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5)


def draw(rows: Sequence[dict[str, Any]], band: float, path: Path) -> None:
    """Write a PNG. rows: as ``predicted_ttft.py`` writes them down."""
    figure = Figure(figsize=(9.2, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(_KINDS), sharex=True, sharey=True)
    times = [row[side]["median"] for row in rows for side in ("measured_s", "predicted_s")]
    ends = (0.8 * min(times), 1.25 * max(times))
    for axes, (kind, title) in zip(panels, _KINDS.items(), strict=True):
        axes.fill_between(ends, [(1 - band) * x for x in ends], [(1 + band) * x for x in ends], color="#e8e8e8", lw=0)
        axes.plot(ends, ends, color="#999999", linewidth=0.8)
        for policy, (label, color, marker) in _POLICIES.items():
            _points(
                axes,
                [row for row in rows if row["policy"] == policy and row["link"].startswith(kind)],
                label,
                color,
                marker,
            )
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, title=title, aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks([tick for tick in _TICKS if ends[0] <= tick <= ends[1]])
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("measured seconds (median; bars: 10 % to 90 %)")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("predicted by the simulator, seconds")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8)
    figure.suptitle(f"Time to the first token: simulator against real loads (grey: within {band:.0%})", weight="bold")
    figure.savefig(path, dpi=130)


def _points(axes: Any, rows: Sequence[dict[str, Any]], label: str, color: str, marker: str) -> None:  # noqa: ANN401
    measured = [row["measured_s"] for row in rows]
    middle = [each["median"] for each in measured]
    spread = [
        [each["median"] - each["p10"] for each in measured],
        [each["p90"] - each["median"] for each in measured],
    ]
    axes.errorbar(
        middle, [row["predicted_s"]["median"] for row in rows], xerr=spread, fmt=marker, color=color, label=label,
        markersize=6, elinewidth=0.8, markeredgecolor="white", markeredgewidth=0.6,
    )  # fmt: skip
