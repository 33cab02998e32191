"""The order in which waiting requests are admitted.

Lower priority numbers go first; among equals, the tenant with the least work so far
(`engine.scheduler.shares`); within a tenant, first come, first served.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from engine.scheduler.request import Request
from engine.scheduler.shares import Shares


def _arrival(request: Request) -> int:
    return request.arrival


_OrderKey = tuple[float, int, int]
"""Tenant's work counter when last read, arrival of its first request, tenant id."""


class _TenantQueue:
    """Waiting requests of one priority and tenant, in order of arrival.

    Sequences of one client request form a group. Groups are ordered by their first sequences, so
    that whole groups can be skipped.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[Request]] = {}
        self.order: list[tuple[int, int]] = []
        """Arrival of each group's first sequence, and the group id."""

    def __bool__(self) -> bool:
        return bool(self.order)

    def __iter__(self) -> Iterator[Request]:
        started: list[tuple[int, int, int]] = []  # arrival, group, index of the next sequence
        for arrival, group in self.order:
            while started and started[0][0] < arrival:
                yield self._next(started)
            heapq.heappush(started, (arrival, group, 0))
        while started:
            yield self._next(started)

    def _next(self, started: list[tuple[int, int, int]]) -> Request:
        _, group, index = started[0]
        requests = self._groups[group]
        if index + 1 < len(requests):
            heapq.heapreplace(started, (requests[index + 1].arrival, group, index + 1))
        else:
            heapq.heappop(started)
        return requests[index]

    def first(
        self, skipped: Collection[int] = (), adapters: Collection[str] = ()
    ) -> Request | None:
        """Return the first request that is in no `skipped` group and uses none of `adapters`."""
        for _, group in self.order:
            if group not in skipped and (request := self._groups[group][0]).adapter not in adapters:
                return request
        return None

    def add(self, request: Request) -> None:
        requests = self._groups.setdefault(request.group, [])
        if requests and requests[0].arrival > request.arrival:
            self._remove_group(requests[0])
        insort(requests, request, key=_arrival)
        if requests[0] is request:
            insort(self.order, (request.arrival, request.group))

    def remove(self, request: Request) -> None:
        requests = self._groups[request.group]
        index = bisect_left(requests, request.arrival, key=_arrival)
        assert requests[index] is request
        if index == 0:
            self._remove_group(request)
        del requests[index]
        if not requests:
            del self._groups[request.group]
        elif index == 0:
            insort(self.order, (requests[0].arrival, request.group))

    def _remove_group(self, first: Request) -> None:
        del self.order[bisect_left(self.order, (first.arrival, first.group))]


class _PriorityLevel:
    """Waiting requests of one priority.

    Tenants are ordered by their work counters when last read. Since counters only grow, outdated
    entries are found, and moved, when they reach the front.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._queues: dict[int, _TenantQueue] = {}
        self._order: list[_OrderKey] = []
        self._key_of: dict[int, _OrderKey] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[Request]:
        """Yield requests in the order of admission if each were computed in turn."""
        if len(self._queues) == 1:
            for queue in self._queues.values():
                yield from queue
            return
        rests = {tenant: iter(queue) for tenant, queue in self._queues.items()}
        heads = [
            (self._shares.served(tenant), first.arrival, tenant, first)
            for tenant, queue in rests.items()
            for first in [next(queue)]
        ]
        heapq.heapify(heads)
        while heads:
            served, _, tenant, request = heads[0]
            yield request
            successor = next(rests[tenant], None)
            if successor is not None:
                after = served + request.queued_tokens
                heapq.heapreplace(heads, (after, successor.arrival, tenant, successor))
            else:
                heapq.heappop(heads)

    def add(self, request: Request) -> None:
        queue = self._queues.setdefault(request.tenant, _TenantQueue())
        is_new = not queue
        queue.add(request)
        if is_new:
            self._insert(request.tenant)

    def remove(self, request: Request) -> None:
        tenant = request.tenant
        queue = self._queues[tenant]
        queue.remove(request)
        if not queue:
            del self._queues[tenant]
            del self._order[bisect_left(self._order, self._key_of.pop(tenant))]

    def first(
        self, skipped: Collection[int], groups: Collection[int], adapters: Collection[str]
    ) -> Request | None:
        order, index = self._order, 0
        while index < len(order):
            served, _, tenant = order[index]
            if tenant in skipped:
                index += 1
            elif served != self._shares.served(tenant):
                del order[index]
                self._insert(tenant)
            elif (request := self._queues[tenant].first(groups, adapters)) is not None:
                return request
            else:
                index += 1
        return None

    def _insert(self, tenant: int) -> None:
        key = self._shares.served(tenant), self._queues[tenant].order[0][0], tenant
        self._key_of[tenant] = key
        insort(self._order, key)


class WaitingQueue:
    """Requests that wait for a slot.

    All operations take O(log n) comparisons, plus moving pointers.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._levels: dict[int, _PriorityLevel] = {}
        self._priorities: list[int] = []
        self._size = 0
        self.adapters: dict[str, int] = {}
        """Number of waiting requests per adapter."""

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yield requests in the order of admission, as currently known."""
        for priority in self._priorities:
            yield from self._levels[priority]

    def push(self, request: Request) -> None:
        """Queue a new request, or a preempted one at its former place: first of its tenant."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _PriorityLevel(self._shares)
            insort(self._priorities, request.priority)
        level.add(request)
        self._size += 1
        if request.adapter:
            self.adapters[request.adapter] = self.adapters.get(request.adapter, 0) + 1

    def first(
        self,
        skipped: Collection[int] = (),
        groups: Collection[int] = (),
        adapters: Collection[str] = (),
    ) -> Request | None:
        """Return the next request to admit, not of a skipped tenant, group or adapter.

        Requests of higher priority always go first, even while they are skipped.
        """
        if not self._priorities:
            return None
        return self._levels[self._priorities[0]].first(skipped, groups, adapters)

    def remove(self, request: Request) -> None:
        """Remove a request."""
        level = self._levels[request.priority]
        level.remove(request)
        self._size -= 1
        if request.adapter:
            self.adapters[request.adapter] -= 1
            if not self.adapters[request.adapter]:
                del self.adapters[request.adapter]
        if not level:
            del self._levels[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
