"""Work of many milliseconds, kept off the event loop."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SharedWork(Generic[Result]):
    """Does work in a thread, once for all who ask for it while it is being done."""

    def __init__(self, prepare: Callable[[], Callable[[], Result]]) -> None:
        """`prepare` runs on the event loop and returns what runs in the thread."""
        self._prepare = prepare
        self._running: asyncio.Task[Result] | None = None

    async def result(self) -> Result:
        """Wait for and return the result; a caller that is cancelled takes nothing from others.

        Raises:
            Exception: what the work raised, to all who waited for it.
        """
        if self._running is None:
            work = self._prepare()
            self._running = asyncio.create_task(asyncio.to_thread(work))
            self._running.add_done_callback(self._done)
        return await asyncio.shield(self._running)

    def _done(self, task: asyncio.Task[Result]) -> None:
        self._running = None
