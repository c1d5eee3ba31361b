"""What loads do about links: settings, the model's report, and the mean shift, read once for all loads of a loader."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvwire.controller import RepairOption
from kvwire.controller.repair import MOST, UNMEASURED
from kvwire.errors import KvwireError, LinkBoundError
from kvwire.reuse import selector_of
from kvwire.runtime.reports import DEFAULT_SELECTOR, scan_of
from kvwire.runtime.settings import AUTO, check_repair
from kvwire.runtime.tasks import end_tasks

if TYPE_CHECKING:
    from collections.abc import Collection
    from concurrent.futures import Future

    from kvwire.codec import AnyProfile
    from kvwire.controller.repair import Begins
    from kvwire.engines.base import Engine
    from kvwire.reuse import LinkShift, Selector
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.reports import LinkReport
    from kvwire.runtime.session import Session
    from kvwire.runtime.settings import LoadSettings, RepairMode


_UNABLE = "links were not repaired: this engine cannot compute rows inside a prompt"
_LATE = "the mean shift of links was not added: it has not come in time"
UNMEASURED_LINK_SHARE = 0.15
"""Least share of repaired rows if links were not measured and the model has attention sinks, as most real models do:
linked without repair, SmolLM2 seldom gives the text of a full prefill (benchmarks/answers.py)."""


@dataclass(frozen=True)
class LinkPlan:
    """A load's settings for links."""

    option: RepairOption | None  # input of the controller; None: no repair
    selector: Selector  # chooses rows
    is_wanted: bool = False  # whether a share was requested by number or by ``all``: then failure is an error
    report: LinkReport | None = None  # the measured report; None without one
    trouble: str = ""  # why loads cannot follow the settings; added to every answer that it concerns
    is_able: bool = True  # whether the engine can repair
    refuses: bool = False  # whether a load fails if the report warns, or is missing
    shift: str = ""  # SHA-256 of the mean shift to add to linked documents; empty: none

    def warning(self, share: float, *, shifted: bool = True, behind: Collection[bool] = ()) -> str:
        """Why an answer over linked documents may be wrong; empty without a reason.

        behind: whether documents of the prompt were computed behind a neutral prefix, as far as known.
        """
        if self.refuses and self.report is None:
            return "what links lose with this model was not measured; run kvwire check-model with this store"
        if self.report and share < 1 and not set(behind) <= {self.report.neutral > 0}:
            how = "behind a neutral prefix" if self.report.neutral else "alone"
            return (
                f"what links lose was measured of documents computed {how}, and not all of these were; encode "
                "documents alike, and run kvwire check-model with this store"
            )
        warning = self.report.with_shift() if self.report and self.shift and shifted else self.report
        return _warning(warning, self.selector.name, share)

    def check(self, warning: str) -> None:
        """Refuse to answer with a warning, if the settings say so."""
        if self.refuses and warning:
            raise LinkBoundError(f"not answered: {warning}, or raise the bound (--link-bound)")


UNREPAIRED = LinkPlan(None, selector_of("none"))
"""Links stay as they are."""


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
    begins: Begins = "looked" if "question" in plan.selector.needs else "documents"
    if named or "rows" in plan.selector.needs:  # a selector that drops rows between layers depends on all of them
        begins = "closing"
    option = replace(plan.option, begins=begins) if plan.option else None
    return replace(plan, option=option, report=report, refuses=bound is not None, shift=named)


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
        return UNMEASURED_LINK_SHARE if getattr(profile, "has_sinks", False) else 0.0
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
    kl = 0.0 if share >= 1 else min((kl for at, kl in pairs if at <= share), default=report.linked)
    if kl <= report.allowed:
        return ""
    lost = kl / report.no_documents if report.no_documents else 1.0
    way = report.least_share(selector)
    advice = f"repair {way:g} of the rows" if way else "run prompts like these as text"
    return f"documents that are linked like this lose {lost:.0%} of what they tell this model; {advice}"


class LinkPlanner:
    """Plans for links; use it on the session's loop."""

    def __init__(
        self, engine: Engine, corpus: Corpus, session: Session, settings: LoadSettings, level: int | None
    ) -> None:
        """Do not read yet. level: the finest of the profile to read."""
        self._engine, self._corpus, self._session = engine, corpus, session
        self._settings, self._level = settings, level
        self._plan: LinkPlan | None = None
        self._shift: Future[LinkShift | str] | None = None

    async def plan(self, limit_s: float) -> LinkPlan:
        """The plan; the model's report is read with the first load, while the catalog is asked."""
        if self._plan is None:
            reading = asyncio.create_task(self._session.look_up(self._read_profile, limit_s))
            try:
                report = await self._session.look_up(self._view().link_report, limit_s)
                self._plan = _plan_of(self._settings, report, await reading, len(self._engine.meta.layers))
            except KvwireError as error:  # the next load tries again
                trouble = f"the report on links was not read, so this load goes without it: {error}"
                return replace(_plan_of(self._settings, None, None, 0), trouble=trouble)
            finally:
                await end_tasks([reading])
        if self._engine.can_repair or not self._plan.option or self._plan.is_wanted:
            return self._plan
        return replace(self._plan, trouble=_UNABLE, is_able=False)

    def _read_profile(self) -> AnyProfile | None:
        with suppress(KvwireError):
            return self._view().profile(level=self._level)
        return None

    def _view(self) -> Corpus:
        return self._corpus.over(self._session.view(self._corpus.catalog.store, over_link=False))

    def begin_shift(self, digest: str) -> None:
        """Start to read the mean shift, unless it was read or is being read."""
        known = self._shift
        if known is None or (known.done() and isinstance(known.result(), str)):
            self._shift = self._session.threads.blocking.submit(self._read_shift, digest)

    def _read_shift(self, digest: str) -> LinkShift | str:
        """The shift, or why it cannot be read."""
        try:
            return self._view().link_shift(digest).on(self._engine.device)
        except Exception as error:  # noqa: BLE001 - whatever it is, loads go without
            return f"the mean shift of links was not added: {error}"

    async def shift(self, limit_s: float) -> LinkShift | str:
        """Wait for the shift; why there is none, if there is none."""
        if self._shift is None:
            return _LATE
        if not self._shift.done():
            await asyncio.wait({asyncio.wrap_future(self._shift)}, timeout=max(0.0, limit_s))
        return self._shift.result() if self._shift.done() else _LATE


def _plan_of(settings: LoadSettings, report: LinkReport | None, profile: AnyProfile | None, layers: int) -> LinkPlan:
    """Plan by settings and a report."""
    shift = settings.shift and not settings.keep_repairs
    asked = settings.repair, settings.repair_floor, settings.selector
    plan = plan_links(*asked, report, profile, layers, settings.link_bound, shift=shift)
    if plan.option and (settings.keep_repairs or not settings.repair_in_order):  # stored rows are known at the end
        plan = replace(plan, option=replace(plan.option, begins="closing"))
    return plan
