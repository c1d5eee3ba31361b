"""A prompt made of similar ones: donors' chunks are loaded, their rows moved into place, and holes computed.

Chunks that do not come, or not before computing the prompt would have ended, leave holes: the answer is never lost.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from kvwire.errors import ArgumentError, MismatchError
from kvwire.reuse import LinkedPrompt, RepairInput, compute_holes, place_spans, repair_prompt, selector_of
from kvwire.reuse.edits.place import BLOCK_ROWS
from kvwire.runtime.answer import Reuse, level_kl
from kvwire.runtime.closing import Closing
from kvwire.types import ChunkId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvwire.controller import Estimates
    from kvwire.engines.base import Engine
    from kvwire.reuse import Repaired
    from kvwire.runtime.answer import Answer
    from kvwire.runtime.document import FoundDocument
    from kvwire.runtime.load import Load
    from kvwire.runtime.prompt_request import Begun
    from kvwire.runtime.similar import EditPlan

_ALL = 1.0


class Editing:
    """One prompt that is made of donors.

    Attributes:
        rest: Token ids of what is asked last.
    """

    def __init__(self, engine: Engine, begun: Begun, plan: EditPlan, room: int) -> None:
        """Compare once more all that is reused, token by token. room: tokens of an answer to have memory for."""
        self._engine, self._begun, self._plan, self._room = engine, begun, plan, room
        self._text, self.rest = begun.text[: plan.script.tokens], begun.text[plan.script.tokens :]
        plan.script.check([donor.token_ids for donor in plan.donors], self._text)
        self._script = plan.script  # what becomes of it
        self._repaired = 0  # rows computed anew beside holes
        self._kl: float | None = 0.0  # expected of the donors' levels, the mean over the prompt's tokens

    def found(self, documents: Sequence[FoundDocument]) -> list[FoundDocument]:
        """Donors, of which no more is loaded than what spans touch."""
        ranges = self._plan.script.ranges
        return [replace(each, ranges=ranges(number)) for number, each in enumerate(documents)]

    @property
    def computed(self) -> int:
        """Tokens that are computed behind the last chunk."""
        return self._plan.script.computed + self._plan.repaired + len(self.rest)

    def close(self, load: Load, estimates: Estimates) -> Closing:
        """Make the prompt, and run what is asked last; in the compute thread."""
        began, engine, opening = time.monotonic(), self._engine, self._engine.opening_tokens
        load.work.leave()
        load.work.exact = 0  # from here on, its prompt is not the donor
        self._script = self._plan.script.without(self._lost(load))
        total = len(opening) + len(self._text)
        whole = engine.allocate(min(total + len(self.rest) + self._room, engine.window))
        prompt = LinkedPrompt([len(self._text)], engine.meta, cache=whole.slice(0, total), opening=opening)
        if opening:
            prompt.write_opening(engine.prefill([opening])[0])
        donors = (
            [load.work.prompt.document(number) for number in range(len(self._plan.donors))]
            if self._script.spans
            else []
        )
        rows = place_spans(prompt, donors, self._script)
        computing = time.monotonic()
        compute_holes(engine, prompt, (*opening, *self._text), rows)
        expected_s = estimates.costs().prefill.seconds(len(self.rest), total)
        repaired, trouble = self._repair(prompt, None if load.due is None else load.due - expected_s)
        engine.synchronize()
        linking = time.monotonic()
        load.work.prompt, load.room = prompt, whole
        past = engine.growing_past(prompt.cache, whole)
        querying = time.monotonic()
        logits = engine.forward(past, self.rest, total, logits=1)[-1].float().cpu()
        done = time.monotonic()
        repair_s = repaired.select_s + repaired.compute_s if repaired else 0.0
        holes_s = linking - computing - repair_s
        load.work.recompute_s += holes_s
        placed_s = querying - linking + computing - began
        passes = [min(BLOCK_ROWS, len(rows) - start) for start in range(0, len(rows), BLOCK_ROWS)]
        if repaired and repaired.is_plain and len(repaired.rows):
            passes.append(len(repaired.rows))
            holes_s += repaired.compute_s
        return Closing(
            past, logits, placed_s, done - querying, done, placed_s, repair_s, repaired, trouble, 0, is_edited=True,
            rows=tuple(passes), rows_s=holes_s,
        )  # fmt: skip

    def _lost(self, load: Load) -> list[tuple[int, int, int]]:
        """Tokens of donors that are not there; what is there adds to the expected divergence."""
        work, lost, total = load.work, list[tuple[int, int, int]](), len(self._text) + len(self.rest)
        for number, donor in enumerate(self._plan.donors):
            document = work.documents.get(number)
            if document is None or document.info is None:
                lost.append((number, 0, len(donor.token_ids)))
                continue
            least = min(max(self._begun.request.goal.floor, work.inputs[number].floor), len(document.info.levels) - 1)
            for chunk, (start, stop) in enumerate(document.spans):
                level = work.levels.get(ChunkId(number, chunk, work.number))
                if level is None or level < least:
                    lost.append((number, start, stop))
                    continue
                used = sum(
                    min(b, stop) - max(a, start) for a, b in self._script.ranges(number) if a < stop and start < b
                )
                kl = level_kl(document.info, level)
                self._kl = None if kl is None or self._kl is None else self._kl + kl * used / total
        return lost

    def _repair(self, prompt: LinkedPrompt, until: float | None) -> tuple[Repaired | None, str]:
        """Compute a share of the rows anew that stand behind foreign ones; why not, where that cannot be."""
        plan, head = self._plan, len(prompt.opening)
        front, total = max(1, head + self._script.front), prompt.cache.tokens
        if not plan.share or front >= total:
            return None, ""
        ids = (*prompt.opening, *self._text)
        given = RepairInput(self._engine, prompt.cache, ids, (front, total - front), self.rest)
        stop = None if until is None else lambda: time.monotonic() > until
        try:
            made = repair_prompt(given, selector_of("all" if plan.share >= _ALL else plan.selector), plan.share, stop)
        except (ArgumentError, MismatchError) as error:
            return None, f"rows behind edits were not computed anew: {error}"
        self._repaired = len(made.rows)
        return made, ""

    def told(self, answer: Answer) -> Answer:
        """The answer, with what the prompt was made of."""
        script, plan, begun = self._script, self._plan, self._begun
        used = [sum(stop - start for start, stop in script.ranges(number)) for number in range(len(plan.donors))]
        donors = tuple((each.document.document_id, n) for each, n in zip(plan.donors, used, strict=True) if n)
        total = answer.prompt.cache.tokens + len(self.rest)
        reuse = Reuse("", script.reused, total - script.reused, "", donors, script.computed, self._repaired, plan.error)
        kl = None if self._kl is None or plan.error is None else self._kl + plan.error
        misses = [*answer.misses, *begun.request.misses]
        if lost := plan.script.reused - script.reused:
            misses.append(f"{lost} tokens of donors did not come, and were computed")
        return replace(answer, reused=reuse, misses=tuple(misses), expected_kl=kl, document_kl=(self._kl,))
