"""Deduplicated, rate-limited work that runs off the event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

SHARE = 0.25
"""Maximum share of a processor that the work takes, however often it is requested."""


class SharedWork(Generic[Result]):
    """Runs work in a thread, once for all callers that request it meanwhile.

    The next run is delayed so that it takes no more than `SHARE` of the time: frequent callers
    wait, instead of slowing down the streams that this process serves.
    """

    def __init__(self, prepare: Callable[[], Callable[[], Result]]) -> None:
        """`prepare` runs on the event loop and returns the function to run in the thread."""
        self._prepare = prepare
        self._running: asyncio.Task[Result] | None = None
        self._not_before = 0.0

    async def result(self) -> Result:
        """Wait for the result; cancelling one caller does not affect the others.

        Raises:
            Exception: whatever the work raised, to all callers that waited for it.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._do())
            self._running.add_done_callback(self._done)
        return await asyncio.shield(self._running)

    async def _do(self) -> Result:
        early = self._not_before - time.monotonic()
        if early > 0:
            await asyncio.sleep(early)
        work = self._prepare()
        started_at = time.monotonic()
        try:
            return await asyncio.to_thread(work)
        finally:
            ended = time.monotonic()
            self._not_before = ended + (ended - started_at) * (1 / SHARE - 1)

    def _done(self, task: asyncio.Task[Result]) -> None:
        self._running = None
