"""Whether the store answers, found out once for all who ask at about the same time."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvwire.errors import NotFoundError
from kvwire.transport.server.http_errors import RefusedError, refusal_of

if TYPE_CHECKING:
    from kvwire.store import Store
    from kvwire.transport.server.threads import Threads

_PROBE_KEY = "readyz"
_GOOD_S = 1.0  # so long one look at the store answers all probes, whatever it found


class Readiness:
    """Looks at a store: one look at a time, and a thread at most, however many ask."""

    def __init__(self, store: Store, threads: Threads) -> None:
        """Keep the store; nothing is asked yet."""
        self._store = store
        self._threads = threads
        self._look: asyncio.Task[RefusedError | None] | None = None
        self._good_until = 0.0

    async def check(self, request_id: str) -> None:
        """Ask whether the store can be served."""
        look = self._look
        if look is None or (look.done() and time.monotonic() >= self._good_until):
            look = self._look = asyncio.create_task(self._ask(request_id))
        refusal = await asyncio.shield(look)
        if refusal is not None:
            raise RefusedError(refusal.status, str(refusal), refusal.headers, reason=refusal.reason)

    async def _ask(self, request_id: str) -> RefusedError | None:
        refusal = None
        try:
            await self._threads.run(lambda: self._store.stat(_PROBE_KEY))
        except NotFoundError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told in a status
            refusal = refusal_of(error, request_id)
        self._good_until = time.monotonic() + _GOOD_S
        return refusal
