"""Times to the first token that the cost model expects of published shapes, with the shares that were measured here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvwire.controller.simulator import machine_named, model_named
from kvwire.controller.simulator.machines import costs
from kvwire.reuse import rows_for, selector_of
from reuse_parts.measuring import DEFAULT, LEVEL_SHARES, SHARES, ways

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvwire.controller import CostModel
    from kvwire.controller.simulator import Model

MACHINES = {"llama-3.1-8b": "h100", "llama-3.1-70b": "4xh100"}
DOCUMENTS = (4096,) * 8
QUESTION = 32
BANDWIDTHS = (1e9, 5e9, 25e9)
"""Bits a second."""
SHOWN = (DEFAULT, "cacheblend", "first", "none")


def predicted(ways_closed: dict[str, dict[str, Any]], levels: dict[str, Any], gap: float) -> dict[str, Any]:
    """Points of every selector, level and share on each shape and link.

    Args:
        ways_closed: As ``figures.summed`` has them.
        levels: As ``figures.on_levels`` has them, by name.
        gap: Mean divergence of blind links on exact caches.

    Returns:
        By shape: seconds of a whole prefill, and points by bandwidth: selector, level, share, seconds to the first
        token and the divergence: measured for the default selector, sums of coding and linking for others.
    """
    out: dict[str, Any] = {}
    for name, machine in MACHINES.items():
        model = model_named(name)
        known = costs(model, machine_named(machine))
        tokens = sum(DOCUMENTS)
        links = {
            f"{bandwidth / 1e9:g}": list(_points(model, known, bandwidth, (ways_closed, levels, gap)))
            for bandwidth in BANDWIDTHS
        }
        out[name] = {"machine": machine, "prefill_s": known.prefill.seconds(tokens + QUESTION), "links": links}
    return out


def _points(
    model: Model, known: CostModel, bandwidth: float, measured: tuple[dict[str, Any], dict[str, Any], float]
) -> Iterator[dict[str, Any]]:
    closed, levels, gap = measured
    for level, entry in levels.items():
        size = entry["bits"] / 8 * model.cache_elements * sum(DOCUMENTS)
        decode = known.decode.seconds(sum(DOCUMENTS), int(size))
        fetch = max(8 * size / bandwidth, decode)  # decoding goes on while more arrives
        for selector, share in _pairs():
            if selector == DEFAULT and f"{share:g}" in entry["kl"]:
                kl = entry["kl"][f"{share:g}"]
            elif share and f"{share:g}" not in closed.get(selector, {}):
                continue
            else:
                left = 1 - closed[selector][f"{share:g}"]["closed"]["pooled"] / 100 if share else 1.0
                kl = entry["coding"] + gap * left
            parts = {"fetch": fetch, "repair": _repair_s(model, known, selector, share), "question": _question_s(known)}
            yield {
                "selector": selector, "level": level, "share": share, "kl": kl, "ttft_s": sum(parts.values()), **parts,
            }  # fmt: skip


def _pairs() -> Iterator[tuple[str, float]]:
    for selector in SHOWN:
        shares = (0.0,) if selector == "none" else SHARES if selector != DEFAULT else sorted({*SHARES, *LEVEL_SHARES})
        yield from ((selector, share) for share in shares if share or selector == "none")


def _repair_s(model: Model, known: CostModel, name: str, share: float) -> float:
    """Seconds of choosing and computing rows: token-layers and pairs at a whole pass's price for each."""
    if not share:
        return 0.0
    selector = ways(None).get(name, selector_of(name))
    cost = selector.cost(sum(DOCUMENTS), rows_for(share, DOCUMENTS), QUESTION, model.layers)
    prefill = known.prefill
    return prefill.base_s + (prefill.token_s * cost.token_layers + prefill.pair_s * cost.pairs) / model.layers


def _question_s(known: CostModel) -> float:
    return known.prefill.seconds(QUESTION, sum(DOCUMENTS)) + known.link_s_per_token * sum(DOCUMENTS)


def frontier(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that no other beats in both time and divergence, the soonest first."""
    best: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda each: (each["ttft_s"], each["kl"])):
        if not best or point["kl"] < best[-1]["kl"]:
            best.append(point)
    return best
