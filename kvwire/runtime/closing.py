"""From the last chunk to the answer: repair, the question's pass, generation, and saving of repaired rows."""

from __future__ import annotations

import time
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvwire.controller import events as ev
from kvwire.runtime.answer import Answer, Timing, with_expected_kl
from kvwire.runtime.repair import RepairContext, repair_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from kvwire.controller import Estimates
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkShift, Repaired
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.driver import ControllerDriver
    from kvwire.runtime.kept import KeptLookup, RepairKeeper
    from kvwire.runtime.links import LinkPlanner
    from kvwire.runtime.load import Load
    from kvwire.runtime.session import Session
    from kvwire.runtime.settings import LoadSettings
    from kvwire.types import Decision

_KEEPING_S = 60.0
_KEPT_SHARE = 0.25
"""Share of the remaining time to wait for rows of an earlier repair."""
_BOS = (
    "the question begins with a BOS, which the tokenizer puts in front of whole texts: the prompt has one at its head, "
    "and this one stands behind documents; make the question's token ids with engine.tokenize(text, place='last'), or "
    "with add_special_tokens=False"
)


@dataclass(frozen=True, eq=False)
class Closing:
    """Result of closing. done: instant of the first token.

    beyond_s: total time without repair and the expected pass. trouble: why nothing was repaired. shifted: tokens that
    got the mean shift. kept: rows of an earlier repair. is_edited: whether the prompt was made of donors. rows: how
    many each pass of an edited prompt computed inside of it, in ``rows_s`` together.
    """

    past: Any
    logits: Tensor
    link_s: float
    query_s: float
    done: float
    beyond_s: float
    repair_s: float
    repaired: Repaired | None
    trouble: str
    shifted: int
    kept: KeptLookup | None = None
    is_edited: bool = False
    rows: tuple[int, ...] = ()
    rows_s: float = 0.0


class AnswerStage:
    """Answers questions on complete prompts, for one loader.

    Attributes:
        keeper: Stores repaired rows; None: they are not stored.
    """

    def __init__(
        self, engine: Engine, corpus: Corpus, session: Session, settings: LoadSettings,
        estimates: Estimates, planner: LinkPlanner,
    ) -> None:  # fmt: skip
        """Take the parts."""
        self._engine, self._session, self._settings = engine, session, settings
        self._estimates, self._planner = estimates, planner
        self.keeper = self._new_keeper(corpus) if settings.keep_repairs else None
        self._keeping: Future[int] | None = None

    def wait(self) -> None:
        """Wait until repaired rows are stored."""
        if self._keeping is not None:
            with suppress(TimeoutError, CancelledError):
                self._keeping.result(_KEEPING_S)

    async def close(self, load: Load) -> Closing:
        """Repair the prompt if wanted, and run the question."""
        found, shift = await self._kept_rows(load), await self._shift(load)
        return await load.driver.compute(partial(self._close, load, found, shift))

    async def answer(
        self, load: Load, closing: Closing, tokens: int, stop: frozenset[int] = frozenset(), *, is_prompt: bool = False
    ) -> Answer:
        """Generate behind the question. is_prompt: what was asked may be most of the prompt."""
        driver, finish, question, misses = load.driver, load.finish, load.request.question, load.work.misses
        if load.is_finished:
            driver.tell(_assembled(load, closing, is_prompt=is_prompt))
        misses += [closing.trouble] if closing.trouble else []
        opening = self._engine.opening_tokens
        if opening and tuple(question[: len(opening)]) == opening:
            misses.append(_BOS)
        timing, tokens_before = _timing(load, closing), load.work.prompt.cache.tokens
        warning = load.link_warning(_share(closing.repaired, finish, tokens_before), shifted=closing.shifted > 0)
        load.links.check(warning)
        first = int(closing.logits.argmax())
        out = await self._generate(driver, closing.past, first, tokens_before + len(question), tokens, stop)
        said = out[:-1] if out[-1] in stop else out
        text = ""
        if self._engine.has_tokenizer:
            text = await driver.compute(partial(self._engine.detokenize, said, special=False))
        if not closing.is_edited:
            self._keep(load, closing)
        predicted_s, front_tokens = load.predicted_s, load.place.front_tokens
        answer = Answer(
            first, closing.logits.cpu(), tuple(out), text, load.work.prompt, finish.decisions,
            load.request.goal.verdict(timing.ttft_s), timing, load.bytes, tuple(misses),
            None if predicted_s is None else load.asked_s + predicted_s, _error(load, finish.decisions),
            closing.repaired, warning, 0 if front_tokens else finish.front, front_tokens + len(load.layout.head),
            closing.shifted,
        )  # fmt: skip
        return answer if closing.is_edited else with_expected_kl(answer, load.documents)

    def _new_keeper(self, corpus: Corpus) -> RepairKeeper:
        from kvwire.runtime.kept import RepairKeeper

        view = self._session.view(corpus.catalog.store)
        return RepairKeeper(corpus, view, self._settings.kept_bytes, self._engine.opening_tokens)

    def _limit_s(self, load: Load) -> float:
        """Longest wait for what was stored for the prompt."""
        return self._settings.open_s if load.due is None else _KEPT_SHARE * (load.due - time.monotonic())

    async def _kept_rows(self, load: Load) -> KeptLookup | None:
        """Stored rows of earlier repairs of this prompt, if rows are to be repaired and these are usable."""
        if not load.finish.repair or load.work.prompt.cache.kept is not None:
            return None
        found = await load.kept_rows(self._limit_s(load))
        if found is None or found.kept is None:
            load.work.misses += [found.trouble] if found and found.trouble else []
            return found
        return found if found.kept.suits(load.documents, load.finish.decisions) else None

    async def _shift(self, load: Load) -> LinkShift | None:
        """The mean shift, if the prompt is linked like those it was learnt on, and not computed whole."""
        if not load.links.shift or not _takes_shift(load) or load.finish.repair >= 1:
            return None
        found = await self._planner.shift(self._limit_s(load))
        if isinstance(found, str):
            load.work.misses.append(found)
            return None
        return found

    def _keep(self, load: Load, closing: Closing) -> None:
        """Store a prompt's repaired rows in a thread; skipped while an earlier load's are being stored."""
        if load.place.laid_out is not None:
            return  # such rows saw more than documents
        if self.keeper is None or closing.repaired is None or not (self._keeping is None or self._keeping.done()):
            return
        from kvwire.runtime.kept import gathered

        opening = self._engine.opening_tokens
        made = gathered(load.work.prompt, load.documents, closing.repaired, closing.kept, load.finish, opening)
        if made is not None:
            self._keeping = self._session.threads.blocking.submit(self.keeper.keep, made)

    def _close(self, load: Load, found: KeptLookup | None, shift: LinkShift | None) -> Closing:
        """Shift and repair the prompt, hand it to the engine and run the question, in the compute thread."""
        load.complete()
        question, finish, due = list(load.request.question), load.finish, load.due
        shifting, prompt, share = time.monotonic(), load.work.prompt, finish.repair
        shifted = shift.apply(prompt.cache, prompt.lengths, load.work.seeing) if shift else 0
        began = time.monotonic()
        told = load.repair_context if share > 0 else RepairContext(load.texts, None, load.work.seen)
        with self._session.lock:
            expected_s = self._estimates.prefill.cost.seconds(len(question), prompt.cache.tokens)
        stop = None if due is None else lambda: time.monotonic() + expected_s > due
        early = load.in_order
        restore: Callable[[], Tensor] | None = early.computed if early else None
        if found and found.kept:
            restore = partial(found.kept.write, prompt, finish.front)
        repaired, trouble = repair_rows(
            self._engine, load.links, prompt, told, question, share, finish.front, stop=stop, restore=restore
        )
        if early:
            repaired = early.joined(repaired, load.links.selector, share)
        linking = time.monotonic()
        tokens = prompt.cache.tokens
        past = self._engine.growing_past(prompt.cache, load.room)
        querying = time.monotonic()
        logits = self._engine.forward(past, question, tokens, logits=1)[-1].float().cpu()
        done = time.monotonic()
        return Closing(
            past, logits, querying - linking + began - shifting, done - querying, done,
            done - linking - expected_s + began - shifting, linking - began if repaired else 0.0, repaired, trouble,
            shifted, found,
        )  # fmt: skip

    async def _generate(
        self, driver: ControllerDriver, past: Any, first: int, start: int, tokens: int, stop: frozenset[int]  # noqa: ANN401
    ) -> list[int]:  # fmt: skip
        """Greedy continuation token by token, so that other loads get turns in between."""
        out = [first]
        while len(out) < tokens and out[-1] not in stop:
            step = partial(self._engine.generate, past, out[-1], start + len(out) - 1, 2)
            more = (await driver.compute(step))[1:]
            if not more:
                break
            out += more
        return out


def _assembled(load: Load, closing: Closing, *, is_prompt: bool) -> ev.PromptAssembled:
    """What the controller is told of a closing, to learn from. is_prompt: see ``AnswerStage.answer``."""
    is_short = closing.repaired and (closing.repaired.is_cut or closing.repaired.kept)  # excluded from estimates
    there = load.work.prompt.cache.tokens
    told = ev.PromptAssembled(load.work.number, there, closing.beyond_s, 0.0 if is_short else closing.repair_s)
    if is_prompt:
        told = replace(told, seconds=closing.link_s, passes=((len(load.request.question), there, closing.query_s),))
    return replace(told, repair_s=closing.rows_s, rows=closing.rows) if closing.rows else told


def _timing(load: Load, closing: Closing) -> Timing:
    started, work = load.request.started, load.work
    return Timing(
        ttft_s=closing.done - started, fetch_s=max(0.0, load.jobs.fetched_at - started), decode_s=work.decode_s,
        recompute_s=work.recompute_s, link_s=closing.link_s, query_s=closing.query_s,
        repair_s=closing.repair_s + (load.in_order.seconds if load.in_order else 0.0), look_s=work.look_s,
        front_s=load.front_s,
    )  # fmt: skip


def _share(repaired: Repaired | None, finish: ev.Finish, tokens: int) -> float:
    """Share of the prompt's rows that were repaired; 1 if the whole prompt was computed in sequence."""
    if finish.front >= tokens:
        return 1.0
    if repaired is None or not repaired.is_cut:
        return finish.repair if repaired else 0.0
    return 0.0  # costs measured for a whole share do not apply to its beginning


def _error(load: Load, decisions: Sequence[Decision]) -> float:
    """Mean over tokens of the chunks' final errors."""
    total, tokens = 0.0, 0
    for decision in decisions:
        given, chunk = load.work.inputs[decision.chunk.document], decision.chunk.chunk
        total += given.tokens[chunk] * given.error(chunk, decision.level)
        tokens += given.tokens[chunk]
    return total / max(tokens, 1)


def _takes_shift(load: Load) -> bool:
    """Whether the prompt is like those of the mean shift: whole documents, each computed alone."""
    infos, opening = [document.info for document in load.documents], load.engine.opening_tokens
    is_whole = not load.request.cuts and load.place.starts is None and load.work.prompt.cache.kept is None
    alone = all(info is None or (info.neutral_prefix == opening and not info.soft_tokens) for info in infos)
    return is_whole and alone and len(infos) > 1
