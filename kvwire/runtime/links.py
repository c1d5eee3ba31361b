"""What a load does so that linked documents see each other."""

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
"""Rows that are repaired at least where links were not measured and the model has attention sinks, as most real ones
have: linked without, SmolLM2 seldom gives the text that a full prefill gives (benchmarks/answers.py)."""
AUTO = "auto"
"""In place of a selector: what the model's report found best, ``DEFAULT_SELECTOR`` without one."""


@dataclass(frozen=True)
class LinkPlan:
    """What a load does about links.

    Attributes:
        option: What the controller weighs; None: links stay as they are.
        selector: Chooses rows.
        is_wanted: A share was asked for by number or by ``all``: what cannot be done is an error then.
        report: What was measured; None where nobody did.
        trouble: Why loads cannot do what the settings say; told with every answer that it concerns.
        is_able: Whether the engine may repair at all.
        refuses: Nothing is answered where the report warns, or where there is none.
        shift: SHA-256 of the link shift that is added to linked documents; empty: none is.
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
        """Why an answer over linked documents may be wrong."""
        if self.refuses and self.report is None:
            return "what links lose with this model was not measured; run kvwire check-model with this store"
        told = self.report.with_shift() if self.report and self.shift and shifted else self.report
        return _warning(told, self.selector.name, share)

    def check(self, warning: str) -> None:
        """Refuse to answer where that was asked for."""
        if self.refuses and warning:
            msg = f"not answered: {warning}, or raise the bound (--link-bound)"
            raise LinkBoundError(msg)


UNREPAIRED = LinkPlan(None, selector_of("none"))
"""Links stay as they are."""


def check_repair(repair: RepairMode | float, floor: float | None, selector: str, bound: float | None = None) -> None:
    """Refuse settings that nobody can mean."""
    if selector != AUTO:
        selector_of(selector)
    named = isinstance(repair, str) and repair in {"none", "auto", "all"}
    is_share = isinstance(repair, (int, float)) and not isinstance(repair, bool) and 0 <= repair <= 1
    if not named and not is_share:
        msg = f"repair is none, auto, all or a share of rows from 0 to 1, got {repair!r}"
        raise ArgumentError(msg)
    if floor is not None and not 0 <= floor <= 1:
        msg = f"the floor of repair is a share of rows from 0 to 1, got {floor}"
        raise ArgumentError(msg)
    if bound is not None and not bound >= 0:
        msg = f"the bound on links is a share of what documents tell, at least 0, got {bound}"
        raise ArgumentError(msg)


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
    """What loads do about links."""
    check_repair(repair, floor, selector, bound)
    report = report if report is None or bound is None else replace(report, bound=bound)
    used = report.with_shift() if report and shift else report
    plan = _planned(repair, floor, selector, used, profile, layers)
    named = report.shift if report and shift else ""
    begins = "closing" if named else _begins(plan.selector)
    option = replace(plan.option, begins=begins) if plan.option else None
    return replace(plan, option=option, report=report, refuses=bound is not None, shift=named)


def _begins(selector: Selector) -> Begins:
    """When rows that a selector chooses may be computed document by document."""
    if "rows" in selector.needs:
        return "closing"  # which rows are computed to the end depends on all of them
    return "looked" if "question" in selector.needs else "documents"


def _planned(
    repair: RepairMode | float, floor: float | None, selector: str, report: LinkReport | None,
    profile: AnyProfile | None, layers: int,
) -> LinkPlan:  # fmt: skip
    """``plan_links`` where the report's bound is that which counts."""
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
    """The share of rows that is repaired at least where nothing was said."""
    if report is None:
        return UNMEASURED_SHARE if getattr(profile, "has_sinks", False) else 0.0
    wanted = report.least_share(selector)
    return MOST if wanted is None else wanted


def _measured(report: LinkReport, selector: str, profile: AnyProfile | None) -> RepairOption:
    """A report on the scale of blobs' errors."""
    curve = getattr(profile, "error_to_kl", None)
    scale, power = curve or (1.0, 1.0)
    errors = [(kl / scale) ** (1 / power) for kl in report.left(selector)]
    shares = (0.0, *report.shares)[: len(errors)]
    left = tuple(error / errors[0] if errors[0] else 0.0 for error in errors)
    return RepairOption(most=1.0, error=errors[0], shares=shares, left=left)


def _warning(report: LinkReport | None, selector: str, share: float) -> str:
    """Why answers may be wrong where a share of rows is repaired."""
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
    """Deviations of a prompt's tokens."""
    parts = []
    for tokens, record in documents:
        if record is None:
            return None
        parts.append(torch.tensor(record.values).repeat_interleave(record.block)[:tokens])
    return torch.cat(parts) if parts else None


@dataclass(frozen=True, eq=False)
class RepairContext:
    """What a load knows of its prompt when it is to be repaired.

    Attributes:
        texts: Token ids of each document; None where they are not known.
        deviation: How far tokens move behind other documents, float32 ``[tokens]``; None where blobs do not say.
        seen: What the question sees; None where nobody has looked yet.
        trouble: Why none of its rows may be computed anew; empty where they may.
        laid_out: Where everything stands, where more than documents does.
        head: Tokens of a system text, which the first document has not seen; 0: nothing stands before it but BOS.
    """

    texts: Sequence[Sequence[int] | None]
    deviation: Tensor | None = None
    seen: AttentionSummary | None = None
    trouble: str = ""
    laid_out: PromptLayout | None = None
    head: int = 0

    def lengths(self, prompt: LinkedPrompt) -> tuple[int, ...]:
        """Tokens of the prompt's parts, each of which was computed by itself, the first one with all before it."""
        return (self.head, *prompt.tokens) if self.head else prompt.lengths


def _behind_front(documents: Sequence[int], front: int) -> tuple[int, ...]:
    """Lengths of documents where the prompt's first tokens count as one: nothing of it has to be computed anew."""
    left, lengths = max(front, documents[0]), []
    for tokens in documents:
        seen = min(left, tokens)
        left -= seen
        if tokens > seen:
            lengths.append(tokens - seen)
    return (max(front, documents[0]), *lengths)


def _known(told: RepairContext, prompt: LinkedPrompt) -> list[Sequence[int]]:
    """Token ids of all documents; none where a document's are not known."""
    known = [text for text in told.texts if text is not None]
    return known if len(known) == len(prompt.tokens) else []


def _may(told: RepairContext, prompt: LinkedPrompt) -> bool:
    """Whether rows of a prompt may be computed by themselves: no trouble is known, and every text is."""
    return not told.trouble and bool(_known(told, prompt))


def _behind(share: float, lengths: Sequence[int], front: int) -> float:
    """A share of what is behind the front, as one of the whole prompt."""
    return share if share == 1 else share * (1 - max(0, front - lengths[0]) / sum(lengths))


class Repairer:
    """Repairs prompts of one engine.

    Attributes:
        trouble: Why it never can; empty where it may.
    """

    def __init__(self, engine: Engine) -> None:
        """Keep the engine."""
        self._engine = engine
        self.trouble = (
            "" if engine.can_repair else "links were not repaired: this engine cannot compute rows inside a prompt"
        )

    def run(
        self, plan: LinkPlan, prompt: LinkedPrompt,
        told: RepairContext, question: Sequence[int], share: float, front: int, stop: Callable[[], bool] | None = None,
        restore: Callable[[], Tensor] | None = None,
    ) -> tuple[Repaired | None, str]:  # fmt: skip
        """Compute a share of a prompt's rows anew, in its cache."""
        lengths = told.lengths(prompt)
        if share <= 0 or (len(lengths) == 1 and told.laid_out is None and share < 1):
            return None, ""
        if not _may(told, prompt):
            return self._refused(plan, told.trouble or "the text of a document is not known")
        if told.laid_out is None and share < 1 and len(_behind_front(lengths, front)) == 1:
            return None, ""
        share = _behind(share, lengths, front)
        try:
            if told.laid_out is not None:
                return self._beside_links(plan, prompt, told.laid_out, told, question, share), ""
            given = self._input(prompt, told, question, front)
            return repair_prompt(given, plan.selector, share, None if plan.is_wanted else stop, restore), ""
        except (ArgumentError, MismatchError) as error:
            if plan.is_wanted and isinstance(error, ArgumentError):
                raise
            return self._refused(plan, str(error))

    def begin(
        self, plan: LinkPlan, prompt: LinkedPrompt, told: RepairContext, question: Sequence[int], share: float,
        front: int,
    ) -> RepairInOrder:  # fmt: skip
        """Choose rows that are computed document by document."""
        if not _may(told, prompt):
            raise MismatchError(told.trouble or "the text of a document is not known")
        given = self._input(prompt, told, question, front)
        count = rows_for(_behind(share, told.lengths(prompt), front), given.documents)
        return RepairInOrder(given, plan.selector, share, count)

    def _input(self, prompt: LinkedPrompt, told: RepairContext, question: Sequence[int], front: int) -> RepairInput:
        """A prompt of documents alone as selectors take it."""
        ids = (*prompt.opening, *(token for text in _known(told, prompt) for token in text))
        documents, moved = _behind_front(told.lengths(prompt), front), told.deviation
        if moved is not None and prompt.opening:
            moved = torch.cat([moved.new_zeros(len(prompt.opening)), moved])
        return RepairInput(self._engine, prompt.cache, ids, documents, tuple(question), moved, seen=told.seen)

    def _beside_links(
        self, plan: LinkPlan, prompt: LinkedPrompt, laid_out: PromptLayout, told: RepairContext,
        question: Sequence[int], share: float,
    ) -> Repaired:  # fmt: skip
        from kvwire.reuse import repair_laid_out  # few loads need it

        return repair_laid_out(
            self._engine, prompt, laid_out, _known(told, prompt), question, plan.selector, share,
            deviation=told.deviation, seen=told.seen,
        )  # fmt: skip

    def _refused(self, plan: LinkPlan, why: str) -> tuple[None, str]:
        words = f"links were not repaired: {why}"
        if plan.is_wanted:
            raise MismatchError(words)
        return None, words


class RepairInOrder:
    """What jobs of a load have computed of the rows that its selector chose.

    A job sees nothing of the documents behind its own, which may be half decoded by then. Each row sees all that stands
    before it as it stays, so that jobs in the prompt's order come to what all rows at once would.

    Attributes:
        share: Of the prompt's rows, those that were chosen.
        rows: int64, those that are computed, ascending.
        seconds: That computing them took.
        select_s: That choosing all of them took.
    """

    def __init__(self, given: RepairInput, selector: Selector, share: float, count: int) -> None:
        """Choose the rows."""
        started = time.perf_counter()
        self._given, self._chosen = given, selector.choose(given, count).rows
        self.select_s, self.seconds, self.share = time.perf_counter() - started, 0.0, share
        self.rows = self._chosen[:0]

    @property
    def left(self) -> int:
        """How many of the rows are not computed yet."""
        return len(self._chosen) - len(self.rows)

    def run(self, stop_at: int, is_gone: Callable[[], bool]) -> int:
        """Compute the rows before a place of the prompt, but for those that were."""
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
        """Tell which rows are done, as ``repair_prompt`` wants it of those that were restored."""
        return self.rows

    def joined(self, after: Repaired | None, selector: Selector, share: float) -> Repaired | None:
        """What jobs and the closing have computed together."""
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
