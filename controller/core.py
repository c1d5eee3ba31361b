"""All loads that share a link and an engine as one state machine: events in, instructions out; no clock, no I/O.

``handle`` takes an event in, moves chunks between the states of ``doc.MOVES``, and then hands out what the link and
the lanes are free for. Who goes first is in ``dispatch.py``.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError

from . import events as ev
from .chunk_table import ARRIVED, FETCHING, READY, REDECODING, REFINED, REFINING, ChunkState
from .dispatch import Dispatcher
from .lanes import check_seconds
from .load import Load
from .plan import Adaptive
from .window import SPARE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvwire.types import ChunkId

    from .document_state import DocumentState
    from .documents import DocumentPlanInput
    from .estimates import Estimates
    from .settings import ControllerSettings
    from .snapshot import Policy

_FETCHED = bytes((FETCHING, REFINING))


class Controller:
    """Steers loads from ``LoadRequested`` to ``Finish`` or ``Fail``, of which one comes for each that is not abandoned.

    Whoever drives it carries out the instructions and reports what happens, and sends a ``Tick`` at ``wake_at``. An
    event that cannot happen in the present state raises ArgumentError and changes nothing; what is still reported of a
    cancelled fetch or of a load that is over is ignored.

    Feeding the recorded events to an equal new controller gives the same instructions, see ``replay``.
    """

    def __init__(
        self,
        estimates: Estimates,
        settings: ControllerSettings,
        policy: Policy | None = None,
        *,
        record: Callable[[ev.LogEntry], object] | None = None,
    ) -> None:
        """Start without loads.

        Args:
            estimates: Updated in place; they may serve other controllers of the same link.
            settings: How loads are steered.
            policy: By default kvwire's own.
            record: Called with every event and its instructions.
        """
        self.estimates = estimates
        self._loads: dict[int, Load] = {}
        self._newest = -1
        self._came = self._is_news = False  # bytes since anything could begin; and such that a plan is due
        self._is_full = False  # no fetch can be opened, and nothing has happened since that was found
        self._now = -inf
        self._wakes: tuple[object, float] | None = None  # when to be woken next, and the link's condition by then
        self._cancelled: set[ChunkId] = set()
        self._record = record
        self._dispatch = Dispatcher(estimates, settings, policy or Adaptive(), self._loads)
        self._settings = settings

    @property
    def loads(self) -> dict[int, Load]:
        """Loads under way, by their numbers; to look at."""
        return self._loads

    def is_under_way(self, load: int) -> bool:
        """Whether a load is neither abandoned nor assembled."""
        return load in self._loads or load in self._dispatch.lanes.closings

    @property
    def held_bytes(self) -> int:
        """Bytes that were asked for, have arrived or are kept, over all loads."""
        return self._dispatch.shared.held

    @property
    def wake_at(self) -> float:
        """Instant at which to send a ``Tick`` unless something else happens before; infinite where there is no need."""
        # What bytes let begin waits for what they bring, which mostly comes at the same instant.
        begins = self._is_news or (self._came and not self._is_full and self._dispatch.window.can_fetch)
        return self._now if begins else self._next_wake()

    def _next_wake(self) -> float:
        """When that is where nothing can begin now.

        Worked out where something was begun, and where the link was measured, begins to flow, is empty or comes back.
        What else comes between two measurements moves at most the instant at which more may be asked for.
        """
        link, known = self._dispatch.link.condition, self._wakes
        if known is None or known[1] <= self._now or known[0] != link or self.estimates.bandwidth.is_guess:
            known = self._wakes = link, self._dispatch.wake_at(self._now)
        return max(self._now, known[1])

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take in one event.

        Args:
            event: What happened.
            now: The instant, in seconds of any clock that never goes back.

        Returns:
            What to do, in this order.

        Raises:
            ArgumentError: The event cannot happen in the present state; nothing has changed.
        """
        if not (self._now <= now < inf and now > -inf):
            msg = f"time must be finite and never go back: {now} after {self._now}"
            raise ArgumentError(msg)
        out: list[ev.Instruction] = []
        # Taking in comes first: it raises before it changes anything.
        acts = self._take(event, now, out)
        self._dispatch.shared.known_costs.clear()
        if acts:
            self._came = self._is_news = self._is_full = False
            self._wakes = None
            self._dispatch.act(now, out)
        cancelled = {each.chunk for each in out if isinstance(each, ev.Cancel)} if out else None
        if cancelled:
            self._cancelled = {chunk for chunk in self._cancelled | cancelled if chunk.load in self._loads}
        self._now = now
        if self._record:
            self._record(ev.LogEntry(now, event, tuple(out)))
        return out

    def _take(self, event: ev.Event, now: float, out: list[ev.Instruction]) -> bool:  # noqa: C901, PLR0912 - a case for each event
        """Take in an event; returns whether there may be something to do."""
        match event:
            # The most frequent ones first, and without patterns for their fields, which take longer.
            case ev.ChunkArrived():
                return self._arrived(event.chunk, event.level, event.trouble, now, out)
            case ev.TransferProgress():
                self._is_news |= self._dispatch.window.progress(event.bytes, event.started, event.ended, event.chunk)
                self._came, self._is_full = True, False
                return False
            case ev.FirstByte():
                self._wakes = None if self._dispatch.link.first_byte(event.seconds, now) else self._wakes
                self._is_full = False
                return False
            case ev.DecodeDone(chunks, seconds):
                self._decoded(chunks, (), seconds, "", now, out)
            case ev.LoadRequested():
                self._asked(event, now)
            case ev.IndexKnown(load, document, variants):
                return self._index(load, document, variants, now)
            case ev.PromptAssembled():
                self._assembled(event, now)
            case ev.ChunkFailed(chunk, reason):
                return self._fetch_failed(chunk, reason, now)
            case ev.DecodeFailed(chunks, bad, reason):
                self._decoded(chunks, bad, None, reason, now, out)
            case ev.RecomputeDone(chunks, seconds, blind):
                self._recomputed(chunks, seconds, now, blind=blind)
            case ev.RecomputeFailed(chunk, reason):
                self._recompute_failed(chunk, reason, now)
            case ev.RecomputeInterrupted(chunks, seconds):
                self._interrupted(chunks, seconds, now)
            case ev.RecomputedTogether():
                self._dispatch.passes.ended_together(event, now)
            case ev.PrefixComputed(load, document, seconds):
                self._prefix_computed(load, document, seconds, now)
            case ev.PrefixFailed(load, document, reason):
                self._head_failed(load, document, reason, now, out)
            case ev.Looked(load, attention, seconds):
                self._looked(load, attention, seconds, now)
            case ev.RepairDone(load, seconds=seconds):
                check_seconds(seconds)
                self._dispatch.repairs.ended(event, self._load(load), now)
            case ev.Tick():
                self._dispatch.window.watch(now)
            case ev.DriverPaused(seconds):
                check_seconds(seconds)
                self._dispatch.link.paused(seconds, now)
                self._dispatch.lanes.paused(seconds)
            case ev.LoadAbandoned(load):
                known = self._load(load)
                self._dispatch.lanes.closed(load, now)
                if known:
                    self._dispatch.end(known, now, out)
        return True

    def _assembled(self, event: ev.PromptAssembled, now: float) -> None:
        """End a load's closing, and learn from it; of a closing that was abandoned nothing is learnt."""
        if self._load(event.load):
            msg = f"load {event.load} is not finished; report its closing after Finish"
            raise ArgumentError(msg)
        closing = self._dispatch.lanes.closings.get(event.load)
        if closing:
            if closing.repair_s:
                self.estimates.repair.add(closing.repair_s, event.repair_s)
            self.estimates.closing.add(event.prompt_tokens, event.seconds)
            self._dispatch.lanes.closed(event.load, now)

    def _load(self, number: int) -> Load | None:
        """A load under way; None where it is over. Raises ArgumentError for one that never was."""
        if number > self._newest:
            msg = f"load {number} was never asked for"
            raise ArgumentError(msg)
        return self._loads.get(number)

    def _asked(self, event: ev.LoadRequested, now: float) -> None:
        if event.load <= self._newest:
            msg = f"loads are numbered upwards: {event.load} after {self._newest}"
            raise ArgumentError(msg)
        self._loads[event.load] = Load(event, now)
        self._newest = event.load

    def _index(self, number: int, document: int, variants: tuple[DocumentPlanInput, ...], now: float) -> bool:
        load = self._load(number)
        if load:
            self._dispatch.planner.add(load, load.add(document, variants, now), now)
            self._is_full, self._wakes = False, None
        # What can be done with a document is known once a plan names it.
        return load is not None and (load.is_known or self._dispatch.planner.is_due(load, now))

    def _fetched(self, chunk: ChunkId) -> tuple[Load, DocumentState] | None:
        """Where a chunk is whose fetch is over; None where nobody cares any more."""
        if self._cancelled and chunk in self._cancelled:
            self._cancelled.discard(chunk)
            return None
        load = self._load(chunk.load)
        if load is None:
            return None
        doc, number = load.doc(chunk.document), chunk.chunk
        if not 0 <= number < doc.count:
            msg = f"{chunk} is not part of this load"
            raise ArgumentError(msg)
        state = doc.table.state[doc.start + number]
        if state not in _FETCHED:
            msg = f"{chunk} is {ChunkState(state).name.lower()}, not being fetched; report each outcome once"
            raise ArgumentError(msg)
        return load, doc

    def _arrived(self, chunk: ChunkId, level: int, trouble: str, now: float, out: list[ev.Instruction]) -> bool:
        place = self._fetched(chunk)
        if place is None:
            return False
        load, doc = place
        table, at = doc.table, doc.start + chunk.chunk
        asked = table.level[at]
        if not 0 <= level <= asked:
            msg = f"level {level} of {chunk} arrived, level {asked} was asked for"
            raise ArgumentError(msg)
        refining = table.state[at] == REFINING
        if level < asked:
            floor = max(load.goal.floor, table.floor[at])
            too_coarse = level <= table.valid_level[at] if refining else level < floor and table.can_text[at]
            if too_coarse:
                if not refining:
                    out.append(ev.Release(chunk))
                return self._fetch_failed(chunk, trouble or f"only level {level} is there", now)
            doc.note(chunk.chunk, trouble)
            table.top[at] = level
            self._dispatch.shared.hold(doc, chunk.chunk, doc.size(chunk.chunk, level))
        self._dispatch.link.arrived(chunk, now)
        doc.failures = 0
        table.level[at] = level
        doc.move(chunk.chunk, REFINED if refining else ARRIVED)
        if self._is_news or self._dispatch.may_begin(now):
            return True
        self._is_full = True
        if len(self._dispatch.link.fetches) < SPARE:  # each is much of what is open
            self._wakes = None
        return False

    def _fetch_failed(self, chunk: ChunkId, reason: str, now: float) -> bool:
        place = self._fetched(chunk)
        if place is None:
            return False
        load, doc = place
        self._dispatch.link.drop(chunk, now)
        load.is_stale = True
        if doc.table.state[doc.start + chunk.chunk] == REFINING:
            doc.note(chunk.chunk, f"refinement failed: {reason}")
            self._dispatch.shared.settle(doc, chunk.chunk)
            return True
        self._lose(load, doc, chunk.chunk, f"fetch failed: {reason}")
        doc.failures += 1
        if doc.failures >= self._settings.max_failures:
            doc.give_up_blob(f"{doc.failures} fetches in a row failed")
        return True

    def _lose(self, load: Load, doc: DocumentState, chunk: int, trouble: str) -> None:
        """Lose what was or should have been fetched for a chunk."""
        doc.lose(chunk, trouble, fetch=True)
        self._dispatch.shared.hold(doc, chunk, 0)
        load.is_stale = True
        load.fallbacks += bool(doc.table.can_text[doc.start + chunk])

    def _decoded(
        self, chunks: tuple[ChunkId, ...], bad: tuple[ChunkId, ...], seconds: float | None, reason: str, now: float,
        out: list[ev.Instruction],
    ) -> None:  # fmt: skip
        if seconds is None and not (bad and set(bad) <= set(chunks)):
            msg = "a decode that failed names at least one of its own chunks"
            raise ArgumentError(msg)
        if seconds is not None:
            check_seconds(seconds)
        first = chunks[0] if chunks else None
        numbers = (first.load, first.document) if first else (-1, -1)
        job = self._dispatch.lanes.end("decode", "decode", chunks, *numbers, now)
        if seconds is not None:
            self.estimates.decode.add(job.tokens, job.size, seconds)
        load = self._load(job.load)
        if load is None:
            return
        for chunk, level in zip(chunks, job.levels, strict=True):
            doc = load.doc(chunk.document)
            if bad and chunk in bad:
                self._spoilt(load, doc, chunk.chunk, reason, out)
            else:
                self._decoded_one(load, doc, chunk.chunk, level, out)

    def _decoded_one(self, load: Load, doc: DocumentState, chunk: int, level: int, out: list[ev.Instruction]) -> None:
        table, at = doc.table, doc.start + chunk
        if table.state[at] == REDECODING:
            doc.reasons[chunk] = "refined: time was left"
        came, table.valid_level[at] = table.level[at], level
        if level < came:
            doc.reasons[chunk] = "more coarsely than it came, to be in time"
            if load.goal.objective == "quality":
                table.move(at, REFINED)  # the rest of it waits for time that is left
                return
            table.level[at] = table.top[at] = level
        table.move(at, READY)  # it ran, so that it may
        self._dispatch.shared.keep_or_release(load, doc, chunk, out)

    def _spoilt(self, load: Load, doc: DocumentState, chunk: int, trouble: str, out: list[ev.Instruction]) -> None:
        """Take in that what came of a chunk cannot be decoded."""
        table, at = doc.table, doc.start + chunk
        if table.state[at] == REDECODING:
            # What was valid is spoilt; its own bytes are still here, and nothing finer is tried again.
            doc.note(chunk, f"refinement cannot be decoded: {trouble}")
            doc.move(chunk, ARRIVED)
            table.level[at] = table.top[at] = level = table.valid_level[at]
            self._dispatch.shared.hold(doc, chunk, doc.size(chunk, level))
        else:
            self._lose(load, doc, chunk, f"decode failed: {trouble}")
            out.append(ev.Release(doc.id(chunk)))

    def _recomputed(self, chunks: tuple[ChunkId, ...], seconds: float, now: float, *, blind: bool) -> None:
        check_seconds(seconds)
        load_number, document = (chunks[0].load, chunks[0].document) if chunks else (-1, -1)
        job = self._dispatch.lanes.end("prefill", "recompute", chunks, load_number, document, now)
        if not blind:
            self.estimates.prefill.add(job.tokens, job.context, seconds)
        load = self._load(job.load)
        if load:
            load.pass_ended(job, blind=blind)

    def _recompute_failed(self, chunk: ChunkId, reason: str, now: float) -> None:
        job = self._dispatch.lanes.running("prefill")
        if job is None or job.kind != "recompute" or chunk not in job.chunks:
            msg = f"{chunk} is not being recomputed; name a chunk of the pass that failed"
            raise ArgumentError(msg)
        self._dispatch.lanes.end("prefill", "recompute", job.chunks, job.load, job.document, now)
        load = self._load(job.load)
        if load:
            load.pass_failed(job, chunk, reason)

    def _interrupted(self, chunks: tuple[ChunkId, ...], seconds: float, now: float) -> None:
        check_seconds(seconds)
        if not self._dispatch.lanes.is_interrupted:
            msg = "no forward pass was to be stopped; report what became of it"
            raise ArgumentError(msg)
        load_number, document = (chunks[0].load, chunks[0].document) if chunks else (-1, -1)
        job = self._dispatch.lanes.end("prefill", "recompute", chunks, load_number, document, now)
        load = self._load(job.load)
        if load:
            load.pass_stopped(job)

    def _prefix_computed(self, number: int, document: int, seconds: float, now: float) -> None:
        check_seconds(seconds)
        self._dispatch.lanes.end("prefill", "head start", (), number, document, now)
        load = self._load(number)
        if load:
            doc = load.doc(document)
            doc.prefix_done, doc.prefix_running = True, False

    def _looked(self, number: int, attention: Sequence[Sequence[float]], seconds: float, now: float) -> None:
        check_seconds(seconds)
        load = self._load(number)
        check = load.checked_attention(attention) if load else ()
        self._dispatch.lanes.end("prefill", "look", (), number, -1, now)
        if load:
            load.looked(check)

    def _head_failed(self, number: int, document: int, reason: str, now: float, out: list[ev.Instruction]) -> None:
        self._dispatch.lanes.end("prefill", "head start", (), number, document, now)
        load = self._load(number)
        if load is None:
            return
        doc = load.doc(document)
        doc.prefix_running = False
        trouble = f"its head start failed: {reason}"
        for chunk in range(doc.count):
            state = doc.table.state[doc.start + chunk]
            if state == FETCHING:
                self._dispatch.link.drop(doc.id(chunk), now)
                out.append(ev.Cancel(doc.id(chunk), trouble))
            if state in (FETCHING, ARRIVED):
                self._lose(load, doc, chunk, trouble)
                out.append(ev.Release(doc.id(chunk)))
        doc.give_up_blob(trouble, all_of_it=True)


def replay(log: list[ev.LogEntry], controller: Controller) -> None:
    """Feed a log's events to a new controller.

    Args:
        log: What a controller recorded.
        controller: A new one with equal settings, estimates and policy.

    Raises:
        ArgumentError: An instruction differs from the log's.
    """
    for number, entry in enumerate(log):
        given = tuple(controller.handle(entry.event, entry.now))
        if given != entry.instructions:
            msg = f"entry {number}: {given} instead of {entry.instructions}; compare policy, settings and estimates"
            raise ArgumentError(msg)
