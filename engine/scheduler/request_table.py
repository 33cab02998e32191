"""Where each request of an engine is, what it holds there, and how it gets to another place."""

from engine.batch.grammars import Grammars
from engine.scheduler.adapter_slots import NO_ADAPTER, AdapterSlots
from engine.scheduler.encoder_cache import EncoderCache
from engine.scheduler.fairness import Fairness
from engine.scheduler.isolation import Isolation
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.request import NO_SLOT, Request, RequestStatus
from engine.scheduler.speculation import Speculator
from engine.scheduler.waiting import WaitingQueue
from engine.shared.messages import EngineCounters


class RequestTable:
    """All requests that are not over: compiling, waiting for a turn alone, waiting, or running.

    Each is in one of these places; tenants' shares and totals are kept in step. A request that
    runs has one of the executor's slots. It holds this and its KV blocks until no plan in flight
    uses them any more.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        kv: KVCacheManager,
        fairness: Fairness,
        isolation: Isolation,
        adapters: AdapterSlots,
        encoder: EncoderCache,
        grammars: Grammars | None,
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
        self.num_leaving_blocks = 0
        """Blocks of requests that left but still have rows in flight: free when these end."""
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._kv = kv
        self._fairness = fairness
        self._isolation = isolation
        self._adapters = adapters
        self._encoder = encoder
        self._grammars = grammars
        self._speculator = speculator
        self._counters = counters

    @property
    def num_free_slots(self) -> int:
        """Slots that no request holds."""
        return len(self._free_slots)

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
        """Give a slot to a request that has just got its blocks, `cached` tokens in them.

        A slot has to be free, and the request's adapter admitted.
        """
        self.waiting.remove(request)
        self.running[request.id] = request
        self._fairness.start(request)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.adapter_slot = self._adapters.take(request.adapter)
        if request.grammar is not None and self._grammars is not None:
            self._grammars.assign(request.slot, request.grammar)
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
        if request.fetch is not None:
            self._kv.discard(request.fetch)
            request.fetch = None
        self._fairness.leave(request)
        self._encoder.leave(request)
        if was_running:
            del self.running[request.id]
            self._vacate(request)
        elif not queued and self.compiling.pop(request.id, None) is None:
            self.waiting.remove(request)

    def _vacate(self, request: Request) -> None:
        """Take back what a request that runs no longer holds, slot and blocks when it is idle."""
        self._fairness.stop(request)
        self._encoder.stop(request)
        if self._speculator is not None:
            self._speculator.forget(request)
        self.num_leaving_blocks += request.table.num_blocks
        self.release_when_idle(request)

    def release_when_idle(self, request: Request) -> None:
        """Release slot and blocks of a vacated request unless a plan in flight uses them."""
        if request.num_steps_in_flight or request.slot == NO_SLOT:
            return
        self.num_leaving_blocks -= request.table.num_blocks
        self._kv.free(request.table)
        if request.grammar is not None and self._grammars is not None:
            self._grammars.release(request.slot)
        self._free_slots.append(request.slot)
        request.slot = NO_SLOT
        self._adapters.release(request.adapter)
        request.adapter_slot = NO_ADAPTER

    def check_integrity(self, known: dict[int, Request]) -> None:
        """Compare with all requests there are, those included that plans in flight still hold.

        Raises:
            AssertionError: something is leaked, shared wrongly or counted wrongly.
        """
        requests = list(known.values())
        self._kv.check_integrity([r.table for r in requests])
        holders = [r for r in requests if r.slot != NO_SLOT]
        assert all(r.slot != NO_SLOT or not r.table.num_blocks for r in requests)
        slots = sorted([r.slot for r in holders] + self._free_slots)
        assert slots == list(range(len(slots))), "slots are leaked or shared"
        self._adapters.check_integrity([r.adapter for r in holders])
        leaving = [r for r in holders if r.status is not RequestStatus.RUNNING]
        assert self.num_leaving_blocks == sum(r.table.num_blocks for r in leaving)
        assert all(r.num_steps_in_flight > 0 for r in leaving)
        assert self.queued_tokens == sum(r.queued_tokens for r in requests)
        assert len(self.all) == len(self.running) + self.num_waiting
        self._fairness.check_integrity(list(self.all.values()), list(self.running.values()))
        self._encoder.check_integrity(list(self.all.values()), list(self.running.values()))
        if self._speculator is not None:
            assert self._speculator.num_tracked <= len(self.running)
