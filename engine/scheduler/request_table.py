"""Where each request of an engine is, and how it gets from one place to another."""

from engine.scheduler.encoder_cache import EncoderCache
from engine.scheduler.fairness import Fairness
from engine.scheduler.isolation import Isolation
from engine.scheduler.request import Request, RequestStatus
from engine.scheduler.slots import Slots
from engine.scheduler.speculation import Speculator
from engine.scheduler.waiting import WaitingQueue
from engine.shared.messages import EngineCounters


class RequestTable:
    """All requests that are not over: compiling, waiting for a turn alone, waiting, or running.

    Each is in one of these places; slots, tenants' shares and totals are kept in step.
    """

    def __init__(
        self,
        fairness: Fairness,
        slots: Slots,
        isolation: Isolation,
        encoder: EncoderCache,
        speculator: Speculator | None,
        counters: EngineCounters,
    ) -> None:
        self.all: dict[int, Request] = {}
        self.compiling: dict[int, Request] = {}
        """Wait for their grammars, not in the queue yet."""
        self.waiting = WaitingQueue(fairness.shares)
        self.running: dict[int, Request] = {}
        """In order of admission."""
        self.queued_tokens = 0
        """Tokens to compute of all requests, see `Request.queued_tokens`."""
        self._fairness = fairness
        self._slots = slots
        self._isolation = isolation
        self._encoder = encoder
        self._speculator = speculator
        self._counters = counters

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, whatever they wait for."""
        return len(self.waiting) + len(self.compiling) + len(self._isolation)

    def come(self, request: Request) -> None:
        """A request has come; the caller puts it into its first place."""
        self.all[request.id] = request
        self._fairness.come(request)
        self._encoder.come(request)
        self.queued_tokens += request.queued_tokens

    def queue(self, request: Request) -> None:
        """Nothing is left to be compiled for a request: it waits for a slot."""
        del self.compiling[request.id]
        self.waiting.push(request)

    def planned(self, count: int) -> None:
        """This many tokens of a prefill are computed in the next step."""
        self.queued_tokens -= count

    def requeue_tokens(self, request: Request, count: int) -> None:
        """So many more tokens of a request (fewer, if negative) are to be computed."""
        request.queued_tokens += count
        self.queued_tokens += count

    def start(self, request: Request, cached: int) -> None:
        """Give a slot to a request that has just got its blocks, `cached` tokens in them."""
        self.waiting.remove(request)
        self.running[request.id] = request
        self._fairness.start(request)
        request.status = RequestStatus.RUNNING
        self._slots.take(request)
        request.num_computed_tokens = cached
        self.requeue_tokens(request, -cached)

    def preempt(self, request: Request) -> None:
        """Put a running request back to the front of the queue, to be computed again."""
        self._counters.preemptions += 1
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self.requeue_tokens(request, request.num_tokens - request.queued_tokens)
        request.status = RequestStatus.WAITING
        del self.running[request.id]
        self.waiting.push(request)
        self._vacate(request)

    def recompile(self, request: Request) -> None:
        """A waiting request needs its grammar anew before it may run."""
        self.waiting.remove(request)
        self.compiling[request.id] = request

    def retire(self, request: Request) -> None:
        """Take out a request that finished or was aborted."""
        del self.all[request.id]
        self.requeue_tokens(request, -request.queued_tokens)
        queued = request.steps_alone and self._isolation.forget(request)
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        self._slots.discard_fetch(request)
        self._fairness.leave(request)
        self._encoder.leave(request)
        if was_running:
            del self.running[request.id]
            self._vacate(request)
        elif not queued and self.compiling.pop(request.id, None) is None:
            self.waiting.remove(request)

    def _vacate(self, request: Request) -> None:
        """Take back what a request that runs no longer holds."""
        self._fairness.stop(request)
        self._encoder.stop(request)
        if self._speculator is not None:
            self._speculator.forget(request)
        self._slots.vacate(request)

    def check_integrity(self, known: dict[int, Request]) -> None:
        """Compare with all requests there are, those included that plans in flight still hold.

        Raises:
            AssertionError: something is leaked, shared wrongly or counted wrongly.
        """
        self._slots.check_integrity(known.values())
        assert self.queued_tokens == sum(r.queued_tokens for r in known.values())
        assert len(self.all) == len(self.running) + self.num_waiting
        self._fairness.check_integrity(list(self.all.values()), list(self.running.values()))
        self._encoder.check_integrity(list(self.all.values()), list(self.running.values()))
        if self._speculator is not None:
            assert self._speculator.num_tracked <= len(self.running)
