"""Loading: documents and a deadline to a linked prompt and the first token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from kvwire import controller as ctl
from kvwire.calibrate import measure_costs
from kvwire.codec import uses_triton
from kvwire.errors import ArgumentError, CorruptError, NotFoundError, StorageError
from kvwire.executor import Executor, Source
from kvwire.transport import EmulatedLink, FetchSettings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile, Backend
    from kvwire.corpus import Corpus
    from kvwire.engines.transformers import TransformersEngine
    from kvwire.reuse import LinkedPrompt
    from kvwire.transport import LinkSample, LinkSettings
    from kvwire.types import Decision


_OPEN_SHARE = 0.25
"""Share of a deadline that a head may take where the document's text is known: recomputing needs the rest."""
_OPEN_LEAST_S = 0.1
_LEARNING = 0.5
"""Weight of the latest load in what the closing costs."""


@dataclass(frozen=True)
class LoadSettings:
    """How prompts are loaded.

    quality_floor: the lowest level that may be used where there is a choice. bandwidth_prior: bytes per second assumed
    before anything was measured. ttfb_prior_s: likewise for the time to first byte. max_in_flight: chunks fetched at
    once. open_s: longest wait for a blob's head where the document's text is given. fetch: the fetcher's settings.
    backend: which kernels decode. compute_workers: 2 to decode beside forward passes, 1 to take turns; None: 2 where a
    GPU does both, since decoding has queues of its own there.
    """

    quality_floor: int = 0
    bandwidth_prior: float = 12.5e6
    ttfb_prior_s: float = 0.02
    max_in_flight: int = 8
    open_s: float = 5.0
    fetch: FetchSettings = field(default_factory=lambda: FetchSettings(concurrency=8, retries=2))
    backend: Backend = "auto"
    compute_workers: Literal[1, 2] | None = None


@dataclass(frozen=True)
class Timing:
    """Where the time to the first token went, in seconds.

    ttft_s: from the call to the first token, catalog lookups included. fetch_s: until the last byte that was used
    arrived. decode_s, recompute_s: compute spent on chunks, in part while fetching. link_s: making the engine's cache.
    query_s: the question's forward pass. The parts overlap, so they add up to more than ttft_s.
    """

    ttft_s: float
    fetch_s: float
    decode_s: float
    recompute_s: float
    link_s: float
    query_s: float


@dataclass(frozen=True, eq=False)
class Answer:
    """The first token and how it came about.

    logits: of the question's last token, float32 ``[vocabulary]``. prompt: the linked cache of all documents.
    misses: what went wrong on the way and was healed by recomputing, in words. bytes: fetched, heads included.
    """

    first_token: int
    logits: Tensor
    tokens: tuple[int, ...]
    text: str
    prompt: LinkedPrompt
    decisions: tuple[Decision, ...]
    reason: str
    timing: Timing
    bytes: int
    misses: tuple[str, ...]


class Loader:
    """Answers questions over documents of a corpus.

    costs: measured on this engine when left out, which takes a second or two. link: an emulated link in front of the
    store. Estimates of the link and corrections of the costs live on from load to load.
    """

    def __init__(
        self,
        engine: TransformersEngine,
        corpus: Corpus,
        *,
        costs: ctl.CostModel | None = None,
        link: LinkSettings | None = None,
        settings: LoadSettings | None = None,
    ) -> None:
        """Measure costs where none are given; reads the profile in use, writes nothing."""
        self._engine = engine
        self._corpus = corpus
        self._settings = settings or LoadSettings()
        self._link = link
        self.costs = costs or measure_costs(engine, _profile_in_use(corpus), self._settings.backend)
        self._bandwidth = ctl.BandwidthEstimator(self._settings.bandwidth_prior)
        self._ttfb = ctl.TtfbEstimator(self._settings.ttfb_prior_s)
        self._correction = ctl.CostCorrection()
        beside = uses_triton(self._settings.backend, engine.device) and engine.device.type != "cpu"
        self._workers = self._settings.compute_workers or (2 if beside else 1)

    def ask(
        self,
        documents: Sequence[str],
        question: Sequence[int],
        *,
        deadline_s: float | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """Link the documents' caches, run the question, and return the answer.

        documents: ids in the order of the prompt. question: token ids. deadline_s: until the first token, from now;
        None: the soonest first token. tokens: length of the answer at most. texts: token ids of documents, for those
        whose blob is lost; blobs that can be read carry their own.
        Raises NotFoundError for a document that is neither in the store nor in ``texts``, ArgumentError where the
        prompt does not fit the model's window.
        """
        return asyncio.run(self.ask_async(documents, question, deadline_s=deadline_s, tokens=tokens, texts=texts))

    async def ask_async(
        self,
        documents: Sequence[str],
        question: Sequence[int],
        *,
        deadline_s: float | None = None,
        tokens: int = 1,
        texts: Mapping[str, Sequence[int]] | None = None,
    ) -> Answer:
        """``ask`` for callers with an event loop of their own."""
        if not documents or not question:
            msg = "a prompt needs at least one document and a question of at least one token"
            raise ArgumentError(msg)
        started = time.monotonic()
        looked_up = (asyncio.to_thread(self._source, document_id, texts or {}) for document_id in documents)
        sources = await asyncio.gather(*looked_up)
        link = EmulatedLink.of(self._link) if self._link else None
        async with Executor(
            self._engine, self._corpus, sources, link=link, fetch=self._settings.fetch, backend=self._settings.backend
        ) as executor:
            return await self._answer(executor, list(question), started, deadline_s, tokens)

    async def _answer(
        self, executor: Executor, question: list[int], started: float, deadline_s: float | None, tokens: int
    ) -> Answer:
        clock = executor.clock
        longest = self._settings.open_s
        soon = longest if deadline_s is None else min(longest, max(_OPEN_SHARE * deadline_s, _OPEN_LEAST_S))
        inputs = await executor.open(len(question), limit_s=soon)
        for sample in executor.samples():
            self._observe(sample)
        left = None if deadline_s is None else deadline_s - (clock() - started)
        finish = await executor.drive(self.session(inputs, len(question)), left)
        linking = clock()
        prompt, start = executor.prompt.cache, executor.prompt.cache.tokens
        past = await executor.compute(partial(self._engine.past_key_values, prompt))
        querying = clock()
        logits = (await executor.compute(partial(self._engine.forward, past, question, start, logits=1)))[-1].float()
        first = int(logits.argmax())
        done = clock()
        timing = Timing(
            ttft_s=done - started,
            fetch_s=max(0.0, executor.fetched_at - started),
            decode_s=executor.decode_s,
            recompute_s=executor.recompute_s,
            link_s=querying - linking,
            query_s=done - querying,
        )
        self._learn_closing(done - linking, start, len(question))
        out = await executor.compute(partial(self._engine.generate, past, first, start + len(question), tokens))
        text = self._engine.detokenize(out) if self._engine.has_tokenizer else ""
        facts = (finish.decisions, finish.reason, timing, executor.bytes, tuple(executor.misses))
        return Answer(first, logits.cpu(), tuple(out), text, executor.prompt, *facts)

    def _source(self, document_id: str, texts: Mapping[str, Sequence[int]]) -> Source:
        """What the catalog knows of a document, its profile included."""
        known = texts.get(document_id)
        text = None if known is None else tuple(known)
        try:
            entry = self._corpus.find(document_id)
        except (NotFoundError, CorruptError, StorageError) as error:
            if text is None:
                raise
            return Source(document_id, None, None, text, str(error))
        self._corpus.count_use(document_id)
        if entry.is_text:
            return Source(document_id, None, None, text or self._corpus.text(entry))
        try:
            profile = self._corpus.profile(entry.profile_digest) if entry.profile_digest else None
        except (NotFoundError, CorruptError, StorageError) as error:
            return Source(document_id, entry, None, text, str(error))
        return Source(document_id, entry, profile, text)

    def _observe(self, sample: LinkSample) -> None:
        """Learn from the head requests, which came before there was a session."""
        if sample.first_byte_s is not None:
            self._ttfb.add(sample.first_byte_s)
        if sample.timed_bytes:
            self._bandwidth.add(sample.timed_bytes, sample.started, sample.ended)

    def _learn_closing(self, measured_s: float, prompt_tokens: int, query_tokens: int) -> None:
        """Move the cost of handing the cache over half-way to what it was this time, so that deadlines allow for it."""
        missing_s = measured_s - replace(self.costs, query_tokens=query_tokens).closing_s(prompt_tokens)
        link_s = max(0.0, self.costs.link_s_per_token + _LEARNING * missing_s / prompt_tokens)
        self.costs = replace(self.costs, link_s_per_token=link_s)

    def session(self, documents: Sequence[ctl.DocumentPlanInput], query_tokens: int) -> ctl.LoadSession:
        """A controller session with the estimates so far."""
        costs = replace(self.costs, query_tokens=query_tokens)
        settings = ctl.SessionSettings(
            quality_floor=self._settings.quality_floor,
            max_in_flight=self._settings.max_in_flight,
            compute_workers=self._workers,
        )
        return ctl.LoadSession(
            documents, costs, settings, bandwidth=self._bandwidth, ttfb=self._ttfb, correction=self._correction
        )


def _profile_in_use(corpus: Corpus) -> AnyProfile | None:
    """The corpus's profile, or None where it cannot be read: loads then go without it, and say so."""
    try:
        return corpus.profile()
    except (NotFoundError, CorruptError, StorageError):
        return None
