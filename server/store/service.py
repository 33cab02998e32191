"""Asynchronous access to stored responses and conversations."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from engine.shared.fair_threads import FairQueue, QueueFull
from server.limits import MAX_JOBS, MAX_JOBS_OF_ONE, MAX_UNSENT, MAX_UNSENT_OF_ONE
from server.store.records import UNFINISHED, BackendFailed, DiskFull, StoreFull
from server.store.sql import SqlBackend
from server.tenant_budget import TenantBudget

logger = logging.getLogger(__name__)

SILENCE = 15.0
"""Seconds without a heartbeat after which an unfinished response is reported as failed."""
_MAX_WAITING = 1024
"""Maximum calls queued for the store's thread; further ones are refused."""
_MAX_WAITING_OF_ONE = _MAX_WAITING // 2
"""Maximum queued calls per tenant."""
_AT_ONCE = 4
"""Maximum results in memory that callers have not taken yet."""
_MAX_WATCHED = 4096
"""Maximum unfinished responses whose heartbeats are tracked."""
_LOG_INTERVAL = 60.0
"""Minimum seconds between log messages about an unavailable store."""
_BEAT_INTERVAL = 1.0
"""Seconds between heartbeats."""


class Jobs:
    """The responses being generated in this process, by ID."""

    def __init__(self, store: "ResponseStore") -> None:
        self._store = store
        self._tasks: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self._watch: asyncio.Task[None] | None = None
        self.closing = False
        """Whether the process is shutting down: then cancelled jobs were not cancelled by their
        owners."""

    def has_max_jobs(self, owner: str) -> bool:
        """Return whether an owner has reached the limit of jobs."""
        own = sum(owner == each for each, _ in self._tasks.values())
        return self.closing or len(self._tasks) >= MAX_JOBS or own >= MAX_JOBS_OF_ONE

    def begin(self, id_: str, owner: str, making: Coroutine[Any, Any, None]) -> None:
        """Run the generation of a response in a task; cancelling the response cancels it."""
        task = asyncio.create_task(making, name=f"background {id_}")
        self._tasks[id_] = owner, task
        task.add_done_callback(lambda _: self._tasks.pop(id_, None))
        if self._watch is None:
            self._watch = asyncio.create_task(self._maintain_jobs())

    def cancel(self, id_: str) -> None:
        """Cancel a response if it is generated here."""
        if id_ in self._tasks:
            self._tasks[id_][1].cancel()

    async def close(self) -> None:
        """Cancel all jobs."""
        self.closing = True
        tasks = [task for _, task in self._tasks.values()]
        if self._watch is not None:
            tasks.append(self._watch)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _maintain_jobs(self) -> None:
        while True:
            await asyncio.sleep(_BEAT_INTERVAL)
            by_owner: dict[str, list[str]] = {}
            for id_, (owner, _) in self._tasks.items():
                by_owner.setdefault(owner, []).append(id_)
            for owner, ids in by_owner.items():
                try:
                    stopped = await self._store.call(SqlBackend.beat, owner, ids)
                except StoreUnavailable:
                    continue
                for id_ in stopped:
                    self.cancel(id_)


P = ParamSpec("P")
Result = TypeVar("Result")


class StoreUnavailable(Exception):
    """The store is unavailable or overloaded; the message is for the log."""


class ResponseStore:
    """Calls a backend in a single thread, scheduled fairly between tenants."""

    def __init__(self, backend: SqlBackend) -> None:
        self.backend = backend
        self._thread = ThreadPoolExecutor(1, "response store")
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(_MAX_WAITING, _MAX_WAITING_OF_ONE)
        self._beats: dict[str, tuple[int, float]] = {}
        """Newest heartbeat of unfinished responses, and when it was first seen here."""
        self.followers = TenantBudget(MAX_JOBS_OF_ONE, MAX_JOBS)
        """Limits clients that follow background responses."""
        self.unread = TenantBudget(MAX_UNSENT_OF_ONE, MAX_UNSENT)
        """Limits bytes of large events that clients have not read yet."""
        self._log_after = 0.0
        self.jobs = Jobs(self)
        """Responses that this process generates in the background."""

    def close(self) -> None:
        """Close after pending calls have completed."""
        self._thread.shutdown()
        self.backend.close()

    async def call(
        self,
        method: Callable[Concatenate[SqlBackend, str, P], Result],
        tenant: str,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Result:
        """Call a method of the backend on a tenant's records.

        Raises:
            StoreUnavailable: the store is unavailable, or too many calls are queued.
            StoreFull: see the method, which can raise other errors too.
        """
        await self._wait_for_turn(tenant)
        started_at = time.monotonic()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._thread, lambda: method(self.backend, tenant, *args, **kwargs)
            )
        except BackendFailed as error:
            self._log(error)
            raise StoreUnavailable(str(error)) from error
        except StoreFull as error:
            self._log(error)
            raise
        finally:
            self._end_turn(tenant, time.monotonic() - started_at)

    async def maintain(self) -> None:
        """Restore a deleted database file, before a new process creates an empty one."""
        with suppress(StoreUnavailable):
            await self.call(SqlBackend.get, "", "")

    async def _wait_for_turn(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._queue.push(tenant, turn)
        except QueueFull as error:
            raise StoreUnavailable("too many calls are waiting") from error
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted just before the cancellation
                self._end_turn(tenant, 0.0)
            raise

    def _end_turn(self, tenant: str, seconds: float) -> None:
        self._queue.finish(tenant, seconds)
        self._start()

    def _start(self) -> None:
        while self._queue.num_running < _AT_ONCE and (found := self._queue.pop()) is not None:
            tenant, turn = found
            if turn.done():
                self._queue.finish(tenant, 0.0)
            else:
                turn.set_result(None)

    def _log(self, error: Exception) -> None:
        now = time.monotonic()
        if now >= self._log_after:
            self._log_after = now + _LOG_INTERVAL
            what = "full" if isinstance(error, (DiskFull, StoreFull)) else "out of order"
            logger.warning("the response store is %s: %s", what, error)

    def is_abandoned(self, id_: str, status: str, beat: int) -> bool:
        """Return whether the process generating a response has been silent for `SILENCE` seconds.

        This is not stored: the process may only be suspended and finish later.
        """
        if status not in UNFINISHED:
            self._beats.pop(id_, None)
            return False
        now = time.monotonic()
        known, since = self._beats.get(id_, (None, now))
        if known != beat:
            while len(self._beats) >= _MAX_WATCHED:
                del self._beats[next(iter(self._beats))]
            self._beats[id_] = beat, now
            return False
        return now - since > SILENCE
