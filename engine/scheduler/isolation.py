"""Isolation of suspects: runs them alone, one at a time, for a number of steps each."""

from collections import deque
from collections.abc import Collection, Container, Iterable

from engine.scheduler.request import Request, RequestStatus


class Isolation:
    """Runs suspects alone, in FIFO order.

    A suspect waits until no steps are in flight; while `is_due`, plans must be empty. From `begin`
    until its steps are done it is `current`, and no other request is planned.
    """

    def __init__(self) -> None:
        self.current: Request | None = None
        """The request that runs alone."""
        self._queue: deque[Request] = deque()
        self._steps_left = 0

    def __len__(self) -> int:
        """Return the number of queued suspects."""
        return len(self._queue)

    @property
    def is_due(self) -> bool:
        """Whether the next suspect is to begin once no step is in flight."""
        return self.current is None and bool(self._queue)

    @property
    def current_id(self) -> int:
        """Id of the request that runs alone; 0 if none does."""
        return 0 if self.current is None else self.current.id

    def push(self, request: Request) -> None:
        """Queue a suspect."""
        self._queue.append(request)

    def begin(self) -> Request:
        """Dequeue the oldest suspect, make it current and return it."""
        self.current = self._queue.popleft()
        self._steps_left = self.current.exclusive_steps
        return self.current

    def landed(self, requests: Iterable[Request], samples: Iterable[bool]) -> None:
        """Record a successful step; a turn ends after `exclusive_steps` steps that sampled."""
        for request, sampled in zip(requests, samples, strict=True):
            if sampled and request is self.current:
                self._steps_left -= 1
                if self._steps_left == 0:
                    self.current = None

    def forget(self, request: Request) -> bool:
        """Remove a request that has ended; return whether it was queued."""
        if request is self.current:
            self.current = None
            return False
        try:
            self._queue.remove(request)
        except ValueError:
            return False
        return True

    # -- filters for planning --------------------------------------------------------------------

    def planned(self, running: Collection[Request]) -> Collection[Request]:
        """Return the running requests to plan: all, or only the isolated one."""
        exclusive = self.current
        if exclusive is None:
            return running
        return [exclusive] if exclusive.status is RequestStatus.RUNNING else []

    def admissible(
        self, waiting: Iterable[Request], compiling: Container[int]
    ) -> Iterable[Request]:
        """Return the waiting requests to admit: all, or only the isolated one."""
        exclusive = self.current
        if exclusive is None:
            return waiting
        ready = exclusive.status is RequestStatus.WAITING and exclusive.id not in compiling
        return [exclusive] if ready else []

    def others(self, running: Collection[Request]) -> Collection[Request]:
        """Return the candidates for preemption: all but the isolated request, or only that."""
        return [each for each in running if each is not self.current] or running
