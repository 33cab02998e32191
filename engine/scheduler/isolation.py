"""Suspects, and which of them runs alone: whose turn it is, and until when."""

from collections import deque
from collections.abc import Collection, Container, Iterable

from engine.scheduler.request import Request, RequestStatus


class Isolation:
    """Gives suspects their turns, one after the other.

    A suspect waits until the steps in flight are done: `is_due` asks for empty plans until then.
    From `begin` until its steps are over it is `current`, and no other request is planned.
    """

    def __init__(self) -> None:
        self.current: Request | None = None
        """The request that runs alone."""
        self._queue: deque[Request] = deque()
        self._steps_left = 0

    def __len__(self) -> int:
        """Return how many wait for their turn."""
        return len(self._queue)

    @property
    def is_due(self) -> bool:
        """Whether the next turn is to begin as soon as no step is in flight."""
        return self.current is None and bool(self._queue)

    @property
    def current_id(self) -> int:
        """Id of the request that runs alone; 0 if all run together."""
        return 0 if self.current is None else self.current.id

    def push(self, request: Request) -> None:
        """Queue a suspect."""
        self._queue.append(request)

    def begin(self) -> Request:
        """Begin the turn of the suspect that has waited longest, and return it."""
        self.current = self._queue.popleft()
        self._steps_left = self.current.steps_alone
        return self.current

    def landed(self, requests: Iterable[Request], samples: Iterable[bool]) -> None:
        """A step with these rows has ended well; a turn is over after enough that drew a token."""
        for request, sampled in zip(requests, samples, strict=True):
            if sampled and request is self.current:
                self._steps_left -= 1
                if self._steps_left == 0:
                    self.current = None

    def forget(self, request: Request) -> bool:
        """A request has ended; return whether it waited for its turn."""
        if request is self.current:
            self.current = None
            return False
        try:
            self._queue.remove(request)
        except ValueError:
            return False
        return True

    # -- who may be planned ----------------------------------------------------------------------

    def planned(self, running: Collection[Request]) -> Collection[Request]:
        """Return the running requests that may be planned: all, or the one whose turn it is."""
        alone = self.current
        if alone is None:
            return running
        return [alone] if alone.status is RequestStatus.RUNNING else []

    def admissible(
        self, waiting: Iterable[Request], compiling: Container[int]
    ) -> Iterable[Request]:
        """Return the waiting requests that may be admitted, likewise."""
        alone = self.current
        if alone is None:
            return waiting
        ready = alone.status is RequestStatus.WAITING and alone.id not in compiling
        return [alone] if ready else []

    def others(self, running: Collection[Request]) -> Collection[Request]:
        """Return the running requests to preempt first: all but the one whose turn it is."""
        return [each for each in running if each is not self.current] or running
