"""Turns that tenants take, and threads that they share so, for the work before the engines.

Templates, tokenizing, checks of grammars and the encoding of large answers wait here. `FairQueue`
decides whose turn it is; `FairExecutor` has threads do the work in that order; `FairThreads` is the
executor of a front end's event loop, so that all that `asyncio.to_thread` runs is shared fairly.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Generic, ParamSpec, TypeVar

tenant_id: ContextVar[int] = ContextVar("tenant_id", default=0)
"""Tenant of the request that the current task serves; 0: none in particular."""

P = ParamSpec("P")
T = TypeVar("T")


class QueueFull(Exception):
    """No more work may wait, or no more of this tenant (HTTP 429)."""


class _Line(Generic[T]):
    """What waits for one tenant, and what it has had."""

    def __init__(self, spent: float) -> None:
        self.items: deque[T] = deque()
        self.spent = spent
        """Seconds of work; whoever comes, or comes again, starts with those who wait."""
        self.num_running = 0


class FairQueue(Generic[T]):
    """Items of tenants; the next one is of the tenant that has had the least work.

    A tenant with nothing in the queue and nothing under way is forgotten.
    """

    def __init__(self, max_items: int, max_of_tenant: int) -> None:
        self._max_items = max_items
        self._max_of_tenant = max_of_tenant
        self._lines: dict[Hashable, _Line[T]] = {}
        self._num_items = 0
        self.num_running = 0
        """Items that were taken and are not finished."""

    def __len__(self) -> int:
        return self._num_items

    def push(self, tenant: Hashable, item: T) -> None:
        """Add an item behind those of its tenant.

        Raises:
            QueueFull: the queue, or the tenant's part of it, is full.
        """
        line = self._lines.get(tenant)
        waiting = 0 if line is None else len(line.items)
        if self._num_items >= self._max_items or waiting >= self._max_of_tenant:
            raise QueueFull("Too many requests are being prepared; try again.")
        if line is None:
            least = min((each.spent for each in self._lines.values()), default=0.0)
            line = self._lines[tenant] = _Line(least)
        line.items.append(item)
        self._num_items += 1

    def pop(self, *, only_idle: bool = False) -> tuple[Hashable, T] | None:
        """Return the next item with its tenant; `finish` has to follow.

        `only_idle`: not of a tenant one of whose items is under way.
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
        """Charge a tenant for an item that was under way."""
        line = self._lines[tenant]
        line.spent += seconds
        line.num_running -= 1
        self.num_running -= 1
        if not line.items and not line.num_running:
            del self._lines[tenant]


class FairExecutor:
    """Has threads do the work of tenants; none of these has all threads while others wait."""

    def __init__(
        self,
        start: Callable[..., Any],
        count: int,
        *,
        max_waiting: int = 1024,
        max_of_tenant: int = 512,
    ) -> None:
        """`start` has one of `count` threads call a function; nothing else uses these threads."""
        self._start_thread = start
        self._count = count
        self._queue: FairQueue[Callable[[], None]] = FairQueue(max_waiting, max_of_tenant)
        self._lock = threading.Lock()

    def submit(
        self, tenant: Hashable, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Have a thread call a function when it is the tenant's turn.

        Raises:
            QueueFull: too much waits.
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
        """Begin with what may begin; the last free thread is not for who has one already."""
        while (free := self._count - self._queue.num_running) > 0:
            found = self._queue.pop(only_idle=free == 1 and self._count > 1)
            if found is None:
                return
            self._start_thread(self._work, *found)

    def _work(self, tenant: Hashable, work: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            work()
        finally:
            seconds = time.monotonic() - began
            with self._lock:
                self._queue.finish(tenant, seconds)
                self._start()


class FairThreads(ThreadPoolExecutor):
    """A thread pool that works for the tenants of the submitting tasks in turns.

    It is a `ThreadPoolExecutor` because event loops take no other executor.
    """

    def __init__(self, max_workers: int, name: str) -> None:
        super().__init__(max_workers, name)
        self._fair = FairExecutor(super().submit, max_workers)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Have a thread call a function when it is the tenant's turn.

        Raises:
            QueueFull: too much waits.
        """
        return self._fair.submit(tenant_id.get(), fn, *args, **kwargs)
