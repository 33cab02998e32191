"""Threads shared fairly between tenants, for the work before requests reach the engines.

Templates, tokenization, grammar checks and encoding of large answers queue here. `FairQueue`
chooses the next tenant; `FairExecutor` runs the work on threads in that order; `FairThreads` is the
executor of a front end's event loop, so that everything in `asyncio.to_thread` is shared fairly.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

tenant_id: ContextVar[int] = ContextVar("tenant_id", default=0)
"""Tenant of the request that the current task serves; 0: none."""

P = ParamSpec("P")
T = TypeVar("T")


class QueueFull(Exception):
    """The queue, or the tenant's share of it, is full (HTTP 429)."""


class _TenantItems(Generic[T]):
    """One tenant's queued items and consumed time."""

    def __init__(self, spent: float) -> None:
        self.items: deque[T] = deque()
        self.spent = spent
        """Seconds of work; a new tenant starts with the minimum of the present tenants."""
        self.num_running = 0


class FairQueue(Generic[T]):
    """A queue per tenant; the next item is from the tenant with the least consumed time.

    A tenant with no queued and no running items is forgotten.
    """

    def __init__(self, max_items: int, max_of_tenant: int) -> None:
        self._max_items = max_items
        self._max_of_tenant = max_of_tenant
        self._lines: dict[Hashable, _TenantItems[T]] = {}
        self._num_items = 0
        self.num_running = 0
        """Items popped but not finished."""

    def __len__(self) -> int:
        return self._num_items

    def push(self, tenant: Hashable, item: T) -> None:
        """Append an item to its tenant's queue.

        Raises:
            QueueFull: the queue, or the tenant's share of it, is full.
        """
        line = self._lines.get(tenant)
        waiting = 0 if line is None else len(line.items)
        if self._num_items >= self._max_items or waiting >= self._max_of_tenant:
            raise QueueFull("Too many requests are being prepared; try again.")
        if line is None:
            least = min((each.spent for each in self._lines.values()), default=0.0)
            line = self._lines[tenant] = _TenantItems(least)
        line.items.append(item)
        self._num_items += 1

    def pop(self, *, only_idle: bool = False) -> tuple[Hashable, T] | None:
        """Return the next item with its tenant, None if there is none; `finish` has to follow.

        `only_idle`: skip tenants that have a running item.
        """
        waiting = [
            (line.spent, tenant)
            for tenant, line in self._lines.items()
            if line.items and not (only_idle and line.num_running)
        ]
        if not waiting:
            return None
        _, tenant = min(waiting, key=lambda each: each[0])
        line = self._lines[tenant]
        line.num_running += 1
        self._num_items -= 1
        self.num_running += 1
        return tenant, line.items.popleft()

    def finish(self, tenant: Hashable, seconds: float) -> None:
        """Charge a tenant for a running item that has ended."""
        line = self._lines[tenant]
        line.spent += seconds
        line.num_running -= 1
        self.num_running -= 1
        if not line.items and not line.num_running:
            del self._lines[tenant]


class FairExecutor:
    """Runs work on threads fairly; no tenant occupies all threads while others wait."""

    def __init__(
        self,
        start: Callable[..., Any],
        count: int,
        *,
        max_waiting: int = 1024,
        max_of_tenant: int = 512,
    ) -> None:
        """`start` submits a call to a pool of `count` threads that has no other user."""
        self._start_thread = start
        self._count = count
        self._queue: FairQueue[Callable[[], None]] = FairQueue(max_waiting, max_of_tenant)
        self._lock = threading.Lock()

    def submit(
        self, tenant: Hashable, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Queue a call for the tenant and return its future.

        Raises:
            QueueFull: the queue, or the tenant's share of it, is full.
        """
        future: Future[T] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._queue.push(tenant, work)
            self._start()
        return future

    def _start(self) -> None:
        """Start queued work; the last free thread is kept for tenants with nothing running."""
        while (free := self._count - self._queue.num_running) > 0:
            found = self._queue.pop(only_idle=free == 1 and self._count > 1)
            if found is None:
                return
            self._start_thread(self._work, *found)

    def _work(self, tenant: Hashable, work: Callable[[], None]) -> None:
        started_at = time.monotonic()
        try:
            work()
        finally:
            seconds = time.monotonic() - started_at
            with self._lock:
                self._queue.finish(tenant, seconds)
                self._start()


class FairThreads(ThreadPoolExecutor):
    """A thread pool shared fairly between the tenants of the submitting tasks.

    It is a `ThreadPoolExecutor` because event loops accept no other executor.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        super().__init__(max_workers, name)
        self._fair = FairExecutor(super().submit, max_workers)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call for the current task's tenant and return its future.

        Raises:
            QueueFull: the queue, or the tenant's share of it, is full.
        """
        return self._fair.submit(tenant_id.get(), fn, *args, **kwargs)
