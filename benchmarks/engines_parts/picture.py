"""The picture of ``benchmarks/engines.py``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_COLOURS = {"kvwire": "#1f77b4", "LMCache": "#d98a1f", "raw pages": "#8c8c8c"}


def draw(path: Path) -> None:
    """Draw what is saved, as PNG beside it.

    Args:
        path: The JSON.
    """
    from matplotlib.figure import Figure

    saved = json.loads(path.read_text(encoding="utf-8"))
    settings, groups = saved["settings"], _groups(saved["results"]["rows"], saved["settings"]["links_mbit"])
    figure = Figure(figsize=(10, 0.3 * sum(map(len, groups.values())) + 2.2), layout="constrained")
    heights = [len(rows) for rows in groups.values()]
    plots = figure.subplots(len(groups), 1, sharex=True, gridspec_kw={"height_ratios": heights}, squeeze=False)
    for plot, (title, rows) in zip(plots[:, 0], groups.items(), strict=True):
        _bars(plot, title, rows)
    plots[-1, 0].set_xlabel("seconds to the first token, median; whiskers: least and greatest")
    tokens = settings["documents"] * settings["document_tokens"] + settings["question_tokens"]
    busy = ", busy machine" if settings["is_busy"] else ""
    figure.suptitle(
        f"vLLM on one thread of a processor{busy}: {settings['model']}, {tokens} tokens of {settings['text']}",
        fontsize=10,
    )
    figure.savefig(path.with_suffix(".png"), dpi=120)
    print(f"written: {path.with_suffix('.png').name}")


def _groups(results: dict[str, Any], links: list[float]) -> dict[str, dict[str, Any]]:
    """Rows of no link and of each link, the quickest first."""
    found: dict[str, dict[str, Any]] = {"no link": {}}
    found |= {f"{mbit:g} Mbit/s": {} for mbit in links}
    for name, row in results.items():
        short, _, last = name.rpartition(", ")
        if last in found:
            found[last][short] = row
        else:
            found["no link"][name] = row
    by_time = lambda each: each[1]["ttft_s"]["median"]  # noqa: E731
    return {title: dict(sorted(rows.items(), key=by_time)) for title, rows in found.items()}


def _bars(plot: Any, title: str, rows: dict[str, Any]) -> None:  # noqa: ANN401 - matplotlib's
    medians = [row["ttft_s"]["median"] for row in rows.values()]
    spread = [
        [row["ttft_s"]["median"] - row["ttft_s"]["least"] for row in rows.values()],
        [row["ttft_s"]["greatest"] - row["ttft_s"]["median"] for row in rows.values()],
    ]
    bars = plot.barh(range(len(rows)), medians, xerr=spread, color=[_colour(name) for name in rows], height=0.7)
    for place, (bar, row) in enumerate(zip(bars, rows.values(), strict=True)):
        bar.set_hatch("//" if row["computed"] else "")
        size = f", {row['bytes']['median'] / 1e6:.2g} MB" if "bytes" in row else ""
        kl = f", KL {max(row['kl'], 0.0):.1g}" if "kl" in row else ""
        text = f"  {row['ttft_s']['median']:.3g} s{size}{kl}{', computed' if row['computed'] else ''}"
        plot.text(row["ttft_s"]["greatest"], place, text, va="center", fontsize=7)
    plot.set_yticks(range(len(rows)), list(rows), fontsize=8)
    plot.invert_yaxis()
    plot.set_xscale("log")
    plot.set_xlim(0.01, 60)
    plot.set_title(title, loc="left", fontsize=9)
    plot.spines[["top", "right"]].set_visible(False)


def _colour(name: str) -> str:
    return next((colour for start, colour in _COLOURS.items() if name.startswith(start)), "#4d4d4d")
