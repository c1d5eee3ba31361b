"""Pictures of simulations: the timeline of one load, and times to first token under each policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvwire.controller.simulator import Outcome, Span

# Levels are shades of one colour; all else has other colours, for colour-blind readers, too.
_LEVELS = colormaps["viridis_r"]
_LEAST_SHADE, _MOST_SHADE = 0.12, 0.95
_RECOMPUTED, _HEAD_START, _LOST = "#D55E00", "#CC79A7", "#BBBBBB"
_LANES = (("link", "link", 2.4), ("decode", "decoder", 1.0), ("prefill", "prefill", 1.0))
_GAP = 0.35
_LETTER_SHARE = 0.0085
"""Width of a letter on a bar, as a share of the axis."""

# Okabe and Ito's palette; dash patterns repeat the distinction.
_LINES = (
    ("adaptive", "#0072B2", "-", 2.6), ("cachegen", "#CC79A7", (0, (4, 1.5, 1, 1.5)), 1.6),
    ("cachegen-timed", "#F0E442", (0, (3, 1)), 1.6),
    ("cachegen-artefact", "#009E73", (0, (1, 1)), 1.6), ("text", "#555555", (0, (1, 2)), 1.6),
    ("raw", "#E69F00", (0, (5, 2)), 1.6), ("cacheblend", "#56B4E9", (0, (6, 1, 1, 1)), 1.6),
)  # fmt: skip


def draw_load(outcome: Outcome, title: str, path: Path) -> None:
    """Write a PNG of one load: a row each for link, decoder and prefill, over time since the request."""
    figure = Figure(figsize=(9.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    finest = max((span.level for span in outcome.spans if span.level is not None), default=0)
    top, places = 0.0, []
    end_s = max(outcome.ttft_s, outcome.deadline_s or 0.0)
    for lane, name, height in reversed(_LANES):
        _lane(axes, outcome, _jobs(span for span in outcome.spans if span.lane == lane), (top, height), finest)
        places.append((top + height / 2, name))
        top += height + _GAP
    axes.set_yticks([place for place, _ in places], [name for _, name in places])
    axes.set_ylim(-_GAP / 2, top - _GAP / 2)
    scale = 1.04
    axes.set_xlim(0, end_s * scale)
    for seconds, color, dashes, words in _marks(outcome):
        axes.axvline(seconds, color=color, linestyle=dashes, linewidth=1.6)
        axes.annotate(
            words, (seconds, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, 3), textcoords="offset points",
            color=color, ha="right" if seconds > end_s / 2 else "left", fontsize=9,
        )  # fmt: skip
    axes.set_xlabel("milliseconds since the load was asked for")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value * 1e3:g}"))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    figure.legend(handles=_keys(outcome.spans, finest), loc="outside lower center", ncols=8, frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=11, weight="bold")
    figure.savefig(path, dpi=130)


def _marks(outcome: Outcome) -> Iterable[tuple[float, str, str, str]]:
    near = outcome.deadline_s is not None and abs(outcome.ttft_s - outcome.deadline_s) < 0.2 * outcome.deadline_s
    if outcome.failed:
        yield outcome.ttft_s, "#000000", "-", "given up"
    elif near and outcome.deadline_s is not None:
        # Two lines close together leave no room for two labels.
        words = f"first token {outcome.ttft_s * 1e3:.0f} ms, deadline {outcome.deadline_s * 1e3:.0f} ms (dashed)"
        yield outcome.ttft_s, "#000000", "-", words
        yield outcome.deadline_s, "#D00000", "--", ""
        return
    else:
        yield outcome.ttft_s, "#000000", "-", f"first token {outcome.ttft_s * 1e3:.0f} ms"
    if outcome.deadline_s is not None:
        yield outcome.deadline_s, "#D00000", "--", f"deadline {outcome.deadline_s * 1e3:.0f} ms"


def _jobs(spans: Iterable[Span]) -> list[Span]:
    """Spans, with those of a batch merged into its coarsest."""
    batches: dict[tuple[str, float, float, int], Span] = {}
    for number, span in enumerate(spans):
        key = (span.what, span.began, span.ended, 0 if span.what == "decode" else number)
        if key not in batches or (span.level or 0) < (batches[key].level or 0):
            batches[key] = span
    return list(batches.values())


def _lane(axes: Axes, outcome: Outcome, spans: Sequence[Span], place: tuple[float, float], finest: int) -> None:
    """Draw one row's bars; overlapping spans are stacked."""
    bottom, height = place
    rows: list[float] = []
    placed = []
    for span in sorted(spans, key=lambda each: each.began):
        row = next((number for number, until in enumerate(rows) if until <= span.began + 1e-9), len(rows))
        rows[row:] = [span.ended, *rows[row + 1 :]]
        placed.append((row, span))
    axes.axhspan(bottom, bottom + height, color="#F4F4F4", zorder=0)
    each = height / max(len(rows), 1)
    width_s = max(outcome.ttft_s, outcome.deadline_s or 0.0)
    for row, span in placed:
        left, long_s = span.began - outcome.asked_at, span.ended - span.began
        lost = span.what in {"cancelled", "failed"}
        axes.barh(
            bottom + (row + 0.5) * each, long_s, left=left, height=each * (0.9 if len(rows) > 1 else 1.0),
            color=_color(span, finest), hatch="////" if lost else None, edgecolor="white", linewidth=0.5,
        )  # fmt: skip
        if span.lane == "prefill" and long_s > _LETTER_SHARE * len(_name(span)) * width_s:
            axes.text(left + long_s / 2, bottom + height / 2, _name(span), ha="center", va="center", fontsize=8,
                      color="white", clip_on=True)  # fmt: skip


def _name(span: Span) -> str:
    if span.what == "head start":
        return f"doc {span.document}"
    return f"doc {span.document}: {span.first}" + (f"–{span.last}" if span.last > span.first else "")


def _color(span: Span, finest: int) -> str | tuple[float, float, float, float]:
    if span.what in {"cancelled", "failed"}:
        return _LOST
    if span.what == "head start":
        return _HEAD_START
    return _RECOMPUTED if span.level is None else _shade(span.level, finest)


def _shade(level: int, finest: int) -> tuple[float, float, float, float]:
    share = level / finest if finest else 1.0
    return _LEVELS(_LEAST_SHADE + share * (_MOST_SHADE - _LEAST_SHADE))


def _keys(spans: Sequence[Span], finest: int) -> list[Patch]:
    keys = [Patch(color=_shade(level, finest), label=f"level {level}")
            for level in sorted({span.level for span in spans if span.level is not None})]  # fmt: skip
    what = {span.what for span in spans}
    if "recompute" in what:
        keys.append(Patch(color=_RECOMPUTED, label="recomputed (document: chunks)"))
    if "head start" in what:
        keys.append(Patch(color=_HEAD_START, label="prefix layers"))
    if what & {"cancelled", "failed"}:
        keys.append(Patch(facecolor=_LOST, edgecolor="white", hatch="////", label="fetch lost or cancelled"))
    return keys


def draw_cdf(panels: Mapping[str, Mapping[str, Sequence[float]]], deadline_s: float | None, path: Path) -> None:
    """Write a PNG with a panel per model and prompt: the share of loads with a first token by each second."""
    columns = min(len(panels), 3)
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(max(6.0, 4.3 * columns), 3.3 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, policies) in zip(grid, panels.items(), strict=False):
        _curves(axes, policies)
        if deadline_s is not None:
            axes.axvline(deadline_s, color="#D00000", linestyle="--", linewidth=1.2, label="deadline")
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("seconds to the first token")
    for axes in grid[::columns]:
        axes.set_ylabel("share of loads")
    named = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    order = sorted(named, key=lambda label: (label != "adaptive", label == "deadline"))
    figure.legend(
        [named[label] for label in order], order, loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    figure.suptitle("Share of loads whose first token has come (simulated)", fontsize=11, weight="bold")
    figure.savefig(path, dpi=130)


def _curves(axes: Axes, policies: Mapping[str, Sequence[float]]) -> None:
    known = {name: (color, dashes, width) for name, color, dashes, width in _LINES}
    levels = sorted(name for name in policies if name.startswith("level-"))
    for name in sorted(policies, key=lambda each: each == "adaptive"):
        times = np.sort(policies[name])
        if not len(times):
            continue
        color, dashes, width = known.get(name, ("#56B4E9", "-", 1.0))
        label = "fixed levels" if name in levels and len(levels) > 1 else name
        shares = np.arange(1, len(times) + 1) / len(times)
        steps = (np.concatenate([times[:1], times]), np.concatenate([[0.0], shares]))
        axes.step(*steps, where="post", color=color, linestyle=dashes, linewidth=width, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else ""))
    axes.tick_params(axis="x", which="minor", labelsize=8)
    axes.set_ylim(0, 1.02)
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
