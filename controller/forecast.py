"""When the first token comes, for every uniform level and every meeting point at once.

The model of a load that planning uses; a twin in the tests plays the same model event by event.

* The link delivers one thing after another: what others ask for first, open requests, chunks that must be fetched, then
  the others from the back of the prompt. Recomputation takes the rest, from the front (Cake, arXiv 2410.03065). What is
  asked for now begins to come after a time to first byte, even where open requests leave the link idle before.
* A decode can begin when its bytes are there. With one worker decoding and recomputing share it, with two each has one.
* A worker never idles while it could work, so it ends at the largest, over all instants at which work becomes possible,
  of that instant plus all its work that becomes possible then or later.
* Chunks that are under way or ready at a level below the target are raised to it when all else has been fetched, and
  decoded anew when that is here. Where coarse levels go first, every chunk that is fetched is raised so at the end.
* Chunks that only recomputation can give can be recomputed now where nothing before them in their document is to be
  fetched; otherwise, behind the meeting point, when the link has delivered everything.
"""

from __future__ import annotations

from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from .snapshot import SLOWEST

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .snapshot import Columns, Flags, Floats, Ints, PlanRequest


def wire_s(sizes: Ints, bandwidth: float) -> Floats:
    """Seconds for which a fetch of some bytes holds up the next one."""
    return sizes / max(bandwidth, SLOWEST)


def decode_s(request: PlanRequest, tokens: Ints, sizes: Ints) -> Floats:
    """Work out how long chunks of some bytes keep a decode lane busy."""
    cost = request.costs.decode
    return np.where(sizes > 0, cost.base_s + cost.token_s * tokens + cost.byte_s * sizes, 0.0)


def first_levels(request: PlanRequest, levels: Ints, coarse: Flags) -> Ints:
    """Choose what is fetched first where coarse levels go before finer ones: the floor, where blobs are layered."""
    chunks = request.chunks
    lowest = np.minimum(levels, np.maximum(chunks.level_for(request.goal.floor), 0))
    return np.where(coarse if chunks.layered is None else coarse & chunks.layered, lowest, levels)


def floor_s(request: PlanRequest) -> float:
    """Work out how long the open chunks take at the quality floor, fetched as far as they can be."""
    chunks = request.chunks
    if request.bandwidth_low <= SLOWEST or not chunks.count:
        return 0.0
    floor = request.goal.floor
    sizes = chunks.sizes[floor] if chunks.common >= floor else chunks.bytes_at(np.minimum(floor, chunks.top))
    wire, work = wire_s(sizes, request.bandwidth_low), decode_s(request, chunks.tokens, sizes)
    return float(max(wire.sum(), work.sum()))


def unfetched_s(request: PlanRequest, bandwidth: float) -> float:
    """Seconds to the first token where nothing more is fetched: what a ``Timeline`` without refinements has first."""
    chunks, committed = request.chunks, request.committed
    if not chunks.can_text.all() and (chunks.level_for(request.goal.floor) >= 0)[~chunks.can_text].any():
        return inf
    begun = request.lead_s + committed.wire.cumsum() / max(bandwidth, SLOWEST)
    waits = begun + committed.work_s[::-1].cumsum()[::-1]  # each arrival and the work from then on
    done = float(waits.max(initial=-inf))
    computing = committed.prefill_s + (float(request.prefill_s.sum()) if chunks.count else 0.0)
    work = committed.decode_s + float(committed.work_s.sum())
    busy = max(done, computing + work if request.workers == 1 else max(computing, work))
    return busy + request.costs.closing_s(request.prompt_tokens)


class Timeline:
    """All candidates of one request at one bandwidth: target levels times numbers of chunks that are fetched.

    Split k fetches the first k chunks of ``order`` of that target, from ``least`` on, which must be fetched; other
    splits end never.

    Attributes:
        levels: At which chunks are fetched at first, RECOMPUTE where they cannot be ``[targets, n]``.
        finish_s: Seconds from now to the first token ``[targets, splits]``.
    """

    def __init__(
        self, request: PlanRequest, targets: Ints, bandwidth: float, *, coarse: Flags | None = None, plain: bool = True
    ) -> None:
        """Evaluate."""
        chunks = request.chunks
        self._request, self._targets, self._bandwidth = request, targets, bandwidth
        # The usual case, and much quicker: every chunk can be fetched at every target, and recomputed.
        self._is_plain = plain and 0 <= targets[-1] <= chunks.common
        if self._is_plain:
            self._finest, self._finest_sizes = targets[:, None].repeat(chunks.count, axis=1), chunks.sizes[targets]
            if chunks.floor is not None:
                self._finest = np.maximum(self._finest, chunks.floor)
        else:
            self._finest = chunks.level_for(targets[:, None])
            self._finest_sizes = chunks.bytes_at(self._finest)
        self.levels = self._finest if coarse is None else first_levels(request, self._finest, coarse)
        self.sizes = self._finest_sizes if coarse is None else chunks.bytes_at(self.levels)
        computing, late = self._computing(self._arrange())
        wire, work = wire_s(self.sizes, bandwidth), decode_s(request, chunks.tokens, self.sizes)
        self._raised = raised = Raised(request, targets, bandwidth)
        link, decoding = self._lanes(wire, work)
        link, decoding = self._raising(link, decoding, raised)
        self.finish_s = self._finish(link, decoding, computing, late)

    def _arrange(self) -> Flags:
        """Set the order; returns what may be fetched ``[targets, n]``."""
        chunks, fetched = self._request.chunks, self.levels >= 0
        if self._is_plain:
            self.order = np.empty(fetched.shape, np.int64)
            self.order[:] = np.arange(chunks.count - 1, -1, -1)
            self.counts = np.full(len(fetched), chunks.count)
            self.least = np.zeros(len(fetched), np.int64)
            return fetched
        forced = fetched & ~chunks.can_text
        # Forced chunks first, then from the back; what is not fetched comes last and costs the link nothing.
        rank = np.where(forced, 0, np.where(fetched, 1, 2)) * chunks.count + np.arange(chunks.count)[::-1]
        self.order = np.argsort(rank, axis=1, kind="stable")
        self.counts, self.least = fetched.sum(axis=1), forced.sum(axis=1)
        return fetched

    def _sorted(self, values: NDArray[Any]) -> NDArray[Any]:
        """Columns ``[targets, n]``, or the same for all targets ``[n]``, in each target's order."""
        if self._is_plain:
            return values[..., ::-1]
        return np.take_along_axis(np.broadcast_to(values, self.order.shape), self.order, axis=1)

    def _cumulated(self, values: NDArray[Any]) -> NDArray[Any]:
        """Sums over the first k columns of each target's order, k from 0 to n ``[..., n + 1]``."""
        out = np.empty((*values.shape[:-1], values.shape[-1] + 1), values.dtype)
        out[..., 0] = 0
        values.cumsum(axis=-1, out=out[..., 1:])
        return out

    def _lanes(self, wire: Floats, work: Floats) -> tuple[Floats, Floats]:
        """Ends of the link and of a decode lane that does nothing else, for every split ``[targets, n + 1]``."""
        request, bandwidth = self._request, self._bandwidth
        committed = request.committed
        begun = request.lead_s + committed.wire.cumsum() / max(bandwidth, SLOWEST)  # arrivals of open requests
        done = committed.work_s.cumsum()
        # The largest arrival minus the work that arrived before it: what arrives later only adds to both.
        head = float((begun - (done - committed.work_s)).max(initial=-np.inf))
        busy = float(done[-1]) if len(done) else 0.0
        last = float(begun[-1]) if len(begun) else request.lead_s
        last += committed.ahead_bytes / max(bandwidth, SLOWEST)
        link = last + self._cumulated(self._sorted(wire))
        link[:, 1:] += max(0.0, request.ttfb_s - last)
        tail = self._cumulated(self._sorted(work))
        gaps = np.empty(link.shape)
        gaps[:, 0] = head
        np.subtract(link[:, 1:], tail[:, :-1], out=gaps[:, 1:])
        gaps[:, 1:] -= busy
        decoding = np.maximum.accumulate(gaps, axis=1)
        decoding += busy
        decoding += tail
        self._work = committed.decode_s + busy + tail
        return link, decoding

    def _raising(self, link: Floats, decoding: Floats, raised: Raised) -> tuple[Floats, Floats]:
        """The same ends once chunks are raised: those under way, then those of the plan ``[targets, n + 1]``."""
        end = decoding
        if raised.any:
            end = np.maximum(decoding + raised.decode_s[:, None], link + (raised.gap_s + raised.decode_s)[:, None])
            link, self._work = link + raised.wire_s[:, None], self._work + raised.decode_s[:, None]
        if self.levels is not self._finest:
            request, tokens = self._request, self._request.chunks.tokens
            sizes = self._finest_sizes
            more = sizes - self.sizes
            wire = self._cumulated(self._sorted(wire_s(more, self._bandwidth)))
            work = self._cumulated(self._sorted(np.where(more > 0, decode_s(request, tokens, sizes), 0.0)))
            gaps = np.full(wire.shape, -np.inf)
            waits = np.where(self._sorted(more) > 0, wire[:, 1:] - work[:, :-1], -np.inf)
            np.maximum.accumulate(waits, axis=1, out=gaps[:, 1:])
            end, link, self._work = np.maximum(end, link + gaps) + work, link + wire, self._work + work
        return link, np.maximum(end, self._work)

    def _computing(self, fetched: NDArray[np.bool_]) -> tuple[Floats, Floats | None]:
        """Compute that is possible now, and compute that waits for the link, for every split ``[..., n + 1]``.

        The second is None where nothing waits.
        """
        request = self._request
        chunks = request.chunks
        seconds = request.prefill_s
        if self._is_plain:
            front = request.committed.prefill_s + seconds.sum() - self._cumulated(self._sorted(seconds))
            return front + self._heads(fetched), None
        either = fetched & chunks.can_text
        lost = ~fetched & _behind_fetched(chunks, fetched)
        both = np.where(either, seconds, 0.0)
        front = both.sum(axis=1, keepdims=True) - self._cumulated(self._sorted(both))
        cold = np.where(fetched | lost, 0.0, seconds).sum(axis=1, keepdims=True)
        heads = self._heads(fetched)
        if not lost.any():
            return request.committed.prefill_s + front + cold + heads, None
        # Lost chunks behind the first one fetched wait; those before it belong to the front.
        after = np.zeros((len(fetched), chunks.count + 1))
        after[:, :-1] = np.cumsum(np.where(lost, seconds, 0.0)[:, ::-1], axis=1)[:, ::-1]
        # The split's first column in the prompt, among those that may be fetched or not; none: nothing is behind it.
        lead = np.full(self.finish_shape, chunks.count)
        lead[:, 1:] = np.where(self._sorted(either), self.order, chunks.count)
        lead = np.minimum.accumulate(lead, axis=1)
        late = np.take_along_axis(after, lead, axis=1)
        front += after[:, :1] - late
        return request.committed.prefill_s + front + cold + heads, late

    @property
    def finish_shape(self) -> tuple[int, int]:
        """Targets and splits."""
        return len(self.order), int(self.order.size) // max(1, len(self.order)) + 1

    def _heads(self, fetched: NDArray[np.bool_]) -> Floats | float:
        """Head starts of documents of which anything is fetched, for every split ``[targets, n + 1]``."""
        chunks = self._request.chunks
        if not chunks.prefix_s.any():
            return 0.0
        in_order = np.broadcast_to(chunks.document, self.order.shape)
        document = np.take_along_axis(in_order, self.order, axis=1)
        seconds = self._sorted(np.where(fetched, chunks.prefix_s, 0.0))
        # Documents are fetched one after another, apart from forced chunks: each counts where it first appears.
        first = np.ones(document.shape, np.bool_)
        for row, documents in enumerate(document):
            _, where = np.unique(documents, return_index=True)
            first[row] = False
            first[row, where] = True
        return self._cumulated(np.where(first, seconds, 0.0))

    def _finish(self, link: Floats, decoding: Floats, computing: Floats, late: Floats | None) -> Floats:
        request = self._request
        if request.workers == 1:
            # One worker: all work that is possible now, or arrivals with what follows them.
            end = np.maximum(computing + self._work, decoding)
            end = end if late is None else end + late
        elif late is None:
            end = np.maximum(computing, decoding)
        else:
            waits = np.where(late > 0, np.maximum(computing, link) + late, computing)
            end = np.maximum(waits, decoding)
        end = end + request.costs.closing_s(request.prompt_tokens)
        if self._is_plain:
            return end
        columns = np.arange(end.shape[1])
        usable = (columns >= self.least[:, None]) & (columns <= self.counts[:, None])
        return np.where(usable, end, np.inf)

    @cached_property
    def error(self) -> Floats:
        """Summed over tokens of the open chunks and of those to be raised ``[targets, splits]``."""
        chunks = self._request.chunks
        exact = chunks.tokens * chunks.exact_error
        errors = chunks.errors[self._targets] if self._is_plain else chunks.errors_at(self._finest)
        gained = chunks.tokens * errors - exact
        return np.asarray(self._raised.error[:, None] + exact.sum() + self._cumulated(self._sorted(gained)))

    @cached_property
    def bytes(self) -> Ints:
        """Of open chunks to fetch ``[targets, splits]``."""
        return self._cumulated(self._sorted(self.sizes))

    def fetched_bytes(self, row: int, split: int) -> int:
        """What ``bytes`` has for one candidate."""
        return int(self.sizes[row][self.order[row, :split]].sum())


class Raised:
    """What raising chunks that are under way or ready to each target takes.

    Attributes:
        decode_s: Seconds of the decode lane ``[targets]``.
        gap_s: From the first of them on the link to the latest instant at which the decode lane, which does
            nothing else, may begin and never waits; -inf where nothing is raised ``[targets]``.
    """

    def __init__(self, request: PlanRequest, targets: Ints, bandwidth: float) -> None:
        """Add up; all zero where nothing can be raised."""
        some = request.refinable
        self.wire_s = self.decode_s = self.error = np.zeros(len(targets))  # seconds of the link ``[targets]``
        self.gap_s = np.full(len(targets), -np.inf)
        self.any = some is not None and len(some.level) > 0  # whether anything can be raised at all
        if some is None or not self.any:
            return
        column = np.arange(len(some.level))
        to = np.maximum(np.minimum(targets[:, None], some.top), some.level)
        sizes = some.sizes[to, column]
        more = sizes - some.sizes[some.level, column]
        grows = more > 0
        wire = wire_s(more, bandwidth).cumsum(axis=1)
        work = np.where(grows, decode_s(request, some.tokens, sizes), 0.0)
        done = work.cumsum(axis=1)
        self.wire_s, self.decode_s = wire[:, -1], done[:, -1]
        self.gap_s = np.where(grows, wire - done + work, -np.inf).max(axis=1)
        self.error = (some.tokens * some.errors[to, column]).sum(axis=1)  # summed over their tokens then ``[targets]``


def _behind_fetched(chunks: Columns, fetched: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Chunks with an earlier one of their document among those that may be fetched ``[targets, n]``."""
    if fetched.all():
        return np.zeros(fetched.shape, np.bool_)
    before = np.zeros((len(fetched), chunks.count + 1), np.int64)
    np.cumsum(fetched, axis=1, out=before[:, 1:])
    starts = np.searchsorted(chunks.document, chunks.document, side="left")
    return np.asarray(before[:, :-1] > before[:, starts])
