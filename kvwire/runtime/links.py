"""Settings and steps of a load so that linked documents see each other."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from kvwire.controller import RepairOption
from kvwire.controller.repair import MOST, UNMEASURED
from kvwire.errors import ArgumentError, LinkBoundError, MismatchError
from kvwire.reuse import RepairInput, repair_prompt, rows_for, selector_of
from kvwire.reuse.repair.repairing import BLOCK_ROWS
from kvwire.runtime.link_report import DEFAULT_SELECTOR, scan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from kvwire.codec import AnyProfile
    from kvwire.controller.repair import Begins
    from kvwire.engines.base import Engine
    from kvwire.reuse import AttentionSummary, LinkedPrompt, PromptLayout, Repaired, Selector
    from kvwire.runtime.link_report import LinkReport
    from kvwire.types import BlockDeviation


RepairMode = Literal["none", "auto", "all"]
UNMEASURED_SHARE = 0.15
"""Least share of repaired rows if links were not measured and the model has attention sinks, as most real models do:
linked without repair, SmolLM2 seldom gives the text of a full prefill (benchmarks/answers.py)."""
AUTO = "auto"
"""As a selector: the one that the model's report found best, or ``DEFAULT_SELECTOR`` without a report."""


@dataclass(frozen=True)
class LinkPlan:
    """A load's settings for links.

    Attributes:
        option: Input of the controller; None: no repair.
        selector: Chooses rows.
        is_wanted: Whether a share was requested by number or by ``all``: then failure is an error.
        report: The measured report; None without one.
        trouble: Why loads cannot follow the settings; added to every answer that it concerns.
        is_able: Whether the engine can repair.
        refuses: Whether a load fails if the report warns, or is missing.
        shift: SHA-256 of the mean shift to add to linked documents; empty: none.
    """

    option: RepairOption | None
    selector: Selector
    is_wanted: bool = False
    report: LinkReport | None = None
    trouble: str = ""
    is_able: bool = True
    refuses: bool = False
    shift: str = ""

    def warning(self, share: float, *, shifted: bool = True) -> str:
        """Why an answer over linked documents may be wrong; empty without a reason."""
        if self.refuses and self.report is None:
            return "what links lose with this model was not measured; run kvwire check-model with this store"
        warning = self.report.with_shift() if self.report and self.shift and shifted else self.report
        return _warning(warning, self.selector.name, share)

    def check(self, warning: str) -> None:
        """Refuse to answer with a warning, if the settings say so."""
        if self.refuses and warning:
            raise LinkBoundError(f"not answered: {warning}, or raise the bound (--link-bound)")


UNREPAIRED = LinkPlan(None, selector_of("none"))
"""Links stay as they are."""


def check_repair(repair: RepairMode | float, floor: float | None, selector: str, bound: float | None = None) -> None:
    """Refuse invalid settings."""
    if selector != AUTO:
        selector_of(selector)
    named = isinstance(repair, str) and repair in {"none", "auto", "all"}
    is_share = isinstance(repair, (int, float)) and not isinstance(repair, bool) and 0 <= repair <= 1
    if not named and not is_share:
        raise ArgumentError(f"repair is none, auto, all or a share of rows from 0 to 1, got {repair!r}")
    if floor is not None and not 0 <= floor <= 1:
        raise ArgumentError(f"the floor of repair is a share of rows from 0 to 1, got {floor}")
    if bound is not None and not bound >= 0:
        raise ArgumentError(f"the bound on links is a share of the documents' effect, at least 0, got {bound}")


def plan_links(
    repair: RepairMode | float,
    floor: float | None,
    selector: str,
    report: LinkReport | None,
    profile: AnyProfile | None,
    layers: int = 0,
    bound: float | None = None,
    *,
    shift: bool = False,
) -> LinkPlan:
    """Plan what loads do about links."""
    check_repair(repair, floor, selector, bound)
    report = report if report is None or bound is None else replace(report, bound=bound)
    used = report.with_shift() if report and shift else report
    plan = _planned(repair, floor, selector, used, profile, layers)
    named = report.shift if report and shift else ""
    begins = "closing" if named else _begins(plan.selector)
    option = replace(plan.option, begins=begins) if plan.option else None
    return replace(plan, option=option, report=report, refuses=bound is not None, shift=named)


def _begins(selector: Selector) -> Begins:
    """When a selector's rows may be repaired document by document."""
    if "rows" in selector.needs:
        return "closing"  # it drops rows between layers, which depends on all of them
    return "looked" if "question" in selector.needs else "documents"


def _planned(
    repair: RepairMode | float, floor: float | None, selector: str, report: LinkReport | None,
    profile: AnyProfile | None, layers: int,
) -> LinkPlan:  # fmt: skip
    """``plan_links`` with the bound already in the report."""
    if selector == AUTO:
        selector = report.best_selector(layers) if report else DEFAULT_SELECTOR
    chooser = selector_of("all" if repair == "all" else selector)
    looks, scan = "question" in chooser.needs, 0.0 if repair == "all" else scan_of(chooser, layers)
    known = UNMEASURED if report is None else _measured(report, selector, profile)
    if repair == "none" or chooser.name == "none":
        return LinkPlan(None, chooser, report=report)
    if repair != "auto":
        share = 1.0 if repair == "all" else float(repair)
        option = replace(known, least=share, most=share, looks=looks, scan=scan, weighs_text=share > 0)
        return LinkPlan(option, chooser, is_wanted=True, report=report)
    least = _usual_floor(report, selector, profile) if floor is None else floor
    option = replace(known, least=least, most=max(least, MOST), looks=looks, scan=scan, weighs_text=least > 0)
    return LinkPlan(option, chooser, report=report)


def _usual_floor(report: LinkReport | None, selector: str, profile: AnyProfile | None) -> float:
    """The least share of rows to repair by default."""
    if report is None:
        return UNMEASURED_SHARE if getattr(profile, "has_sinks", False) else 0.0
    wanted = report.least_share(selector)
    return MOST if wanted is None else wanted


def _measured(report: LinkReport, selector: str, profile: AnyProfile | None) -> RepairOption:
    """Convert a report to the scale of blobs' errors."""
    curve = getattr(profile, "error_to_kl", None)
    scale, power = curve or (1.0, 1.0)
    errors = [(kl / scale) ** (1 / power) for kl in report.left(selector)]
    shares = (0.0, *report.shares)[: len(errors)]
    left = tuple(error / errors[0] if errors[0] else 0.0 for error in errors)
    return RepairOption(most=1.0, error=errors[0], shares=shares, left=left)


def _warning(report: LinkReport | None, selector: str, share: float) -> str:
    """Why answers may be wrong with this share of rows repaired."""
    if report is None or report.is_within:
        return ""
    pairs = zip((0.0, *report.shares), report.left(selector), strict=False)
    kl = min((kl for at, kl in pairs if at <= share), default=report.linked)
    kl = 0.0 if share >= 1 else kl
    if kl <= report.allowed:
        return ""
    lost = kl / report.no_documents if report.no_documents else 1.0
    way = report.least_share(selector)
    advice = f"repair {way:g} of the rows" if way else "run prompts like these as text"
    return f"documents that are linked like this lose {lost:.0%} of what they tell this model; {advice}"


def by_token(documents: Sequence[tuple[int, BlockDeviation | None]]) -> Tensor | None:
    """Deviations by token of a prompt; None if a document has none."""
    parts = []
    for tokens, record in documents:
        if record is None:
            return None
        parts.append(torch.tensor(record.values).repeat_interleave(record.block)[:tokens])
    return torch.cat(parts) if parts else None


@dataclass(frozen=True, eq=False)
class RepairContext:
    """Facts about a prompt for its repair.

    Attributes:
        texts: Token ids of each document; None if not known.
        deviation: How much tokens change behind other documents, float32 ``[tokens]``; None if a blob lacks it.
        seen: The question's attention; None if not measured yet.
        trouble: Why no rows may be repaired; empty if they may.
        laid_out: The layout of the prompt, if it has more than documents.
        head: Tokens of a system text, which the first document has not seen; 0: only BOS precedes it.
    """

    texts: Sequence[Sequence[int] | None]
    deviation: Tensor | None = None
    seen: AttentionSummary | None = None
    trouble: str = ""
    laid_out: PromptLayout | None = None
    head: int = 0

    def lengths(self, prompt: LinkedPrompt) -> tuple[int, ...]:
        """Tokens of the prompt's separately computed parts; the first includes all before it."""
        return (self.head, *prompt.tokens) if self.head else prompt.lengths


def _behind_front(documents: Sequence[int], front: int) -> tuple[int, ...]:
    """Lengths of documents, with the first ``front`` tokens merged into one that needs no repair."""
    left, lengths = max(front, documents[0]), []
    for tokens in documents:
        seen = min(left, tokens)
        left -= seen
        if tokens > seen:
            lengths.append(tokens - seen)
    return (max(front, documents[0]), *lengths)


def _known(context: RepairContext, prompt: LinkedPrompt) -> list[Sequence[int]]:
    """Token ids of all documents; empty if one is not known."""
    known = [text for text in context.texts if text is not None]
    return known if len(known) == len(prompt.tokens) else []


def _may(context: RepairContext, prompt: LinkedPrompt) -> bool:
    """Whether rows of a prompt may be repaired: there is no trouble, and all texts are known."""
    return not context.trouble and bool(_known(context, prompt))


def _behind(share: float, lengths: Sequence[int], front: int) -> float:
    """Convert a share of the tokens after the front to one of the whole prompt."""
    return share if share == 1 else share * (1 - max(0, front - lengths[0]) / sum(lengths))


class Repairer:
    """Repairs prompts of one engine.

    Attributes:
        trouble: Why it can never repair; empty if it can.
    """

    def __init__(self, engine: Engine) -> None:
        """Keep the engine."""
        self._engine = engine
        self.trouble = (
            "" if engine.can_repair else "links were not repaired: this engine cannot compute rows inside a prompt"
        )

    def run(
        self, plan: LinkPlan, prompt: LinkedPrompt,
        context: RepairContext, question: Sequence[int], share: float, front: int,
        stop: Callable[[], bool] | None = None, restore: Callable[[], Tensor] | None = None,
    ) -> tuple[Repaired | None, str]:  # fmt: skip
        """Repair a share of a prompt's rows in its cache."""
        lengths = context.lengths(prompt)
        if share <= 0 or (len(lengths) == 1 and context.laid_out is None and share < 1):
            return None, ""
        if not _may(context, prompt):
            return self._refused(plan, context.trouble or "the text of a document is not known")
        if context.laid_out is None and share < 1 and len(_behind_front(lengths, front)) == 1:
            return None, ""
        share = _behind(share, lengths, front)
        try:
            if context.laid_out is not None:
                return self._beside_links(plan, prompt, context.laid_out, context, question, share), ""
            given = self._input(prompt, context, question, front)
            return repair_prompt(given, plan.selector, share, None if plan.is_wanted else stop, restore), ""
        except (ArgumentError, MismatchError) as error:
            if plan.is_wanted and isinstance(error, ArgumentError):
                raise
            return self._refused(plan, str(error))

    def begin(
        self, plan: LinkPlan, prompt: LinkedPrompt, context: RepairContext, question: Sequence[int], share: float,
        front: int,
    ) -> RepairInOrder:  # fmt: skip
        """Choose rows to repair document by document."""
        if not _may(context, prompt):
            raise MismatchError(context.trouble or "the text of a document is not known")
        given = self._input(prompt, context, question, front)
        count = rows_for(_behind(share, context.lengths(prompt), front), given.documents)
        return RepairInOrder(given, plan.selector, share, count)

    def _input(self, prompt: LinkedPrompt, context: RepairContext, question: Sequence[int], front: int) -> RepairInput:
        """Selectors' input for a prompt without a layout."""
        ids = (*prompt.opening, *(token for text in _known(context, prompt) for token in text))
        documents, deviation = _behind_front(context.lengths(prompt), front), context.deviation
        if deviation is not None and prompt.opening:
            deviation = torch.cat([deviation.new_zeros(len(prompt.opening)), deviation])
        return RepairInput(self._engine, prompt.cache, ids, documents, tuple(question), deviation, seen=context.seen)

    def _beside_links(
        self, plan: LinkPlan, prompt: LinkedPrompt, laid_out: PromptLayout, context: RepairContext,
        question: Sequence[int], share: float,
    ) -> Repaired:  # fmt: skip
        from kvwire.reuse import repair_laid_out  # few loads need it

        return repair_laid_out(
            self._engine, prompt, laid_out, _known(context, prompt), question, plan.selector, share,
            deviation=context.deviation, seen=context.seen,
        )  # fmt: skip

    def _refused(self, plan: LinkPlan, why: str) -> tuple[None, str]:
        words = f"links were not repaired: {why}"
        if plan.is_wanted:
            raise MismatchError(words)
        return None, words


class RepairInOrder:
    """Rows repaired by jobs during the load.

    A job sees nothing of later documents, which may be half decoded. Each row sees the final state of all before it, so
    jobs in prompt order equal one pass over all rows.

    Attributes:
        share: The chosen share of the prompt's rows.
        rows: int64, the rows to compute, ascending.
        seconds: Time spent computing them.
        select_s: Time spent choosing them.
    """

    def __init__(self, given: RepairInput, selector: Selector, share: float, count: int) -> None:
        """Choose the rows."""
        started = time.perf_counter()
        self._given, self._chosen = given, selector.choose(given, count).rows
        self.select_s, self.seconds, self.share = time.perf_counter() - started, 0.0, share
        self.rows = self._chosen[:0]

    @property
    def left(self) -> int:
        """Number of rows not computed yet."""
        return len(self._chosen) - len(self.rows)

    def run(self, stop_at: int, is_gone: Callable[[], bool]) -> int:
        """Compute the remaining rows before a position of the prompt."""
        began, given, before = time.perf_counter(), self._given, len(self.rows)
        mine = self._chosen[(self._chosen < stop_at) & ~torch.isin(self._chosen, self.rows)]
        seen, ids = given.cache.slice(0, stop_at), given.token_ids[:stop_at]
        for start in range(0, len(mine), BLOCK_ROWS):
            if is_gone():
                break
            block = given.engine.update_rows(seen, ids, mine[start : start + BLOCK_ROWS])
            self.rows = torch.cat((self.rows, block)).sort().values
        self.seconds += time.perf_counter() - began
        return len(self.rows) - before

    def computed(self) -> Tensor:
        """Rows that are done, as ``repair_prompt``'s ``restore`` returns them."""
        return self.rows

    def joined(self, after: Repaired | None, selector: Selector, share: float) -> Repaired | None:
        """Combine the repairs of jobs and closing."""
        from kvwire.reuse import Repaired

        given = self._given
        layers, asked = len(given.cache.meta.layers), len(given.question)
        if after is None:
            after = Repaired(
                self.rows[:0], selector.name, selector.cost(given.cache.tokens, 0, asked, layers), 0.0, 0.0
            )
        rows = torch.cat((self.rows, after.rows)).sort().values
        if not len(rows):
            return None
        is_cut = after.is_cut or (share < self.share and len(rows) < len(self._chosen))
        return replace(
            after, rows=rows, cost=selector.cost(given.cache.tokens, len(rows), asked, layers),
            select_s=after.select_s + self.select_s, compute_s=after.compute_s + self.seconds,
            is_cut=is_cut, kept=0, beside=len(self.rows),
        )  # fmt: skip
