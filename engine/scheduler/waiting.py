"""The order in which waiting requests are admitted."""

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from engine.scheduler.request import Request, precedence


class WaitingQueue(Protocol):
    """Requests that wait for a slot; the scheduler admits `first` or, if it does not fit, none."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in the order of admission."""
        ...

    def push(self, request: Request) -> None:
        """Queue a new request."""
        ...

    def requeue(self, request: Request) -> None:
        """Queue a preempted request again, before all that came after it."""
        ...

    def first(self) -> Request:
        """Return the request to admit next; the queue must not be empty."""
        ...

    def remove(self, request: Request) -> None:
        """Take a request out, from wherever it is."""
        ...


class FcfsQueue:
    """First come, first served; O(1) everywhere."""

    def __init__(self) -> None:
        self._requests: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def push(self, request: Request) -> None:
        """Queue a new request behind all others."""
        self._requests[request.id] = request

    def requeue(self, request: Request) -> None:
        """Queue a preempted request before all others."""
        self._requests[request.id] = request
        self._requests.move_to_end(request.id, last=False)

    def first(self) -> Request:
        """Return the request that waits at the front."""
        return next(iter(self._requests.values()))

    def remove(self, request: Request) -> None:
        """Take a request out, from wherever it is."""
        del self._requests[request.id]


class PriorityQueue:
    """The lowest priority number first, then first come, first served.

    A sorted list: adding and removing moves pointers only, and the order is there to be read.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def push(self, request: Request) -> None:
        """Queue a new request behind those of its priority."""
        insort(self._requests, request, key=precedence)

    def requeue(self, request: Request) -> None:
        """Queue a preempted request where it was before."""
        insort(self._requests, request, key=precedence)

    def first(self) -> Request:
        """Return the request that goes before all others."""
        return self._requests[0]

    def remove(self, request: Request) -> None:
        """Take a request out, from wherever it is."""
        index = bisect_left(self._requests, precedence(request), key=precedence)
        assert self._requests[index] is request
        del self._requests[index]
