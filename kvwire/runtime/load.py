"""One load, from documents and a deadline to a filled prompt: find, open, plan, execute.

What it fetches and computes, the controller decides (``execute`` carries that out). What follows, from repair to the
answer, is ``closing``'s.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

from kvwire.controller import events as ev
from kvwire.errors import ArgumentError, KvwireError, MismatchError, StorageError
from kvwire.reuse import LinkedPrompt
from kvwire.runtime.document import LEAST_PATIENCE_S, opening_troubles
from kvwire.runtime.execute import Executor
from kvwire.runtime.find import DocumentOpener
from kvwire.runtime.layouts import PlainLayout
from kvwire.runtime.passes import PromptWorker
from kvwire.runtime.repair import RepairContext, begin_repair, by_token
from kvwire.runtime.tasks import all_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from torch import Tensor

    from kvwire.controller import Goal, RepairOption
    from kvwire.engines.base import Engine
    from kvwire.runtime.document import FoundDocument, OpenDocument
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.find import DocumentFinder
    from kvwire.runtime.kept import KeptLookup, RepairKeeper
    from kvwire.runtime.links import LinkPlan, LinkPlanner
    from kvwire.runtime.repair import RepairInOrder
    from kvwire.runtime.request import LoadRequest
    from kvwire.runtime.session import Session
    from kvwire.types import KVCache


@asynccontextmanager
async def loading(
    engine: Engine, session: Session, driver: ControllerDriver, finder: DocumentFinder, planner: LinkPlanner,
    request: LoadRequest,
) -> AsyncIterator[Load]:  # fmt: skip
    """One load, with its prompt filled; whatever it began ends with the context."""
    for anew in (False, True):
        planning = asyncio.create_task(planner.plan(request.timeouts.soon))
        try:
            texts, timeouts = request.texts, request.timeouts
            found = await all_of([finder.find(each, texts, timeouts, anew=anew) for each in request.documents])
        except BaseException:
            planning.cancel()
            raise
        links = await planning
        if links.shift and len(found) > 1:
            planner.begin_shift(links.shift)  # read while chunks are fetched
        async with Load(engine, session, driver, finder, request, found, links) as load:
            if await load.run():
                yield load
                return
    raise StorageError("a document changed again and again while it was looked up; ask again")


class Load:
    """One load of documents that were found; a context manager that stops its running jobs.

    Attributes:
        engine: Runs the model.
        request: What is asked for.
        driver: Drives the controller.
        asked_s: Seconds that finding the documents took.
        work: Its prompt, which exists from ``run`` on.
        jobs: Executes the controller's instructions.
        finish: The controller's last word; its ``front`` counts the prompt's head, too.
        is_finished: Whether the controller has ended the load with all that can be loaded.
        predicted_s: See ``ControllerDriver.predicted_s``.
        links: Its settings for links.
        place: Positions of the documents.
        room: The prompt's cache with free memory for question and answer.
        in_order: Rows repaired during fetches; None without any.
        front_s: Compute time of tokens around documents, in seconds.
    """

    finish: ev.Finish
    room: KVCache

    def __init__(
        self, engine: Engine, session: Session, driver: ControllerDriver, finder: DocumentFinder,
        request: LoadRequest, found: Sequence[FoundDocument], links: LinkPlan,
    ) -> None:  # fmt: skip
        """Take the parts; enter the context to begin."""
        self.asked_s = time.monotonic() - request.started
        timeouts, goal = request.timeouts, request.goal
        if goal.deadline_s is not None:
            timeouts = replace(timeouts, patience=max(timeouts.patience - self.asked_s, LEAST_PATIENCE_S / 2))
            goal = replace(goal, deadline_s=goal.deadline_s - self.asked_s)
        self.request, self.driver, self.layout, self.links = request, driver, request.layout, links
        self._goal, self._patience_s = goal, timeouts.patience
        self.engine, self._session, self._found = engine, session, found
        self.work = PromptWorker(
            engine, [each.document_id for each in found], driver, request.settings.backend,
            request.question if request.looks else (), sees_documents=self.layout.sees_documents,
            sees_head=bool(self.layout.head), shares=len(found) == 1 and type(self.layout) is PlainLayout,
        )  # fmt: skip
        self.jobs = Executor(engine, driver, self.work, self._repair)
        most = request.wanted if request.cuts and request.wanted else None
        self._tokens = [min(each.tokens, most or each.tokens) for each in found]
        self.place = self.layout.place(self._tokens)
        self._opener = DocumentOpener(session, driver, finder, request.settings.fetch, timeouts)
        self._finding_kept: asyncio.Task[KeptLookup | None] | None = None
        self._linked = 0  # position up to which tokens between documents are computed
        self.front_s = 0.0
        self.predicted_s: float | None = None
        self.in_order: RepairInOrder | None = None
        self.is_finished = False

    async def __aenter__(self) -> Self:
        """Begin."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leave the load and stop its jobs, except one running in a thread."""
        self.work.is_gone = True
        self.driver.leave(self.work.number)
        if self._finding_kept:
            self._finding_kept.cancel()
        try:
            await self.jobs.close()
        finally:  # a second cancellation must not leave blobs open
            del self.jobs  # a cycle would keep the prompt until Python collects garbage
            await self._opener.close()

    async def run(self) -> bool:
        """Fill the prompt; False if a document's length is not the one that was found."""
        limits = self.request.partial
        filling = self._fill()
        finish = await (
            limits.wait(filling, self._goal.deadline_s, self.driver.clock, self.work) if limits else filling
        )
        if isinstance(finish, str):
            self.work.misses.append(finish)
            finish = ev.Finish(self.work.number, (), finish)
        if finish is not None:
            self.finish = replace(finish, front=self._front(finish))
        return finish is not None

    def _front(self, finish: ev.Finish) -> int:
        """Number of the prompt's first tokens, head included, that see all before them."""
        head = len(self.layout.opening)  # the controller counts documents' tokens alone
        if not self.layout.head:
            return finish.front + head if finish.front else 0
        computed = 0
        levels = {each.chunk.chunk: each.level for each in finish.decisions if each.chunk.document == 0}
        for chunk, tokens in enumerate(self.work.inputs[0].tokens):  # a fetched one has not seen the system text
            if levels.get(chunk, 0) is not None:
                return head + computed
            computed += tokens
        return head + max(computed, finish.front)

    async def _fill(self) -> ev.Finish | None:
        """Lay out the prompt, open the documents, and execute instructions until the controller ends the load."""
        request, layout, place, count = self.request, self.layout, self.place, len(self._found)
        self.links = layout.plan_links(self.links, place, self.work.misses)
        self._check_fits()
        repair = self._repair_option()
        computed = request.query_tokens + place.front_tokens + len(layout.head)
        self.work.number = self.driver.begin(
            self.jobs,
            lambda number: ev.LoadRequested(
                number, count, computed, self._goal, repair, request.looks, place.link_tokens
            ),
        )
        laid_out = self.jobs.spawn(self._lay_out())
        opening = [self.jobs.spawn(self._open(index, laid_out)) for index in range(count)]
        if repair is not None and request.keeper is not None and layout.keeps_repairs:
            self._finding_kept = asyncio.create_task(self._find_kept(request.keeper, opening))
        finish = await self.jobs.done
        self.is_finished = finish is not None
        return finish

    def _check_fits(self) -> None:
        """Refuse a prompt longer than the model's window."""
        wanted, length = self.request.wanted, self.place.length
        used = length if wanted is None or self.request.cuts else min(length, len(self.layout.opening) + wanted)
        total = used + self.request.query_tokens
        if total > self.engine.window:
            is_more = self.place.front_tokens or self.layout.head
            around = "documents, what is put around them" if is_more else "documents"
            raise ArgumentError(
                f"{around} and question are {total} tokens, the model's window is {self.engine.window}; name fewer "
                "documents or shorten the question"
            )

    def _repair_option(self) -> RepairOption | None:
        """How the controller may repair the prompt; if it may not, the reason is reported or raised."""
        links = self.links
        if len(self._found) == 1 and not (links.option and links.option.whole):
            if not (links.option and links.option.least == 1):
                return None
            links = replace(links, option=replace(links.option, whole=True))  # all rows: those of a prefill
        repair = links.option if links.is_able else None
        spared = links.option is not None and not links.option.least and self._goal.objective != "quality"
        if links.trouble and (links.is_able or not spared):
            self.work.misses.append(links.trouble)
        if repair is None or links.report is None:
            links.check(self.link_warning(0.0))
        return repair

    async def _lay_out(self) -> None:
        """Allocate memory, and compute the prompt's head."""
        total, opening = self.place.length, self.layout.opening
        whole = min(total + self.request.room_tokens, self.engine.window)
        self.room = await self.driver.compute(partial(self.engine.allocate, whole))
        self.work.prompt = LinkedPrompt(
            self._tokens, self.engine.meta, cache=self.room.slice(0, total), starts=self.place.starts, opening=opening
        )
        if self.request.cuts:  # the row behind the prompt is the question's, which comes after all decoding
            self.work.room = self.room.slice(0, total + 1)
        if opening:
            await self.driver.compute(self._compute_head)

    def _compute_head(self) -> None:
        """Compute the prompt's opening tokens and its system text, in the compute thread."""
        began = self.driver.clock()
        (front,) = self.engine.prefill([self.layout.opening])
        self.work.prompt.write_opening(front)
        if self.layout.head:
            self.engine.synchronize()
            self.front_s += self.driver.clock() - began

    # Documents: open them, and tell the controller.

    async def _open(self, index: int, laid_out: asyncio.Task[None]) -> None:
        """Open a document and its variants, and tell the controller what may be loaded of them."""
        opened = await self._opener.open_all(self._found[index])
        if not opened:
            self.jobs.give_up()
            return
        document, *others = opened
        soft, request = self.engine.soft_tokens, self.request
        document = document.with_soft_tokens(soft.name(self.engine.vocabulary_size) if soft else None)
        others = [self._cut(each) for each in others]
        document = self._cut(document)
        await laid_out
        document = self.layout.check(self._decodable(index, document))
        if document.info:
            self.jobs.fetched_at = self.driver.clock()
        begins = self.layout.opening if index == 0 else ()
        self.work.misses += opening_troubles(self.engine, document, begins)
        if document.trouble:
            self.work.misses.append(f"{document.document_id}: {document.trouble}")
        is_pruned = document.decoder is not None and document.decoder.kept is not None
        if is_pruned and document.is_cut:
            msg = f"{document.document_id!r} is pruned, and so loaded whole or not at all: leave first_tokens out"
            raise MismatchError(msg)
        usable = [] if is_pruned else [each for other in others if (each := self._usable(index, other))]
        exact = request.settings.exact
        asked = [
            replace(each, exact=exact or _is_lossless(each, request.goal), wanted_tokens=request.wanted)
            for each in (document, *usable)
        ]
        layers = len(self.engine.meta.layers)
        inputs = tuple(request.plan_input(each, layers) for each in asked)
        self.jobs.variants[index] = list(zip(asked, inputs, strict=True))
        self.work.use(index, asked[0])
        self.work.inputs[index] = inputs[0]
        if trouble := request.quality_trouble(document, inputs):
            self.work.misses.append(f"{document.document_id}: {trouble}")
        self.driver.tell(ev.IndexKnown(self.work.number, index, inputs))
        if self.predicted_s is None:
            self.predicted_s = self.driver.predicted_s(self.work.number)

    def _cut(self, document: OpenDocument) -> OpenDocument:
        """A document of which the prompt has only the first tokens, if it has more than these."""
        wanted = self.request.wanted
        is_cut = self.request.cuts and wanted is not None and wanted < document.tokens
        return replace(document, wanted_tokens=wanted, is_cut=True) if is_cut else document

    def _decodable(self, index: int, document: OpenDocument) -> OpenDocument:
        """A document with its decoder; with its text if its blob cannot be decoded, or not finely enough."""
        if self.request.settings.exact or self.request.has_floor:
            document = document.as_fine_as(self.request.goal.floor)
        if self.request.settings.exact and self.engine.can_recompute:
            document = document.as_exact_as(self.engine.meta.dtype)
        if not document.info or document.prefix_layers or document.fetcher is None:
            return document
        try:
            return self.work.decoding(index, document)
        except KvwireError as error:
            if document.token_ids is None:
                raise
            return document.without_blob(str(error))

    def _usable(self, index: int, variant: OpenDocument) -> OpenDocument | None:
        """A decodable variant; a pruned one is another cache. Its faults are ignored."""
        try:
            variant.plan_input(1)
            if self.request.settings.exact and variant.as_exact_as(self.engine.meta.dtype) is not variant:
                return None
            if not variant.prefix_layers:
                variant = self.work.decoding(index, variant)
        except Exception:  # noqa: BLE001 - whatever it is, there are others
            return None
        return variant if variant.decoder is None or variant.decoder.kept is None else None

    # Facts about the prompt.

    @property
    def due(self) -> float | None:
        """When the first token is due, on ``time.monotonic``; None without a deadline."""
        deadline_s = self.request.goal.deadline_s
        return None if deadline_s is None else self.request.started + deadline_s

    @property
    def bytes(self) -> int:
        """Bytes received over the link, headers included."""
        return self._opener.wire_bytes

    @property
    def documents(self) -> list[OpenDocument]:
        """The documents, once all are open."""
        return [self.work.documents[index] for index in range(len(self._found))]

    @property
    def texts(self) -> list[tuple[int, ...] | None]:
        """Token ids of the documents' tokens in the prompt, as far as known."""
        ids = [document.token_ids for document in self.documents]
        return [each and each[:tokens] for each, tokens in zip(ids, self._tokens, strict=True)]

    def cut(self, tokens: int) -> None:
        """Shorten the load to the first tokens of a single document."""
        prompt, opening = self.work.prompt, self.work.prompt.opening
        if tokens < prompt.tokens[0]:
            room = self.room.slice(0, len(opening) + tokens)
            if prompt.cache.kept is not None:
                room = replace(room, kept=prompt.cache.slice(0, room.tokens).kept)
            self.work.prompt = LinkedPrompt([tokens], self.engine.meta, cache=room, opening=opening)
            self._tokens = [tokens]
            self.finish = replace(self.finish, front=min(self.finish.front, len(opening) + tokens))

    def link_warning(self, share: float, *, shifted: bool = True) -> str:
        """Why linked documents make an answer doubtful; a single one is not linked."""
        if len(self._found) == 1:
            return ""
        infos = [document.info for document in self.work.documents.values()]
        behind = {len(info.neutral_prefix) > info.opening for info in infos if info}
        return self.links.warning(share, shifted=shifted, behind=behind)

    @property
    def repair_context(self) -> RepairContext:
        """Facts about the prompt for its repair."""
        moved = self.deviations if "deviation" in self.links.selector.needs else None
        names = (document.document_id for document in self.documents if document.layout)
        trouble = next((f"anchors of {name!r} stand for tokens that are not there any more" for name in names), "")
        head = len(self.layout.opening) if self.layout.head else 0
        return RepairContext(self.texts, moved, self.work.seen, trouble, self.place.laid_out, head)

    @property
    def deviations(self) -> Tensor | None:
        """How much the prompt's tokens change behind other documents; None if a blob lacks it."""
        infos = [document.info for document in self.documents]
        lengths = zip(infos, self._tokens, strict=True)
        return by_token([(tokens, info.deviation) if info else (0, None) for info, tokens in lengths])

    # Repair.

    async def _find_kept(self, keeper: RepairKeeper, opening: Sequence[asyncio.Task[None]]) -> KeptLookup | None:
        """Read rows of earlier repairs of these documents, while their chunks are fetched."""
        await asyncio.wait(opening)
        if len(self.work.documents) < len(self._found):
            return None  # the load failed, or has ended
        try:
            find = partial(keeper.find, self.documents, self.layout.opening)
            return await self._session.look_up(find, self._patience_s)
        except KvwireError as error:
            return keeper.unread(error)

    async def kept_rows(self, limit_s: float) -> KeptLookup | None:
        """Wait for rows of earlier repairs of these documents."""
        if self._finding_kept is None:
            return None
        await asyncio.wait({self._finding_kept}, timeout=max(0.0, limit_s))
        return self._finding_kept.result() if self._finding_kept.done() else None

    def _repair(self, asked: ev.Repair) -> tuple[int, int, float]:
        """Repair rows in the compute thread; returns how many were computed, how many are left, and the seconds."""
        began, prompt, starts = self.driver.clock(), self.work.prompt, self.place.starts
        self.work.check_here()
        if self.place.link_tokens and starts:
            rows, seconds = self._compute_between(starts[asked.documents])
            return rows, sum(self.place.link_tokens[asked.documents :]), seconds
        if self.in_order is None:
            front = asked.front and asked.front + len(prompt.opening)
            question, context = self.request.question if self.request.looks else (), self.repair_context
            self.in_order = begin_repair(self.engine, self.links, prompt, context, question, asked.share, front)
        stop_at = sum(prompt.lengths[: asked.documents])
        rows = self.in_order.run(stop_at, lambda: self.work.is_gone)
        self.engine.synchronize()
        return rows, self.in_order.left, self.driver.clock() - began

    def complete(self) -> None:
        """Compute what the prompt still lacks before its repair, in the compute thread."""
        if self.place.starts is not None:
            self._compute_between(None)

    def _compute_between(self, stop: int | None) -> tuple[int, float]:
        """Compute tokens between documents, up to a position; returns their number, and the seconds."""
        began = self.driver.clock()
        rows = self.layout.compute(self.work.prompt, self.place, self._linked, stop)
        self.engine.synchronize()
        self._linked, seconds = self.place.length if stop is None else stop, self.driver.clock() - began
        if self.place.laid_out is None:
            self.work.recompute_s += seconds
        else:
            self.front_s += seconds
        return rows, seconds


def _is_lossless(document: OpenDocument, goal: Goal) -> bool:
    """Whether only the document's lossless level is requested, which plans have only by itself."""
    level, levels = goal.floor, document.info.levels if document.info else ()
    return level == goal.ceiling and level < len(levels) and levels[level].lossless
