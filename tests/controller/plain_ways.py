"""The controller without its short cuts: each is replaced by the plain way to the same decisions."""

from __future__ import annotations

from math import inf

import numpy as np

from kvwire.controller import Controller
from kvwire.controller import events as ev
from kvwire.controller.chunk_table import ChunkTable
from kvwire.controller.load import Load
from kvwire.controller.pass_limits import PassLimits
from kvwire.controller.passing import Passes
from kvwire.controller.planning import Planner
from kvwire.controller.resources import Resources
from kvwire.controller.snapshot import PlanRequest
from kvwire.controller.window import Window


def wake_at(controller):
    """Asks each time whether a fetch could be opened."""
    begins = controller._is_news or (controller._came and controller._dispatch.window.can_fetch)
    return controller._now if begins else controller._next_wake()


def may_begin(dispatch, now):
    """Asks for each load whether its plan is due."""
    idle = dispatch.lanes.is_free("prefill")
    if dispatch.lanes.is_free("decode") or dispatch.window.can_fetch:
        return True
    if idle and now - dispatch.passes.reclaimed_at >= dispatch._settings.replan_s:
        return True
    loads = dispatch._loads.values()
    due = [dispatch.planner.wants_plan(load) and dispatch.planner.is_due(load, now) for load in loads]
    return any(due) or (idle and any(load.passes or load.has_prefix for load in loads))


def window_open(window, *, spare=0):
    """Works both bounds out before it looks at either."""
    most, horizon = window.size(spare=spare)
    fetches = len(window._link.fetches)
    fits = fetches < most and (fetches < 2 or window._link.open_bytes < horizon)
    return fetches < window._settings.max_in_flight and fits


def stalls_at(window, now):
    """Works out how long silence is waited out whether or not any byte is awaited."""
    deadlines, quiet, stalls = window._deadlines, window._link.quiet_from, window._link.stalls_at
    if now < quiet:
        return min(quiet, stalls)
    late_s = 2 * deadlines.steady_reserve_s
    starts = (deadlines.latest_text_start(load, now) for load in window._loads.values() if load.due < inf)
    return min([stalls, *(max(start, quiet) for start in starts if start > now - late_s)])


def may_end(load):
    """Counts what is valid each time."""
    return bool(load.refused_s or load.table.counts[9]) or load.is_ready


def prefill_s(request):
    """Works the seconds out each time that they are asked for, counting each run's chunks one by one."""
    chunks, cost = request.chunks, request.costs.prefill
    pays, place = [], 0
    for begins in chunks.begins:
        place = 0 if begins else place + 1
        pays.append(place % request.pass_chunks < 1)
    return cost.token_s * chunks.tokens + cost.pair_s * chunks.pairs + cost.base_s * np.array(pays, bool)


def having(table, *states):
    """Looks at every chunk for each state."""
    flags = np.isin(table.look("state"), states)
    return iter(table._in_prompt_order(np.flatnonzero(flags)).tolist())


def costs_of(resources, load):
    """Looks the costs up each time."""
    return load.costs(resources.estimates.costs(load.query_tokens))


def floors_of(limits, load, job):
    """Adds up what fetching a pass's chunks takes each time."""
    table, cost, start = load.table, limits._shared.costs_of(load).decode, load.doc(job.document).start
    places = [start + chunk.chunk for chunk in job.chunks]
    levels = [min(load.goal.floor, table.finest[at]) for at in places]
    if any(level < 0 or table.top[at] < level for at, level in zip(places, levels, strict=True)):
        return None
    tokens = sum(table.tokens[at] for at in places)
    size = sum(table.sizes[level][at] for at, level in zip(places, levels, strict=True))
    decode_s = cost.base_s * len(places) + cost.token_s * tokens + cost.byte_s * size
    return size / max(limits._link.bandwidth_low, 1.0) + decode_s


def stop_pass(passes, now, out):
    """Works out each time when the pass is to be stopped."""
    if now >= passes._limits.interrupts_at(now):
        out.append(ev.Interrupt(passes._lanes.interrupt().chunks[0]))


PLAIN = [
    (Resources, "costs_of", costs_of),
    (PassLimits, "_floors_of", floors_of),
    (Controller, "wake_at", property(wake_at)),
    (Passes, "stop", stop_pass),
    (Planner, "fresh_until", lambda *_: -inf),
    (Window, "is_open", window_open),
    (Window, "stalls_at", stalls_at),
    (Load, "may_end", property(may_end)),
    (PlanRequest, "prefill_s", property(prefill_s)),
    (ChunkTable, "having", having),
    (ChunkTable, "_add_one", lambda table, number, tokens: table._add_many(number, (tokens,))),
    (ChunkTable, "_place_one", ChunkTable._place_many),
]
"""What is replaced: of which class, under which name, and by what."""
