"""Responses that one process generates in the background."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from server.limits import MAX_JOBS, MAX_JOBS_OF_ONE

_LOOK = 1.0
"""Seconds between beats."""

Beat = Callable[[str, Sequence[str]], Awaitable[set[str]]]


class Jobs:
    """The responses that are being generated here, by id.

    Args:
        beat: notes that responses of an owner are still being generated, and returns which of
            them are to be cancelled.
        failed: an error of `beat` after which it is tried again.
    """

    def __init__(self, beat: Beat, failed: type[Exception]) -> None:
        self._beat = beat
        self._failed = failed
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self.closing = False
        """Whether the process is shutting down: jobs that end now were not cancelled by their
        owners."""

    def is_full_for(self, owner: str) -> bool:
        """Whether an owner may not begin another one now."""
        own = sum(owner == each for each, _ in self._tasks.values())
        return self.closing or len(self._tasks) >= MAX_JOBS or own >= MAX_JOBS_OF_ONE

    def begin(self, id_: str, owner: str, making: Coroutine[Any, Any, None]) -> None:
        """Generate a response in a task, which is cancelled to cancel the response."""
        task = asyncio.create_task(making, name=f"background {id_}")
        self._tasks[id_] = owner, task
        task.add_done_callback(lambda _: self._tasks.pop(id_, None))
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_after())

    def cancel(self, id_: str) -> None:
        """Cancel a response, if it is generated here."""
        if id_ in self._tasks:
            self._tasks[id_][1].cancel()

    async def close(self) -> None:
        """Cancel all of them."""
        self.closing = True
        tasks = [task for _, task in self._tasks.values()]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK)
            by_owner: dict[str, list[str]] = {}
            for id_, (owner, _) in self._tasks.items():
                by_owner.setdefault(owner, []).append(id_)
            for owner, ids in by_owner.items():
                try:
                    stopped = await self._beat(owner, ids)
                except self._failed:
                    continue
                for id_ in stopped:
                    self.cancel(id_)
