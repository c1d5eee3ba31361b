"""What is decoded next, in which batches, and up to which level where there is no time for all that came."""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import islice
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller.chunk_table import ARRIVED, DECODING, REDECODING, REFINED, REFINING
from kvwire.controller.coding import finest_bytes
from kvwire.controller.joining import Joiner
from kvwire.controller.policies.base import SLOWEST
from kvwire.controller.policies.refining import decodable

if TYPE_CHECKING:
    from kvwire.controller import events as ev
    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.load import Load, Place
    from kvwire.controller.policies.base import Floats

_REDECODED = 0.5  # share of the reserve by which what is overwritten may be valid again after the cut
_LOOKED_AT = 256  # refinements whose decoding is looked ahead at
_SHORT_BATCH = 4.0  # times the fixed cost of decoding
_LATE_S = 0.001  # that what is expected may come later
_INSTANT_S = 1e-9


class DecodeLane(Joiner):
    """Hands out batches to decode: chunks that somebody waits for first, then refinements."""

    def _decode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode what arrived and is not valid yet, in one batch."""
        if load.table.counts[ARRIVED] and self.lanes.is_free("decode"):
            places = (place for place in load.having(ARRIVED) if not place[0].waits_for_prefix)
            self.start_decode(load, [*islice(places, self._batch(load, now))], DECODING, now, out)

    def _batch(self, load: Load, now: float) -> int:
        """Chunks to decode in one go: fewer where the link waits for them, since only what is valid becomes finer.

        Not where the decoder takes longer for all of it than the link: the link then has to wait anyway.
        """
        settings, link, rate = self._settings, self.link, max(self.link.bandwidth, SLOWEST)
        if load.waiting or link.stalled or not load.table.may_refine(load.goal, ARRIVED):
            return settings.decode_batch
        cost, finest = self.costs_of(load).decode, finest_bytes(load.table, load.goal)
        if cost.token_s * load.prompt_tokens + cost.byte_s * finest > settings.decode_threads * finest / rate:
            return settings.decode_batch
        count, tokens, size = load.table.arrived()
        chunk_s = (cost.token_s * tokens + cost.byte_s * size) / (count * settings.decode_threads)
        link_s = link.lead_s(now) + (link.open_bytes + load.refine_bytes) / rate
        batch_s = max(_SHORT_BATCH * cost.base_s, link_s) - cost.base_s
        return min(settings.decode_batch, max(1, int(batch_s / max(chunk_s, _INSTANT_S))))

    def _redecode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode refinements, in one batch, after all that somebody waits for."""
        if load.table.counts[REFINED] and self.lanes.is_free("decode"):
            # A forward pass reads what is before it in its document: nothing of that is overwritten meanwhile.
            able = [place for place in load.having(REFINED) if not self._is_extended(place[0])]
            left_s = self._cut(load) + _REDECODED * self._steady_reserve_s - now
            if load.due < inf and left_s > 0:
                able = self._timely(load, able, left_s, now, out)
            while left_s > 0 and (places := able[: self._settings.decode_batch]):
                # Nothing that is valid is overwritten too late.
                count = bisect_right(
                    range(1, len(places) + 1), left_s, key=lambda count: self._decode_s(load, places[:count])
                )
                if count:
                    self.start_decode(load, places[:count], REDECODING, now, out)
                    return
                self.settle(*places[0])  # there is no time for it, and hardly more later: nobody waits for it
                self.release(*able.pop(0), out)

    def _timely(
        self, load: Load, places: list[Place], left_s: float, now: float, out: list[ev.Instruction]
    ) -> list[Place]:
        """The next batch of refinements, where not all that came or is about to come can be valid in time.

        Some are decoded to a coarser level than came, and what gains little leaves its time to what gains more: a chunk
        that is left at its base loses more than several that stay below the finest. The lane waits for such a chunk as
        long as it is expected, and does meanwhile what is done before it comes.
        """
        table, cost, most = load.table, self.costs_of(load).decode, self._settings.decode_batch
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
                load.waits_until = min(load.waits_until, now + until_s + _LATE_S)
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
                self.settle(*able[each])
                self.release(*able[each], out)
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
            for chunk, seconds in self.link.arrivals(now)
            if chunk.load == load.number
        }
        passes_s = self.lanes.left_s("prefill", now)
        return np.array([arrivals.get(at, passes_s) for at in places])

    def _is_extended(self, doc: DocumentState) -> bool:
        """Whether a forward pass that reads a document is running."""
        running = self.lanes.running("prefill")
        job = next((each for each in running.passes if each.load == doc.load), None) if running else None
        if job is None:
            return False
        read = doc.number <= job.document if job.behind else doc.number == job.document
        read |= job.kind == "repair" and doc.number <= job.document
        return job.kind == "look" or (job.kind in {"recompute", "joined", "repair"} and read)
