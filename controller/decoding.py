"""Batches to decode: chunks that a load waits for first, then refinements."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from .chunk_table import (
    ARRIVED,
    DECODING,
    FETCHING,
    REDECODING,
    REFINED,
    REFINING,
)
from .coding import finest_bytes
from .costs import SHORTEST_S, busiest
from .refining import decodable
from .snapshot import SLOWEST

if TYPE_CHECKING:
    from . import events as ev
    from .deadlines import Deadlines
    from .document_state import DocumentState
    from .load import Load, Place
    from .resources import Resources
    from .snapshot import Floats, Ints


_REDECODED = 0.5  # share of the reserve by which what is overwritten may be valid again after the cut
_LOOKED_AT = 256  # refinements whose decoding is looked ahead at
_DECODE_MARGIN = 2.0  # times what decoding should take, at most, that is left for what came
_SHORT_BATCH = 4.0  # times the fixed cost of decoding
_ARRIVAL_SLACK_S = 0.001  # that what is expected may come later


class Decoding:
    """Gives the lane for decoding something to do."""

    def __init__(self, shared: Resources, deadlines: Deadlines) -> None:
        """Start idle."""
        self._shared, self._deadlines = shared, deadlines
        self._estimates, self._settings, self._loads = shared.estimates, shared.settings, shared.loads
        self._policy, self._link, self._lanes = shared.policy, shared.link, shared.lanes

    def decode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode what arrived and is not valid yet, in one batch."""
        if load.table.counts[ARRIVED] and self._lanes.is_free("decode"):
            places = (place for place in load.having(ARRIVED) if not place[0].waits_for_prefix)
            most = self._batch(load, now)
            batch = [*islice(places, most)]
            hurries = load.due < inf and self._policy.preemptible
            to = self._hurried(load, batch, now) if hurries and batch else None
            self._shared.start_decode(load, batch, DECODING, now, out, to)

    def _hurried(self, load: Load, batch: list[Place], now: float) -> list[int] | None:
        """The floor, where not all that came or is to come could be valid in time otherwise; None: as it came.

        What is left of a chunk then waits to be decoded as a refinement does.
        """
        table, cost = load.table, self._shared.costs_among_many(load).decode
        beside_s = load.compute_s if self._settings.workers == 1 else 0.0
        left_s = (self._decoded_by(load) - now - beside_s) / min(self._estimates.decode.high, _DECODE_MARGIN)
        fetched = sum(fetch.decode_s for fetch in self._link.fetches.values() if fetch.chunk.load == load.number)
        count, tokens, size = table.arrived()
        if cost.apart(count, tokens, size) + fetched <= left_s:
            return None
        at = np.array([doc.start + chunk for doc, chunk in batch])
        return [int(level) for level in self._floor_levels(load, at)]

    def _floor_levels(self, load: Load, at: Ints) -> Ints:
        """The coarsest levels that chunks which came, or are to come, can be decoded to ``[m]``."""
        level, floor = load.table.look("level")[at], np.maximum(load.goal.floor, load.table.look("floor")[at])
        return np.where(load.table.look("layered")[at], np.minimum(level, floor), level)

    def _decoded_by(self, load: Load) -> float:
        """Instant by which a load must have decoded all, so that others are in time at their floor as well."""
        by, ahead_s = self._deadlines.handover_at(load), 0.0
        for other in self._loads.values() if len(self._loads) > 1 else ():
            table, cost = other.table, self._shared.costs_among_many(other).decode
            at = np.fromiter(table.having(ARRIVED, FETCHING), np.int64)
            size = table.sizes_by_level()[self._floor_levels(other, at), at].sum()
            floor_s = cost.apart(len(at), float(table.look("tokens")[at].sum()), float(size))
            if self._deadlines.rank(other) < self._deadlines.rank(load):
                ahead_s += floor_s
            elif other is not load and other.due < inf and not self._deadlines.rank(other)[0]:
                by = min(by, self._deadlines.handover_at(other) - floor_s)
        return by - ahead_s

    def _batch(self, load: Load, now: float) -> int:
        """Chunks to decode in one go: fewer where the link waits for them, since only what is valid becomes finer.

        Not where the decoder takes longer for all of it than the link: the link then has to wait anyway.
        """
        settings, link, rate = self._settings, self._link, max(self._link.bandwidth, SLOWEST)
        if load.waiting or link.stalled or not load.table.may_refine(load.goal, ARRIVED):
            return settings.decode_batch
        cost, finest = self._shared.costs_of(load).decode, finest_bytes(load.table, load.goal)
        if cost.apart(0, load.prompt_tokens, finest) > settings.decode_threads * finest / rate:
            return settings.decode_batch
        count, tokens, size = load.table.arrived()
        chunk_s = cost.apart(0, tokens, size) / (count * settings.decode_threads)
        link_s = link.lead_s(now) + (link.open_bytes + load.refine_bytes) / rate
        batch_s = max(_SHORT_BATCH * cost.base_s, link_s) - cost.base_s
        return min(settings.decode_batch, max(1, int(batch_s / max(chunk_s, SHORTEST_S))))

    def redecode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode refinements, in one batch, after all that somebody waits for."""
        if load.table.counts[REFINED] and self._lanes.is_free("decode"):
            # A forward pass reads what is before it in its document: nothing of that is overwritten meanwhile.
            able = [place for place in load.having(REFINED) if not self._is_extended(place[0])]
            left_s = self._deadlines.handover_at(load) + _REDECODED * self._deadlines.steady_reserve_s - now
            if load.due < inf and left_s > 0:
                able = self._fit_before_deadline(load, able, left_s, now, out)
            while left_s > 0 and (places := able[: self._settings.decode_batch]):
                # Nothing that is valid is overwritten too late.
                count = bisect_right(
                    range(1, len(places) + 1), left_s, key=lambda count: self._decode_s(load, places[:count])
                )
                if count:
                    self._shared.start_decode(load, places[:count], REDECODING, now, out)
                    return
                self._shared.settle(*places[0])  # there is no time for it, and hardly more later: nobody waits for it
                self._shared.release(*able.pop(0), out)

    def _fit_before_deadline(
        self, load: Load, places: list[Place], left_s: float, now: float, out: list[ev.Instruction]
    ) -> list[Place]:
        """The next batch of refinements, where not all that came or is about to come can be valid in time.

        Some are decoded to a coarser level than came, and what gains little leaves its time to what gains more: a chunk
        that is left at its base loses more than several that stay below the finest. The lane waits for such a chunk as
        long as it is expected, and does meanwhile what is done before it comes.
        """
        table, cost, most = load.table, self._shared.costs_of(load).decode, self._settings.decode_batch
        at = np.fromiter(islice(table.having(REFINED, REFINING), _LOOKED_AT), np.int64)
        level, valid, tokens = table.look("level")[at], table.look("valid_level")[at], table.look("tokens")[at]
        sizes, errors = table.sizes_by_level()[:, at], table.errors_by_level()[:, at]
        threads, unsure = self._settings.decode_threads, 1 + min(self._estimates.decode.spread, 1.0)
        choose = partial(decodable, sizes=sizes, errors=errors, tokens=tokens, cost=cost, threads=threads)
        # What is still to come needs another batch.
        if choose(left_s / unsure - cost.base_s * (-(-len(at) // most) + 1), valid, level) is level:
            return places[:most]
        able = {doc.start + chunk: (doc, chunk) for doc, chunk in places}
        is_here = np.array([each in able for each in at.tolist()], np.bool_)
        comes_s = np.where(is_here, 0.0, self._comes_s(load, at.tolist(), now))
        takes_s = (cost.base_s + tokens * cost.token_s + sizes * cost.byte_s) * unsure
        fitting = (comes_s + takes_s <= left_s).sum(axis=0) - 1  # the finest level that there is time for
        soon = np.maximum(np.minimum(level, fitting), valid)
        fixed_s = cost.base_s * (-(-int(np.count_nonzero(is_here)) // most) + bool((soon > valid)[~is_here].any()))
        chosen = choose(left_s / unsure - fixed_s, valid, soon)
        awaited = ~is_here & (chosen > valid)
        if not (is_here & (chosen > valid)).any():
            before_s = left_s
            if awaited.any():
                until_s = float(comes_s[awaited].min())
                load.waits_until = min(load.waits_until, now + until_s + _ARRIVAL_SLACK_S)
                before_s = until_s if now < load.waits_until else left_s  # else it did not come when it should
            chosen = choose(before_s / unsure - cost.base_s, valid, np.where(is_here, level, valid))
        timely = self._lowered(
            load,
            [
                (able[each], to)
                for each, to in zip(at.tolist(), chosen.tolist(), strict=True)
                if each in able and to > table.valid_level[each]
            ][:most],
        )
        if timely:
            load.waits_until = inf
        elif not awaited.any():
            for each in filter(able.get, at.tolist()):  # there is no time for any, and never will be
                self._shared.settle(*able[each])
                self._shared.release(*able[each], out)
        return timely

    def _lowered(self, load: Load, chosen: list[tuple[Place, int]]) -> list[Place]:
        """Places, of which no finer levels are decoded than chosen."""
        table = load.table
        for (doc, chunk), to in chosen:
            at = doc.start + chunk
            if to < table.level[at]:
                table.level[at] = table.top[at] = to
        return [place for place, _ in chosen]

    def _comes_s(self, load: Load, places: list[int], now: float) -> Floats:
        """Seconds until finer levels of chunks can be decoded: till they are here, or till no pass reads the chunk."""
        arrivals = {
            load.doc(chunk.document).start + chunk.chunk: seconds
            for chunk, seconds in self._link.arrivals(now)
            if chunk.load == load.number
        }
        passes_s = self._lanes.left_s("prefill", now)
        return np.array([arrivals.get(at, passes_s) for at in places])

    def _is_extended(self, doc: DocumentState) -> bool:
        """Whether a forward pass that reads a document is running."""
        running = self._lanes.running("prefill")
        job = next((each for each in running.passes if each.load == doc.load), None) if running else None
        if job is None:
            return False
        read = doc.number <= job.document if job.behind else doc.number == job.document
        read |= job.kind == "repair" and doc.number <= job.document
        return job.kind == "look" or (job.kind in {"recompute", "joined", "repair"} and read)

    def _decode_s(self, load: Load, places: list[Place]) -> float:
        """Seconds that decoding a batch should not exceed: a standard deviation more than expected."""
        table = load.table
        chunks = [
            (table.tokens[doc.start + chunk], doc.size(chunk, table.level[doc.start + chunk])) for doc, chunk in places
        ]
        seconds = self._shared.costs_of(load).decode.seconds(*busiest(chunks, self._settings.decode_threads))
        return seconds * (1 + min(self._estimates.decode.spread, 1.0))
