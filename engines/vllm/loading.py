"""Loading without a model: what of a prompt's documents arrives in time; the rest is for whoever asked to compute."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any

from kvwire.codec import Profile
from kvwire.codec.prediction.text import expect_all
from kvwire.controller import CostModel, DecodeCost
from kvwire.controller import events as ev
from kvwire.engines.weightless import WeightlessEngine
from kvwire.errors import ArgumentError, KvwireError
from kvwire.runtime.costs import warm_up_decoding
from kvwire.runtime.document import in_words
from kvwire.runtime.find import profile_in_use
from kvwire.runtime.kept import KeptLookup, RepairKeeper
from kvwire.runtime.layouts import PlainLayout
from kvwire.runtime.loader import Loader
from kvwire.runtime.passes import NO_ENGINE, PromptWorker
from kvwire.runtime.request import LoadRequest, PartialLoad
from kvwire.runtime.settings import LoadSettings
from kvwire.store.prefix.index import opening_of
from kvwire.types import ChunkId, Decision

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvwire.controller import Goal
    from kvwire.runtime.corpus import Corpus
    from kvwire.store import KeptRepair
    from kvwire.types import KVCache

_BASE_S, _ELEMENT_S, _BYTE_S = 1e-3, 7e-9, 2.5e-7
"""Decoding on one core before any was measured: of a batch, of an element of a token's cache, and of a byte."""


def without_weights(corpus: Corpus, dtype: torch.dtype) -> WeightlessEngine:
    """Stands in for the model that vLLM runs."""
    refusal = ArgumentError("there are no weights here to compute with; open the model with kvwire.open_engine")
    digest = corpus.model_config_digest
    return WeightlessEngine(corpus.meta, corpus.window, dtype, refusal, model_config_digest=digest)


@dataclass(frozen=True)
class Loaded:
    """What of a prompt is there."""

    cache: KVCache | None  # all documents, linked at positions from 0; None where nothing could be laid out
    tokens: int  # of the prompt's front, up to the first that is missing
    level: int = -1  # the lowest level of any chunk of these; -1 where there is none
    bytes: int = 0  # received over the link, kept rows among them
    troubles: tuple[str, ...] = ()  # what went wrong, in words


class PageLoader(Loader):
    """Loads documents' linked caches for an engine that is not here. Any number of threads may call it."""

    def __init__(
        self,
        corpus: Corpus,
        dtype: torch.dtype,
        *,
        settings: LoadSettings | None = None,
        **options: Any,  # noqa: ANN401 - a Loader's
    ) -> None:
        """Begin nothing yet."""
        elements = sum(spec.key_width + spec.value_width for spec in corpus.meta.layers)
        decode = DecodeCost(_BASE_S, _ELEMENT_S * elements, _BYTE_S)
        chosen, costs = replace(settings or LoadSettings(), repair="none"), CostModel(NO_ENGINE, decode)
        if chosen.layout or chosen.system:
            raise ArgumentError(
                "without a model no link tokens and no system text are computed: leave layout and system out of the "
                "settings, or open the model with kvwire.open_engine and load with kvwire.Loader"
            )
        super().__init__(without_weights(corpus, dtype), corpus, costs=costs, settings=chosen, **options)
        self._kept = RepairKeeper(corpus, self._session.view(corpus.catalog.store), chosen.kept_bytes)
        # Silence is waited out: nothing here can be computed meanwhile.
        self._runner.controls = replace(self._runner.controls, stall_s=chosen.patience_s)
        self._has_profile = False
        self.token_s = 0.0  # what computing a token costs the model, once that is known
        self.is_whole = False  # a load of which a part is missing is worth nothing
        self._runner.warming.begin(self._get_ready())

    def load(
        self,
        documents: Sequence[str],
        texts: Sequence[Sequence[int]],
        goal: Goal,
        least: int | None = None,
        wanted: int | None = None,
        kept: KeptRepair | None = None,
        front: int = 0,
    ) -> Loaded:
        """Load documents, as far as they come in time; kept rows are of those behind the first ``front``."""
        known = dict(zip(documents, texts, strict=True))
        total, limit_s = min(sum(map(len, texts)), wanted or 1 << 40), self._settings.patience_s

        def grace_s(work: PromptWorker) -> float:
            return self.token_s * (total - (0 if self.is_whole else _loaded_front(work, len(documents), least)[0]))

        worth_s = None if goal.deadline_s is None else goal.deadline_s + self.token_s * total
        request = LoadRequest(
            documents=list(documents), texts=known, layout=PlainLayout(self._engine), settings=self._settings,
            goal=goal, timeouts=self._runner.timeouts(worth_s), started=time.monotonic(), wanted=wanted,
            partial=PartialLoad(limit_s=limit_s, grace_s=grace_s),
        )  # fmt: skip
        return self._session.run(self._load_front(list(documents), known, request, least, kept, front))

    async def _load_front(
        self, documents: list[str], texts: dict[str, Sequence[int]], request: LoadRequest, least: int | None,
        kept: KeptRepair | None, front: int,
    ) -> Loaded:  # fmt: skip
        deadline_s = request.goal.deadline_s
        until = None if deadline_s is None else time.monotonic() + deadline_s
        reading = asyncio.create_task(self._read_kept(kept, [texts[name] for name in documents], front))
        reading.add_done_callback(lambda task: task.cancelled() or task.exception())
        with self._runner.warming.paused():
            async with self._runner.load(request) as load:
                work = load.work
                await asyncio.to_thread(work.leave)
                tokens, level = _loaded_front(work, len(documents), least)
                if not (tokens or self._has_profile):  # one that takes longer than a deadline is read beside the loads
                    self._runner.warming.begin(self._get_profile())
                if load.is_finished:
                    done = ev.PromptAssembled(work.number, tokens, 0.0) if tokens else ev.LoadAbandoned(work.number)
                    load.driver.tell(done)
                rows_bytes = 0
                if kept is not None:
                    found = await self._in_time(reading, until)
                    rows_bytes = sum(part.size for part in kept.parts) if found.kept else 0
                    if trouble := _apply_repair(work, documents, found, front):
                        tokens = min(tokens, sum(len(texts[name]) for name in documents[: front + 1]))
                        work.misses.append(trouble)
                received = load.bytes + rows_bytes
                self._runner.remember(load)
                prompt = getattr(work, "prompt", None)
                if prompt is None or prompt.cache.kept is not None:  # pruned caches have holes, which pages cannot have
                    return Loaded(None, 0, -1, received, tuple(work.misses))
                return Loaded(prompt.cache, tokens, level, received, tuple(work.misses))

    def _get_ready(self) -> Iterator[None]:
        """Do what the first load would wait for, and a short deadline would never see the end of."""
        warm_up_decoding(self._engine)
        yield
        yield from self._get_profile()

    def _get_profile(self) -> Iterator[None]:
        profile, _ = profile_in_use(self._corpus, self._runner.read_level)
        yield
        if isinstance(profile, Profile):
            yield from expect_all(profile)
        self._has_profile = profile is not None

    @staticmethod
    async def _in_time(reading: asyncio.Task[KeptLookup], until: float | None) -> KeptLookup:
        """Repaired rows, as far as they come before the request's deadline; a single look where that is over."""
        left_s = None if until is None else max(0.0, until - time.monotonic())
        await asyncio.wait({reading}, timeout=left_s)
        return reading.result() if reading.done() else KeptLookup(None, "its repaired rows came too late")

    async def _read_kept(self, kept: KeptRepair | None, texts: Sequence[Sequence[int]], front: int) -> KeptLookup:
        """Repaired rows, read beside the documents."""
        if kept is None:
            return KeptLookup()
        head = tuple(token for text in texts[:front] for token in text)
        read = partial(self._kept.read, kept, [len(text) for text in texts[front:]], head)
        try:
            return KeptLookup(await self._session.look_up(read, self._settings.patience_s))
        except KvwireError as error:
            return KeptLookup(None, in_words(error))


def _loaded_front(work: PromptWorker, documents: int, least: int | None) -> tuple[int, int]:
    """How far a prompt is filled from its beginning, and the lowest level of that."""
    tokens, lowest = 0, inf
    for index in range(documents):
        document = work.documents.get(index)
        if document is None or document.info is None:
            break
        needed = min(least or 0, len(document.info.levels) - 1)
        for chunk in range(document.wanted_chunks):
            level = work.levels.get(ChunkId(index, chunk, work.number), -1)
            if level < needed:
                return tokens, int(lowest) if lowest < inf else -1
            is_exact = document.info.levels[level].lossless and level == 0  # what stands before documents has no other
            lowest = lowest if is_exact else min(lowest, level)
            start, stop = document.span(chunk)
            tokens += stop - start
    return tokens, int(lowest) if lowest < inf else -1


def _apply_repair(work: PromptWorker, names: Sequence[str], found: KeptLookup, front: int) -> str:
    """Write rows into a prompt that an earlier load repaired and kept; returns why not, in words."""
    documents = [each for _, each in sorted(work.documents.items()) if each.info is not None]
    decisions = [
        Decision(ChunkId(chunk.document - front, chunk.chunk, chunk.load), "fetch", level)
        for chunk, level in work.levels.items() if chunk.document >= front
    ]  # fmt: skip
    if found.kept is None:
        return f"a kept repair could not be read: {found.trouble}"
    behind = documents[front:]
    opening = next((opening_of(each.info) for each in behind if each.info is not None), ()) if front else ()
    kept = replace(found.kept, opening=opening)
    if len(documents) < len(names) or not kept.suits(behind, decisions):
        return "a kept repair is of other documents than those that came"
    found.kept.write(work.prompt)
    return ""
