"""Drawings of the report, as SVG in the page's colours."""

from __future__ import annotations

import re
from html import escape
from io import StringIO
from itertools import cycle
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

_INK, _GRID = "#010203", "#040506"
"""Placeholders for the page's CSS variables; no series uses these colours."""
_SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7F7F7F")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (8, 2)), (0, (2, 4)))
_MARKS = ("o", "s", "^", "D", "v", "x")
MEGABIT = 1.25e5
"""Bytes per second."""
_GIGA = 1000


def draw(work: Callable[[Axes], None], title: str, words: str, height: float) -> str:
    """A figure as SVG; work draws on its axes."""
    settings: dict[Any, Any] = {  # matplotlib types each name
        "svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False, "font.size": 10,
        "font.family": "sans-serif", "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _GRID,
        "xtick.color": _INK, "ytick.color": _INK, "grid.color": _GRID, "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False,
    }  # fmt: skip
    with rc_context(settings):
        figure, out = Figure(figsize=(7, height), layout="constrained"), StringIO()
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.grid(visible=True, alpha=0.5)
        axes.set_axisbelow(True)
        work(axes)
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _inline(out.getvalue(), title, words)


def _inline(svg: str, title: str, words: str) -> str:
    """Turn an SVG file into a page element: no prologue, no fixed size, a label, and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "var(--ink)").replace(_GRID, "var(--line)")
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"font: [^;\"]*?(\d+(?:\.\d+)?px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    name = escape(f"{title}. {words}", quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def bars(title: str, names: Sequence[str], values: Sequence[float], what: str, *, sideways: bool = False) -> str:
    """Draw a bar for each name."""

    def work(axes: Axes) -> None:
        places = range(len(names))
        if sideways:
            axes.barh(places, values, color=_SERIES[0], height=0.7)
            axes.set_yticks(list(places), names)
            axes.invert_yaxis()
            axes.set_xlabel(what)
        else:
            axes.bar(places, values, color=_SERIES[0], width=0.8)
            step = max(1, len(names) // 12)
            axes.set_xticks(list(places)[::step], names[::step])
            axes.set_ylabel(what)
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="y" if sideways else "x")

    words = "; ".join(f"{name}: {value:,.4g}" for name, value in zip(names, values, strict=True))
    return draw(work, title, words, max(1.2, 0.6 + 0.32 * len(names)) if sideways else 2.6)


def curves(
    title: str, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x: str, y: str, *,
    to_words: Callable[[float], str] = "{:g}".format,
) -> str:  # fmt: skip
    """Draw lines over logarithmic axes; each has its own colour, dash and marker."""

    def work(axes: Axes) -> None:
        looks = cycle(zip(_SERIES, _DASHES, _MARKS, strict=True))
        for (name, (xs, ys)), (color, dashes, mark) in zip(series.items(), looks, strict=False):
            axes.plot(xs, ys, color=color, linestyle=dashes, marker=mark, markersize=4, label=name)
        axes.set(xscale="log", yscale="log", xlabel=x, ylabel=y)
        for axis, words in ((axes.xaxis, to_words), (axes.yaxis, "{:g}".format)):
            axis.set_major_formatter(FuncFormatter(lambda value, _, words=words: words(value)))
            axis.set_minor_formatter(NullFormatter())
        if len(series) > 1:
            axes.legend(fontsize=9)

    ends = (f"{name}: {ys[0]:.3g} at the left end, {ys[-1]:.3g} at the right" for name, (_, ys) in series.items())
    return draw(work, title, f"{y} over {x}. {'; '.join(ends)}", 3.6)


def in_bits(megabits: float) -> str:
    """A bandwidth with a unit."""
    rounded = float(f"{megabits:.3g}")
    return f"{rounded / _GIGA:g} Gbit/s" if rounded >= _GIGA else f"{rounded:g} Mbit/s"
