"""Real loads, and the same ones in the simulator."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvwire import controller as ctl
from kvwire.controller import events as ev
from kvwire.controller.simulator import LoadArrival, Steering, World
from kvwire.runtime.loader import Loader
from kvwire.runtime.settings import LoadSettings, controls_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.controller import CostModel, Estimates, LogEntry, Policy
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.runtime.answer import Answer, Timing
    from kvwire.runtime.corpus import Corpus
    from kvwire.transport import EmulatedLink
    from kvwire.types import ChunkId
    from predicted_ttft_parts.links import Link


@dataclass(frozen=True)
class Prompt:
    """Documents by id, and a question as token ids."""

    documents: tuple[str, ...]
    question: tuple[int, ...]


@dataclass(frozen=True)
class Way:
    """A policy and its goal. deadline_s: None without one."""

    name: str
    policy: Policy
    deadline_s: float | None = None

    @property
    def goal(self) -> ctl.Goal:
        """As ``Loader.ask`` makes it."""
        return ctl.Goal.within(self.deadline_s)


@dataclass(frozen=True)
class Loaded:
    """What a load, or several at once, took, and what was known before.

    catalog_s: until the catalog's lookups were over. loop_s: processor time of the thread that steers. timings, told_s:
    of each, and what the controller itself expected once all headers were read. log: of the controller, ``began`` on
    its clock. Answers are not kept: with their prompts' memory every load would have to take new memory.
    """

    known: Estimates
    catalog_s: float
    loop_s: float
    timings: tuple[Timing, ...]
    told_s: tuple[float, ...]
    log: tuple[LogEntry, ...]
    began: float

    @property
    def inputs(self) -> dict[tuple[int, int], tuple[ctl.DocumentPlanInput, ...]]:
        """What the controller was told of each load's documents."""
        known = [entry.event for entry in self.log if isinstance(entry.event, ev.IndexKnown)]
        return {(event.load, event.document): event.variants for event in known}

    @property
    def heads_s(self) -> float:
        """Seconds from the end of the catalog's lookups until the last header was known."""
        known = max(entry.now for entry in self.log if isinstance(entry.event, ev.IndexKnown))
        return known - self.began - self.catalog_s

    @property
    def events(self) -> int:
        """How many the controller was told of, but for first bytes."""
        return sum(not isinstance(entry.event, ev.FirstByte) for entry in self.log)

    @property
    def idle_s(self) -> list[float]:
        """Seconds by which each job took longer, from instruction to report, than it says itself."""
        begun = {
            _first(each): entry.now
            for entry in self.log
            for each in entry.instructions
            if isinstance(each, ev.Decode | ev.Recompute)
        }
        done = [
            (entry.now, entry.event) for entry in self.log if isinstance(entry.event, ev.DecodeDone | ev.RecomputeDone)
        ]
        return [now - begun[event.chunks[0]] - event.seconds for now, event in done]

    @property
    def handing_over_s(self) -> float:
        """Seconds between the last chunk's being ready and the beginning of the closing."""
        ends = [entry.now for entry in self.log for each in entry.instructions if isinstance(each, ev.Finish)]
        timing = self.timings[0]
        return timing.ttft_s - (max(ends) - self.began) - timing.link_s - timing.query_s


def _first(job: ev.Decode | ev.Recompute) -> ChunkId:
    return job.chunks[0] if isinstance(job, ev.Decode) else job.first


@dataclass(eq=False)
class Contender:
    """One way over one link, with estimates of its own."""

    engine: TransformersEngine
    corpus: Corpus
    link: EmulatedLink | None
    way: Way
    costs: CostModel
    bandwidth: float
    rtt_s: float
    _log: list[LogEntry] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the loader; settings: what steers its loads."""
        chosen = LoadSettings(
            policy=self.way.policy, bandwidth_prior=self.bandwidth, ttfb_prior_s=self.rtt_s, record=self._log.append
        )
        self.loader = Loader(self.engine, self.corpus, costs=self.costs, link=self.link, settings=chosen)
        self.settings = controls_of(chosen, on_gpu=False)

    def load(self, *prompts: Prompt) -> Loaded:
        """Answer prompts, all at once."""
        self._log.clear()
        known = self.loader.estimates
        if self.link:
            self.link.begin()
        loop_s, began = self._loop_s(), time.monotonic()
        answers = asyncio.run(self._ask(prompts))
        loop_s, log = self._loop_s() - loop_s, tuple(self._log)
        asked = [entry.now - began for entry in log if isinstance(entry.event, ev.LoadRequested)]
        timings, told = zip(*((answer.timing, answer.predicted_s or 0.0) for answer in answers), strict=True)
        return Loaded(known, max(asked), loop_s, timings, told, log, began)

    def _loop_s(self) -> float:
        """Processor time that the loader's event loop has taken so far."""

        async def taken() -> float:
            return time.thread_time()

        return self.loader._session.run(taken())  # noqa: SLF001 - nobody but this benchmark asks for it

    async def _ask(self, prompts: Sequence[Prompt]) -> list[Answer]:
        asks = (self.loader.ask_async(p.documents, p.question, deadline_s=self.way.deadline_s) for p in prompts)
        return await asyncio.gather(*asks)


@dataclass(frozen=True)
class Model:
    """What the simulator is told besides policy, sizes and costs.

    catalog_s: until the catalog's lookups are over. connected_s, answered_s: seconds to the first byte of a small
    request, over a new connection and over one that is there. header_bytes: of a load's documents. header_s: to open
    one of them, event_s: with each event, see ``Steering``. lane_s: see ``World``. handing_over_s: from the last chunk
    to the closing.
    """

    link: Link
    header_bytes: int
    catalog_s: float
    connected_s: float
    answered_s: float
    header_s: float
    event_s: float
    lane_s: float
    handing_over_s: float
    settings: ctl.ControllerSettings

    def received_s(self, loads: int) -> float:
        """Seconds from the end of the lookups until the headers of some loads are here, one after another."""
        began = self.catalog_s + self.connected_s
        return self.link.rate.time_to(self.header_bytes * loads, began) - self.catalog_s

    def heads_s(self, loads: int, documents: int) -> float:
        """Seconds from the end of the lookups until all headers of some loads, of so many documents each, are known."""
        return self.received_s(loads) + self.header_s * loads * documents

    def ttft_s(
        self,
        way: Way,
        known: Estimates,
        inputs: Sequence[Sequence[tuple[ctl.DocumentPlanInput, ...]]],
        query_tokens: int,
    ) -> list[float]:
        """Predicted times to the first token of loads that come in at once; inputs[load][document]: variants."""
        controller = ctl.Controller(known.copy(), self.settings, way.policy)
        costs = known.costs(query_tokens)
        world = World(
            controller,
            self.link.rate,
            costs,
            rtt_s=self.answered_s,
            lane_s=self.lane_s,
            steering=Steering(event_s=self.event_s, header_s=self.header_s),
            workers=self.settings.workers,
            decode_threads=self.settings.decode_threads,
        )
        goal = way.goal
        if goal.deadline_s is not None:
            goal = replace(goal, deadline_s=goal.deadline_s - self.catalog_s)
        arrivals = [
            LoadArrival(self.catalog_s, tuple(documents), goal, query_tokens, self.received_s(number))
            for number, documents in enumerate(inputs, 1)
        ]
        return [self.catalog_s + outcome.ttft_s + self.handing_over_s for outcome in world.run(arrivals)]
