"""The order in which waiting requests are admitted."""

from collections import OrderedDict
from typing import Protocol

from engine.scheduler.request import Request


class WaitingQueue(Protocol):
    """Requests that wait for a slot; the scheduler admits `first` or, if it does not fit, none."""

    def __len__(self) -> int: ...

    def push(self, request: Request) -> None:
        """Queue a new request."""
        ...

    def requeue(self, request: Request) -> None:
        """Queue a preempted request again, before all that have not run yet."""
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
