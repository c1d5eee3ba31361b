"""Pictures: time to first token by link, and what linking loses over the share of recomputed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from matplotlib.axes import Axes

    from kvwire.runtime.reports import LinkReport

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


# Okabe and Ito's palette; markers repeat the distinction.
_STYLES = {
    "attention": ("#0072B2", "o"),
    "blend": ("#CC79A7", "D"),
    "cacheblend": ("#E69F00", "s"),
    "first": ("#009E73", "^"),
}
_LEAST = 1e-7


def draw_links(report: LinkReport, path: Path) -> None:
    """Write a PNG: KL divergence from a full prefill against the share of recomputed rows."""
    report = report.with_shift()  # as in loads
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, row in report.repaired.items():
        color, marker = _STYLES.get(name, ("#555555", "x"))
        shares, kls = [0.0, *report.shares], [report.linked, *row]
        axes.plot(shares, [max(kl, _LEAST) for kl in kls], color=color, marker=marker, label=name)
    lines = ((report.no_documents, "#555555", "no documents"), (report.allowed, "#D55E00", "allowed"))
    for kl, color, words in lines:
        axes.axhline(max(kl, _LEAST), color=color, linestyle="--", linewidth=1.2)
        axes.annotate(
            words, (1.0, max(kl, _LEAST)), xycoords=("axes fraction", "data"), xytext=(-4, 3),
            textcoords="offset points", ha="right", color=color, fontsize=9,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xlabel("recomputed rows of the prompt")
    axes.set_ylabel("KL divergence from a full prefill (nats)")
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.set_title(f"{report.model_id}: linked documents, {report.prompts} prompts", fontsize=11)
    figure.savefig(path, dpi=130)
