"""The order in which waiting requests are admitted.

The lowest priority number goes first; among equals, the tenant that has had least of the engine
(`engine.scheduler.fairness`); within a tenant, first come, first served.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

from engine.scheduler.fairness import Shares
from engine.scheduler.request import Request


def _arrival(request: Request) -> int:
    return request.arrival


_Place = tuple[float, int, int]
"""Work done for a tenant when it was last looked at, arrival of a request of it, the tenant."""


class _Level:
    """Waiting requests of one priority.

    Tenants are kept in the order of what they had when they were last looked at. Since that only
    grows, those that had more meanwhile are found, and moved, when they come to the front.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._requests: dict[int, list[Request]] = {}
        self._order: list[_Place] = []
        self._place_of: dict[int, _Place] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests as they would be admitted if all were computed one after another."""
        if len(self._requests) == 1:
            for requests in self._requests.values():
                yield from requests
            return
        heads = [
            (self._shares.served(tenant), requests[0].arrival, tenant, 0)
            for tenant, requests in self._requests.items()
        ]
        heapq.heapify(heads)
        while heads:
            served, _, tenant, index = heads[0]
            requests = self._requests[tenant]
            request = requests[index]
            yield request
            if index + 1 < len(requests):
                follower = requests[index + 1].arrival
                after = served + request.queued_tokens
                heapq.heapreplace(heads, (after, follower, tenant, index + 1))
            else:
                heapq.heappop(heads)

    def add(self, request: Request) -> None:
        requests = self._requests.setdefault(request.tenant, [])
        insort(requests, request, key=_arrival)
        if len(requests) == 1:
            self._place(request.tenant)

    def remove(self, request: Request) -> None:
        tenant = request.tenant
        requests = self._requests[tenant]
        index = bisect_left(requests, request.arrival, key=_arrival)
        assert requests[index] is request
        del requests[index]
        if not requests:
            del self._requests[tenant]
            del self._order[bisect_left(self._order, self._place_of.pop(tenant))]

    def first(self, passed: Collection[int]) -> Request | None:
        order, index = self._order, 0
        while index < len(order):
            served, _, tenant = order[index]
            if tenant in passed:
                index += 1
            elif served != self._shares.served(tenant):
                del order[index]
                self._place(tenant)
            else:
                return self._requests[tenant][0]
        return None

    def _place(self, tenant: int) -> None:
        place = self._shares.served(tenant), self._requests[tenant][0].arrival, tenant
        self._place_of[tenant] = place
        insort(self._order, place)


class WaitingQueue:
    """Requests that wait for a slot.

    Adding, removing and looking take a binary search each and move pointers.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of admission, as far as it is known now."""
        for priority in self._priorities:
            yield from self._levels[priority]

    def push(self, request: Request) -> None:
        """Queue a new request, or a preempted one where it was before: first of its tenant."""
        level = self._levels.get(request.priority)
        if level is None:
            level = self._levels[request.priority] = _Level(self._shares)
            insort(self._priorities, request.priority)
        level.add(request)
        self._size += 1

    def first(self, passed: Collection[int] = ()) -> Request | None:
        """Return the request to admit next, of a tenant that is not passed over.

        Nobody goes before those of higher priority, whether they are passed over or not.
        """
        if not self._priorities:
            return None
        return self._levels[self._priorities[0]].first(passed)

    def remove(self, request: Request) -> None:
        """Take a request out, from wherever it is."""
        level = self._levels[request.priority]
        level.remove(request)
        self._size -= 1
        if not level:
            del self._levels[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
