"""Work of a load that runs at the same time: the first error ends the rest, and all of it cleans up."""

from __future__ import annotations

import asyncio
import gc

import pytest

from kvwire.errors import NotFoundError
from kvwire.runtime.tasks import all_of, end_tasks


@pytest.mark.parametrize("cancels", [0, 1, 2])
def test_all_that_was_begun_cleans_up_before_the_caller_goes_on(cancels):
    cleaned = []

    async def work(number):
        try:
            await asyncio.sleep(0.01 if number == 0 and not cancels else 10)
            raise NotFoundError("gone")
        finally:
            await asyncio.sleep(0.1)
            cleaned.append(number)

    async def whole():
        running = asyncio.create_task(all_of([work(0), work(1), work(2)]))
        for _ in range(cancels):
            await asyncio.sleep(0.03)
            running.cancel()
        with pytest.raises(asyncio.CancelledError if cancels else NotFoundError):
            await running
        return sorted(cleaned)

    assert asyncio.run(whole()) == [0, 1, 2]


def test_asyncio_does_not_report_an_error_of_work_that_was_called_off():
    reported = []

    async def fails():
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            raise NotFoundError("gone") from None

    async def whole():
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        late = asyncio.create_task(fails())
        await asyncio.sleep(0.01)
        await end_tasks([late])
        del late
        gc.collect()

    asyncio.run(whole())
    assert not reported
