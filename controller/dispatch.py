"""Who gets the link and the lanes next, and what for.

Loads are served in the order in which they are due; one without a deadline counts as due after some times what its
first plan expects, so that nobody waits for ever. A load that is late anyway comes after those that can still be in
time, but every fourth turn goes to a late one, to that which has begun nothing for longest.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import partial
from itertools import chain, islice, product
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from kvwire.controller import events as ev
from kvwire.controller.chunk_table import (
    ARRIVED,
    DECODING,
    FAILED,
    FETCHING,
    PLANNED,
    READY,
    REDECODING,
    REFINED,
    REFINING,
)
from kvwire.controller.coding import finest_bytes
from kvwire.controller.joining import Joiner
from kvwire.controller.lanes import Job
from kvwire.controller.limits import SPARE
from kvwire.controller.policies.base import SLOWEST
from kvwire.controller.policies.refining import decodable, lowered

if TYPE_CHECKING:
    from kvwire.controller.document_state import DocumentState
    from kvwire.controller.load import Load, Place
    from kvwire.controller.policies.base import Floats, Ints

_TICK_S = 0.05
_LEAST_TICK_S = 0.001
_TURNS = 4
_LOOK = 0.5  # share of the time until a load's cut that a look may take
_REDECODED = 0.5  # share of the reserve by which what is overwritten may be valid again after the cut
_LOOKED_AT = 256  # refinements whose decoding is looked ahead at
_GATHER = 0.5  # times what decoding a chunk takes, at most, that it waits for others to be decoded beside it
_HURRIED = 2.0  # times what decoding should take, at most, that is left for what came
_SHORT_BATCH = 4.0  # times the fixed cost of decoding
_LATE_S = 0.001  # that what is expected may come later
_INSTANT_S = 1e-9
_PLANS = 4  # plans made for one event, besides those of loads whose turn it is


class DecodeLane(Joiner):
    """Hands out batches to decode: chunks that somebody waits for first, then refinements."""

    def _decode(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Decode what arrived and is not valid yet, in one batch."""
        if load.table.counts[ARRIVED] and self.lanes.is_free("decode"):
            places = (place for place in load.having(ARRIVED) if not place[0].waits_for_prefix)
            most = self._batch(load, now)
            batch = self._in_rounds(load, [*islice(places, most)], most, now)
            hurries = load.due < inf and self._policy.preemptible
            to = self._hurried(load, batch, now) if hurries and batch else None
            self.start_decode(load, batch, DECODING, now, out, to)
            if batch and now < load.gathers_until:
                load.gathers_until = inf  # after a wait that was in vain there is none any more

    def _in_rounds(self, load: Load, batch: list[Place], most: int, now: float) -> list[Place]:
        """A batch without the chunks that would have a thread to themselves in its last round, where others come soon.

        They wait for the next batch if more are here or come while this one is decoded. The first ones of a lone load
        wait, too, if the others come within half a chunk's time of decoding and the lane has nothing else to do; the
        batch is then empty. Nobody waits where all that is left takes as many rounds as it would take then, nor where
        there is a deadline.
        """
        table, cost, threads = load.table, self.costs_of(load).decode, min(self._settings.decode_threads, most)
        over = len(batch) % threads
        left = table.counts[ARRIVED] + table.counts[FETCHING] + len(load.waiting)
        spare = (left - 1) % threads + 1  # so many can have a round of their own, and the rounds are no more for that
        if load.due < inf or not 0 < over < spare or not self._policy.preemptible:
            return batch
        count, tokens, size = table.arrived()
        others_s = 0.0 if count - len(batch) >= threads - over else self._others_s(load, threads - over, now)
        chunk_s = cost.apart(0, tokens, size) / count
        if len(batch) > threads:
            return batch[:-over] if others_s < cost.base_s + len(batch) // threads * chunk_s else batch
        does_more = load.passes or load.has_prefix or load.repair or table.counts[REFINED]
        if len(self._loads) > 1 or does_more:
            return batch
        worth_s = _GATHER * (cost.base_s + chunk_s)
        if load.gathers_until == inf and others_s < worth_s:
            load.gathers_until = now + others_s + min(_LATE_S, worth_s)
        return [] if now < load.gathers_until < inf else batch

    def _others_s(self, load: Load, count: int, now: float) -> float:
        """Seconds until so many more chunks of a load are here, or all that are open; infinite where none is."""
        arrivals = ((load.doc(each.document).start + each.chunk, seconds)
                    for each, seconds in self.link.arrivals(now) if each.load == load.number)  # fmt: skip
        comes_s = sorted(seconds for at, seconds in arrivals if load.table.state[at] == FETCHING)
        return comes_s[min(count, len(comes_s)) - 1] if comes_s else inf

    def _hurried(self, load: Load, batch: list[Place], now: float) -> list[int] | None:
        """Levels to decode a batch to, so that all that came or is to come is valid in time; None: as it came.

        What is left of a chunk then waits to be decoded as a refinement does.
        """
        table, cost = load.table, self.costs_among_many(load).decode
        beside_s = load.compute_s if self._settings.workers == 1 else 0.0
        left_s = (self._decoded_by(load) - now - beside_s) / min(self._estimates.decode.high, _HURRIED)
        fetched = sum(fetch.decode_s for fetch in self.link.fetches.values() if fetch.chunk.load == load.number)
        count, tokens, size = table.arrived()
        if cost.apart(count, tokens, size) + fetched <= left_s:
            return None
        at = np.fromiter(table.having(ARRIVED, FETCHING), np.int64)
        floor, level = self._floor_levels(load, at), table.look("level")[at]
        to = lowered(
            left_s, level, floor, tokens=table.look("tokens")[at], sizes=table.sizes_by_level()[:, at],
            errors=table.errors_by_level()[:, at], cost=cost,
        )  # fmt: skip
        chosen = dict(zip(at.tolist(), to.tolist(), strict=True))
        return [chosen[doc.start + chunk] for doc, chunk in batch]

    def _floor_levels(self, load: Load, at: Ints) -> Ints:
        """The coarsest levels that chunks which came, or are to come, can be decoded to ``[m]``."""
        level, floor = load.table.look("level")[at], np.maximum(load.goal.floor, load.table.look("floor")[at])
        return np.where(load.table.look("layered")[at], np.minimum(level, floor), level)

    def _decoded_by(self, load: Load) -> float:
        """Instant by which a load must have decoded all, so that others are in time at their floor as well."""
        by, ahead_s = self._cut(load), 0.0
        for other in self._loads.values() if len(self._loads) > 1 else ():
            table, cost = other.table, self.costs_among_many(other).decode
            at = np.fromiter(table.having(ARRIVED, FETCHING), np.int64)
            size = table.sizes_by_level()[self._floor_levels(other, at), at].sum()
            floor_s = cost.apart(len(at), float(table.look("tokens")[at].sum()), float(size))
            if self._rank(other) < self._rank(load):
                ahead_s += floor_s
            elif other is not load and other.due < inf and not self._rank(other)[0]:
                by = min(by, self._cut(other) - floor_s)
        return by - ahead_s

    def _batch(self, load: Load, now: float) -> int:
        """Chunks to decode in one go: fewer where the link waits for them, since only what is valid becomes finer.

        Not where the decoder takes longer for all of it than the link: the link then has to wait anyway.
        """
        settings, link, rate = self._settings, self.link, max(self.link.bandwidth, SLOWEST)
        if load.waiting or link.stalled or not load.table.may_refine(load.goal, ARRIVED):
            return settings.decode_batch
        cost, finest = self.costs_of(load).decode, finest_bytes(load.table, load.goal)
        if cost.apart(0, load.prompt_tokens, finest) > settings.decode_threads * finest / rate:
            return settings.decode_batch
        count, tokens, size = load.table.arrived()
        chunk_s = cost.apart(0, tokens, size) / (count * settings.decode_threads)
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


class Dispatcher(DecodeLane):
    """Hands out what the link and the lanes are free for."""

    _reclaimed_at = -inf

    def wake_at(self, now: float) -> float:
        """Instant of the next tick that is needed."""
        known = self._known_cuts
        moment = self._wakes_at(now)
        self._known_cuts = known  # asking changes nothing
        return moment

    def _wakes_at(self, now: float) -> float:
        moment, undecided = self._stalls_at(now), False
        is_silent, may_compute = not self.link.fetches, self.lanes.is_free("prefill")
        for load in self._loads.values():
            moment = min(moment, load.waits_until if load.waits_until > now else inf)
            moment = min(moment, load.gathers_until if load.gathers_until > now else inf)
            if load.is_undecided:
                undecided = True
                waits = self._waits_until(load)
                moment = min(moment, waits if waits > now else inf)
                idle = is_silent and (may_compute or load.may_refine)
                if (idle or load.is_stale) and self._wants_plan(load):
                    moment = min(moment, max(load.planned_at + self._pause_s(load, now), now + _LEAST_TICK_S))
            if load.goal.objective == "quality" and load.is_ready:
                cut = self._cut(load)
                moment = min(moment, cut if cut > now else inf)
        if self.link.fetches or undecided:
            moment = min(moment, now + _TICK_S)
        if self.link.fetches and self.lanes.is_free("prefill") and self._policy.preemptible:
            moment = min(moment, max(self._reclaimed_at + _TICK_S, now + _LEAST_TICK_S))
        moment = min(moment, self.interrupts_at(now), max(self.opens_at(now), now + _LEAST_TICK_S))
        if self._estimates.bandwidth.is_guess and self.link.fetches:
            moment = min(moment, now + max(self.link.waited_s(now), _LEAST_TICK_S))
        return max(now, moment)

    # What comes next.

    def may_begin(self, now: float) -> bool:
        """Whether anything may begin now that a chunk has arrived: cheaper than finding out what."""
        if self.lanes.is_free("decode") or self.can_fetch:
            return True
        idle = self.lanes.is_free("prefill")
        if idle and now - self._reclaimed_at >= self._settings.replan_s:
            return True
        for load in self._loads.values():
            if idle and (load.passes or load.has_prefix):
                return True
            if (load.is_stale or now >= load.fresh_until) and self._wants_plan(load) and self.is_due(load, now):
                return True
        return False

    def act(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, then give free lanes and the link something to do."""
        self._now = now
        self._conclude_all(now, out)
        self._stop_pass(now, out)
        if not self._loads:
            return
        self.link.retry(now)
        self.backlog_s = self._known_cuts = None
        loads = [load for load in self._loads.values() if self._wants_plan(load)]
        if len(loads) > 1:
            loads.sort(key=lambda load: (not load.is_stale, load.planned_at))
        for load in loads[:_PLANS]:
            self._refresh(load, now)
            if load.refused_s:
                self._conclude(load, now, out)
        order = self._order()
        steps = (
            self._decode, self._look, self._compute, self._redecode, self._fetch, self._refine, self._repair,
        )  # fmt: skip
        for begin, load in product(steps, order):
            begin(load, now, out)
        if self.lanes.is_free("prefill") and now - self._reclaimed_at >= self._settings.replan_s:
            self._reclaimed_at = now
            for load in order:
                self._reclaim(load, now, out)
        self._conclude_all(now, out)
        self._stop_pass(now, out)
        for load in self._loads.values():
            load.fresh_until = self._fresh_until(load, now)
        self._known_cuts = None

    def _stop_pass(self, now: float, out: list[ev.Instruction]) -> None:
        """Stop the forward pass that runs where it is too slow, or nobody waits for it."""
        job = self.lanes.running("prefill")
        if job is None or (now < job.overdue_at and job.load in self._loads):
            return  # ``interrupts_at`` would be later, and takes longer to find out
        if now >= self.interrupts_at(now):
            out.append(ev.Interrupt(self.lanes.interrupt().chunks[0]))

    def _conclude_all(self, now: float, out: list[ev.Instruction]) -> None:
        """End loads that are over, in the order in which they are due."""
        over = [load for load in self._loads.values() if load.may_end]
        for load in sorted(over, key=self._rank) if len(over) > 1 else over:
            self._conclude(load, now, out)

    def _order(self) -> list[Load]:
        if len(self._loads) <= 1:
            return [*self._loads.values()]
        order = sorted(self._loads.values(), key=self._rank)
        if self.turns % _TURNS == _TURNS - 1:
            late = [load for load in order if self._rank(load)[0] and load.is_undecided]
            longest = min(late, key=lambda load: load.began, default=order[0])
            order.remove(longest)
            order.insert(0, longest)
        return order

    def _compute(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Compute a head start that fetched chunks wait for, or the next forward pass of the plan."""
        if not self.lanes.is_free("prefill") or now < load.gathers_until < inf:
            return
        costs = self.costs_of(load)
        for doc in load.docs if load.has_prefix else ():
            if doc.prefix_share_left and doc.has(FETCHING, ARRIVED):
                seconds = doc.prefix_share_left * costs.prefill.seconds(doc.tokens)
                doc.prefix_running = True
                self.lanes.start("prefill", Job("head start", load.number, doc.number, (), now, seconds))
                load.began = self.turn()
                out.append(ev.ComputePrefix(load.number, doc.number, doc.variant))
                return
        if not load.is_known and now - load.known_since < self.link.ttfb_s:
            return  # the other indexes are about to come, and may change what is worth computing
        self._refresh(load, now)
        if load.refused_s or not load.passes:
            return
        if self._estimates.bandwidth.is_guess:
            self._fetch(load, now, out)
        surest_s = min(self._heard_s(now), self._until_closing_s(load, now))
        sure_s = min(self._sure_s(load, costs, now), surest_s)
        found = load.passes.next(costs, min(self._pass_limit_s(load, costs, now), sure_s))
        if found is None:
            return
        doc, run = found
        first = run[0]
        least_s = costs.prefill.seconds(*doc.prefill_span(first, first))
        if least_s > surest_s:
            return
        table, at = doc.table, doc.start + first
        can_fetch = table.top[at] >= table.lowest(at, load.goal.floor) >= 0
        if can_fetch and least_s > sure_s:
            # Perhaps too slow even for one chunk: it is fetched as well as the others, and so is what waits for it.
            load.fetch_instead(doc, first)
        else:
            self.begin_pass(load, doc, run, now, out)

    def _waits_until(self, load: Load) -> float:
        """Instant until which the link waits for indexes that are about to come, too, where there is a deadline."""
        if load.is_known or load.due == inf or not (load.docs and self._policy.preemptible):
            return -inf
        return load.known_since + min(self.link.ttfb_s, self._settings.replan_s)

    def _look(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Run the question on what is valid, before finer levels are fetched."""
        if not (self.lanes.is_free("prefill") and self._can_look(load, now)):
            return
        costs = self.costs_of(load)
        seconds = costs.look_s(load.prompt_tokens)
        load.wants_look, load.is_looking = False, True
        load.began = self.turn()
        job = Job("look", load.number, -1, (), now, seconds)
        self.lanes.start("prefill", job)
        out.append(ev.Look(load.number))

    def _fetch(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the fetches that the plan wants next; several at a time where many are open and nobody is in a hurry."""
        if not self._window_open(spare=SPARE if load.due == inf and len(self._loads) == 1 else 0):
            return
        if now < self._waits_until(load):
            return  # likewise: what is fetched of a document cuts short the pass over it
        self._refresh(load, now)
        if load.refused_s:
            return
        if load.waiting:
            self._refine(load, now, out)  # where a plan names both, what is valid goes first
        table, window, memory = load.table, self._window(), self._settings.memory_bytes
        until = now + self._settings.patience_s
        while load.waiting and self._fits_window(window):
            at, level = load.waiting[0]
            if table.state[at] != PLANNED or table.top[at] < level:
                load.waiting.popleft()
                continue
            size = table.sizes[level][at]
            if self.held + size > memory and not self.make_room(load, size, out):
                return
            load.waiting.popleft()
            doc, chunk = load.place(at)
            doc.reasons[chunk] = load.reason(at)
            table.move(at, FETCHING)
            self.ask(load, (doc, chunk), 0, level, until, now, out)
            load.plan_bytes = max(0, load.plan_bytes - size)

    def _refine(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Open the refinements that the plan names."""
        if not load.refine:
            return
        cut, table = self._cut(load), load.table
        while load.refine and now < cut and self._window_open():
            at, level = load.refine.popleft()
            valid = table.valid_level[at]
            more = table.sizes[level][at] - (table.sizes[valid][at] if valid >= 0 else 0)
            usable = table.state[at] == READY and table.held[at] and valid < level <= table.top[at]
            if usable and self.held + more <= self._settings.memory_bytes:
                if table.counts[FETCHING] and not self._leaves_time(load, more, now):
                    load.refine.appendleft((at, level))
                    return
                doc, chunk = load.place(at)
                doc.move(chunk, REFINING)
                self.ask(load, (doc, chunk), valid + 1, level, cut, now, out)

    def _leaves_time(self, load: Load, size: int, now: float) -> bool:
        """Whether all that is open comes before a load's cut with more bytes besides: requests share the link."""
        low = max(self.link.bandwidth_low, SLOWEST)
        return now + self.link.lead_s(now) + (self.link.open_bytes + size) / low <= self._cut(load)

    def _reclaim(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Give up fetches that idle compute would beat."""
        if not self._policy.preemptible or not self.lanes.is_free("prefill"):
            return
        if not load.table.counts[FETCHING]:
            return
        costs, table = self.costs_of(load), load.table
        for number in sorted({chunk.document for chunk in self.link.fetches if chunk.load == load.number}):
            doc = load.doc(number)
            run: list[int] = []
            for chunk in range(doc.ready_before(), doc.count):
                at = doc.start + chunk
                if table.state[at] != FETCHING or not table.can_text[at]:
                    break
                decode_s = costs.decode.seconds(table.tokens[at], doc.size(chunk, table.level[at]))
                ready_s = self.link.arrival_s(doc.id(chunk), now) + decode_s
                if ready_s <= self._settings.cancel_margin * costs.prefill.seconds(
                    *doc.prefill_span((run or [chunk])[0], chunk)
                ):
                    break
                run.append(chunk)
            if run:
                self.give_up(load, doc, run, now, out)
                return

    # How loads end.

    def _conclude(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """End a load that is ready or cannot become so."""
        if load.number not in self._loads:
            return
        if load.refused_s:
            self.end(load, now, out)
            out.append(ev.Refuse(load.number, load.refused_s))
        elif load.table.counts[FAILED]:
            doc, chunk = next(load.having(FAILED))
            self.end(load, now, out)
            out.append(ev.Fail(load.number, f"{doc.id(chunk)} cannot be made ready: {doc.troubles[chunk]}"))
        elif load.is_ready and not load.in_order.is_running and not self._becomes_better(load, now):
            for doc, chunk in [*load.having(REFINED)]:
                self.settle(doc, chunk)
            decisions = tuple(chain.from_iterable(doc.decisions() for doc in load.docs))
            self._settle_repair(load, now)
            costs = self.costs_of(load)
            closing_s = costs.closing_s(load.prompt_tokens)
            verdict = load.goal.verdict(now - load.asked_at + self.lanes.left_s("prefill", now) + closing_s)
            self.end(load, now, out)
            repair_s = costs.repair_s(load.prompt_tokens) / costs.repair_scale
            self.lanes.close(Job("closing", load.number, -1, (), now, closing_s, repair_s=repair_s))
            out.append(ev.Finish(load.number, decisions, verdict, load.repair_share, load.front()))

    def _can_look(self, load: Load, now: float) -> bool:
        """Whether there is enough time to see where the question looks, and to fetch finer levels for that."""
        if not (load.wants_look and load.plan and load.plan.looks and load.is_ready):
            return False
        look_s = self.costs_of(load).look_s(load.prompt_tokens) * self._estimates.prefill.high
        left_s = _LOOK * (self._cut(load) - now) - self.lanes.left_s("prefill", now)
        return look_s <= min(left_s, self._until_closing_s(load, now))

    def _becomes_better(self, load: Load, now: float) -> bool:
        """Whether it is worth waiting for refinements."""
        if load.goal.objective != "quality" or now >= self._cut(load):
            return False
        if load.is_refining or load.is_looking:
            return True
        if now > load.planned_at and not load.refine:
            self._plan(load, now)
        if load.refine or self._can_look(load, now):
            return True
        if load.wants_look and load.plan and load.plan.looks:  # there is no time for that: it becomes better without
            load.wants_look = False
            self._plan(load, now)
        return bool(load.refine)

    def end(self, load: Load, now: float, out: list[ev.Instruction]) -> None:
        """Take a load out: its fetches are cancelled and its bytes forgotten."""
        for doc, chunk in load.having(FETCHING, REFINING):
            self.link.drop(doc.id(chunk), now)
            out.append(ev.Cancel(doc.id(chunk), "nobody waits for it any more"))
        for at in np.flatnonzero(load.table.look("held")).tolist() if load.table.held_total else ():
            self.release(*load.place(at), out)
        del self._loads[load.number]
        self._known_cuts = None
