"""Two pictures: gap closed against token-layers, divergence against the predicted time to the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from reuse_parts.predicting import frontier

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers tell apart; markers and dashes say the same again.
_STYLES = {
    "attention": ("o-", "#0072B2", 2.6),
    "attention, chosen on level 0": ("o:", "#56B4E9", 1.6),
    "product": ("P-", "#009E73", 1.8),
    "deviation": ("v--", "#009E73", 1.2),
    "cacheblend": ("s--", "#D55E00", 1.6),
    "cacheblend, values": ("s:", "#D55E00", 1.2),
    "lmcache": ("D--", "#CC79A7", 1.4),
    "first": ("^--", "#E69F00", 1.4),
    "random": ("x:", "#555555", 1.2),
    "none": ("*", "#000000", 1.2),
}
_LABELS = {"first": "first rows (EPIC)", "cacheblend": "CacheBlend", "lmcache": "LMCache's", "none": "no repair"}


def draw_closed(models: dict[str, Any], path: Path) -> None:
    """Write a PNG, a panel for each model. models: by name ``ways`` and ``prefill_token_layers``."""
    figure = Figure(figsize=(5.2 * len(models), 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for axes, (name, found) in zip(panels, models.items(), strict=True):
        for way, (style, color, width) in _STYLES.items():
            points = sorted(found["ways"].get(way, {}).values(), key=lambda each: each["token_layers"])
            most = max((each["prompts"] for each in points), default=0)
            points = [each for each in points if each["prompts"] == most]  # a line is one set of prompts
            if way == "none" or not points:
                continue
            costs = [100 * each["token_layers"] / found["prefill_token_layers"] for each in points]
            closed = [each["closed"]["pooled"] for each in points]
            bounds = [
                [middle - each["closed"]["interval"][0] for middle, each in zip(closed, points, strict=True)],
                [each["closed"]["interval"][1] - middle for middle, each in zip(closed, points, strict=True)],
            ]
            label = _LABELS.get(way, way)
            axes.errorbar(costs, closed, bounds, fmt=style, color=color, linewidth=width, label=label, markersize=4)
        axes.set(title=name, xlabel="token-layers, % of a whole prefill's (choosing included)", xlim=(0, 62))
        _tidy(axes)
    panels[0].set_ylabel("KL gap closed, % (pooled, 95 % intervals)")
    _legend(figure, panels)
    figure.savefig(path, dpi=120)


def draw_ttft(models: dict[str, Any], path: Path) -> None:
    """Write a PNG, a panel for each model and bandwidth. models: by name ``predicted``, of which one shape is drawn."""
    shape = "llama-3.1-8b"
    columns = next(iter(models.values()))["predicted"][shape]["links"]
    figure = Figure(figsize=(4.2 * len(columns), 0.9 + 3.1 * len(models)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(models), len(columns), squeeze=False, sharey="row")
    for row, (name, found) in zip(panels, models.items(), strict=True):
        known = found["predicted"][shape]
        for axes, (gbit, points) in zip(row, known["links"].items(), strict=True):
            for way, (style, color, width) in _STYLES.items():
                best = frontier([each for each in points if each["selector"] in {way, "none"}])
                if way in {each["selector"] for each in points}:
                    xs, ys = [each["ttft_s"] for each in best], [each["kl"] for each in best]
                    axes.plot(
                        xs, ys, style if way != "none" else "*-", color=color, linewidth=width, markersize=4,
                        label=_LABELS.get(way, way),
                    )  # fmt: skip
            axes.axvline(known["prefill_s"], color="#555555", linestyle=":", label="whole prefill (KL 0)")
            axes.set(xscale="log", yscale="log", title=f"{name}, {gbit} Gbit/s", xlabel="predicted TTFT, s")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))
            _tidy(axes)
        row[0].set_ylabel("KL to a full prefill")
    figure.suptitle(
        f"Levels and repair, costs of {shape} on {known['machine']}, 32k tokens (divergences: small models)"
    )
    _legend(figure, list(panels.flat))
    figure.savefig(path, dpi=120)


def _tidy(axes: Axes) -> None:
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Figure, panels: list[Axes]) -> None:
    named = dict(pair[::-1] for axes in panels for pair in zip(*axes.get_legend_handles_labels(), strict=True))
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
