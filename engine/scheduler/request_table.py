"""States of an engine's requests, the resources held in each, and the transitions."""

import logging
from dataclasses import dataclass

from engine.batch.executor import ExecutorInfo
from engine.batch.grammars import Grammars
from engine.scheduler.adapter_slots import NO_ADAPTER, AdapterSlots
from engine.scheduler.encoder_cache import EncoderCache
from engine.scheduler.fairness import Fairness
from engine.scheduler.isolation import Isolation
from engine.scheduler.kv_cache import KVCacheManager
from engine.scheduler.outputs import Outputs, refused_output, uncompiled_output
from engine.scheduler.refusal import bad_images, refusal
from engine.scheduler.request import NO_SLOT, Request, RequestStatus, request_from_message
from engine.scheduler.speculation import Speculator
from engine.scheduler.waiting import WaitingQueue
from engine.shared.messages import AddRequest, EngineCounters, RequestOutput

MAX_RENEWALS = 4
"""Maximum grammar recompilations per request, each at the cost of a prefill."""
MAX_LATE = 5.0
"""Seconds for which a request resamples a token because its masks are late."""
_LATE = f"the next mask of the grammar was not ready within {MAX_LATE:.0f} s; make it simpler"

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class RequestTable:
    """All unfinished requests: compiling, queued to run alone, waiting, or running.

    Each is in exactly one of these states; tenants' shares and totals are kept consistent. A
    request is queued once its grammar is compiled and the KV blocks of its prompt are fetched. A
    running request has one of the executor's slots. It holds the slot and its KV blocks until no
    plan in flight uses them.
    """

    executor: ExecutorInfo
    max_num_seqs: int
    max_model_len: int
    by_priority: bool
    """Whether requests are ordered by priority."""
    kv: KVCacheManager
    fairness: Fairness
    adapters: AdapterSlots
    encoder: EncoderCache
    grammars: Grammars | None
    speculator: Speculator | None
    counters: EngineCounters

    def __post_init__(self) -> None:
        self.isolation = Isolation()
        self.all: dict[int, Request] = {}
        self.compiling: dict[int, Request] = {}
        """Requests that wait for grammars or KV blocks, not yet queued."""
        self.waiting = WaitingQueue(self.fairness.shares)
        self.running: dict[int, Request] = {}
        """In order of admission."""
        self.queued_tokens = 0
        """Total of `Request.queued_tokens`."""
        self.num_leaving_blocks = 0
        """Blocks of requests that left with rows in flight; they are freed when those are done."""
        self.free_slots = list(range(self.max_num_seqs - 1, -1, -1))
        self._eos_token_ids = frozenset(self.executor.eos_token_ids)
        self._num_arrivals = 0

    @property
    def num_waiting(self) -> int:
        """Requests that do not run, whatever they wait for."""
        return len(self.waiting) + len(self.compiling) + len(self.isolation)

    # -- arrival ---------------------------------------------------------------------------------

    def add(self, message: AddRequest, now: float = 0.0) -> RequestOutput | None:
        """Queue a request; return the output if it is refused or already complete."""
        executor = self.executor
        if message.id in self.all:
            name = message.request_id
            fields = {"request_id": name}
            logger.warning("request %s (%d) arrived twice", name, message.id, extra=fields)
            return None
        reason = refusal(
            message,
            max_model_len=self.max_model_len,
            vocab_size=executor.vocab_size,
            pools=executor.pools,
            in_one_step=executor.in_one_step,
        )
        if reason is None and message.encoder_inputs:
            reason = bad_images(message, executor.vision)
        if reason is None and message.adapter and message.adapter not in self.adapters.held:
            reason = "this engine does not have the adapter that the request names"
        if reason is not None:
            return RequestOutput(message.id, [], finish_reason="error", error=reason)
        request = request_from_message(
            message,
            arrival=self._num_arrivals,
            priority=message.priority if self.by_priority else 0,
            max_model_len=self.max_model_len,
            eos_token_ids=self._eos_token_ids,
            now=now,
        )
        if request.num_tokens >= request.max_total_tokens:
            return RequestOutput(message.id, [], finish_reason="length")
        if message.sampling.grammar is not None and self.grammars is None:
            error = "this engine has no tokenizer for grammars"
            return RequestOutput(message.id, [], finish_reason="error", error=error)
        self.all[request.id] = request
        self.fairness.add(request)
        self.encoder.add(request)
        self.queued_tokens += request.queued_tokens
        if request.exclusive_steps:
            self.isolation.push(request)
            return None
        return self.compile(request)

    def compile(self, request: Request) -> RequestOutput | None:
        """Queue the request as soon as its grammar is compiled and its KV blocks are fetched."""
        self.compiling[request.id] = request
        spec = request.sampling.grammar
        if spec is not None and self.grammars is not None:
            request.grammar = self.grammars.request(spec, request.tenant)
            self.counters.grammar_requests += 1
            self.counters.grammar_waits += not request.grammar.settled
        if not request.lacks_prompt_logprobs:
            request.fetch = self.kv.fetch(request.table, request.token_ids, request.kv_source)
        return self._queue_compiled(request)

    def queue_compiled(self) -> Outputs:
        """Queue the requests whose grammars and KV blocks have become available.

        Return the error outputs of requests whose grammars failed to compile.
        """
        outputs: Outputs = {}
        for request in list(self.compiling.values()):
            answer = self._queue_compiled(request)
            if answer is not None:
                outputs.setdefault(request.front_end, []).append(answer)
        return outputs

    def _queue_compiled(self, request: Request) -> RequestOutput | None:
        """Queue the request if it waits for nothing else; its arrival order is set now."""
        grammar, fetch = request.grammar, request.fetch
        if (grammar is not None and not grammar.settled) or (fetch and not fetch.settled):
            return None
        if grammar is not None and grammar.error is not None:
            self.retire(request)
            return uncompiled_output(request, grammar)
        if not request.num_renewals:
            request.arrival = self._num_arrivals
            self._num_arrivals += 1
        del self.compiling[request.id]
        self.waiting.push(request)
        return None

    def stall(self, request: Request, reason: str | None, now: float) -> RequestOutput | None:
        """Make a request resample its newest token, since its grammar failed for `reason`.

        None: the mask was late. Returns the final error output if retrying does not help.
        """
        if reason is not None:
            return self._renew(request, reason)
        if not self._discard_sample(request):
            return None  # sampled in a step that was in flight
        if request.late_at != request.num_output_tokens:
            request.late_at, request.late_since = request.num_output_tokens, now
        return refused_output(request, _LATE) if now - request.late_since > MAX_LATE else None

    def _renew(self, request: Request, reason: str) -> RequestOutput | None:
        """Discard a request's newest sample, and requeue it once its grammar is recompiled."""
        spec = request.sampling.grammar
        assert self.grammars is not None
        assert spec is not None
        if not self._discard_sample(request) and request.renewed_at == request.num_output_tokens:
            return None  # sampled in a step that was in flight when the grammar failed
        in_vain = request.renewed_at == request.num_output_tokens
        if in_vain or request.num_renewals == MAX_RENEWALS:
            return refused_output(request, reason)
        request.num_renewals += 1
        request.renewed_at = request.num_output_tokens
        request.grammar = self.grammars.request(spec, request.tenant)
        self.waiting.remove(request)
        self.compiling[request.id] = request
        self.counters.grammar_waits += 1
        if request.grammar.settled and request.grammar.error is not None:
            return uncompiled_output(request, request.grammar)
        return self._queue_compiled(request)

    def _discard_sample(self, request: Request) -> bool:
        """Discard the newest sample; return whether the request was running and is requeued."""
        request.num_pending_tokens -= 1
        if request.status is RequestStatus.RUNNING:
            self.preempt(request)
            return True
        self.requeue_tokens(request, -1)
        return False

    # -- transitions -----------------------------------------------------------------------------

    def requeue_tokens(self, request: Request, count: int) -> None:
        """Add `count` (possibly negative) to the tokens to compute of a request."""
        request.queued_tokens += count
        self.queued_tokens += count

    def start(self, request: Request, cached: int) -> None:
        """Assign a slot to a request that has just got its blocks, `cached` tokens in them.

        A slot must be free, and the request's adapter admitted.
        """
        self.waiting.remove(request)
        self.running[request.id] = request
        self.fairness.start(request)
        request.status = RequestStatus.RUNNING
        request.slot = self.free_slots.pop()
        request.adapter_slot = self.adapters.take(request.adapter)
        if request.grammar is not None and self.grammars is not None:
            self.grammars.assign(request.slot, request.grammar)
        request.num_computed_tokens = cached
        self.requeue_tokens(request, -cached)

    def preempt(self, request: Request) -> None:
        """Return a running request to the front of the queue, to be recomputed."""
        self.counters.preemptions += 1
        request.num_preemptions += 1
        request.num_computed_tokens = 0
        self.requeue_tokens(request, request.num_tokens - request.queued_tokens)
        request.status = RequestStatus.WAITING
        del self.running[request.id]
        self.waiting.push(request)
        self._vacate(request)

    def retire(self, request: Request) -> None:
        """Remove a request that finished or was aborted."""
        del self.all[request.id]
        self.requeue_tokens(request, -request.queued_tokens)
        queued = request.exclusive_steps and self.isolation.forget(request)
        was_running = request.status is RequestStatus.RUNNING
        request.status = RequestStatus.FINISHED
        if request.fetch is not None:
            self.kv.discard(request.fetch)
            request.fetch = None
        self.fairness.remove(request)
        self.encoder.remove(request)
        if was_running:
            del self.running[request.id]
            self._vacate(request)
        elif not queued and self.compiling.pop(request.id, None) is None:
            self.waiting.remove(request)

    def _vacate(self, request: Request) -> None:
        """Release the resources of a stopped request; slot and blocks only once it is idle."""
        self.fairness.stop(request)
        self.encoder.stop(request)
        if self.speculator is not None:
            self.speculator.forget(request)
        self.num_leaving_blocks += request.table.num_blocks
        self.release_when_idle(request)

    def release_when_idle(self, request: Request) -> None:
        """Release slot and blocks of a vacated request, unless a plan in flight uses them."""
        if request.num_steps_in_flight or request.slot == NO_SLOT:
            return
        self.num_leaving_blocks -= request.table.num_blocks
        self.kv.free(request.table)
        if request.grammar is not None and self.grammars is not None:
            self.grammars.release(request.slot)
        self.free_slots.append(request.slot)
        request.slot = NO_SLOT
        self.adapters.release(request.adapter)
        request.adapter_slot = NO_ADAPTER

    def check_integrity(self, known: dict[int, Request]) -> None:
        """Raise AssertionError if anything is leaked, wrongly shared or miscounted."""
        requests = list(known.values())
        self.kv.check_integrity([r.table for r in requests])
        holders = [r for r in requests if r.slot != NO_SLOT]
        assert all(r.slot != NO_SLOT or not r.table.num_blocks for r in requests)
        slots = sorted([r.slot for r in holders] + self.free_slots)
        assert slots == list(range(len(slots))), "slots are leaked or shared"
        self.adapters.check_integrity([r.adapter for r in holders])
        leaving = [r for r in holders if r.status is not RequestStatus.RUNNING]
        assert self.num_leaving_blocks == sum(r.table.num_blocks for r in leaving)
        assert all(r.num_steps_in_flight > 0 for r in leaving)
        assert self.queued_tokens == sum(r.queued_tokens for r in requests)
        assert len(self.all) == len(self.running) + self.num_waiting
        self.fairness.check_integrity(list(self.all.values()), list(self.running.values()))
        self.encoder.check_integrity(list(self.all.values()), list(self.running.values()))
        if self.speculator is not None:
            assert self.speculator.lengths.num_tracked <= len(self.running)
