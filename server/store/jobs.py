"""Responses that one process makes while nobody waits for them on a connection."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from server.access.limits import MAX_JOBS, MAX_JOBS_OF_ONE

_LOOK = 1.0
"""Seconds between looks at whether some are to be given up."""

Renew = Callable[[str, Sequence[str]], Awaitable[set[str]]]


class Jobs:
    """What is being made here, by the ids of the responses.

    Args:
        renew: notes that responses of an owner are still being made, and returns which are to be
            given up.
        failed: an error of `renew` after which it is tried again.
    """

    def __init__(self, renew: Renew, failed: type[Exception]) -> None:
        self._renew = renew
        self._failed = failed
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self.closing = False
        """Whether what is given up was not asked for by its owner."""

    def is_full_for(self, owner: str) -> bool:
        """Whether an owner may begin no more now."""
        own = sum(owner == each for each, _ in self._tasks.values())
        return self.closing or len(self._tasks) >= MAX_JOBS or own >= MAX_JOBS_OF_ONE

    def begin(self, id_: str, owner: str, making: Coroutine[Any, Any, None]) -> None:
        """Make a response; cancelling what makes it gives it up."""
        task = asyncio.create_task(making, name=f"background {id_}")
        self._tasks[id_] = owner, task
        task.add_done_callback(lambda _: self._tasks.pop(id_, None))
        if self._watch is None:
            self._watch = asyncio.create_task(self._look_after())

    def cancel(self, id_: str) -> None:
        """Give up a response, if it is made here."""
        if id_ in self._tasks:
            self._tasks[id_][1].cancel()

    async def close(self) -> None:
        """Give up all of them."""
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
                    given_up = await self._renew(owner, ids)
                except self._failed:
                    continue
                for id_ in given_up:
                    self.cancel(id_)
