"""What loads read of a store about links: what was measured of them, and the mean shift that is added to them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from kvwire.errors import KvwireError
from kvwire.runtime.links import plan_links

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from kvwire.codec import AnyProfile
    from kvwire.reuse import LinkShift
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.link_report import LinkReport
    from kvwire.runtime.links import LinkPlan
    from kvwire.runtime.session import Session
    from kvwire.runtime.settings import LoadSettings

_LATE = "the mean shift of links was not added: it has not come in time"


def read_plan(corpus: Corpus, settings: LoadSettings, layers: int, level: int | None) -> LinkPlan:
    """What loads do about links, by what the store says of them; blocks.

    Args:
        corpus: As loads read it.
        settings: The loader's.
        layers: Of the model.
        level: Up to which level a profile is read; None: all that decoding needs.

    Returns:
        The plan.

    Raises:
        KvwireError: The report cannot be read.
    """
    report, profile = corpus.link_report(), None
    with suppress(KvwireError):
        profile = corpus.profile(level=level)
    return planned(settings, report, profile, layers)


def planned(settings: LoadSettings, report: LinkReport | None, profile: AnyProfile | None, layers: int) -> LinkPlan:
    """What loads do about links.

    Args:
        settings: The loader's.
        report: Of the model, where it was measured.
        profile: In use.
        layers: Of the model.

    Returns:
        The plan; without a shift where repairs are kept, which are of documents as they were encoded.
    """
    shift = settings.shift and not settings.keep_repairs
    asked = settings.repair, settings.repair_floor, settings.selector
    return plan_links(*asked, report, profile, layers, settings.link_bound, shift=shift)


class ShiftReader:
    """Reads a model's shift once, beside the first load that adds it; to be used on the session's loop."""

    def __init__(self, corpus: Corpus, session: Session, device: torch.device) -> None:
        """Read nothing yet.

        Args:
            corpus: Whose.
            session: What loads share.
            device: Where prompts lie.
        """
        self._corpus, self._session, self._device = corpus, session, device
        self._reading: Future[LinkShift | str] | None = None

    def begin(self, digest: str) -> None:
        """Begin to read, unless it was read or is being read.

        Args:
            digest: Of the shift, as the report names it.
        """
        known = self._reading
        if known is None or (known.done() and isinstance(known.result(), str)):
            self._reading = self._session.threads.store.submit(self._read, digest)

    def _read(self, digest: str) -> LinkShift | str:
        """The shift, or why it cannot be had."""
        view = self._corpus.over(self._session.view(self._corpus.catalog.store, over_link=False))
        try:
            return view.link_shift(digest).on(self._device)
        except Exception as error:  # noqa: BLE001 - whatever it is, loads go without
            return f"the mean shift of links was not added: {error}"

    async def get(self, limit_s: float) -> LinkShift | str:
        """What was read.

        Args:
            limit_s: Longest wait, in seconds.

        Returns:
            The shift; or why it cannot be had, in words: a later load tries again.
        """
        if self._reading is None:
            return _LATE
        if not self._reading.done():
            await asyncio.wait({asyncio.wrap_future(self._reading)}, timeout=max(0.0, limit_s))
        return self._reading.result() if self._reading.done() else _LATE
