"""Tasks of a load that run at the same time on the session's loop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from kvwire.runtime.document import Timeouts

T = TypeVar("T")


async def gather_optional(
    first: Coroutine[None, None, T], others: Sequence[Coroutine[None, None, T]], timeouts: Timeouts
) -> tuple[T, list[T]]:
    """Wait for the first, and for those of the others that succeed in time.

    The others share the link, so they get ``timeouts.extra`` more than the first took, or as long again, but at most
    ``timeouts.soon`` in total.
    """
    started = time.monotonic()
    tasks = [asyncio.create_task(each) for each in others]
    try:
        result = await first
        if tasks:
            took = time.monotonic() - started
            await asyncio.wait(tasks, timeout=max(0.0, min(max(timeouts.extra, took), timeouts.soon - took)))
        done = [task for task in tasks if task.done()]
        return result, [task.result() for task in done if not (task.cancelled() or task.exception())]
    finally:
        await end_tasks(tasks)


async def all_of(works: Sequence[Coroutine[None, None, T]]) -> list[T]:
    """Results of concurrent work; the first error stops the others and is raised unchanged."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.shield(asyncio.gather(*tasks))  # cancelling is for end_tasks, once
    finally:
        await end_tasks(tasks)
        del tasks  # with an error, whose traceback has this frame, they would be a cycle


async def end_tasks(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancel tasks and wait until they have cleaned up, even where this is cancelled meanwhile."""
    is_cancelled = False
    for task in tasks:
        task.cancel()
    while left := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(left)
        except asyncio.CancelledError:
            is_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()  # else asyncio reports that nothing looked at it
    if is_cancelled:
        raise asyncio.CancelledError
