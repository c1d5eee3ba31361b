"""The picture of ``kvwire check-model``: loss of linking over the share of recomputed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

if TYPE_CHECKING:
    from pathlib import Path

    from kvwire.runtime.link_report import LinkReport

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
