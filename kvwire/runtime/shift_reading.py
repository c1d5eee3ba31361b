"""Reading the mean shift that is added to linked documents."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from kvwire.reuse import LinkShift
    from kvwire.runtime.corpus import Corpus
    from kvwire.runtime.session import Session

_LATE = "the mean shift of links was not added: it has not come in time"


class ShiftReader:
    """Reads a model's shift once, beside the first load that adds it; to be used on the session's loop."""

    def __init__(self, corpus: Corpus, session: Session, device: torch.device) -> None:
        """Read nothing yet."""
        self._corpus, self._session, self._device = corpus, session, device
        self._reading: Future[LinkShift | str] | None = None

    def begin(self, digest: str) -> None:
        """Begin to read, unless it was read or is being read."""
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
        """What was read."""
        if self._reading is None:
            return _LATE
        if not self._reading.done():
            await asyncio.wait({asyncio.wrap_future(self._reading)}, timeout=max(0.0, limit_s))
        return self._reading.result() if self._reading.done() else _LATE
