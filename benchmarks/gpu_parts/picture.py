"""The picture: what a cache costs to have, and where a decode's time goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

_COLOURS = ("#b3d9d6", "#7fbfba", "#4da59e", "#1b7f79", "#0c4f4b")
_RIVALS = {"CacheGen": ("#c05a3c", "s"), "int8": ("#e0a458", "^"), "raw bfloat16": ("#9aa5b1", "D")}
_PREFILL = ("#333333", "o")


def draw(path: Path, results: Mapping[str, Any]) -> None:
    """One column for each shape: milliseconds until the cache is there, and parts of the longest document's decode."""
    shapes = {name: shape for name, shape in results["shapes"].items() if shape["documents"]}
    figure = Figure(figsize=(5.0 * len(shapes), 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, len(shapes), squeeze=False)
    for column, shape in enumerate(shapes.values()):
        _against_tokens(panels[0][column], shape)
        _parts(panels[1][column], shape)
    figure.suptitle(f"{results['device']['name']}: synthetic caches of real shapes, bfloat16", weight="bold")
    figure.savefig(path, dpi=110)


def _lines(shape: Mapping[str, Any]) -> Iterator[tuple[str, str, str, list[tuple[int, float]]]]:
    """Name, colour, marker and (tokens, milliseconds) of every way to have a cache."""
    documents = {int(tokens): found for tokens, found in shape["documents"].items()}
    first = next(iter(documents.values()))
    prefill = [(tokens, found["prefill"]["ms"]) for tokens, found in documents.items() if found["prefill"]]
    if prefill:
        yield "prefill", *_PREFILL, prefill
    for name, (colour, marker) in _RIVALS.items():
        rival = [(tokens, found["rivals"][name]["ready_ms"]["median"]) for tokens, found in documents.items()]
        yield name, colour, marker, rival
    for name in first["levels"]:
        level = [(tokens, found["levels"][name]["ready_ms"]["median"]) for tokens, found in documents.items()]
        yield f"kvwire {name}", _COLOURS[first["levels"][name]["level"] % len(_COLOURS)], ".", level


def _against_tokens(axes: Axes, shape: Mapping[str, Any]) -> None:
    for name, colour, marker, points in _lines(shape):
        axes.plot(*zip(*points, strict=True), marker=marker, color=colour, label=name)
    tokens = [int(count) for count in shape["documents"]]
    axes.set(xscale="log", yscale="log", title=shape["title"], xlabel="tokens", ylabel="ms until the cache is there")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(fontsize=7)


def _parts(axes: Axes, shape: Mapping[str, Any]) -> None:
    """Bars: upload, entropy decoding, the rest, level by level; a line where a copy on the device would end."""
    tokens, found = max(shape["documents"].items(), key=lambda item: int(item[0]))
    names = list(found["levels"])
    left = [0.0] * len(names)
    for part, colour in (("upload", "#9aa5b1"), ("entropy", "#e0a458"), ("place", "#1b7f79")):
        times = [found["levels"][name][f"{part}_ms"]["median"] for name in names]
        axes.barh(names, times, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, times, strict=True)]
    speeds = [f"decodes {found['levels'][name]['decode_gb_s']:,.0f} GB/s" for name in names]
    for row, (end, speed) in enumerate(zip(left, speeds, strict=True)):
        axes.text(end, row, f" {speed}", va="center", fontsize=7)
    axes.axvline(found["copy_ms"]["median"], color="#333333", linestyle="--", label="copy on the device")
    axes.set(xlabel=f"ms, {int(tokens):,} tokens, each part alone", xlim=(0, 1.45 * max(left)))
    axes.invert_yaxis()
    axes.legend(fontsize=7)
