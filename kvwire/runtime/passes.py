"""A load's prompt, and the engine's passes that fill it: recomputed chunks, prefix layers, a look.

The engine works in one thread, see ``driver``.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from kvwire.controller import PrefillCost
from kvwire.controller import events as ev
from kvwire.engines.base import PassStoppedError
from kvwire.errors import MismatchError, StorageError
from kvwire.runtime.document import in_words
from kvwire.runtime.prefill import opening_of, states_of
from kvwire.store.prefix.index import opening_of as opening_of_blob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from kvwire.codec import Backend
    from kvwire.controller import DocumentPlanInput
    from kvwire.engines.base import Engine
    from kvwire.reuse import AttentionSummary, LinkedPrompt
    from kvwire.runtime.document import OpenDocument
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.types import ChunkId, KVCache

LOAD_CANCELLED = "the load was cancelled"
"""Why a job stopped early."""
NO_ENGINE = PrefillCost(0.0, 10.0)
"""Cost of passes if ``Engine.can_recompute`` is false, in seconds: so high that the controller gives up a chunk only if
it cannot be loaded. Without it, all later chunks of the prompt are useless, but not the earlier ones, so the load goes
on."""


class PromptWorker:
    """A load's prompt while it is filled, and the passes that the engine runs for it.

    Attributes:
        prompt: The linked cache of all documents.
        number: The load's number for the controller; -1 before it has one.
        documents: Open documents, by number.
        inputs: Inputs of planning, by document.
        levels: Decoded level of each chunk.
        misses: In words: faults healed by recomputing.
        decode_s: Compute time of decoding, in seconds.
        recompute_s: Compute time of recomputing, in seconds.
        seen: The question's attention to the prompt; None before a look, or without one.
        look_s: Compute time of the look, in seconds.
        can_look: Whether the engine may show its attention: false once it has refused.
        room: The prompt's memory with at least one row behind it, where documents are cut; else None.
        is_gone: Whether the load is over; jobs then stop.
        exact: How many of the first document's first rows are those of a prefill.
        copied: Whether the last pass took rows from another load's prompt.
        shares: Whether the prompt is one document, so that other loads may copy its rows, and it theirs.
    """

    prompt: LinkedPrompt

    def __init__(
        self, engine: Engine, names: Sequence[str], driver: ControllerDriver, backend: Backend,
        question: Sequence[int], *, sees_documents: bool = True, sees_head: bool = False, shares: bool = False,
    ) -> None:  # fmt: skip
        """Take the parts.

        sees_documents: whether recomputed text may see all that precedes its document. sees_head: whether the first
        document's text always does. shares: see above.
        """
        self._engine, self._names, self._driver = engine, names, driver
        self._backend, self._question = backend, question
        self._sees_documents, self._sees_head, self.shares = sees_documents, sees_head, shares
        self.seen: AttentionSummary | None = None
        self.can_look = True
        self.number = -1
        self.room: KVCache | None = None
        self.documents: dict[int, OpenDocument] = {}
        self.inputs: dict[int, DocumentPlanInput] = {}
        self.levels: dict[ChunkId, int] = {}
        self.misses: list[str] = []
        self.is_gone, self.exact, self.copied = False, 0, False
        self.decode_s = self.recompute_s = self.look_s = 0.0
        self._stop = threading.Event()  # for the forward pass requested last
        self._seeing: set[ChunkId] = set()
        self._writers, self._changed = 0, threading.Condition()  # threads writing decoded chunks

    def leave(self) -> None:
        """Stop all writing into the prompt; waits for chunks being decoded."""
        with self._changed:
            self.is_gone = True
            self._changed.wait_for(lambda: not self._writers)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write a decoded chunk in this context; raises StorageError if the load is over."""
        with self._changed:
            self.check_here()
            self._writers += 1
        try:
            yield
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    def check_here(self) -> None:
        """Raise StorageError if the load is over."""
        if self.is_gone:
            raise StorageError(LOAD_CANCELLED)

    def begin_pass(self) -> None:
        """Start a new forward pass for ``stop_pass``, which no longer affects earlier ones."""
        self._stop = threading.Event()

    def stop_pass(self) -> None:
        """Let the last forward pass end early, if the engine can."""
        self._stop.set()

    @property
    def seeing(self) -> list[tuple[int, int]]:
        """Spans of recomputed chunks that saw all that precedes them: first position, and one after the last."""
        spans = []
        for chunk in self._seeing:
            at, (first, stop) = self.prompt.offset(chunk.document), self.documents[chunk.document].span(chunk.chunk)
            spans.append((at + first, at + stop))
        return spans

    def lose(self, chunk: ChunkId, words: str) -> None:
        """Record a fault of a chunk."""
        self.misses.append(f"{self._names[chunk.document]} chunk {chunk.chunk}: {words}")

    def decoding(self, index: int, document: OpenDocument, hidden: Tensor | None = None) -> OpenDocument:
        """A copy of a document with a decoder into its place in the prompt."""
        part, offset = self.prompt.document(index), self.prompt.offset(index)
        if document.is_cut and self.room is not None:
            part = self.room
        return document.decode_into(part, offset, hidden, self._backend, rounded=self._engine.can_recompute)

    def use(self, index: int, document: OpenDocument) -> None:
        """Set an open document."""
        if document.decoder is not None and document.decoder.kept is not None:
            self.prompt.keep(index, document.decoder.kept)
        self.documents[index] = document

    async def recompute(self, request: ev.Recompute) -> ev.RecomputeDone | ev.RecomputeFailed | ev.RecomputeInterrupted:
        """Recompute chunks in a pass of their own, in the compute thread."""
        first = request.first
        chunks = tuple(replace(first, chunk=index) for index in range(first.chunk, request.last.chunk + 1))
        if not self._engine.can_recompute:  # the engine elsewhere computes these, too
            document = self.documents[first.document]
            tokens = document.span(request.last.chunk)[1] - document.span(first.chunk)[0]
            return ev.RecomputeDone(chunks, NO_ENGINE.seconds(tokens))
        behind = request.behind and self._sees_documents
        failed, without_context, began = [first], request.behind and not behind, self._driver.clock()
        self.copied = False
        try:
            try:
                seconds = await self._extend_timed(chunks, failed, behind=behind)
            except Exception as error:
                if not behind or self.is_gone or isinstance(error, PassStoppedError):
                    raise
                without_context = True
                self.lose(failed[0], f"computed without the documents before it: {in_words(error)}")
                seconds = await self._extend_timed(chunks, failed, behind=False)
        except PassStoppedError:
            return ev.RecomputeInterrupted(chunks, self._driver.clock() - began)
        except Exception as error:  # noqa: BLE001 - the controller knows whether there is another way
            self.lose(failed[0], in_words(error))
            return ev.RecomputeFailed(failed[0], in_words(error))
        self.note_recomputed(request, chunks, seconds, blind=without_context)
        return ev.RecomputeDone(chunks, seconds, without_context, self.copied)

    def note_recomputed(
        self, request: ev.Recompute, chunks: tuple[ChunkId, ...], seconds: float, *, blind: bool = False
    ) -> None:
        """Record the outcome of a pass."""
        self.recompute_s += seconds
        if request.behind and not blind:
            self._seeing.update(chunks)

    async def _extend_timed(self, chunks: tuple[ChunkId, ...], failed: list[ChunkId], *, behind: bool) -> float:
        """Run ``_extend_all`` in the compute thread; returns its seconds."""
        work = partial(self._extend_all, chunks, failed, behind=behind)
        return (await self._driver.compute(partial(self.timed, work)))[1]

    def _extend_all(self, chunks: tuple[ChunkId, ...], failed: list[ChunkId], *, behind: bool) -> None:
        """Recompute chunks in one pass or, if that fails, one by one: shorter passes need less memory.

        failed: set to the chunk being computed. behind: see ``Recompute``.
        """
        self.check_here()
        with self._engine.stoppable(self._stop), self.counting(chunks[0]):
            try:
                self._extend(chunks[0], chunks[-1], behind=behind)
            except PassStoppedError:
                raise
            except Exception:
                if len(chunks) == 1:
                    raise
            else:
                return
            for chunk in chunks:
                failed[0] = chunk
                self._extend(chunk, chunk, behind=behind)

    @contextmanager
    def counting(self, first: ChunkId) -> Iterator[None]:
        """A pass that fails in this context leaves no rows of a prefill: its chunks may be fetched instead."""
        try:
            yield
        except BaseException:
            self.exact = min(self.exact, self.documents[first.document].span(first.chunk)[0])
            raise

    def _extend(self, first: ChunkId, last: ChunkId, *, behind: bool) -> None:
        """Recompute chunks on top of the finished part of their document or prompt, and write them into the prompt."""
        document = self.documents[first.document]
        if document.layout is not None:
            from kvwire.reuse import compute_piece

            span, whole = (document.span(first.chunk)[0], document.span(last.chunk)[1]), document.token_ids or ()
            compute_piece(self._engine, document.layout, self.prompt, first.document, whole, span, behind=behind)
            return
        self.compute_from(document.span(first.chunk)[0], first, last, behind=behind)

    def compute_from(self, start: int, first: ChunkId, last: ChunkId, *, behind: bool) -> None:
        """Compute the tokens of chunks from one on, or copy them from loads that have computed them."""
        stop = self.documents[last.document].span(last.chunk)[1]
        start += self.copy(start, stop)
        if start < stop:
            prefix, ids, offset = self.row(first, last, behind=behind, start=start)
            self.write(first, self._engine.extend(prefix, ids, offset=offset), start)

    def text_until(self, start: int, stop: int) -> tuple[object, ...] | None:
        """What the rows of these tokens depend on, if that is nothing but the prompt's text."""
        if self.exact != start or not self.shares:
            return None
        return (start, *self.before, (self.documents[0].token_ids or ())[:stop])

    @property
    def before(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What precedes the first document in the prompt, and where its text is computed."""
        opening = self.prompt.opening
        return opening, opening if self._sees_head else self._neutral(0)

    def _neutral(self, index: int) -> tuple[int, ...]:
        """Tokens behind which a document's text is computed that sees nothing of the prompt before it."""
        document, offset, opening = self.documents[index], self.prompt.offset(index), self._engine.opening_tokens
        if not offset:  # the first document has no prefix
            return ()
        neutral = document.info.neutral_prefix if document.info else opening_of(self._engine, document.token_ids or ())
        return neutral[: len(opening)] if offset == len(opening) else neutral  # after BOS only

    def copy(self, start: int, stop: int) -> int:
        """Take rows that another load has computed for a prompt that begins with the same tokens; how many.

        In the compute thread, as all passes, so that theirs do not change meanwhile.
        """
        if self.text_until(start, stop) is None:
            return 0
        text, before = (self.documents[0].token_ids or ())[:stop], self.before
        best, rows = start, None
        others: list[PromptWorker] = [load.work for load in tuple(self._driver.loads.values())]
        for other in others:
            is_donor = other is not self and other.shares and other.exact
            known = min(other.exact, stop, other.prompt.tokens[0]) if is_donor else 0
            same = _agreeing(text, (other.documents[0].token_ids or ())[:known]) if known > best else 0
            if same > best and other.before == before:
                best, rows = same, other.prompt.document(0).slice(start, same)
        if rows is None:
            return 0
        self.prompt.write(0, start, replace(rows, kept=None))  # none of them is missing, even of a pruned document
        self.exact, self.copied = best, True
        return best - start

    def can_be_row(self, request: ev.Recompute) -> bool:
        """Whether chunks can be a row of a joined pass: text with anchors takes several passes."""
        return self.documents[request.first.document].layout is None and (self._sees_documents or not request.behind)

    def row(
        self, first: ChunkId, last: ChunkId, *, behind: bool, start: int | None = None
    ) -> tuple[KVCache | None, Sequence[int], int]:
        """Inputs of ``extend`` to recompute chunks, in the compute thread: prefix, token ids and offset.

        start: First token of the document that is still to be computed; None: of the first chunk.
        """
        behind = behind or (self._sees_head and not first.document)
        document = self.documents[first.document]
        start = document.span(first.chunk)[0] if start is None else start
        stop = document.span(last.chunk)[1]
        offset, whole = self.prompt.offset(first.document), document.token_ids or ()
        ids = whole[start:stop]
        prefix = self.prompt.cache.slice(0, offset + start) if behind else None
        if prefix is None and start:
            prefix = self.prompt.document(first.document).slice(0, start)
        if prefix is not None and prefix.kept and all(mask is None or bool(mask.all()) for mask in prefix.kept):
            prefix = replace(prefix, kept=None)  # the prompt's gaps are elsewhere
        neutral = () if behind else self._neutral(first.document)
        if neutral:  # a neutral prefix has no place in the prompt, so tokens are computed elsewhere and moved
            from kvwire.runtime.prefill import behind as behind_neutral

            prefix = behind_neutral(self._engine, neutral, prefix, more=len(ids))
        return prefix, ids, offset

    def write(self, first: ChunkId, piece: KVCache, start: int | None = None) -> None:
        """Write recomputed chunks into the prompt; start: see ``row``."""
        start = self.documents[first.document].span(first.chunk)[0] if start is None else start
        self.prompt.write(first.document, start, piece)
        if not first.document and start == self.exact:
            self.exact += piece.tokens

    async def start_head(self, index: int) -> None:
        """Compute a document's prefix layers, so that it can be decoded."""
        try:
            _, seconds = await self._driver.compute(partial(self.timed, partial(self._start_here, index)))
        except Exception as error:  # noqa: BLE001 - the document can be recomputed
            self.misses.append(f"{self._names[index]}: {in_words(error)}")
            self._driver.tell(ev.PrefixFailed(self.number, index, in_words(error)))
            return
        self._driver.tell(ev.PrefixComputed(self.number, index, seconds))

    def _start_here(self, index: int) -> None:
        document = self.documents[index]
        self.check_here()
        opening = opening_of_blob(document.info) if document.info else None
        hidden = states_of(self._engine, document.token_ids or (), document.prefix_layers, opening)
        self.use(index, self.decoding(index, document, hidden))

    async def look(self) -> None:
        """Run the question on the prompt, to measure its attention."""
        attention: tuple[tuple[float, ...], ...] = ()
        seconds = 0.0
        try:
            _, seconds = await self._driver.compute(partial(self.timed, self._look_here))
            attention = self._by_chunk()
        except Exception as error:  # noqa: BLE001 - finer levels then go to all alike
            self.can_look = not isinstance(error, MismatchError)
            self.misses.append(f"the question's attention was not measured: {in_words(error)}")
        self.look_s += seconds
        self._driver.tell(ev.Looked(self.number, attention, seconds))

    def _look_here(self) -> None:
        self.check_here()
        self.seen = self._engine.look(self.prompt.cache, self._question)

    def _by_chunk(self) -> tuple[tuple[float, ...], ...]:
        """The question's attention by chunk, for ``Looked``, weighed by values: sinks draw most of it for nothing."""
        paid = None if self.seen is None else self.seen.influence
        total = 0.0 if paid is None else float(paid[len(self.prompt.opening) :].sum())
        if paid is None or not total > 0:
            return ()
        relative, rows = paid * (sum(self.prompt.tokens) / total), []  # without gaps
        for index in range(len(self._names)):
            document, start = self.documents[index], self.prompt.offset(index)
            spans = map(document.span, range(len(self.inputs[index].tokens)))
            rows.append(tuple(float(relative[start + first : start + stop].mean()) for first, stop in spans))
        return tuple(rows)

    def timed(self, work: Callable[[], object]) -> tuple[float, float]:
        """Start and seconds of work, its work on a GPU included."""
        started = self._driver.clock()
        work()
        self._engine.synchronize()
        return started, self._driver.clock() - started


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """First tokens that two have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(one), len(other)))
