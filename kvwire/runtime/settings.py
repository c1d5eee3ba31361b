"""Settings of loads."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from kvwire import controller as ctl
from kvwire.errors import ArgumentError
from kvwire.reuse import selector_of
from kvwire.runtime.threads import usual_threads
from kvwire.transport import FetchSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvwire.codec import Backend
    from kvwire.controller import LogEntry, Objective, OnLate, Policy
    from kvwire.reuse import LinkLayout

RepairMode = Literal["none", "auto", "all"]
AUTO = "auto"
"""As a selector: the one that the model's report found best, or ``DEFAULT_SELECTOR`` without a report."""
_IN_FLIGHT = ctl.ControllerSettings.max_in_flight


@dataclass(frozen=True)
class LoadSettings:
    """Settings of loads.

    Attributes:
        max_kl: For each document, the coarsest level allowed is the first with at most this expected KL divergence from
            exact caches, in nats; the finest lossy one if none is so good, noted in ``Answer.misses``. Blobs without
            predictions have no such floor. Text may always be recomputed. None: any level.
        quality_floor: The lowest level allowed, in place of ``max_kl``; None: ``max_kl`` applies.
        quality_ceiling: The finest level worth waiting for; None for any.
        exact: Load bit-exact caches: lossless levels where they exist, else recomputed text. Excludes floor and
            ceiling.
        bandwidth_prior: Bytes per second assumed before any measurement.
        ttfb_prior_s: Seconds to the first byte, likewise.
        max_in_flight: Most chunks fetched at once; the actual number depends on the link.
        memory_bytes: Limit of blobs in memory, fetched or kept for upgrades, over all loads.
        open_s: Longest wait for a blob's header if the document's text is known or stored, in seconds.
        patience_s: Longest wait for any other header, and for anything that nothing replaces, in seconds.
        fetch: The fetcher's settings; its concurrency limits the connections of all loads together.
        backend: Kernels that decode.
        compute_workers: 2 to decode during forward passes, 1 to take turns; None: 2 if a GPU does both, since decoding
            has its own streams there.
        decode_batch: Chunks decoded in one batch; None: by machine.
        decode_threads: Chunks that a CPU decodes in parallel; None: by machine.
        on_late: For a load whose first token cannot be in time: ``serve`` it as soon as possible, or ``refuse`` it at
            once with an OverloadedError, so that the caller can go elsewhere or retry.
        look: Run the question on the coarsest levels first, if the deadline leaves time for finer ones, and spend that
            time on the chunks with the most attention. Without it all chunks are refined alike.
        repair: Rows of the prompt to recompute before the question runs, so that documents see those before them:
            ``none``; ``auto``, as many as time and quality suggest, at least ``repair_floor``; ``all``, which equals a
            prefill of the whole prompt; or a share of the rows from 0 to 1. Without a deadline ``auto`` repairs only
            the floor.
        repair_floor: Least share for ``auto``; None: what ``kvwire check-model`` found the model to need; if it was not
            run, 15 % for models with attention sinks, else 0.
        selector: Chooses the rows: one of ``kvwire.reuse.SELECTORS``, or ``auto``: the best one by ``kvwire
            check-model``, or ``attention`` if that was not run.
        repair_in_order: Repair documents, and compute a layout's link tokens, while later ones are fetched, if the
            selector can choose by then. Otherwise all rows are repaired after the last chunk, with the same result.
        link_bound: Share of the documents' effect on the model that links may lose by ``kvwire check-model``; if more
            would be lost, or it was not measured, a load of several documents raises LinkBoundError. It also replaces
            the report's bound for ``repair_floor``. None: the report's bound, and a warning.
        shift: Add the mean shift to linked documents, if ``kvwire check-model`` found that it helps the model. Not with
            kept repairs or a layout.
        keep_repairs: Store repaired rows for later loads of the same documents in the same order, and use stored ones.
            Loads then write to the store.
        kept_bytes: Limit of stored rows for this model and tenant; the oldest are dropped.
        layout: Tokens around documents and inside their caches; None: none. With one, documents, and link tokens with
            them, are repaired only if ``repair`` is a share.
        system: Token ids of the system text, computed in every prompt, before the documents.
        first_tokens: Load only so many of each document's first tokens; the prompt is as if documents ended there. Not
            with a layout, kept repairs, prompts or schemas. None: all.
        entries_s: Seconds for which catalog entries are cached; 0: every load asks the catalog.
        writer: Namespace inside the tenant for prompts saved for similar ones, which only this writer finds. Empty: the
            whole tenant.
        policy: Replaces the controller's own, for comparisons.
        record: Called with every event and its instructions; ``controller.replay`` takes these.
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
    first_tokens: int | None = None
    entries_s: float = 30.0
    writer: str = ""
    policy: Policy | None = None
    record: Callable[[LogEntry], object] | None = None

    def __post_init__(self) -> None:
        """Refuse invalid ways of repair, and quality bounds of exact loads."""
        check_max_kl(self.max_kl)
        for name, level in (("quality_floor", self.quality_floor), ("quality_ceiling", self.quality_ceiling)):
            if level is not None and level < 0:
                raise ArgumentError(f"{name} is the number of a level, 0 or more, got {level}")
        if self.exact and (self.quality_floor is not None or self.quality_ceiling is not None):
            raise ArgumentError("an exact load takes lossless levels alone: leave out the floor and the ceiling")
        if self.first_tokens is not None and (self.first_tokens < 1 or self.layout or self.keep_repairs):
            raise ArgumentError("first_tokens is 1 or more, and goes without a layout and without keep_repairs")
        check_repair(self.repair, self.repair_floor, self.selector, self.link_bound)


def check_max_kl(max_kl: object) -> None:
    """Refuse values that are no KL divergence."""
    if max_kl is None or (isinstance(max_kl, int | float) and not isinstance(max_kl, bool) and max_kl >= 0):
        return
    raise ArgumentError(f"max_kl is a KL divergence in nats, 0 or more, or None for no such floor; got {max_kl!r}")


def controls_of(settings: LoadSettings, *, on_gpu: bool, interrupts: bool = True) -> ctl.ControllerSettings:
    """Settings of the controller from those of a loader."""
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


def goal_of(settings: LoadSettings, deadline_s: float | None, objective: Objective | None) -> ctl.Goal:
    """A load's goal for the controller."""
    return ctl.Goal(
        objective=objective or ("earliest" if deadline_s is None else "quality"),
        deadline_s=deadline_s,
        floor=ctl.EXACT if settings.exact else settings.quality_floor or 0,
        ceiling=settings.quality_ceiling,
        on_late=settings.on_late,
    )
