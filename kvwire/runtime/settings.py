"""How prompts are loaded."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from kvwire import controller as ctl
from kvwire.errors import ArgumentError, KvwireError
from kvwire.runtime.links import AUTO, check_repair, plan_links
from kvwire.runtime.threads import usual_threads
from kvwire.transport import FetchSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.codec import AnyProfile, Backend
    from kvwire.controller import LogEntry, OnLate, Policy
    from kvwire.reuse import LinkLayout
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.link_report import LinkReport
    from kvwire.runtime.links import LinkPlan, RepairMode

_IN_FLIGHT = ctl.ControllerSettings.max_in_flight


@dataclass(frozen=True)
class LoadSettings:
    """How prompts are loaded.

    Attributes:
        max_kl: Of each document, the coarsest level that is fetched is the first of which its blob expects no greater
            KL divergence from exact caches, in nats; the finest lossy one where none is so good, as ``Answer.misses``
            then says. Blobs without predictions have no such floor. Text may be computed in any case. None: any level.
        quality_floor: The lowest level that may be used where there is a choice, in place of ``max_kl``; None: as that
            says.
        quality_ceiling: The finest level that is worth waiting for; None for any.
        exact: Load caches bit for bit as the engine computes them: the lossless level of documents that were encoded
            with one, and the text of others is computed. In place of floor and ceiling.
        bandwidth_prior: Bytes per second assumed before anything was measured.
        ttfb_prior_s: Seconds to the first byte assumed likewise.
        max_in_flight: Chunks fetched at once at most; how many are, depends on the link.
        memory_bytes: Of blobs, fetched or kept to be upgraded, over all loads.
        open_s: Longest wait for a blob's header where the document's text is known or stored, in seconds.
        patience_s: Longest wait for any other header, and for anything else that nothing stands in for, in seconds.
        fetch: The fetcher's settings; its concurrency bounds the connections of all loads together.
        backend: Which kernels decode.
        compute_workers: 2 to decode beside forward passes, 1 to take turns; None: 2 where a GPU does both, since
            decoding has streams of its own there.
        decode_batch: Chunks that are decoded in one go; None: as suits the machine.
        decode_threads: How many of them a CPU decodes side by side; None: as suits the machine.
        on_late: What becomes of a load whose first token cannot be in time: ``serve`` it as soon as possible, or
            ``refuse`` it at once with an OverloadedError, so that the caller can go elsewhere or come back.
        look: Run the question on the coarsest levels first, where time before a deadline is left for finer ones, and
            spend that time on the chunks that the question attends to. Without it all chunks become finer alike.
        repair: Rows of the prompt that are computed anew before the question runs, so that documents see those before
            them: ``none``; ``auto``, as many as time and quality want, at least ``repair_floor``; ``all``, which is a
            prefill of the whole prompt; or a share of the rows from 0 to 1. Without a deadline ``auto`` repairs the
            floor alone.
        repair_floor: Share that ``auto`` repairs at least; None: what ``kvwire check-model`` found that the model
            needs; where that was not run 15 % of models that have attention sinks, none of others.
        selector: What chooses the rows, one of ``kvwire.reuse.SELECTORS``, or ``auto``: what ``kvwire check-model``
            found best for the model, and ``attention`` where that was not run.
        repair_in_order: Compute rows of documents that stay as they are while the link brings later ones, where the
            selector knows its rows by then, and so link tokens of a layout. Without it all rows are computed after the
            last chunk, to the same end.
        link_bound: Of what documents tell the model, the share that links may lose by what ``kvwire check-model``
            found; where more would be lost, or nobody has measured it, a load of several documents ends with a
            LinkBoundError and no answer. In place of the bound that was named there, also for ``repair_floor``. None:
            that one, and a warning.
        shift: Add to linked documents what they lack on average, where ``kvwire check-model`` found that it helps the
            model. Not done where repairs are kept, nor with a layout.
        keep_repairs: Keep rows that were computed anew in the store, for later loads of the same documents in the same
            order, and use what was kept. Loads then write to the store.
        kept_bytes: Of all rows that are kept of this model and tenant; older ones give way.
        layout: What stands around documents and inside their caches; None: nothing. With one,
            documents are repaired only where a share is asked for (``repair``), and link tokens with them.
        system: Token ids of the system text, which is computed in every prompt, before the documents.
        entries_s: Seconds that a catalog entry is used for after it was read; 0: every load asks the catalog.
        writer: Namespace inside the tenant for prompts that are kept for others like them: they serve this writer
            alone. Empty: the whole tenant.
        policy: Decides instead of the controller's own, for comparisons.
        record: Called with every event and what it led to; ``controller.replay`` takes these.
    """

    max_kl: float | None = ctl.MAX_KL
    quality_floor: int | None = None
    quality_ceiling: int | None = None
    exact: bool = False
    bandwidth_prior: float = 12.5e6
    ttfb_prior_s: float = 0.02
    max_in_flight: int = _IN_FLIGHT
    memory_bytes: int = ctl.ControllerSettings.memory_bytes
    open_s: float = 5.0
    patience_s: float = ctl.ControllerSettings.patience_s
    fetch: FetchSettings = field(default_factory=lambda: FetchSettings(concurrency=_IN_FLIGHT, retries=2))
    backend: Backend = "auto"
    compute_workers: Literal[1, 2] | None = None
    decode_batch: int | None = None
    decode_threads: int | None = None
    on_late: OnLate = "serve"
    look: bool = True
    repair: RepairMode | float = "auto"
    repair_floor: float | None = None
    selector: str = AUTO
    repair_in_order: bool = True
    link_bound: float | None = None
    shift: bool = True
    keep_repairs: bool = False
    kept_bytes: int = 1 << 30
    layout: LinkLayout | None = None
    system: tuple[int, ...] = ()
    entries_s: float = 30.0
    writer: str = ""
    policy: Policy | None = None
    record: Callable[[LogEntry], object] | None = None

    def __post_init__(self) -> None:
        """Refuse a way of repairing that there is not, and bounds on a quality that has none."""
        check_max_kl(self.max_kl)
        if self.exact and (self.quality_floor is not None or self.quality_ceiling is not None):
            msg = "an exact load takes lossless levels alone: leave out the floor and the ceiling"
            raise ArgumentError(msg)
        check_repair(self.repair, self.repair_floor, self.selector, self.link_bound)


def check_max_kl(max_kl: object) -> None:
    """Refuse what cannot be a KL divergence."""
    if max_kl is None or (isinstance(max_kl, int | float) and not isinstance(max_kl, bool) and max_kl >= 0):
        return
    msg = f"max_kl is a KL divergence in nats, 0 or more, or None for no such floor; got {max_kl!r}"
    raise ArgumentError(msg)


def controls_of(settings: LoadSettings, *, on_gpu: bool, interrupts: bool = True) -> ctl.ControllerSettings:
    """How the controller of a loader with these settings steers."""
    threads = usual_threads(settings.decode_threads)
    suited = ctl.ControllerSettings.suited(on_gpu=on_gpu, threads=threads, interrupts=interrupts)
    return replace(
        suited,
        max_in_flight=settings.max_in_flight,
        memory_bytes=settings.memory_bytes,
        patience_s=settings.patience_s,
        workers=settings.compute_workers or suited.workers,
        decode_batch=settings.decode_batch or suited.decode_batch,
    )


def read_plan(corpus: Corpus, settings: LoadSettings, layers: int, level: int | None) -> LinkPlan:
    """What loads do about links, by what the store says of them; blocks."""
    report, profile = corpus.link_report(), None
    with suppress(KvwireError):
        profile = corpus.profile(level=level)
    return planned(settings, report, profile, layers)


def planned(settings: LoadSettings, report: LinkReport | None, profile: AnyProfile | None, layers: int) -> LinkPlan:
    """What loads do about links."""
    shift = settings.shift and not settings.keep_repairs
    asked = settings.repair, settings.repair_floor, settings.selector
    plan = plan_links(*asked, report, profile, layers, settings.link_bound, shift=shift)
    if plan.option and (settings.keep_repairs or not settings.repair_in_order):  # what is kept is known at the end
        plan = replace(plan, option=replace(plan.option, begins="closing"))
    return plan
