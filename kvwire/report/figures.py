"""Drawings of the report, as SVG in the page's colours."""

from __future__ import annotations

import re
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes

_INK, _GRID = "#010203", "#040506"
"""Placeholders for the page's CSS variables; no series uses these colours."""
_SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#7F7F7F")
_DASHES = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (4, 1.5, 1, 1.5)), (0, (8, 2)), (0, (2, 4)))
_MARKS = ("o", "s", "^", "D", "v", "x")
MEGABIT = 1.25e5
"""Bytes per second."""
_GIGA = 1000


class Drawing:
    """One figure.

    Attributes:
        axes: Axes to draw on.
        svg: The figure, set when the ``with`` block of ``drawing`` ends.
    """

    def __init__(self, axes: Axes) -> None:
        """Take the axes; ``drawing`` sets the SVG."""
        self.axes = axes
        self.svg = ""


@contextmanager
def drawing(title: str, words: str, height: float = 3.2) -> Iterator[Drawing]:
    """Make a figure; ``svg`` is set after the block."""
    settings: dict[Any, Any] = {  # matplotlib types each name
        "svg.fonttype": "none", "svg.hashsalt": title, "text.parse_math": False, "font.size": 10,
        "font.family": "sans-serif", "text.color": _INK, "axes.labelcolor": _INK, "axes.edgecolor": _GRID,
        "xtick.color": _INK, "ytick.color": _INK, "grid.color": _GRID, "axes.spines.top": False,
        "axes.spines.right": False, "legend.frameon": False,
    }  # fmt: skip
    with rc_context(settings):
        figure = Figure(figsize=(7, height), layout="constrained")
        FigureCanvasSVG(figure)
        made = Drawing(figure.add_subplot())
        made.axes.grid(visible=True, alpha=0.5)
        made.axes.set_axisbelow(True)
        yield made
        out = StringIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    made.svg = _inline(out.getvalue(), title, words)


def _inline(svg: str, title: str, words: str) -> str:
    """Turn an SVG file into a page element: no prologue, no fixed size, a label, and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg.replace(_INK, "var(--ink)").replace(_GRID, "var(--line)")
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r"font: [^;\"]*?(\d+(?:\.\d+)?px)[^;\"]*", r"font: \1 system-ui, sans-serif", svg)
    name = escape(f"{title}. {words}", quote=True)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{name}" ', 1)


def bars(
    title: str, names: Sequence[str], values: Sequence[float], what: str, *, sideways: bool = False, words: str = ""
) -> str:
    """Draw a bar for each name."""
    description = words or "; ".join(f"{name}: {value:,.4g}" for name, value in zip(names, values, strict=True))
    height = max(1.2, 0.6 + 0.32 * len(names)) if sideways else 2.6
    with drawing(title, description, height) as made:
        places = range(len(names))
        if sideways:
            made.axes.barh(places, values, color=_SERIES[0], height=0.7)
            made.axes.set_yticks(list(places), names)
            made.axes.invert_yaxis()
            made.axes.set_xlabel(what)
        else:
            made.axes.bar(places, values, color=_SERIES[0], width=0.8)
            step = max(1, len(names) // 12)
            made.axes.set_xticks(list(places)[::step], names[::step])
            made.axes.set_ylabel(what)
            made.axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        made.axes.grid(visible=False, axis="y" if sideways else "x")
    return made.svg


def curves(
    title: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    x: str,
    y: str,
    *,
    to_words: Callable[[float], str] = "{:g}".format,
) -> str:
    """Draw lines over logarithmic axes; each has its own colour, dash and marker."""
    description = "; ".join(
        f"{name}: {ys[0]:.3g} at the left end, {ys[-1]:.3g} at the right" for name, (_, ys) in series.items()
    )
    with drawing(title, f"{y} over {x}. {description}", 3.6) as made:
        for number, (name, (xs, ys)) in enumerate(series.items()):
            look = number % len(_SERIES)
            made.axes.plot(
                xs, ys, color=_SERIES[look], linestyle=_DASHES[look], marker=_MARKS[look], markersize=4, label=name
            )
        made.axes.set_xscale("log")
        made.axes.set_yscale("log")
        made.axes.set_xlabel(x)
        made.axes.set_ylabel(y)
        for axis, words in ((made.axes.xaxis, to_words), (made.axes.yaxis, "{:g}".format)):
            axis.set_major_formatter(FuncFormatter(lambda value, _, words=words: words(value)))
            axis.set_minor_formatter(NullFormatter())
        if len(series) > 1:
            made.axes.legend(fontsize=9)
    return made.svg


def in_bits(megabits: float) -> str:
    """A bandwidth with a unit."""
    rounded = float(f"{megabits:.3g}")
    return f"{rounded / _GIGA:g} Gbit/s" if rounded >= _GIGA else f"{rounded:g} Mbit/s"
