"""Small loads in the simulator's world, for tests that read like stories."""

from __future__ import annotations

from dataclasses import dataclass

from kvwire.controller import (
    Controller,
    ControllerSettings,
    CostModel,
    DecodeCost,
    DocumentPlanInput,
    Estimates,
    PrefillCost,
)
from kvwire.controller import events as ev
from kvwire.controller.simulator.world import World
from kvwire.types.rates import RateTrace

MB = 1e6
RTT_S = 0.01
COSTS = CostModel(PrefillCost(0.005, 1e-4), DecodeCost(0.001, 1e-6, 1e-9), 1e-6)
"""A chunk of 256 tokens takes 26 ms to recompute, after 5 ms for the pass, and little more than 1 ms to decode."""


def document(chunks=8, levels=4, *, text=True, head=0.0, layered=True, tokens=256, scale=1.0):
    """Chunks of 12.8, 25.6, 51.2 and 102.4 kB up to each level, with a tenth of the error at each."""
    sizes = tuple(int(scale * 50 * tokens * 2**level) for level in range(levels))
    errors = tuple(0.1 ** (level + 1) for level in range(levels))
    return DocumentPlanInput((tokens,) * chunks, (sizes,) * chunks, text, (errors,) * chunks, layered, head)


@dataclass
class Played:
    """What became of loads, what the controller was told and said, and what it learnt."""

    outcomes: list
    log: list
    estimates: Estimates

    def instructions(self, kind, load=0):
        """Instructions of a kind that name a chunk of a load, with their instants."""
        found = [(entry.now, each) for entry in self.log for each in entry.instructions if isinstance(each, kind)]
        return [(now, each) for now, each in found if _load_of(each) == load]

    def refinements(self, load=0):
        """Fetches of what builds on a level that is here."""
        return [fetch for _, fetch in self.instructions(ev.Fetch, load) if fetch.first]


def _load_of(instruction):
    match instruction:
        case ev.Decode(chunks):
            return chunks[0].load
        case ev.Recompute(first):
            return first.load
        case ev.Fetch(chunk) | ev.Cancel(chunk) | ev.Release(chunk):
            return chunk.load
    return instruction.load


def play(arrivals, rate, *, prior=None, policy=None, trouble=None, seed=0, limit_s=200.0, wrap=None, **settings):
    """Play loads. rate: bytes per second, or a trace; prior: what is believed at first, the truth by default.

    wrap: makes what drives the world of the controller, the controller itself by default.
    """
    trace = rate if isinstance(rate, RateTrace) else RateTrace((0.0,), (rate,))
    log = []
    estimates = Estimates(COSTS, prior or trace.at(0.0), RTT_S)
    controller = Controller(estimates, ControllerSettings(**settings), policy, record=log.append)
    world = World(
        wrap(controller) if wrap else controller, trace, COSTS, rtt_s=RTT_S, trouble=trouble, seed=seed,
        decode_threads=settings.get("decode_threads", 1), limit_s=limit_s,
    )  # fmt: skip
    return Played(world.run(arrivals), log, controller.estimates)
