"""Work of many milliseconds, kept off the event loop."""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")

SHARE = 0.25
"""Of a processor that work may take, however often it is asked for."""


class SharedWork(Generic[Result]):
    """Does work in a thread, once for all who ask for it while it is being done.

    The next time it is done late enough that no more than `SHARE` of the time goes into it: who
    asks again and again waits, and takes little from those whose tokens come through the process.
    """

    def __init__(self, prepare: Callable[[], Callable[[], Result]]) -> None:
        """`prepare` runs on the event loop and returns what runs in the thread."""
        self._prepare = prepare
        self._running: asyncio.Task[Result] | None = None
        self._not_before = 0.0

    async def result(self) -> Result:
        """Wait for and return the result; a caller that is cancelled takes nothing from others.

        Raises:
            Exception: what the work raised, to all who waited for it.
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
        began = time.monotonic()
        try:
            return await asyncio.to_thread(work)
        finally:
            ended = time.monotonic()
            self._not_before = ended + (ended - began) * (1 / SHARE - 1)

    def _done(self, task: asyncio.Task[Result]) -> None:
        self._running = None
