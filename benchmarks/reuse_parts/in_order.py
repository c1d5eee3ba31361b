"""What repair in document order is worth: pairs of loads, the best trade by link, and its picture."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from measure import ratios

from kvwire.controller import Goal, RepairOption
from kvwire.controller.policies import Adaptive
from kvwire.controller.simulator import Scenario, simulate
from kvwire.controller.simulator.machines import machine_named
from kvwire.controller.simulator.models import model_named
from kvwire.controller.simulator.sizes import documents_for
from kvwire.types.rates import RateTrace

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WANTED_KL, WANTED_TTFT = 0.25, 1.15
"""Of a load without repair: the divergence from a full prefill at most, and the time at most."""


def trades(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By link and prompt: what order saves in pairs, and the least divergence within the time that is wanted."""
    found = []
    for link, prompt in dict.fromkeys((row["link"], row["prompt"]) for row in rows):
        mine = [row for row in rows if (row["link"], row["prompt"]) == (link, prompt)]
        (plain,) = (row for row in mine if not row["share"])
        pairs = {}
        for row in mine:
            if not row["in_order"]:
                continue
            key = row["selector"], row["share"], False
            (end,) = (each for each in mine if (each["selector"], each["share"], each["in_order"]) == key)
            paired = ratios(row["ttft_all_s"], end["ttft_all_s"])
            pairs[f"{row['selector']} {row['share']:g}"] = {
                "ttft_in_order_over_at_end": statistics.median(paired), "least": min(paired), "greatest": max(paired),
                "kl_difference": row["kl_from_full"] - end["kl_from_full"],
            }  # fmt: skip
        against = [
            {
                "way": row["way"], "ttft_over_none": statistics.median(ratios(row["ttft_all_s"], plain["ttft_all_s"])),
                "kl_over_none": row["kl_from_full"] / plain["kl_from_full"],
            }
            for row in mine if row["share"]
        ]  # fmt: skip
        able = [each for each in against if each["ttft_over_none"] <= WANTED_TTFT]
        best = min(able, key=lambda each: each["kl_over_none"], default=None)
        met = best is not None and best["kl_over_none"] <= WANTED_KL
        found.append({
            "link": link, "prompt": prompt, "pairs": pairs, "against_none": against, "best_within": best, "met": met,
        })  # fmt: skip
    return found


SHAPES = (("llama-3.1-8b", "h100"), ("llama-3.1-70b", "4xa100"))
GIGABITS, PUBLISHED_SHARES, RTT_S = (0.5, 2.0, 5.0, 10.0, 25.0), (0.05, 0.15, 0.3), 0.005


def published() -> list[dict[str, Any]]:
    """Time to first token of published shapes, as the simulator plays it: eight documents of 2048 tokens, level 2."""
    found = []
    for model, machine in SHAPES:
        documents = tuple((each,) for each in documents_for(model_named(model), [2048] * 8))
        for gigabits in GIGABITS:
            plain = Scenario(
                model=model_named(model), machine=machine_named(machine), documents=documents, query_tokens=32,
                rate=RateTrace((0.0,), (gigabits * 1e9 / 8,)), rtt_s=RTT_S, goal=Goal(objective="earliest", floor=2),
            )  # fmt: skip
            (none,) = simulate(plain, Adaptive())
            for share in PUBLISHED_SHARES:
                option = RepairOption(least=share, most=share, looks=False, error=0.1)
                options = option, replace(option, begins="documents")
                end, order = (simulate(replace(plain, repair=each), Adaptive())[0] for each in options)
                found.append({
                    "model": model, "machine": machine, "gigabits": gigabits, "share": share, "none_s": none.ttft_s,
                    "at_end_s": end.ttft_s, "in_order_s": order.ttft_s,
                    "in_order_over_at_end": order.ttft_s / end.ttft_s,
                    "jobs": sum(span.what == "repair" for span in order.spans),
                })  # fmt: skip
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Divergence against time, a panel for each link and prompt; the corner that is wanted is shaded."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    places = list(dict.fromkeys((row["prompt"], row["link"]) for row in rows))
    links = len({link for _, link in places})
    figure, axes = plt.subplots(len(places) // links, links, figsize=(4 * links, 7), squeeze=False)
    order = [
        (prompt, link) for prompt in dict.fromkeys(p for p, _ in places) for link in dict.fromkeys(x for _, x in places)
    ]
    for axis, (prompt, link) in zip(axes.flat, order, strict=True):
        mine = [row for row in rows if (row["prompt"], row["link"]) == (prompt, link)]
        (plain,) = (row for row in mine if not row["share"])
        for selector in dict.fromkeys(row["selector"] for row in mine if row["share"]):
            for in_order, style in ((False, "o--"), (True, "s-")):
                line = [row for row in mine if row["selector"] == selector and row["in_order"] == in_order]
                x = [row["ttft_s"]["median"] for row in [plain, *line]]
                y = [max(row["kl_from_full"], 1e-7) for row in [plain, *line]]
                axis.plot(x, y, style, label=f"{selector}, {'in order' if in_order else 'at the end'}")
        axis.axvspan(0, WANTED_TTFT * plain["ttft_s"]["median"], 0, 1, alpha=0.06, color="green")
        axis.axhline(WANTED_KL * plain["kl_from_full"], color="grey", lw=0.8)
        axis.set(title=f"{prompt}\n{link}", yscale="log", xlim=(0, None))
        axis.set_xlabel("time to first token, s")
        axis.set_ylabel("KL to a full prefill, nats")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
