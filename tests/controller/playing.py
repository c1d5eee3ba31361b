"""Small loads in the simulator's world, for tests that read like stories."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvwire.controller import (
    Controller,
    ControllerSettings,
    CostModel,
    DecodeCost,
    DocumentPlanInput,
    Estimates,
    Goal,
    PrefillCost,
)
from kvwire.controller import events as ev
from kvwire.controller.policies import Adaptive
from kvwire.controller.simulator.loads import LoadArrival
from kvwire.controller.simulator.world import World
from kvwire.types import ChunkId
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


class LookFirst(Adaptive):
    """Waits with all refinements until the question has looked, whatever that costs."""

    def plan(self, request):
        plan = super().plan(request)
        return plan if request.look_s is None else replace(plan, refine=(), refine_levels=(), looks=True)


@dataclass
class SimulatedLoad:
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


def play(
    arrivals,
    rate,
    *,
    prior=None,
    policy=None,
    trouble=None,
    seed=0,
    limit_s=200.0,
    wrap=None,
    costs=COSTS,
    true=None,
    **settings,
):
    """Play loads. rate: bytes per second, or a trace; prior: what is believed at first, the truth by default.

    wrap: makes what drives the world of the controller, the controller itself by default. costs: believed; true: what
    things cost, ``costs`` by default.
    """
    trace = rate if isinstance(rate, RateTrace) else RateTrace((0.0,), (rate,))
    log = []
    estimates = Estimates(costs, prior or trace.at(0.0), RTT_S)
    controller = Controller(estimates, ControllerSettings(**settings), policy, record=log.append)
    world = World(
        wrap(controller) if wrap else controller, trace, true or costs, rtt_s=RTT_S, trouble=trouble, seed=seed,
        decode_threads=settings.get("decode_threads", 1), limit_s=limit_s,
    )  # fmt: skip
    return SimulatedLoad(world.run(arrivals), log, controller.estimates)


def quality(deadline_s, **more):
    return Goal(objective="quality", deadline_s=deadline_s, **more)


def cheapest(deadline_s, **more):
    return Goal(objective="cheapest", deadline_s=deadline_s, **more)


def one(goal, rate, *variants, **more):
    """One load of one document; returns its outcome and all that was played."""
    played = play([LoadArrival(0.0, (variants or (document(),),), goal)], rate, **more)
    return played.outcomes[0], played


class ByHand:
    """A controller with one load of one kind of document, told event by event."""

    def __init__(self, goal, *variants, prior=30 * MB, documents=1, policy=None, **settings):
        self.controller = Controller(Estimates(COSTS, prior, RTT_S), ControllerSettings(**settings), policy)
        self._goal, self._variants, self._documents = goal, variants, documents
        self.now = 0.0
        self.pass_ = None  # the latest forward pass

    def begin(self):
        """The first fetch that is asked for once the first document is known."""
        self.tell(ev.LoadRequested(0, self._documents, 0, self._goal))
        out = self.tell(ev.IndexKnown(0, 0, self._variants))
        return next(each for each in out if isinstance(each, ev.Fetch))

    def tell(self, event, now=None):
        self.now = self.now + 0.001 if now is None else now
        out = self.controller.handle(event, self.now)
        self.pass_ = next((each for each in out if isinstance(each, ev.Recompute)), self.pass_)
        return out

    def valid_at_level_0(self):
        """Answer until all but the last decode is done; returns the chunks of that one."""
        self.begin()
        chunks = tuple(ChunkId(0, chunk) for chunk in range(len(self._variants[0].tokens)))
        waiting = [self.tell(ev.ChunkArrived(chunk, 0)) for chunk in reversed(chunks)]
        decodes = [each for out in waiting for each in out if isinstance(each, ev.Decode)]
        done = decodes[0].chunks
        while len(done) < len(chunks):
            rest = [each for each in self.tell(ev.DecodeDone(decodes[-1].chunks, 0.001)) if isinstance(each, ev.Decode)]
            decodes += rest
            done += rest[0].chunks
        return decodes[-1].chunks

    def quick_link(self, chunks):
        """Learn that the link is fast, and finish the last decode."""
        for _ in range(4):
            self.tell(ev.TransferProgress(1_000_000, self.now, self.now + 0.001))
        return self.tell(ev.DecodeDone(chunks, 0.001))

    def only(self, kind, event):
        """The one instruction of a kind that follows an event."""
        (found,) = [each for each in self.tell(event) if isinstance(each, kind)]
        return found
