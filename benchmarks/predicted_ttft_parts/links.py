"""The links that loads go over, each with what the simulator is told of it."""

from __future__ import annotations

import time
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shaped_parts.shaped_link import shaped_link

from kvwire.controller.simulator import RateTrace, constant
from kvwire.store.schemes import open_store
from kvwire.transport import EmulatedLink, LinkedSource, RateSchedule, open_session, open_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvwire.store import Store

MBIT = 1e6 / 8
STEPS = RateSchedule((0.0, 0.15, 0.3, 0.6), (50 * MBIT, 5 * MBIT, 100 * MBIT, 20 * MBIT))
"""Falls to a tenth soon after a load begins, then rises and falls again; starts anew with each load."""


@dataclass(frozen=True)
class Link:
    """A link to measure. kind: ``emulated`` or ``shaped``. mbit: None: the steps."""

    kind: str
    mbit: float | None
    rtt_s: float

    @property
    def name(self) -> str:
        """For tables."""
        rate = "steps" if self.mbit is None else f"{self.mbit:g} Mbit/s"
        return f"{self.kind} {rate}, {self.rtt_s * 1e3:g} ms"

    @property
    def rate(self) -> RateTrace:
        """What the simulator is told."""
        if self.mbit is None:
            return RateTrace(STEPS.times, STEPS.rates, STEPS.period_s)
        return constant(self.mbit * MBIT)

    @contextmanager
    def running(self, folder: Path, local: str) -> Iterator[tuple[Store, EmulatedLink | None]]:
        """The store behind the link. local: URL of a server of ``folder`` on loopback."""
        if self.kind == "shaped":
            with (
                shaped_link(folder, (self.mbit or 0.0) * MBIT, self.rtt_s) as shaped,
                closing(open_store(shaped.url, token=shaped.token)) as store,
            ):
                yield store, None
            return
        with closing(open_store(local)) as store:
            schedule = STEPS if self.mbit is None else self.mbit * MBIT
            yield store, EmulatedLink(schedule, self.rtt_s)


async def first_bytes(store: Store, key: str, link: EmulatedLink | None) -> tuple[float, float]:
    """Seconds to the first byte of a request for one byte: over a new connection, and over the same one again."""
    seconds = []
    async with open_session() as session:
        for _ in range(2):
            source = open_source(store, key, session)
            began = time.monotonic()
            await (LinkedSource(source, link) if link else source).read(0, 1, len)
            seconds.append(time.monotonic() - began)
    return seconds[0], seconds[1]
