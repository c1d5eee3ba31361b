"""The picture of the benchmark: accuracies, how each training went, and wrappers on prose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

# Okabe and Ito's palette.
_COLOURS = {
    "K = 5": "#0072B2", "K = 1": "#56B4E9", "K = 0": "#E69F00", "full": "#000000",
    "wrappers 4+4": "#009E73", "wrappers 8+8": "#CC79A7", "anchors 25 %": "#F0E442", "anchors 50 %": "#D55E00",
    "untrained, full": "#666666", "untrained, K = 0": "#BBBBBB",
}  # fmt: skip
_PART = 25
"""Steps of a point of a curve."""


def draw(results: dict[str, Any], path: Path) -> None:
    """Write the PNG.

    Args:
        results: Of the benchmark.
        path: Where it goes.
    """
    figure = Figure(figsize=(12, 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    _accuracies(axes[0, 0], results["task"])
    _curves(axes[0, 1], {name: run["loss"] for name, run in results["task"].items() if run.get("loss")})
    _repairs(axes[1, 0], results)
    _prose(axes[1, 1], results.get("prose", {}))
    for each in axes.flat:
        each.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def _interval(found: dict[str, Any], middle: str) -> list[list[float]]:
    return [[max(0.0, found[middle] - found["least"])], [max(0.0, found["greatest"] - found[middle])]]


def _accuracies(axes: Axes, task: dict[str, Any]) -> None:
    names = list(task)
    families = list(next(iter(task.values()))["accuracy"])
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        for at, family in enumerate(families):
            found = task[name]["accuracy"][family]
            axes.bar(
                at + (number - (len(names) - 1) / 2) * width, found["accuracy"], width,
                yerr=_interval(found, "accuracy"),
                color=_COLOURS.get(name, "#666666"), label=name if not at else None, error_kw={"linewidth": 0.8},
            )  # fmt: skip
    axes.set_xticks(range(len(families)), families)
    axes.set_ylim(0, 1.02)
    axes.set_ylabel("accuracy, 95 % intervals")
    axes.set_title("task model; trained on redefined, needle and prose", fontsize=11)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.1))


def _curves(axes: Axes, losses: dict[str, list[float]]) -> None:
    for name, values in losses.items():
        parts = [values[at : at + _PART] for at in range(0, len(values), _PART)]
        at = [number * _PART + len(part) / 2 for number, part in enumerate(parts)]
        style = "--" if name.startswith("wrappers") else "-"
        axes.plot(at, [sum(part) / len(part) for part in parts], style, color=_COLOURS.get(name, "#999999"), label=name)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats a token; wrappers: KL)")
    axes.set_title("how each learnt", fontsize=11)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.15))


def _repairs(axes: Axes, results: dict[str, Any]) -> None:
    bars = {
        f"{name}, trained": results["task"][name]["accuracy"]["redefined"]
        for name in ("K = 0", "K = 1", "K = 5")
        if name in results["task"]
    }
    for run, found in results.get("repair_beside_links", {}).items():
        bars |= {f"{run}, {name}": each for name, each in found.items() if name != "links alone"}
    bars |= results.get("repair", {})
    for at, found in enumerate(bars.values()):
        axes.barh(
            at, found["accuracy"], xerr=_interval(found, "accuracy"), color="#56B4E9", error_kw={"linewidth": 0.8}
        )
    axes.set_yticks(range(len(bars)), list(bars), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("accuracy on redefined")
    axes.set_title("links against repair of as many rows", fontsize=11)


def _prose(axes: Axes, prose: dict[str, Any]) -> None:
    axes.set_visible(bool(prose))
    for at, found in enumerate(prose.values()):
        for number, (name, each) in enumerate(found.items()):
            axes.bar(
                at + 0.25 * (number - 1), each["mean"], 0.24, yerr=_interval(each, "mean"),
                color=_COLOURS.get(name.replace(":", " "), "#999999"), label=name if not at else None,
            )  # fmt: skip
    axes.set_xticks(range(len(prose)), list(prose))
    axes.set_yscale("log")
    axes.set_ylabel("KL from full prefill (nats a token)")
    axes.set_title("a book that no training saw", fontsize=11)
    if prose:
        axes.legend(frameon=False, fontsize=8)
